"""Exported checkpoints have the same logits in transformers, and importing them is exact."""

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pool import Pool
from tests.sharding.test_levels_training import on
from tests.training import EMBEDDED, LAYOUTS, METHODS, RECIPE
from torchtitan_scape.checkpoint.whole import read_model
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.data.corpora import STANDARD_LIBRARY
from torchtitan_scape.export import main
from torchtitan_scape.huggingface import families, folder
from torchtitan_scape.huggingface.folder import atomic_folder, filled
from torchtitan_scape.titan.tokenizer import build_tokenizer
from torchtitan_scape.trainer.specs import whole_model

GPT2 = ["--model.name=gpt2", "--model.flavor=tiny", "--training.seq_len=96", "--data.border=eos"]
FULL = "--checkpoint.no-last-save-model-only"
STEPS = 4
RUNS = {
    "llama": [*EMBEDDED, *METHODS["adams"], *LAYOUTS["2x1"], FULL],
    "gpt2": [*GPT2, *METHODS["adamw"], *LAYOUTS["2x1"]],
    "bf16": [*METHODS["scape-gather-bf16"], *LAYOUTS["1x2"], FULL],
    "diloco": [*METHODS["diloco"], *LAYOUTS["1x2"]],
}


def train(parent: str) -> None:
    """Train all runs and save their last step; the first two have `wq` and `wk` scaled by 8 before."""
    for name, arguments in RUNS.items():
        train_one(Path(parent) / name, [*arguments, f"--training.steps={STEPS}"], name in ("llama", "gpt2"))


def train_one(run: Path, arguments: list[str], sharp: bool) -> None:
    from torchtitan_scape.config.parsing import resolve
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    given = [f"--job.dump_folder={run}", "--checkpoint.enable", f"--validation.freq={STEPS}"]
    resolved = resolve([*RECIPE, *arguments, *given, f"--checkpoint.interval={STEPS}"])
    trainer = ScapeTrainer(resolved.config)
    save = trainer.checkpointer.save

    def sharpened(step: int, last_step: bool = False) -> None:
        """Scale `wq` and `wk`: the attention of initial weights is uniform and hides a wrong order of heads."""
        with torch.no_grad():
            for name, parameter in trainer.model_parts[0].named_parameters():
                if sharp and last_step and name.endswith(("wq.weight", "wk.weight")):
                    parameter.mul_(8)
        save(step, last_step)

    with patch.object(trainer.checkpointer, "save", sharpened), patch("time.sleep"):
        trainer.train()
    with trainer.replica_optimizer.shared_weights():
        shown = {name: whole(p).clone() for name, p in trainer.model_parts[0].named_parameters()}
    trainer.close()
    if dist.get_rank() == 0:
        torch.save(shown, run / "shown.pt")
        resolved.write(str(run))


def whole(parameter: Any) -> Tensor:
    full: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach()


@pytest.fixture(scope="module")
def runs(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each of `RUNS`."""
    parent = tmp_path_factory.mktemp("runs")
    pool2(train, str(parent), timeout=300)
    return parent


@pytest.fixture
def export(runs: Path, tmp_path: Path, capsys: Any) -> Callable[..., tuple[int, str, Path]]:
    """Exports a run; returns (exit code, output, folder)."""

    def export(name: str, *more: str, checkpoint: str = "latest") -> tuple[int, str, Path]:
        output = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        given = ["--config", str(runs / name / "resolved.toml"), "--checkpoint", checkpoint, "--output", str(output)]
        code = main([*given, *more])
        captured = capsys.readouterr()
        return code, captured.out + captured.err, output

    return export


def run_main(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code and the text on stderr."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, err.getvalue()


def tensors(found: Path) -> dict[str, Tensor]:
    return folder.read_folder(found)[1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_of_transformers_agree_and_import_is_exact(name: str, export: Any, runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with patch.object(folder, "MAX_FILE_BYTES", 1_000_000):
        code, output, found = export(name)
    assert code == 0 and "agree to" in output, output
    assert len(list(found.glob("model-*.safetensors"))) > 1 or name == "gpt2"
    config = json.loads((found / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "float32"
    if name == "llama":
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
        assert (config["head_dim"], config["intermediate_size"], config["max_position_embeddings"]) == (32, 384, 64)
    else:
        assert (config["n_positions"], config["vocab_size"], config["tie_word_embeddings"]) == (96, 260, True)
        assert config["bos_token_id"] == config["eos_token_id"] == 1  # The token before every text.
    text = (found / "README.md").read_text()
    assert f"| step | {STEPS} |" in text and "| data | standard_library |" in text and "validation loss" in text
    assert f"| tokens | {STEPS * 2 * 2 * (64 if name == 'llama' else 96):,} |" in text

    back = tmp_path / "back"
    recipe = str(runs / name / "resolved.toml")
    best = ["--config", recipe, "--checkpoint", "best", "--output", str(tmp_path / "best"), "--no-check"]
    assert main(best) == 0 and f"step-{STEPS}" in (tmp_path / "best" / "README.md").read_text()
    assert main(["import", "--config", recipe, "--model", str(found), "--output", str(back)]) == 0
    again = tmp_path / "again"
    assert main(["--config", recipe, "--checkpoint", str(back), "--output", str(again), "--no-check"]) == 0
    first, second = tensors(found), tensors(again)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["bf16", "diloco"])
def test_the_validated_weights_are_exported(name: str, export: Any, runs: Path) -> None:
    shown = torch.load(runs / name / "shown.pt")
    code, output, found = export(name, "--no-check")
    assert code == 0 and "not compared" in output
    ours = shown["tok_embeddings.weight"]
    assert torch.equal(tensors(found)["model.embed_tokens.weight"], ours)
    code, output, found = export(name, "--weights=master", "--no-check")
    if name == "diloco":
        assert code == 2 and "no masters" in output and not found.exists()
    else:
        difference = (tensors(found)["model.embed_tokens.weight"] - ours).abs().max()
        assert 0 < float(difference) < 1e-2


@pytest.mark.slow
def test_three_level_sharding_exports_the_masters(pool4: Pool, tmp_path: Path) -> None:
    """Their checkpoints contain slices of the masters from all ranks; with a raw update weights have the same bits."""
    run, output = tmp_path / "levels", tmp_path / "export"
    run.mkdir()
    pool4(
        train_one,
        run,
        [*METHODS["adamw"], *on(2, 2, update_code="float32"), f"--training.steps={STEPS}"],
        False,
        timeout=300,
    )
    assert main(["--config", str(run / "resolved.toml"), "--output", str(output), "--no-check"]) == 0
    ours, found = torch.load(run / "shown.pt"), tensors(output)
    for theirs, name in (("model.embed_tokens", "tok_embeddings"), ("model.norm", "norm"), ("lm_head", "output")):
        torch.testing.assert_close(found[f"{theirs}.weight"], ours[f"{name}.weight"], rtol=0, atol=0)


def test_the_check_detects_errors(export: Any) -> None:
    pytest.importorskip("transformers")
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    def another(name: str, **changes: Any) -> Any:
        own = families.FAMILIES[name]
        return patch.dict(families.FAMILIES, {name: lambda args, theirs: own(args, theirs) | changes})

    theta = {"rope_theta": 20000.0, "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}
    for name, wrong, word in (
        ("llama", patch.object(Llama3StateDictAdapter, "_permute", lambda self, w, *sizes: w), "logits"),
        ("llama", another("llama3", **theta), "logits"),
        ("gpt2", another("gpt2", tie_word_embeddings=False), "lm_head"),
    ):
        with wrong:
            code, output, found = export(name)
        assert code == 3 and "nothing was written" in output and word in output and not found.exists()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_logits_agree_within_bf16_rounding(name: str, export: Any, runs: Path) -> None:
    """The BF16 logits of both differ by no more than BF16 and FP32 of this project.

    The most likely token differs only where the two best FP32 logits are closer than both can be rounded. How many
    positions that are depends on the weights: initial weights differ between releases of torch.
    """
    transformers = pytest.importorskip("transformers")
    code, output, found = export(name, "--dtype=bfloat16")
    assert code == 0 and "agree to" in output  # The rounded weights, both in FP32.
    config = parse([f"--job.config_file={runs / name / 'resolved.toml'}"])
    spec, args, model = whole_model(config)
    path = runs / name / "checkpoint" / f"step-{STEPS}"
    values = read_model(path, {n: p.shape for n, p in model.named_parameters()}, masters=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(found, dtype=torch.bfloat16)
    text = STANDARD_LIBRARY.data_set("validation")[0]["text"]
    tokens = torch.tensor(build_tokenizer(config).encode(text)[:256]).view(4, 64)
    with torch.no_grad():
        exact, rounded = (
            filled(spec.model_cls, args, {n: v.to(dtype) for n, v in values.items()})(tokens).float()
            for dtype in (torch.float32, torch.bfloat16)
        )
        found16 = theirs(tokens).logits.float()
    assert float((found16 - rounded).norm()) <= float((rounded - exact).norm())
    chosen = exact.gather(-1, found16.argmax(-1, keepdim=True)).squeeze(-1)
    assert float((exact.amax(-1) - chosen).max()) <= 2 * float((rounded - exact).abs().max())


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    """The second one deleted the files of the first, which ended as if its folder were complete."""
    with atomic_folder(tmp_path / "new") as part:
        (part / "config.json").write_text("{}")
        with pytest.raises(ValueError, match="another process writes it"), atomic_folder(tmp_path / "new"):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "config.json"]


def test_wrong_input_is_one_line(export: Any, runs: Path, tmp_path: Path) -> None:
    steps = runs / "llama" / "checkpoint"
    last = steps / f"step-{STEPS}"
    half, other = tmp_path / "half", tmp_path / "study.toml"
    half.mkdir()
    other.write_text((runs / "llama" / "resolved.toml").read_text().replace('"embedded"', '"study"'))
    (tmp_path / "there").mkdir()
    recipe = ["--config", str(runs / "llama" / "resolved.toml")]
    alone = ["--config", str(runs / "diloco" / "resolved.toml")]  # Its checkpoint has no record of the run.
    for given, words in (
        ([*recipe, "--checkpoint", str(steps / "step-2")], ("no checkpoint", f"step-{STEPS}")),
        ([*recipe, "--checkpoint", str(half)], ("half-written",)),
        ([*recipe, "--checkpoint", str(steps)], ("is the folder of all checkpoints; give one", f"step-{STEPS}")),
        ([*recipe, f"--job.dump_folder={half}"], ("latest", "--checkpoint.enable")),
        ([*recipe, "--checkpoint=best", f"--job.dump_folder={half}"], ("best.json",)),
        (
            ["--config", str(other), "--checkpoint", str(last)],
            ("tok_embeddings.weight", "(4096, 128)"),
        ),
        ([*recipe, "--checkpoint", "latest", "--output", str(tmp_path / "there")], ("there exists already",)),
        (["--checkpoint", "latest"], ("--config",)),
        ([*recipe, "--training.seq_len=32"], ("the seq_len 64, the recipe has 32",)),
        ([*alone, "--model.sizes.rope_theta=100"], ("'llama3 study', the recipe has 'llama3 study (rope_theta 100)'",)),
        (["import", *recipe, "--model", str(half)], ("not a Hugging Face model", "config.json")),
    ):
        before = sorted(tmp_path.iterdir())
        code, output = run_main([*given, *([] if "--output" in given else ["--output", str(tmp_path / "new")])])
        assert code == 2 and output.startswith("export: ") and output.count("\n") == 1, output
        assert all(word in output for word in words) and sorted(tmp_path.iterdir()) == before


def test_a_published_gpt2_is_imported(runs: Path, tmp_path: Path) -> None:
    """Old files have keys without "transformer." and masks; their config.json lacks newer keys."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 258, "n_positions": 128, "n_ctx": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    state = {name.removeprefix("transformer."): value for name, value in theirs.state_dict().items()}
    state |= {f"h.{layer}.attn.bias": torch.ones(128, 128).tril().view(1, 1, 128, 128) for layer in range(2)}
    del state["lm_head.weight"]
    published, back, again = (tmp_path / name for name in ("published", "back", "again"))
    published.mkdir()
    save_file({name: value.contiguous() for name, value in state.items()}, published / "model.safetensors")
    described = {"model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, **sizes}
    (published / "config.json").write_text(json.dumps(described))
    recipe = ["--config", str(runs / "gpt2" / "resolved.toml"), "--training.seq_len=128"]
    assert main(["import", *recipe, "--model", str(published), "--output", str(back)]) == 0
    # The export checks the logits against transformers; this compares the exported folder with the imported one.
    assert main([*recipe, "--checkpoint", str(back), "--output", str(again)]) == 0
    tokens = torch.randint(258, (2, 128), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained(again)(tokens).logits
        torch.testing.assert_close(found[..., :258], theirs(tokens).logits)  # Two rows have no token.


def test_another_model_is_not_imported(export: Any, runs: Path, tmp_path: Path) -> None:
    """Theta and the number of heads do not affect shapes."""
    _, _, found = export("llama", "--no-check")
    config = json.loads((found / "config.json").read_text())
    given = ["import", "--config", str(runs / "llama" / "resolved.toml"), "--model", str(found)]
    for change, word in (({"num_attention_heads": 8}, "num_attention_heads"), ({"rope_parameters": None}, "")):
        wrong = config | change | ({"rope_theta": 5e5} if not word else {})
        (found / "config.json").write_text(json.dumps(wrong))
        code, output = run_main([*given, "--output", str(tmp_path / "back")])
        assert code == 2 and (word or "rope_theta = 500000.0") in output, output
    (found / "config.json").write_text(json.dumps(config))
    weights = load_file(found / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, found / "model.safetensors", metadata={"format": "pt"})
    code, output = run_main([*given, "--output", str(tmp_path / "back")])
    assert code == 2 and "the tensor model.norm.weight in" in output and "has 1 of " in output, output
    assert not (tmp_path / "back").exists()

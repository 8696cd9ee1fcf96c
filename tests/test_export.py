"""Exports: transformers make of them what our models do, and what is wrong is seen."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.pool import Pool, attempts
from tests.test_training import EMBEDDED, LAYOUTS, METHODS, RECIPE, train

transformers = pytest.importorskip("transformers")

MODELS = {"gpt2": ["--model.name=gpt2", "--model.flavor=tiny"], "llama": [], "grouped": EMBEDDED}
SAVES = ["--checkpoint.enable", "--checkpoint.interval=4", "--validation.freq=4", "--training.steps=4"]


@pytest.fixture(scope="module")
def runs(pool2: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Folders and arguments of runs of four steps on two shards; the second one keeps weights in BF16."""
    found, rows = {}, []
    for name, model in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        method = ["--sync.scape.weights_dtype=bfloat16"] if name == "llama" else METHODS["adamw"]
        last = [] if name == "grouped" else ["--checkpoint.no-last-save-model-only"]
        rows.append((str(folder), [*model, *method, *LAYOUTS["2x1"], *SAVES, *last]))
        found[name] = folder, [*RECIPE, *rows[-1][1], f"--job.dump_folder={folder}"]
    assert all(good for good, _ in pool2(attempts, train, *rows)[0])
    return found


def source_of(run: tuple[Path, list[str]], scale: float = 1.0, **more: Any) -> Any:
    """scale: of queries and keys; attention that is hardly even shows what mixes them up."""
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.export import find, read

    config = parse(run[1])
    source = read(config, find(config, "latest"), **more)
    for name, value in source.weights.items():
        if name.endswith(("wq.weight", "wk.weight")):
            value.mul_(scale)
    return source


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours(name: str, runs: Any, tmp_path: Path) -> None:
    from torchtitan_scape.export import export

    source = source_of(runs[name], scale=8.0)
    for dtype in ("float32", "bfloat16"):
        told = export(source, tmp_path / dtype, dtype)
        assert "logits differ by" in told and float(told.split("agree on ")[1].rstrip("%")) >= 98.0, told
        config = json.loads((tmp_path / dtype / "config.json").read_text())
        assert config["dtype"] == dtype and {"README.md", "tokenizer.json"} <= {
            p.name for p in (tmp_path / dtype).iterdir()
        }
    assert name == "gpt2" or config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    # As training wrote documents: BOS in front.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "float32")
    ids = tokenizer("def f(x):\n    return x")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(ids[1:]) == "def f(x):\n    return x"


def test_what_is_wrong_is_seen(runs: Any, tmp_path: Path) -> None:
    """A permutation that is left out, another theta, a head that is not the table: the folder does not appear."""
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    from torchtitan_scape import export
    from torchtitan_scape.models.huggingface import CONFIGS

    output = tmp_path / "out"
    llama = source_of(runs["grouped"], scale=8.0)
    gpt2 = source_of(runs["gpt2"], scale=8.0)
    as_it_is = patch.object(Llama3StateDictAdapter, "_permute", lambda self, w, *_: w)

    def other(name: str, **changed: Any) -> Any:
        made = CONFIGS[name]
        return patch.dict(CONFIGS, {name: lambda *args: {**made(*args), **changed}})

    wrong_theta = other("llama3", rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    for source, change in ((llama, as_it_is), (llama, wrong_theta), (gpt2, other("gpt2", tie_word_embeddings=False))):
        with change, pytest.raises(ValueError, match="transformers computes other logits"):
            export.export(source, output)
        assert not output.exists()
    assert "differ by" in export.export(llama, output)


def test_masters_models_alone_and_the_best(runs: Any) -> None:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.export import find

    model, master = source_of(runs["llama"]), source_of(runs["llama"], masters=True)
    for name, value in model.weights.items():
        assert 0 < float((value - master.weights[name]).abs().max()) < 0.01 or value.ndim == 1, name
        assert torch.equal(value.bfloat16().float(), value) or value.ndim == 1, name
    assert model.record["method"] == "scape" and source_of(runs["grouped"]).record == {}
    folder, arguments = runs["gpt2"]
    assert find(parse(arguments), "best") == find(parse(arguments), "latest") == folder / "checkpoint" / "step-4"


def test_a_run_begins_from_an_export(runs: Any, pool2: Pool, tmp_path: Path) -> None:
    """On replicas and on shards; rows that were cut are the mean of the others. Without a rate nothing moves."""
    from torchtitan_scape.export import export

    source, start = source_of(runs["gpt2"]), tmp_path / "start"
    export(source, start, check=False)
    load = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={start}"]
    arguments = [*MODELS["gpt2"], *METHODS["adamw"], *load, "--optimizer.lr=0", "--training.steps=2"]
    rows = [(str(tmp_path / where), [*arguments, *LAYOUTS[where]]) for where in ("1x2", "2x1")]
    (good, one), (also, cut) = pool2(attempts, train, *rows)[0]
    assert good and also, (one, cut)
    table = source.weights["tok_embeddings.weight"]
    table[258:] = table[:258].mean(dim=0)
    flat = torch.cat([value.flatten() for value in source.weights.values()])
    torch.testing.assert_close(one["parameters"], flat, rtol=0, atol=1e-7)
    assert cut["losses"] == pytest.approx(one["losses"], rel=1e-5)


def test_bad_input_ends_in_one_line(runs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchtitan_scape.export import main

    _, arguments = runs["gpt2"]
    recipe, keys = arguments[0].partition("=")[2], arguments[1:]
    (tmp_path / "there").mkdir()
    for more, message in (
        (["--checkpoint=/nowhere"], "there is no folder /nowhere"),
        (
            ["--model.flavor=124M"],
            "is of another model than gpt2 124M: tok_embeddings.weight is (260, 64), and (50304, 768)",
        ),
        (["--weights=master"], "has no masters beside its weights"),
        ([f"--output={tmp_path / 'there'}"], "is there already"),
        ([f"--job.dump_folder={tmp_path}"], "has no finished checkpoint"),
        ([f"--job.dump_folder={tmp_path}", "--checkpoint=best"], "best.json names no checkpoint"),
    ):
        assert main([f"--config={recipe}", f"--output={tmp_path / 'new'}", *keys, *more]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("torchtitan_scape.export: ") and message in error, error
    assert not (tmp_path / "new").exists()

"""Import reads config.json as transformers does, and refuses only models that differ from the recipe's."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training import RECIPE
from torchtitan_scape.checkpoint.whole import read_model
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.export import main
from torchtitan_scape.huggingface.families import FAMILIES, check_same, read
from torchtitan_scape.huggingface.folder import distance, filled
from torchtitan_scape.trainer.specs import whole_model

FAMILY_KEYS = {
    "llama3": ["--model.flavor=study"],
    "gpt2": ["--model.name=gpt2", "--model.flavor=tiny", "--training.seq_len=96", "--data.border=eos"],
}
LLAMA = {
    **{"vocab_size": 260, "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 224, "rms_norm_eps": 1e-5},
}
ROTARY = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def published(folder: Path, **changes: Any) -> Any:
    """Write a Llama of transformers with the shape of the recipe's model, and return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | changes))).eval()
    model.save_pretrained(folder)
    return model


def change(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; an ellipsis removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def run_import(folder: Path, output: Path, family: str = "llama3") -> tuple[int, str]:
    recipe = ["--config", RECIPE[0].partition("=")[2], *RECIPE[1:], *FAMILY_KEYS[family]]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["import", *recipe, "--model", str(folder), "--output", str(output)])
    return code, out.getvalue()


def same_logits(checkpoint: Path, theirs: Any) -> None:
    """Compare the logits of an imported checkpoint with transformers'."""
    spec, args, model = whole_model(parse([*RECIPE, *FAMILY_KEYS["llama3"]]))
    values = read_model(checkpoint, {name: p.shape for name, p in model.named_parameters()}, masters=False)
    tokens = torch.randint(260, (2, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert distance(filled(spec.model_cls, args, values)(tokens), theirs(tokens).logits) < 1e-5


def test_nulls_and_defaults_of_a_llama_are_resolved(tmp_path: Path) -> None:
    model, folder = published(tmp_path / "model"), tmp_path / "model"
    null = {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "rope_parameters": None}
    missing = dict.fromkeys(("hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta"), ...)
    change(folder, **null, **missing)
    code, output = run_import(folder, tmp_path / "imported")
    assert code == 0 and " --model.flavor=study --checkpoint.enable --checkpoint.initial_load_path=" in output, output
    same_logits(tmp_path / "imported", model)
    # The default of rms_norm_eps is 1e-6, and logits would differ by 1e-2.
    change(folder, rms_norm_eps=...)
    code, output = run_import(folder, tmp_path / "other")
    assert code == 2 and output.count("\n") == 1 and not (tmp_path / "other").exists()
    assert "its config.json means rms_norm_eps = 1e-06, but the recipe's model has 1e-05" in output


def test_a_tied_llama_is_imported_as_a_copy(tmp_path: Path) -> None:
    model, folder = published(tmp_path / "model", tie_word_embeddings=True), tmp_path / "model"
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    code, output = run_import(folder, tmp_path / "imported")
    assert code == 0 and output.count("ties its output layer to the embedding") == 1, output
    same_logits(tmp_path / "imported", model)
    # transformers 5 also accepts the output layer alone.
    renamed = {name.replace("model.embed_tokens", "lm_head"): value for name, value in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    assert run_import(folder, tmp_path / "again")[0] == 0
    same_logits(tmp_path / "again", model)
    # Without the key, transformers would initialize the output layer randomly.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, tie_word_embeddings=...)
    code, output = run_import(folder, tmp_path / "random")
    assert code == 2 and "has no lm_head.weight, and tie_word_embeddings is false; set it to true" in output
    both = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, tie_word_embeddings=True)
    code, output = run_import(folder, tmp_path / "both")
    assert code == 2 and "lm_head.weight differs from model.embed_tokens.weight" in output
    assert not (tmp_path / "random").exists() and not (tmp_path / "both").exists()


@pytest.mark.parametrize("kind", ["flex", "varlen"])
def test_a_llama_with_attention_masks_is_exported(kind: str, tmp_path: Path) -> None:
    """The check compared it without masks, which ended in an AssertionError."""
    published(tmp_path / "model")
    assert run_import(tmp_path / "model", tmp_path / "imported")[0] == 0
    sizes = {"dim": 80, "n_layers": 2, "n_heads": 2, "vocab_size": 260, "ffn_dim": 224}
    masked = [f"--model.flavor=debugmodel_{kind}_attn", *(f"--model.sizes.{key}={n}" for key, n in sizes.items())]
    out = io.StringIO()
    given = ["--checkpoint", str(tmp_path / "imported"), "--output", str(tmp_path / "exported")]
    with contextlib.redirect_stdout(out):
        assert main(["--config", RECIPE[0].partition("=")[2], *RECIPE[1:], *masked, *given]) == 0
    assert "agree to" in out.getvalue()


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, '{"model_type": "llama", "rope_scaling": "linear"}', "\xff"])
def test_a_config_that_is_no_table_is_one_line(content: str, tmp_path: Path) -> None:
    published(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_bytes(content.encode("latin1"))
    code, output = run_import(tmp_path / "model", tmp_path / "imported")
    assert code == 2 and output.count("\n") == 1 and str(tmp_path / "model") in output, output


def config_of(family: str) -> dict[str, Any]:
    """Return config.json of an export of the recipe's model."""
    spec, args, model = whole_model(parse([*RECIPE, *FAMILY_KEYS[family]]))
    tensors = spec.state_dict_adapter(args, None).to_hf(dict(model.named_parameters()))
    return FAMILIES[family](args, tensors)


@pytest.mark.parametrize(
    "family, changes",
    [
        *[("gpt2", {"activation_function": name}) for name in ("gelu_pytorch_tanh", "gelu_accurate", None)],
        ("gpt2", {"layer_norm_epsilon": None, "scale_attn_weights": None, "n_inner": None}),
        ("gpt2", {"n_head": ..., "num_attention_heads": 4}),
        ("llama3", {"hidden_act": "swish"}),
        ("llama3", {"rms_norm_eps": 9.999999747378752e-06}),  # FP32 written with the digits of FP64.
        ("llama3", {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 1}}),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", **ROTARY, "factor": 1.0}}),
        ("llama3", {"rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": None}}),
    ],
)
def test_other_spellings_of_the_same_model_are_accepted(family: str, changes: dict[str, Any]) -> None:
    ours = config_of(family)
    theirs = {key: value for key, value in (ours | changes).items() if value is not ...}
    check_same(ours, read(theirs))


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("gpt2", {"activation_function": "gelu"}, "means activation_function = 'gelu'"),
        ("gpt2", {"n_head": None}, "means n_head = 12"),
        ("gpt2", {"n_layer": 1}, "means n_layer = 1"),
        ("llama3", {"num_attention_heads": 4, "num_key_value_heads": None}, "means num_attention_heads = 4"),
        ("llama3", {"num_key_value_heads": 1}, "means num_key_value_heads = 1"),
        ("llama3", {"attention_bias": True}, "means attention_bias = True"),
        ("llama3", {"rms_norm_eps": "1e-5"}, "cannot be read: Validation error for field 'rms_norm_eps'"),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "means rope_type = 'linear'"),
        ("llama3", {"rope_scaling": {"rope_type": "llama3", **ROTARY}}, "means rope_type = 'llama3'"),
        ("llama3", {"rope_parameters": {"rope_theta": 5e5}}, "means rope_theta = 500000.0"),
        ("llama3", {"model_type": "mistral"}, "means model_type = 'mistral'"),
    ],
)
def test_real_differences_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    ours = config_of(family)
    with pytest.raises(ValueError) as caught:
        check_same(ours, read(ours | changes))
    assert message in str(caught.value)


def test_the_scaling_length_of_llama_defaults_to_its_sequence_length() -> None:
    """A missing original_max_position_embeddings is the maximum sequence length of config.json."""
    scaled = {"rope_type": "llama3", **ROTARY}
    ours = config_of("llama3") | {"rope_scaling": scaled, "rope_parameters": None}
    del scaled["original_max_position_embeddings"]
    whole = ours | {"rope_scaling": {**scaled, "original_max_position_embeddings": 8192}}
    check_same(whole, read(ours | {"max_position_embeddings": 8192}))
    with pytest.raises(ValueError, match="original_max_position_embeddings = 2048, but"):
        check_same(whole, read(ours | {"max_position_embeddings": None}))

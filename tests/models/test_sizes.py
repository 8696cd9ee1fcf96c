"""Models with sizes from [model.sizes]: shapes, errors, records, training, resuming and export."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.pool import Pool
from tests.training import RECIPE, train
from torchtitan_scape.config.job_config import Model, ModelSizes
from torchtitan_scape.config.parsing import parse, resolve
from torchtitan_scape.models.llama import LLAMA_ARGS, Llama
from torchtitan_scape.models.registry import with_sizes, workload_of
from torchtitan_scape.runtime.rank_comparison import facts
from torchtitan_scape.trainer.specs import whole_model

SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 260}
KEEP = ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"]
ALONE = ["--parallelism.data_parallel_replicate_degree=1", "--sync.method=dense", "--optimizer.name=AdamW"]


def sized(flavor: str = "custom", name: str = "llama3", **sizes: Any) -> list[str]:
    keys = [f"--model.sizes.{key}={value}" for key, value in sizes.items()]
    return [f"--model.name={name}", f"--model.flavor={flavor}", *keys]


def parameters(*arguments: str) -> int:
    return sum(p.numel() for p in whole_model(parse([*RECIPE, *arguments]))[2].parameters())


def test_a_published_7b_model_is_declared_by_its_sizes() -> None:
    """Llama 2 7B (arXiv:2307.09288) has 6,738,415,616 parameters."""
    seven = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000, "ffn_dim": 11008}
    assert parameters(*sized(**seven)) == 6_738_415_616
    # 11008 is also what TorchTitan's rule gives.
    assert parameters(*sized(**{**seven, "ffn_dim": 0})) == 6_738_415_616


def test_sizes_replace_those_of_a_flavor() -> None:
    config = parse([*RECIPE, *sized("embedded", n_layers=1, n_kv_heads=4, rope_theta=500.0, ffn_dim=100)])
    workload, args = workload_of(config), whole_model(config)[1]
    assert (workload.width, workload.layers, workload.kv_heads, workload.ffn) == (128, 1, 4, 100)
    assert workload.vocab == 4096 and args.rope_theta == 500.0
    assert config.model.title == "llama3 embedded (n_layers 1, n_kv_heads 4, ffn_dim 100, rope_theta 500)"
    assert LLAMA_ARGS["embedded"].n_layers == 6, "the flavor itself is unchanged"
    gpt2 = parse([*RECIPE, *sized("tiny", "gpt2", positions=64)])
    assert workload_of(gpt2).positions == 64


@given(st.integers(2, 400), st.integers(1, 3000))
def test_the_width_of_the_feed_forward_layer_is_exact(half: int, ffn: int) -> None:
    """TorchTitan's rule for the width: 8/3 of dim, times a factor, rounded up to a multiple."""
    model = Model(flavor="study", sizes=ModelSizes(dim=2 * half, n_heads=1, n_kv_heads=1, ffn_dim=ffn))
    args = with_sizes(LLAMA_ARGS["study"], model)
    scaled = int(args.ffn_dim_multiplier * int(2 * 4 * args.dim / 3))
    assert args.multiple_of * math.ceil(scaled / args.multiple_of) == ffn


@pytest.mark.parametrize(
    "arguments, message",
    [
        (sized(dim=64), "[model] flavor = 'custom' needs [model.sizes] n_layers, n_heads, vocab_size; set them"),
        (sized(name="gpt2"), "flavor = 'custom' needs [model.sizes] dim, n_layers, n_heads, vocab_size"),
        (sized(**SMALL | {"n_heads": 5}), "n_heads = 5 is no divisor of dim = 64"),
        (sized(**SMALL | {"n_heads": 100}), "n_heads = 100 is no divisor of dim = 64"),
        (sized(**SMALL, n_kv_heads=3), "n_kv_heads = 3 is no divisor of n_heads = 4"),
        (sized("embedded", n_heads=1), "n_kv_heads = 2 is no divisor of n_heads = 1 (llama3 embedded (n_heads 1))"),
        (sized(**SMALL | {"n_heads": 64}), "a head has 1 entries, and rotary positions need an even number"),
        (sized(**SMALL, positions=8), "[model.sizes] positions = 8: 'llama3' has no such size; delete the key"),
        (sized("tiny", "gpt2", n_kv_heads=2), "[model.sizes] n_kv_heads = 2: 'gpt2' has no such size"),
        (sized("tiny", "gpt2", ffn_dim=8), "[model.sizes] ffn_dim = 8: 'gpt2' has no such size"),
        (sized("tiny", "gpt2", rope_theta=1e4), "[model.sizes] rope_theta = 10000: 'gpt2' has no such size"),
        (sized("tiny", "gpt2", n_heads=7), "n_heads = 7 is no divisor of dim = 64"),
        (sized("tiny", "gpt2", positions=32), "gpt2 tiny has learned positions for 32 tokens"),
        (sized("tiny", "gpt2", dim=-64), "[model.sizes] dim = -64; it must be positive and at most 16777216, or 0"),
        (sized(n_layers=10**6), "[model.sizes] n_layers = 1000000; it must be positive and at most 10000"),
        (sized(dim=2.5), "[model.sizes] dim = '2.5'; it must be an integer"),
    ],
)
def test_sizes_that_make_no_model_are_refused_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        whole_model(parse([*RECIPE, *arguments]))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sizes_are_recorded_and_compared_between_ranks(tmp_path: Path) -> None:
    recipe = tmp_path / "sized.toml"
    recipe.write_text('[model]\nflavor = "custom"\n[model.sizes]\ndim = 64\nn_layers = 2\nn_heads = 4\n')
    resolved = resolve([f"--job.config_file={recipe}", "--model.sizes.vocab_size=260"])
    text = resolved.text()
    assert f"[model.sizes]\ndim = 64  # {recipe}\n" in text and "vocab_size = 260  # command line\n" in text
    other = resolve([f"--job.config_file={recipe}", "--model.sizes.vocab_size=264"])
    ours, theirs = facts(resolved.config), facts(other.config)
    assert [key for key in ours if ours[key] != theirs[key]] == ["model.sizes.vocab_size"]
    recipe.write_text("[model.sizes]\nwidth = 64\n")
    with pytest.raises(ValueError, match=r"sized.toml: \[model.sizes\] width is unknown; .*dim"):
        resolve([f"--job.config_file={recipe}"])


def train_and_resume(folder: str) -> list[str]:
    """Train a model of own sizes, and return the errors of runs with other sizes in the same folder."""
    given = [*ALONE, *KEEP, "--validation.no-enable", "--training.steps=2"]
    own = sized(**SMALL, n_kv_heads=2, ffn_dim=100)
    train(folder, [*given, *own])
    resolve([*RECIPE, *given, *own, f"--job.dump_folder={folder}"]).write(folder)
    errors = []
    for other in (sized(**SMALL, n_kv_heads=2, ffn_dim=96), sized(**SMALL, n_kv_heads=2), sized("study")):
        try:
            train(folder, [*given, *other, "--training.steps=4"])
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_model_of_own_sizes_trains_resumes_and_is_exported(pool1: Pool, tmp_path: Path) -> None:
    from torchtitan_scape.export import main

    (errors,) = pool1(train_and_resume, str(tmp_path / "run"))
    title = "llama3 custom (dim 64, n_layers 2, n_heads 4, n_kv_heads 2, ffn_dim 100, vocab_size 260)"
    assert len(errors) == 3 and all(f"holds the model {title!r}, this run has" in error for error in errors), errors
    given = ["--config", str(tmp_path / "run" / "resolved.toml"), "--output", str(tmp_path / "exported")]
    assert main(given) == 0
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (written["hidden_size"], written["intermediate_size"], written["num_key_value_heads"]) == (64, 100, 2)
    assert f"| model | {title} |" in (tmp_path / "exported" / "README.md").read_text()
    assert main([*given[:-1], str(tmp_path / "other"), "--model.sizes.ffn_dim=96"]) == 2
    assert not (tmp_path / "other").exists()


def test_initial_weights_do_not_depend_on_how_the_sizes_are_given() -> None:
    flavor = LLAMA_ARGS["study"]
    sizes = ModelSizes(dim=80, n_layers=2, n_heads=2, n_kv_heads=2, vocab_size=260, ffn_dim=224)
    model = with_sizes(LLAMA_ARGS["custom"], Model(flavor="custom", sizes=sizes))
    weights = []
    for args in (flavor, model):
        torch.manual_seed(0)
        built = Llama(replace(args, max_seq_len=16))
        built.init_weights()
        weights.append(dict(built.named_parameters()))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

"""Every method with context parallelism and with FP8 matrix multiplications (torchao, emulated on the CPU)."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from tests.marks import slow
from tests.pool import Pool, attempts
from tests.training import LAYOUTS, METHODS, TWELVE, scalars, train
from torchtitan_scape.methods.registry import METHODS as REGISTERED

CONTEXT = [*LAYOUTS["1x2"], "--parallelism.context_parallel_degree=2"]
FLOAT8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"]
GATHERED = [*FLOAT8, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
STEPS = 4
# Of each method: options, and the relative tolerance of the losses under context parallelism. Replicas that are divided
# over ranks select, quantize or factorize each shard by itself; without this, only the order of sums differs.
EXACT, SHARDWISE = 1e-4, 2e-2
CASES = {
    "dense": (METHODS["adams"], EXACT),
    "scape": (METHODS["scape"], SHARDWISE),
    "diloco": (METHODS["diloco"], EXACT),
    "muon": (METHODS["muon"], EXACT),
    "scape-gather": (METHODS["scape-gather"], SHARDWISE),
    "topk": (METHODS["topk"], SHARDWISE),
    "demo": (METHODS["demo"], SHARDWISE),
    "powersgd": (METHODS["powersgd"], SHARDWISE),
    "radius": (METHODS["radius"], SHARDWISE),
    "quantized": (METHODS["quantized"], SHARDWISE),
    "streaming_diloco": (METHODS["streaming"], SHARDWISE),
    "sparta": (METHODS["sparta"], SHARDWISE),
    "sparseloco": (METHODS["sparseloco"], SHARDWISE),
    "co2": (METHODS["co2"], EXACT),
    "noloco": (METHODS["noloco"], EXACT),
    # One bit after three steps of warm-up changes the loss by a tenth with the division of the parameters.
    "onebit_adam": ([*METHODS["onebit"], "--sync.onebit_adam.code=int8"], SHARDWISE),
    "quantized_update": (METHODS["quantized-update"], SHARDWISE),
    "tagc": (["--sync.method=tagc", "--optimizer.name=AdamW"], SHARDWISE),
}
aten = torch.ops.aten


class RingAttention(torch.autograd.Function):
    """PyTorch's ring attention with the CPU's kernels, which its dispatcher does not call."""

    @staticmethod
    def forward(ctx: Any, group: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, logsumexp = ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def kernel(*, grad_out: Tensor, logsumexp: Tensor, is_causal: bool, **tensors: Tensor) -> Any:
            arguments = (*(tensors[name] for name in ("query", "key", "value", "out")), logsumexp, 0.0, is_causal)
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, *arguments)

        q, k, v, out, logsumexp = ctx.saved_tensors
        ring_backward = ring._templated_ring_attention_backward
        grads = ring_backward(ctx.group, 2, kernel, grad, "grad_out", q, k, v, out, logsumexp, is_causal=True)
        return None, *grads


def apply_ring_attention(modules: list[nn.Module], mesh: Any, kind: str) -> None:
    for module in modules:
        module.forward = lambda q, k, v, **_: RingAttention.apply(mesh.get_group(), q, k, v)


def train_on_parts(folder: str, arguments: list[str]) -> dict[str, Any]:
    """Train with context parallelism on a CPU, which the configuration check refuses."""
    with (
        patch("torchtitan.models.llama3.infra.parallelize.apply_cp_to_attention_module", apply_ring_attention),
        patch("torchtitan_scape.models.gpt2.apply_cp_to_attention_module", apply_ring_attention),
        patch("torchtitan_scape.trainer.layout.check_config"),
    ):
        return train(folder, [*arguments, TWELVE], stop_after=STEPS)


def method_of(arguments: list[str]) -> str:
    return next((word.removeprefix("--sync.method=") for word in arguments if "sync.method=" in word), "scape")


def test_every_method_is_tested() -> None:
    assert {method_of(case) for case, _ in CASES.values()} == set(REGISTERED)


def compared(pool2: Pool, pool4: Pool, folder: Path, options: dict[str, list[str]]) -> Any:
    """Return for each case the results of rank 0 without and of all ranks with context parallelism, and summaries."""
    plain, parts = (
        pool(attempts, train_on_parts, *((str(folder / kind / name), [*own, *layout]) for name, own in options.items()))
        for pool, kind, layout in ((pool2, "plain", LAYOUTS["1x2"]), (pool4, "parts", CONTEXT))
    )
    for i, name in enumerate(options):
        (good, one), others = plain[0][i], [rank[i] for rank in parts]
        assert good and all(other[0] for other in others), (name, one, others)
        summaries = (json.loads((folder / kind / name / "summary.json").read_text()) for kind in ("plain", "parts"))
        yield one, [other[1] for other in others], *summaries


@pytest.mark.parametrize("names", [("scape", "diloco"), slow(("dense", *tuple(CASES)[3:8])), slow(tuple(CASES)[8:])])
def test_context_parallelism_gives_the_same_steps(
    names: tuple[str, ...], pool2: Pool, pool4: Pool, tmp_path: Path
) -> None:
    """TorchTitan's validator divides by the tokens of one part of the sequences: the loss was twice as large."""
    found = compared(pool2, pool4, tmp_path, {name: CASES[name][0] for name in names})
    for name, (plain, parts, before, after) in zip(names, found, strict=True):
        for rank in parts:
            assert rank["losses"] == parts[0]["losses"]  # of local updates the norms differ between replicas
            assert rank["losses"] == pytest.approx(plain["losses"], rel=CASES[name][1]), name
        assert parts[0]["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-5)
        assert after["validation_loss"] == pytest.approx(before["validation_loss"], rel=CASES[name][1]), name
        assert after["tokens"] == before["tokens"]


def test_context_parallelism_of_gpt2(pool2: Pool, pool4: Pool, tmp_path: Path) -> None:
    gpt2 = {"gpt2": [*METHODS["adams"], "--model.name=gpt2", "--model.flavor=tiny"]}
    ((plain, parts, before, after),) = compared(pool2, pool4, tmp_path, gpt2)
    assert parts[0]["losses"] == pytest.approx(plain["losses"], rel=EXACT)
    assert after["validation_loss"] == pytest.approx(before["validation_loss"], rel=EXACT)
    # TorchTitan counts the tokens of a sequence on both ranks that share it.
    tags = ("n_tokens_seen", "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss")
    (tokens, *_), (of_parts, mean, largest) = (scalars(tmp_path / k / "gpt2", *tags) for k in ("plain", "parts"))
    assert of_parts == tokens
    assert all(mean[step] < largest[step] < 1.2 * mean[step] for step in mean)


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra `float8`, is not installed")
@pytest.mark.parametrize("names", [("scape", "diloco"), slow(("dense", *tuple(CASES)[3:8])), slow(tuple(CASES)[8:])])
def test_float8_gives_nearly_the_same_steps(names: tuple[str, ...], pool2: Pool, tmp_path: Path) -> None:
    rows = {name: [*CASES[name][0], *LAYOUTS["1x2"]] for name in names}
    calls = ((str(tmp_path / name), [*own, TWELVE], STEPS) for name, own in rows.items())
    coded = ((str(tmp_path / f"{name}-8"), [*own, *FLOAT8, TWELVE], STEPS) for name, own in rows.items())
    ranks = pool2(attempts, train, *calls, *coded)
    for i, name in enumerate(names):
        (good, plain), pair = ranks[0][i], [rank[i + len(names)] for rank in ranks]
        assert good and all(one[0] for one in pair), (name, plain, pair)
        first, second = pair[0][1], pair[1][1]
        assert first["losses"] == second["losses"] != plain["losses"]
        assert first["losses"] == pytest.approx(plain["losses"], rel=5e-3)
        if not REGISTERED[method_of(CASES[name][0])].options.per_replica_weights:
            assert torch.equal(first["parameters"], second["parameters"])


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao, of the extra `float8`, is not installed")
def test_fsdp_gathers_float8(pool2: Pool, tmp_path: Path) -> None:
    """FSDP2's all-gather in FP8 encodes what the matrix multiplication would: the steps are the same.

    A checkpoint has plain tensors, which an export reads without torchao.
    """
    precomputed = [*GATHERED, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"]
    base = [*METHODS["scape"], *LAYOUTS["2x1"], TWELVE, "--checkpoint.enable", "--checkpoint.interval=2"]
    rows = ((str(tmp_path / str(i)), [*base, *more], 3) for i, more in enumerate((FLOAT8, GATHERED, precomputed)))
    for good, run in (results := pool2(attempts, train, *rows)[0]):
        assert good, run
        assert run["losses"] == results[0][1]["losses"] and run["norms"] == results[0][1]["norms"]
    files = [file.read_bytes() for file in tmp_path.glob("*/checkpoint/step-2/*.distcp")]
    assert len(files) == 6 and not any(b"WeightWithDynamicFloat8CastTensor" in content for content in files)

"""Gradients in block codes: equality with a second implementation, bytes, and residuals."""

from collections.abc import Iterator
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

SHAPES = [(37, 9), (5, 4), (11,), (0, 3), (64, 6)]
CHUNK, STEPS = 128, 30
LEVELS = {
    "int8": np.arange(128.0),
    "int4": np.arange(8.0),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    "e3m0": np.array([0, 0.25, 0.5, 1, 2, 4, 8, 16]),
}


def make(collectives: ReplicaCollectives, shapes: Any = SHAPES, **options: Any) -> Quantized:
    collectives.chunk_entries = CHUNK if shapes is SHAPES else collectives.chunk_entries
    named = [(f"p{i}", nn.Parameter(torch.zeros(shape))) for i, shape in enumerate(shapes)]
    optimizer = torch.optim.SGD(named)
    return Quantized(
        MethodContext(collect_shards(optimizer.param_groups), collectives, optimizer), QuantizedOptions(**options)
    )


def gradients(step: int, replica: int, at: list[Tensor]) -> list[Tensor]:
    """Return noisy gradients of a quadratic with a different minimum on every replica."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return [p - replica + torch.randn(p.shape, generator=generator) * (1.0 + i) for i, p in enumerate(at)]


def descend(collectives: ReplicaCollectives, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return (parameters, residuals) after plain gradient descent."""
    method, at = make(collectives, **options), [torch.zeros(prod(shape)) for shape in SHAPES]
    for number in range(1, STEPS + 1):
        own = gradients(number, collectives.replica, at)
        for p, g in zip(at, method.synchronize(own, StepInfo(number, torch.tensor(True))), strict=True):
            p -= 0.05 * g
    return at, [t.clone() for state in method.states() for t in state.tensors.values()]


# ---------------------------------------------------------------------------------------- written down once more


def decoded_values(x: np.ndarray, code: str) -> np.ndarray:
    """Return the decoded block: nearest levels, ties to even, times the scale in BF16, which is rounded up."""
    most = np.abs(x).max()
    if most < 2.0**-100:
        return np.zeros_like(x)
    mantissa, exponent = np.frexp(np.float32(most / np.float32(LEVELS[code][-1])))
    scale = np.float32(np.ldexp(np.ceil(mantissa * 256) / 256, exponent))
    distance = np.abs(np.abs(x / scale).astype(np.float64)[:, None] - LEVELS[code])
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(len(LEVELS[code])) % 2 == 0)
    picked = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
    return (np.sign(x) * LEVELS[code][picked] * scale).astype(np.float32)


def blocks_of(replicas: int, block: int) -> Iterator[tuple[int, slice, int]]:
    """Return (parameter, its entries, their owner) of every block, by chunk, starting with the last parameter."""
    every = [(i, slice(a, min(a + block, prod(s)))) for i, s in enumerate(SHAPES) for a in range(0, prod(s), block)]
    every.sort(key=lambda one: (-one[0], one[1].start))
    per_chunk = max(1, CHUNK // block)
    for first in range(0, len(every), per_chunk):
        chunk = every[first : first + per_chunk]
        each = -(-len(chunk) // replicas)
        for number, (parameter, entries) in enumerate(chunk):
            yield parameter, entries, number // each


def literal(replicas: int, code: str, block: int, feedback: bool) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Return (parameters, residuals of every replica)."""
    at = [np.zeros(prod(shape), np.float32) for shape in SHAPES]
    residuals = [[np.zeros_like(p) for p in at] for _ in range(replicas)]
    for number in range(1, STEPS + 1):
        given = [gradients(number, r, [torch.from_numpy(p) for p in at]) for r in range(replicas)]
        for i, entries, owner in blocks_of(replicas, block):
            total = np.zeros(entries.stop - entries.start, np.float32)
            for g, residual in zip(given, residuals, strict=True):
                x = g[i].numpy()[entries] + (residual[i][entries] if feedback else np.float32(0))
                sent = decoded_values(x, code)
                residual[i][entries] = x - sent
                total += sent
            mean = total / np.float32(replicas)
            result = decoded_values(mean, code)
            residuals[owner][i][entries] += (mean - result) * np.float32(replicas)
            at[i][entries] -= np.float32(0.05) * result
    return at, residuals


def check_follows(found: list[tuple[list[Tensor], list[Tensor]]], code: str, block: int, feedback: bool) -> None:
    parameters, residuals = literal(len(found), code, block, feedback)
    expected = np.concatenate(parameters)
    for replica, (at, own) in enumerate(found):
        assert all(torch.equal(a, b) for a, b in zip(at, found[0][0], strict=True))
        assert np.linalg.norm(torch.cat(at).numpy() - expected) <= 1e-6 * np.linalg.norm(expected)
        assert len(own) == len(SHAPES) * feedback
        for mine, theirs in zip(own, residuals[replica], strict=False):
            np.testing.assert_allclose(mine.view(-1).numpy(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "replicas, code, block, feedback", [(3, "e2m1", 32, True), (2, "int4", 64, False), (4, "e3m0", 32, True)]
)
def test_equals_the_reference_implementation(replicas: int, code: str, block: int, feedback: bool) -> None:
    options = dict(code=code, block=block, error_feedback=feedback)
    check_follows(run_replicas(replicas, lambda c: descend(c, **options)), code, block, feedback)


# ----------------------------------------------------------------------------------------------------- properties


def test_entries_too_small_for_a_scale_stay_in_the_residual() -> None:
    """Entries below the smallest scale stay in the residual; in a block with larger entries only those are sent."""

    def work(collectives: ReplicaCollectives) -> tuple[list[Tensor], list[Tensor]]:
        method = make(collectives, block=32)
        given = [torch.zeros(prod(shape)) for shape in SHAPES]
        given[0] += 1e-42
        given[4][:32], given[4][32:64] = 1e-42, -3.0
        given[4][40] = 1e-42
        result = method.synchronize(given, StepInfo(1, torch.tensor(True)))
        return result, [t.view(-1).clone() for t in method.states()[0].tensors.values()]

    for result, residual in run_replicas(2, work):
        assert not result[0].any() and bool((residual[0] == torch.tensor(1e-42)).all())
        assert not result[1].any() and not residual[1].any()
        assert not result[4][:32].any() and bool((residual[4][:32] == torch.tensor(1e-42)).all())
        rest = result[4][32:64] + residual[4][32:64]
        assert bool((rest[torch.arange(32) != 8] == -3.0).all()) and not result[4][64:].any()


def test_small_parameters_do_not_share_a_scale_with_large_ones() -> None:
    """In a block with a matrix of thousand times larger entries, a norm would be decoded as zeros."""

    def work(collectives: ReplicaCollectives) -> list[Tensor]:
        method = make(collectives, [(16, 10), (10,), (16, 10)], code="int8")
        return method.synchronize(
            [torch.full((160,), 1e3), torch.full((10,), 1e-3), torch.full((160,), 1e3)], StepInfo(1, torch.tensor(True))
        )

    for result in run_replicas(2, work):
        torch.testing.assert_close(result[1], torch.full((10,), 1e-3), rtol=1e-2, atol=0)


def test_a_short_block_has_the_scale_of_its_entries() -> None:
    """With zeros up to the block's length the mean magnitude of five entries would be 5 / 32 of their own."""

    def work(collectives: ReplicaCollectives) -> list[Tensor]:
        method = make(collectives, [(5,), (33,)], code="1bit", block=32)
        signs = [torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]), torch.ones(33)]
        return method.synchronize([2.0 * s for s in signs], StepInfo(1, torch.tensor(True)))

    for result in run_replicas(2, work):
        assert result[0].tolist() == [2.0, -2.0, 2.0, 2.0, -2.0] and result[1].tolist() == [2.0] * 33


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_error_of_an_owner_is_a_state_with_few_bits_only(replicas: int) -> None:
    """A single replica owns nothing that is encoded."""

    def kinds(collectives: ReplicaCollectives) -> dict[str, list[str]]:
        return {code: [s.kind for s in make(collectives, code=code).states()] for code in ("e2m1", "2bit", "1bit")}

    few = ["residual", "owner_error"] if replicas > 1 else ["residual"]
    for found in run_replicas(replicas, kinds):
        assert found == {"e2m1": ["residual"], "2bit": few, "1bit": few}
        memory = QuantizedOptions(code="1bit").held_memory(LocalModel.of_shapes(SHAPES), replicas)
        assert ("owner_error" in memory) == (replicas > 1)


def over_nodes(code: str) -> dict[str, Any]:
    """Descend on two nodes of two ranks; sums within a node are not encoded."""
    layout = plan_layout(4, ranks_per_node=2, machine=get_machine("local"), replicate=4, shard=1)
    collectives = ReplicaCollectives(build_groups(layout, timedelta(seconds=60)))
    method, rank = make(collectives, code=code, block=32), dist.get_rank()
    given = gradients(1, rank, [torch.zeros(prod(shape)) for shape in SHAPES])
    result = method.synchronize([g.clone() for g in given], StepInfo(1, torch.tensor(True)))
    counted = sum(collectives.ledger.sent_by_level().values())
    kinds = [[t.view(-1) for t in state.tensors.values()] for state in method.states()]
    residual = [torch.stack(parts).sum(0) for parts in zip(*kinds, strict=True)]
    return {"given": given, "result": result, "residual": residual, "sent": counted, "planned": method.planned_bytes()}


@pytest.mark.parametrize("code", ["e2m1", "1bit"])
def test_quantization_over_two_nodes_conserves_the_gradients(code: str, pool4: Pool) -> None:
    """With one bit the pending gradients are residuals and errors of owners."""
    ranks = pool4(over_nodes, code)
    for i in range(len(SHAPES)):
        assert all(torch.equal(rank["result"][i], ranks[0]["result"][i]) for rank in ranks)
        total = sum(rank["given"][i].double() - rank["residual"][i].double() for rank in ranks)
        torch.testing.assert_close(total, 4 * ranks[0]["result"][i].double(), rtol=1e-5, atol=1e-5)
    assert all(rank["sent"] == pytest.approx(rank["planned"]) for rank in ranks)

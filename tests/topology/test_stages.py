"""Exchanges level by level, in real gloo processes: equal on all ranks, nothing lost, and counted as they are."""

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import topology.process_groups
from tests.pool import Pool
from topology import stages
from topology.groups import build_groups
from topology.layout import plan_layout
from topology.machines import get_machine
from topology.process_groups import ProcessGroupCollectives

# Four ranks in pairs, in nodes, and both.
THREE = get_machine("frontier")
# Ranks a node, and whether the exchange goes level by level.
SHAPES = {"flat": (4, False), "one": (1, True), "pairs": (4, True), "nodes": (2, True)}


def collectives(shape: str) -> ProcessGroupCollectives:
    ranks_per_node, hierarchical = SHAPES[shape]
    world = dist.get_world_size()
    layout = plan_layout(world, ranks_per_node=ranks_per_node, machine=THREE, replicate=world, shard=1)
    return ProcessGroupCollectives(build_groups(layout, timedelta(seconds=60), hierarchical))


def values(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


def exchange(shape: str, rounded: bool) -> dict[str, Any]:
    """A few all-reduces and gathers in flight at once, each collective seen by a spy."""
    ours, n = collectives(shape), 64
    handed: list[int] = []

    def spied(function: Any, argument: int) -> Any:
        def spy(*args: Any, **kwargs: Any) -> Any:
            handed.append(args[argument].nbytes)
            return function(*args, **kwargs)

        return spy

    gather = spied(stages.all_gather_into, 1)
    spies = [
        patch.object(dist, "all_reduce", spied(dist.all_reduce, 0)),
        patch.object(dist, "all_to_all_single", spied(dist.all_to_all_single, 1)),
        patch.object(stages, "all_gather_into", gather),
        patch.object(topology.process_groups, "all_gather_into", gather),
    ]
    for spy in spies:
        spy.start()
    chunks = [values(10 * i + dist.get_rank(), n) for i in range(3)]
    errors = [torch.full((n,), torch.nan) if rounded else None for _ in chunks]
    handles = [ours.all_reduce(c, error=e) for c, e in zip(chunks, errors, strict=True)]
    gathered = torch.zeros(dist.get_world_size() * 5, dtype=torch.uint8)
    handles.append(ours.all_gather(gathered, torch.full((5,), dist.get_rank(), dtype=torch.uint8)))
    for handle in handles:
        handle.wait()
    for spy in spies:
        spy.stop()
    return {
        "chunks": chunks,
        "errors": errors,
        "gathered": gathered.tolist(),
        "replica": ours.replica,
        "seen": sum(handed),
        "handed": sum(ours.traffic.input_bytes.values()),
        "sent": {level: ours.traffic.sent["replicate", level, "payload"] for level in ("gcd_pair", "node", "network")},
        "masks": {level: ours.traffic.sent["replicate", level, "mask"] for level in ("gcd_pair", "node", "network")},
    }


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_ranks_get_the_same_mean_and_nothing_is_lost(shape: str, rounded: bool, pool4: Pool) -> None:
    check_exchange(pool4(exchange, shape, rounded), rounded)


def scatter(shape: str, rounded: bool) -> dict[str, Any]:
    """A reduce-scatter, and a gather of its result."""
    ours, n = collectives(shape), 64
    x, error = values(dist.get_rank(), n), torch.full((n,), torch.nan) if rounded else None
    ours.reduce_scatter(x, error=error).wait()
    own = x.view(ours.replicas, -1)[ours.replica].clone()
    ours.all_gather(x, own, kind="values").wait()
    kinds = ("payload", "values")
    sent = {
        level: [ours.traffic.sent["replicate", level, kind] for kind in kinds]
        for level in ("gcd_pair", "node", "network")
    }
    planned = ours.scattered_bytes(n, rounded), ours.gathered_bytes(own.nbytes)
    return {"mean": x, "error": error, "sent": sent, "planned": planned}


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_owners_receive_their_part_of_the_mean(shape: str, rounded: bool, pool4: Pool) -> None:
    results = pool4(scatter, shape, rounded)
    total = sum(values(rank, 64).double() for rank in range(4))
    if rounded:  # only what is sent: the sum itself stays FP32
        lost = sum(r["error"].double() for r in results)
        assert 0 < lost.abs().max() < 0.1
        total -= lost
    for result in results:
        assert torch.equal(result["mean"], results[0]["mean"])
        torch.testing.assert_close(result["mean"].double(), total / 4, rtol=0, atol=1e-6)
        assert result["planned"] == tuple(sum(sent) for sent in zip(*result["sent"].values(), strict=True))
        # 64 entries of 4 bytes: a ring of four, or pairs inside and across.
        inside, across = (128, 32 if rounded else 64) if shape in ("nodes", "pairs") else (0, 96 if rounded else 192)
        assert sum(sent[0] for sent in result["sent"].values()) == inside + across
        assert sum(sent[1] for sent in result["sent"].values()) == 192


def test_three_levels() -> None:
    """Eight ranks: pairs, two to a node, two nodes."""
    pool = Pool(8)
    for rounded in (False, True):
        results = pool(exchange, "pairs", rounded)
        check_exchange(results, rounded)
        n = 64 * 3
        sent = {"gcd_pair": n * 2 + n * (1 if rounded else 2), "node": n + n * (0.5 if rounded else 1)}
        for result in results:
            assert result["sent"] == {**sent, "network": n / 2 if rounded else n}
            assert result["masks"] == {"network": 5, "node": 10, "gcd_pair": 20}
            assert result["handed"] == result["seen"]


def check_exchange(results: list[dict[str, Any]], rounded: bool) -> None:
    world = len(results)
    assert sorted(r["replica"] for r in results) == list(range(world))
    order = sorted(range(world), key=lambda rank: results[rank]["replica"])
    for result in results:
        for mine, theirs in zip(result["chunks"], results[0]["chunks"], strict=True):
            assert torch.equal(mine, theirs)
        assert result["gathered"] == [rank for rank in order for _ in range(5)]
    for i, mean in enumerate(results[0]["chunks"]):
        total = sum(values(10 * i + rank, 64).double() for rank in range(world))
        if rounded:
            assert torch.equal(mean, mean.bfloat16().float())
            lost = sum(r["errors"][i].double() for r in results)
            assert 0 < lost.abs().max() < 0.1
            total -= lost
        torch.testing.assert_close(mean.double(), total / world, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_counted_is_what_collectives_were_handed(shape: str, rounded: bool, pool4: Pool) -> None:
    for result in pool4(exchange, shape, rounded):
        assert result["handed"] == result["seen"]


def test_each_byte_crosses_the_network_once_per_node(pool4: Pool) -> None:
    """Two nodes of two: n entries over a node's NIC against 1.5 n of a ring that visits the nodes one by one."""
    n = 3 * 64 * 4
    for result in pool4(exchange, "nodes", False):
        assert result["sent"] == {"gcd_pair": n / 2 + n / 2, "node": 0, "network": n / 2}
        assert result["masks"] == {"gcd_pair": 2 * 5, "node": 0, "network": 5}
    for result in pool4(exchange, "nodes", True):
        assert result["sent"] == {"gcd_pair": n / 2 + n / 4, "node": 0, "network": n / 4}
    for result in pool4(exchange, "pairs", False):  # one node: two levels inside it
        assert result["sent"] == {"gcd_pair": n, "node": n / 2, "network": 0}


def fail_in_a_lane() -> str:
    ours = collectives("nodes")
    with patch.object(stages, "all_gather_into", side_effect=RuntimeError("lost")):
        handle = ours.all_reduce(torch.zeros(8))
        try:
            handle.wait()
        except RuntimeError as error:
            return str(error)
    return "nothing raised"


def test_an_error_in_flight_is_raised_where_it_is_waited_for(pool4: Pool) -> None:
    assert pool4(fail_in_a_lane) == ["lost"] * 4


def reduce_uneven(shape: str) -> list[torch.Tensor]:
    tensors = [values(dist.get_rank(), n) for n in (7, 0, 30, 1)]
    ours = collectives(shape)
    ours.chunk_entries = 16
    ours.all_reduce_chunked(tensors)
    return tensors


@pytest.mark.parametrize("shape", ["nodes", "pairs"])
def test_sizes_that_no_level_divides(shape: str, pool4: Pool) -> None:
    results = pool4(reduce_uneven, shape)
    for i, n in enumerate((7, 0, 30, 1)):
        expected = sum(values(rank, n) for rank in range(4)) / 4
        for result in results:
            torch.testing.assert_close(result[i], expected)
            assert torch.equal(result[i], results[0][i])

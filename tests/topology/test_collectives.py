"""Collectives in gloo processes: chunks, means, levels and byte counts."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups
from torchtitan_scape.topology.layout import plan_layout
from torchtitan_scape.topology.machines import get_machine

SIZES = (7, 0, 1, 30, 4, 16)


def reduce_in_chunks(chunk: int, mean: bool) -> tuple[list[torch.Tensor], int]:
    collectives = ReplicaCollectives(dist.group.WORLD)
    rank = dist.get_rank()
    tensors = [torch.arange(n, dtype=torch.float32) + 100 * i + rank for i, n in enumerate(SIZES)]
    collectives.chunk_entries = chunk
    collectives.all_reduce_chunked(tensors, mean=mean)
    return tensors, collectives.ledger.calls["replicate", "network", "payload"]


@pytest.mark.parametrize("chunk", [1, 5, 16, 58, 1000])
@pytest.mark.parametrize("mean", [True, False])
def test_the_result_does_not_depend_on_the_chunk_size(chunk: int, mean: bool, pool2: Pool) -> None:
    total = sum(SIZES)
    for tensors, calls in pool2(reduce_in_chunks, chunk, mean):
        assert calls == -(-total // chunk)
        for i, tensor in enumerate(tensors):
            both = 2 * (torch.arange(SIZES[i], dtype=torch.float32) + 100 * i) + 1
            assert torch.equal(tensor, both / 2 if mean else both)


def communicate(
    replicate: int, shard: int, ranks_per_node: int, hierarchical: bool = True
) -> tuple[dict, dict, list[int], float]:
    layout = plan_layout(
        4, ranks_per_node=ranks_per_node, machine=get_machine("frontier"), replicate=replicate, shard=shard
    )
    collectives = ReplicaCollectives(build_groups(layout, timedelta(seconds=60), hierarchical))
    rank = dist.get_rank()
    collectives.all_reduce(torch.zeros(100)).wait()
    gathered = torch.zeros(replicate * 16, dtype=torch.uint8)
    collectives.all_gather(gathered, torch.full((16,), rank, dtype=torch.uint8)).wait()
    total = collectives.sum_over_model(torch.tensor(float(1 << rank)))
    assert bool(collectives.minimum_over_all(torch.tensor(True)))
    assert not bool(collectives.minimum_over_all(torch.tensor(rank != 3)))
    assert sorted(collectives.gather_objects(rank)) == [0, 1, 2, 3]
    ledger = collectives.ledger
    return dict(ledger.sent), dict(ledger.input_bytes), gathered[::16].tolist(), float(total)


def test_a_flat_group_over_two_nodes_uses_each_kind_of_link(pool4: Pool) -> None:
    """Two GCDs per node: ranks 0 and 2 send to the other GCD of their package, 1 and 3 over the network."""
    for rank, (sent, given, gathered, _) in enumerate(pool4(communicate, 4, 1, 2, False)):
        level = "gcd_pair" if rank % 2 == 0 else "network"
        payload, mask = ("replicate", level, "payload"), ("replicate", level, "mask")
        assert sent[payload] == 2 * 3 / 4 * 400 and given[payload] == 400
        assert sent[mask] == 3 * 16 and given[mask] == 16
        assert {key[1] for key in sent} == {level}
        assert gathered == [0, 1, 2, 3]


def test_shards_inside_nodes_leave_replicas_on_the_network(pool4: Pool) -> None:
    for rank, (sent, _, gathered, total) in enumerate(pool4(communicate, 2, 2, 2)):
        assert sent["replicate", "network", "payload"] == 400 and sent["shard", "gcd_pair", "norm"] == 4
        assert gathered == [rank % 2, rank % 2 + 2]
        # Added in rank order, over the two ranks of this replica.
        assert total == (3.0 if rank < 2 else 12.0)


def wrong_world() -> None:
    layout = plan_layout(8, ranks_per_node=8, machine=get_machine("frontier"), replicate=8, shard=1)
    build_groups(layout, timedelta(seconds=60))


def test_a_layout_for_another_world_is_refused(pool2: Pool) -> None:
    for good, text in pool2.outcomes(wrong_world):
        assert not good and "the layout is for 8 ranks, but 2 are running" in text

"""Hooks with raw messages equal FSDP2's default; installation of hooks and byte counts."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, RankError
from tests.sharding.toy import Run, make, param_group, train, weights
from torchtitan_scape.sharding.base import entries, param_groups_of
from torchtitan_scape.sharding.options import ShardingOptions

CODED: dict[str, Any] = {"weights_code": "int8", "gradients_code": "int8"}


def equal(one: Run, other: Run) -> bool:
    pairs = zip([*one.gradients, weights(one)], [*other.gradients, weights(other)], strict=True)
    return one.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def raw_is_the_default(ranks_per_node: int) -> None:
    """Two steps of two micro-batches."""
    dense = train(make(ranks_per_node, ShardingOptions()))
    with patch.object(ShardingOptions, "hops_over", lambda *_: 1):
        one_hop = train(make(ranks_per_node, ShardingOptions(**CODED), raw=True))
    assert equal(dense, one_hop)
    if dist.get_world_size() == 2:  # The order of a sum of two terms does not matter.
        plain = make(ranks_per_node, ShardingOptions())
        restore_default_collectives(plain)
        assert equal(train(plain), dense)
    nodes = dist.get_world_size() // ranks_per_node
    if nodes > 1:
        kept = train(make(ranks_per_node, ShardingOptions(secondary=True), raw=True))
        assert equal(dense, kept)
        # In a ring, only the last rank of a node has a successor in another node.
        ours, theirs = (float(run.sent.get(("network", "weights"), 0.0)) for run in (kept, dense))
        assert theirs == 0.0 or ours < theirs
    if nodes > 1 and ranks_per_node > 1:
        two_hops = train(make(ranks_per_node, ShardingOptions(**CODED), raw=True))
        assert two_hops.losses[0] == dense.losses[0]
        for a, b in zip(two_hops.gradients, dense.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def restore_default_collectives(run: Run) -> None:
    """Restore FSDP2's own collectives on every group."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    for flat in param_groups_of(run.model):
        group = param_group(flat.modules[0])
        group._all_gather_comm, group._reduce_scatter_comm = DefaultAllGather(), DefaultReduceScatter()


@pytest.mark.parametrize("world, ranks_per_node", [(2, 2), (3, 1), (4, 2)])
def test_raw_messages_are_the_default(world: int, ranks_per_node: int) -> None:
    Pool(world)(raw_is_the_default, ranks_per_node)


def groups_and_refusals() -> None:
    run = make(2, ShardingOptions(**CODED))
    flats = param_groups_of(run.model)
    assert [flat.name for flat in flats] == ["embedding", "layers.0", "layers.1", "norm+output"]
    assert [flat.number for flat in flats] == [0, 1, 2, 3]
    block = flats[1]
    names = ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "gate.weight"]
    assert {s.name for s in block.reduced} == {f"layers.0.{name}" for name in names}
    assert {s.name for s in block.gathered} - {s.name for s in block.reduced} == {"layers.0.unused"}
    ends = [segment.start + segment.size for segment in block.gathered]
    assert [segment.start for segment in block.gathered] == [0, *ends[:-1]] and ends[-1] == entries(block.gathered)
    # Each group has one hook of a kind, although [norm, output] are two modules.
    shared = {id(param_group(module)._all_gather_comm) for module in flats[3].modules}
    assert len(flats[3].modules) == 2 and len(shared) == 1

    reduce, gather = (
        getattr(param_group(block.modules[0]), f"_{kind}_comm") for kind in ("reduce_scatter", "all_gather")
    )
    group, row = dist.group.WORLD, entries(block.reduced)
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (reduce, (torch.zeros(row), torch.zeros(2 * row), group, dist.ReduceOp.AVG), "has op"),
        (reduce, (torch.zeros(row - 1), torch.zeros(2 * row - 2), group, dist.ReduceOp.SUM), "did not use"),
        (gather, (torch.zeros(8), torch.zeros(4), group), "entries"),
    ]
    for hook, arguments, message in cases:
        with pytest.raises(RuntimeError, match=rf"layers\.0 .*{message}"):
            hook(*arguments)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(RuntimeError, match="over 1 ranks; expected 2"):
        gather(torch.zeros(8), torch.zeros(8), alone)


def test_groups_are_identified_and_mismatches_refused(pool2: Pool) -> None:
    pool2(groups_and_refusals)


def parameter_left_out() -> None:
    """Train with a gate that no micro-batch uses."""
    run = make(2, ShardingOptions(**CODED))
    for layer in run.model.layers:
        layer.gate.forward = lambda h: h[..., :1]  # type: ignore[method-assign]
    if hasattr(run.model, "set_reduce_scatter_unused_params"):
        train(run, steps=1)
        run.model.set_reduce_scatter_unused_params(False)
    train(run, steps=1)


def test_a_parameter_without_gradient_is_named(pool2: Pool) -> None:
    """Where torch supports it, the parameter stays in the flat buffer as zeros; else the error names its group."""
    with pytest.raises(RankError, match=r"reduce-scatter of layers\.1 .*gate\.weight"):
        pool2(parameter_left_out)


def dense_is_counted() -> None:
    run, rank = make(2, ShardingOptions()), dist.get_rank()
    train(run, steps=1)
    ring = "node" if rank % 2 == 0 else "network"
    flats = param_groups_of(run.model)
    gathered, reduced = (sum(4 * entries(getattr(f, kind)) for f in flats) for kind in ("gathered", "reduced"))
    again = sum(4 * entries(flat.gathered) for flat in flats[:3])  # the last group is not resharded
    assert run.sent == {
        (ring, "weights"): 2 * 3 * (gathered + again),
        ("node", "gradients"): 2 * reduced,
        ("network", "gradients"): 2 * 2 * reduced,
    }
    with run.sharding.uncounted(), torch.no_grad():
        run.model(torch.zeros(1, 2, dtype=torch.int64))
    assert run.sent[ring, "weights"] == 2 * 3 * (gathered + again)


def test_dense_collectives_are_counted_except_in_validation(pool4: Pool) -> None:
    pool4(dense_is_counted)

"""TAGC as FSDP2's reduce-scatter: messages, residuals, results for the owners, and refused options."""

from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.kernels.tagc.test_reference import in_rank_order
from tests.pool import Pool
from tests.sharding.toy import Run, layout_of, make, train, weights
from torchtitan_scape.core.parameters import collect_shards, local
from torchtitan_scape.kernels.tagc.formats import BITMAP, capacity, index_bytes
from torchtitan_scape.sharding.base import ParameterSlice, ShardedParamGroup, TrainPosition, entries
from torchtitan_scape.sharding.options import ShardingOptions
from torchtitan_scape.sharding.tagc import TagcReduce
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology.groups import build_shard_groups
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger
from torchtitan_scape.topology.traffic import SHARD, TrafficLedger

RANKS, STEPS = 3, 3
# A row of two compressed parameters, one of them with a short block, and two uncompressed ones: attention, a norm.
ROW = (
    ParameterSlice("layers.0.feed_forward.w1.weight", 0, 1500, 2),
    ParameterSlice("layers.0.attention.wq.weight", 1500, 300, 2),
    ParameterSlice("layers.0.ffn_norm.weight", 1800, 5, 1),
    ParameterSlice("layers.0.feed_forward.w2.weight", 1805, 90, 2),
)
COMPRESSED = torch.cat([torch.arange(s.start, s.start + s.size) for s in ROW if "feed" in s.name])
RESIDUAL_INDEX = torch.cat([torch.arange(1500), 2048 + torch.arange(90)])  # Their indices in a row of the residual.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "bits": {"sparsity": 0.5},
    "all": {"sparsity": 0.0},
}


@cache
def rank_group() -> RankGroup:
    (found,) = build_shard_groups(layout_of(RANKS), timedelta(seconds=60), reduce_hops=1).reductions
    return found


def reduction(traffic: TrafficLedger, position: TrainPosition, **options: Any) -> TagcReduce:
    section = TagcShardingOptions(**{"min_entries": 1, **options})
    flat, ledger = ShardedParamGroup("layers.0", 0, ROW, ROW, ()), ShardLedger(traffic)
    return TagcReduce(flat, rank_group(), section, ledger, position, "torch", torch.device("cpu"))


def flats(step: int, number: int, rank: int) -> Tensor:
    """Return the flat buffer of a micro-batch, (S, m)."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(RANKS, entries(ROW), generator=generator)


def bytes_sent(hook: TagcReduce) -> dict[str, float]:
    """Return the bytes that a rank sends per exchange, by kind, in closed form."""
    options, raw = hook._options, sum(s.size for s in hook._raw)
    if hook._sends_offsets:
        index = (RANKS - 1) * index_bytes(options.density, RANKS * hook.blocks)
    else:
        index = 2 * (RANKS - 1) * hook.blocks * BITMAP
    values = hook.blocks * capacity(options.density, RANKS)
    return {"index": float(index), "gradients": 4.0 * (RANKS - 1) * (values + -(-raw // 4) * 4)}


def play(micro_batches: int, nan_at: int = 0, whole_at: int = 0, **options: Any) -> dict[str, Any]:
    """Return this rank's inputs, its residuals before and after, and its outputs, by step, and its bytes.

    Args:
        nan_at: Step with a NaN on rank 1.
        whole_at: Step with a full exchange.
    """
    traffic, position, rank = TrafficLedger(), TrainPosition(), dist.get_rank()
    hook = reduction(traffic, position, **options)
    found: dict[str, Any] = {"given": [], "before": [], "after": [], "out": []}
    for step in range(1, STEPS + 1):
        found["before"].append(hook.residual.clone())
        given, out = torch.zeros(RANKS, entries(ROW)), torch.zeros(entries(ROW))
        if step == whole_at:
            hook.request_full_exchange()
        for number in range(micro_batches):
            position.micro_batch, position.last = number, number + 1 == micro_batches
            flat, row = flats(step, number, rank), torch.empty(entries(ROW))
            if step == nan_at and rank == 1:
                flat[2, 7] = torch.nan
            hook(output_tensor=row, input_tensor=flat.view(-1), group=dist.group.WORLD, op=dist.ReduceOp.SUM)
            given += flat
            out += row
        applied = out.isfinite().all().float()
        dist.all_reduce(applied, dist.ReduceOp.MIN)
        hook.after_optimizer_step(applied.bool())
        found["given"].append(given)
        found["after"].append(hook.residual.clone())
        found["out"].append(out)
    found["sum"] = hook.decode_and_sum()
    found["planned"] = {kind: STEPS * sent for kind, sent in bytes_sent(hook).items()}
    found["sent"] = {kind: sent for (axis, _, kind), sent in traffic.sent.items() if axis == SHARD}
    return found


def play_all() -> dict[str, dict[str, Any]]:
    found = {name: play(1, **options) for name, options in CASES.items()}
    found |= {"default of 4": play(4), "nan": play(1, nan_at=2)}
    found |= {"whole": play(1, whole_at=2), "whole, skipped": play(1, nan_at=2, whole_at=2)}
    return found | {"whole of 4": play(4, whole_at=2)}


@cache
def played() -> list[dict[str, dict[str, Any]]]:
    """Return the results by rank and case."""
    return Pool(RANKS)(play_all)


@pytest.mark.parametrize("name", CASES)
def test_sent_values_and_residuals_add_up_to_the_input(name: str) -> None:
    """Sent values and residual add up to the input on every rank, bitwise. The owner receives the sum of the sent
    values and of the uncompressed parameters.
    """
    whole = torch.ones(entries(ROW), dtype=torch.bool).index_fill(0, COMPRESSED, False)
    for step in range(STEPS):
        sent = []
        for rank in played():
            one = rank[name]
            v = one["before"][step].clone()
            v[:, RESIDUAL_INDEX] += one["given"][step][:, COMPRESSED]
            after = one["after"][step]
            assert ((after == v) | (after == 0)).all()
            sent.append(torch.where(after == 0, v, 0.0)[:, RESIDUAL_INDEX])
        for owner, rank in enumerate(played()):
            out = rank[name]["out"][step]
            dense = in_rank_order([other[name]["given"][step][owner] for other in played()])
            assert torch.equal(out[whole], dense[whole])
            expected = in_rank_order([rows[owner] for rows in sent])
            assert torch.equal(out[COMPRESSED], expected)
            assert name == "all" or 0 < (out[COMPRESSED] != 0).float().mean() < 0.95
            assert name != "all" or torch.equal(out, dense)


def test_bytes_are_the_closed_form() -> None:
    for rank in played():
        assert all(one["sent"] == one["planned"] for name, one in rank.items() if "whole" not in name)
        blocks, raw = 3, 305
        # To each of two other ranks: offsets of 9 blocks, 67 bytes each, and 5 bytes of padding; 306 of 1024 entries
        # and the uncompressed ones, both padded to a multiple of four.
        expected = {"index": 2 * (9 * 67.0 + 5), "gradients": 2 * 4.0 * (blocks * 308 + raw + 3)}
        assert rank["default"]["sent"] == {kind: STEPS * sent for kind, sent in expected.items()}
        assert rank["bits"]["sent"]["index"] == STEPS * 2 * 2 * blocks * 128.0


def test_the_last_micro_batch_sends_the_sum_of_all() -> None:
    """The result equals one micro-batch with the sum, up to rounding."""
    for rank in played():
        four = rank["default of 4"]
        v = torch.zeros(RANKS, 3072)
        v[:, RESIDUAL_INDEX] = four["given"][0][:, COMPRESSED]
        after = four["after"][0]
        kept = after != 0
        torch.testing.assert_close(after[kept], v[kept], rtol=1e-5, atol=1e-5)
        assert 0.6 < kept[:, RESIDUAL_INDEX].float().mean() < 0.8
        assert rank["default"]["sent"] == four["sent"]


def test_nonfinite_values_reach_the_owner_and_no_residual() -> None:
    for number, rank in enumerate(played()):
        one = rank["nan"]
        assert [bool(out.isfinite().all()) for out in one["out"]] == [True, number != 2, True]
        assert all(residual.isfinite().all() for residual in one["after"])
        same = [torch.equal(one["before"][1][row], one["after"][1][row]) for row in range(RANKS)]
        assert same == [False, False, number == 1]


def test_checkpoints_contain_the_sum_of_residuals() -> None:
    for owner, rank in enumerate(played()):
        kept = [other["default"]["after"][-1][owner] for other in played()]
        assert torch.equal(rank["default"]["sum"], in_rank_order(kept))
        assert rank["default"]["sent"] == rank["default"]["planned"]  # Not counted.


def test_a_full_exchange_leaves_no_residual() -> None:
    for rank in played():
        after = rank["whole"]["after"]
        assert after[0].any() and not after[1].any() and after[2].any()
        assert not rank["whole of 4"]["after"][1].any()


def test_a_full_exchange_of_a_skipped_step_is_repeated() -> None:
    """The residual keeps its values and the finite rows of the gradients; the next step sends all of it, bitwise."""
    sent = []
    for rank in played():
        one = rank["whole, skipped"]
        v = one["before"][1].clone()
        for row, gradients in zip(v, one["given"][1][:, COMPRESSED], strict=True):
            row[RESIDUAL_INDEX] += gradients if gradients.isfinite().all() else 0.0
        assert torch.equal(one["after"][1], v) and not one["after"][2].any()
        sent.append(v[:, RESIDUAL_INDEX] + one["given"][2][:, COMPRESSED])
    for owner, rank in enumerate(played()):
        expected = in_rank_order([rows[owner] for rows in sent])
        assert torch.equal(rank["whole, skipped"]["out"][2][COMPRESSED], expected)


def in_training() -> None:
    """Sending all entries of one micro-batch is bitwise equal to FSDP2's default; sending few of them is close."""
    for sparsity, micro_batches in ((0.0, 1), (0.0, 2), (0.5, 2)):
        dense = train(make(2, ShardingOptions()), steps=3, micro_batches=micro_batches)
        section = TagcShardingOptions(sparsity=sparsity, min_entries=1, layers="all")
        run = make(2, ShardingOptions(gradients_code="tagc", tagc=section))
        train(run, steps=3, micro_batches=micro_batches)
        if micro_batches == 1:
            assert run.losses == dense.losses and torch.equal(weights(run), weights(dense))
        elif sparsity == 0.0:
            torch.testing.assert_close(weights(run), weights(dense), rtol=1e-4, atol=1e-5)
        else:
            assert not torch.equal(weights(run), weights(dense)) and run.losses[-1] < run.losses[0] * 1.05
            becomes_gradients(run)


def becomes_gradients(run: Run) -> None:
    """Check the residuals as gradients at the end of the data: the sum over ranks, for uneven and empty shards too."""
    named = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
    shards = collect_shards([{"params": [p for _, p in named], "param_names": [name for name, _ in named]}])
    unsent = run.sharding.unsent
    (sums,) = unsent.states("mean", shards)
    total, sent = unsent.squares(), run.sent
    unsent.as_gradients(shards)
    unsent.after_optimizer_step(torch.tensor(False))
    assert total is not None and total > 0 and unsent.squares() == total and run.sent == sent
    unsent.as_gradients(shards)
    unsent.after_optimizer_step(torch.tensor(True))
    assert unsent.squares() == 0.0
    for shard in shards:
        if shard.name in sums.tensors:
            assert torch.equal(local(shard.parameter.grad), sums.tensors[shard.name])
        else:
            assert shard.parameter.grad is None and shard.parameter.ndim == 1


def test_the_hook_replaces_the_reduce_scatter(pool2: Pool) -> None:
    pool2(in_training)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sparsity": 1.0}, r"\[sharding.tagc\] sparsity = 1.0; it must lie in \[0, 1\)"),
        ({"min_entries": 0}, "min_entries = 0; it must be 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TagcShardingOptions(**options)


def test_layers_that_are_compressed() -> None:
    names = [
        "tok_embeddings.weight",
        "layers.3.attention.wo.weight",
        "layers.3.feed_forward.w1.weight",
        "output.weight",
    ]

    def chosen(**options: Any) -> list[bool]:
        return [TagcShardingOptions(**options).compresses(name, 2, 70000) for name in names]

    assert chosen() == [True, False, True, True] and chosen(layers="all") == [True] * 4
    assert chosen(layers=["feed_forward", "layers.3.attention"]) == [False, True, True, False]
    assert not any(chosen(min_entries=70001)) and not TagcShardingOptions().compresses("norm.weight", 1, 70000)

"""ZeRO++ against its literal form; equality of weights on all ranks; lifetime of the secondary copy."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.sharding import literal
from tests.sharding.test_raw import equal
from tests.sharding.toy import make, param_group, record_gathers, train
from torchtitan_scape.sharding.base import WeightsVersion, entries, param_groups_of
from torchtitan_scape.sharding.cost import GRADIENTS_BLOCK, WEIGHTS_BLOCK
from torchtitan_scape.sharding.options import ShardingOptions

NODES: dict[str, Any] = {"weights_code": "int8", "gradients_code": "int8+int4"}


def numbers(seed: int, *shape: int) -> Tensor:
    """Return numbers of widely varying magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.randint(-6, 6, shape, generator=generator).float().exp2()


def follows_the_literal_form(ranks_per_node: int, codes: dict[str, tuple[str, ...]]) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for gradients, hops in codes.items():
        run = make(ranks_per_node, ShardingOptions(weights_code="int8", gradients_code=gradients))
        for flat in param_groups_of(run.model):
            group = param_group(flat.modules[0])
            row = entries(flat.gathered)
            rows = [numbers(100 * flat.number + other, row) for other in range(ranks)]
            output = torch.full((ranks * row,), float("nan"))
            output.view(ranks, -1)[rank] = rows[rank]
            group._all_gather_comm(output, output.view(ranks, -1)[rank], dist.group.WORLD)
            segments = [(s.start, s.size, s.dims) for s in flat.gathered]
            expected = [literal.row_coded(one.numpy(), segments, "int8", WEIGHTS_BLOCK) for one in rows]
            assert torch.equal(output.view(ranks, -1), torch.stack([torch.from_numpy(one) for one in expected]))

            row = entries(flat.reduced)
            flats = [numbers(7000 + 100 * flat.number + other, ranks, row) for other in range(ranks)]
            result = torch.full((row,), float("nan"))
            group._reduce_scatter_comm(result, flats[rank].view(-1).clone(), dist.group.WORLD, dist.ReduceOp.SUM)
            segments = [(s.start, s.size, s.dims) for s in flat.reduced]
            each = [one.numpy() for one in flats]
            turn = "int4" in hops
            wanted = torch.from_numpy(
                literal.reduced(each, rank, ranks_per_node, segments, hops, GRADIENTS_BLOCK, turn)
            )
            if turn:  # Sums of 32 in another order change the rounding of some levels.
                assert (result - wanted).norm() <= 0.02 * wanted.norm()
                assert ((result - wanted).abs() > 1e-4 * (1 + wanted.abs())).float().mean() < 0.1
            else:
                assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    "world, ranks_per_node, codes",
    [
        (3, 3, {"int8": ("int8",)}),
        (4, 2, {"int8": ("int8", "int8"), "int8+int4": ("int8", "int4")}),
        (2, 1, {"int4": ("int4",)}),
    ],
)
def test_it_follows_the_literal_form(world: int, ranks_per_node: int, codes: dict[str, tuple[str, ...]]) -> None:
    Pool(world)(follows_the_literal_form, ranks_per_node, codes)


def holds_the_same_bits() -> list[Tensor]:
    """Return each group's gathered row in a step with two micro-batches; all its all-gathers are equal."""
    run = train(record_gathers(make(2, ShardingOptions(**NODES, secondary=True))), steps=1)
    by_group: dict[str, list[Tensor]] = {}
    for name, gathered in run.gathers:
        by_group.setdefault(name, []).append(gathered)
    assert {name: len(found) for name, found in by_group.items()} == {
        "embedding": 4, "layers.0": 4, "layers.1": 4, "norm+output": 2,
    }  # fmt: skip
    for found in by_group.values():
        assert all(torch.equal(found[0], other) for other in found[1:])
    return [found[0] for found in by_group.values()]


def test_all_ranks_compute_with_the_same_weights(pool4: Pool) -> None:
    first, *others = pool4(holds_the_same_bits)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def cached_until_weights_change(ranks_per_node: int) -> None:
    """Check that the secondary copy changes no bit, only the traffic between nodes."""
    fresh, kept = (make(ranks_per_node, ShardingOptions(**CODED[ranks_per_node], secondary=s)) for s in (False, True))
    train(fresh, steps=4, skip=2)
    across = []
    for step in range(1, 5):
        train(kept, steps=1, first=step, skip=2)
        across.append(kept.sent["network", "weights"])
    assert equal(fresh, kept)
    # Once per update: the step after the skipped one reuses the weights of the skipped one.
    assert across == [across[0], 2 * across[0], 2 * across[0], 3 * across[0]]
    assert fresh.sent["network", "weights"] > 10 * across[0]
    # A validation, a load or a repair between two steps.
    with torch.no_grad():
        kept.sharding.version.changed()
        kept.model(torch.zeros(1, 2, dtype=torch.int64))
        assert kept.sent["network", "weights"] == 4 * across[0]
        kept.model(torch.zeros(1, 2, dtype=torch.int64))
    assert kept.sent["network", "weights"] == 4 * across[0]


CODED = {2: NODES, 1: {"weights_code": "int8", "gradients_code": "int8"}}


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_secondary_copy_is_dropped_when_weights_change(ranks_per_node: int) -> None:
    Pool(2 * ranks_per_node)(cached_until_weights_change, ranks_per_node)


def without_version_updates() -> bool:
    fresh, kept = (make(1, ShardingOptions(**CODED[1], secondary=s)) for s in (False, True))
    with patch.object(WeightsVersion, "changed_if", lambda *_: None):
        return equal(train(fresh, steps=3), train(kept, steps=3))


def test_a_stale_secondary_copy_changes_the_losses(pool2: Pool) -> None:
    """A missing version update is visible to the tests above."""
    assert pool2(without_version_updates) == [False, False]


def bfloat16_is_gathered() -> None:
    dense = train(make(2, ShardingOptions(), param_dtype=torch.bfloat16))
    raw = train(
        make(2, ShardingOptions(weights_code="int8", gradients_code="int8"), raw=True, param_dtype=torch.bfloat16)
    )
    assert equal(dense, raw)
    coded = train(make(2, ShardingOptions(weights_code="int8", gradients_code="int8"), param_dtype=torch.bfloat16))
    assert coded.losses == pytest.approx(dense.losses, rel=0.02)


def test_bfloat16_weights(pool2: Pool) -> None:
    pool2(bfloat16_is_gathered)


def losses() -> dict[str, float]:
    """Return the mean loss of the last 10 of 24 steps."""
    variants: dict[str, dict[str, Any]] = {
        "dense": {},
        "int8": {"weights_code": "int8", "gradients_code": "int8"},
        "int4": {"weights_code": "int8", "gradients_code": "int4"},
    }
    found = {}
    for name, options in variants.items():
        run = train(make(2, ShardingOptions(**options)), steps=24, micro_batches=1)
        total = torch.tensor(sum(run.losses[-10:]))
        dist.all_reduce(total)
        found[name] = total.item()
    return found


def test_losses_follow_the_dense_ones(pool2: Pool) -> None:
    found = pool2(losses)[0]
    for name in ("int8", "int4"):
        assert found[name] == pytest.approx(found["dense"], rel=0.01), name

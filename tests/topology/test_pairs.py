"""Random pairs, and the mean over them: equal on both partners, counted, level by level."""

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.replicas import run_replicas
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import ReplicaGroups, build_groups
from torchtitan_scape.topology.in_process import DryRunCollectives
from torchtitan_scape.topology.layout import Layout, RankGroup, paired_share, partners, plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.stages import pair_mean_
from torchtitan_scape.topology.traffic import CollectiveCall, LevelSize


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
def test_pairs_are_mutual_and_every_rank_rests_equally_often(size: int) -> None:
    rests: Counter[int] = Counter()
    for draw in range(10, 10 + 4 * size):
        found = partners(size, draw)
        assert found == partners(size, draw)
        assert all(other is None or (other != rank and found[other] == rank) for rank, other in enumerate(found))
        rests.update(rank for rank, other in enumerate(found) if other is None)
    assert rests == (Counter(dict.fromkeys(range(size), 4)) if size % 2 else Counter())
    assert paired_share(size) == pytest.approx(1.0 - sum(rests.values()) / (4 * size * size))


def test_every_pair_occurs_equally_often() -> None:
    counts = Counter((rank, other) for draw in range(3000) for rank, other in enumerate(partners(6, draw)))
    assert len(counts) == 30 and all(540 < count < 660 for count in counts.values())  # 600 expected, deviation 22


def test_pairs_are_the_same_in_every_version() -> None:
    """A resumed run, and every rank, must draw the pairs of the first one."""
    assert [partners(5, draw) for draw in (1, 2)] == [[3, None, 4, 0, 2], [3, 4, None, 0, 1]]


def values(replica: int) -> Tensor:
    return torch.randn(48, generator=torch.Generator().manual_seed(replica))


def averaged(collectives: ReplicaCollectives) -> tuple[list[Tensor], list[float]]:
    """Return the results, and the bytes sent, of three draws from the same values."""
    found, sent = [], []
    for draw in (1, 2, 3):
        own, before = values(collectives.replica), sum(collectives.ledger.sent_by_level().values())
        collectives.pair_mean(own, draw).wait()
        found.append(own)
        sent.append(sum(collectives.ledger.sent_by_level().values()) - before)
    return found, sent


def layout_of(ranks_per_node: int) -> Layout:
    world, machine = dist.get_world_size(), get_machine("frontier")
    return plan_layout(world, ranks_per_node=ranks_per_node, machine=machine, replicate=world, shard=1)


def on_gloo(ranks_per_node: int = 0, hierarchical: bool = True) -> tuple[list[Tensor], list[float], dict[str, float]]:
    groups = None
    if ranks_per_node:
        groups = build_groups(layout_of(ranks_per_node), timedelta(seconds=60), hierarchical)
    collectives = ReplicaCollectives(groups or dist.group.WORLD)
    return *averaged(collectives), collectives.ledger.sent_by_level()


@pytest.mark.parametrize("replicas", [4, 3])
def test_partners_receive_their_mean_and_a_resting_replica_sends_nothing(replicas: int, pool4: Pool) -> None:
    """Simulated replicas, and gloo ranks with the same bits."""
    simulated = run_replicas(replicas, averaged)
    for i, draw in enumerate((1, 2, 3)):
        for replica, other in enumerate(partners(replicas, draw)):
            wanted = values(replica) if other is None else (values(replica) + values(other)) / 2
            assert torch.equal(simulated[replica][0][i], wanted)
            assert simulated[replica][1][i] == (0.0 if other is None else 4 * 48)
    for rank, (found, sent, _) in enumerate(pool4(on_gloo) if replicas == 4 else ()):
        assert all(torch.equal(a, b) for a, b in zip(found, simulated[rank][0], strict=True))
        assert sent == simulated[rank][1]


def test_bytes_are_counted_on_the_link_to_the_partner(pool4: Pool) -> None:
    """Without a hierarchy: two GCDs per node, so that one of three possible partners is on the same package."""
    for rank, (found, _, levels) in enumerate(pool4(on_gloo, 2, False)):
        others = [partners(4, draw)[rank] for draw in (1, 2, 3)]
        beside = sum(other == rank ^ 1 for other in others)
        assert levels == {k: 192.0 * n for k, n in (("gcd_pair", beside), ("network", 3 - beside)) if n}
        assert torch.equal(found[0], (values(rank) + values(others[0])) / 2)  # type: ignore[arg-type]


def hierarchical() -> tuple[list[Tensor], list[float], dict[str, float], Tensor]:
    """Also the mean of a node that rests."""
    found, sent, levels = on_gloo(2)
    alone = values(dist.get_rank())
    pair_mean_(alone, build_groups(layout_of(2), timedelta(seconds=60)).comm_streams[0], None)
    return found, sent, levels, alone


def test_nodes_form_the_pairs_of_a_hierarchy(pool4: Pool) -> None:
    """Each rank sends its slice of the node's mean over the network, half of the entries here."""
    ranks = pool4(hierarchical)
    every = torch.stack([values(rank) for rank in range(4)])
    for rank, (found, _, levels, alone) in enumerate(ranks):
        for one in found:
            torch.testing.assert_close(one, every.mean(0))
            assert torch.equal(one, ranks[0][0][0])
        torch.testing.assert_close(alone, every[rank // 2 * 2 : rank // 2 * 2 + 2].mean(0))
        assert levels == {"gcd_pair": 3 * (96.0 + 96.0), "network": 3 * 96.0}


@pytest.mark.parametrize("levels", [(("network", 5),), (("node", 4), ("network", 3))], ids=str)
def test_a_dry_run_counts_what_the_plan_prices(levels: tuple[tuple[str, int], ...]) -> None:
    """Averaged over as many draws as there are units, of which one rests."""
    groups = tuple(RankGroup(level, size, size - 1) for level, size in levels)
    collectives, units = DryRunCollectives(ReplicaGroups(None, None, levels=groups)), levels[-1][1]
    for draw in range(units):
        collectives.pair_mean(torch.zeros(240), draw).wait()
    stages = CollectiveCall("pair_mean", 240).stages([LevelSize(*level) for level in levels])
    planned: Counter[str] = Counter()
    for stage in stages:
        planned[stage.level] += stage.sent  # type: ignore[assignment]
    sent = {level: total / units for level, total in collectives.ledger.sent_by_level().items()}
    assert sent == pytest.approx(dict(planned))
    assert [stage.rounds for stage in stages] == ([0.8] if len(levels) == 1 else [3, pytest.approx(2 / 3), 3])

"""Cost model of collectives against simulated messages, and against the counted bytes."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_scape.kernels.codec.reference import BlockCode
from torchtitan_scape.topology.layout import Layout, plan_layout
from torchtitan_scape.topology.machines import Level, Link, Links, Machine, get_machine
from torchtitan_scape.topology.traffic import (
    LevelSize,
    MessageBytes,
    Stage,
    all_gather_stages,
    all_reduce_stages,
    bytes_by_level,
    reduce_scatter_stages,
    spanned,
    stage_seconds,
)

# Message sizes of codecs; None for FP32.
CODED: list[MessageBytes | None] = [None, lambda count: 2 * count, BlockCode("int4", 32).message_bytes]
LINKS = Links({"a": Link(1e-5, 1e9), "b": Link(1e-4, 1e8), "c": Link(1e-3, 1e7)}, "a test")


class Network:
    """Simulated ring collectives on one array per rank; counts the messages of every rank by level."""

    def __init__(self, world: int) -> None:
        self.sent: list[dict[str, float]] = [defaultdict(float) for _ in range(world)]
        self.rounds: dict[str, int] = defaultdict(int)

    def _round(self, level: str, messages: list[tuple[int, int, object]]) -> None:
        self.rounds[level] += 1
        for source, _, values in messages:
            self.sent[source][level] += np.asarray(values).nbytes

    def reduce_scatter(self, level: str, groups: list[tuple[int, ...]], data: dict[int, np.ndarray]) -> None:
        """Reduce-scatter: data[rank] becomes slice i of the sum, where i is the index of the rank in its group."""
        size = len(groups[0])
        slices = {rank: list(np.split(data[rank], size)) for group in groups for rank in group}
        for step in range(size - 1):
            messages = []
            for group in groups:
                for position, rank in enumerate(group):
                    index = (position - step - 1) % size
                    messages.append((rank, group[(position + 1) % size], index, slices[rank][index].copy()))
            for _, target, index, values in messages:
                slices[target][index] = slices[target][index] + values
            self._round(level, [(source, target, values) for source, target, _, values in messages])
        for group in groups:
            for position, rank in enumerate(group):
                data[rank] = slices[rank][position]

    def all_gather(self, level: str, groups: list[tuple[int, ...]], data: dict[int, np.ndarray]) -> None:
        """All-gather: data[rank] becomes the slices of all ranks of its group, in group order."""
        size = len(groups[0])
        have = {rank: {position: data[rank]} for group in groups for position, rank in enumerate(group)}
        for step in range(size - 1):
            messages = []
            for group in groups:
                for position, rank in enumerate(group):
                    index = (position - step) % size
                    messages.append((rank, group[(position + 1) % size], index, have[rank][index]))
            for _, target, index, values in messages:
                have[target][index] = values
            self._round(level, [(source, target, values) for source, target, _, values in messages])
        for group in groups:
            for rank in group:
                data[rank] = np.concatenate([have[rank][i] for i in range(size)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw layouts with one, two or three levels: pairs, nodes, network."""
    pair, node = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (2, 6), (3, 6)]))
    levels = (Level("pair", pair, 1, 1), Level("node", node, 1, 1), Level("network", 0, 1, 1))
    nodes = draw(st.integers(1, 4))
    machine = Machine("a test", node, levels, "", get_machine("local").device)
    return plan_layout(node * nodes, ranks_per_node=node, machine=machine, replicate=-1, shard=1)


@given(layouts())
def test_all_reduce_stages_are_the_messages_of_a_hierarchical_all_reduce(layout: Layout) -> None:
    n, network = layout.world_size * 3, Network(layout.world_size)
    data = {
        rank: np.random.default_rng(rank).integers(0, 99, n).astype(np.float32) for rank in range(layout.world_size)
    }
    total = sum(data.values())
    tiers = layout.hierarchy(layout.replicate_group(0))
    for tier in tiers:
        network.reduce_scatter(tier.level, list(tier.groups), data)
    for tier in reversed(tiers):
        network.all_gather(tier.level, list(tier.groups), data)
    for rank in range(layout.world_size):
        assert np.array_equal(data[rank], total)
        assert network.sent[rank] == pytest.approx(bytes_by_level(all_reduce_stages(n, tiers)))
    stages = all_reduce_stages(n, tiers)
    rounds: dict[str, int] = defaultdict(int)
    for stage in stages:
        rounds[stage.level] += stage.rounds
    assert rounds == network.rounds
    # The hierarchical all-reduce sends the optimal number of bytes, that of a ring.
    assert sum(s.sent for s in stages) == pytest.approx(2 * (layout.world_size - 1) / layout.world_size * 4 * n)


@given(layouts(), st.integers(1, 9))
def test_all_gather_stages_are_the_messages_of_a_hierarchical_all_gather(layout: Layout, own: int) -> None:
    network = Network(layout.world_size)
    data = {rank: np.full(own, rank, dtype=np.uint8) for rank in range(layout.world_size)}
    tiers = layout.hierarchy(layout.replicate_group(0))
    for tier in reversed(tiers):
        network.all_gather(tier.level, list(tier.groups), data)
    stages = all_gather_stages(own, tiers)
    for rank in range(layout.world_size):
        assert sorted(set(data[rank].tolist())) == list(range(layout.world_size))
        assert network.sent[rank] == pytest.approx(bytes_by_level(stages))
    assert sum(s.sent for s in stages) == (layout.world_size - 1) * own


@given(layouts(), st.sampled_from(CODED))
def test_bytes_of_coded_messages(layout: Layout, coded: MessageBytes | None) -> None:
    """Outermost one message to and from each other rank; the inner levels gather all other messages."""
    levels, n = layout.hierarchy(layout.replicate_group(0)), 96 * layout.world_size
    sent = sum(stage.sent for stage in all_reduce_stages(n, levels, coded))
    if coded and levels:
        outside = levels[-1].size
        message, within = coded(96), layout.world_size // outside
        gathered = (layout.world_size - outside) * message
        assert sent == pytest.approx(2 * (outside - 1) * message + gathered + 4 * (n - n // within))
    divided = [*reduce_scatter_stages(n, levels, coded), *all_gather_stages(coded(96) if coded else 4 * 96, levels)]
    assert sum(stage.sent for stage in divided) == pytest.approx(sent)


def seconds(stages: list[Stage]) -> float:
    return sum(stage_seconds(stages, LINKS))


def test_seconds_of_two_levels_by_hand() -> None:
    """4 inner ranks, 2 outer ones, 800 bytes: 600 bytes each way inside, and a ring of 2 with 200 bytes outside."""
    levels = [LevelSize("a", 4), LevelSize("b", 2)]
    inside, outside = 2 * (3e-5 + 600 / 1e9), 2e-4 + 200 / 1e8
    assert seconds(all_reduce_stages(200, levels)) == pytest.approx(inside + outside)
    # BF16: half of the bytes outside, and half of the bytes of the inner all-gather
    narrow = 6e-5 + 900 / 1e9 + 2e-4 + 100 / 1e8
    assert seconds(all_reduce_stages(200, levels, CODED[1])) == pytest.approx(narrow)
    # INT4: 1,024 entries in messages of 128 entries: 64 bytes, 4 scales of 2 bytes, 8 bytes of padding
    coded = 2 * (3e-5) + (3072 + 480) / 1e9 + 2e-4 + 160 / 1e8
    assert seconds(all_reduce_stages(1024, levels, CODED[2])) == pytest.approx(coded)
    assert seconds(all_reduce_stages(200, spanned(levels, flat=True))) == pytest.approx(14e-4 + 1400 / 1e8)
    assert seconds(all_gather_stages(10, levels)) == pytest.approx(1e-4 + 10 / 1e8 + 3e-5 + 60 / 1e9)
    assert seconds(all_gather_stages(10, spanned(levels, flat=True))) == pytest.approx(7e-4 + 70 / 1e8)


def test_levels_of_one_and_single_replicas_cost_nothing() -> None:
    assert all_reduce_stages(25, []) == [] and spanned([LevelSize("b", 1)], flat=True) == []
    assert spanned([LevelSize("a", 1), LevelSize("b", 2), LevelSize("c", 1)]) == [LevelSize("b", 2)]


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no level 'gcd_pair', only a, b, c"):
        seconds(all_reduce_stages(2, [LevelSize("gcd_pair", 2)]))
    with pytest.raises(ValueError, match=r"-1 GB/s; it must be positive"):
        LINKS.with_bandwidth("a", -1e9)

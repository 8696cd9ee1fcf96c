"""Process groups: how many a rank is in, and what NCCL and its streams are asked for."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from topology import groups
from topology.comm_stream import CommStream
from topology.groups import build_groups, build_tier_groups, most_groups
from topology.layout import Layout, Tier, plan_layout
from topology.machines import get_machine

MINUTE = timedelta(seconds=60)
# Ranks a node, degrees, whether level by level, whether staged, and groups of a rank.
COUNTS = [
    (2, 4, 1, True, False, 1 + 2 * 2),  # replicas on nodes of two: two levels in two lanes
    (2, 4, 1, False, False, 1),  # one ring
    (2, 4, 1, False, True, 1 + 2),
    (2, 2, 2, True, True, 2 + 2),
    (4, 1, 4, True, True, 1),  # nobody to exchange with
]


def layout_of(ranks_per_node: int, replicate: int, shard: int) -> Layout:
    machine = get_machine("local")
    return plan_layout(4, ranks_per_node=ranks_per_node, machine=machine, replicate=replicate, shard=shard)


def groups_made() -> list[int]:
    counts = []
    for ranks_per_node, replicate, shard, hierarchical, staged, _ in COUNTS:
        made: list[tuple[int, ...]] = []

        def note(ranks: list[int], made: list[tuple[int, ...]] = made, **options: Any) -> object:
            assert options == {"timeout": MINUTE, "pg_options": None}  # of gloo
            made += [tuple(ranks)] if dist.get_rank() in ranks else []
            return object()

        with patch.object(dist, "new_group", note):
            build_groups(layout_of(ranks_per_node, replicate, shard), MINUTE, hierarchical, staged)
        counts.append(len(made))
    return counts


def test_the_report_knows_how_many_groups_a_rank_is_in(pool4: Pool) -> None:
    *wanted, expected = zip(*COUNTS, strict=True)
    assert pool4(groups_made) == [list(expected)] * 4
    for *degrees, hierarchical, staged, count in zip(*wanted, expected, strict=True):
        assert most_groups(layout_of(*degrees), hierarchical, staged) == count


class Options:
    """As `ProcessGroupNCCL.Options`, which a build for CPUs has not."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl,cpu:gloo"])
def test_nccl_is_asked_for_streams_of_high_priority(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group has options of its own, as PyTorch writes into them, with the timeout that it is made with."""
    made: list[Options] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, pg_options: made.append(pg_options))
    build_tier_groups([Tier("node", ((0, 1), (2, 3))), Tier("network", ((0, 2), (1, 3)))], MINUTE)
    assert len({id(options) for options in made}) == 4
    assert all(options.is_high_priority_stream and options._timeout == MINUTE for options in made)


def test_a_lane_has_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """One, made when it is first used, on the device of what it exchanges."""
    made: list[tuple[Any, int]] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            made.append((device, priority))

        wait_stream = wait_event = record_event = lambda *_: None

    run: list[int] = []
    here = Stream(torch.device("cuda"))
    for name, fake in {"Stream": Stream, "stream": nullcontext, "current_stream": lambda _: here}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    lane, device = CommStream(), torch.device("cuda", 1)
    exchanges: list[Callable[[], None]] = [lambda: run.append(1), lambda: run.append(2)]
    for exchange in exchanges:
        lane.start(exchange, device).wait()
    assert made[1:] == [(device, -1)] and run == [1, 2]
    assert groups.COMM_STREAMS == 2

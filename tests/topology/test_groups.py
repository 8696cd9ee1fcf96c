"""Process groups: their number per rank, and the options of NCCL and of CUDA streams."""

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
from torchtitan_scape.topology import groups
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.groups import build_groups, build_tier_groups, most_groups
from torchtitan_scape.topology.layout import Layout, Tier, plan_layout
from torchtitan_scape.topology.machines import get_machine
from torchtitan_scape.topology.stages import CommStream

MINUTE = timedelta(seconds=60)
# (ranks per node, replicate, shard, hierarchical, staged, in flight, process groups per rank)
COUNTS = [
    (2, 4, 1, True, False, True, 1 + 2 * 2),  # replicas on nodes of two: two levels on two streams, for all chunks
    (2, 4, 1, False, False, False, 1),
    (2, 4, 1, False, False, True, 2),  # one group, and one for scalars
    (2, 4, 1, False, True, True, 2 + 2),
    (2, 2, 2, True, True, True, 3 + 2),
    (2, 2, 2, True, True, False, 2 + 2),
    (4, 1, 4, True, True, True, 1),  # one replica
]


def layout_of(ranks_per_node: int, replicate: int, shard: int) -> Layout:
    machine = get_machine("local")
    return plan_layout(4, ranks_per_node=ranks_per_node, machine=machine, replicate=replicate, shard=shard)


def count_groups() -> list[int]:
    counts = []
    for ranks_per_node, replicate, shard, *options, _ in COUNTS:
        made: list[tuple[int, ...]] = []

        def note(ranks: list[int], made: list[tuple[int, ...]] = made, **options: Any) -> object:
            assert options == {"timeout": MINUTE, "pg_options": None}  # with gloo
            made += [tuple(ranks)] if dist.get_rank() in ranks else []
            return object()

        with patch.object(dist, "new_group", note):
            build_groups(layout_of(ranks_per_node, replicate, shard), MINUTE, *options)
        counts.append(len(made))
    return counts


def test_most_groups_is_the_number_of_created_groups(pool4: Pool) -> None:
    *wanted, expected = zip(*COUNTS, strict=True)
    assert pool4(count_groups) == [list(expected)] * 4
    for *degrees, hierarchical, staged, in_flight, count in zip(*wanted, expected, strict=True):
        assert most_groups(layout_of(*degrees), hierarchical, staged, in_flight) == count


class Options:
    """Stand-in for `ProcessGroupNCCL.Options`, which CPU builds do not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl,cpu:gloo"])
def test_nccl_groups_have_high_priority_streams(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group has separate options, because PyTorch modifies them, with the timeout of the group."""
    made: list[Options] = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, pg_options: made.append(pg_options))
    build_tier_groups([Tier("node", ((0, 1), (2, 3))), Tier("network", ((0, 2), (1, 3)))], MINUTE)
    assert len({id(options) for options in made}) == 4
    assert all(options.is_high_priority_stream and options._timeout == MINUTE for options in made)


def test_a_comm_stream_has_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single CUDA stream, created on first use, on the device of the exchanged tensors."""
    made: list[tuple[Any, int]] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            made.append((device, priority))

        wait_stream = wait_event = record_event = lambda *_: None

    run: list[int] = []
    here = Stream(torch.device("cuda"))
    for name, fake in {"Stream": Stream, "stream": nullcontext, "current_stream": lambda _: here}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    comm_stream, device = CommStream(), torch.device("cuda", 1)
    exchanges: list[Callable[[], None]] = [lambda: run.append(1), lambda: run.append(2)]
    for exchange in exchanges:
        comm_stream.start(exchange, device).wait()
    assert made[1:] == [(device, -1)] and run == [1, 2]
    assert groups.COMM_STREAMS == 2


def flag_group() -> tuple[bool, bool]:
    """Return whether the finite flag avoids the group of the chunks, and whether the results are right."""
    built = build_groups(layout_of(2, 4, 1), MINUTE, hierarchical=False, staged=False)
    collectives, used = ReplicaCollectives(built), []
    reduce = dist.all_reduce

    def note(tensor: torch.Tensor, *arguments: Any, group: Any, **options: Any) -> Any:
        used.append(group)
        return reduce(tensor, *arguments, group=group, **options)

    with patch.object(dist, "all_reduce", note):
        chunk = collectives.all_reduce(torch.ones(4), mean=False)
        flag = collectives.minimum_over_all(torch.tensor(dist.get_rank() != 3))
    norm = collectives.sum_over_owners(torch.ones(()))
    chunk.wait()
    return used == [built.replicate, built.scalars] and used[0] is not used[1], not flag and norm.item() == 4.0


def delayed_exchange() -> list[bool]:
    """Return, by layout, whether the flag of a step uses a group on which a delayed chunk is in flight."""
    found, reduce = [], dist.all_reduce
    for per_node, hierarchical in ((2, True), (2, False), (1, True)):
        built = build_groups(layout_of(per_node, 4, 1), MINUTE, hierarchical, staged=False)
        collectives, flags, chunks = ReplicaCollectives(built), set(), set()

        def note(
            tensor: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            *,
            flags: Any = flags,
            chunks: Any = chunks,
            **options: Any,
        ) -> Any:
            (flags if op == dist.ReduceOp.MIN else chunks).add(options["group"])
            return reduce(tensor, op, **options)

        with patch.object(dist, "all_reduce", note):
            chunk = collectives.all_reduce(torch.ones(64), mean=False)
            assert collectives.minimum_over_all(torch.tensor(True))
            chunk.wait()
        chunks |= {group.process_group for stream in built.comm_streams for group in stream}
        assert len(flags) == 1
        found.append(bool(flags & chunks))
    return found


def test_a_flag_does_not_use_the_group_of_a_delayed_chunk(pool4: Pool) -> None:
    """On one level chunks use the group of the replicas, and on several those of the streams."""
    assert pool4(delayed_exchange) == [[False] * 3] * 4


def test_groups_of_a_run_depend_on_its_delay() -> None:
    from torchtitan_scape.config.job_config import JobConfig, group_options

    config, found = JobConfig(), {}
    for method in ("dense", "streaming_diloco", "co2", "diloco", "scape"):
        config.sync.method = method
        found[method] = group_options(config)["in_flight"]
    config.sync.method, config.sync.overlap = "dense", True
    assert group_options(config)["in_flight"]
    assert found == {"dense": False, "streaming_diloco": True, "co2": True, "diloco": False, "scape": False}


def test_scalars_do_not_wait_for_chunks(pool4: Pool) -> None:
    """They have a communicator of their own. Otherwise a delayed FP32 exchange would precede the next step's flag."""
    assert pool4(flag_group) == [(True, True)] * 4

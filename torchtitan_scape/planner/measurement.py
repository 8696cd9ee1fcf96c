"""Measurements of the ranks that it runs on. The doctor runs them.

Those of links and memory are for the cost model; others find a slow node, pair of nodes or device.

At every level that the replicas (and the shards) span, all groups all-reduce at the same time, as in training, over
several sizes. time = messages * latency + bytes sent / bandwidth is fitted to the medians. Shared links and an
unfavorable placement affect the figures as they affect a training step.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchtitan_scape.topology.groups import build_tier_groups, gather_lists
from torchtitan_scape.topology.layout import Layout, Tier, plan_layout, ranks_per_node_from_environment
from torchtitan_scape.topology.machines import SCHEMA, detect_machine, get_machine

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes
REPEATS = 7
WARM_UP = 2
LONG_SECONDS = 5.0  # a size that takes longer is measured only three times
LARGE_RESIDUAL = 0.3  # relative; the planner's predictions can be wrong by as much


def measure(
    layout: Layout, device: torch.device, sizes: Sequence[int] = SIZES, timeout: timedelta = timedelta(minutes=10)
) -> dict[str, Any]:
    """Return the content of a file of links, equal on all ranks. A collective call of the whole world.

    Args:
        sizes: Bytes of the FP32 tensors that are all-reduced.

    Raises:
        ValueError: There is a single rank, or the world size is not that of the layout.
    """
    if layout.world_size != dist.get_world_size() or layout.world_size == 1:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks and {dist.get_world_size()} are running; "
            "links are measured between two ranks or more, of one layout"
        )
    levels, measurements = {}, []
    for tier in _tiers(layout):
        group = build_tier_groups([tier], timeout)[0]
        points = [_all_reduce(tier, group, nbytes, device) for nbytes in sizes]
        levels[tier.level] = fit_link(points)
        measurements += points
        if group is not None:
            dist.destroy_process_group(group)
    return {
        "schema": SCHEMA,
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "machine": layout.machine.name,
        "world_size": layout.world_size,
        "ranks_per_node": layout.ranks_per_node,
        "replicate": layout.replicate,
        "shard": layout.shard,
        "levels": levels,
        "memory_bandwidth": _memory_bandwidth(device),
        "measurements": measurements,
    }


def _tiers(layout: Layout) -> list[Tier]:
    """Return one tier per level, with the groups of all axes: those of the replicas, then those of the shards for
    levels that only these have."""
    by_level: dict[str, Tier] = {}
    for groups in (layout.replicate_groups(), layout.model_groups()):
        hierarchies = [layout.hierarchy(group) for group in groups]
        for i, first in enumerate(hierarchies[0]):
            # Groups of different shapes (odd nodes) are measured on the levels that they share.
            same = [tiers[i] for tiers in hierarchies if len(tiers) > i and tiers[i].level == first.level]
            groups = tuple(ranks for tier in same if tier.size == first.size for ranks in tier.groups)
            by_level.setdefault(first.level, Tier(first.level, groups))
    return list(by_level.values())


def fit_link(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return latency (seconds per message), bandwidth (bytes/s of a rank) and the largest relative residual."""
    rounds, sent = ([float(p[key]) for p in points] for key in ("rounds", "sent"))
    seconds = [p["seconds"] for p in points]
    latency, inverse = least_squares([rounds, sent], seconds).tolist()
    if not inverse:  # the fit contains latency only: use the rate of the largest message
        inverse = seconds[-1] / sent[-1]
    predicted = [latency * r + inverse * s for r, s in zip(rounds, sent, strict=True)]
    residual = max(abs(p / s - 1) for p, s in zip(predicted, seconds, strict=True))
    return {"latency": latency, "bandwidth": 1 / inverse, "residual": residual}


def residual_advice(result: dict[str, Any]) -> dict[str, str]:
    """Return for each level whose times differ from the fit by more than LARGE_RESIDUAL: the message, and the fix."""
    advice = {}
    for name, link in result["levels"].items():
        if link["residual"] <= LARGE_RESIDUAL:
            continue

        def ratio(point: dict[str, Any], link: dict[str, float] = link) -> float:
            return point["seconds"] / (link["latency"] * point["rounds"] + point["sent"] / link["bandwidth"])

        points = [point for point in result["measurements"] if point["level"] == name]
        worst = max(points, key=lambda point: abs(1 / ratio(point) - 1))
        size = f"{worst['bytes'] / 1024:,.0f} KiB"
        if worst["bytes"] < 1 << 20:
            meaning = "the bandwidth can be used, times of small messages are uncertain"
        else:
            meaning = "the bandwidth is uncertain, because the rate depends on the size or other jobs use the link"
        advice[name] = (
            f"{name}: {size} took {ratio(worst):.2f} x the fitted time: {meaning}; repeat it on idle nodes, with "
            "--largest near the bytes that a step sends"
        )
    return advice


def _all_reduce(tier: Tier, group: ProcessGroup | None, nbytes: int, device: torch.device) -> dict[str, Any]:
    tensor = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
    calls = 10 if nbytes <= 1 << 16 else 1  # short calls are timed together

    def run() -> None:
        if group is not None:
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)

    times = [t / calls for t in _times(run, device, calls)]
    return {
        "level": tier.level,
        "size": tier.size,
        "bytes": tensor.nbytes,
        "rounds": 2 * (tier.size - 1),
        "sent": 2 * (tier.size - 1) / tier.size * tensor.nbytes,
        "seconds": statistics.median(times),
        "repeats": times,
    }


def _memory_bandwidth(device: torch.device) -> float:
    """Return the bytes/s of a += b, reads and writes included, on all ranks at once: the slowest rank's median."""
    entries = (1 << 28 if device.type == "cuda" else 1 << 26) // 4  # beyond any cache
    a, b = (torch.zeros(entries, dtype=torch.float32, device=device) for _ in range(2))
    return 3 * a.nbytes / statistics.median(_times(lambda: a.add_(b), device, 1))


def _times(run: Callable[[], Any], device: torch.device, calls: int) -> list[float]:
    """Return the seconds of each run on the slowest rank, for which a step waits."""
    times: list[float] = []
    for repeat in range(WARM_UP + REPEATS):
        _synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        run()
        _synchronize(device)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if repeat >= WARM_UP:
            times.append(slowest.item())
        if len(times) >= 3 and sum(times) > LONG_SECONDS:  # the same on every rank
            break
    return times


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ranks and messages to measure, which `layout_of` and `sizes_of` read."""
    add = parser.add_argument
    add("--machine", default="auto", help="whose levels to measure: a preset's name, or auto for the device's")
    add("--ranks-per-node", type=int, default=0, help="by default what the launcher says")
    add("--replicate", type=int, default=-1)
    add("--shard", type=int, default=1)
    add("--largest", type=float, default=SIZES[-1] / 2**20, help="MiB of the largest message")


def own_device() -> torch.device:
    """Return this rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def layout_of(options: argparse.Namespace, device: torch.device) -> Layout:
    """Return the layout of the running ranks. Raises ValueError for options that do not match them."""
    name = options.machine
    if name == "auto":
        name = detect_machine(torch.cuda.get_device_name(device) if device.type == "cuda" else "")
    machine, world = get_machine(name), dist.get_world_size()
    per_node = options.ranks_per_node or ranks_per_node_from_environment(os.environ, world)
    return plan_layout(
        world,
        ranks_per_node=per_node or machine.ranks_per_node or world,
        machine=machine,
        replicate=options.replicate,
        shard=options.shard,
    )


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Return the bytes of the messages to measure. Raises ValueError if --largest leaves less than two."""
    sizes = [size for size in SIZES if size <= options.largest * 2**20]
    if len(sizes) < 2:
        raise ValueError(f"--largest {options.largest:g} MiB leaves {len(sizes)} sizes; take 1 or more")
    return sizes


PAIR_BYTES = 1 << 25  # on GPUs; a sixteenth on CPUs
MAX_ROUNDS = 63  # with more than 64 nodes, every node exchanges with this many others
PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
NODE_REPEATS = 5


def clock_offsets(group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the seconds by which each rank's clock is ahead of that of rank 0, to within a barrier's duration.

    Collective. `group`: All ranks, on the host.
    """
    samples = []
    for _ in range(NODE_REPEATS):
        dist.barrier(group)
        times = gather_lists(group or dist.group.WORLD, [time.time()])
        samples.append([own - times[0] for own in times])
    return [min(offsets, key=abs) for offsets in zip(*samples, strict=True)]


def rounds_of(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which every node is in at most one pair, and all pairs of nodes occur once (circle method)."""
    players = list(range(nodes + nodes % 2))
    rounds = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < nodes])
        players.insert(1, players.pop())
    return rounds[:MAX_ROUNDS]


def pair_bandwidths(nodes: Sequence[Sequence[int]], device: torch.device) -> dict[tuple[int, int], float]:
    """Return the bytes/s that two nodes exchange, in one direction, by pair of indices in `nodes`. Collective.

    Rank i of a node exchanges with rank i of the other, all at the same time, and so do the other pairs of the round.

    Args:
        nodes: Ranks of each node.
        device: Device of the messages.
    """
    rank = dist.get_rank()
    nbytes = PAIR_BYTES if device.type == "cuda" else PAIR_BYTES // 16
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    own = {
        pair: own_seconds
        for pairs in rounds_of(len(nodes))
        for pair, peer in [_own_pair(pairs, nodes, rank)]
        if (own_seconds := _exchange_seconds(peer, sent, received)) is not None and pair is not None
    }
    gathered: list[dict[tuple[int, int], float]] = gather_lists(dist.group.WORLD, [own])
    bandwidths = {}
    for pair in {pair for seconds in gathered for pair in seconds}:
        ranks = min(len(nodes[pair[0]]), len(nodes[pair[1]]))
        bandwidths[pair] = ranks * nbytes / max(seconds.get(pair, 0.0) for seconds in gathered)
    return bandwidths


def _own_pair(
    pairs: list[tuple[int, int]], nodes: Sequence[Sequence[int]], rank: int
) -> tuple[tuple[int, int] | None, int]:
    """Return this rank's pair of nodes in a round and its peer; None and -1 if it has none."""
    for pair in pairs:
        for one, other in (pair, reversed(pair)):
            if rank in nodes[one] and (index := nodes[one].index(rank)) < len(nodes[other]):
                return pair, nodes[other][index]
    return None, -1


def _exchange_seconds(peer: int, sent: torch.Tensor, received: torch.Tensor) -> float | None:
    """Return the shortest time of an exchange with `peer`, or None for -1. All ranks call it together."""
    times = []
    for repeat in range(1 + NODE_REPEATS):  # the first one connects
        _synchronize(sent.device)
        dist.barrier()
        begin = time.perf_counter()
        if peer >= 0:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            _synchronize(sent.device)
            if repeat:
                times.append(time.perf_counter() - begin)
    return min(times, default=None)


def product_rates(device: torch.device) -> list[float]:
    """Return each rank's operations/s in a product of square matrices, BF16 on GPUs, FP32 on CPUs. Collective.

    All ranks compute at the same time, as in training.
    """
    n = PRODUCT_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    times, calls = [], 10
    for repeat in range(1 + NODE_REPEATS):
        dist.barrier()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            torch.mm(a, b)
        _synchronize(device)
        if repeat:
            times.append((time.perf_counter() - begin) / calls)
    return gather_lists(dist.group.WORLD, [2 * n**3 / statistics.median(times)])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def least_squares(columns: Sequence[Sequence[float]], measured: Sequence[float]) -> np.ndarray:
    """Return coefficients >= 0 of `columns` that minimize the relative squared error against `measured`.

    All subsets are tried, so that only a few columns are feasible.

    Args:
        columns: One sequence of len(measured) per coefficient.
    """
    values = np.asarray(measured, dtype=float)
    scaled = np.asarray(columns, dtype=float).T / values[:, None]
    best, least = np.zeros(len(columns)), float(len(values))
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            part = scaled[:, chosen]
            unit = np.abs(part).max(axis=0)  # columns differ by many orders of magnitude
            if not unit.all():
                continue
            solution = np.linalg.lstsq(part / unit, np.ones(len(values)), rcond=None)[0] / unit
            squares = float(((part @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and squares < least:
                best, least = np.zeros(len(columns)), squares
                best[list(chosen)] = solution
    return best

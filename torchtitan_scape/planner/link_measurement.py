"""Measurement of links and memory of the ranks that it runs on, for the cost model. The doctor runs it.

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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchtitan_scape.planner.least_squares import least_squares
from torchtitan_scape.topology.groups import build_tier_groups
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

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times: list[float] = []
    for repeat in range(WARM_UP + REPEATS):
        synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        synchronize()
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

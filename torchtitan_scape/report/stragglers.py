"""Stragglers: in a synchronized step, the rank that the others wait for does not wait itself.

Phase "wait" covers the count of the step's tokens, which reveals slow data loading, and the flag of finite gradients,
which reveals a slow forward or backward pass. If FSDP shards a replica over ranks, its own collectives wait inside
these passes, so all ranks of a slow rank's shard group look slow.
"""

from statistics import median

import torch
import torch.distributed as dist

from torchtitan_scape.topology.collectives import ReplicaCollectives

# Share of a step below which differences between waits are ignored.
MIN_SHARE = 0.05
# Number of slow ranks that are named.
_MAX_NAMED = 3


def gather_waits(
    collectives: ReplicaCollectives, wait: float, step: float, device: torch.device
) -> tuple[list[float], float]:
    """Return `wait` of every rank and the mean of `step` over ranks, in seconds. Collective; its bytes are not
    counted.
    """
    if collectives.is_fake or not dist.is_initialized():
        return [wait], step
    world = dist.get_world_size()
    values = torch.zeros(world + 2, dtype=torch.float64, device=device)
    values[dist.get_rank()], values[-2], values[-1] = wait, step, 1.0
    *waits, steps, times = collectives.sum_over_all(values).tolist()
    # Each process adds its values once per simulated replica.
    return [value * world / times for value in waits], steps / times


def slowest_rank(waits: list[float], step: float) -> int:
    """Return the rank with the shortest wait, or -1 if all waits are about equal relative to a step. In seconds."""
    return waits.index(min(waits)) if max(waits) - min(waits) > MIN_SHARE * step else -1


def delay_text(waits: list[float], step: float, hosts: list[str]) -> str:
    """Return the slow ranks in words, or "" if no rank delays the others.

    Args:
        waits, step: seconds.
        hosts: host of each rank, named if there are several hosts.
    """
    if slowest_rank(waits, step) < 0:
        return ""
    order = sorted(range(len(waits)), key=lambda rank: waits[rank])

    def name(rank: int) -> str:
        return f"rank {rank}" + (f" on {hosts[rank]}" if len(set(hosts)) > 1 else "")

    usual = median(waits[rank] for rank in order[1:])
    if waits[order[1]] - waits[order[0]] > MIN_SHARE * step:
        return f"{name(order[0])} delays the others by {1e3 * (usual - waits[order[0]]):.0f} ms"
    least = ", ".join(f"{name(rank)} {1e3 * waits[rank]:.0f} ms" for rank in order[:_MAX_NAMED])
    return f"slow ranks wait least: {least}; median {1e3 * usual:.0f} ms"

"""Stragglers: in a synchronized step, the rank that the others wait for does not wait itself.

Phase "wait" covers the count of the step's tokens, which reveals slow data loading, and the flag of finite gradients,
which reveals a slow forward or backward pass. If FSDP shards a replica over ranks, its own collectives wait inside
these passes, so all ranks of a slow rank's shard group look slow.
"""

from statistics import median

import torch
import torch.distributed as dist

from topology.collectives import ReplicaCollectives

# Share of a step below which differences between waits are ignored.
MIN_SHARE = 0.05
# Number of ranks up to which each rank is listed.
_MAX_LISTED = 8


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


def waits_text(waits: list[float], step: float, hosts: list[str]) -> str:
    """Return the waits in words.

    Args:
        waits, step: Seconds.
        hosts: Host of each rank, added for the slowest ranks if there are several hosts.
    """
    if slowest_rank(waits, step) < 0:
        return f"wait per step, ms: {1e3 * min(waits):.3g} to {1e3 * max(waits):.3g}, no rank delays the others"
    order = sorted(range(len(waits)), key=lambda rank: waits[rank])
    named = order[: 1 if len(waits) <= _MAX_LISTED else 3]
    is_single = waits[order[1]] - waits[order[0]] > MIN_SHARE * step

    def rank_text(rank: int) -> str:
        host = f" on {hosts[rank]}" if rank in named and len(set(hosts)) > 1 else ""
        reason = " (the others wait for it)" if is_single and rank == order[0] else ""
        return f"rank {rank}{host} {1e3 * waits[rank]:.3g}{reason}"

    if len(waits) <= _MAX_LISTED:
        parts = [rank_text(rank) for rank in (order[0], *sorted(order[1:]))]
        return f"wait per step, ms: {', '.join(parts)}"
    least, most = (", ".join(map(rank_text, ranks)) for ranks in (order[:3], order[:-4:-1]))
    return f"wait per step, ms: least {least}; median {1e3 * median(waits):.3g}; most {most}"

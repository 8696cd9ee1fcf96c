"""Who waits for whom. In a step that all synchronise the rank that the others wait for does not wait itself.

What is timed, as phase "wait": the count of the step's tokens, where slow data loading shows, and the flag of finite
gradients, where a slow forward or backward pass does. Where FSDP shards a replica over ranks, its own collectives wait
inside these passes: all ranks of a slow one's shard group look slow.
"""

from statistics import median

import torch
import torch.distributed as dist

from topology.collectives import ReplicaCollectives

# Of a step: ranks whose waits differ by less are equally fast.
LEAST_SHARE = 0.05
# Up to so many ranks are listed one by one.
_FEW = 8


def gather_waits(
    collectives: ReplicaCollectives, wait: float, step: float, device: torch.device
) -> tuple[list[float], float]:
    """(`wait` of every rank, mean of `step` over them), all in seconds. A collective call, whose bytes do not count."""
    if collectives.is_fake or not dist.is_initialized():
        return [wait], step
    world = dist.get_world_size()
    values = torch.zeros(world + 2, dtype=torch.float64, device=device)
    values[dist.get_rank()], values[-2], values[-1] = wait, step, 1.0
    *waits, steps, times = collectives.sum_over_all(values).tolist()
    # Simulated replicas are added up as often as they are.
    return [value * world / times for value in waits], steps / times


def slowest_rank(waits: list[float], step: float) -> int:
    """The rank that waits least; -1 where all wait about as long, against a step of so many seconds."""
    return waits.index(min(waits)) if max(waits) - min(waits) > LEAST_SHARE * step else -1


def waits_text(waits: list[float], step: float, hosts: list[str]) -> str:
    """For the log. waits, step: seconds. hosts: of all ranks; named for the slowest where there are several."""
    if slowest_rank(waits, step) < 0:
        return f"waits a step, ms: {1e3 * min(waits):.3g} to {1e3 * max(waits):.3g}, no rank holds up the others"
    order = sorted(range(len(waits)), key=lambda rank: waits[rank])
    named = order[: 1 if len(waits) <= _FEW else 3]
    alone = waits[order[1]] - waits[order[0]] > LEAST_SHARE * step

    def told(rank: int) -> str:
        host = f" on {hosts[rank]}" if rank in named and len(set(hosts)) > 1 else ""
        reason = " (the others wait for it)" if alone and rank == order[0] else ""
        return f"rank {rank}{host} {1e3 * waits[rank]:.3g}{reason}"

    if len(waits) <= _FEW:
        parts = [told(rank) for rank in (order[0], *sorted(order[1:]))]
        return f"waits a step, ms: {', '.join(parts)}"
    least, most = (", ".join(map(told, ranks)) for ranks in (order[:3], order[:-4:-1]))
    return f"waits a step, ms: least {least}; median {1e3 * median(waits):.3g}; most {most}"

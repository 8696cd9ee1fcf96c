"""Cost of the optimizer's matrix products and of their exchange, in closed form. Plain arithmetic: no torch."""

from collections import defaultdict

from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.methods.options import DenseOptions, MethodOptions
from torchtitan_scape.optimizers.cost import get_optimizer_cost
from torchtitan_scape.sharding.cost import exchange_stages
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.traffic import Stage, all_gather_stages, stage_seconds

MFU = 0.4  # assumed share of the device's peak that forward and backward passes reach, and an optimizer's products


def optimizer_flops(options: MethodOptions, optimizer: str, model: LocalModel, ranks: int) -> float:
    """Return the optimizer's matrix products in a step on the busiest rank, in floating-point operations.

    Args:
        model: Whole parameters.
        ranks: Ranks that divide the products.
    """
    flops = get_optimizer_cost(optimizer).flops
    if flops is None or options.holds_optimizer_state:
        return 0.0
    groups = options.update_groups(model)
    return sum(flops(group, ranks) for group in groups) / len(groups)


def matrix_stages(optimizer: str, model: LocalModel, layout: Layout) -> list[Stage]:
    """Return the stages of the optimizer's matrix exchange between the ranks of a replica, averaged over ranks.

    Each rank receives one whole matrix at a time and returns its parts. Other optimizers exchange nothing.

    Args:
        model: Whole parameters.
    """
    group, parts_of = layout.shard_group(0), get_optimizer_cost(optimizer).parts
    if parts_of is None or len(group) == 1:
        return []
    parts = parts_of(model, len(group))
    sent: dict[str, float] = defaultdict(float)
    for owner, nbytes in parts:
        for rank in (rank for rank in group if rank != group[owner]):
            sent[layout.level(rank, group[owner])] += 2 * nbytes / len(group)
    exchanges = 2 * -(-len(parts) // len(group))
    stages = exchange_stages([group], 0.0, layout)
    return [Stage(one.level, exchanges * one.rounds, sent[one.level]) for one in stages]


def gathered_matrices(optimizer: str, model: LocalModel, layout: Layout) -> list[int]:
    """Return the bytes per rank of each all-gather of matrices that replicas divide; [] if there are none.

    Args:
        model: Whole parameters.
    """
    ranks, replicas = len(layout.shard_group(0)), layout.replicate
    parts_of = get_optimizer_cost(optimizer).parts
    if parts_of is None or replicas == 1:
        return []
    sizes = [int(nbytes) for _, nbytes in parts_of(model, ranks)]
    per_replica = [sum(sizes[first : first + ranks]) for first in range(0, len(sizes), ranks)]
    rounds = [per_replica[first : first + replicas] for first in range(0, len(per_replica), replicas)]
    return [padded_bytes(max(part)) for part in rounds]


def gather_stages(optimizer: str, model: LocalModel, layout: Layout) -> list[Stage]:
    """Return the stages of these all-gathers."""
    levels, gathers = layout.replica_tiers, gathered_matrices(optimizer, model, layout)
    return [stage for nbytes in gathers for stage in all_gather_stages(nbytes, levels)]


def divides_matrices(
    options: MethodOptions, optimizer: str, model: LocalModel, layout: Layout, links: Links, mfu: float = MFU
) -> bool:
    """Return whether replicas divide the matrix products of the optimizer: if this is faster than to repeat them.

    It requires replicas with equal gradients, and a GPU, because the rate of a CPU is not known. With nominal links and
    a method that compresses they do not: such a method is for links that are slower, and the gather may be the larger
    part of all bytes.

    Args:
        model: Whole parameters.
    """
    device, stages = layout.machine.device, gather_stages(optimizer, model, layout)
    if not stages or options.per_replica_weights or options.holds_optimizer_state or options.divides_update:
        return False
    if not device.runtime or (links.nominal and not isinstance(options, DenseOptions)):
        return False
    ranks, replicas = layout.shard * layout.context, layout.replicate
    alone, divided = (optimizer_flops(options, optimizer, model, count) for count in (ranks, ranks * replicas))
    return sum(stage_seconds(stages, links)) < (alone - divided) / (device.peak * 1e12 * mfu)

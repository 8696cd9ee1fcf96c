"""The size of the payload's chunks, from the cost model."""

from collections.abc import Sequence
from typing import Any

from topology.layout import Layout
from topology.links import Links
from torchtitan_scape.methods.topk.blocks import payload_entries
from torchtitan_scape.planner.step import Assumptions, best_chunk_bytes
from torchtitan_scape.planner.volumes import PlannedRun, optimizer_bytes


def best_chunk(shapes: Sequence[Sequence[int]], options: Any, layout: Layout, rank: int, levels: int) -> int:
    """Return the chunk size in bytes that the cost model finds fastest, for the nominal figures of the machine.

    Args:
        shapes: of this rank's shards.
        options: `ScapeOptions`.
        layout: of the run, simulated replicas included.
        rank: this rank.
        levels: levels of the exchange, as communicators were built.
    """
    # Of the whole group, so that all its ranks agree: the links of one rank may differ from those of the next one.
    tiers = layout.hierarchy(layout.replicate_group(rank))
    method = PlannedRun("scape", options.density, options.wire, block=options.block_size)
    device, own = layout.machine.device, [tuple(shape) for shape in shapes]
    packed, _ = optimizer_bytes(method, own, layout.replicate)
    return best_chunk_bytes(
        4 * payload_entries(own, options.density, options.block_size),
        packed / (device.memory_bandwidth * 1e9 * Assumptions().memory_efficiency),
        [(tier.level, tier.size) for tier in tiers],
        Links.from_machine(layout.machine),
        options.wire,
        flat=levels < len(tiers),
    )

"""The size of the payload's chunks, from the cost model."""

from collections.abc import Sequence

from topology.layout import Layout
from topology.links import Links
from topology.machines import MEMORY_EFFICIENCY
from topology.pipelining import best_chunk_bytes
from torchtitan_scape.methods.scape.payload import payload_entries
from torchtitan_scape.methods.wire import encoded_size


def best_chunk(
    shapes: Sequence[Sequence[int]],
    density: float,
    block_size: int,
    wire: str,
    packed_bytes: float,
    layout: Layout,
    rank: int,
    levels: int,
) -> int:
    """Return the chunk size in bytes that the cost model finds fastest, for the nominal figures of the machine.

    Args:
        shapes: of this rank's shards.
        density: target density.
        block_size: entries per block of the mask.
        wire: encoding of the payload.
        packed_bytes: memory traffic of the packing pass.
        layout: of the run, simulated replicas included.
        rank: this rank.
        levels: levels of the exchange, as communicators were built.
    """
    # Of the whole group, so that all its ranks agree: the links of one rank may differ from those of the next one.
    tiers = layout.hierarchy(layout.replicate_group(rank))
    device = layout.machine.device
    return best_chunk_bytes(
        4 * payload_entries([tuple(shape) for shape in shapes], density, block_size),
        packed_bytes / (device.memory_bandwidth * 1e9 * MEMORY_EFFICIENCY),
        [(tier.level, tier.size) for tier in tiers],
        Links.from_machine(layout.machine),
        encoded_size(wire),
        flat=levels < len(tiers),
    )

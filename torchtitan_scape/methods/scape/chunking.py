"""Size of the payload's chunks by the cost model."""

from collections.abc import Sequence

from torchtitan_scape.methods.codes import encoded_size
from torchtitan_scape.methods.scape.payload import payload_entries
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.links import Links, best_chunk_bytes
from torchtitan_scape.topology.machines import MEMORY_EFFICIENCY
from torchtitan_scape.topology.ring_bytes import spanned


def best_chunk(
    shapes: Sequence[Sequence[int]],
    density: float,
    block_size: int,
    code: str,
    packed_bytes: float,
    layout: Layout,
    rank: int,
    levels: int,
) -> int:
    """Return the fastest chunk size in bytes by the cost model, for the machine's links.

    Args:
        shapes: Shapes of this rank's shards.
        density: Target density.
        block_size: Entries per block of the mask.
        code: Encoding of the payload.
        packed_bytes: Memory traffic of the packing pass in bytes.
        layout: Layout of the run, simulated replicas included.
        rank: This rank.
        levels: Number of link levels for which communicators were built.
    """
    # The levels of the group, not of this rank: all ranks of the group must choose the same size.
    tiers = layout.hierarchy(layout.replicate_group(rank))
    device = layout.machine.device
    return best_chunk_bytes(
        4 * payload_entries([tuple(shape) for shape in shapes], density, block_size),
        packed_bytes / (device.memory_bandwidth * 1e9 * MEMORY_EFFICIENCY),
        spanned(tiers, flat=levels < len(tiers)),
        Links.from_machine(layout.machine),
        encoded_size(code),
    )

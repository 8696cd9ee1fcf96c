"""Packing and exchange of a payload in chunks: predicted time and best chunk size. Plain arithmetic: no torch."""

from torchtitan_scape.topology.links import Links, stage_seconds
from torchtitan_scape.topology.ring_bytes import Levels, MessageBytes, all_reduce_stages

MAX_CHUNKS = 8
# Each further chunk costs one latency. Below this share of its transfer time the latency is within a link's noise.
MAX_LATENCY_SHARE = 0.05


def pipeline_seconds(pack: float, transfer: float, latency: float, chunks: int) -> float:
    """Return the seconds to pack and exchange `chunks` equal chunks, each exchanged while the next one is packed.

    The result is pack + exchange / m if packing is slower, and pack / m + exchange + (m - 1) * latency if the link is.
    """
    packed, exchanged = pack / chunks, transfer / chunks + latency
    return packed + exchanged + (chunks - 1) * max(packed, exchanged)


def best_chunks(pack: float, transfer: float, latency: float) -> int:
    """Return the fastest number of chunks, from 1 to 8: close to sqrt(pack / latency) if the link is slower.

    The latency of a chunk never exceeds a twentieth of its transfer time.
    """
    allowed = [m for m in range(1, MAX_CHUNKS + 1) if m == 1 or latency <= MAX_LATENCY_SHARE * transfer / m]
    return min(allowed, key=lambda m: pipeline_seconds(pack, transfer, latency, m))


def best_chunk_bytes(
    nbytes: int,
    pack_seconds: float,
    levels: Levels,
    links: Links,
    message_bytes: MessageBytes | None = None,
) -> int:
    """Return the best chunk size of a payload in bytes of FP32, a multiple of 4.

    Args:
        nbytes: Size of the payload in FP32.
        pack_seconds: Seconds to pack the whole payload.
        levels: Levels of the exchange, innermost first.
        message_bytes: Encoded size of n elements on the outermost level; None for FP32.
    """
    latency, transfer = stage_seconds(all_reduce_stages(nbytes // 4, levels, message_bytes), links)
    chunks = best_chunks(pack_seconds, transfer, latency)
    return max(4, -(-nbytes // (4 * chunks)) * 4)

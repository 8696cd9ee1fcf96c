"""Streaming DiLoCo: DiLoCo in fragments, whose exchange overlaps with training.

Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch" (2025),
arXiv:2501.18512.
"""

from torchtitan_scape.methods.local_updates import LocalUpdates


class StreamingDiloco(LocalUpdates):
    """Exchanges one fragment at a time. The result is mixed with the replica's own parameters."""

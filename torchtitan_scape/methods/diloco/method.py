"""DiLoCo: replicas train alone for several steps, then the anchor takes an outer step along their mean displacement.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), arXiv:2311.08105; the
defaults are those of "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for
DiLoCo" (2025), arXiv:2503.09799.
"""

from torchtitan_scape.methods.local_updates import LocalUpdates


class Diloco(LocalUpdates):
    """Exchanges all parameters at once, every `inner_steps` steps. Replicas continue from the anchor."""

"""DiLoCo: several local steps, then an outer step of the anchor along the mean displacement of the replicas.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (2023), arXiv:2311.08105. The
defaults are from "Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for
DiLoCo" (2025), arXiv:2503.09799.
"""

from torchtitan_scape.methods.local_updates import LocalUpdates


class Diloco(LocalUpdates):
    """Exchanges all parameters every `inner_steps` steps. Replicas continue from the anchor."""

"""SparseLoCo: replicas train alone for several steps, then send the largest entries of their displacements in two bits.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025), arXiv:2508.15706; a run of 72 B
parameters: arXiv:2603.08163.
"""

from torchtitan_scape.methods.local_updates import LocalUpdates


class Sparseloco(LocalUpdates):
    """Exchanges all parameters at once, every `inner_steps` steps: top-k of the displacements with error feedback.

    Displacements are averaged by `Topk` with tiles: x_i = decay * e_i + D_i. The residual e_i becomes x_i minus the
    decoded values that were sent.
    """

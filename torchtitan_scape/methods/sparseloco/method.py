"""SparseLoCo: several local steps, then an exchange of the largest entries of the displacements in two bits.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (2025), arXiv:2508.15706. A run with 72 B
parameters is described in arXiv:2603.08163.
"""

from torchtitan_scape.methods.local_updates import LocalUpdates


class Sparseloco(LocalUpdates):
    """Exchanges all parameters every `inner_steps` steps: top-k of the displacements with error feedback.

    `Topk` with tiles averages the displacements: x_i = decay * e_i + D_i. The residual e_i becomes x_i minus the
    decoded values that were sent.
    """

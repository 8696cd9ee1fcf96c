"""Memory, traffic and FLOPs of Muon (`optimizers.muon`). Plain arithmetic: no torch."""

import math
from collections import defaultdict
from typing import Any

from torchtitan_scape.methods.topk.blocks import Shapes, entries_of

ITERATIONS = 5  # Newton-Schulz iterations.


def hidden_shapes(shapes: Shapes) -> Shapes:
    """Return the shapes of the matrices in a model's blocks.

    For Llama these are all matrices but the first and the last (embedding and output), for GPT-2, which ends with a
    norm, all but the first two (embeddings).
    """
    matrices = [shape for shape in shapes if len(shape) == 2]
    return matrices[1:-1] if len(shapes[-1]) == 2 else matrices[2:]


def muon_memory(method: Any, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Return bytes by kind: momentum of all parameters, and AdamW's second moment of those that Muon does not
    update.
    """
    n, rest = 4.0 * entries_of(shapes), 4.0 * (entries_of(shapes) - entries_of(hidden_shapes(shapes)))
    return {"parameters": n, "gradients": n, "state": n + rest}


def muon_passes(method: Any, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """Return the memory traffic in bytes of (packing pass, other passes).

    AdamW takes 44 bytes per parameter, including finite check, norm and clipping. Muon takes 16 for those three, 24 for
    the momentum, 18 for the conversion to and from BF16, 8 per iteration, and 18 for decay and step.
    """
    hidden = entries_of(hidden_shapes(shapes))
    return 0.0, 44.0 * (entries_of(shapes) - hidden) + (16.0 + 24.0 + 18.0 + 8.0 * ITERATIONS + 18.0) * hidden


def muon_flops(shapes: Shapes, ranks: int) -> float:
    """Return the FLOPs of the iterations on the rank that has most of them.

    A matrix (a, b), a <= b, is multiplied twice by (a, a), which is squared once.

    Args:
        shapes: Shapes of whole parameters, whose matrices are assigned to the ranks.
        ranks: Number of ranks.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for owner, shape in _assigned(shapes, ranks):
        a, b = sorted(shape)
        sums[owner] += ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)
    return max(sums.values())


def muon_parts(shapes: Shapes, ranks: int) -> list[tuple[int, float]]:
    """Return (owner, bytes per rank) of every matrix that `optimizers.matrix_exchange` sends there and back.

    Args:
        shapes: Shapes of whole parameters.
        ranks: Number of ranks.
    """
    return [(owner, 2.0 * -(-rows // ranks) * columns) for owner, (rows, columns) in _assigned(shapes, ranks)]


def _assigned(shapes: Shapes, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (owner, shape) of every matrix, the largest first."""
    return [(i % ranks, shape) for i, shape in enumerate(sorted(hidden_shapes(shapes), key=lambda s: -math.prod(s)))]

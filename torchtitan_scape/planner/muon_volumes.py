"""What Muon holds, moves and multiplies, by `optimizer.muon`. Plain arithmetic: no torch."""

import math
from collections import defaultdict
from typing import Any

from torchtitan_scape.planner.payload import Shapes, entries_of

ITERATIONS = 5  # of Newton-Schulz


def hidden_shapes(shapes: Shapes) -> Shapes:
    """The matrices of a model's blocks: of Llama all but the first and the last, which are embedding and output; of
    GPT-2, which ends with a norm, all but the first two, which are its tables."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    return matrices[1:-1] if len(shapes[-1]) == 2 else matrices[2:]


def muon_memory(method: Any, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Momentum of all, AdamW's second moment of what is no matrix of a block."""
    n, rest = 4.0 * entries_of(shapes), 4.0 * (entries_of(shapes) - entries_of(hidden_shapes(shapes)))
    return {"parameters": n, "gradients": n, "state": n + rest}


def muon_passes(method: Any, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """AdamW's 44 bytes a parameter, with finite check, norm and clip; or those three's 16, 24 for the momentum, 18 to
    begin and end in BF16, 8 an iteration, and 18 for decay and step."""
    hidden = entries_of(hidden_shapes(shapes))
    return 0.0, 44.0 * (entries_of(shapes) - hidden) + (16.0 + 24.0 + 18.0 + 8.0 * ITERATIONS + 18.0) * hidden


def muon_flops(shapes: Shapes, ranks: int) -> float:
    """Of the iterations, of the rank that has most of them. shapes: of whole matrices, dealt to so many ranks.

    A matrix (a, b), a <= b, is multiplied twice with (a, a), which is squared once.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for owner, shape in _dealt(shapes, ranks):
        a, b = sorted(shape)
        sums[owner] += ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)
    return max(sums.values())


def muon_parts(shapes: Shapes, ranks: int) -> list[tuple[int, float]]:
    """As `optimizer.dealt` exchanges them, there and back, of every matrix: who has it, and the bytes of the part that
    lies with each rank. shapes: of whole matrices."""
    return [(owner, 2.0 * -(-rows // ranks) * columns) for owner, (rows, columns) in _dealt(shapes, ranks)]


def _dealt(shapes: Shapes, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """(owner, shape) of every matrix, the largest first."""
    return [(i % ranks, shape) for i, shape in enumerate(sorted(hidden_shapes(shapes), key=lambda s: -math.prod(s)))]

"""Memory, memory traffic and matrix products of the optimizers, in closed form. Plain arithmetic: no torch.

Traffic counts every input read once and every output written once. It contains the passes that each step runs besides
the optimizer: finite check (4 bytes per parameter), norm (4) and clipping (8).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_scape.core.workloads import Shapes, count_entries

ITERATIONS = 5  # of Newton-Schulz
CHECK_AND_CLIP = 16.0


@dataclass(frozen=True)
class OptimizerCost:
    """Closed form of an optimizer. All functions take shapes.

    Attributes:
        state: Bytes of state on this rank, of its shards.
        traffic: Bytes that the passes of a step move on this rank, of its shards.
        flops: Floating-point operations of matrix products on the rank with most of them, of (whole shapes, ranks of a
            replica); None if there are none.
        parts: (owner, bytes of the part on each rank) of every matrix that one rank of a replica computes for all, of
            (whole shapes, ranks of a replica); None if there are none.
    """

    state: Callable[[Shapes], float]
    traffic: Callable[[Shapes], float]
    flops: Callable[[Shapes, int], float] | None = None
    parts: Callable[[Shapes, int], list[tuple[int, float]]] | None = None

    def device_memory(self, shapes: Shapes) -> dict[str, float]:
        """Return the bytes of parameters, gradients and state on this rank, by kind."""
        n, state = 4.0 * count_entries(shapes), self.state(shapes)
        return {"parameters": n, "gradients": n} | ({"state": state} if state else {})


def _elementwise(state: float, traffic: float) -> OptimizerCost:
    """Return the cost of an optimizer with fixed bytes per parameter."""
    return OptimizerCost(
        state=lambda shapes: state * count_entries(shapes),
        traffic=lambda shapes: (traffic + CHECK_AND_CLIP) * count_entries(shapes),
    )


def get_optimizer_cost(name: str) -> OptimizerCost:
    """Return the cost of `[optimizer] name`.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in OPTIMIZER_COSTS:
        raise ValueError(f"there is no optimizer {name!r}; known are {', '.join(OPTIMIZER_COSTS)}")
    return OPTIMIZER_COSTS[name]


# ---------------------------------------------------------------------------------------------- Muon


def hidden_shapes(shapes: Shapes) -> Shapes:
    """Return the matrices of a model's blocks.

    Llama: all matrices but the first and the last, which are embedding and output. GPT-2, which ends with a norm: all
    but the first two, which are its embeddings.
    """
    matrices = [shape for shape in shapes if len(shape) == 2]
    return matrices[1:-1] if len(shapes[-1]) == 2 else matrices[2:]


def muon_state(shapes: Shapes) -> float:
    """Return the bytes of the momentum of all parameters and AdamW's second moment of those outside the blocks."""
    n = count_entries(shapes)
    return 4.0 * n + 4.0 * (n - count_entries(hidden_shapes(shapes)))


def muon_traffic(shapes: Shapes) -> float:
    """Return the bytes of AdamW's passes outside the blocks and of Muon's passes on the matrices of the blocks.

    Muon moves 24 bytes per entry for the momentum, 18 to convert to BF16 and back, 8 per iteration, and 18 for decay
    and step.
    """
    hidden = count_entries(hidden_shapes(shapes))
    own = CHECK_AND_CLIP + 24.0 + 18.0 + 8.0 * ITERATIONS + 18.0
    return (CHECK_AND_CLIP + 28.0) * (count_entries(shapes) - hidden) + own * hidden


def muon_flops(shapes: Shapes, ranks: int) -> float:
    """Return the operations of the iterations on the rank with most of them.

    A matrix (a, b), a <= b, is multiplied twice with an (a, a) matrix, which is squared once.

    Args:
        shapes: Shapes of whole matrices, which are distributed over `ranks`.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for owner, shape in _assigned(shapes, ranks):
        a, b = sorted(shape)
        sums[owner] += ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)
    return max(sums.values(), default=0.0)


def muon_parts(shapes: Shapes, ranks: int) -> list[tuple[int, float]]:
    """Return (owner, bytes of the part on each rank) of every matrix, as `optimizers.matrix_exchange` sends them.

    Args:
        shapes: Shapes of whole matrices.
    """
    return [(owner, 2.0 * -(-rows // ranks) * columns) for owner, (rows, columns) in _assigned(shapes, ranks)]


def _assigned(shapes: Shapes, ranks: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (owner, shape) of every matrix, the largest first."""
    return [(i % ranks, shape) for i, shape in enumerate(sorted(hidden_shapes(shapes), key=lambda s: -math.prod(s)))]


# Bytes per parameter: state, and what the fused step reads and writes.
OPTIMIZER_COSTS = {
    "AdamW": _elementwise(state=8.0, traffic=28.0),
    "AdamS": _elementwise(state=4.0, traffic=20.0),
    "Muon": OptimizerCost(muon_state, muon_traffic, muon_flops, muon_parts),
    "SignSGD": _elementwise(state=0.0, traffic=12.0),
}

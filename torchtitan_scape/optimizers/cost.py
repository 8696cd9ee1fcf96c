"""Memory, memory traffic and matrix products of the optimizers, in closed form. Plain arithmetic: no torch.

Traffic counts every input read once and every output written once. It contains the passes that each step runs besides
the optimizer: finite check (4 bytes per parameter), norm (4) and clipping (8).
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_scape.core.workloads import LocalModel, Shape, count_entries

ITERATIONS = 5  # of Newton-Schulz
CHECK_AND_CLIP = 16.0


@dataclass(frozen=True)
class OptimizerCost:
    """Closed form of an optimizer.

    Attributes:
        state: Bytes of state on this rank, of its shards.
        traffic: Bytes that the passes of a step move on this rank, of its shards.
        flops: Floating-point operations of matrix products on the rank with most of them, of (whole model, ranks of a
            replica); None if there are none.
        parts: (owner, bytes of the part on each rank) of every matrix that one rank of a replica computes for all, of
            (whole model, ranks of a replica); None if there are none.
    """

    state: Callable[[LocalModel], float]
    traffic: Callable[[LocalModel], float]
    flops: Callable[[LocalModel, int], float] | None = None
    parts: Callable[[LocalModel, int], list[tuple[int, float]]] | None = None


def _elementwise(state: float, traffic: float) -> OptimizerCost:
    """Return the cost of an optimizer with fixed bytes per parameter."""
    return OptimizerCost(
        state=lambda model: state * model.entries,
        traffic=lambda model: (traffic + CHECK_AND_CLIP) * model.entries,
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


def muon_state(model: LocalModel) -> float:
    """Return the bytes of the momentum of all parameters and of AdamW's second moment of those that are not Muon's."""
    return 8.0 * model.entries - 4.0 * count_entries(model.hidden_shapes)


def muon_traffic(model: LocalModel) -> float:
    """Return the bytes of Muon's passes on its matrices and of AdamW's passes on the other parameters.

    Muon moves 24 bytes per entry for the momentum, 18 to convert to BF16 and back, 8 per iteration, and 18 for decay
    and step.
    """
    hidden = count_entries(model.hidden_shapes)
    own = CHECK_AND_CLIP + 24.0 + 18.0 + 8.0 * ITERATIONS + 18.0
    return (CHECK_AND_CLIP + 28.0) * (model.entries - hidden) + own * hidden


def muon_flops(model: LocalModel, ranks: int) -> float:
    """Return the operations of the iterations on the rank with most of them.

    A matrix (a, b), a <= b, is multiplied twice with an (a, a) matrix, which is squared once.

    Args:
        model: Whole matrices, which are distributed over `ranks`. Stacks of matrices are sharded by whole matrices.
    """
    sums: defaultdict[int, float] = defaultdict(float)
    for owner, shape in _assigned(model, ranks):
        sums[owner] += _flops(shape)
    stacks = [shape for shape in model.hidden_shapes if len(shape) == 3]
    return max(sums.values(), default=0.0) + sum(-(-shape[0] // ranks) * _flops(shape[1:]) for shape in stacks)


def _flops(shape: Shape) -> float:
    a, b = sorted(shape)
    return ITERATIONS * (4.0 * a * a * b + 2.0 * a**3)


def muon_parts(model: LocalModel, ranks: int) -> list[tuple[int, float]]:
    """Return (owner, bytes of the part on each rank) of every matrix, as `MatrixExchange` sends them.

    Args:
        model: Whole matrices.
    """
    return [(owner, 2.0 * -(-rows // ranks) * columns) for owner, (rows, columns) in _assigned(model, ranks)]


def _assigned(model: LocalModel, ranks: int) -> list[tuple[int, Shape]]:
    """Return (owner, shape) of every matrix, the largest first."""
    matrices = [shape for shape in model.hidden_shapes if len(shape) == 2]
    return [(i % ranks, shape) for i, shape in enumerate(sorted(matrices, key=lambda s: -math.prod(s)))]


# Bytes per parameter: state, and what the fused step reads and writes.
OPTIMIZER_COSTS = {
    "AdamW": _elementwise(state=8.0, traffic=28.0),
    "AdamS": _elementwise(state=4.0, traffic=20.0),
    "Muon": OptimizerCost(muon_state, muon_traffic, muon_flops, muon_parts),
    "SignSGD": _elementwise(state=0.0, traffic=12.0),
}

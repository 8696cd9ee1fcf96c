"""What methods that synchronise gradients send, each in closed form by its file in `sync`. Plain arithmetic: no torch.

Of a rank's shards, which `shapes` are; bytes.
"""

import math
from dataclasses import replace
from typing import Protocol

from torchtitan_scape.core.workloads import Shape
from torchtitan_scape.methods.topk.blocks import (
    Shapes,
    block_grid,
    demo_message_bytes,
    entries_of,
    mask_counts,
    selected_per_block,
    tagc_index,
    tagc_packed,
    topk_message_bytes,
    whole_sizes,
)
from torchtitan_scape.planner.messages import PlannedMessage


class Gradients(Protocol):
    """What is asked of `planner.volumes.Method`."""

    @property
    def density(self) -> float: ...
    @property
    def values(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def selection(self) -> str: ...
    @property
    def dense(self) -> tuple[int, ...]: ...
    @property
    def k(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def interval(self) -> int: ...
    @property
    def clip_refresh(self) -> str: ...
    @property
    def inner_steps(self) -> int: ...


def compressed(method: Gradients, shapes: Shapes) -> list[Shape]:
    """The tensors that a method with a residual does not send whole."""
    return [s for i, s in enumerate(shapes) if i not in method.dense and (len(s) > 1 or method.selection == "tile")]


def topk_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    if method.density >= 1.0:
        return [PlannedMessage("reduce", 4.0 * entries_of(shapes))]
    selected = compressed(method, shapes)
    cuts = [block_grid(shape, method.selection, method.block) for shape in selected if math.prod(shape)]
    whole = 4.0 * (entries_of(shapes) - entries_of(selected))
    gathered = PlannedMessage(
        "gather", topk_message_bytes(cuts, selected_per_block(cuts, method.density), method.values)
    )
    return [gathered, PlannedMessage("reduce", whole)] if whole else [gathered]


def sparseloco_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    return [replace(m, share=1.0 / method.inner_steps) for m in topk_messages(method, shapes, replicas)]


def tagc_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    """Where the entries are, and as many as a union of all choices may have."""
    if method.density >= 1.0:
        return [PlannedMessage("reduce", 4.0 * entries_of(shapes))]
    index = PlannedMessage(*tagc_index(shapes, method.density, replicas))
    packed = tagc_packed(shapes, method.density, replicas) + sum(whole_sizes(shapes))
    return [index, PlannedMessage("reduce", 4.0 * packed)]


def demo_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    return [PlannedMessage("gather", demo_message_bytes(shapes, method.k, method.block, method.values))]


def radius_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    """What the mask has, and every so many steps all, in which what was kept back may travel apart."""
    sizes = [math.prod(shape) for shape in compressed(method, shapes)]
    kept = sum(mask_counts(sizes, method.density, method.selection, method.block)) + entries_of(shapes) - sum(sizes)
    share = 1.0 / method.interval
    found = [(kept, 1.0 - share), (entries_of(shapes), share)]
    found += [(sum(sizes), share)] if method.clip_refresh == "fresh" else []
    return [PlannedMessage("reduce", 4.0 * entries, share=share) for entries, share in found]


def radius_moved(method: Gradients) -> float:
    """Bytes a parameter: gradient and residual in and out, the mask, the payload in and out; at a whole exchange no
    payload, but moments and parameters for the next mask."""
    return 16.125 + 8.0 * method.density * (1.0 - 1.0 / method.interval) + 12.0 / method.interval


def powersgd_messages(method: Gradients, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    return [PlannedMessage("reduce", 4.0 * entries) for entries in _factors(shapes, method.rank)]


def powersgd_rank(shapes: Shapes, nbytes: float) -> int:
    """The largest rank whose messages hold at most `nbytes`; at least 1."""
    rank = 1
    while rank < 1024 and 4.0 * sum(_factors(shapes, rank + 1)) <= nbytes:
        rank += 1
    return rank


def _factors(shapes: Shapes, rank: int) -> tuple[int, int, int]:
    """Entries of what is left whole, then of all P, then of all Q. A matrix goes whole where factors would save less
    than half."""
    factored = []
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        if len(shape) > 1 and 2 * rank * (rows + columns) < rows * columns:
            factored.append((rows, columns))
    whole = entries_of(shapes) - entries_of(factored)
    rows, columns = (sum(sides) for sides in zip(*factored, strict=True)) if factored else (0, 0)
    return whole, rank * rows, rank * columns

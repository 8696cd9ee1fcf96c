"""What replicas that step alone hold and move besides their optimizer's own, by the frame of `methods.local_updates`.

Plain arithmetic: no torch. n is the entries of a rank's shards; an exchange of a part of them counts by its share of
the steps.
"""

import math
from dataclasses import replace
from typing import Protocol

from torchtitan_scape.methods.topk.blocks import Shapes, entries_of
from torchtitan_scape.planner.messages import CODED_BLOCK, PlannedMessage, coded_message

OWNER_ERROR_ABOVE = 4  # replicas above which `methods.sparta` keeps the owner error apart from the weights


class Local(Protocol):
    """What is asked of `planner.volumes.Method`."""

    @property
    def inner_steps(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    @property
    def delay(self) -> int: ...
    @property
    def outer_momentum(self) -> float: ...
    @property
    def wire(self) -> str: ...
    @property
    def offload(self) -> tuple[str, ...]: ...


def moved_messages(method: Local, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    """Of every fragment, which are taken as even where there are several."""
    hidden, share, n = method.delay > 0, 1.0 / method.inner_steps, entries_of(shapes)
    if method.wire == "float32":
        each, more = divmod(n, method.fragments)
        sizes = [each + (i < more) for i in range(method.fragments)]
        return [PlannedMessage("reduce", 4.0 * size, hidden=hidden, share=share) for size in sizes]
    part = shapes if method.fragments == 1 else [(-(-n // method.fragments),)]
    message = replace(coded_message(part, replicas, method.wire), hidden=hidden, share=share)
    return [message] * method.fragments


def turn_messages(method: Local, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    """Of a step, in which it is the turn of one block of entries in `inner_steps`; turns are taken as even."""
    blocks = sum(-(-math.prod(shape) // CODED_BLOCK) for shape in shapes)
    if method.wire == "float32":
        return [PlannedMessage("reduce", 4.0 * CODED_BLOCK * blocks / method.inner_steps)]
    return [coded_message([(-(-blocks // method.inner_steps) * CODED_BLOCK,)], replicas, method.wire)]


def keeps_owed(method: Local, replicas: int) -> bool:
    return method.wire != "float32" and replicas > OWNER_ERROR_ABOVE


def turn_memory(method: Local, shapes: Shapes, replicas: int) -> dict[str, float]:
    """The anchor, and what is owed of it."""
    n = 4.0 * entries_of(shapes)
    return {"anchor": n} | ({"owed": n} if keeps_owed(method, replicas) else {})


def turn_moved(method: Local, replicas: int) -> float:
    """Bytes a parameter besides `local_moved`: what is owed gathered, added and put back."""
    return 28.0 / method.inner_steps if keeps_owed(method, replicas) else 0.0


def kept_bytes(method: Local, shapes: Shapes) -> dict[str, float]:
    """Anchor and outer momentum, wherever they lie."""
    n = 4.0 * entries_of(shapes)
    return {"anchor": n} | ({"outer momentum": n} if method.outer_momentum else {})


def local_host_bytes(method: Local, shapes: Shapes, replicas: int) -> dict[str, float]:
    return kept_bytes(method, shapes) if method.offload else {}


def local_host_link_bytes(method: Local, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """The anchor to the device for what has moved; at the outer step what is kept there and back. In the mean."""
    host = local_host_bytes(method, shapes, replicas)
    return 0.0, (host.get("anchor", 0.0) + 2 * sum(host.values())) / method.inner_steps


def local_memory(method: Local, shapes: Shapes, replicas: int) -> dict[str, float]:
    """On the device: at an exchange what a fragment has moved; where that is in flight the chunks of it besides.
    Fragments are taken as even."""
    moved = 4.0 * entries_of(shapes) / method.fragments
    kept = {} if method.offload else kept_bytes(method, shapes)
    return kept | {"displacements": (2.0 if method.delay else 1.0) * moved}


def local_moved(method: Local) -> float:
    """Bytes a parameter, in the mean over a round: anchor and parameter read, what has moved written, its chunks filled
    and emptied; then the mean, anchor and momentum in and out, and the parameter."""
    coded = 0.0 if method.wire == "float32" else 16.0
    return (12.0 + 16.0 + coded + 4.0 + 8.0 + (8.0 if method.outer_momentum else 0.0) + 4.0) / method.inner_steps

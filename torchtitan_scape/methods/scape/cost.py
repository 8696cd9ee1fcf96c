"""What SCAPE's passes move and what its state holds, by the kernels' own arithmetic. No torch."""

import math
from typing import Protocol

from kernels.codec.formats import BLOCK as CODED_BLOCK
from kernels.codec.formats import FORMATS
from torchtitan_scape.methods.topk.blocks import (
    Shapes,
    block_layout,
    coded_by,
    entries_of,
    mask_bytes,
    owned_entries,
    payload_entries,
    whole_sizes,
    width,
)
from torchtitan_scape.planner.messages import PlannedMessage


class ScapeCost(Protocol):
    """What is asked of `planner.volumes.Method`."""

    @property
    def density(self) -> float: ...
    @property
    def block(self) -> int: ...
    @property
    def wire(self) -> str: ...
    @property
    def values(self) -> str: ...
    @property
    def weights(self) -> str: ...
    @property
    def offload(self) -> tuple[str, ...]: ...
    @property
    def coding(self) -> tuple[str, str]: ...
    @property
    def sharded(self) -> bool: ...
    @property
    def bf16_weights(self) -> bool: ...
    def has_master(self, replicas: int) -> bool: ...


def scape_messages(method: ScapeCost, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    """The payload, new values where owners update, and the masks beside the next step."""
    wire, coded_values = method.coding
    unit = CODED_BLOCK if {wire, coded_values} & FORMATS.keys() else 8 if wire == "bfloat16" else 1
    payload = 4.0 * payload_entries(shapes, method.density, method.block, unit)
    masks = PlannedMessage("gather", mask_bytes(shapes, method.density, replicas, method.block), hidden=True)
    if not method.sharded:
        return [PlannedMessage("reduce", payload, wire), masks]
    own, coded = payload / 4 / replicas, coded_by(coded_values)
    values = 4 * own if coded is None else coded(int(own))
    return [PlannedMessage("scatter", payload, wire), PlannedMessage("gather", values), masks]


def kernel_bytes(method: ScapeCost, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Bytes that each of SCAPE's passes cannot do without: every input read once, every output written once."""
    n, k = entries_of(shapes), payload_entries(shapes, method.density, method.block)
    masks = 2 * block_layout(shapes, replicas, method.block).mask_bytes()
    if not method.sharded:
        return {
            "finite": 4.0 * n,
            "pack": 12.0 * n + masks + 8 * k,  # gradient, state twice; payload and last moment
            "squares": 8.0 * k,
            # Parameter twice, and a master besides: decayed and updated in its place, and then read to be rounded.
            # Payload and last moment, new moment; the masks once more for what enters each row and column.
            "update": (14.0 if method.bf16_weights else 8.0) * n + 2 * masks + 12 * k,
        } | _coding_bytes(method, k, replicas)
    # The owner reads and writes the common part in pack, and of A's entries payload, common part and parameter for norm
    # and update; all write the values. The decay of BF16 weights is that of their scale.
    owned, sent = owned_entries(shapes, replicas, method.block), k / replicas
    update = 24 * sent + masks + 4 * k + (0 if method.bf16_weights else 8 * n)
    update += 8 * owned if method.has_master(replicas) else 0.0
    passes = {"finite": 4.0 * n, "pack": 12.0 * n + masks + 4 * k + 8 * owned, "squares and update": update}
    return passes | _coding_bytes(method, k, replicas)


def _coding_bytes(method: ScapeCost, sent: float, replicas: int) -> dict[str, float]:
    """Of wires that are not FP32: what was lost read, added to the gradient in the next step, and kept if this one is
    applied; the message written, all that arrive read, the mean coded by its owner, its messages read and decoded.
    Coded values of a sharded update: the owner reads its copies for the difference, all add what is decoded.
    """
    (payload, values), own = map(coded_by, method.coding), sent / replicas
    total = 0.0
    if payload is not None:
        message = payload(int(sent)) / max(1.0, sent)
        total += (12 + 12 + 4 + message + 4 + message) * sent + (4 + 8) * own
        total += 0.0 if method.sharded else (4 + message + 4 + 20) * own + (message + 4) * sent
    if values is not None and method.values != "bfloat16":
        message = values(int(sent)) / max(1.0, sent)
        total += (4 + 4 + message) * own + (message + 4 + 4) * sent
    return {"coding": total} if total else {}


def scape_passes(method: ScapeCost, shapes: Shapes, replicas: int) -> tuple[float, float]:
    passes = kernel_bytes(method, shapes, replicas)
    return passes.pop("pack"), sum(passes.values())


def scape_host_link_bytes(method: ScapeCost, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """Bytes that (pack, the other passes) move between device and host, both directions together.

    With a replicated update the state comes and goes twice, as the new moment enters it after the exchange; with a
    sharded one once.
    """
    host = scape_host_bytes(method, shapes, replicas)
    state = host.get("state", 0.0)
    rest = host.get("master", 0.0) + host.get("owned master", 0.0) + (0.0 if method.sharded else state)
    return 2 * state, 2 * rest


def scape_memory(method: ScapeCost, shapes: Shapes, replicas: int) -> dict[str, float]:
    n, entries = entries_of(shapes), payload_entries(shapes, method.density, method.block)
    layout = block_layout(shapes, replicas, method.block)
    # The payload, last step's moment on it, and what coding lost: in the last step, and in this one on top.
    payload = (4.0 if method.sharded else 8.0) * entries
    offloaded = scape_host_bytes(method, shapes, replicas)
    state = _scape_state(method, shapes, replicas)
    kinds = {"parameters": float(width(method.weights)) * n, "gradients": 4.0 * n}
    kinds |= {kind: value for kind, value in state.items() if kind not in offloaded}
    kinds |= {
        "masks": 2.0 * layout.mask_bytes() + layout.wire_bytes(method.density, "block"),
        "payload": payload + (0.0 if method.coding[0] == "float32" else 8.0 * entries),
        "rates of visits": 16.0 * sum(s[0] + math.prod(s[1:]) for s in shapes if len(s) > 1),
    }
    if offloaded:
        kinds["offload buffers"] = len(offloaded) * _buffer_bytes(method, shapes, replicas)
    return kinds


def _scape_state(method: ScapeCost, shapes: Shapes, replicas: int) -> dict[str, float]:
    """SCAPE's state by kind, bytes, wherever it lies."""
    n, has_master = 4.0 * entries_of(shapes), method.has_master(replicas)
    if not method.sharded:
        return {"state": n} | ({"master": n} if has_master else {})
    owned = 4.0 * owned_entries(shapes, replicas, method.block)
    state = {"state": n - 4.0 * sum(whole_sizes(shapes)), "owned moments": owned}
    return state | ({"owned master": owned} if has_master else {})


def scape_host_bytes(method: ScapeCost, shapes: Shapes, replicas: int) -> dict[str, float]:
    """What a rank keeps in host memory by kind, bytes: what is offloaded and more than its buffers would hold."""
    offloaded = {"state": ("state",), "master": ("master", "owned master")}
    kinds = {kind for name in method.offload for kind in offloaded[name]}
    state, buffers = _scape_state(method, shapes, replicas), _buffer_bytes(method, shapes, replicas)
    return {kind: value for kind, value in state.items() if kind in kinds and value > buffers}


def _buffer_bytes(method: ScapeCost, shapes: Shapes, replicas: int) -> float:
    """Two buffers of the largest tensor; with "sharded" of the largest piece of one that has one owner."""
    largest = max(map(math.prod, shapes))
    return 8.0 * (min(largest, owned_entries(shapes, replicas, method.block)) if method.sharded else largest)


def scape_simulated(method: ScapeCost, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Of every replica state, gradient, masks, payload and last step's moment on it."""
    n, layout = 4.0 * entries_of(shapes), block_layout(shapes, replicas, method.block)
    masks = replicas * (2.0 * layout.mask_bytes() + layout.wire_bytes(method.density, "block"))
    entries = payload_entries(shapes, method.density, method.block) if method.density < 1.0 else 0
    # Where it is coded what that lost besides, the last step's and this one's.
    rows = (2 if method.wire == "float32" else 4) * replicas
    return {
        "parameters": n,
        "gradients": replicas * n,
        "state": replicas * n,
        "masks": masks,
        "payload": 4.0 * rows * entries,
    }

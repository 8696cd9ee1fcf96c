"""What a step sends, moves and holds: messages, passes of the device, memory. Plain arithmetic: no torch.

A method's closed form is an entry of `VOLUMES`. SCAPE's blocks, masks and owners are counted by the kernels' own
arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kernels.codec.formats import BLOCK as CODED_BLOCK
from kernels.codec.formats import FORMATS
from topology.links import Stage, Tiers, all_gather_stages, all_reduce_stages, reduce_scatter_stages
from torchtitan_scape.planner.payload import (
    Shapes,
    block_layout,
    coded_by,
    entries_of,
    mask_bytes,
    owned_entries,
    payload_entries,
    topk_message_bytes,
    whole_sizes,
    width,
)
from torchtitan_scape.planner.workloads import Workload, local_shapes


@dataclass(frozen=True)
class Method:
    """Who synchronises the replicas, and how.

    kind: "adamw" or "adams" (FP32 gradients), "bf16" (BF16 gradients, AdamS), "topk" and "scape" (at `density`) or
        "powersgd" (rank `rank`).
    optimizer: of "topk" and "powersgd", "adamw" or "adams".
    wire: of SCAPE's payload between nodes, "float32", "bfloat16" or a block code.
    update: of SCAPE, "replicated" or "sharded" (each entry's owner updates it for all).
    values: with "sharded", how new values travel, as of `wire`.
    weights: of SCAPE, the dtype in which every replica keeps them; with a master besides unless "float32".
    offload: of SCAPE, "state" and "master" as far as they lie in host memory.
    block: entries of a block, in each of which the largest are selected; 0 for the largest of a tensor (top-k).
    """

    kind: str
    density: float = 1.0
    wire: str = "float32"
    rank: int = 0
    update: str = "replicated"
    values: str = "float32"
    weights: str = "float32"
    offload: tuple[str, ...] = ()
    block: int = 1024
    optimizer: str = "adams"

    def __post_init__(self) -> None:
        if self.kind not in VOLUMES:
            raise ValueError(f"there is no method {self.kind!r}; known are {', '.join(VOLUMES)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"the density is {self.density}; it must be in (0, 1]")
        if VOLUMES[self.kind].option == "rank" and self.rank < 1:
            raise ValueError(f"the rank of {self.kind} is {self.rank}; it must be 1 or more")
        if self.update not in ("replicated", "sharded"):
            raise ValueError(f"update is {self.update!r}; it must be 'replicated' or 'sharded'")
        coded_by(self.wire), coded_by(self.values), width(self.weights)

    @property
    def name(self) -> str:
        option = VOLUMES[self.kind].option
        name = self.kind + (f" {getattr(self, option):g}" if option else "")
        name += "" if self.wire == "float32" else f" {_short(self.wire)}"
        if self.sharded:
            name += " sharded" + ("" if self.values == "float32" else f" {_short(self.values)} values")
        name += " bf16 weights" if self.bf16_weights else ""
        return name + (f" offload {'+'.join(self.offload)}" if self.offload else "")

    @property
    def coding(self) -> tuple[str, str]:
        """How (the payload, new values) travel at the target density: all that is dense goes in FP32."""
        dense = self.density >= 1.0
        return "float32" if dense else self.wire, "float32" if dense or not self.sharded else self.values

    @property
    def sharded(self) -> bool:
        return self.update == "sharded"

    @property
    def bf16_weights(self) -> bool:
        return self.weights == "bfloat16"

    def has_master(self, replicas: int) -> bool:
        rounds = self.sharded and self.values != "float32" and self.density < 1.0
        return self.bf16_weights or (rounds and replicas > 1)


def _short(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Message:
    """A collective of all replicas.

    nbytes: what each of them brings to it, FP32 where it is added up.
    wire: how sums cross the outermost level.
    hidden: it goes beside the next forward and backward pass.
    """

    collective: Literal["reduce", "scatter", "gather"]
    nbytes: float
    wire: str = "float32"
    hidden: bool = False

    def stages(self, tiers: Tiers, flat: bool = False) -> list[Stage]:
        match self.collective:
            case "reduce":
                return all_reduce_stages(tiers, self.nbytes, coded_by(self.wire), flat)
            case "scatter":
                return reduce_scatter_stages(tiers, self.nbytes, coded_by(self.wire), flat)
            case "gather":
                return all_gather_stages(tiers, self.nbytes, flat)


@dataclass(frozen=True)
class Volumes:
    """A method's closed form. All functions take (method, this rank's shapes, replicas); bytes.

    messages: of a step, one after the other.
    passes: what (the pass that fills the payload, the other passes) of the optimizer move: every input read once, every
        output written once.
    memory: what a rank's device holds by kind, parameters, gradients and the optimizer's state included.
    simulated: the same where a process holds all replicas; None where it is no more, as gradients are added up.
    option: the field of `Method` that says how much is sent.
    recipe: keys of its section of a recipe, each with the field of `Method` that has its value; empty for dense.
    """

    messages: Callable[[Method, Shapes, int], list[Message]]
    passes: Callable[[Method, Shapes, int], tuple[float, float]]
    memory: Callable[[Method, Shapes, int], dict[str, float]]
    simulated: Callable[[Method, Shapes, int], dict[str, float]] | None = None
    option: str = ""
    recipe: dict[str, str] = field(default_factory=dict)


def messages(method: Method, shapes: Shapes, replicas: int) -> list[Message]:
    return VOLUMES[method.kind].messages(method, shapes, replicas)


def optimizer_bytes(method: Method, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """`Volumes.passes` of a method."""
    return VOLUMES[method.kind].passes(method, shapes, replicas)


def memory_bytes(method: Method, workload: Workload, shard: int, replicas: int, micro_batch: int) -> dict[str, float]:
    """Estimated memory of a rank's device by kind, bytes: `Volumes.memory`, and what the model needs besides."""
    kinds = VOLUMES[method.kind].memory(method, local_shapes(workload.shapes(), shard), replicas)
    return kinds | {"working copy": workload.working_bytes(), "activations": workload.activation_bytes(micro_batch)}


def simulated_memory_bytes(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Memory of a rank that holds all replicas, by kind, bytes; without activations and FSDP's working copy."""
    volumes = VOLUMES[method.kind]
    return (volumes.simulated or volumes.memory)(method, shapes, replicas)


# ------------------------------------------------------------------------ methods in front of an optimizer


def _whole(sent: float, moved: float, state: float, copies: float = 0.0) -> Volumes:
    """Of a method that sends every entry; bytes a parameter. copies: of the gradients, in the dtype that is sent."""

    def memory(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
        n = entries_of(shapes)
        kinds = {"parameters": 4.0 * n, "gradients": 4.0 * n, "state": state * n}
        return kinds | ({"BF16 gradients": copies * n} if copies else {})

    return Volumes(
        messages=lambda method, shapes, replicas: [Message("reduce", sent * entries_of(shapes))],
        passes=lambda method, shapes, replicas: (0.0, moved * entries_of(shapes)),
        memory=memory,
    )


def _with_residual(
    messages: Callable[[Method, Shapes, int], list[Message]], moved: float, option: str, recipe: dict[str, str]
) -> Volumes:
    """Of a method that keeps what it did not send. moved: bytes a parameter besides the optimizer's own."""

    def passes(method: Method, shapes: Shapes, replicas: int) -> tuple[float, float]:
        return 0.0, moved * entries_of(shapes) + sum(optimizer_of(method).passes(method, shapes, replicas))

    def memory(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
        residual = 4.0 * (entries_of(shapes) - sum(whole_sizes(shapes)))
        kinds = optimizer_of(method).memory(method, shapes, replicas) | {"residual": residual}
        # What replicas send of their own is with all of them at once.
        gathered = sum(m.nbytes for m in messages(method, shapes, replicas) if m.collective == "gather")
        return kinds | ({"messages": replicas * gathered} if gathered else {})

    def simulated(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
        kinds = memory(method, shapes, replicas)
        # All messages reach every replica, and all are there before one of them is added.
        return kinds | {kind: replicas * kinds[kind] for kind in ("gradients", "residual", "messages") if kind in kinds}

    def optimizer_of(method: Method) -> Volumes:
        return VOLUMES[method.optimizer]

    return Volumes(messages, passes, memory, simulated, option, recipe)


def _topk_messages(method: Method, shapes: Shapes, replicas: int) -> list[Message]:
    if method.density >= 1.0:
        return [Message("reduce", 4.0 * entries_of(shapes))]
    sizes = [math.prod(shape) for shape in shapes if len(shape) > 1]
    selected = topk_message_bytes(sizes, method.density, method.block)
    return [Message("gather", selected), Message("reduce", 4.0 * sum(whole_sizes(shapes)))]


def _powersgd_messages(method: Method, shapes: Shapes, replicas: int = 0) -> list[Message]:
    """What is left whole, then all P, then all Q. A matrix goes whole where factors would save less than half."""
    factored = []
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        if len(shape) > 1 and 2 * method.rank * (rows + columns) < rows * columns:
            factored.append((rows, columns))
    whole = entries_of(shapes) - entries_of(factored)
    rows, columns = (sum(sides) for sides in zip(*factored, strict=True)) if factored else (0, 0)
    return [Message("reduce", 4.0 * n) for n in (whole, method.rank * rows, method.rank * columns)]


def powersgd_rank(shapes: Shapes, nbytes: float) -> int:
    """The largest rank whose messages hold at most `nbytes`; at least 1."""

    def held(rank: int) -> float:
        return sum(message.nbytes for message in _powersgd_messages(Method("powersgd", rank=rank), shapes))

    rank = 1
    while rank < 1024 and held(rank + 1) <= nbytes:
        rank += 1
    return rank


# --------------------------------------------------------------------------------------------------- SCAPE


def _scape_messages(method: Method, shapes: Shapes, replicas: int) -> list[Message]:
    wire, coded_values = method.coding
    unit = CODED_BLOCK if {wire, coded_values} & FORMATS.keys() else 1
    payload = 4.0 * payload_entries(shapes, method.density, method.block, unit)
    masks = Message("gather", mask_bytes(shapes, method.density, replicas, method.block), hidden=True)
    if not method.sharded:
        return [Message("reduce", payload, wire), masks]
    own, coded = payload / 4 / replicas, coded_by(coded_values)
    values = 4 * own if coded is None else coded(int(own))
    return [Message("scatter", payload, wire), Message("gather", values), masks]


def kernel_bytes(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
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


def _coding_bytes(method: Method, sent: float, replicas: int) -> dict[str, float]:
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


def _scape_passes(method: Method, shapes: Shapes, replicas: int) -> tuple[float, float]:
    passes = kernel_bytes(method, shapes, replicas)
    return passes.pop("pack"), sum(passes.values())


def host_link_bytes(method: Method, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """Bytes that (pack, the other passes) move between device and host, both directions together.

    With a replicated update the state comes and goes twice, as the new moment enters it after the exchange; with a
    sharded one once.
    """
    host = host_bytes(method, shapes, replicas)
    state = host.get("state", 0.0)
    rest = host.get("master", 0.0) + host.get("owned master", 0.0) + (0.0 if method.sharded else state)
    return 2 * state, 2 * rest


def _scape_memory(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
    n, entries = entries_of(shapes), payload_entries(shapes, method.density, method.block)
    layout = block_layout(shapes, replicas, method.block)
    # The payload, last step's moment on it, and what coding lost: in the last step, and in this one on top.
    payload = (4.0 if method.sharded else 8.0) * entries
    offloaded = host_bytes(method, shapes, replicas)
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


def _scape_state(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
    """SCAPE's state by kind, bytes, wherever it lies."""
    n, has_master = 4.0 * entries_of(shapes), method.has_master(replicas)
    if not method.sharded:
        return {"state": n} | ({"master": n} if has_master else {})
    owned = 4.0 * owned_entries(shapes, replicas, method.block)
    state = {"state": n - 4.0 * sum(whole_sizes(shapes)), "owned moments": owned}
    return state | ({"owned master": owned} if has_master else {})


def host_bytes(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
    """What a rank keeps in host memory by kind, bytes: what is offloaded and more than its buffers would hold."""
    offloaded = {"state": ("state",), "master": ("master", "owned master")}
    kinds = {kind for name in method.offload for kind in offloaded[name]}
    state, buffers = _scape_state(method, shapes, replicas), _buffer_bytes(method, shapes, replicas)
    return {kind: value for kind, value in state.items() if kind in kinds and value > buffers}


def _buffer_bytes(method: Method, shapes: Shapes, replicas: int) -> float:
    """Two buffers of the largest tensor; with "sharded" of the largest piece of one that has one owner."""
    largest = max(map(math.prod, shapes))
    return 8.0 * (min(largest, owned_entries(shapes, replicas, method.block)) if method.sharded else largest)


def _scape_simulated(method: Method, shapes: Shapes, replicas: int) -> dict[str, float]:
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


# -------------------------------------------------------------------------------------------------- the table

# Bytes a parameter that passes move: fused AdamW 28, AdamS 20, both with a finite check 4, norm 4 and clip 8. "bf16"
# casts there and back, 12 more. Top-k: 12 for the residual added, 4 to select, 8 for what is kept and 4 for the mean.
# PowerSGD: 36 for the error added, two products, the approximation and the error kept; its products are thin enough for
# memory to be the limit.
VOLUMES: dict[str, Volumes] = {
    "adamw": _whole(sent=4.0, moved=44.0, state=8.0),
    "adams": _whole(sent=4.0, moved=36.0, state=4.0),
    "bf16": _whole(sent=2.0, moved=48.0, state=4.0, copies=2.0),
    "topk": _with_residual(_topk_messages, 28.0, "density", {"density": "density"}),
    "powersgd": _with_residual(_powersgd_messages, 36.0, "rank", {"rank": "rank"}),
    "scape": Volumes(
        _scape_messages,
        _scape_passes,
        _scape_memory,
        _scape_simulated,
        option="density",
        recipe={"density": "density", "wire": "wire"},
    ),
}

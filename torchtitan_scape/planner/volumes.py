"""What a step sends, moves and holds: messages, passes of the device, memory. Plain arithmetic: no torch.

A method's closed form is an entry of `VOLUMES`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torchtitan_scape.core.workloads import Workload, local_shapes
from torchtitan_scape.methods.scape.cost import (
    scape_host_bytes,
    scape_host_link_bytes,
    scape_memory,
    scape_messages,
    scape_passes,
    scape_simulated,
)
from torchtitan_scape.methods.topk.blocks import Shapes, coded_by, entries_of, tagc_packed, width
from torchtitan_scape.optimizers.cost import muon_flops, muon_memory, muon_parts, muon_passes
from torchtitan_scape.planner.gradient_volumes import (
    compressed,
    demo_messages,
    powersgd_messages,
    radius_messages,
    radius_moved,
    sparseloco_messages,
    tagc_messages,
    topk_messages,
)
from torchtitan_scape.planner.local_volumes import (
    local_host_bytes,
    local_host_link_bytes,
    local_memory,
    local_moved,
    moved_messages,
    turn_memory,
    turn_messages,
    turn_moved,
)
from torchtitan_scape.planner.messages import PlannedMessage, coded_message


@dataclass(frozen=True)
class PlannedRun:
    """Who synchronises the replicas, and how.

    kind: "adamw", "adams", "muon" or "signsgd" (FP32 gradients), "bf16" (BF16 gradients, AdamS), "topk", "tagc",
        "radius" and "scape" (at `density`), "demo" (`k` of each tile), "powersgd" (rank `rank`), "quantized" (in the
        code `wire`), or "diloco", "streaming_diloco", "sparta" and "sparseloco" (every `inner_steps` steps).
    optimizer: of those in front of an optimizer, "adamw", "adams", "muon" or "signsgd".
    dense: tensors that are sent whole besides those of one dimension, by their places in the model.
    interval, clip_refresh: of "radius", steps between whole exchanges; "fresh" where what was kept goes apart in them.
    wire: of SCAPE's payload between nodes, "float32", "bfloat16" or a block code; of quantized gradients and of
        what parameters have moved likewise.
    update: of SCAPE, "replicated" or "sharded" (each entry's owner updates it for all).
    values: with "sharded", how new values travel, as of `wire`; of top-k, "demo" and "sparseloco", how what is sent
        does: in FP32 or a code.
    weights: of SCAPE, the dtype in which every replica keeps them; with a master besides unless "float32".
    offload: of SCAPE, "state" and "master" as far as they lie in host memory; of local updates "anchor".
    block: entries of a block, in each of which the largest are selected; of "quantized" those that share a scale; of
        "demo" the longest side of a tile.
    selection: of top-k, by "block", "tensor" or, as "sparseloco" does, "tile": see `payload.cut_of`; of "radius", one
        of the first two.
    feedback: of "quantized", whether what the code loses is kept.
    inner_steps, fragments, delay, outer_momentum: of local updates, as in `methods.local_updates`.
    overlap: chunks of gradients go out as the last backward pass leaves them.
    """

    kind: str
    density: float = 1.0
    wire: str = "float32"
    rank: int = 0
    k: int = 32
    update: str = "replicated"
    values: str = "float32"
    weights: str = "float32"
    offload: tuple[str, ...] = ()
    block: int = 1024
    selection: str = "block"
    optimizer: str = "adams"
    dense: tuple[int, ...] = ()
    interval: int = 200
    clip_refresh: str = "literal"
    feedback: bool = True
    overlap: bool = False
    inner_steps: int = 1
    fragments: int = 1
    delay: int = 0
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in VOLUMES:
            raise ValueError(f"there is no method {self.kind!r}; known are {', '.join(VOLUMES)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"the density is {self.density}; it must be in (0, 1]")
        if VOLUMES[self.kind].option == "rank" and self.rank < 1:
            raise ValueError(f"the rank of {self.kind} is {self.rank}; it must be 1 or more")
        if self.update not in ("replicated", "sharded"):
            raise ValueError(f"update is {self.update!r}; it must be 'replicated' or 'sharded'")
        if self.overlap and not VOLUMES[self.kind].overlaps:
            raise ValueError(f"{self.kind} does not go out in chunks; overlap must be False")
        coded_by(self.wire), coded_by(self.values), width(self.weights)

    @property
    def name(self) -> str:
        option = VOLUMES[self.kind].option
        name = self.kind + (f" {getattr(self, option):g}" if option else "")
        name += "" if self.wire == "float32" else f" {_short(self.wire)}"
        if self.sharded:
            name += " sharded" + ("" if self.values == "float32" else f" {_short(self.values)} values")
        elif self.values != "float32":
            name += f" {_short(self.values)}"
        name += " bf16 weights" if self.bf16_weights else ""
        name += "" if self.optimizer == "adams" else f" with {self.optimizer}"
        name += " overlap" if self.overlap else ""
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
class MethodCost:
    """A method's closed form. All functions take (method, this rank's shapes, replicas); bytes.

    messages: of a step, one after the other.
    passes: what (the pass that fills the payload, the other passes) of the optimizer move: every input read once, every
        output written once.
    memory: what a rank's device holds by kind, parameters, gradients and the optimizer's state included.
    simulated: the same where a process holds all replicas; None where it is no more, as gradients are added up.
    option: the field of `PlannedRun` that says how much is sent.
    recipe: keys of its section of a recipe, each with the field of `PlannedRun` that has its value; empty for dense.
    overlaps: it goes out in chunks that may overlap with the backward pass.
    flops: of the optimizer's products of matrices. parts: of what is dealt to the ranks of a replica for them and comes
        back, (who has it, bytes that each rank has of it). Both of (whole shapes, those ranks); None for none.
    host: what lies in host memory by kind. host_link: bytes that (the pass that fills the payload, the others) move
        between device and host, both directions together. None where nothing does.
    """

    messages: Callable[[PlannedRun, Shapes, int], list[PlannedMessage]]
    passes: Callable[[PlannedRun, Shapes, int], tuple[float, float]]
    memory: Callable[[PlannedRun, Shapes, int], dict[str, float]]
    simulated: Callable[[PlannedRun, Shapes, int], dict[str, float]] | None = None
    option: str = ""
    recipe: dict[str, str] = field(default_factory=dict)
    overlaps: bool = False
    flops: Callable[[Shapes, int], float] | None = None
    parts: Callable[[Shapes, int], list[tuple[int, float]]] | None = None
    host: Callable[[PlannedRun, Shapes, int], dict[str, float]] | None = None
    host_link: Callable[[PlannedRun, Shapes, int], tuple[float, float]] | None = None


def messages(method: PlannedRun, shapes: Shapes, replicas: int) -> list[PlannedMessage]:
    return VOLUMES[method.kind].messages(method, _seen(method, shapes), replicas)


def optimizer_bytes(method: PlannedRun, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """`MethodCost.passes` of a method."""
    return VOLUMES[method.kind].passes(method, _seen(method, shapes), replicas)


def optimizer_flops(method: PlannedRun, shapes: Shapes, ranks: int) -> float:
    """`MethodCost.flops` of a method, or of the optimizer that it is in front of."""
    of = VOLUMES[method.kind].flops or VOLUMES[method.optimizer].flops
    return of(shapes, ranks) if of else 0.0


def dealt_parts(method: PlannedRun, shapes: Shapes, ranks: int) -> list[tuple[int, float]]:
    """`MethodCost.parts` of a method, or of the optimizer that it is in front of; of one rank nothing."""
    of = VOLUMES[method.kind].parts or VOLUMES[method.optimizer].parts
    return of(shapes, ranks) if of and ranks > 1 else []


def host_bytes(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
    """`MethodCost.host` of a method."""
    of = VOLUMES[method.kind].host
    return of(method, _seen(method, shapes), replicas) if of else {}


def host_link_bytes(method: PlannedRun, shapes: Shapes, replicas: int) -> tuple[float, float]:
    """`MethodCost.host_link` of a method."""
    of = VOLUMES[method.kind].host_link
    return of(method, _seen(method, shapes), replicas) if of else (0.0, 0.0)


def memory_bytes(
    method: PlannedRun, workload: Workload, shard: int, replicas: int, micro_batch: int
) -> dict[str, float]:
    """Estimated memory of a rank's device by kind, bytes: `MethodCost.memory`, and what the model needs besides."""
    shapes = _seen(method, local_shapes(workload.shapes(), shard))
    kinds = VOLUMES[method.kind].memory(method, shapes, replicas)
    if method.overlap and replicas > 1:  # all at once: the gradients in chunks, and what a code loses of them
        kinds["chunks in flight"] = (8.0 if "residual" in kinds else 4.0) * entries_of(shapes)
    return kinds | {"working copy": workload.working_bytes(), "activations": workload.activation_bytes(micro_batch)}


def simulated_memory_bytes(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
    """Memory of a rank that holds all replicas, by kind, bytes; without activations and FSDP's working copy."""
    volumes = VOLUMES[method.kind]
    return (volumes.simulated or volumes.memory)(method, _seen(method, shapes), replicas)


def _seen(method: PlannedRun, shapes: Shapes) -> Shapes:
    """What is `dense` as if it had one dimension."""
    return [(math.prod(shape),) if i in method.dense else shape for i, shape in enumerate(shapes)]


# ------------------------------------------------------------------------ methods in front of an optimizer


def _whole(sent: float, moved: float, state: float, copies: float = 0.0) -> MethodCost:
    """Of a method that sends every entry; bytes a parameter. copies: of the gradients, in the dtype that is sent."""

    def memory(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
        n = entries_of(shapes)
        kinds = {"parameters": 4.0 * n, "gradients": 4.0 * n} | ({"state": state * n} if state else {})
        return kinds | ({"BF16 gradients": copies * n} if copies else {})

    return MethodCost(
        messages=lambda method, shapes, replicas: [PlannedMessage("reduce", sent * entries_of(shapes))],
        passes=lambda method, shapes, replicas: (0.0, moved * entries_of(shapes)),
        memory=memory,
        overlaps=True,
    )


def _with_residual(
    messages: Callable[[PlannedRun, Shapes, int], list[PlannedMessage]],
    moved: Callable[[PlannedRun], float],
    option: str,
    recipe: dict[str, str],
    kept: Callable[[PlannedRun, Shapes], int] | None = None,
    masks: float = 0.0,
    overlaps: bool = False,
    packed: Callable[[PlannedRun, Shapes, int], int] | None = None,
) -> MethodCost:
    """Of a method that keeps what it did not send, of `kept` entries, by default of all that it compresses. Bytes a
    parameter: moved, besides the optimizer's own passes; masks, of what is compressed. packed: entries that
    are reduced in a buffer of their own."""

    def passes(method: PlannedRun, shapes: Shapes, replicas: int) -> tuple[float, float]:
        return 0.0, moved(method) * entries_of(shapes) + sum(optimizer_of(method).passes(method, shapes, replicas))

    def memory(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
        entries = entries_of(compressed(method, shapes))
        residual = 4.0 * (kept(method, shapes) if kept else entries)
        kinds = optimizer_of(method).memory(method, shapes, replicas)
        kinds |= {"residual": residual} if residual else {}
        kinds |= {"masks": masks * entries} if masks else {}
        # What replicas send of their own is with all of them at once.
        gathered = sum(m.nbytes for m in messages(method, shapes, replicas) if m.collective == "gather")
        held = replicas * gathered + (4.0 * packed(method, shapes, replicas) if packed else 0.0)
        return kinds | ({"messages": held} if held else {})

    def simulated(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
        kinds = memory(method, shapes, replicas)
        # All messages reach every replica, and all are there before one of them is added.
        own = ("gradients", "residual", "masks", "messages")
        return kinds | {kind: replicas * kinds[kind] for kind in own if kind in kinds}

    def optimizer_of(method: PlannedRun) -> MethodCost:
        return VOLUMES[method.optimizer]

    return MethodCost(messages, passes, memory, simulated, option, recipe, overlaps)


# ------------------------------------------------------------------------------------------- local updates


def _local(
    messages: Callable[[PlannedRun, Shapes, int], list[PlannedMessage]],
    option: str,
    recipe: dict[str, str],
    sparse: bool = False,
    turns: bool = False,
) -> MethodCost:
    """Of replicas that step alone and exchange what they have moved. sparse: the largest of it; the rest is kept.
    turns: a part in every step."""

    def passes(method: PlannedRun, shapes: Shapes, replicas: int) -> tuple[float, float]:
        own = sum(VOLUMES[method.optimizer].passes(method, shapes, replicas))
        kept = TOPK_MOVED / method.inner_steps if sparse else turn_moved(method, replicas) if turns else 0.0
        return 0.0, own + (local_moved(method) + kept) * entries_of(shapes)

    def memory(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
        kept = (turn_memory if turns else local_memory)(method, shapes, replicas)
        kinds = VOLUMES[method.optimizer].memory(method, shapes, replicas) | kept
        if sparse:
            sent = sum(m.nbytes for m in messages(method, shapes, replicas) if m.collective == "gather")
            kinds |= {"residual": 4.0 * entries_of(shapes), "messages": replicas * sent}
        return kinds

    def simulated(method: PlannedRun, shapes: Shapes, replicas: int) -> dict[str, float]:
        return {kind: replicas * nbytes for kind, nbytes in memory(method, shapes, replicas).items()}

    return MethodCost(
        messages, passes, memory, simulated, option, recipe, host=local_host_bytes, host_link=local_host_link_bytes
    )


# -------------------------------------------------------------------------------------------------- the table

# Bytes a parameter that passes move: fused AdamW 28, AdamS 20, SignSGD 12, all with a finite check 4, norm 4, clip 8.
# "bf16" casts there and back, 12 more. Top-k: 12 for the residual added, 4 to select, 8 for what is kept and 4 for the
# mean. TAGC: 12 for the residual added, 4 to select, 8 to pack, 8 for what is kept and 4 for the mean. DeMo: 12 for the
# momentum added, 8 for tiles, 24 for a transform there and two back (thin enough for memory to be the limit), 4 to
# select, 12 for what leaves the momentum, 12 for the mean. PowerSGD: 36 for the error added, two products, the
# approximation and the error kept; its products are thin enough, too. Quantized: 16 for chunks filled and emptied, 8 to
# scale them, 8 to code and decode; with error feedback 12 for the residual added and 16 for what the code loses. What
# an owner does is of n/N entries and left out.
TOPK_MOVED = 28.0
VOLUMES: dict[str, MethodCost] = {
    "adamw": _whole(sent=4.0, moved=44.0, state=8.0),
    "adams": _whole(sent=4.0, moved=36.0, state=4.0),
    "muon": replace(_whole(4.0, 0.0, 0.0), passes=muon_passes, memory=muon_memory, flops=muon_flops, parts=muon_parts),
    "signsgd": _whole(sent=4.0, moved=28.0, state=0.0),
    "bf16": _whole(sent=2.0, moved=48.0, state=4.0, copies=2.0),
    "topk": _with_residual(
        topk_messages,
        lambda method: TOPK_MOVED,
        "density",
        {"density": "density", "selection": "selection", "block_size": "block", "values": "values"},
    ),
    "tagc": _with_residual(
        tagc_messages,
        lambda method: 36.0,
        "density",
        {"density": "density"},
        packed=lambda method, shapes, replicas: tagc_packed(shapes, method.density, replicas),
    ),
    "demo": _with_residual(
        demo_messages, lambda method: 72.0, "k", {"k": "k", "chunk": "block"}, lambda _, shapes: entries_of(shapes)
    ),
    "powersgd": _with_residual(powersgd_messages, lambda method: 36.0, "rank", {"rank": "rank"}),
    "radius": _with_residual(
        radius_messages,
        radius_moved,
        "density",
        {"density": "density", "interval": "interval", "selection": "selection"},
        masks=0.125,
    ),
    "quantized": _with_residual(
        lambda method, shapes, replicas: [coded_message(shapes, replicas, method.wire, method.block)],
        lambda method: 60.0 if method.feedback else 32.0,
        option="",
        recipe={"code": "wire"},
        kept=lambda method, shapes: entries_of(shapes) if method.feedback else 0,
        overlaps=True,
    ),
    "scape": MethodCost(
        scape_messages,
        scape_passes,
        scape_memory,
        scape_simulated,
        option="density",
        recipe={"density": "density", "wire": "wire"},
        host=scape_host_bytes,
        host_link=scape_host_link_bytes,
    ),
    "diloco": _local(moved_messages, "inner_steps", {"inner_steps": "inner_steps", "code": "wire"}),
    "streaming_diloco": _local(
        moved_messages,
        "inner_steps",
        {"inner_steps": "inner_steps", "fragments": "fragments", "delay": "delay", "code": "wire"},
    ),
    "sparta": _local(turn_messages, "inner_steps", {"interval": "inner_steps", "code": "wire"}, turns=True),
    "sparseloco": _local(
        sparseloco_messages,
        "inner_steps",
        {"inner_steps": "inner_steps", "density": "density", "values": "values"},
        sparse=True,
    ),
}

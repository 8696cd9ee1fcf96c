"""What a step moves and holds: messages, passes of the device, memory. Plain arithmetic: no torch.

Payload and mask follow the same rules as `kernels.scape.blocks`; a test holds one against
the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.links import width
from torchtitan_scape.planner.workloads import Shape, Workload, local_shapes

BLOCK = 1024
KINDS = ("adamw", "adams", "bf16", "powersgd", "scape")


@dataclass(frozen=True)
class Method:
    """Who synchronises the replicas, and how.

    kind: "adamw" or "adams" (FP32 gradients), "bf16" (BF16 gradients, AdamS), "powersgd" (rank `rank`, AdamS) or
        "scape" at `density`.
    wire: of SCAPE's payload between nodes, "float32" or "bfloat16".
    parameters: of SCAPE, "local" or "gather" (each entry's owner updates it for all).
    values: with "gather", the dtype in which new values travel.
    weights: of SCAPE, the dtype in which every replica keeps them; with a master besides unless "float32".
    offload: of SCAPE, "state" and "master" as far as they lie in host memory.
    """

    kind: str
    density: float = 1.0
    wire: str = "float32"
    rank: int = 0
    parameters: str = "local"
    values: str = "float32"
    weights: str = "float32"
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no method {self.kind!r}; known are {', '.join(KINDS)}")
        if not 0 < self.density <= 1:
            raise ValueError(f"the density is {self.density}; it must be in (0, 1]")
        if self.kind == "powersgd" and self.rank < 1:
            raise ValueError(f"the rank of powersgd is {self.rank}; it must be 1 or more")
        if self.parameters not in ("local", "gather"):
            raise ValueError(f"parameters is {self.parameters!r}; it must be 'local' or 'gather'")
        width(self.wire), width(self.values), width(self.weights)

    @property
    def name(self) -> str:
        if self.kind == "scape":
            name = f"scape {self.density:g}" + (" bf16" if self.wire == "bfloat16" else "")
            if self.parameters == "gather":
                name += " gather" + (" bf16 values" if self.values == "bfloat16" else "")
            name += " bf16 weights" if self.narrow else ""
            return name + (f" offload {'+'.join(self.offload)}" if self.offload else "")
        return f"powersgd {self.rank}" if self.kind == "powersgd" else self.kind

    @property
    def narrow(self) -> bool:
        return self.weights == "bfloat16"

    def has_master(self, replicas: int) -> bool:
        rounds = self.parameters == "gather" and self.values == "bfloat16" and self.density < 1.0
        return self.narrow or (rounds and replicas > 1)


def payload_entries(shapes: Sequence[Shape], density: float, block: int = BLOCK) -> int:
    """Entries a step exchanges: min(k, real entries) of every block of the matrices, and all of 1-D tensors."""
    if density >= 1.0:
        return sum(map(math.prod, shapes))
    k, entries = _per_block(density, block), 0
    for shape in shapes:
        full, tail = divmod(math.prod(shape), block)
        entries += full * k + min(k, tail) if len(shape) > 1 else math.prod(shape)
    return entries


def payload_bytes(shapes: Sequence[Shape], density: float, wire: str = "float32", block: int = BLOCK) -> int:
    return width(wire) * payload_entries(shapes, density, block)


def mask_bytes(shapes: Sequence[Shape], density: float, replicas: int, block: int = BLOCK) -> int:
    """One replica's own run on the wire: a bitmap, or offsets of the entries in their blocks where they are fewer."""
    if density >= 1.0:
        return 0
    run = run_blocks(shapes, replicas, block)
    bitmap, bits = run * block // 8, max(1, (block - 1).bit_length())
    offsets = (run * _per_block(density, block) * bits + 7) // 8
    return bitmap if replicas == 1 else min(bitmap, offsets)


def run_blocks(shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> int:
    """Blocks of a replica's run; each tensor is padded to whole blocks, and the last run to the others' length."""
    blocks = sum(-(-math.prod(shape) // block) for shape in shapes if len(shape) > 1)
    return -(-blocks // replicas)


def _per_block(density: float, block: int) -> int:
    return max(1, round(density * block))


def message_bytes(method: Method, shapes: Sequence[Shape], block: int = BLOCK) -> list[float]:
    """Bytes of the all-reduces of a step, one after the other, as `all_reduce_stages` takes them.

    PowerSGD is PyTorch's hook: what it leaves whole, then all P, then all Q; a matrix goes whole where factors would
    save less than half.
    """
    if method.kind == "scape":
        return [float(payload_bytes(shapes, method.density, block=block))]
    if method.kind == "powersgd":
        factored = [s for s in shapes if _factored(s, method.rank)]
        whole = sum(map(math.prod, shapes)) - sum(map(math.prod, factored))
        rows, columns = sum(s[0] for s in factored), sum(math.prod(s[1:]) for s in factored)
        return [4.0 * whole, 4.0 * method.rank * rows, 4.0 * method.rank * columns]
    return [(2.0 if method.kind == "bf16" else 4.0) * sum(map(math.prod, shapes))]


def _factored(shape: Shape, rank: int) -> bool:
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return 2 * rank * (rows + columns) < rows * columns


def powersgd_rank(shapes: Sequence[Shape], nbytes: float) -> int:
    """The largest rank whose messages hold at most `nbytes`; at least 1."""
    rank = 1
    while rank < 1024 and sum(message_bytes(Method("powersgd", rank=rank + 1), shapes)) <= nbytes:
        rank += 1
    return rank


def optimizer_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> tuple[float, float]:
    """Bytes that (pack, the other passes) move: every input read once, every output written once.

    SCAPE: as in results/bench_kernels/bytes.md. Fused AdamW 28 a parameter, AdamS 20, both with a finite check 4,
    norm 4 and clip 8; "bf16" casts there and back, 12 more. PowerSGD: 36 more for the error added, two products,
    the approximation and the error kept; its products are thin enough for memory to be the limit.
    """
    n = sum(map(math.prod, shapes))
    if method.kind != "scape":
        return 0.0, {"adamw": 44.0, "adams": 36.0, "bf16": 48.0, "powersgd": 72.0}[method.kind] * n
    k = payload_entries(shapes, method.density, block)
    masks = 2 * replicas * run_blocks(shapes, replicas, block) * block // 8
    if method.parameters == "gather":
        # The owner reads and writes the common part in pack, and of A's entries payload, common part and parameter
        # for norm and update; all write the values.
        owned, sent = owned_entries(shapes, replicas, block), k / replicas
        pack, update = 12.0 * n + masks + 4 * k + 8 * owned, 24 * sent + masks + 4 * k
        update += 0 if method.narrow else 8 * n  # the decay of BF16 weights is that of their scale
        return pack, 4.0 * n + update + (8 * owned if method.has_master(replicas) else 0.0)
    # A master is decayed and updated in the place of weights, and then read to be rounded.
    return 12.0 * n + masks + 8 * k, 4.0 * n + 8 * k + (14 if method.narrow else 8) * n + 2 * masks + 12 * k


def host_link_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> tuple[float, float]:
    """Bytes that (pack, the other passes) move between device and host, both directions together.

    In "local" the state comes and goes twice, as the new moment enters it behind the exchange; with "gather" once.
    """
    host = host_bytes(method, shapes, replicas, block)
    state = host.get("state", 0.0)
    rest = host.get("master", 0.0) + host.get("owned master", 0.0) + (0.0 if method.parameters == "gather" else state)
    return 2 * state, 2 * rest


def owned_entries(shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> int:
    """Entries of the buffers that hold what a replica owns: its run, and its part of what is sent whole."""
    whole = sum(math.prod(shape) for shape in shapes if len(shape) < 2)
    return run_blocks(shapes, replicas, block) * block + -(-whole // (4 * replicas)) * 4


def memory_bytes(
    method: Method, workload: Workload, shard: int, replicas: int, micro_batch: int, block: int = BLOCK
) -> dict[str, float]:
    """Estimated memory of a rank's device by kind, bytes.

    State: two moments for AdamW, one otherwise, and PowerSGD's error. FP32 parameters and gradients.
    """
    shapes = local_shapes(workload.shapes(), shard)
    n = 4.0 * sum(map(math.prod, shapes))
    kinds = {"parameters": n, "gradients": n, "state": 2 * n if method.kind in ("adamw", "powersgd") else n}
    if method.kind == "scape":
        kinds |= _scape_bytes(method, shapes, replicas, block)
        kinds |= scape_state_bytes(method, shapes, replicas, block)
        for kind in (offloaded := host_bytes(method, shapes, replicas, block)):
            del kinds[kind]
        if offloaded:
            kinds["offload buffers"] = len(offloaded) * buffer_bytes(method, shapes, replicas, block)
    if method.kind == "bf16":
        kinds["BF16 gradients"] = n / 2
    kinds["working copy"] = workload.working_bytes()
    kinds["activations"] = workload.activation_bytes(micro_batch)
    return kinds


def _scape_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int) -> dict[str, float]:
    """What SCAPE keeps on the device besides gradients and state."""
    n, entries = sum(map(math.prod, shapes)), payload_entries(shapes, method.density, block)
    bits = run_blocks(shapes, replicas, block) * block // 8
    # The payload, last step's moment on it, and what rounding lost: in the last step, and in this one on top.
    payload = (4.0 if method.parameters == "gather" else 8.0) * entries
    return {
        "parameters": float(width(method.weights)) * n,
        "masks": 2.0 * replicas * bits + mask_bytes(shapes, method.density, replicas, block),
        "payload": payload + (0.0 if method.wire == "float32" else 8.0 * entries),
        "rates of visits": 16.0 * sum(s[0] + math.prod(s[1:]) for s in shapes if len(s) > 1),
    }


def scape_state_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> dict[str, float]:
    """SCAPE's state by kind, bytes, wherever it lies."""
    n = 4.0 * sum(map(math.prod, shapes))
    if method.parameters == "local":
        return {"state": n} | ({"master": n} if method.has_master(replicas) else {})
    owned = 4.0 * owned_entries(shapes, replicas, block)
    residual = 4.0 * sum(math.prod(s) for s in shapes if len(s) > 1)
    return {"state": residual, "owned moments": owned} | (
        {"owned master": owned} if method.has_master(replicas) else {}
    )


def host_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> dict[str, float]:
    """What a rank keeps in host memory by kind, bytes: what is offloaded and more than its buffers would hold."""
    offloaded = {"state": ("state",), "master": ("master", "owned master")}
    kinds = {kind for name in method.offload for kind in offloaded[name]}
    state, buffers = scape_state_bytes(method, shapes, replicas, block), buffer_bytes(method, shapes, replicas, block)
    return {kind: value for kind, value in state.items() if kind in kinds and value > buffers}


def buffer_bytes(method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK) -> float:
    """Two buffers of the largest tensor; with "gather" of the largest piece of one that has one owner."""
    largest = max(map(math.prod, shapes))
    if method.parameters == "gather":
        largest = min(largest, owned_entries(shapes, replicas, block))
    return 8.0 * largest


def simulated_memory_bytes(
    method: Method, shapes: Sequence[Shape], replicas: int, block: int = BLOCK
) -> dict[str, float]:
    """Memory of a rank that plays all `replicas`, by kind, bytes; without activations and FSDP's working copy.

    Of every replica SCAPE keeps state, gradient, payload and selection; once the masks, and last step's moment on them.
    """
    n = 4.0 * sum(map(math.prod, shapes))
    kinds = {"parameters": n, "gradients": n, "state": 2 * n if method.kind == "adamw" else n}
    if method.kind == "scape":
        kinds |= {"gradients": replicas * n, "state": replicas * n}
        bitmap = run_blocks(shapes, replicas, block) * block // 8
        kinds["masks"] = replicas * (2.0 * bitmap + mask_bytes(shapes, method.density, replicas, block))
        entries = payload_entries(shapes, method.density, block) if method.density < 1.0 else 0
        # In BF16 what rounding lost besides, the last step's and this one's.
        rows = replicas + 1 if method.wire == "float32" else 3 * replicas + 1
        kinds["payload"] = 4.0 * rows * entries
    return kinds

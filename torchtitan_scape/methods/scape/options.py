"""Options of SCAPE, and the cost of a step by the kernels' size functions. Imports no torch."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from torchtitan_scape.core.options import FREE, LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shapes, count_entries
from torchtitan_scape.kernels.codec.formats import BLOCK as CODED_BLOCK
from torchtitan_scape.kernels.codec.formats import FORMATS, encoded_size
from torchtitan_scape.kernels.scape.blocks import BlockLayout, Ownership
from torchtitan_scape.methods.options import MethodOptions, share_of_dense
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.machines import MEMORY_EFFICIENCY, Links
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, best_chunk_bytes, padded_size, spanned

logger = logging.getLogger(__name__)

Code = Literal["float32", "int8", "int4", "2bit", "1bit"]

# A budget of bytes, by docs/benchmarks/quality_study.md: for the same bytes, fewer bits per entry give a lower loss
# than a lower density, down to four bits; below about 1 % of the dense bytes, down to two bits.
BUDGET_BLOCK = 1024
# Largest number of entries per block: with 192 and 320 the study's loss was 2 and 7 % higher
# (results/quality_study/report.md).
BUDGET_ENTRIES = 112
# (minimum budget, code), tried in this order.
BUDGET_CODES: tuple[tuple[float, Code], ...] = ((0.009, "int4"), (0.0, "2bit"), (0.0, "1bit"))


@dataclass
class ScapeOptions(MethodOptions):
    """[sync.scape]: sparse first moments with a shared mask (SCAPE). It requires [optimizer] name = "AdamS".

    A step all-reduces the payload, and all-gathers masks, which overlaps with the next step. With `update = "sharded"`
    the payload is reduce-scattered to the owners of its entries, and the new values are all-gathered.
    """

    section: ClassVar[str] = "sync.scape"
    main_options = ("density", "code")
    holds_optimizer_state = True

    density: float = 0.1
    """Share of the entries that replicas exchange each step, in (0, 1]"""

    bytes: float = field(default=0.0, metadata=FREE)
    """Budget of a step at the target density, masks and scales included, relative to the bytes of dense FP32, for
    example 0.012; overrides density, block_size and code by the rule of the quality study. 0 does not override them"""

    density_warmup_steps: int = 0
    """Steps over which the density falls exponentially from 1 to its value; 0 for none"""

    block_size: int = field(default=1024, metadata=LAYOUT)
    """Entries per block of the mask, a multiple of 8 up to 32768"""

    selection: Literal["block", "tensor"] = field(default="block", metadata=LAYOUT)
    """Top-k of every block, or of a replica's share of every tensor (as in the paper; always in PyTorch)"""

    staleness_scaling: bool = True
    """Scale the step of entries that enter the mask by the number of steps outside it, averaged over their row and
    column, at most by 1000, and halve their moment (not in the paper). At the target density, such an entry is not
    selected for the next mask if any other entry is available"""

    clip_mode: Literal["moment", "literal"] = "moment"
    """Apply training.max_norm to the gradient in both moments, or only in the second (as printed in the paper)"""

    code: Code = field(default="float32", metadata=LAYOUT)
    """Encoding of the payload between nodes: FP32, or a code with blocks of 128 entries. The quantization error is
    stored (FP32, 4 bytes per entry sent) and sent later. With a code, payloads of the density warm-up use INT8"""

    update: Literal["replicated", "sharded"] = field(default="replicated", metadata=LAYOUT)
    """Every replica updates its own copy ("replicated"), or each entry's owner updates it and sends the new value to
    all replicas ("sharded", Algorithm 2)"""

    weights_dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata=LAYOUT)
    """Dtype of the weights on every replica. With BF16, which requires the sharded update, each entry's owner keeps the
    FP32 master and sends BF16 values"""

    offload: list[str] = field(default_factory=list, metadata=FREE)
    """["state"]: moment and residual are in host memory between their uses; three buffers of the largest tensor stay on
    the device"""

    chunk_bytes: int = field(default=0, metadata=FREE)
    """Approximate size of the payload's chunks in bytes; 0: the cost model's choice, in your own loop a default"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")
        self.require(0.0 <= self.bytes < 1.0, "bytes", "it must lie in (0, 1), for example 0.012, or be 0 for none")
        advice = 'it requires selection = "block": remove that, or set it to 0'
        self.require(self.selection == "block" or not self.bytes, "bytes", advice)
        self.require(self.density_warmup_steps >= 0, "density_warmup_steps", "it must be 0 (none) or more")
        whole = self.block_size % 8 == 0 and 8 <= self.block_size <= 32768
        self.require(whole, "block_size", "it must be a multiple of 8 from 8 to 32768")
        large = self.chunk_bytes == 0 or self.chunk_bytes >= 4
        advice = f"it must be 4 or more, for example {1 << 24}, or 0 for the cost model's choice"
        self.require(large, "chunk_bytes", advice)
        self.require(set(self.offload) <= {"state"}, "offload", 'it may contain "state"')
        advice = 'an FP32 master on every replica saves no memory; set update = "sharded", or remove it'
        self.require(self.sharded or self.weights_dtype == "float32", "weights_dtype", advice)

    def resolve_for_links(
        self, shapes: Sequence[Sequence[int]], layout: Layout, rank: int, levels: int
    ) -> "ScapeOptions":
        if self.chunk_bytes:
            return self
        plain = ScapeOptions(density=self.density, code=self.code, block_size=self.block_size)
        model, device = LocalModel.of_shapes([tuple(shape) for shape in shapes]), layout.machine.device
        packed, _ = plain.memory_traffic(model, layout.replicate)
        # The levels of the group, not of this rank: all ranks of the group must choose the same size.
        tiers = layout.hierarchy(layout.replicate_group(rank))
        chunk = best_chunk_bytes(
            4 * payload_entries(model.shapes, self.density, self.block_size),
            packed / (device.memory_bandwidth * 1e9 * MEMORY_EFFICIENCY),
            spanned(tiers, flat=levels < len(tiers)),
            Links.from_machine(layout.machine),
            encoded_size(self.code),
        )
        return replace(self, chunk_bytes=chunk)

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> "ScapeOptions":
        if not self.bytes:
            return self
        model = LocalModel.of_shapes([tuple(shape) for shape in shapes])
        chosen = self._fit_to_budget(model, replicas)
        sent = 100 * share_of_dense(chosen, model, replicas)
        logger.info(
            f"[{self.section}] bytes = {self.bytes:g}: density {chosen.density:g}, block_size {chosen.block_size}, "
            f"code {chosen.code!r}; a step sends {sent:.3g} % of the dense FP32 bytes"
        )
        return chosen

    def _fit_to_budget(self, model: LocalModel, replicas: int) -> "ScapeOptions":
        """Return the options that the study found best among those that send at most `bytes`.

        Only density, block size and code are chosen. Raises ValueError if none fit.
        """

        def with_entries(code: Code, k: int) -> ScapeOptions:
            return replace(self, bytes=0.0, density=k / BUDGET_BLOCK, block_size=BUDGET_BLOCK, code=code)

        for code in (code for least, code in BUDGET_CODES if self.bytes >= least):
            for k in range(BUDGET_ENTRIES, 0, -1):
                chosen = with_entries(code, k)
                if share_of_dense(chosen, model, replicas) <= self.bytes:
                    return chosen
        least = min(share_of_dense(with_entries(code, 1), model, replicas) for _, code in BUDGET_CODES)
        raise ValueError(
            f"[{self.section}] bytes = {self.bytes:g}: a step of this model sends at least "
            f"{math.ceil(1e5 * least) / 1e5:g} of the dense bytes; set a larger budget"
        )

    def needs_comm_streams(self) -> bool:
        return self.code != "float32" or self.bytes > 0

    def simulation_error(self) -> str:
        if self.update == "sharded":
            return 'update = "sharded": simulated replicas support "replicated" only, with equal losses up to rounding'
        if self.offload or self.weights_dtype != "float32":
            given = f"offload = {self.offload} and weights_dtype = {self.weights_dtype!r}"
            return f"{given}: simulated replicas keep all their state on the device; set both to their defaults"
        return ""

    def label(self) -> str:
        text = f"{self.method_name()} {self.density:g}"
        text += "" if self.code == "float32" else f" {self.code}"
        text += " sharded" if self.update == "sharded" else ""
        return text + (" bf16 weights" if self.weights_dtype == "bfloat16" else "")

    def offloaded(self) -> tuple[str, ...]:
        return tuple(self.offload)

    @property
    def sharded(self) -> bool:
        """Whether each entry's owner updates it for all replicas."""
        return self.update == "sharded"

    @property
    def payload_code(self) -> str:
        """Encoding of the payload at the target density; a dense payload is in FP32."""
        return "float32" if self.density >= 1.0 else self.code

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight on a replica."""
        return 2 if self.weights_dtype == "bfloat16" else 4

    @property
    def scalar_reductions(self) -> int:
        """Number of scalar all-reduces: the finite flag and, with a sharded update, the norm."""
        return 2 if self.sharded else 1

    # --------------------------------------------------------------------------------------- exchange

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        """Return the collectives of a step. The payload counts as one chunk: the chunk size depends on the machine."""
        shapes, code = model.shapes, self.payload_code
        replicas = math.prod(level.size for level in levels)
        block = CODED_BLOCK if code in FORMATS else None
        multiple = block or 1
        own_mask = block_layout(shapes, replicas, self.block_size).wire_bytes(self.density, self.selection)
        masks = CollectiveCall("all_gather", own_mask, hidden=True)
        if not self.sharded:
            entries = payload_entries(shapes, self.density, self.block_size, multiple, self.selection, replicas)
            return [CollectiveCall("all_reduce", padded_size(entries, levels, block), encoded_size(code)), masks]
        own = self._ownership(shapes, replicas).row_entries(self.density, self.selection, multiple)
        payload = CollectiveCall("reduce_scatter", own * replicas, encoded_size(code))
        values = self.weight_bytes if self.density < 1.0 else 4
        return [payload, CollectiveCall("all_gather", values * own), masks]

    # ----------------------------------------------------------------------------------------- passes

    def pass_bytes(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the minimum memory traffic of each pass in bytes: every input read once, every output written once.

        Entries of a mask that are scattered in a tensor count as the sectors that contain them (`sector_bytes`);
        payloads are contiguous.
        """
        shapes = model.shapes
        n, k = count_entries(shapes), payload_entries(shapes, self.density, self.block_size)
        masks = 2 * block_layout(shapes, replicas, self.block_size).mask_bytes()
        if not self.sharded:
            return {
                "finite": 4.0 * n,
                # Gradient, state twice; payload and last moment, moment of the previous mask, lists of both masks.
                "pack": 12.0 * n + masks + (8 + 4 + 4) * k,
                "squares": 8.0 * k,
                # Read and write the parameter. Payload, last moment and its new value, list of the mask; the previous
                # mask, and both again, to count the entries that enter each row and column.
                "update": 8.0 * n + 1.5 * masks + (4 + 8 + 2) * k,
            } | self._coding_bytes(shapes, k, replicas)
        # In the packing pass the owner reads and writes the replicated part of the state. For the norm it reads payload
        # and replicated state of the mask's entries. For the update it reads both again, and the parameter unless there
        # is a master; it writes the state and the new values. All ranks write the new values. BF16 weights decay by
        # their scale, without a pass over the entries.
        bf16_weights = self.weights_dtype == "bfloat16"
        owned, sent = self._ownership(shapes, replicas).share, k / replicas
        update = 12 * sent + (3 if bf16_weights else 4) * self._scattered(shapes) / replicas + masks + 4 * k
        update += self._scattered(shapes, 2) + 8 * owned if bf16_weights else 8 * n
        passes = {"finite": 4.0 * n, "pack": 12.0 * n + masks + (4 + 4) * k + 8 * owned, "squares and update": update}
        return passes | self._coding_bytes(shapes, k, replicas)

    def _scattered(self, shapes: Shapes, nbytes: int = 4) -> float:
        """Return the bytes that move if a pass reads, or writes, the entries of a mask in whole tensors."""
        return sector_bytes(shapes, self.density, nbytes, self.block_size)

    def carry_bytes(self, shapes: Shapes) -> float:
        """Return the memory traffic of adding the last quantization error to the gradients, a part of packing."""
        return 4 * payload_entries(shapes, self.density, self.block_size) + self._scattered(shapes)

    def _coding_bytes(self, shapes: Shapes, sent: float, replicas: int) -> dict[str, float]:
        """Return the memory traffic of encoding and decoding in bytes.

        Read the error, add it to the gradient of the next step, and store it if this step is applied; write the
        message, read all received messages, encode the owner's mean, read and decode the means.
        """
        payload, own = encoded_size(self.payload_code), sent / replicas
        if payload is None:
            return {}
        message = payload(int(sent)) / max(1.0, sent)
        total = self.carry_bytes(shapes) + (12 + 4 + message + 4 + message) * sent + (4 + 8) * own
        total += 0.0 if self.sharded else (4 + message + 4 + 20) * own + (message + 4) * sent
        return {"coding": total} if total else {}

    def memory_traffic(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> tuple[float, float]:
        passes = self.pass_bytes(model, replicas)
        return passes.pop("pack"), sum(passes.values())

    def host_link_traffic(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the traffic of (the packing pass, the other passes) in bytes.

        The packing pass copies the state to the device and back. With a replicated update, the update does so for the
        tensors that are not sparsified, and with the selection "tensor" for all.
        """
        state = self.host_memory(model, replicas).get("state", 0.0)
        whole = state if self.selection == "tensor" else min(state, 4.0 * sum(dense_sizes(model.shapes)))
        return 2 * state, 0.0 if self.sharded else 2 * whole

    # ----------------------------------------------------------------------------------------- memory

    def temporary_memory(
        self, model: LocalModel, replicas: int, several_levels: bool = False, overlap: bool = False
    ) -> dict[str, float]:
        """Return nothing: payload and masks are kept."""
        return {}

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        shapes = model.shapes
        n, layout = count_entries(shapes), block_layout(shapes, replicas, self.block_size)
        # At density 1 the payload replaces the gradients in place.
        entries = payload_entries(shapes, self.density, self.block_size) if self.density < 1.0 else 0
        # The payload and the previous moment of its entries; with a code also the quantization errors of two steps.
        payload = (4.0 if self.sharded else 8.0) * entries
        offloaded = self.host_memory(model, replicas)
        kinds = {"parameters": float(self.weight_bytes) * n, "gradients": 4.0 * n}
        kinds |= {kind: value for kind, value in self._states(shapes, replicas).items() if kind not in offloaded}
        kinds |= {
            "masks": 2.0 * layout.mask_bytes() + layout.wire_bytes(self.density, "block"),
            "payload": payload + (0.0 if self.payload_code == "float32" else 8.0 * entries),
            # Of both masks; the few entries of tensors that are not sparsified are in no list.
            "mask lists": 0.0 if self.selection == "tensor" else 4.0 * entries,
            "rates of visits": 16.0 * sum(s[0] + math.prod(s[1:]) for s in shapes if len(s) > 1),
        }
        if offloaded:
            kinds["offload buffers"] = self._buffer_bytes(shapes, replicas)
        return kinds

    def _states(self, shapes: Shapes, replicas: int) -> dict[str, float]:
        """Return the bytes of the states by kind, on the device or on the host."""
        n = 4.0 * count_entries(shapes)
        if not self.sharded:
            return {"state": n}
        owned = 4.0 * self._ownership(shapes, replicas).share
        states = {"state": n - 4.0 * sum(dense_sizes(shapes)), "owned moments": owned}
        return states | ({"owned master": owned} if self.weights_dtype == "bfloat16" else {})

    def host_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        """Return the offloaded state in bytes; one that is not larger than its buffers stays on the device."""
        state = self._states(model.shapes, replicas)["state"]
        return {"state": state} if self.offload and state > self._buffer_bytes(model.shapes, replicas) else {}

    def _buffer_bytes(self, shapes: Shapes, replicas: int) -> float:
        """Return the bytes of three buffers of the largest tensor, in a sharded update of an owner's largest slice."""
        largest = max(map(math.prod, shapes))
        if self.sharded:
            largest = min(largest, self._ownership(shapes, replicas).share)
        return 12.0 * largest

    def _ownership(self, shapes: Shapes, replicas: int) -> Ownership:
        """Return the owners of the entries with a sharded update."""
        return Ownership.of(block_layout(shapes, replicas, self.block_size), dense_sizes(shapes))


SECTOR = 32  # bytes that a GPU's memory moves at least


def dense_sizes(shapes: Shapes) -> list[int]:
    """Return the number of entries of each tensor without a mask."""
    return [math.prod(shape) for shape in shapes if len(shape) < 2]


def block_layout(shapes: Shapes, replicas: int, block: int) -> BlockLayout:
    """Return the blocks of the tensors that have a mask."""
    return BlockLayout(tuple(math.prod(shape) for shape in shapes if len(shape) > 1), block, replicas)


def payload_entries(
    shapes: Shapes,
    density: float,
    block: int = 1024,
    size_multiple: int = 1,
    selection: str = "block",
    replicas: int = 1,
) -> int:
    """Return the number of entries that a step sends.

    Args:
        size_multiple: Tensors without a mask start at a multiple of this number of entries.
        replicas: Number of replicas; matters only if selection is "tensor".
    """
    layout = block_layout(shapes, replicas, block)
    masked = sum(layout.nnz(i, density, selection) for i in range(len(layout.sizes)))
    return -(-masked // size_multiple) * size_multiple + sum(dense_sizes(shapes))


def sector_bytes(shapes: Shapes, density: float, nbytes: int = 4, block: int = 1024) -> float:
    """Return the bytes that move if a pass reads, or writes, the entries of a mask in tensors of `nbytes` per entry.

    Memory moves whole sectors. A sector of s entries moves unless the mask contains none of them: with probability
    1 - (1 - d)^s, if entries of a mask of density d are independent. Tensors without a mask move completely.
    """
    layout = block_layout(shapes, 1, block)
    masked = 0.0
    for tensor, size in enumerate(layout.sizes):
        share = layout.nnz(tensor, density, "block") / max(1, size)
        masked += size * (1.0 - (1.0 - share) ** (SECTOR // nbytes))
    return nbytes * (masked + sum(dense_sizes(shapes)))

"""Options of SCAPE."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from torchtitan_scape.core.options import FREE, LAYOUT
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.kernels.codec.formats import encoded_size, short_name
from torchtitan_scape.methods.options import share_of_dense
from torchtitan_scape.methods.scape.budget import fit_to_budget
from torchtitan_scape.methods.scape.cost import ScapeCost
from torchtitan_scape.methods.scape.payload import payload_entries
from torchtitan_scape.topology.layout import Layout
from torchtitan_scape.topology.links import Links, best_chunk_bytes
from torchtitan_scape.topology.machines import MEMORY_EFFICIENCY
from torchtitan_scape.topology.ring_bytes import spanned

logger = logging.getLogger(__name__)

Code = Literal["float32", "int8", "int4", "2bit", "1bit"]


@dataclass
class ScapeOptions(ScapeCost):
    """[sync.scape]: sparse first moments with a shared mask (SCAPE). It requires [optimizer] name = "AdamS"."""

    section: ClassVar[str] = "sync.scape"
    main_options = ("density", "code")

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
    """Dtype of the weights on every replica. With BF16 each entry's owner keeps the FP32 master and sends BF16 values
    ("sharded"), or every replica keeps it ("replicated", which saves memory only if the master is offloaded)"""

    offload: list[str] = field(default_factory=list, metadata=FREE)
    """States in host memory between their uses: "state" (moment and residual), "master" (FP32 master weights); for each
    of them three buffers of the largest tensor stay on the device"""

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
        self.require({"state", "master"}.issuperset(self.offload), "offload", 'it may contain "state" and "master"')
        has_master = self.weights_dtype == "bfloat16"
        advice = 'FP32 weights have no separate master; set weights_dtype = "bfloat16", or remove "master"'
        self.require(has_master or "master" not in self.offload, "offload", advice)

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
        try:
            chosen = fit_to_budget(self, self.bytes, model, replicas)
        except ValueError as error:
            raise ValueError(f"[{self.section}] bytes = {self.bytes:g}: {error}; set a larger budget") from None
        sent = 100 * share_of_dense(chosen, model, replicas)
        logger.info(
            f"[{self.section}] bytes = {self.bytes:g}: density {chosen.density:g}, block_size {chosen.block_size}, "
            f"code {chosen.code!r}; a step sends {sent:.3g} % of the dense FP32 bytes"
        )
        return chosen

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
        text += "" if self.code == "float32" else f" {short_name(self.code)}"
        text += " sharded" if self.update == "sharded" else ""
        return text + (" bf16 weights" if self.weights_dtype == "bfloat16" else "")

    def offloaded(self) -> tuple[str, ...]:
        return tuple(self.offload)

    def without_memory_savings(self) -> Self:
        return replace(self, update="replicated", weights_dtype="float32", offload=[])

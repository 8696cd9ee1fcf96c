"""Options of SCAPE."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from topology.layout import Layout
from torchtitan_scape.core.options import FREE, LAYOUT
from torchtitan_scape.core.workloads import LocalModel
from torchtitan_scape.methods.cost import share_of_dense
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.scape.budget import fit_to_budget
from torchtitan_scape.methods.scape.chunking import best_chunk
from torchtitan_scape.methods.scape.cost import ScapeCost
from torchtitan_scape.methods.wire import short_name

logger = logging.getLogger(__name__)

Wire = Literal["float32", "bfloat16", "int8", "int4", "e2m1", "e3m0", "2bit", "1bit"]


@dataclass
class ScapeOptions(MethodOptions):
    """[sync.scape]: read with method = "scape", which takes [optimizer] name = "AdamS"."""

    section: ClassVar[str] = "sync.scape"
    main_options = ("density", "wire")

    density: float = 0.1
    """Share of the entries that replicas exchange each step, in (0, 1]"""

    bytes: float = field(default=0.0, metadata=FREE)
    """Bytes that a step may send at the target density, masks and scales included, relative to dense FP32, for example
    0.012; overrides density, block_size and wire by the rule of the quality study. 0 uses these as they are"""

    density_warmup_steps: int = 0
    """The density falls exponentially from 1 to its value over this number of steps; 0 for none"""

    block_size: int = field(default=1024, metadata=LAYOUT)
    """Entries per block of the mask, a multiple of 8 up to 32768"""

    selection: Literal["block", "tensor"] = field(default="block", metadata=LAYOUT)
    """Top-k of every block, or of the part of every tensor that the replica selects (as in the paper, always in
    PyTorch)"""

    staleness_scaling: bool = True
    """Scale the step of entries that enter the mask by the number of steps they were outside it, averaged over their
    row and column (not in the paper)"""

    max_staleness: float = 1000
    """Upper limit of that factor"""

    keep_moment: float = 0.5
    """Share of its moment that an entry keeps after its first, scaled step on the mask; 1 keeps all. Below 1, at the
    target density, such an entry is not selected for the next mask if any other entry is available"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged whole although they have two or more dimensions"""

    clip_mode: Literal["moment", "literal"] = "moment"
    """Apply training.max_norm to the gradient in both moments, or only in the second (as printed in the paper)"""

    wire: Wire = field(default="float32", metadata=LAYOUT)
    """Encoding of the payload between nodes: FP32, BF16, or a code of blocks of 128 entries. The quantization error is
    kept (FP32, 4 bytes per entry sent) and sent later. With a code the masks of the density warm-up are sent in INT8"""

    update: Literal["replicated", "sharded"] = field(default="replicated", metadata=LAYOUT)
    """Every replica updates its own copy, or each entry's owner updates it and sends the new value to all (Algorithm
    2)"""

    values: Wire = field(default="float32", metadata=LAYOUT)
    """With "sharded", the encoding of new values. In BF16 or a code the owner keeps an FP32 master of its share; a code
    encodes the difference to the value that all replicas hold"""

    weights_dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata=LAYOUT)
    """Dtype of the weights on every replica. In BF16 the FP32 master is kept by each entry's owner ("sharded"), or by
    every replica ("replicated", which saves memory if the master is offloaded)"""

    offload: list[str] = field(default_factory=list, metadata=FREE)
    """States in host memory between their uses: "state" (moment and residual), "master" (FP32 weights, if there are
    others); two buffers of the largest tensor stay on the device for each"""

    chunk_bytes: int = field(default=0, metadata=FREE)
    """Approximate size of the chunks in which the payload is packed and exchanged; 0 uses the cost model's choice"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.1")
        self.require(0.0 <= self.bytes < 1.0, "bytes", "it must lie in (0, 1), for example 0.012, or be 0 for none")
        known = self.selection == "block" and not self.dense_names
        advice = "it is known for selection in blocks and without dense_names: leave these out, or set it to 0"
        self.require(known or not self.bytes, "bytes", advice)
        self.require(self.density_warmup_steps >= 0, "density_warmup_steps", "it must be 0 (none) or more")
        whole = self.block_size % 8 == 0 and 8 <= self.block_size <= 32768
        self.require(whole, "block_size", "it must be a multiple of 8 from 8 to 32768")
        self.require(self.max_staleness >= 1, "max_staleness", "it must be 1 or more")
        self.require(0.0 <= self.keep_moment <= 1.0, "keep_moment", "it must lie in [0, 1]")
        cut = self.chunk_bytes == 0 or self.chunk_bytes >= 4
        self.require(cut, "chunk_bytes", f"it must be 4 or more, for example {1 << 24}, or 0 for the cost model's")
        travel = self.update == "sharded" or self.values == "float32"
        self.require(travel, "values", 'it is for update = "sharded"; nothing of that kind travels without')
        self.require({"state", "master"}.issuperset(self.offload), "offload", 'it may have "state" and "master"')
        rounded = self.weights_dtype == "float32" or self.values in ("float32", "bfloat16")
        self.require(rounded, "values", 'BF16 weights take their values in "float32" or "bfloat16"; set one of these')
        budgeted = self.bytes > 0 and self.update == "sharded"  # then new values will be coded
        has_master = self.weights_dtype == "bfloat16" or self.values != "float32" or budgeted
        advice = 'FP32 weights have no master besides; set weights_dtype = "bfloat16", or leave "master" out'
        self.require(has_master or "master" not in self.offload, "offload", advice)

    def resolve_for_links(
        self, shapes: Sequence[Sequence[int]], layout: Layout, rank: int, levels: int
    ) -> "ScapeOptions":
        if self.chunk_bytes:
            return self
        plain = ScapeOptions(density=self.density, wire=self.wire, block_size=self.block_size)
        packed, _ = plain.cost().memory_traffic(LocalModel.of_shapes([tuple(s) for s in shapes]), layout.replicate)
        chunk = best_chunk(shapes, self.density, self.block_size, self.wire, packed, layout, rank, levels)
        return replace(self, chunk_bytes=chunk)

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> "ScapeOptions":
        if not self.bytes:
            return self
        model = LocalModel.of_shapes([tuple(shape) for shape in shapes])
        try:
            chosen = fit_to_budget(self, self.bytes, model, replicas)
        except ValueError as error:
            raise ValueError(f"[{self.section}] bytes = {self.bytes:g}: {error}; set no less") from None
        sent = 100 * share_of_dense(chosen, model, replicas)
        logger.info(
            f"[{self.section}] bytes = {self.bytes:g}: density {chosen.density:g}, block_size {chosen.block_size}, "
            f"wire {chosen.wire!r}; a step sends {sent:.3g} % of the dense FP32 bytes"
        )
        return chosen

    def needs_comm_streams(self) -> bool:
        return self.wire != "float32" or self.bytes > 0

    def simulation_error(self) -> str:
        if self.update == "sharded":
            return 'update = "sharded": its losses are those of "replicated" up to FP32 rounding; set that'
        if self.offload or self.weights_dtype != "float32":
            given = f"offload = {self.offload} and weights_dtype = {self.weights_dtype!r}"
            return f"{given}: simulated replicas keep all their state on the device; leave both at their defaults"
        return ""

    def cost(self) -> ScapeCost:
        return ScapeCost(self)

    def label(self) -> str:
        text = f"{self.method_name()} {self.density:g}"
        text += "" if self.wire == "float32" else f" {short_name(self.wire)}"
        text += " sharded" if self.update == "sharded" else ""
        text += "" if self.values == "float32" else f" {short_name(self.values)} values"
        return text + (" bf16 weights" if self.weights_dtype == "bfloat16" else "")

    def offloaded(self) -> tuple[str, ...]:
        return tuple(self.offload)

    def without_memory_savings(self) -> Self:
        return replace(self, update="replicated", values="float32", weights_dtype="float32", offload=[])

    def fingerprint(self) -> dict[str, Any]:
        # Without staleness scaling these two have no effect.
        unused = {} if self.staleness_scaling else {"max_staleness": None, "keep_moment": None}
        return super().fingerprint() | unused

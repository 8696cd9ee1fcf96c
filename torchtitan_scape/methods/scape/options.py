"""What can be chosen of SCAPE: the section [sync.scape] of a recipe."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from topology.layout import Layout
from torchtitan_scape.methods.options import FREE, LAYOUT, MethodOptions
from torchtitan_scape.methods.scape.budget import share, within
from torchtitan_scape.methods.scape.chunking import best_chunk
from torchtitan_scape.planner.volumes import PlannedRun as PlannedMethod

logger = logging.getLogger(__name__)

Wire = Literal["float32", "bfloat16", "int8", "int4", "e2m1", "e3m0", "2bit", "1bit"]


@dataclass
class ScapeOptions(MethodOptions):
    """[sync.scape]: read with method = "scape", which takes [optimizer] name = "AdamS"."""

    section: ClassVar[str] = "sync.scape"

    density: float = 0.1
    """Share of the entries that replicas exchange each step, in (0, 1]"""

    bytes: float = field(default=0.0, metadata=FREE)
    """Share of dense FP32 bytes that a step may send at the target density, masks and scales included, for example
    0.012; chooses density, block_size and wire by the quality study, whatever these say. 0 takes them as they are"""

    density_warmup_steps: int = 0
    """The density falls exponentially from 1 to its value over so many steps; 0 for none"""

    block_size: int = field(default=1024, metadata=LAYOUT)
    """Entries per block of the mask, a multiple of 8 up to 32768"""

    selection: Literal["block", "tensor"] = field(default="block", metadata=LAYOUT)
    """Top-k of every block, or of every tensor's part of a replica's run (the paper's form, always in PyTorch)"""

    staleness_scaling: bool = True
    """Scale the step of entries that enter the mask by how long they were outside it, in the mean over steps of their
    row and column (not in the paper)"""

    max_staleness: float = 1000
    """Upper limit of that factor"""

    keep_moment: float = 0.5
    """Share of its moment that a newly entered entry keeps after its scaled step, which has spent it; 1 keeps all.
    Below 1, at the target density, such an entry is not selected for the next mask while there is another"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged whole although they have two dimensions or more"""

    clip_mode: Literal["moment", "literal"] = "moment"
    """What training.max_norm clips: the gradient of both moments, or of the second alone (as printed in the paper)"""

    wire: Wire = field(default="float32", metadata=LAYOUT)
    """How the payload travels between nodes: FP32, BF16, or a code of blocks of 128 entries. What is lost by it is kept
    (FP32, 4 bytes an entry sent) and sent later. With a code the masks of the density warm-up travel in INT8"""

    update: Literal["replicated", "sharded"] = field(default="replicated", metadata=LAYOUT)
    """Who updates: every replica its own copy, or each entry's owner, which sends the new value to all (Algorithm 2)"""

    values: Wire = field(default="float32", metadata=LAYOUT)
    """With "sharded", how new values travel. In BF16 or in a code their owner keeps an FP32 master of its share; coded
    is by how much it differs from what all hold"""

    weights_dtype: Literal["float32", "bfloat16"] = field(default="float32", metadata=LAYOUT)
    """What every replica keeps of the weights. In BF16 their FP32 master is with each entry's owner alone ("sharded"),
    or with every replica ("replicated", which saves memory where the master is offloaded)"""

    offload: list[str] = field(default_factory=list, metadata=FREE)
    """What lies in host memory between its uses: "state" (moment and residual), "master" (FP32 weights, where there are
    others); two buffers of the largest tensor stay on the device for each"""

    chunk_bytes: int = field(default=0, metadata=FREE)
    """The payload goes in parts of about so many bytes, packed and exchanged in turn; 0 asks the cost model"""

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
        return replace(self, chunk_bytes=self.chunk_bytes or best_chunk(shapes, self, layout, rank, levels))

    def resolve(self, shapes: Sequence[Sequence[int]], replicas: int) -> "ScapeOptions":
        if not self.bytes:
            return self
        own = [tuple(shape) for shape in shapes]
        try:
            chosen = within(self.bytes, own, replicas, self.update, self.weights_dtype)
        except ValueError as error:
            raise ValueError(f"[{self.section}] bytes = {self.bytes:g}: {error}; set no less") from None
        logger.info(
            f"[{self.section}] bytes = {self.bytes:g}: density {chosen.density:g}, block_size {chosen.block}, "
            f"wire {chosen.wire!r}; a step sends {100 * share(chosen, own, replicas):.3g} % of the dense FP32 bytes"
        )
        settings: dict[str, Any] = {
            "density": chosen.density,
            "block_size": chosen.block,
            "wire": chosen.wire,
            "values": chosen.values,
        }
        return replace(self, bytes=0.0, **settings)

    def needs_comm_streams(self) -> bool:
        return self.wire != "float32" or self.bytes > 0

    def simulation_error(self) -> str:
        if self.update == "sharded":
            return 'update = "sharded": its losses are those of "replicated" up to FP32 rounding; set that'
        if self.offload or self.weights_dtype != "float32":
            given = f"offload = {self.offload} and weights_dtype = {self.weights_dtype!r}"
            return f"{given}: simulated replicas keep all their state on the device; leave both at their defaults"
        return ""

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "scape",
            self.density,
            self.wire,
            update=self.update,
            values=self.values,
            weights=self.weights_dtype,
            offload=tuple(self.offload),
            block=self.block_size,
        )

    def fingerprint(self) -> dict[str, Any]:
        # What does nothing is no difference.
        unused = {} if self.staleness_scaling else {"max_staleness": None, "keep_moment": None}
        return super().fingerprint() | unused

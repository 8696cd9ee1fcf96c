"""Options of quantized gradients and updates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, ClassVar, Literal

import numpy as np

from torchtitan_scape.core.options import LAYOUT
from torchtitan_scape.core.workloads import LocalModel, Shape
from torchtitan_scape.kernels.codec.formats import MessageSize
from torchtitan_scape.methods.options import MethodOptions
from torchtitan_scape.methods.quantized.options import Code
from torchtitan_scape.methods.quantized_update.layout import ExchangeGroup, assign_groups, divide
from torchtitan_scape.topology.partition import chunk_limit
from torchtitan_scape.topology.traffic import CollectiveCall, Levels, replicas_of, scaled

_divide = lru_cache(maxsize=64)(divide)  # the planner asks for the same groups several times
ITERATIONS = 14  # of the inverse root of second moments, see `bases.inverse_root`
ROTATED_TOGETHER = 256  # entries at most that the cosine transform mixes
WHITENED_TOGETHER = 3072  # entries at most that a matrix of second moments relates
BASIS_LAYOUT = {"whitened_together": WHITENED_TOGETHER}  # in a checkpoint's record; earlier bases were FP32 and whole
BASIS_BYTES = 1.0  # of an entry of a basis
OWNER_BYTES = 8.0  # of its second moment and of its inverse, FP32


@dataclass
class QuantizedUpdateOptions(MethodOptions):
    """[sync.quantized_update]: gradients and updates in few bits; every parameter is updated by one replica."""

    section: ClassVar[str] = "sync.quantized_update"
    main_options = ("code", "update_code", "interval")
    divides_update = True

    code: Code = field(default="2bit", metadata=LAYOUT)
    """Encoding of the gradients on the way to the replica that updates a parameter, on the outermost level"""

    update_code: Literal["int8", "int4", "e2m1", "e3m0", "2bit", "1bit", "1bit_unbiased"] = "1bit_unbiased"
    """Encoding of the change of the weights on the way back. With "1bit" the weights lag behind those of the owner;
    "1bit_unbiased" lags less"""

    block: int = 512
    """Entries that share BF16 scales, a power of two from 32 to 1024; every parameter starts a new block"""

    whiten_every: int = field(default=200, metadata=LAYOUT)
    """Steps between updates of the bases in which Muon's matrices are encoded, made of the second moments of their
    gradients; 0 encodes the entries themselves. Other optimizers have no bases"""

    interval: int = field(default=1, metadata=LAYOUT)
    """Steps between exchanges of a parameter. A step exchanges and updates a part of the parameters, with the mean of
    their gradients since their last exchange and a learning rate as for all these steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.interval >= 1, "interval", "it must be 1 or more")
        self.require(self.block in (32, 64, 128, 256, 512, 1024), "block", "it must be a power of two from 32 to 1024")
        self.require(
            self.whiten_every >= 0, "whiten_every", "it must be 1 or more, or 0 to encode the entries themselves"
        )

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | (BASIS_LAYOUT if self.whiten_every else {})

    def layout(self) -> dict[str, Any]:
        return super().layout() | (BASIS_LAYOUT if self.whiten_every else {})

    def for_optimizer(self, name: str) -> "QuantizedUpdateOptions":
        return self if name == "Muon" else replace(self, whiten_every=0)

    def steps_per_round(self) -> int:
        return self.interval

    def needs_comm_streams(self) -> bool:
        return True

    def label(self) -> str:
        interval = f", interval {self.interval}" if self.interval > 1 else ""
        return f"{self.method_name()} {self.code}, {self.update_code}{interval}"

    def supports_overlap(self) -> bool:
        return True

    @property
    def message_bytes(self) -> MessageSize:
        """The size of encoded gradients."""
        return MessageSize(self.code, self.block)

    @property
    def update_bytes(self) -> MessageSize:
        """The size of encoded changes of the weights."""
        return MessageSize(self.update_code, self.block)

    def groups(
        self, model: LocalModel, replicas: int, chunk_entries: int = 0, equal_rows: bool = False
    ) -> tuple[ExchangeGroup, ...]:
        """Return groups, owners and columns. Matrices of Muon are not divided."""
        sizes = tuple(model.sizes)
        whole = tuple(size if model.is_hidden(i) else 0 for i, size in enumerate(sizes))
        shorter = min(self.message_bytes, self.update_bytes, key=lambda size: size(self.block))
        limit = chunk_entries or chunk_limit(model.entries, replicas, shorter)
        in_fp32 = chunk_entries or chunk_limit(model.entries, replicas)
        return _divide(
            sizes,
            whole,
            replicas,
            block=self.block,
            limit=limit,
            limit_in_fp32=in_fp32,
            equal_rows=equal_rows,
            groups=self.interval,
            entries=sizes,
        )

    def collective_calls(self, model: LocalModel, levels: Levels, chunk_entries: int = 0) -> list[CollectiveCall]:
        replicas = replicas_of(levels)
        if replicas == 1:
            return []
        groups = self.groups(model, replicas, chunk_entries, equal_rows=len(levels) > 1)
        return self.calls_of(groups, model, replicas, self.whiten_every > 0)

    def calls_of(
        self, groups: Sequence[ExchangeGroup], model: LocalModel, replicas: int, has_bases: bool
    ) -> list[CollectiveCall]:
        """Return the collectives of a step. Bytes are averaged over replicas, time is that of the busiest."""
        calls, gradients, updates = [], self.message_bytes, self.update_bytes
        for column in (column for group in groups for column in group.columns):
            count, active = replicas * column.width, len(column.owners) / replicas
            calls += [
                CollectiveCall("reduce_scatter", count, gradients, chunks=1, largest_chunk=count, active=active),
                CollectiveCall("all_gather", updates(column.width), chunks=1, active=active),
            ]
        calls = scaled(calls, 1.0 / len(groups))
        bases = [basis_entries(shape) for shape in model.hidden_shapes if has_basis(shape)]
        if has_bases and bases:  # each is broadcast by its owner
            sent, share = int(BASIS_BYTES) * sum(bases), 1.0 / self.whiten_every
            calls.append(CollectiveCall("all_gather", sent, share=share, chunks=len(bases), active=1.0 / replicas))
        return calls

    def update_groups(self, model: LocalModel) -> Sequence[LocalModel]:
        return [model.select_numbers(group) for group in assign_groups(model.sizes, self.interval)]

    def updated_model(self, model: LocalModel, replicas: int) -> LocalModel:
        """Return the owned parts of the replica with most entries."""
        parts = [each for group in self.groups(model, replicas) for each in group.parts]
        held = np.zeros(replicas, np.int64)
        for each in parts:
            held[each.owners] += each.lengths
        busiest = held.argmax()
        of_busiest = [(each.tensor, n) for each in parts for n in each.lengths[each.owners == busiest].tolist()]
        shapes = [model.shapes[i] if model.is_hidden(i) else (n,) for i, n in of_busiest]
        return LocalModel(tuple(model.names[i] for i, _ in of_busiest), tuple(shapes), model.hidden_names)

    def matrix_flops(self, model: LocalModel, replicas: int) -> tuple[float, float]:
        """Return the operations of (products with bases, in and out, and second moments; updates of the bases)."""
        products = updates = 0.0
        owned = 1.0 / replicas
        for shape in filter(has_basis, model.hidden_shapes if self.whiten_every and replicas > 1 else ()):
            for side, whitened in zip(shape, whitened_sides(shape), strict=True):
                other = math.prod(shape) // side
                width = largest_divisor(side, WHITENED_TOGETHER if whitened else ROTATED_TOGETHER)
                products += (2.0 + (4.0 if whitened else 2.0) * owned / self.interval) * width * side * other
                if whitened:  # the inverse of the present basis or of the new one, and the root of an owned one
                    updates += (2.0 + 6.0 * ITERATIONS * owned) * side * width**2 / self.whiten_every
        return products, updates

    def held_memory(self, model: LocalModel, replicas: int) -> dict[str, float]:
        kinds = {"residual": 2.0 * model.entries, "unsent_update": 4.0 * self.updated_model(model, replicas).entries}
        entries, owned = self._basis_entries(model, replicas), np.zeros(replicas, np.int64)
        if not entries:
            return kinds
        for each in (each for group in self.groups(model, replicas) for each in group.parts):
            owned[each.owners] += entries.get(each.tensor, 0)
        # Of the replica whose own bases have most entries
        return kinds | {"bases": BASIS_BYTES * sum(entries.values()) + OWNER_BYTES * int(owned.max())}

    def basis_memory(self, model: LocalModel, replicas: int) -> float:
        return (BASIS_BYTES + OWNER_BYTES) * sum(self._basis_entries(model, replicas).values())

    def _basis_entries(self, model: LocalModel, replicas: int) -> dict[int, int]:
        """Return the entries of the bases of each matrix, by its position."""
        if replicas == 1 or not self.whiten_every:
            return {}
        return {i: basis_entries(s) for i, s in enumerate(model.shapes) if model.is_hidden(i) and has_basis(s)}


def has_basis(shape: Shape) -> bool:
    """Return whether a shard of one of Muon's parameters has a basis: a matrix, not a stack of matrices or a row.

    Embedding and output are not among them, because their rows differ by the frequency of a token.
    """
    return len(shape) == 2 and min(shape) > 1


def basis_entries(shape: Shape) -> int:
    """Return the entries of the bases of a matrix: `largest_divisor` of each whitened side for each of its entries."""
    sides = zip(shape, whitened_sides(shape), strict=True)
    return sum(n * largest_divisor(n, WHITENED_TOGETHER) for n, whitened in sides if whitened)


@cache
def largest_divisor(size: int, limit: int) -> int:
    """Return the largest divisor of a size up to a limit."""
    return next(n for n in range(min(size, limit), 0, -1) if size % n == 0)


def whitened_sides(shape: Shape) -> tuple[bool, bool]:
    """Return which sides of a matrix get a basis by its second moments: the shorter one, or both of a square matrix.

    The longer side is only rotated, because its second moments would need more memory than the matrix.
    """
    return shape[0] <= shape[1], shape[1] <= shape[0]

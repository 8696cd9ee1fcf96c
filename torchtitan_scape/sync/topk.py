"""Top-k of the gradient with error feedback: every replica sends its own largest entries to all others.

Seide et al., "1-Bit Stochastic Gradient Descent" (2014), has the error feedback; Stich, Cordonnier, Jaggi, "Sparsified
SGD with Memory" (2018), its convergence with top-k. The baseline of both the SCAPE and the Radius paper.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kernels.scape.blocks import density_at, entries_per_block
from kernels.scape.mask_code import decode_offsets, encode_offsets
from kernels.scape.reference import select_blocks, select_largest
from torchtitan_scape.planner.payload import topk_count, topk_message_bytes, topk_offset_bytes
from torchtitan_scape.planner.volumes import Method as PlannedMethod
from torchtitan_scape.sync.base import Message, Method, Pending, Setting, State, Step, keep
from torchtitan_scape.sync.options import LAYOUT, MethodOptions
from torchtitan_scape.sync.shards import split


@dataclass
class TopkOptions(MethodOptions):
    """[sync.topk]: read with method = "topk"."""

    section: ClassVar[str] = "sync.topk"

    density: float = 0.01
    """Share of the entries that each replica sends, in (0, 1]. All receive those of all: with N replicas a step
    sends less than dense training only while density x N is below 1.5"""

    density_warmup_steps: int = 0
    """The density falls exponentially from 1 over so many steps. Meanwhile a step whose messages would be longer than
    dense gradients is dense"""

    start: int = 0
    """So many steps at first are dense"""

    selection: Literal["block", "tensor"] = "block"
    """The largest of every block, whose offsets take 9 bits at 0.01 of blocks of 1024, or of every tensor (32 bits)"""

    block_size: int = 1024
    """Entries of a block, a multiple of 8 up to 32768"""

    decay: float = 1.0
    """What a step leaves of the residual, in (0, 1]; below 1 what is not sent in time is lost"""

    dense_names: list[str] = field(default_factory=list, metadata=LAYOUT)
    """Parameters exchanged whole although they have two dimensions or more"""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.density <= 1.0, "density", "it must lie in (0, 1], for example 0.01")
        self.require(self.density_warmup_steps >= 0, "density_warmup_steps", "it must be 0 (none) or more")
        self.require(self.start >= 0, "start", "it must be 0 or more")
        whole_bytes = self.block_size % 8 == 0 and 8 <= self.block_size <= 32768
        self.require(whole_bytes, "block_size", "it must be a multiple of 8 from 8 to 32768")
        self.require(0.0 < self.decay <= 1.0, "decay", "it must lie in (0, 1]")

    def planned(self, optimizer: str) -> PlannedMethod:
        block = self.block_size if self.selection == "block" else 0
        return PlannedMethod("topk", self.density, block=block, optimizer=optimizer.lower())


class Topk(Method):
    """One step, with x = decay * residual + gradient (all in mean units):

    1. the k = max(1, round(density * entries)) largest |x| of each block are chosen, ties to the lower index;
    2. their values and coded offsets are one message, which goes to all replicas;
    3. the synchronised gradient is the mean over replicas of what arrives, added in replica order, zero elsewhere;
    4. the residual is x without what was sent.

    What is not compressed (one dimension, `dense_names`) is all-reduced. N messages exist at once on each replica.
    """

    def __init__(self, setting: Setting, options: TopkOptions) -> None:
        super().__init__(setting, options)
        sparse, _ = split(setting.shards, options.dense_names)
        self._sparse = [i for i, shard in enumerate(setting.shards) if shard in sparse and shard.size]
        self._whole = [i for i in range(len(setting.shards)) if i not in self._sparse]
        self._pending = Pending.of(sparse)  # of empty shards, too: a checkpoint has them of all ranks
        self._residuals = [self._pending.tensors[setting.shards[i].name] for i in self._sparse]
        self._send_all = False

    def synchronize(self, gradients: list[Tensor], step: Step) -> list[Tensor]:
        if self.setting.scale != 1.0:
            torch._foreach_mul_(gradients, self.setting.scale)
        sparse = [gradients[i] for i in self._sparse]
        for x, residual in zip(sparse, self._residuals, strict=True):
            x.add_(residual.view(-1), alpha=self.options.decay)
        density = self._density(step.number)
        if density >= 1.0:
            self.collectives.all_reduce_chunked(gradients)
            self._pending.clear(step.applied)
            return gradients
        offsets = [self._select(x, density) for x in sparse]
        message = self._message(sparse, offsets)
        arrived = torch.empty(self.collectives.replicas * message.numel(), dtype=torch.uint8, device=message.device)
        handle = self.collectives.all_gather(arrived, message, kind="payload")
        self.collectives.all_reduce_chunked([gradients[i] for i in self._whole])
        for x, residual, chosen in zip(sparse, self._residuals, offsets, strict=True):
            keep(residual, x.index_fill_(0, self._positions(chosen, x.numel()).view(-1), 0.0), step.applied)
            x.zero_()
        handle.wait()
        for part in arrived.view(self.collectives.replicas, -1):
            self._add(sparse, part, density)
        if sparse:
            torch._foreach_div_(sparse, float(self.collectives.replicas))
        return gradients

    def states(self) -> list[State]:
        return [self._pending.state()]

    def send_all(self) -> None:
        self._send_all = True

    def messages(self) -> list[Message]:
        whole = Message("all_reduce", sum(self.setting.shards[i].size for i in self._whole))
        if self.options.density >= 1.0:
            return [Message("all_reduce", sum(shard.size for shard in self.setting.shards))]
        return [Message("all_gather", self._message_bytes(self.options.density)), whole]

    def density(self) -> float:
        entries = sum(shard.size for shard in self.setting.shards)
        sent = sum(topk_count(self.setting.shards[i].size, self.options.density, self._block) for i in self._sparse)
        return (sent + sum(self.setting.shards[i].size for i in self._whole)) / max(1, entries)

    def _density(self, number: int) -> float:
        """Of this step; 1 for a dense one."""
        if self._send_all or number <= self.options.start:
            self._send_all = False
            return 1.0
        target = self.options.density
        density = density_at(number - self.options.start, target, self.options.density_warmup_steps)
        entries = sum(residual.numel() for residual in self._residuals)
        longer = self.collectives.gathered_bytes(self._message_bytes(density)) > self.collectives.reduced_bytes(entries)
        return 1.0 if density > target and longer else density

    # -------------------------------------------------------------------------------------- messages

    @property
    def _block(self) -> int:
        """Entries of a block; 0 where selection is by tensor."""
        return self.options.block_size if self.options.selection == "block" else 0

    def _message_bytes(self, density: float) -> int:
        return topk_message_bytes([residual.numel() for residual in self._residuals], density, self._block)

    def _select(self, x: Tensor, density: float) -> Tensor:
        """int64: offsets in their blocks (blocks, k), or places in the tensor (k,)."""
        if self._block:
            return select_blocks(x, entries_per_block(density, self._block), self._block)
        return select_largest(x, topk_count(x.numel(), density, 0))

    def _positions(self, offsets: Tensor, entries: int) -> Tensor:
        """Places in the tensor, of the shape of `offsets`."""
        if not self._block:
            return offsets
        return offsets + torch.arange(len(offsets), device=offsets.device)[:, None] * self._block

    def _message(self, sparse: list[Tensor], offsets: list[Tensor]) -> Tensor:
        """uint8: the values of all tensors, then their offsets."""
        values, places = [], []
        for x, chosen in zip(sparse, offsets, strict=True):
            picked = x[self._positions(chosen, x.numel())]
            if self._block and (tail := x.numel() % self._block):
                picked[-1, tail:] = 0.0  # entries that stand there twice
            values.append(picked.view(-1).view(torch.uint8))
            places.append(encode_offsets(chosen, self._block) if self._block else chosen.int().view(torch.uint8))
        parts = [*values, *places]
        length = sum(part.numel() for part in parts)
        device = self.setting.shards[0].device
        return torch.cat([*parts, torch.zeros(-length % 16, dtype=torch.uint8, device=device)])

    def _add(self, sparse: list[Tensor], message: Tensor, density: float) -> None:
        """Adds what a message holds."""
        values = [4 * topk_count(x.numel(), density, self._block) for x in sparse]
        places = [topk_offset_bytes(x.numel(), density, self._block) for x in sparse]
        parts = message[: sum(values) + sum(places)].split([*values, *places])
        for x, picked, packed in zip(sparse, parts, parts[len(sparse) :], strict=False):
            if self._block:
                block, k = self._block, entries_per_block(density, self._block)
                chosen = decode_offsets(packed, -(-x.numel() // block), k, block)
            else:
                chosen = packed.clone().view(torch.int32).long()  # a copy begins where 32-bit words may
            x.index_add_(0, self._positions(chosen, x.numel()).view(-1), picked.view(torch.float32))

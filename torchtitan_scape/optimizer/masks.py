"""Delayed masks: each replica selects in its own run, and the mask is used one step later.

SCAPE paper, Section IV-A and Figure 7. The exchange is asynchronous: it starts behind the payload's and is
waited for where the next step first needs the mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from topology.collectives import Handle, ReplicaCollectives
from torchtitan_scape.optimizer.blocks import BlockLayout, entries_per_block

# Blocks that are selected or decoded at a time; bounds the temporaries. A multiple of 8, so that packed
# offsets of that many blocks end on a byte.
_ROWS = 4096


@dataclass
class Mask:
    """Packed bits over all blocks, uint8 (replicas * run_blocks * block_size / 8,).

    density: what it was selected at, so that its count is known; at 1.0 it is all ones and `bits` not read.
    """

    bits: Tensor
    density: float = 1.0

    @property
    def dense(self) -> bool:
        return self.density >= 1.0


class DelayedMasks:
    """The mask in use (A), the one before it (P), and the one on its way.

    selection: "block", the k largest of every block, or "tensor", the k largest of each tensor's part of the
    owned run (the paper's form).
    """

    def __init__(
        self, layout: BlockLayout, selection: str, collectives: ReplicaCollectives, device: torch.device
    ) -> None:
        self.layout, self.selection, self.collectives = layout, selection, collectives
        self._block_bytes = layout.block_size // 8
        size = layout.replicas * layout.run_blocks * self._block_bytes
        self.in_use, self.previous = (Mask(torch.zeros(size, dtype=torch.uint8, device=device)) for _ in range(2))
        self._arriving: tuple[Handle, Tensor | None, float] | None = None

    # ------------------------------------------------------------------------------------ reading

    def bits(self, mask: Mask, tensor: int) -> Tensor | None:
        """The packed bits of one tensor's blocks; None for all ones."""
        if mask.dense:
            return None
        first = self.layout.first_block[tensor] * self._block_bytes
        return mask.bits[first : first + self.layout.blocks[tensor] * self._block_bytes]

    def nnz(self, tensor: int) -> int:
        """Entries of `tensor` in the mask in use; no device is asked."""
        return self.layout.nnz(tensor, self.in_use.density, self.selection)

    def indices(self, tensor: int) -> Tensor | None:
        """Positions of the mask in use in `tensor`, int64 (nnz,); None for all."""
        bits = self.bits(self.in_use, tensor)
        if bits is None:
            return None
        return reference.mask_indices(bits, self.layout.sizes[tensor], self.nnz(tensor))

    def of_moment(self, applied: bool) -> tuple[Mask, Mask]:
        """The mask on which m lives, and its neighbour in time. `applied` tells of the last step.

        Before `rotate` an applied step's m lives on the mask in use; after it, or after a skipped step, on the
        one before.
        """
        if self._arriving is not None and applied:
            return self.in_use, self.previous
        return self.previous, self.in_use

    def wire_bytes(self, density: float) -> int:
        """Bytes of one replica's selection on the wire."""
        blocks, size = self.layout.run_blocks, self.layout.block_size
        if density >= 1.0:
            return 0
        if self._offsets_are_smaller(density):
            return reference.offset_bytes(blocks, entries_per_block(density, size), size)
        return blocks * self._block_bytes

    # ----------------------------------------------------------------------------------- refreshing

    def select(self, moments: list[Tensor], density: float) -> Tensor | None:
        """Selects in the own run from this replica's mt, FP32 (sizes[i],) each, for the next step.

        Returns what goes on the wire, uint8; None where there is nothing to tell.
        """
        if density >= 1.0 or self.layout.total_blocks == 0:
            return None
        select = self._select_blocks if self.selection == "block" else self._select_tensors
        if self.collectives.is_fake:  # nobody else will select
            return torch.cat([select(moments, density, replica) for replica in range(self.layout.replicas)])
        return select(moments, density, self.collectives.replica)

    def exchange(self, own: Tensor | None, density: float) -> None:
        """Starts the all-gather of what was selected."""
        if own is None:
            self._arriving = (Handle(None), None, density)
        elif self.collectives.is_fake:
            self._arriving = (Handle(None), own, density)
        else:
            received = torch.zeros(self.layout.replicas * own.numel(), dtype=torch.uint8, device=own.device)
            self._arriving = (self.collectives.all_gather(received, own), received, density)

    def rotate(self, applied: bool) -> None:
        """Waits for the exchange; if the step was applied its mask comes into use, else it is dropped."""
        assert self._arriving is not None
        handle, received, density = self._arriving
        self._arriving = None
        handle.wait()
        if not applied:
            return
        arrived = Mask(self.previous.bits, density)
        if received is not None:
            self._decode(received, arrived)
        self.previous, self.in_use = self.in_use, arrived

    # ------------------------------------------------------------------------------------ internals

    def _offsets_are_smaller(self, density: float) -> bool:
        """Whether in-block offsets take fewer bytes than the bitmap; "tensor" selection knows the bitmap only."""
        if self.selection != "block":
            return False
        blocks, size = self.layout.run_blocks, self.layout.block_size
        k = entries_per_block(density, size)
        return reference.offset_bytes(blocks, k, size) < blocks * self._block_bytes

    def _owned_parts(self, moments: list[Tensor], replica: int) -> list[tuple[int, Tensor]]:
        """(first row in the replica's run, the owned part) of every tensor that the run meets."""
        layout = self.layout
        parts = []
        for i, moment in enumerate(moments):
            start, end = layout.owned(i, replica)
            if end > start:
                row = layout.first_block[i] + start // layout.block_size - replica * layout.run_blocks
                parts.append((row, moment[start:end]))
        return parts

    def _select_blocks(self, moments: list[Tensor], density: float, replica: int) -> Tensor:
        size, run_blocks = self.layout.block_size, self.layout.run_blocks
        k = entries_per_block(density, size)
        device = self.in_use.bits.device
        as_offsets = self._offsets_are_smaller(density)
        offsets = torch.zeros(run_blocks if as_offsets else 0, k, dtype=torch.int16, device=device)
        bitmap = torch.zeros(0 if as_offsets else run_blocks * self._block_bytes, dtype=torch.uint8, device=device)
        for first, part in self._owned_parts(moments, replica):
            for i, values in enumerate(part.split(_ROWS * size)):
                row = first + i * _ROWS
                chosen = reference.select_blocks(values, k, size)
                if as_offsets:
                    offsets[row : row + chosen.shape[0]] = chosen
                else:
                    packed = reference.offsets_to_mask(chosen, size)
                    bitmap[row * self._block_bytes :][: packed.numel()] = packed
        if not as_offsets:
            return bitmap
        return torch.cat([reference.pack_offsets(rows.long(), size) for rows in offsets.split(_ROWS)])

    def _select_tensors(self, moments: list[Tensor], density: float, replica: int) -> Tensor:
        size = self.layout.run_blocks * self.layout.block_size
        bits = torch.zeros(size, dtype=torch.bool, device=self.in_use.bits.device)
        for row, part in self._owned_parts(moments, replica):
            chosen = reference.select_largest(part, max(1, round(density * part.numel())))
            bits[row * self.layout.block_size + chosen] = True
        return reference.pack_bits(bits)

    def _decode(self, received: Tensor, mask: Mask) -> None:
        if not self._offsets_are_smaller(mask.density):
            mask.bits.copy_(received)
            return
        size, run_blocks = self.layout.block_size, self.layout.run_blocks
        k = entries_per_block(mask.density, size)
        run_bytes = run_blocks * self._block_bytes
        rows_bytes = reference.offset_bytes(_ROWS, k, size)
        for replica, own in enumerate(received.view(self.layout.replicas, -1)):
            # The last run may be short: what lies behind its blocks is no tensor's.
            blocks = min(run_blocks, self.layout.total_blocks - replica * run_blocks)
            for i in range(0, max(0, blocks), _ROWS):
                rows = min(_ROWS, blocks - i)
                packed = own[i // _ROWS * rows_bytes :][: reference.offset_bytes(rows, k, size)]
                bits = reference.offsets_to_mask(reference.unpack_offsets(packed, rows, k, size), size)
                mask.bits[replica * run_bytes + i * self._block_bytes :][: bits.numel()] = bits

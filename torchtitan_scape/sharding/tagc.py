"""TAGC in the place of FSDP2's reduce-scatter: sparse gradients at places that all ranks share; the rest waits.

Polyakov, Dukhanov, Spirin (arXiv:2504.05638). Ours, by default: exact unions, packed values, one exchange a step; the
published forms are options.

Every rank keeps, of every entry of the group and not of its own row alone, what it has not sent.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from kernels import finite_check, tagc_passes
from kernels.common.wire import padded_bytes
from kernels.scape.reference import unpack_bits
from kernels.tagc.formats import BITMAP, BLOCK, capacity, index_bytes
from kernels.tagc.index import (
    from_nibbles,
    select_above,
    sum_bytes,
    to_nibbles,
    to_offsets,
    union_of_bitmaps,
    union_of_offsets,
)
from kernels.tagc.sketch import Sketch
from topology import shard_collectives
from topology.rank_group import RankGroup
from topology.shard_collectives import ShardLedger
from torchtitan_scape.sharding.base import GRADIENTS, INDEX, Allocates, ShardedParamGroup, TrainPosition, add_rows
from torchtitan_scape.sharding.tagc_options import LEAST_BLOCKS, TagcShardingOptions

TURNS = 4  # sketches that are used in turn: entries that do not come apart in one do in the next


class TagcReduce(Allocates):
    """Stands in for the reduce-scatter of one group. One exchange, with v the residual and the gradients since:

    1. each rank chooses the largest |v| of every block of 1024 entries, of the rows of all S ranks;
    2. all learn the union of the choices: the index;
    3. a rank sends what it has there: packed, or in a count sketch, to the owner of each row, who adds in rank order;
    4. v without what was sent, to the last bit, is the residual.

    A block never crosses a parameter. What is not compressed is sent whole, with the same exchange, and waits for it.
    A row with a number that is not finite is neither added nor taken from; its owner gets NaN, so that the step is
    skipped. What others have sent in a skipped step is dropped with it, as a dense gradient is; not what a whole
    exchange has sent, which stays with that step's gradients in it, and is sent again.

    Args:
        rank_group: all ranks of the shard axis.
        backend: "torch" or "triton".
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_group: RankGroup,
        options: TagcShardingOptions,
        ledger: ShardLedger,
        moment: TrainPosition,
        backend: str,
        device: torch.device,
    ) -> None:
        self._flat, self._rank_group, self._options = flat, rank_group, options
        self._ledger, self._moment = ledger, moment
        # Whether the next exchange is to be whole, and whether this step's was.
        self.name, self._send_all, self._sent_all = str(flat.number), False, False
        self._passes, self._finite = tagc_passes(backend), finite_check(backend)
        ranks = rank_group.size
        self.compressed = [s for s in flat.reduced if options.compresses(s.name, s.dims, ranks * s.size) and s.size]
        self._raw = [s for s in flat.reduced if s not in self.compressed]
        self.starts = _starts([-(-s.size // BLOCK) * BLOCK for s in self.compressed])
        self.blocks = self.starts.pop() // BLOCK
        self.residual = torch.zeros(ranks, self.blocks * BLOCK, dtype=torch.float32, device=device)
        self._index = options.index_among(ranks)
        self._capacity = capacity(options.density, ranks)
        self._sketches = self._make_sketches(device) if options.codec == "sketch" and self.blocks else []
        # Of this step so far: what is not compressed, and which rows had numbers that are not finite.
        self._waiting: Tensor | None = None
        self._bad = torch.zeros(ranks, dtype=torch.bool, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._flat.check_reduce(output_tensor, input_tensor, group, op, self._rank_group.size)
        if self._moment.micro_batch == 0:
            self._forget_step()
        self._add(input_tensor.float().view(self._rank_group.size, -1))
        if self._options.micro == "last" and not self._moment.last:
            output_tensor.zero_()  # FSDP2 adds up what micro-batches give
            return
        fake = dist.get_backend(group) == "fake"  # what is received means nothing
        whole, own = self._send_whole(), self._send_compressed(fake)
        self._forget_step()
        if fake:
            output_tensor.zero_()
            return
        for s, values in zip(self._raw, whole.split([s.size for s in self._raw]), strict=True):
            output_tensor[s.start : s.start + s.size] = values
        for s, at in zip(self.compressed, self.starts, strict=True):
            output_tensor[s.start : s.start + s.size] = own[at : at + s.size]

    def slices(self, row: Tensor | None = None) -> dict[str, Tensor]:
        """By parameter, the stretch of a row of the residual, by default of this rank's own."""
        row = self.residual[self._rank_group.group_rank] if row is None else row
        return {s.name: row[at : at + s.size] for s, at in zip(self.compressed, self.starts, strict=True)}

    def decode_and_sum(self) -> Tensor:
        """This rank's row of the residuals of all ranks. A collective call, not counted: for checkpoints."""
        own = torch.empty_like(self.residual[0])
        with self._ledger.uncounted():
            self._sum(self.residual, own)
        return own

    def request_full_exchange(self) -> None:
        """Makes the last exchange of the next step whole."""
        self._send_all = True

    def all_is_sent(self) -> None:
        """The residual goes with this step, see `after_optimizer_step`."""
        self._sent_all = True

    def after_optimizer_step(self, applied: Tensor) -> None:
        """After a step, bool () whether it was applied: then nothing is left of what was sent whole.

        Waits for the device, where something was.
        """
        if self._sent_all:
            self._sent_all, self._send_all = False, not applied
            if applied:
                self.residual.zero_()

    def bytes_sent(self) -> dict[str, float]:
        """Of an exchange, by kind: arithmetic."""
        ranks, entries = self._rank_group.size, self.blocks * BLOCK
        if self._index == "offsets":
            index = (ranks - 1) * index_bytes(self._options.density, ranks * self.blocks) if entries else 0
        else:
            index = 2 * (ranks - 1) * self.blocks * BITMAP * (4 if self._index == "nibble_sum" else 1)
        values = self._sketches[0].rows * BLOCK if self._sketches else self.blocks * self._capacity
        whole = _on_wire(sum(s.size for s in self._raw))
        return {INDEX: float(index), GRADIENTS: 4.0 * (ranks - 1) * (values + whole)}

    # --------------------------------------------------------------------------------------------- the step so far

    def _forget_step(self) -> None:
        self._waiting = None
        self._bad.zero_()

    def _add(self, flat: Tensor) -> None:
        """Adds a micro-batch's gradients, FP32 (S, m), to what is sent next."""
        whole = torch.cat([flat[:, s.start : s.start + s.size] for s in self._raw] or [flat[:, :0]], 1)
        self._waiting = whole if self._waiting is None else self._waiting.add_(whole)
        if not self.compressed:
            return
        parts = [[row[s.start : s.start + s.size] for s in self.compressed] for row in flat]
        good = self._finite([part for row in parts for part in row]).view(len(flat), -1).all(1)
        self._bad |= ~good
        for own, row, fine in zip(self.residual, parts, good, strict=True):
            for at, part in zip(self.starts, row, strict=True):
                own[at : at + part.numel()] += torch.where(fine, part, 0.0)

    # ------------------------------------------------------------------------------------------------ the exchange

    def _send_whole(self) -> Tensor:
        """(entries,): this rank's part of what is not compressed."""
        waiting = self._waiting
        assert waiting is not None
        own = waiting.new_empty(waiting.shape[1])
        if own.numel():
            self._sum(waiting, own)
        return own

    def _send_compressed(self, fake: bool) -> Tensor:
        """(blocks * 1024,): this rank's row of what is."""
        ranks, own = self._rank_group.size, self.residual.new_empty(self.blocks * BLOCK)
        if not self.blocks:
            return own
        if self._send_all and self._moment.last:
            return self._all_of_it(own)
        if self._options.selection == "table":
            chosen = torch.cat([select_above(row, self._options.sparsity) for row in self.residual])
        else:
            chosen = self._passes.select(self.residual.view(-1), self._options.chosen)
        index = self._agree(chosen, fake).view(ranks, -1)
        sends = index if self._options.fill else chosen.view(ranks, -1)
        if self._sketches:
            turn = (self._moment.step + self._moment.micro_batch) % TURNS
            self._through_sketch(self._sketches[turn], index, sends, own)
        else:
            self._through_packed(index, self._of_good_rows(sends), own)
        return own

    def _all_of_it(self, own: Tensor) -> Tensor:
        self.all_is_sent()
        self._sum(torch.where(self._bad[:, None], torch.nan, self.residual), own)
        return own

    def _of_good_rows(self, bits: Tensor) -> Tensor:
        return torch.where(self._bad[:, None], 0, bits)

    def _agree(self, chosen: Tensor, fake: bool) -> Tensor:
        """Bits of the index of all rows, from the own choice's."""
        ranks, rank_group = self._rank_group.size, self._rank_group
        if self._index == "offsets":
            coded = to_offsets(chosen, self._options.chosen)
            arrived = coded.new_empty(ranks, coded.numel())
            shard_collectives.all_gather(arrived.view(-1), coded, rank_group, self._ledger, INDEX)
            return chosen if fake else union_of_offsets(arrived, ranks * self.blocks, self._options.chosen)
        told = to_nibbles(chosen) if self._index == "nibble_sum" else chosen
        received, whole = torch.empty_like(told).view(ranks, -1), torch.empty_like(told)
        shard_collectives.all_to_all(received, told.view(ranks, -1), rank_group, self._ledger, INDEX)
        shard_collectives.all_gather(
            whole, (union_of_bitmaps if self._index == "bits" else sum_bytes)(received), rank_group, self._ledger, INDEX
        )
        if fake:
            return chosen
        return from_nibbles(whole) if self._index == "nibble_sum" else whole

    def _through_packed(self, index: Tensor, sends: Tensor, own: Tensor) -> None:
        ranks = self._rank_group.size
        packed = self.residual.new_empty(ranks * self.blocks, self._capacity)
        self._passes.pack(self.residual.view(-1), index.view(-1), sends.view(-1), self._capacity, packed)
        packed.view(ranks, -1)[:, 0].masked_fill_(self._bad, torch.nan)  # a row's first entry of the index
        received = torch.empty_like(packed)
        shard_collectives.all_to_all(
            received.view(ranks, -1), packed.view(ranks, -1), self._rank_group, self._ledger, GRADIENTS
        )
        self._passes.expand(received.view(ranks, self.blocks, -1), index[self._rank_group.group_rank], own)

    def _through_sketch(self, sketch: Sketch, index: Tensor, sends: Tensor, own: Tensor) -> None:
        if self._options.left_over == "keep":
            # All ranks know what an owner will find; the rest is not sent.
            found = torch.stack([self._passes.solvable(row, sketch) for row in index])
            index, sends = index & found, sends & found
        sends = self._of_good_rows(sends)
        cells = self.residual.new_empty(self._rank_group.size, sketch.rows, BLOCK)
        for row, bits, one in zip(self.residual, sends, cells, strict=True):
            self._passes.fold(row, bits, sketch, one)
            row.masked_fill_(unpack_bits(bits, row.numel()), 0.0)
        cells.masked_fill_(self._bad[:, None, None], torch.nan)
        total = torch.empty_like(cells[0])
        self._sum(cells.view(len(cells), -1), total.view(-1))
        poison = total.sum() * 0.0  # NaN where any cell has it, whether an entry is read there or not
        estimate = self._options.left_over == "estimate"
        self._passes.unfold(total, index[self._rank_group.group_rank], sketch, estimate, own)
        own[:1] += poison

    def _sum(self, rows: Tensor, own: Tensor) -> None:
        """own (n,) becomes this rank's row of the sum over ranks of rows (S, n), in rank order."""
        n = rows.shape[1]
        rows = pad(rows, (0, _on_wire(n) - n)) if _on_wire(n) > n else rows
        received = torch.empty_like(rows)
        shard_collectives.all_to_all(received, rows, self._rank_group, self._ledger, GRADIENTS)
        add_rows(received[:, :n], own)

    def _make_sketches(self, device: torch.device) -> list[Sketch]:
        """Raises ValueError for a group that has too few blocks of one."""
        if self.blocks < LEAST_BLOCKS and not self._options.reproduce:
            raise ValueError(
                f"[sharding.tagc] codec = 'sketch': a rank has {self.blocks} blocks of {BLOCK} entries of "
                f"{self._flat.name} to compress, and a sketch of fewer than {LEAST_BLOCKS} may not come apart; take "
                "codec = 'packed', raise min_entries, or set reproduce = true"
            )
        return [Sketch.of(self.blocks, self._options.ratio, device, turn) for turn in range(TURNS)]


def _on_wire(entries: int) -> int:
    """FP32 entries, filled up."""
    return padded_bytes(4 * entries) // 4


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each begins, and where all end."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + size)
    return found

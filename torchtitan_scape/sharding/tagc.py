"""TAGC as the reduce-scatter of the shard axis: sparse gradients at indices shared by all ranks, with error feedback.

Polyakov, Dukhanov, Spirin (arXiv:2504.05638). This implementation deviates from the paper: exact unions, packed values
in the place of a count sketch, and one exchange per step.

Every rank keeps a residual of all entries of the group, not only of its own row.
"""

import math
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from torchtitan_scape.kernels.backends import tagc_passes
from torchtitan_scape.kernels.codec.formats import padded_bytes
from torchtitan_scape.kernels.tagc.formats import BLOCK, capacity, sends_offsets
from torchtitan_scape.kernels.tagc.reference import union_of_bitmaps
from torchtitan_scape.sharding.base import GRADIENTS, INDEX, CollectiveHook, ShardedParamGroup, TrainPosition, add_rows
from torchtitan_scape.sharding.tagc_options import TagcShardingOptions
from torchtitan_scape.topology import shard_collectives
from torchtitan_scape.topology.layout import RankGroup
from torchtitan_scape.topology.shard_collectives import ShardLedger


class TagcReduce(CollectiveHook):
    """Sparse reduce-scatter of one parameter group. The exchange of a step, after its last micro-batch, with v the
    residual plus the gradients of the step:

    1. Each rank selects the largest |v| of every block of 1024 entries, in the rows of all S ranks.
    2. All ranks compute the union of the selections, the index.
    3. Each rank packs its values at the index and sends them to the owner of each row, which sums them in rank order.
    4. The residual is v without the values sent, bitwise exact.

    A block does not span parameters. Parameters that are not compressed are sent whole in the same exchange. A row that
    contains a non-finite number does not change the residual, and its owner receives NaN, so that the step is skipped.
    Values sent in a skipped step are dropped with it, like a dense gradient. The values of a full exchange are an
    exception: they remain in the residual, together with that step's gradients, and are sent again.

    Args:
        flat: The parameter group.
        rank_group: All ranks of the shard axis.
        options: Section [sharding.tagc].
        ledger: Byte ledger.
        position: Training position.
        backend: "torch" or "triton".
        device: Device of the residual.
    """

    def __init__(
        self,
        flat: ShardedParamGroup,
        rank_group: RankGroup,
        options: TagcShardingOptions,
        ledger: ShardLedger,
        position: TrainPosition,
        backend: str,
        device: torch.device,
    ) -> None:
        self._flat, self._rank_group, self._ledger = flat, rank_group, ledger
        self._options, self._position = options, position
        # Whether the next exchange must be complete, and whether that of this step was.
        self.name, self._full_exchange_requested, self._full_exchange_sent = str(flat.number), False, False
        self._passes = tagc_passes(backend)
        ranks = rank_group.size
        self.compressed = [s for s in flat.reduced if options.compresses(s.name, s.dims, ranks * s.size) and s.size]
        self._raw = [s for s in flat.reduced if s not in self.compressed]
        self.starts = list(accumulate((-(-s.size // BLOCK) * BLOCK for s in self.compressed), initial=0))
        self.blocks = self.starts.pop() // BLOCK
        self.residual = torch.zeros(ranks, self.blocks * BLOCK, dtype=torch.float32, device=device)
        self._sends_offsets = sends_offsets(options.density, ranks)
        self._capacity = capacity(options.density, ranks)
        # Accumulated in this step: gradients that are not compressed, and the rows with non-finite numbers.
        self._uncompressed: Tensor | None = None
        self._nonfinite = torch.zeros(ranks, dtype=torch.bool, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._flat.check_reduce(output_tensor, input_tensor, group, op, self._rank_group.size)
        if self._position.micro_batch == 0:
            self._reset_step()
        self._add(input_tensor.float().view(self._rank_group.size, -1))
        if not self._position.last:
            output_tensor.zero_()  # FSDP2 sums the outputs of the micro-batches.
            return
        fake = dist.get_backend(group) == "fake"  # Received bytes are then meaningless.
        uncompressed, compressed = self._send_uncompressed(), self._send_compressed(fake)
        self._reset_step()
        if fake:
            output_tensor.zero_()
            return
        values = list(uncompressed.split([s.size for s in self._raw])) if self._raw else []
        values += [compressed[at : at + s.size] for s, at in zip(self.compressed, self.starts, strict=True)]
        targets = [output_tensor[s.start : s.start + s.size] for s in (*self._raw, *self.compressed)]
        if targets:
            torch._foreach_copy_(targets, values)

    def slices(self, row: Tensor | None = None) -> dict[str, Tensor]:
        """Return each parameter's slice of a row of the residual, by default of this rank's own row."""
        row = self.residual[self._rank_group.group_rank] if row is None else row
        return {s.name: row[at : at + s.size] for s, at in zip(self.compressed, self.starts, strict=True)}

    def decode_and_sum(self) -> Tensor:
        """Return this rank's row of the sum of all ranks' residuals, for checkpoints. Collective; its bytes are not
        counted.
        """
        row = torch.empty_like(self.residual[0])
        with self._ledger.uncounted():
            self._reduce_scatter(self.residual, row)
        return row

    def request_full_exchange(self) -> None:
        """Make the exchange of the next step complete."""
        self._full_exchange_requested = True

    def mark_full_exchange(self) -> None:
        """Record that this step sends the complete residual; see `after_optimizer_step`."""
        self._full_exchange_sent = True

    def after_optimizer_step(self, applied: Tensor) -> None:
        """Clear the residual after a full exchange if the step was applied, bool ().

        Waits for the device after a full exchange.
        """
        if self._full_exchange_sent:
            self._full_exchange_sent, self._full_exchange_requested = False, not applied
            if applied:
                self.residual.zero_()

    # -------------------------------------------------------------------------------------------- accumulation

    def _reset_step(self) -> None:
        self._uncompressed = None
        self._nonfinite.zero_()

    def _add(self, flat: Tensor) -> None:
        """Add a micro-batch's gradients, FP32 (S, m), to the next exchange."""
        uncompressed = torch.cat([flat[:, s.start : s.start + s.size] for s in self._raw] or [flat[:, :0]], 1)
        self._uncompressed = uncompressed if self._uncompressed is None else self._uncompressed.add_(uncompressed)
        if not self.compressed:
            return
        parts = [flat[:, s.start : s.start + s.size] for s in self.compressed]
        # The largest magnitude of a row is not finite if any of its entries is not.
        largest = torch.stack([torch.linalg.vector_norm(part, math.inf, 1) for part in parts])
        nonfinite = ~(largest < math.inf).all(0)
        self._nonfinite |= nonfinite
        for s, at, part in zip(self.compressed, self.starts, parts, strict=True):
            self.residual[:, at : at + s.size].add_(part.masked_fill(nonfinite[:, None], 0.0))

    # ------------------------------------------------------------------------------------------------ exchange

    def _send_uncompressed(self) -> Tensor:
        """Reduce-scatter the parameters that are not compressed. Return this rank's row, (entries,)."""
        uncompressed = self._uncompressed
        assert uncompressed is not None
        result = uncompressed.new_empty(uncompressed.shape[1])
        if result.numel():
            self._reduce_scatter(uncompressed, result)
        return result

    def _send_compressed(self, fake: bool) -> Tensor:
        """Reduce-scatter the compressed parameters. Return this rank's row, (blocks * 1024,)."""
        ranks, result = self._rank_group.size, self.residual.new_empty(self.blocks * BLOCK)
        if not self.blocks:
            return result
        if self._full_exchange_requested:
            self.mark_full_exchange()
            self._reduce_scatter(torch.where(self._nonfinite[:, None], torch.nan, self.residual), result)
            return result
        chosen = self._passes.select(self.residual.view(-1), self._options.chosen)
        self._exchange_packed(self._all_gather_index(chosen, fake).view(ranks, -1), result)
        return result

    def _all_gather_index(self, chosen: Tensor, fake: bool) -> Tensor:
        """Return the bitmaps of the union over all ranks, for all rows, from the bitmaps of this rank's selection."""
        ranks, rank_group = self._rank_group.size, self._rank_group
        if self._sends_offsets:
            coded = self._passes.to_offsets(chosen, self._options.chosen)
            received = coded.new_empty(ranks, coded.numel())
            shard_collectives.all_gather(received.view(-1), coded, rank_group, self._ledger, INDEX)
            if fake:
                return chosen
            return self._passes.union_of_offsets(received, ranks * self.blocks, self._options.chosen)
        received, gathered = torch.empty_like(chosen).view(ranks, -1), torch.empty_like(chosen)
        shard_collectives.all_to_all(received, chosen.view(ranks, -1), rank_group, self._ledger, INDEX)
        shard_collectives.all_gather(gathered, union_of_bitmaps(received), rank_group, self._ledger, INDEX)
        return chosen if fake else gathered

    def _exchange_packed(self, index: Tensor, result: Tensor) -> None:
        """Send the values at the index, uint8 (S, bytes), and write the sum of this rank's row to `result`."""
        ranks, sends = self._rank_group.size, index.masked_fill(self._nonfinite[:, None], 0)
        packed = self.residual.new_empty(ranks * self.blocks, self._capacity)
        self._passes.pack(self.residual.view(-1), index.view(-1), sends.view(-1), self._capacity, packed)
        packed.view(ranks, -1)[:, 0].masked_fill_(self._nonfinite, torch.nan)  # Mark the row by its first value.
        received = torch.empty_like(packed)
        shard_collectives.all_to_all(
            received.view(ranks, -1), packed.view(ranks, -1), self._rank_group, self._ledger, GRADIENTS
        )
        self._passes.expand(received.view(ranks, self.blocks, -1), index[self._rank_group.group_rank], result)

    def _reduce_scatter(self, rows: Tensor, result: Tensor) -> None:
        """Write this rank's row of the sum over ranks of `rows` (S, n), in rank order, into `result` (n,)."""
        n = rows.shape[1]
        padding = padded_bytes(4 * n) // 4 - n
        rows = pad(rows, (0, padding)) if padding else rows
        received = torch.empty_like(rows)
        shard_collectives.all_to_all(received, rows, self._rank_group, self._ledger, GRADIENTS)
        add_rows(received[:, :n], result)

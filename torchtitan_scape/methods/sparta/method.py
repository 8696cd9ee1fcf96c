"""SPARTA: local updates, and in every step an average of a part of the parameters.

Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (2025),
https://openreview.net/forum?id=stFPf3gzq1. The paper draws the part at random and sends it in FP32. This implementation
cycles through fixed parts, so that the interval between two averages of an entry is bounded, and sends one bit per
entry; the quantization error stays in the parameters of the replica (error feedback).
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import StoredTensors, stored
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.common.launching import AddressTable
from torchtitan_scape.kernels.exchange.layout import FIRST, LISTS, OWNER_ERROR, SECOND, STEP, BlockSlice
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.chunked import fill_last_block
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.sparta.options import (
    BLOCK,
    SpartaOptions,
    count_blocks,
    slices_of_group,
)
from torchtitan_scape.methods.sparta.round_steps import RoundSteps
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.topology.chunks import Exchange, double_buffered
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.partition import Slice, chunks_of


class _GroupChunk(NamedTuple):
    """One chunk of a block group.

    Attributes:
        group: The block group.
        entries: Entries, without padding at the end.
        slices: The blocks of each shard.
        exchange: Kernels that need no buffer; None where they do not run.
    """

    group: int
    entries: int
    slices: list[BlockSlice]
    exchange: Any


class Sparta(LocalMethod):
    """Average of the block groups of a step (theta_i: the parameters of replica i, N: the number of replicas).

    After the optimizer's update, for the entries of these groups:

    1. Each replica encodes D_i = anchor - theta_i with a quantization error E_i. The owner of a slice encodes the mean
       of the received messages for all replicas: D is the decoded mean, F its quantization error.
    2. anchor -= D; theta_i = anchor - E_i. The owner also keeps F, weighted by N.

    The blocks of all shards are numbered consecutively, and block i belongs to group i modulo `interval`. A step
    averages the next group; a step of the warm-up averages several, the first one all. The order of the groups never
    changes, so that no entry waits for more than one round. A skipped step changes nothing, and its groups wait for
    the next round.

    With few replicas, unless the code is "1bit_unbiased", the owner subtracts N F from its parameters. The pending
    update of an entry is then anchor - theta_i, and the anchor is the only state. Otherwise N F would move the owner's
    parameters too far: F is then a separate state, which is added to the next mean before it is encoded. In a few
    trials the first rule gave the lower loss with 4 replicas, and the second with 8 and 16. If the replicas of a node
    are summed before they are encoded, E_i belongs to the sum, is stored on one rank, and is part of this state.

    With Muon, the sum of the steps of a round is orthogonalized again, see `RoundSteps`.

    A group is divided into the same chunks in every step, including the warm-up, so that the owners never change.
    """

    def __init__(self, context: MethodContext, options: SpartaOptions) -> None:
        super().__init__(context, options)
        self._anchors = {s.name: stored(s.parameter).detach().to(torch.float32, copy=True) for s in context.shards}
        self._codec: BlockCode | None = None
        self._owner_error: dict[str, Tensor] = {}
        passes: Any = None  # kernels for an encoded exchange on one level
        if options.code != "float32" and self.collectives.replicas > 1:
            backend = choose_backend(context.kernels, context.shards[0].device)
            self._codec = block_code(backend, options.encoding(self.collectives.replicas), BLOCK)
            if len(self.collectives.levels) == 1:
                passes = exchange_passes(backend, (stored(s.parameter).dtype for s in context.shards))
            if options.keeps_owner_error(self.collectives.replicas):
                self._owner_error = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        self._round: RoundSteps | None = None
        if options.orthogonalizes(self.collectives.replicas) and isinstance(context.optimizer, Muon):
            self._round = RoundSteps(context.optimizer, context.shards, self._anchors)
        warmup = options.warmup_steps if options.warmup_steps >= 0 else context.part_of_run(20, "warmup_steps")
        # Number of groups in each step of the warm-up, and the first group of each step.
        self._group_counts = [round(options.interval ** (1 - done / warmup)) for done in range(warmup)]
        self._first_groups = list(accumulate(self._group_counts, initial=1))
        # Blocks have the numbers that they have without a pipeline.
        blocks, stage = self.collectives.gather_from_stages(count_blocks([s.size for s in context.shards]))
        self._first_block = sum(blocks[:stage])
        self._chunks = [self._build_chunks(group, passes) for group in range(options.interval)]
        self._stored_tensors = StoredTensors(context.shards)
        steps = self._round.steps if self._round else {}
        kinds = {FIRST: self._anchors, OWNER_ERROR: self._owner_error, STEP: steps}
        # The lists of `kernels.exchange.layout`, with one entry per shard.
        self._lists = {kind: [each.get(s.name) for s in context.shards] for kind, each in kinds.items() if each}
        self._tensors = AddressTable(LISTS, len(context.shards), context.shards[0].device)
        for kind, tensors in self._lists.items():
            self._tensors.set(kind, tensors)
        # Groups of which another layout may have had other owners, after a load, and those of the last step.
        self._loaded_groups: set[int] = set()
        self._sent_groups: set[int] = set()

    def _build_chunks(self, group: int, passes: Any) -> list[_GroupChunk]:
        """Return the chunks of a block group."""
        sizes, interval, built = [shard.size for shard in self.context.shards], self.options.interval, []
        parts = slices_of_group(sizes, interval, group, self._first_block)
        limit = self.collectives.chunk_limit(sum(sizes), self._codec)
        for chunk in chunks_of([part.entries for part in parts], limit, BLOCK):
            slices = []
            for s in chunk.slices:
                first = parts[s.tensor].first + s.first // BLOCK * interval
                slices.append(
                    BlockSlice(parts[s.tensor].shard, first * BLOCK, s.length, interval * BLOCK, s.at // BLOCK)
                )
            exchange = None
            if passes is not None:
                size, ranks = self.collectives.padded_size(chunk.entries, self._codec), self.collectives
                device = self.context.shards[0].device
                exchange = passes.BlockExchange(slices, self._codec, size, ranks.replicas, ranks.replica, True, device)
            built.append(_GroupChunk(group, chunk.entries, slices, exchange))
        return built

    def block_groups(self, number: int) -> range:
        """Return the groups of a step, as numbers that increase from round to round, to be taken modulo `interval`."""
        warmup, done = len(self._group_counts), number - 1
        first = self._first_groups[min(done, warmup)] + max(0, done - warmup)
        return range(first, first + (self._group_counts[done] if done < warmup else 1))

    def exchange(self, info: StepInfo) -> None:
        """Exchange the chunks with two buffers: one is filled while the other is in flight."""
        flush = self.take_full_exchange_request()
        self._lists[SECOND] = self._stored_tensors()
        self._tensors.set(SECOND, self._lists[SECOND])
        groups = range(self.options.interval) if flush else self.block_groups(info.number)
        chunks = [chunk for group in groups for chunk in self._chunks[group % self.options.interval]]
        send = partial(self._send, codec=None if flush else self._codec, applied=info.applied)
        double_buffered(map(send, chunks))
        self._sent_groups = {chunk.group for chunk in chunks}
        if self._round is not None:
            self._round.count_step(info.applied)
            if flush:  # it contains steps of earlier rounds, whose learning rates are not known
                self._round.reset(info.applied)
            elif self._ends_round(groups):
                self._round.finish_round(info.applied)

    def finish_previous_step(self, applied: bool) -> None:
        if applied:
            self._loaded_groups -= self._sent_groups
        self._sent_groups = set()

    def _ends_round(self, groups: range) -> bool:
        """Return whether the groups contain the last one of a round, whose number is a multiple of `interval`."""
        interval = self.options.interval
        return (groups.stop - 1) // interval > (groups.start - 1) // interval

    def states(self) -> list[State]:
        owner_error = (
            [State("owner_error", self._owner_error, per_replica=True, on_migration="displacement")]
            if self._owner_error
            else []
        )
        round_states = self._round.states() if self._round else []
        return [State("anchor", self._anchors, per_replica=False, on_migration="model"), *owner_error, *round_states]

    def prepare_to_load(self) -> None:
        super().prepare_to_load()
        for error in self._owner_error.values():
            error.zero_()
        self._loaded_groups, self._sent_groups = set(range(self.options.interval)), set()
        if self._round is not None:
            self._round.reset(torch.ones((), dtype=torch.bool, device=self.context.grad_norm.device))

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _send(self, chunk: _GroupChunk, codec: Codec | None, applied: Tensor) -> Exchange:
        """Start the exchange of a chunk. The returned function updates anchor and parameters with the result."""
        if codec is not None and chunk.exchange is not None:
            return self._send_in_place(chunk, applied)
        size, replicas = self.collectives.padded_size(chunk.entries, codec), self.collectives.replicas
        gather, store = partial(_gather, chunk.slices, size), partial(_store, chunk.slices)
        anchors, thetas, owner_errors = self._lists[FIRST], self._lists[SECOND], self._lists.get(OWNER_ERROR)
        values = gather(anchors).sub_(gather(thetas))
        quantization_error = torch.zeros_like(values) if codec else None
        # With several levels the error is that of a node's sum, and is returned on one rank of the node.
        node_error = quantization_error if owner_errors and len(self.collectives.levels) > 1 else None
        carried_error = None
        if owner_errors:
            owner_error = gather(owner_errors)
            if codec is not None:
                owned = owner_error.view(replicas, -1)[self.collectives.replica]
                previous = owned.clone()
                carried_error = previous / previous.new_full((), replicas)  # as kernels divide
                owned.zero_()
            values += owner_error  # errors of a node's sum, and of entries that were owned in another layout
        handle = self.collectives.all_reduce(values, codec=codec, error=quantization_error, carried_error=carried_error)

        def finish() -> None:
            anchor, theta = gather(anchors), gather(thetas)
            shared = anchor - values
            if steps := self._lists.get(STEP):
                step = gather(steps)
                masked_copy_(step, step + values, applied)
                store(step, steps)
            masked_copy_(anchor, shared, applied)
            masked_copy_(
                theta, shared if quantization_error is node_error else shared.sub_(quantization_error), applied
            )
            store(anchor, anchors)
            store(theta, thetas)
            if owner_errors:
                masked_copy_(owner_error, 0.0 if node_error is None else node_error, applied)
                if carried_error is not None:
                    masked_copy_(previous, carried_error.mul_(replicas), applied)
                    owned.add_(previous)
                store(owner_error, owner_errors)

        return handle, finish

    def _send_in_place(self, chunk: _GroupChunk, applied: Tensor) -> Exchange:
        """Exchange a chunk as `_send`, bitwise, with kernels that encode and update the tensors without a buffer."""
        exchange, elsewhere = chunk.exchange, chunk.group in self._loaded_groups
        sent = exchange.encode(self._tensors, subtracts=True, errors_elsewhere=elsewhere)
        handle = self.collectives.all_reduce_messages(
            sent.messages, sent.means, exchange.count, exchange.code, sent.error, sent.adds_error
        )
        return handle, partial(exchange.apply, self._tensors, sent, applied, subtracts=True)


def _gather(slices: Sequence[BlockSlice], size: int, tensors: Sequence[Tensor | None]) -> Tensor:
    """Copy slices of tensors into one buffer, FP32 (size,), with zeros after the last block and for absent tensors.

    The entries of a shorter block are repeated in it. Zeros would change the means that the one-bit and two-bit codes
    send.
    """
    present = next(tensor for tensor in tensors if tensor is not None)
    buffer = torch.zeros(size, dtype=torch.float32, device=present.device)
    pairs = _pairs_of_views(slices, buffer, tensors)
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
    for s in slices:
        fill_last_block(buffer, Slice(s.tensor, 0, s.length, s.start * BLOCK), BLOCK)
    return buffer


def _store(slices: Sequence[BlockSlice], buffer: Tensor, tensors: Sequence[Tensor | None]) -> None:
    """Copy a buffer of `_gather` back to the tensors."""
    pairs = _pairs_of_views(slices, buffer, tensors)
    if pairs:
        parts, targets = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(targets, parts)


def _pairs_of_views(
    slices: Sequence[BlockSlice], buffer: Tensor, tensors: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Return views of the buffer and of the tensors: of full blocks, (blocks, BLOCK), and of a shorter last one."""
    pairs = []
    for s in slices:
        if (tensor := tensors[s.tensor]) is not None:
            rows, rest = divmod(s.length, BLOCK)
            begin, end = s.start * BLOCK, s.first + rows * s.stride
            if rows:
                strides, offset = (s.stride, 1), tensor.storage_offset() + s.first
                full = buffer[begin : begin + rows * BLOCK].view(rows, BLOCK)
                pairs.append((full, tensor.as_strided((rows, BLOCK), strides, offset)))
            if rest:
                begin += rows * BLOCK
                pairs.append((buffer[begin : begin + rest], tensor.view(-1)[end : end + rest]))
    return pairs

"""SPARTA: local updates, and in every step an average of a part of the parameters.

Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (2025),
https://openreview.net/forum?id=stFPf3gzq1. The paper draws the part at random and sends it in FP32. This implementation
cycles through fixed parts, so that the interval between two averages of an entry is bounded, and sends one bit per
entry; the quantization error stays in the parameters of the replica (error feedback).
"""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_scape.core.parameters import StoredTensors, stored
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.kernels.backends import block_code, choose_backend, exchange_passes
from torchtitan_scape.kernels.codec.codes import BlockCode
from torchtitan_scape.kernels.exchange.layout import BlockSlices
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.sparta.options import (
    BLOCK,
    GroupSlice,
    SpartaOptions,
    count_blocks,
    slices_of_group,
)
from torchtitan_scape.methods.sparta.round_steps import RoundSteps
from torchtitan_scape.optimizers.muon import Muon
from torchtitan_scape.topology.chunks import Exchange, double_buffered
from torchtitan_scape.topology.codecs import Codec
from torchtitan_scape.topology.partition import Chunk, Slice, chunks_of


class _GroupChunk(NamedTuple):
    """One chunk of a block group, as views of its tensors in order: (blocks, BLOCK), or (n,) for a shorter block.

    Attributes:
        thetas: views of the parameters.
        owner_error: views of the owner's error; empty if it is not a separate state.
        matrices: positions of the views that belong to Muon's matrices.
        round_steps: views of the round's steps of these.
        slices: all views, for the kernels that need no buffer; None where they do not run.
    """

    entries: int
    anchors: list[Tensor]
    thetas: list[Tensor]
    owner_error: list[Tensor]
    matrices: list[int]
    round_steps: list[Tensor]
    slices: BlockSlices | None


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
        self._passes: Any = None  # kernels for an encoded exchange on one level
        self._owner_error: dict[str, Tensor] = {}
        # None after a load: another layout may have had other owners.
        self._errors_elsewhere: bool | None = False
        if options.code != "float32" and self.collectives.replicas > 1:
            backend = choose_backend(context.kernels, context.shards[0].device)
            self._codec = block_code(backend, options.encoding(self.collectives.replicas), BLOCK)
            if len(self.collectives.levels) == 1:
                self._passes = exchange_passes(backend, (stored(s.parameter).dtype for s in context.shards))
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
        self._stored_tensors = StoredTensors(context.shards)
        self._thetas = self._stored_tensors()
        self._chunks: dict[int, list[_GroupChunk]] = {}  # by group; made once, as this takes milliseconds

    def block_groups(self, number: int) -> range:
        """Return the groups of a step, as numbers that increase from round to round, to be taken modulo `interval`."""
        warmup, done = len(self._group_counts), number - 1
        first = self._first_groups[min(done, warmup)] + max(0, done - warmup)
        return range(first, first + (self._group_counts[done] if done < warmup else 1))

    def exchange(self, info: StepInfo) -> None:
        """Exchange the chunks with two buffers: one is filled while the other is in flight."""
        flush = self.take_full_exchange_request()
        if (thetas := self._stored_tensors()) is not self._thetas:  # the chunks contain views of replaced storage
            self._thetas = thetas
            self._chunks.clear()
        groups = range(self.options.interval) if flush else self.block_groups(info.number)
        codec = None if flush else self._codec
        double_buffered(self._send(chunk, codec, info.applied) for group in groups for chunk in self._chunks_of(group))
        if self._round is not None:
            self._round.count_step(info.applied)
            if flush:  # it contains steps of earlier rounds, whose learning rates are not known
                self._round.reset(info.applied)
            elif self._ends_round(groups):
                self._round.finish_round(info.applied)

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
        self._errors_elsewhere = None
        self._chunks.clear()
        if self._round is not None:
            self._round.reset(torch.ones((), dtype=torch.bool, device=self.context.grad_norm.device))

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _chunks_of(self, number: int) -> list[_GroupChunk]:
        group = number % self.options.interval
        if group not in self._chunks:
            self._chunks[group] = self._build_chunks(group)
        return self._chunks[group]

    def _build_chunks(self, group: int) -> list[_GroupChunk]:
        slices, chunks = self._divide(group)
        built = []
        for chunk in chunks:
            views = [view for s in chunk.slices for view in self._views(slices[s.tensor], s)]
            anchors, thetas, *owner_error = (list(each) for each in zip(*views, strict=True))
            steps = [view for s in chunk.slices for view in self._round_views(slices[s.tensor], s)]
            matrices = [i for i, view in enumerate(steps) if view is not None]
            round_steps = [view for view in steps if view is not None]
            errors = owner_error[0] if owner_error else []
            blocks = self._block_slices(chunk.entries, anchors, thetas, errors, steps) if self._passes else None
            built.append(_GroupChunk(chunk.entries, anchors, thetas, errors, matrices, round_steps, blocks))
        return built

    def _block_slices(
        self,
        entries: int,
        anchors: list[Tensor],
        thetas: list[Tensor],
        owner_error: list[Tensor],
        steps: list[Tensor | None],
    ) -> BlockSlices:
        assert self._codec is not None
        size, replicas = self.collectives.padded_size(entries, self._codec), self.collectives.replicas
        ranks, elsewhere = (replicas, self.collectives.replica), self._errors_elsewhere
        tensors = anchors, thetas, self._codec, size, *ranks, owner_error, steps
        return BlockSlices(*tensors, repeats=True, errors_elsewhere=elsewhere, fixed=True)

    def _divide(self, group: int) -> tuple[list[GroupSlice], list[Chunk]]:
        """Return the slices of a block group and its chunks; `tensor` in a chunk is the number of a slice."""
        sizes = [shard.size for shard in self.context.shards]
        slices = slices_of_group(sizes, self.options.interval, group, self._first_block)
        limit = self.collectives.chunk_limit(sum(sizes), self._codec)
        return slices, chunks_of([one.entries for one in slices], limit, BLOCK)

    def _views(self, group_slice: GroupSlice, s: Slice) -> Iterator[list[Tensor]]:
        """Yield a chunk's views of (anchor, parameter, owner's error): full blocks, then a shorter last one."""
        shard = self.context.shards[group_slice.shard]
        tensors = [self._anchors[shard.name], self._thetas[group_slice.shard]]
        return self._views_of(
            [*tensors, *([self._owner_error[shard.name]] if self._owner_error else ())], group_slice, s
        )

    def _round_views(self, group_slice: GroupSlice, s: Slice) -> Iterator[Tensor | None]:
        """Yield the corresponding views of the round's steps, None for parameters without any."""
        shard = self.context.shards[group_slice.shard]
        step = self._round.steps.get(shard.name) if self._round else None
        views = self._views_of([self._anchors[shard.name] if step is None else step], group_slice, s)
        return (None if step is None else view for (view,) in views)

    def _views_of(self, tensors: list[Tensor], group_slice: GroupSlice, s: Slice) -> Iterator[list[Tensor]]:
        flats, size = [each.view(-1) for each in tensors], tensors[0].numel()
        end, begin, rows = size // BLOCK * BLOCK, s.first // BLOCK, s.length // BLOCK
        if rows:
            blocks = (flat[:end].view(-1, BLOCK)[group_slice.first :: self.options.interval] for flat in flats)
            yield [each[begin : begin + rows] for each in blocks]
        if s.length % BLOCK:
            yield [flat[end:] for flat in flats]

    def _send(self, chunk: _GroupChunk, codec: Codec | None, applied: Tensor) -> Exchange:
        """Start the exchange of a chunk. The returned function updates anchor and parameters with the result."""
        if codec is not None and chunk.slices is not None:
            return self._send_in_place(chunk.slices, applied)
        size, replicas = self.collectives.padded_size(chunk.entries, codec), self.collectives.replicas
        values = _gather(chunk.anchors, size).sub_(_gather(chunk.thetas, size))
        quantization_error = torch.zeros_like(values) if codec else None
        # With several levels the error is that of a node's sum, and is returned on one rank of the node.
        node_error = quantization_error if chunk.owner_error and len(self.collectives.levels) > 1 else None
        carried_error = None
        if chunk.owner_error:
            owner_error = _gather(chunk.owner_error, size)
            if codec is not None:
                owned = owner_error.view(replicas, -1)[self.collectives.replica]
                previous = owned.clone()
                carried_error = previous / previous.new_full((), replicas)  # as kernels divide
                owned.zero_()
            values += owner_error  # errors of a node's sum, and of entries that were owned in another layout
        handle = self.collectives.all_reduce(values, codec=codec, error=quantization_error, carried_error=carried_error)

        def finish() -> None:
            anchor, theta = _gather(chunk.anchors, size), _gather(chunk.thetas, size)
            shared = anchor - values
            if chunk.round_steps:
                change = torch.zeros_like(values)
                masked_copy_(change, values, applied)
                views = _block_views(change, chunk.anchors)
                torch._foreach_add_(chunk.round_steps, [views[i] for i in chunk.matrices])
            masked_copy_(anchor, shared, applied)
            masked_copy_(
                theta, shared if quantization_error is node_error else shared.sub_(quantization_error), applied
            )
            torch._foreach_copy_(chunk.anchors, _block_views(anchor, chunk.anchors))
            torch._foreach_copy_(chunk.thetas, _block_views(theta, chunk.thetas))
            if chunk.owner_error:
                masked_copy_(owner_error, 0.0 if node_error is None else node_error, applied)
                if carried_error is not None:
                    masked_copy_(previous, carried_error.mul_(replicas), applied)
                    owned.add_(previous)
                torch._foreach_copy_(chunk.owner_error, _block_views(owner_error, chunk.owner_error))

        return handle, finish

    def _send_in_place(self, slices: BlockSlices, applied: Tensor) -> Exchange:
        """Exchange a chunk as `_send`, bitwise, with kernels that encode and update the tensors without a buffer."""
        sent = self._passes.encode(slices, subtracts=True)
        handle = self.collectives.all_reduce_messages(
            sent.messages, sent.means, slices.count, slices.code, sent.error, adds_error=bool(slices.owner_error)
        )
        return handle, partial(self._passes.apply, slices, sent, applied, subtracts=True)


def _gather(tensors: list[Tensor], size: int) -> Tensor:
    """Copy tensors into one buffer, FP32 (size,), each from the start of a block, with zeros after the last block.

    A tensor that is shorter than its block is repeated in it. Zeros would change the means that the one-bit and two-bit
    codes send.
    """
    buffer = tensors[0].new_zeros(size)
    full = [t if t.ndim == 2 else t.repeat(-(-BLOCK // t.numel()))[:BLOCK] for t in tensors]
    torch._foreach_copy_(_block_views(buffer, full), full)
    return buffer


def _block_views(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the views of a buffer of `_gather` that correspond to `tensors`."""
    rows = [-(-t.numel() // BLOCK) for t in tensors]
    blocks = buffer[: sum(rows) * BLOCK].view(-1, BLOCK).split(rows)
    return [b if t.ndim == 2 else b[0, : t.numel()] for b, t in zip(blocks, tensors, strict=True)]

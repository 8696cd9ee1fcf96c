"""SPARTA: replicas train alone, and in every step a part of their parameters is averaged.

Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (2025),
https://openreview.net/forum?id=stFPf3gzq1. There the part is drawn at random and travels in FP32; here parts take
turns, so that none is left for long, and travel in one bit, whose errors stay with their replica.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import block_code, choose_backend
from topology.chunks import Exchange, double_buffered
from topology.codecs import Codec
from topology.partition import Chunk, Slice, chunks_of
from torchtitan_scape.core.parameters import stored
from torchtitan_scape.core.tensors import masked_copy_
from torchtitan_scape.methods.base import LocalMethod
from torchtitan_scape.methods.interface import MethodContext, State, StepInfo
from torchtitan_scape.methods.sparta.options import (
    BLOCK,
    OWNER_ERROR_ABOVE,
    GroupSlice,
    SpartaOptions,
    slices_of_group,
)


class _GroupChunk(NamedTuple):
    """What is one chunk. anchors, thetas, owed: views, one behind the other: (blocks, BLOCK), or (n,) of a shorter
    block. owed: none where nothing is kept apart."""

    entries: int
    anchors: list[Tensor]
    thetas: list[Tensor]
    owner_error: list[Tensor]


class Sparta(LocalMethod):
    """After the update of a step, for the entries whose turn it is (theta: this replica's parameters):

    1. D_i = anchor - theta_i travels in the code, which loses E_i of it. The owner of a part codes the mean of what
       arrives for all: D is what that tells, F what it loses.
    2. anchor -= D; theta_i = anchor - E_i, and at the owner F, which counts N times, is kept as well.

    Blocks of all shards are numbered one behind the other, and dealt to `interval` lanes in turn. A step averages the
    next lane; in the warm-up the next few, and all in its first step. So lanes always go round, and none waits for
    longer than a round. At a skipped step the exchange changes nothing, and what had its turn waits for the next one.

    F: among few replicas the owner subtracts N F from its parameters. So what is pending of an entry is always anchor -
    theta_i, nothing is kept besides the anchor, and the mean of all theta is where the replicas have come to. With
    more replicas N F would take the owner too far off: it owes it, beside its parameters, and F is added to the next
    mean before that is coded. In a few runs by hand four replicas ended lower with the first, eight and sixteen with
    the second. Where a node's replicas are summed before they are coded, their E_i, which are one rank's, are owed too.

    A lane is cut into the same chunks in every step, in the warm-up as well, so that owners never change.
    """

    def __init__(self, context: MethodContext, options: SpartaOptions) -> None:
        super().__init__(context, options)
        self._anchors = {s.name: stored(s.parameter).detach().to(torch.float32, copy=True) for s in context.shards}
        self._codec: Codec | None = None
        self._owner_error: dict[str, Tensor] = {}
        if options.code != "float32" and self.collectives.replicas > 1:
            self._codec = block_code(choose_backend(context.kernels, context.shards[0].device), options.code, BLOCK)
            if self.collectives.replicas > OWNER_ERROR_ABOVE:
                self._owner_error = {name: torch.zeros_like(anchor) for name, anchor in self._anchors.items()}
        warmup = options.warmup_steps if options.warmup_steps >= 0 else context.total_steps // 20
        # Of steps 1, 2 and so on.
        self._lanes = [round(options.interval ** (1 - done / warmup)) for done in range(warmup)]
        self._lanes_before = list(accumulate(self._lanes, initial=1))
        self._turns: dict[int, list[_GroupChunk]] = {}  # by lane

    def block_groups(self, number: int) -> range:
        """Those of a step, counted on from round to round: modulo `interval` they are lanes."""
        warmup, done = len(self._lanes), number - 1
        first = self._lanes_before[min(done, warmup)] + max(0, done - warmup)
        return range(first, first + (self._lanes[done] if done < warmup else 1))

    def exchange(self, step: StepInfo) -> None:
        """Through the buffers of two chunks: while one is on its way the next is filled."""
        flush = self.take_full_exchange_request()
        block_groups = range(self.options.interval) if flush else self.block_groups(step.number)
        codec = None if flush else self._codec
        double_buffered(self._send(piece, codec, step.applied) for lane in block_groups for piece in self._turn(lane))

    def states(self) -> list[State]:
        owner_error = (
            [State("owed", self._owner_error, per_replica=True, on_migration="displacement")]
            if self._owner_error
            else []
        )
        return [State("anchor", self._anchors, per_replica=False, on_migration="model"), *owner_error]

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _turn(self, number: int) -> list[_GroupChunk]:
        """Of a lane the views are kept: cutting a model of hundreds of tensors takes milliseconds of every step."""
        lane = number % self.options.interval
        if lane not in self._turns:
            self._turns[lane] = self._pieces(lane)
        return self._turns[lane]

    def _pieces(self, lane: int) -> list[_GroupChunk]:
        parts, chunks = self._cut(lane)
        pieces = []
        for chunk in chunks:
            views = [each for s in chunk.slices for each in self._views(parts[s.tensor], s)]
            anchors, thetas, *owner_error = (list(each) for each in zip(*views, strict=True))
            pieces.append(_GroupChunk(chunk.entries, anchors, thetas, *owner_error or [[]]))
        return pieces

    def _cut(self, lane: int) -> tuple[list[GroupSlice], list[Chunk]]:
        """Return the slices of a block group and its chunks; `tensor` in a chunk is the number of a slice."""
        parts = slices_of_group([shard.size for shard in self.context.shards], self.options.interval, lane)
        return parts, chunks_of([part.entries for part in parts], self.collectives.chunk_entries, BLOCK)

    def _views(self, part: GroupSlice, s: Slice) -> Iterator[list[Tensor]]:
        """Of anchor, parameter and what is owed what a slice has: whole blocks, and a shorter last one."""
        shard = self.context.shards[part.shard]
        kept = [self._anchors[shard.name], stored(shard.parameter).detach()]
        flats = [each.view(-1) for each in (*kept, *([self._owner_error[shard.name]] if self._owner_error else ()))]
        end, begin, rows = shard.size // BLOCK * BLOCK, s.first // BLOCK, s.length // BLOCK
        if rows:
            blocks = (flat[:end].view(-1, BLOCK)[part.first :: self.options.interval] for flat in flats)
            yield [each[begin : begin + rows] for each in blocks]
        if s.length % BLOCK:
            yield [flat[end:] for flat in flats]

    def _send(self, piece: _GroupChunk, codec: Codec | None, applied: Tensor) -> Exchange:
        """Starts the exchange of a chunk. What takes its result moves anchor and parameters."""
        size, replicas = self.collectives.padded_size(piece.entries, codec), self.collectives.replicas
        values = _gathered(piece.anchors, size).sub_(_gathered(piece.thetas, size))
        quantization_error = torch.zeros_like(values) if codec else None
        # It is that of a node's sum, and one rank has it.
        node_error = quantization_error if piece.owner_error and len(self.collectives.levels) > 1 else None
        carried_error = None
        if piece.owner_error:
            owner_error = _gathered(piece.owner_error, size)
            if codec is not None:
                own = owner_error.view(replicas, -1)[self.collectives.replica]
                before = own.clone()
                carried_error = before / replicas
                own.zero_()
            values += owner_error  # of a node's sum, and of what it owned in a run with another layout
        handle = self.collectives.all_reduce(values, codec=codec, error=quantization_error, carried_error=carried_error)

        def land() -> None:
            anchor, theta = _gathered(piece.anchors, size), _gathered(piece.thetas, size)
            agreed = anchor - values
            masked_copy_(anchor, agreed, applied)
            masked_copy_(
                theta, agreed if quantization_error is node_error else agreed.sub_(quantization_error), applied
            )
            torch._foreach_copy_(piece.anchors, _in_blocks(anchor, piece.anchors))
            torch._foreach_copy_(piece.thetas, _in_blocks(theta, piece.thetas))
            if piece.owner_error:
                masked_copy_(owner_error, 0.0 if node_error is None else node_error, applied)
                if carried_error is not None:
                    masked_copy_(before, carried_error.mul_(replicas), applied)
                    own.add_(before)
                torch._foreach_copy_(piece.owner_error, _in_blocks(owner_error, piece.owner_error))

        return handle, land


def _gathered(tensors: list[Tensor], size: int) -> Tensor:
    """FP32 (size,): the tensors, each from the beginning of a block on, and zeros behind the last block.

    What is shorter than its block is there again and again: zeros would have their share in the means by which codes of
    one and two bits tell it.
    """
    buffer = tensors[0].new_zeros(size)
    whole = [t if t.ndim == 2 else t.repeat(-(-BLOCK // t.numel()))[:BLOCK] for t in tensors]
    torch._foreach_copy_(_in_blocks(buffer, whole), whole)
    return buffer


def _in_blocks(buffer: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Views of what `_gathered` put there."""
    rows = [-(-t.numel() // BLOCK) for t in tensors]
    blocks = buffer[: sum(rows) * BLOCK].view(-1, BLOCK).split(rows)
    return [b if t.ndim == 2 else b[0, : t.numel()] for b, t in zip(blocks, tensors, strict=True)]

"""SPARTA: replicas train alone, and in every step a part of their parameters is averaged.

Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (2025),
https://openreview.net/forum?id=stFPf3gzq1. There the part is drawn at random and travels in FP32; here parts take
turns, so that none is left for long, and travel in two bits, whose errors stay with their replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kernels import block_code, choose
from topology.chunks import Exchange, in_two_buffers
from topology.codecs import Codec
from topology.partition import Chunk, Slice, chunks_of
from torchtitan_scape.planner.volumes import Method as PlannedMethod
from torchtitan_scape.sync.base import Message, Method, Setting, State, Step, keep
from torchtitan_scape.sync.options import MethodOptions
from torchtitan_scape.sync.shards import stored

BLOCK = 128  # entries that travel together; in a code they share its scales


@dataclass
class SpartaOptions(MethodOptions):
    """[sync.sparta]: read with method = "sparta"."""

    section: ClassVar[str] = "sync.sparta"

    interval: int = 6
    """Steps in which every parameter is averaged once: each step averages one block of 128 entries in so many"""

    code: Literal["float32", "int8", "int4", "e2m1", "2bit", "1bit"] = "2bit"
    """How what replicas have moved travels, both ways: as it is, or in blocks of 128. What the code loses of it remains
    in the replica's parameters, until their next turn"""

    warmup_steps: int = -1
    """Steps over which the interval grows from 1, as a power: replicas that drift apart while the model takes shape end
    worse; 0 for none, -1 for a twentieth of training.steps"""

    def __post_init__(self) -> None:
        super().__post_init__()
        told = "it must be 0 or more, or -1 for a twentieth of training.steps"
        self.require(self.warmup_steps >= -1, "warmup_steps", told)
        self.require(self.interval >= 1, "interval", "it must be 1 or more")

    def stages_one_ring(self) -> bool:
        return self.code != "float32"

    def planned(self, optimizer: str) -> PlannedMethod:
        return PlannedMethod(
            "sparta",
            wire=self.code,
            inner_steps=self.interval,
            outer_momentum=0.0,
            optimizer=optimizer.lower(),
        )


class _Turn(NamedTuple):
    """What goes together: of shard i the blocks `first[i]`, `first[i]` + interval and so on, of which the last may be
    shorter. chunks: of these parts, one behind the other."""

    interval: int
    first: list[int]
    chunks: list[Chunk]


class Sparta(Method):
    """After the update of a step, for the entries whose turn it is (theta: this replica's parameters):

    1. D_i = anchor - theta_i travels in the code, which loses E_i of it; D is the mean of what arrives;
    2. anchor -= D; theta_i = anchor - E_i.

    Blocks of all shards are numbered one behind the other; in step t it is the turn of those that are t modulo
    `interval`. What is pending of an entry is always anchor - theta_i, so that nothing is kept besides the anchor.
    At a skipped step the exchange changes nothing, and what had its turn waits for the next one.
    """

    local = True

    def __init__(self, setting: Setting, options: SpartaOptions) -> None:
        super().__init__(setting, options)
        self._anchors = {s.name: stored(s.parameter).detach().to(torch.float32, copy=True) for s in setting.shards}
        self._codec: Codec | None = None
        if options.code != "float32" and self.collectives.replicas > 1:
            self._codec = block_code(choose(setting.kernels, setting.shards[0].device), options.code, BLOCK)
        self._warmup = options.warmup_steps if options.warmup_steps >= 0 else setting.steps // 20

    def interval(self, number: int) -> int:
        """Of a step: 1 at first, `options.interval` once the warm-up is over."""
        last = self.options.interval
        return last if number >= self._warmup else round(last ** (number / self._warmup))

    def updated(self, step: Step) -> None:
        """Through the buffers of two chunks: while one is on its way the next is filled."""
        flush = self.takes_all()
        turn = self._turn(step.number, 1 if flush else self.interval(step.number))
        codec = None if flush else self._codec
        in_two_buffers(self._send(turn, chunk, codec, step.applied) for chunk in turn.chunks)

    def states(self) -> list[State]:
        return [State("anchor", self._anchors, own=False, carries="model")]

    def messages(self) -> list[Message]:
        """Of all turns."""
        interval = self.options.interval
        chunks = [chunk for number in range(interval) for chunk in self._turn(number, interval).chunks]
        sizes = [self.collectives.filled_up(chunk.entries, self._codec) for chunk in chunks]
        return [Message("all_reduce", size, self._codec, 1.0 / interval) for size in sizes]

    def density(self) -> float:
        return 1.0 / self.options.interval

    def _turn(self, number: int, interval: int) -> _Turn:
        begin, first, sizes = 0, list[int](), list[int]()
        for shard in self.setting.shards:
            blocks, at = -(-shard.size // BLOCK), (number - begin) % interval
            own = len(range(at, blocks, interval))
            ends_short = own > 0 and (blocks - 1 - at) % interval == 0
            first.append(at)
            sizes.append(own * BLOCK - (blocks * BLOCK - shard.size if ends_short else 0))
            begin += blocks
        return _Turn(interval, first, chunks_of(sizes, self.collectives.chunk_entries, BLOCK))

    def _send(self, turn: _Turn, chunk: Chunk, codec: Codec | None, applied: Tensor) -> Exchange:
        """Starts the exchange of a chunk. What takes its result moves anchor and parameters."""
        device = self.setting.shards[0].device
        values = torch.zeros(self.collectives.filled_up(chunk.entries, codec), dtype=torch.float32, device=device)
        lost = torch.zeros_like(values)
        places = [place for s in chunk.slices for place in self._places(turn, s)]
        for anchor, theta, at in places:
            torch.sub(anchor, theta, out=_at(values, at, anchor))
        handle = self.collectives.all_reduce(values, codec=codec, error=lost if codec else None)

        def land() -> None:
            for anchor, theta, at in places:
                agreed = anchor - _at(values, at, anchor)
                keep(anchor, agreed, applied)
                keep(theta, agreed.sub_(_at(lost, at, anchor)), applied)

        return handle, land

    def _places(self, turn: _Turn, s: Slice) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Views of anchor and parameter of what a slice has, whole blocks and a shorter last one, and where in the
        chunk that is."""
        shard = self.setting.shards[s.tensor]
        anchor, theta = self._anchors[shard.name].view(-1), stored(shard.parameter).view(-1)
        end, begin, rows = shard.size // BLOCK * BLOCK, s.first // BLOCK, s.length // BLOCK
        if rows:
            blocks = (flat[:end].view(-1, BLOCK)[turn.first[s.tensor] :: turn.interval] for flat in (anchor, theta))
            own, other = (each[begin : begin + rows] for each in blocks)
            yield own, other, s.at
        if s.length % BLOCK:
            yield anchor[end:], theta[end:], s.at + rows * BLOCK


def _at(chunk: Tensor, at: int, like: Tensor) -> Tensor:
    """What lies from there on, in the shape of `like`."""
    return chunk[at : at + like.numel()].view(like.shape)

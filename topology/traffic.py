"""Traffic of collectives: bytes, messages and seconds in closed form, and the ledger that counts them.

A method plans its collectives as data (`CollectiveCall`), and the planner prices them (alpha-beta model).
`topology.stages` executes them, and `topology.collectives` counts their bytes. Plain arithmetic: no torch.

All sizes are those of a ring of N ranks, in which a rank sends to its successor: (N-1)/N of the input of a
reduce-scatter, twice that for an all-reduce, and (N-1) times the input of an all-gather. Every known ring or tree
algorithm of optimal volume sends the same number of bytes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from torchtitan_scape.topology.layout import RankGroup, Tier, paired_share
from torchtitan_scape.topology.machines import Links
from torchtitan_scape.topology.partition import ALIGNED_BYTES, CHUNK_ENTRIES, chunk_limit, chunk_sizes

MAX_CHUNKS = 8
# Each further chunk costs one latency. Below this share of its transfer time the latency is within a link's noise.
MAX_LATENCY_SHARE = 0.05
REPLICATE, SHARD = "replicate", "shard"
Entry = tuple[str, str, str]  # (axis, link level, kind of message)


class LevelSize(NamedTuple):
    """Number of ranks that communicate on one level, and the name of that level."""

    level: str
    size: int


Levels = Sequence[LevelSize | RankGroup | Tier]  # innermost first

# Maps a number of entries to the bytes of their encoded message.
MessageBytes = Callable[[int], int]


@dataclass(frozen=True)
class Stage:
    """Part of a collective on one level.

    Attributes:
        level: Name of the link.
        rounds: Number of consecutive messages of one rank.
        sent: Bytes that one rank sends in them.
        input_bytes: Size of the tensor that one rank passes to the stage.
    """

    level: str
    rounds: float
    sent: float
    input_bytes: int = 0


def bytes_by_level(stages: Iterable[Stage]) -> dict[str, float]:
    """Return the bytes that one rank sends, by level."""
    sent: dict[str, float] = defaultdict(float)
    for stage in stages:
        sent[stage.level] += stage.sent
    return dict(sent)


def spanned(levels: Levels, flat: bool = False) -> list[LevelSize]:
    """Return the levels with more than one rank.

    flat: merge them into a single ring, whose speed and bytes are those of the outermost of them.
    """
    several = [LevelSize(one.level, one.size) for one in levels if one.size > 1]
    return [LevelSize(several[-1].level, math.prod(one.size for one in several))] if flat and several else several


def all_reduce_stages(n: int, levels: Levels, coded: MessageBytes | None = None) -> list[Stage]:
    """Return the stages of an all-reduce of n FP32 entries.

    They are a reduce-scatter on every inner level, an all-reduce on the outermost level, and an all-gather on every
    inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        coded: Message size of the codec of the outermost level. The encoded messages are also what the inner levels
            gather. None for FP32.
    """
    if not levels:
        return []
    *inner, outermost = levels
    stages = reduce_scatter_stages(n, inner)
    n //= math.prod(group.size for group in inner)
    others, size = outermost.size - 1, outermost.size
    # With a codec: an all-to-all of one message per rank, then an all-gather of this rank's reduced message.
    own = 4 * n if coded is None else size * coded(n // size)
    given = own if coded is None else own + own // size
    stages.append(Stage(outermost.level, 2 * others, 2 * (others / size) * own, given))
    return stages + all_gather_stages(own, inner)


def reduce_scatter_stages(n: int, levels: Levels, coded: MessageBytes | None = None) -> list[Stage]:
    """Return the stages of a reduce-scatter of n FP32 entries. Args as in `all_reduce_stages`."""
    stages = []
    for group in levels:
        given = 4 * n if coded is None or group is not levels[-1] else group.size * coded(n // group.size)
        stages.append(Stage(group.level, group.size - 1, (group.size - 1) / group.size * given, given))
        n //= group.size
    return stages


def pair_mean_stages(n: int, levels: Levels, messages: float) -> list[Stage]:
    """Return the stages of a mean of n FP32 entries over pairs of units of the outermost level.

    They are a reduce-scatter on every inner level, one message to the partner on the outermost level, and an
    all-gather on every inner level in reverse order.

    Args:
        n: Number of FP32 entries; a multiple of the product of the inner sizes.
        levels: Innermost first.
        messages: 1 for a rank with a partner, 0 for one that rests; a fraction for the mean over draws.
    """
    *inner, outermost = levels
    own = 4 * n // math.prod(group.size for group in inner)
    middle = Stage(outermost.level, messages, messages * own, own)
    return [*reduce_scatter_stages(n, inner), middle, *all_gather_stages(own, inner)]


def all_gather_stages(own: int, levels: Levels) -> list[Stage]:
    """Return the stages of an all-gather of `own` bytes per rank.

    The outermost level comes first, so that every input crosses it only once per group of the inner levels.
    """
    stages = []
    for group in reversed(levels):
        stages.append(Stage(group.level, group.size - 1, float((group.size - 1) * own), own))
        own *= group.size
    return stages


def scalar_stages(levels: Levels) -> list[Stage]:
    """Return the stages of an all-reduce of a few bytes, as a tree on each level."""
    return [Stage(one.level, 2 * math.ceil(math.log2(one.size)), 0.0) for one in spanned(levels)]


# ------------------------------------------------------------------------------------------ planned collectives


@dataclass(frozen=True)
class CollectiveCall:
    """One collective over the replicas.

    The method plans it, the planner prices it, and the contract test compares it with the byte ledger. A collective
    whose data travel in several chunks, of which one is in flight while the next is filled, is a single call; the
    latency of every chunk is priced.

    Attributes:
        kind: The collective.
        count: FP32 elements of a reduction, padding included; bytes per rank of an all-gather.
        message_bytes: Encoded size of n elements on the outermost level; None for FP32.
        share: Fraction of the steps that contain the call.
        hidden: The call overlaps with the next forward and backward pass.
        chunks: Number of chunks, each a collective of its own; 0 for one that the caller may divide.
        largest_chunk: FP32 elements of the largest chunk, padding included.
        active: Fraction of the replicas that receive a share of a reduction, or whose input an all-gather broadcasts; 1
            unless shares differ. Bytes are averaged over replicas.
    """

    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "pair_mean"]
    count: int
    message_bytes: Callable[[int], int] | None = None
    share: float = 1.0
    hidden: bool = False
    chunks: int = 0
    largest_chunk: int = 0
    active: float = 1.0

    def slowest_stages(self, levels: Levels) -> list[Stage]:
        """Return `stages` of the replicas that send or receive most, which determine the time.

        A replica that receives a share of a reduction receives it from all others. Broadcasts load all equally.
        """
        call = self if self.kind == "all_gather" else replace(self, active=1.0)
        return call.stages(levels)

    def stages(self, levels: Levels) -> list[Stage]:
        """Return the stages of the call on each level, averaged over steps and replicas.

        levels: Levels that the replicas span, innermost first. Levels of one rank send nothing.
        """
        levels = spanned(levels)
        if not self.count or not levels:
            return []
        match self.kind:
            case "all_reduce":
                stages = all_reduce_stages(self.count, levels, self.message_bytes)
            case "reduce_scatter":
                stages = reduce_scatter_stages(self.count, levels, self.message_bytes)
            case "all_gather":
                stages = all_gather_stages(self.count, levels)
            case "pair_mean":
                stages = pair_mean_stages(self.count, levels, paired_share(levels[-1].size))
        rounds, sent = self.share * max(1, self.chunks), self.share * self.active
        return [replace(stage, rounds=rounds * stage.rounds, sent=sent * stage.sent) for stage in stages]

    @property
    def input_bytes(self) -> int:
        """Bytes of the tensor that this rank passes to the collective; FP32 for a reduction."""
        return self.count if self.kind == "all_gather" else 4 * self.count


@dataclass(frozen=True)
class ChunkedMessages:
    """Encoded size of a share of a collective whose elements travel in several chunks.

    Chunks are padded separately, so that their messages are longer than one message of all elements.

    Attributes:
        message_bytes: Encoded size of n elements of one chunk.
        chunks: (elements of a chunk, number of such chunks).
    """

    message_bytes: Callable[[int], int]
    chunks: tuple[tuple[int, int], ...]

    def __call__(self, count: int) -> int:
        total = sum(size * times for size, times in self.chunks)
        return sum(times * self.message_bytes(size * count // total) for size, times in self.chunks)


def replicas_of(levels: Levels) -> int:
    """Return the number of replicas that the levels span."""
    return math.prod(one.size for one in levels)


def size_multiple(levels: Levels, block_size: int | None = None) -> int:
    """Return the number of which the size of an all-reduce must be a multiple.

    Every level can then divide the tensor, and every share of it begins at a multiple of 16 bytes.

    Args:
        levels: Levels that the replicas span, innermost first.
        block_size: Elements that the codec encodes together; None for FP32.
    """
    replicas, step = replicas_of(levels), ALIGNED_BYTES // 4 if block_size is None else block_size
    if replicas == 1:
        return 1
    return step if len(levels) < 2 and block_size is None else replicas * step


def padded_size(count: int, levels: Levels, block_size: int | None = None) -> int:
    """Return `count` rounded up to a multiple of `size_multiple`."""
    step = size_multiple(levels, block_size)
    return -(-count // step) * step


def all_reduce_chunked(entries: int, levels: Levels, chunk_entries: int = 0, share: float = 1.0) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.all_reduce_chunked` on FP32 entries."""
    limit = chunk_entries or chunk_limit(entries, replicas_of(levels))
    full, rest = divmod(entries, limit)
    size = full * padded_size(limit, levels) + padded_size(rest, levels)  # each chunk is padded
    largest = padded_size(min(entries, limit), levels)
    return CollectiveCall("all_reduce", size, share=share, chunks=-(-entries // limit), largest_chunk=largest)


def pair_mean_chunked(entries: int, levels: Levels, chunk_entries: int = 0, share: float = 1.0) -> CollectiveCall:
    """Return the call of `ReplicaCollectives.pair_mean_chunked` on FP32 entries."""
    return replace(all_reduce_chunked(entries, levels, chunk_entries or CHUNK_ENTRIES, share), kind="pair_mean")


def all_reduce_stream(
    sizes: Sequence[int],
    levels: Levels,
    chunk_entries: int = 0,
    block: int = 1,
    message_bytes: MessageBytes | None = None,
    share: float = 1.0,
    entries: int = 0,
    in_place: bool = False,
) -> CollectiveCall:
    """Return the all-reduce of tensors that are sent in the chunks of `topology.partition.chunks_of`.

    Args:
        sizes: Entries of the tensors.
        block: Each tensor starts at a multiple of this size, and no chunk divides a block.
        message_bytes: Encoded size of n elements of one chunk; None for FP32.
        entries: Entries that the size of the chunks depends on; 0 for those of the tensors.
        in_place: Entries are encoded without a buffer if there is one level.
    """
    one_level, replicas = in_place and len(levels) == 1, replicas_of(levels)
    limit = chunk_entries or chunk_limit(entries or sum(sizes), replicas, message_bytes, one_level)
    size = None if message_bytes is None else block
    chunks = Counter(padded_size(n, levels, size) for n in chunk_sizes(sizes, limit, block))
    count = sum(n * times for n, times in chunks.items())
    encoded = None if message_bytes is None else ChunkedMessages(message_bytes, tuple(chunks.items()))
    largest = max(chunks, default=0)
    return CollectiveCall("all_reduce", count, encoded, share, chunks=chunks.total(), largest_chunk=largest)


def scaled(calls: Sequence[CollectiveCall], share: float, hidden: bool = False) -> list[CollectiveCall]:
    """Return the calls of an exchange that runs in only a share of the steps."""
    return [replace(call, share=share * call.share, hidden=hidden) for call in calls]


def entries_in_flight(calls: Sequence[CollectiveCall]) -> int:
    """Return the entries of the two largest chunks that a step has in flight at once. Hidden calls do not count."""
    reductions = [call for call in calls if call.kind != "all_gather" and not call.hidden]
    chunks = [
        call.largest_chunk if call.chunks else call.count
        for call in reductions
        for _ in range(min(2, call.chunks or 1))
    ]
    return sum(sorted(chunks)[-2:])


# --------------------------------------------------------------------------------------------------- seconds


def stage_seconds(stages: Iterable[Stage], links: Links) -> tuple[float, float]:
    """Return (latency, transfer time) in seconds of consecutive stages."""
    latency = transfer = 0.0
    for stage in stages:
        latency += stage.rounds * links[stage.level].latency
        transfer += stage.sent / links[stage.level].bandwidth
    return latency, transfer


def pipeline_seconds(pack: float, transfer: float, latency: float, chunks: int) -> float:
    """Return the seconds to pack and exchange `chunks` equal chunks, each exchanged while the next one is packed.

    The result is pack + exchange / m if packing is slower, and pack / m + exchange + (m - 1) * latency if the link is.
    """
    packed, exchanged = pack / chunks, transfer / chunks + latency
    return packed + exchanged + (chunks - 1) * max(packed, exchanged)


def best_chunks(pack: float, transfer: float, latency: float) -> int:
    """Return the fastest number of chunks, from 1 to 8: close to sqrt(pack / latency) if the link is slower.

    The latency of a chunk never exceeds a twentieth of its transfer time.
    """
    allowed = [m for m in range(1, MAX_CHUNKS + 1) if m == 1 or latency <= MAX_LATENCY_SHARE * transfer / m]
    return min(allowed, key=lambda m: pipeline_seconds(pack, transfer, latency, m))


def best_chunk_bytes(
    nbytes: int,
    pack_seconds: float,
    levels: Levels,
    links: Links,
    message_bytes: MessageBytes | None = None,
) -> int:
    """Return the best chunk size of a payload in bytes of FP32, a multiple of 4.

    Args:
        nbytes: Size of the payload in FP32.
        pack_seconds: Seconds to pack the whole payload.
        levels: Levels of the exchange, innermost first.
        message_bytes: Encoded size of n elements on the outermost level; None for FP32.
    """
    latency, transfer = stage_seconds(all_reduce_stages(nbytes // 4, levels, message_bytes), links)
    chunks = best_chunks(pack_seconds, transfer, latency)
    return max(4, -(-nbytes // (4 * chunks)) * 4)


# ---------------------------------------------------------------------------------------------------- ledger


@dataclass
class TrafficLedger:
    """Bytes and calls since the start of the run, by (axis, link level, kind of message).

    The axis is "replicate" for communication between replicas and "shard" for communication between the ranks of one
    replica. Ring traffic is filed under the level of the link to the next rank, so that the sum over all ranks is the
    traffic on each kind of link. An all-to-all on the shard axis is filed under the link to each receiver.

    Attributes:
        calls: Number of collectives.
        input_bytes: Size of the tensors that were passed to collectives.
        sent: Bytes that this rank sends, as in `Stage`.
    """

    calls: dict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    input_bytes: dict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[Entry, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, axis: str, level: str, kind: str, input_bytes: int, sent: float) -> None:
        """Record one collective."""
        entry = axis, level, kind
        self.calls[entry] += 1
        self.input_bytes[entry] += input_bytes
        self.sent[entry] += sent

    def sent_by_level(self, axis: str | None = None) -> dict[str, float]:
        """Return the bytes that this rank sent, by link level. axis: count only this axis; None for both."""
        totals: dict[str, float] = defaultdict(float)
        for (of, level, _), sent in self.sent.items():
            if axis in (None, of):
                totals[level] += sent
        return dict(totals)

    def sent_by_level_and_kind(self, axis: str | None = None) -> dict[tuple[str, str], float]:
        """Return the bytes that this rank sent, by (link level, kind of message). axis: as in `sent_by_level`."""
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for (of, level, kind), sent in self.sent.items():
            if axis in (None, of):
                totals[level, kind] += sent
        return dict(totals)

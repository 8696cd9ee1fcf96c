"""The ledger of bytes: what this rank was asked to send, by axis, link level and kind of message."""

from collections import defaultdict
from dataclasses import dataclass, field

REPLICATE, SHARD = "replicate", "shard"
Entry = tuple[str, str, str]


@dataclass
class TrafficLedger:
    """Bytes and calls since the start, by (axis, link level, kind of message).

    axis: "replicate" for what replicas say to each other, "shard" for what the ranks of one replica do.
    input_bytes: size of the tensors that collectives were given.
    sent: what this rank puts on the wire: to its successor in the ring, 2 * (N-1)/N of the input bytes for an
        all-reduce and (N-1) times for an all-gather (every known ring and tree algorithm of that optimal volume sends
        as much). It is filed under the level of the link to that successor, so the sum over ranks is what crosses each
        kind of link. Where every rank has a part for every other, as on the shard axis, a part is filed under the link
        to whom it is for.
    """

    calls: dict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    input_bytes: dict[Entry, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[Entry, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, axis: str, level: str, kind: str, input_bytes: int, sent: float) -> None:
        entry = axis, level, kind
        self.calls[entry] += 1
        self.input_bytes[entry] += input_bytes
        self.sent[entry] += sent

    def sent_by_level(self, axis: str | None = None) -> dict[str, float]:
        """Bytes this rank put on the wire, by link level; of one axis, or of all."""
        totals: dict[str, float] = defaultdict(float)
        for (of, level, _), sent in self.sent.items():
            if axis in (None, of):
                totals[level] += sent
        return dict(totals)

    def sent_by_level_and_kind(self, axis: str | None = None) -> dict[tuple[str, str], float]:
        """The same by link level and kind."""
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for (of, level, kind), sent in self.sent.items():
            if axis in (None, of):
                totals[level, kind] += sent
        return dict(totals)

"""Ledger of the bytes that this rank sends, by axis, link level and kind of message."""

from collections import defaultdict
from dataclasses import dataclass, field

REPLICATE, SHARD = "replicate", "shard"
Entry = tuple[str, str, str]  # (axis, link level, kind of message)


@dataclass
class TrafficLedger:
    """Bytes and calls since the start of the run, by (axis, link level, kind of message).

    The axis is "replicate" for communication between replicas and "shard" for communication between the ranks of one
    replica. Ring traffic is filed under the level of the link to the next rank, so that the sum over all ranks is the
    traffic on each kind of link. An all-to-all on the shard axis is filed under the link to each receiver.

    Attributes:
        calls: Number of collectives.
        input_bytes: Size of the tensors that were passed to collectives.
        sent: Bytes that this rank sends, as in `topology.ring_bytes`.
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

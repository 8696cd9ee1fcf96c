"""Assignment of documents to data-parallel readers, their positions, and resuming with another number of readers.

A position is the unread rest of each epoch, as JSON: `left[0]` for the current epoch, `left[1]` for the next one, and
so on; later epochs have ordinary shares. The rest consists of units:

    map-style   [begin, end): documents by index
    streamed    a file, or the whole stream, with the library's own position in it

A unit also refers to a single document, its first one: `current` is the document that was yielded last, so that its
rest can be read again without storing its text.

With another number of readers, map-style data and streams whose number of files is a multiple of the number of readers
(each then reads its own files) are redistributed: the combined rest of an epoch is divided among the new readers, so
that no document is read twice in an epoch or left out. Other streams are read by all readers, one document in N each:
the new readers start at the position of the slowest reader, so documents that others had read beyond it are read again.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

# Documents of a stream between two records of the library's position, which costs more than a short document.
_STRIDE = 64

Unit = list[Any]
Units = list[Unit]


class Documents:
    """The documents of one reader, epoch by epoch. Empty documents are skipped and counted.

    It replaces the split data of TorchTitan's text dataset, and iterates over the rest of an epoch.
    """

    def __init__(self, name: str, data: Any, text: Callable[[dict[str, Any]], str], rank: int, world: int) -> None:
        self.name, self.data, self.text = name, data, text
        self.rank, self.world = rank, world
        self.epoch = self.empty = 0
        self.whole = True  # The current epoch is an ordinary share, read from its beginning.
        self.left: list[Units] = [self.share(rank, world)]
        self.current: Unit = []

    def share(self, rank: int, world: int) -> Units:
        """Return the units of a whole epoch that reader `rank` of `world` reads."""
        raise NotImplementedError

    def size(self) -> int:
        """Return a number that distinguishes different data of the same dataset name."""
        raise NotImplementedError

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """Yield the documents of a unit; set `current`, and update the unit to its rest, before each of them."""
        raise NotImplementedError

    def document(self, unit: Unit) -> dict[str, Any]:
        """Return the document that a value of `current` refers to. Raises ValueError if it does not exist."""
        raise NotImplementedError

    def deal(self, units: list[Units]) -> Units:
        """Return this reader's share of the documents that the previous readers left unread."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        units = self.left[0]
        while units:
            for sample in self.read(units[0]):
                if self.text(sample):
                    yield sample
                else:
                    self.empty += 1
            units.pop(0)
        logger.info(
            f"{self.name}: reader {self.rank} of {self.world} has read its share of epoch {self.epoch}; "
            f"{self.empty:,} empty documents skipped so far"
        )

    def set_epoch(self, epoch: int) -> None:
        """Advance to the next epoch. TorchTitan calls it after the last document of an epoch."""
        self.epoch = epoch
        self.left.pop(0)
        self.whole = not self.left
        if not self.left:
            self.left.append(self.share(self.rank, self.world))

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"epoch": self.epoch, "empty": self.empty, "left": self.left})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.empty, self.whole = state["epoch"], state["empty"], False
        self.left = copy.deepcopy(state["left"])

    def load_resharded(self, states: Sequence[dict[str, Any]]) -> str:
        """Load this reader's part of the rests of another number of readers. Return a description for the log."""
        first = min(state["epoch"] for state in states)
        last = max(state["epoch"] + len(state["left"]) for state in states)
        self.left = []
        for epoch in range(first, last):
            started = [(i, state) for i, state in enumerate(states) if state["epoch"] <= epoch]
            self.left.append(
                self.deal(
                    [
                        copy.deepcopy(state["left"][k])
                        if (k := epoch - state["epoch"]) < len(state["left"])
                        else self.share(i, len(states))
                        for i, state in started
                    ]
                )
            )
        self.epoch, self.whole = first, False
        self.empty = sum(state["empty"] for i, state in enumerate(states) if i % self.world == self.rank)
        return f"the rest of epoch {first} is divided among {self.world}"


class StoredDocuments(Documents):
    """Map-style data: a reader's share is a range of documents, split as the datasets library does."""

    data: Dataset

    def size(self) -> int:
        return len(self.data)

    def share(self, rank: int, world: int) -> Units:
        return _split_ranges([[0, len(self.data)]], rank, world)

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        # The library raises an error for an empty range after the last document.
        for sample in self.data.select(range(*unit)) if unit[0] < unit[1] else ():
            self.current = [unit[0], unit[0] + 1]
            unit[0] += 1
            yield sample

    def document(self, unit: Unit) -> dict[str, Any]:
        if not 0 <= unit[0] < len(self.data):
            raise ValueError(f"{self.name} has no document {unit[0]}; it has {len(self.data)}")
        found: dict[str, Any] = self.data[unit[0]]
        return found

    def deal(self, units: list[Units]) -> Units:
        left = sorted(unit for reader_units in units for unit in reader_units if unit[0] < unit[1])
        return _split_ranges(left, self.rank, self.world)


def _split_ranges(ranges: Units, rank: int, world: int) -> Units:
    """Return part `rank` of `world` of the concatenated ranges; if uneven, the first parts are longer by 1."""
    per_rank, more = divmod(sum(end - begin for begin, end in ranges), world)
    skip, take = rank * per_rank + min(rank, more), per_rank + (rank < more)
    part = []
    for begin, end in ranges:
        begin, skip = min(end, begin + skip), max(0, skip - (end - begin))
        end = min(end, begin + take)
        if begin < end:
            part.append([begin, end])
            take -= end - begin
    return part


class StreamedDocuments(Documents):
    """A stream of files.

    A unit is [file, or None for all files; state of the library, or None; n; step; offset; first]. n is the number of
    the document that follows the state. From document `first` on, every `step`-th document is read, starting at
    `offset`.
    """

    data: IterableDataset
    _stream: IterableDataset | None = None

    def size(self) -> int:
        return int(self.data.num_shards)

    def share(self, rank: int, world: int) -> Units:
        files = self.size()
        if files % world:
            return [[None, None, 0, world, rank, 0]]
        return [[file, None, 0, 1, 0, 0] for file in range(rank, files, world)]

    def _opened(self, file: int | None, state: dict[str, Any] | None) -> IterableDataset:
        # A separate copy, because the library's streams store their position.
        stream = self.data.shard(1, 0) if file is None else self.data.shard(self.size(), file)
        stream.set_epoch(self.epoch)
        if state is not None:
            stream.load_state_dict(state)
        return stream

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        file, state, known, step, offset, first = unit  # `state` precedes document number `known`.
        stream = self._stream = self._opened(file, state)
        samples = iter(stream)
        while True:
            if unit[2] - known >= _STRIDE:
                state, known = stream.state_dict(), unit[2]
            if (sample := next(samples, None)) is None:
                break
            number, unit[2] = unit[2], unit[2] + 1
            if number >= first and number % step == offset:
                self.current = [file, state, known, 1, 0, number]
                yield sample
        self._stream = None

    def document(self, unit: Unit) -> dict[str, Any]:
        file, state, known, _, _, number = unit
        for i, sample in enumerate(self._opened(file, state), known):
            if i == number:
                found: dict[str, Any] = sample
                return found
        raise ValueError(f"{self.name} has no document {number} in file {file}")

    def state_dict(self) -> dict[str, Any]:
        if self._stream is not None:
            self.left[0][0][1] = self._stream.state_dict()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream = None
        super().load_state_dict(state)

    def deal(self, units: list[Units]) -> Units:
        rest = [unit for reader_units in units for unit in reader_units]
        shared = [unit for unit in rest if unit[0] is None]
        if shared:
            # All documents before the first unread document of any reader have been read.
            first = min((begin := max(n, first)) + (offset - begin) % step for _, _, n, step, offset, first in shared)
            _, state, number, *_ = max((u for u in shared if u[2] <= first), key=lambda u: u[2])
            return [[None, state, number, self.world, self.rank, first]]
        return rest[self.rank :: self.world]


def documents(
    name: str, data: Any, text: Callable[[dict[str, Any]], str], rank: int, world: int
) -> StoredDocuments | StreamedDocuments:
    """Return the reader of map-style or streamed data."""
    kind = StoredDocuments if isinstance(data, Dataset) else StreamedDocuments
    return kind(name, data, text, rank, world)

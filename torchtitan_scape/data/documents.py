"""Which documents a data-parallel reader reads, how far it is, and how the rest is dealt to another number of readers.

A position is what is left of an epoch, as JSON: `left[0]` of the present epoch, `left[1]` of the one after it, and so
on; after them come ordinary shares. What is left consists of units:

    map-style   [begin, end): documents by index
    streamed    a file, or the whole stream, with the library's own position in it

The rule for another number of readers. Map-style data, and streams whose number of files is a multiple of the readers'
(each then reads files of its own): what all have left of an epoch is dealt to the new ones, so that no document is
read twice in an epoch and none is left out. Other streams are read by all readers, one document in N each: the new
ones begin where the slowest reader was; what others had read beyond that is read again.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

Unit = list[Any]
Units = list[Unit]


class Documents:
    """The documents of one reader, epoch by epoch; the empty ones are passed over and counted.

    It stands where TorchTitan's text data set has its split data, and iterates over what is left of an epoch.
    """

    def __init__(self, name: str, data: Any, text: Callable[[dict[str, Any]], str], rank: int, world: int) -> None:
        self.name, self.data, self.text = name, data, text
        self.rank, self.world = rank, world
        self.epoch = self.empty = 0
        self.whole = True  # the present epoch is read from its beginning, an ordinary share of it
        self.left: list[Units] = [self.share(rank, world)]

    def share(self, rank: int, world: int) -> Units:
        """What reader `rank` of `world` reads of a whole epoch."""
        raise NotImplementedError

    def size(self) -> int:
        """What two data sets of one name differ by."""
        raise NotImplementedError

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """The documents of a unit; it says what is left of it before each of them is handed out."""
        raise NotImplementedError

    def deal(self, units: list[Units]) -> Units:
        """This reader's part of what the old readers have left of an epoch."""
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
            f"{self.name}: reader {self.rank} of {self.world} has read its share in epoch {self.epoch}; "
            f"{self.empty:,} empty documents were passed over so far"
        )

    def set_epoch(self, epoch: int) -> None:
        """Called by TorchTitan after the last document of an epoch."""
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

    def load_old(self, states: Sequence[dict[str, Any]]) -> str:
        """Takes this reader's part of what the old readers, of another number, had left. Says what was done."""
        first = min(state["epoch"] for state in states)
        last = max(state["epoch"] + len(state["left"]) for state in states)
        self.left = []
        for epoch in range(first, last):
            begun = [(i, state) for i, state in enumerate(states) if state["epoch"] <= epoch]
            self.left.append(
                self.deal(
                    [
                        copy.deepcopy(state["left"][k])
                        if (k := epoch - state["epoch"]) < len(state["left"])
                        else self.share(i, len(states))
                        for i, state in begun
                    ]
                )
            )
        self.epoch, self.whole = first, False
        self.empty = sum(state["empty"] for i, state in enumerate(states) if i % self.world == self.rank)
        return f"what was left of epoch {first} is dealt to {self.world}"


class StoredDocuments(Documents):
    """Map-style data: a reader's share is a run of documents, as the datasets library splits them."""

    data: Dataset

    def size(self) -> int:
        return len(self.data)

    def share(self, rank: int, world: int) -> Units:
        return _cut([[0, len(self.data)]], rank, world)

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        # Of nothing after the last document, where a reader stops within it, the library selects nothing with an error.
        for sample in self.data.select(range(*unit)) if unit[0] < unit[1] else ():
            unit[0] += 1
            yield sample

    def deal(self, units: list[Units]) -> Units:
        left = sorted(unit for theirs in units for unit in theirs if unit[0] < unit[1])
        return _cut(left, self.rank, self.world)


def _cut(ranges: Units, rank: int, world: int) -> Units:
    """Part `rank` of `world` of ranges in a row; where it does not divide, the first parts are longer by 1."""
    each, more = divmod(sum(end - begin for begin, end in ranges), world)
    skip, take = rank * each + min(rank, more), each + (rank < more)
    part = []
    for begin, end in ranges:
        begin, skip = min(end, begin + skip), max(0, skip - (end - begin))
        end = min(end, begin + take)
        if begin < end:
            part.append([begin, end])
            take -= end - begin
    return part


class StreamedDocuments(Documents):
    """A stream. A unit is [file or None for all, the library's state or None, n, step, offset, first]: n is the number
    of the document that follows the state; of those from number `first` on, every `step`th is read, by `offset`."""

    data: IterableDataset
    _stream: IterableDataset | None = None

    def size(self) -> int:
        return int(self.data.num_shards)

    def share(self, rank: int, world: int) -> Units:
        files = self.size()
        if files % world:
            return [[None, None, 0, world, rank, 0]]
        return [[file, None, 0, 1, 0, 0] for file in range(rank, files, world)]

    def read(self, unit: Unit) -> Iterator[dict[str, Any]]:
        file, state, _, step, offset, first = unit
        # A copy of its own: the library's streams remember where they were.
        stream = self.data.shard(1, 0) if file is None else self.data.shard(self.size(), file)
        stream.set_epoch(self.epoch)
        if state is not None:
            stream.load_state_dict(state)
        self._stream = stream
        for sample in stream:
            number, unit[2] = unit[2], unit[2] + 1
            if number >= first and number % step == offset:
                yield sample
        self._stream = None

    def state_dict(self) -> dict[str, Any]:
        if self._stream is not None:
            self.left[0][0][1] = self._stream.state_dict()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream = None
        super().load_state_dict(state)

    def deal(self, units: list[Units]) -> Units:
        rest = [unit for theirs in units for unit in theirs]
        shared = [unit for unit in rest if unit[0] is None]
        if shared:
            # All in front of the first document that one of them has not read were read, each by its reader.
            first = min((begin := max(n, first)) + (offset - begin) % step for _, _, n, step, offset, first in shared)
            _, state, number, *_ = max((u for u in shared if u[2] <= first), key=lambda u: u[2])
            return [[None, state, number, self.world, self.rank, first]]
        return rest[self.rank :: self.world]


def documents(
    name: str, data: Any, text: Callable[[dict[str, Any]], str], rank: int, world: int
) -> StoredDocuments | StreamedDocuments:
    kind = StoredDocuments if isinstance(data, Dataset) else StreamedDocuments
    return kind(name, data, text, rank, world)

"""Sequences of text that is encoded during training, with a position in plain JSON for any number of readers.

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
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset

from torchtitan_scape.core.files import parse_json
from torchtitan_scape.data.encoding import BoundaryTokenizer
from torchtitan_scape.data.local import TextPath
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import DATASETS, BaseDataLoader, BaseTokenizer

logger = logging.getLogger(__name__)

FORMAT = 2
Partial = list[Any]  # Unit of a document, first character of a piece, tokens of the piece to skip.
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # Inputs and labels; without a batch dimension, of a sequence.
WHOLE = 1 << 26  # Stored bytes up to which all documents are hashed, which takes a tenth of a second.
SAMPLED, SAMPLED_CHARACTERS = 1024, 1 << 14
_BATCH = 4096
# Documents of a stream between two records of the library's position, which costs more than a short document.
_STRIDE = 64

Unit = list[Any]
Units = list[Unit]


class Documents:
    """The documents of one reader, epoch by epoch; iterates over the rest of an epoch. Empty documents are skipped and
    counted.
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
        """Advance to the next epoch, after the last document of an epoch."""
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
        document: dict[str, Any] = self.data[unit[0]]
        return document

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
                document: dict[str, Any] = sample
                return document
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


def data_digest(data: Any) -> str:
    """Return a digest of a dataset or a stream of the datasets library; "" if it has nothing to identify it by.

    Of more than `WHOLE` bytes, the first characters of 1,024 evenly spaced documents are hashed. The digest of a stream
    is that of the names of its files, which contain the revision in the case of a dataset of the hub.
    """
    if not isinstance(data, Dataset):
        arguments = getattr(getattr(data, "_ex_iterable", None), "kwargs", {})
        files = arguments.get("base_files") or arguments.get("files") or []
        return _digest(str(file).encode() for file in files) if files else ""
    if "text" not in data.column_names:
        return ""
    text = data.select_columns(["text"])
    if data.data.nbytes <= WHOLE:
        chunks = (text[begin : begin + _BATCH]["text"] for begin in range(0, len(data), _BATCH))
        return _digest(_encoded(document) for chunk in chunks for document in chunk)
    rows = np.linspace(0, len(data) - 1, SAMPLED).astype(int)
    return _digest(_encoded((text[int(row)]["text"] or "")[:SAMPLED_CHARACTERS]) for row in rows)


def tokenizer_digest(definition: str) -> str:
    """Return a digest of the definition of a tokenizer, in the JSON of the tokenizers library."""
    return _digest([definition.encode()])


def _encoded(document: str | None) -> bytes:
    return (document or "").encode(errors="surrogatepass")


def _digest(parts: Iterable[bytes]) -> str:
    """Return the first 16 digits of the SHA-256 of byte strings and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


class NoTextError(ValueError):
    """A reader's share of the data contains no token."""


class TextDataLoader(BaseDataLoader):
    """Data loader of reader `rank` of `world`, for `passes` epochs, 0 for no end: batches of sequences of `seq_len`
    tokens.

    The sequences are those of TorchTitan's text dataset. The token buffer contains fewer tokens than a sequence and
    those of one piece of a document. The position refers to that piece by its document and its first character, so that
    its size does not depend on the documents.

    The state has one entry per data-parallel rank i, and does not depend on the batch size or the sequence length:

        dp_rank_{i}: str     JSON of the position: format, data (name and number of documents or files), digests (of
                             text and tokenizer), epoch, empty (documents skipped), left (see above), tokens
                             (not yet yielded), partial (documents of which a part was yielded)
        world_size: int      data-parallel ranks, including simulated replicas

    Args:
        batch: Sequences of a batch. The last batch of finite data may be smaller.
    """

    def __init__(
        self,
        name: str,
        path: str | None,
        tokenizer: BoundaryTokenizer,
        seq_len: int,
        batch: int = 1,
        rank: int = 0,
        world: int = 1,
        passes: int = 0,
    ) -> None:
        self.dataset_name, self.seq_len, self.batch, self.passes = name.lower(), seq_len, batch, passes
        self.rank, self.world = rank, world
        if (config := DATASETS.get(self.dataset_name)) is None:
            raise ValueError(f"dataset {name!r} is unknown; known are prepared, {', '.join(sorted(DATASETS))}")
        self._text: Callable[[dict[str, Any]], str] = config.sample_processor
        self._data = documents(self.dataset_name, config.loader(path or config.path), self._text, rank, world)
        self._tokenizer = tokenizer
        self._token_buffer: list[int] = []
        self._begin = 0  # Tokens before this index of the buffer have been yielded.
        self._piece: Partial | None = None  # Piece at the end of the buffer.
        self._piece_begin = 0  # Index of its first token in the buffer.
        self._partial: list[Partial] = []  # Documents to read before the others, from a checkpoint.
        self._sequences_yielded = 0
        self._at_epoch_start: tuple[int, int] | None = None

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of text and tokenizer, for checkpoints; validation does not need them."""
        tokenizer = self._tokenizer.tokenizer
        definition = self._tokenizer.definition or tokenizer.to_str()
        return {"text": data_digest(self._data.data), "tokenizer": tokenizer_digest(definition)}

    def _epoch(self) -> Iterator[dict[str, Any]]:
        """Return the documents of an epoch, at its beginning. Raises NoTextError if the last one had no token."""
        now = self._sequences_yielded, len(self._token_buffer)
        if now == self._at_epoch_start:
            raise NoTextError(
                f"{self.dataset_name}: the share of data-parallel reader {self.rank} of {self.world} has "
                "no token in a whole epoch; check the data, or use fewer ranks (a .txt file is one document)"
            )
        self._at_epoch_start = now if self._data.whole else None
        if self.passes and self._data.epoch >= self.passes:
            return iter(())
        return iter(self._data)

    def __iter__(self) -> Iterator[Batch]:
        sequences = self.sequences()
        while rows := list(islice(sequences, self.batch)):
            inputs, labels = zip(*((row["input"], labels) for row, labels in rows), strict=True)
            yield {"input": torch.stack(inputs)}, torch.stack(labels)

    def sequences(self) -> Iterator[Batch]:
        """Yield inputs and labels of each sequence, with the documents encoded in pieces."""
        yield from self._complete_sequences()  # Tokens restored from a checkpoint.
        while self._partial:
            unit, begin, skip = self._partial.pop(0)
            yield from self._document(self._data.document(unit), unit, begin, skip)
        while True:
            for sample in self._epoch():
                yield from self._document(sample, self._data.current)
            if self.passes and self._data.epoch + 1 >= self.passes:
                logger.warning(f"{self.dataset_name}: end of data")
                return
            logger.warning(f"{self.dataset_name}: end of epoch, the data are repeated")
            self._data.set_epoch(self._data.epoch + 1)

    def _document(self, sample: dict[str, Any], unit: Unit, begin: int = 0, skip: int = 0) -> Iterator[Batch]:
        """Yield the sequences that a document completes, from the piece that begins with the character `begin` on.

        `unit` refers to the document. `skip` tokens of the first piece were yielded before.
        """
        for first, tokens in self._tokenizer.encode_pieces(self._text(sample), begin):
            self._piece, self._piece_begin = [unit, first, skip], len(self._token_buffer)
            self._token_buffer += tokens[skip:]
            skip = 0
            yield from self._complete_sequences()
            self._piece = None

    def _complete_sequences(self) -> Iterator[Batch]:
        """Yield all complete sequences in the buffer."""
        while len(self._token_buffer) - self._begin > self.seq_len:
            end = self._begin + self.seq_len + 1
            tokens = torch.tensor(self._token_buffer[self._begin : end], dtype=torch.int64, device="cpu")
            self._begin, self._sequences_yielded = end, self._sequences_yielded + 1
            yield {"input": tokens[:-1]}, tokens[1:]
        del self._token_buffer[: self._begin]
        self._begin = 0

    def empty_documents(self) -> int:
        """Return the number of empty documents that this reader has skipped since the start of the run."""
        return self._data.empty

    def tokens_left(self) -> int:
        """Return the number of tokens that have been read and not yielded: at the end of data, those left out."""
        return len(self._token_buffer) - self._begin

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self._position(), "world_size": self.world}

    def _position(self) -> str:
        """Return the position after the last yielded batch, as JSON."""
        partial, tokens = self._partial, self._token_buffer[self._begin :]
        if self._piece is not None:
            unit, first, skip = self._piece
            partial = [[unit, first, skip + max(0, self._begin - self._piece_begin)], *partial]
            tokens = self._token_buffer[self._begin : self._piece_begin]
        position = {
            "format": FORMAT,
            "data": [self.dataset_name, self._data.size()],
            "digests": self.digests,
            **self._data.state_dict(),
            "tokens": tokens,
            "partial": partial,
        }
        return json.dumps(position)

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return a placeholder with the keys of a checkpoint of this many readers."""
        return {f"dp_rank_{i}": "" for i in range(readers)} | {"world_size": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a run with the same number of ranks, so that the batches continue without a gap."""
        if not state_dict:
            return
        own = state_dict.get(f"dp_rank_{self.rank}")
        if state_dict["world_size"] != self.world or own is None:
            raise ValueError(
                f"the checkpoint has the data positions of {state_dict['world_size']} data-parallel ranks, this run "
                f"has {self.world}; load_resharded must redistribute them"
            )
        position = self._checked(own)
        self._data.load_state_dict(position)
        self._restore([position])

    def load_resharded(self, states: Sequence[dict[str, Any]]) -> str:
        """Continue with the data of a run with another (or the same) number of ranks, and return a line for the log.

        Not collective: every rank receives the states of all old ranks, in any order. The rest of an epoch is divided
        among the new ranks by the rule above. Tokens that old ranks had read but not yielded are assigned
        round-robin.
        """
        merged = {key: value for state in states for key, value in state.items()}
        world = int(merged.get("world_size", 0))
        missing = [f"dp_rank_{i}" for i in range(world) if f"dp_rank_{i}" not in merged]
        if missing or not world:
            raise ValueError(f"the checkpoint has no data position {missing[0] if missing else 'at all'}")
        if world == self.world:
            self.load_state_dict(merged)
            return f"data: each of {world} ranks continues at its position"
        old = [self._checked(merged[f"dp_rank_{i}"]) for i in range(world)]
        done = self._data.load_resharded(old)
        self._restore(old[self.rank :: self.world])
        return f"data: the checkpoint has {world} data-parallel ranks; {done}"

    def _restore(self, positions: Sequence[dict[str, Any]]) -> None:
        """Continue with the tokens and partially read documents of these positions."""
        self._token_buffer = [token for position in positions for token in position["tokens"]]
        self._partial = [partial for position in positions for partial in position["partial"]]
        self._begin, self._piece, self._at_epoch_start = 0, None, None

    def _checked(self, text: str) -> dict[str, Any]:
        """Parse a checkpoint's position. Raises ValueError if it is damaged, or of other data or another tokenizer."""
        restart = "start the data from the beginning with --checkpoint.exclude_from_loading=dataloader"
        try:
            position: dict[str, Any] = parse_json(text)
            known = position["format"] == FORMAT and isinstance(position["epoch"], int) and position["left"] != []
            known = known and all(isinstance(token, int) for token in position["tokens"])
            known = known and all(len(partial) == 3 for partial in position["partial"])
            saved, digests = position["data"], dict(position["digests"])
        except (TypeError, ValueError, KeyError, AttributeError):
            known = False
        if not known:
            raise ValueError(f"the data position in the checkpoint is not readable: {str(text)[:80]!r}; {restart}")
        if saved != [self.dataset_name, self._data.size()]:
            raise ValueError(
                f"the checkpoint's data are {saved[0]} with {saved[1]} documents or files, this run's "
                f"{self.dataset_name} with {self._data.size()}; use the same data, or {restart}"
            )
        for kind, own in self.digests.items():
            if (other := digests.get(kind, own)) != own:
                raise ValueError(
                    f"the checkpoint was trained on {self.dataset_name} with another {kind}: {other}, this run's "
                    f"{own}; use the same {kind}, or {restart}"
                )
        return position


def text_loader(
    config: Training | Validation,
    text_column: str,
    tokenizer: BaseTokenizer,
    border: str,
    rank: int,
    world: int,
    passes: int = 0,
) -> TextDataLoader:
    """Return the data loader that a section describes, for data-parallel reader `rank` of `world`."""
    with_border = BoundaryTokenizer(tokenizer, border)
    path = TextPath(config.dataset_path, text_column) if config.dataset_path else None
    batch = config.local_batch_size
    return TextDataLoader(config.dataset, path, with_border, config.seq_len, batch, rank, world, passes)

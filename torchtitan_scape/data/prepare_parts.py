"""Preparation of text in tasks that are fixed before work begins, and the work on one task.

Tasks depend only on the source and the tokenizer, not on the workers. The same files therefore result from any number
of workers and after any interruption. For stored data the sizes of all documents are known in advance: a task is a
range of documents with about as many bytes as the others. For a stream only its files are known: a task is one file.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
from datasets import Dataset, IterableDataset

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import parse_json, write_whole
from torchtitan_scape.data.encoding import BoundaryTokenizer, groups
from torchtitan_scape.data.manifest import TRAIN, VALIDATION, IndexedShard, Manifest, PairWriter, Tokens, damage
from torchtitan_scape.data.prepared import mixed

DOCUMENTS_AT_ONCE = 512  # That are encoded together, at most.
SAMPLED, SAMPLED_CHARACTERS = 256, 1 << 14
_ROWS = 256  # Rows of stored data read at once.
_BLOCK = 400 * _ROWS  # Documents of a block, whose digests are independent of the files.
_FILE = 1 << 40  # In a stream, document i of file f has the number f * _FILE + i.

Count = Callable[[int, int, int], None]  # Reports completed documents, tokens and bytes of text.


@dataclass(frozen=True)
class PrepareTask:
    """A unit of work: a range of documents, or of files in a stream. `bytes` is 0 if unknown.

    If documents are held out, a training task also produces validation data.
    """

    split: str
    number: int
    begin: int
    end: int
    bytes: int


class TextSource:
    """The documents of one split, numbered, without empty ones. `sizes` are their bytes, if known in advance."""

    def __init__(self, data: Dataset | IterableDataset, split: str) -> None:
        self.data, self.split = data, split
        self.sizes = _sizes(data) if isinstance(data, Dataset) else None

    def facts(self) -> dict[str, Any]:
        """Return the properties that identify the source."""
        if self.sizes is None:
            return {"files": self.data.num_shards}
        sampled = sha256(self.sizes.tobytes() + "\0".join(self.sample()).encode())  # Compared with older manifests.
        facts = {"documents": len(self.sizes), "bytes": int(self.sizes.sum()), "digest": sampled.hexdigest()[:16]}
        return facts | {"text_digest": _text_digest(self.data, self.sizes)}

    def sample(self) -> list[str]:
        """Return the beginnings of some documents, spread over stored data; empty for a stream."""
        if self.sizes is None:
            return []
        indices = np.linspace(0, len(self.sizes) - 1, min(SAMPLED, len(self.sizes))).astype(int).tolist()
        return [(self.data[index]["text"] or "")[:SAMPLED_CHARACTERS] for index in indices]

    def parts(self, size: float) -> list[PrepareTask]:
        """Return tasks of about `size` bytes of text, or one per file of a stream."""
        if self.sizes is None:
            return [PrepareTask(self.split, file, file, file + 1, 0) for file in range(self.data.num_shards)]
        ends = np.cumsum(self.sizes)
        total = int(ends[-1]) if len(ends) else 0
        n = max(1, -(-total // max(1, int(size))))
        boundaries = np.unique([0, *np.searchsorted(ends, total * np.arange(1, n) / n), len(ends)]).tolist()
        sums = np.concatenate([[0], ends])[boundaries].tolist()
        return [
            PrepareTask(self.split, number, begin, end, sums[number + 1] - sums[number])
            for number, (begin, end) in enumerate(pairwise(boundaries))
        ]

    def read(self, part: PrepareTask) -> Iterator[tuple[int, str]]:
        """Yield (number, text) of a task's documents. Raises ValueError if they cannot be read."""
        try:
            if self.sizes is None:
                stream = self.data.shard(self.data.num_shards, part.begin)
                documents: Iterator[tuple[int, str]] = (
                    (part.begin * _FILE + i, sample["text"]) for i, sample in enumerate(stream)
                )
            else:
                documents = self._stored(part)
            for number, text in documents:
                if text:
                    yield number, text
        except (OSError, ValueError, TypeError, KeyError, pyarrow.ArrowException) as error:
            source = f"file {part.begin}" if self.sizes is None else f"documents {part.begin} to {part.end - 1}"
            raise ValueError(f"{source} of the {self.split} data cannot be read: {one_line(error)}") from error

    def _stored(self, part: PrepareTask) -> Iterator[tuple[int, str]]:
        for begin in range(part.begin, part.end, _ROWS):
            yield from enumerate(self.data[begin : min(part.end, begin + _ROWS)]["text"], begin)


def _columns(data: Dataset) -> list[pyarrow.ChunkedArray]:
    """Return the texts of consecutive blocks of documents."""
    table = data.with_format("arrow")
    return [table[i : i + _BLOCK]["text"] for i in range(0, len(data), _BLOCK)]


def _sizes(data: Dataset) -> Tokens:
    lengths = [
        pyarrow.compute.fill_null(pyarrow.compute.binary_length(column), 0).to_numpy() for column in _columns(data)
    ]
    return np.concatenate([np.empty(0, np.int64), *lengths]).astype(np.int64)


def _text_digest(data: Dataset, sizes: Tokens) -> str:
    """Return a digest of all text: 16 digits of the SHA-256 of the documents' sizes and of the SHA-256 of each block.

    Threads hash the blocks in the memory of Arrow, in about a hundredth of the time of tokenization.
    """

    def digest(column: pyarrow.ChunkedArray) -> bytes:
        block = sha256()
        for chunk in column.chunks:
            texts = chunk.cast(pyarrow.large_binary())
            _, offsets, content = texts.buffers()
            ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
            if content is not None and len(texts):
                block.update(memoryview(content)[ends[0] : ends[-1]])
        return block.digest()

    with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
        blocks = b"".join(threads.map(digest, _columns(data)))
    return sha256(sizes.tobytes() + blocks).hexdigest()[:16]


def held_out(numbers: Sequence[int], share: float) -> list[bool]:
    """Return whether each document is held out for validation: about `share` of them, by number alone."""
    chosen: list[bool] = (mixed(np.array(numbers, np.uint64) + np.uint64(1)) < np.uint64(int(share * 2.0**64))).tolist()
    return chosen


class PrepareWork:
    """Preparation of the shards of all tasks. A task is complete if its record exists and its files match the record.

    Records and incomplete files are in the folder `unfinished`. `plan` is the manifest without shards.
    """

    def __init__(
        self,
        folder: Path,
        unfinished: Path,
        plan: Manifest,
        parts: list[PrepareTask],
        sources: list[TextSource],
        encoder: BoundaryTokenizer,
    ) -> None:
        self.folder, self.unfinished, self.plan, self.parts, self.encoder = folder, unfinished, plan, parts, encoder
        self.sources = {source.split: source for source in sources}

    def __len__(self) -> int:
        return len(self.parts)

    def record(self, index: int) -> Path:
        return self.unfinished / f"part-{index:05d}.json"

    def write_record(self, index: int, shards: Sequence[IndexedShard]) -> None:
        write_whole(self.record(index), json.dumps([asdict(shard) for shard in shards]).encode())

    def shards(self, index: int) -> list[IndexedShard] | None:
        """Return the shards of a completed task; None if the task is incomplete."""
        try:
            return [IndexedShard(**shard) for shard in parse_json(self.record(index).read_bytes())]
        except (OSError, ValueError, TypeError):
            return None

    def take_over(self, shards: Sequence[dict[str, Any]]) -> None:
        """Write the records of an existing manifest of which a file is missing or damaged."""
        found = [IndexedShard(**shard) for shard in shards]
        for index, part in enumerate(self.parts):
            names = self._names(part).values()
            self.write_record(index, [shard for shard in found if shard.name in names])

    def _names(self, part: PrepareTask) -> dict[str, str]:
        """Return the names of the shards that a task creates, by split."""
        splits = [TRAIN, VALIDATION] if part.split == TRAIN and self.plan.held_out else [part.split]
        return {split: f"{split}-{part.number:05d}" for split in splits}

    def verified(self, index: int) -> bool:
        """Return whether a task is complete, after reading its files completely."""
        dtype, entries = np.dtype(self.plan.dtype), self.plan.tokenizer["entries"]
        shards = self.shards(index)
        return shards is not None and not any(damage(self.folder, shard, dtype, entries) for shard in shards)

    def __call__(self, index: int, count: Count) -> None:
        part = self.parts[index]
        if self.verified(index):
            count(0, 0, part.bytes)
            return
        self.record(index).unlink(missing_ok=True)
        dtype = np.dtype(self.plan.dtype)
        writers = {split: PairWriter(self.unfinished, name, split, dtype) for split, name in self._names(part).items()}
        try:
            for documents in groups(self.sources[part.split].read(part), DOCUMENTS_AT_ONCE):
                self._add(writers, documents, count)
            self.write_record(index, [shard for writer in writers.values() if (shard := writer.finish(self.folder))])
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot be written: {error.strerror}; run the same command again to continue"
            ) from error
        finally:
            for writer in writers.values():
                writer.discard()

    def _add(self, writers: dict[str, PairWriter], documents: list[tuple[int, str]], count: Count) -> None:
        out = [False] * len(documents)
        if len(writers) > 1:
            out = held_out([number for number, _ in documents], self.plan.held_out or 0.0)
        for writer, wanted in zip(writers.values(), (False, True), strict=False):
            chosen = [text for (_, text), held in zip(documents, out, strict=True) if held == wanted]
            if chosen:
                ids, lengths = self.encoder.encode_documents(chosen)
                n_bytes = sum(len(text.encode()) for text in chosen)
                writer.add(ids, lengths, n_bytes, sum(map(self.encoder.special.is_in, chosen)))
                count(len(chosen), len(ids), n_bytes)

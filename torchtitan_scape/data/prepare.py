"""Convert text to tokens once, in Megatron's format, for shuffled, exactly resumable, offline training.

python -m torchtitan_scape.data.prepare --dataset standard_library --tokenizer torchtitan_scape/data/tokenizer \\
    --output outputs/prepared
python -m torchtitan_scape.data.prepare --output outputs/prepared --verify
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow.compute
from datasets import Dataset

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.command import one_line, parser_of
from torchtitan_scape.core.files import packaged, parse_json, write_whole
from torchtitan_scape.core.text import duration_text
from torchtitan_scape.data.datasets import DATASETS, HUB
from torchtitan_scape.data.encoding import BoundaryTokenizer, groups
from torchtitan_scape.data.local import TextPath
from torchtitan_scape.data.manifest import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    IndexedShard,
    Manifest,
    PairWriter,
    Tokens,
    damage,
    dtype_for,
    shard_of,
    tokenizer_facts,
)
from torchtitan_scape.titan.tokenizer import build_tokenizer

UNFINISHED, PLAN, LOCK = "unfinished", "plan.json", "lock"
# Share of the documents to hold out by default: enough for the default recipe's validation (65,536 tokens with two
# readers), within these limits.
HELD_OUT, MOST_HELD_OUT, HELD_OUT_TOKENS = 0.0005, 0.05, 200_000
SHARD_TOKENS = 1 << 28
# The trainer's keys in messages.
_OPTIONS = {"model.hf_assets_path": "--tokenizer", "dataset_path": "--path", "training.text_column": "--text-column"}
_LOCK_SECONDS = 10.0  # Time for the workers of a killed process to end.
SECONDS = 10.0  # Interval between progress lines.
RESUME_HINT = "run the same command again to continue"
DOCUMENTS_AT_ONCE = 512  # That are encoded together, at most.
SAMPLED, SAMPLED_CHARACTERS = 256, 1 << 14
_ROWS = 256  # Rows of stored data read at once.
_BLOCK = 400 * _ROWS  # Documents of a block, whose digests are independent of the files.

Count = Callable[[int, int, int], None]  # Reports completed documents, tokens and bytes of text.


@dataclass(frozen=True)
class PrepareTask:
    """A unit of work: a range of documents with about as many bytes as the others.

    Tasks depend only on the source and the tokenizer, not on the workers. The same files therefore result from any
    number of workers and after any interruption. If documents are held out, a training task also produces validation
    data.
    """

    split: str
    number: int
    begin: int
    end: int
    bytes: int


class TextSource:
    """The documents of one split, numbered, without empty ones. `sizes` are their bytes."""

    def __init__(self, data: Dataset, split: str) -> None:
        self.data, self.split, self.sizes = data, split, _sizes(data)

    def facts(self) -> dict[str, Any]:
        """Return the properties that identify the source."""
        digest = _text_digest(self.data, self.sizes)
        return {"documents": len(self.sizes), "bytes": int(self.sizes.sum()), "text_digest": digest}

    def sample(self) -> list[str]:
        """Return the beginnings of some documents, spread over the data."""
        indices = np.linspace(0, len(self.sizes) - 1, min(SAMPLED, len(self.sizes))).astype(int).tolist()
        return [(self.data[index]["text"] or "")[:SAMPLED_CHARACTERS] for index in indices]

    def parts(self, size: float) -> list[PrepareTask]:
        """Return tasks of about `size` bytes of text."""
        ends = np.cumsum(self.sizes)
        total = int(ends[-1]) if len(ends) else 0
        n = max(1, -(-total // max(1, int(size))))
        boundaries = np.unique([0, *np.searchsorted(ends, total * np.arange(1, n) / n), len(ends)]).tolist()
        sums = np.concatenate([[0], ends])[boundaries].tolist()
        return [
            PrepareTask(self.split, number, begin, end, sums[number + 1] - sums[number])
            for number, (begin, end) in enumerate(pairwise(boundaries))
        ]

    def read(self, part: PrepareTask, share: float = 0.0) -> Iterator[tuple[bool, str]]:
        """Yield a task's documents: whether each is in the share to hold out, and its text.

        Raises ValueError if they cannot be read.
        """
        try:
            for begin in range(part.begin, part.end, _ROWS):
                texts = self.data[begin : min(part.end, begin + _ROWS)]["text"]
                yield from ((share > 0 and is_held_out(text, share), text) for text in texts if text)
        except (OSError, ValueError, TypeError, KeyError, pyarrow.ArrowException) as error:
            raise ValueError(
                f"documents {part.begin} to {part.end - 1} of the {self.split} data cannot be read: {one_line(error)}"
            ) from error


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


def is_held_out(text: str, share: float) -> bool:
    """Return whether a document is held out for validation, by its text alone: equal documents are in one split."""
    number = int.from_bytes(sha256(text.encode()).digest()[:8], "little")
    return number < int(share * 2.0**64)


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
        existing_shards = [shard_of(shard) for shard in shards]
        for index, part in enumerate(self.parts):
            names = self._names(part).values()
            self.write_record(index, [shard for shard in existing_shards if shard.name in names])

    def _names(self, part: PrepareTask) -> dict[str, str]:
        """Return the names of the shards that a task creates, by split."""
        splits = [TRAIN, VALIDATION] if part.split == TRAIN and self.plan.held_out else [part.split]
        return {split: f"{split}-{part.number:05d}" for split in splits}

    def verified(self, index: int) -> bool:
        """Return whether a task is complete, after reading its files completely."""
        shards, dtype = self.shards(index), np.dtype(self.plan.dtype)
        return shards is not None and not any(damage(self.folder, shard, dtype) for shard in shards)

    def __call__(self, index: int, count: Count) -> None:
        part = self.parts[index]
        if self.verified(index):
            count(0, 0, part.bytes)
            return
        self.record(index).unlink(missing_ok=True)
        dtype = np.dtype(self.plan.dtype)
        writers = {split: PairWriter(self.unfinished, name, split, dtype) for split, name in self._names(part).items()}
        try:
            documents_of_part = self.sources[part.split].read(part, self.plan.held_out or 0.0)
            for documents in groups(documents_of_part, DOCUMENTS_AT_ONCE):
                self._add(writers, documents, count)
            self.write_record(index, [shard for writer in writers.values() if (shard := writer.finish(self.folder))])
        except OSError as error:
            raise ValueError(
                f"{self.folder} cannot be written: {error.strerror}; run the same command again to continue"
            ) from error
        finally:
            for writer in writers.values():
                writer.discard()

    def _add(self, writers: dict[str, PairWriter], documents: list[tuple[bool, str]], count: Count) -> None:
        for writer, wanted in zip(writers.values(), (False, True), strict=False):
            chosen = [text for held, text in documents if held == wanted]
            if chosen:
                ids, lengths = self.encoder.encode_documents(chosen)
                n_bytes = sum(len(text.encode()) for text in chosen)
                writer.add(ids, lengths, n_bytes)
                count(len(chosen), len(ids), n_bytes)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("torchtitan_scape.data.prepare", __doc__)
    parser.add_argument("--dataset", help="name of a dataset, as training.dataset; reads its text, or that of --path")
    parser.add_argument("--path", help="local text: a file or a folder, as training.dataset_path")
    parser.add_argument("--text-column", default="text", help="column of --path with the text (text)")
    parser.add_argument(
        "--tokenizer", type=lambda path: Path(packaged(path)), help="folder of the tokenizer, as model.hf_assets_path"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the prepared data")
    parser.add_argument("--workers", type=int, help="processes (default: one per core); no effect on the result")
    parser.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, help=f"approximate tokens per shard ({SHARD_TOKENS})"
    )
    parser.add_argument(
        "--validation",
        type=float,
        help="share of the documents to hold out (default: none if the dataset has a validation split, which is then "
        f"prepared, else about {HELD_OUT_TOKENS:,} tokens, at least {HELD_OUT} and at most {MOST_HELD_OUT})",
    )
    parser.add_argument(
        "--border",
        choices=("bos_eos", "eos"),
        default="bos_eos",
        help="tokens between documents, as [data] border (bos_eos)",
    )
    parser.add_argument("--verify", action="store_true", help="read all files and compare their SHA-256")
    return parser


def sources_of(
    name: str, path: str | None, text_column: str, held_out: float | None
) -> tuple[list[TextSource], float | None]:
    """Return the text for training, that for validation if the dataset has its own split, and the share to hold out."""
    name = name.lower()
    if name not in DATASETS:
        raise ValueError(f"--dataset {name!r} is unknown; known are {', '.join(sorted(DATASETS))}")
    if text_column != "text" and name != "text_files":
        raise ValueError(f"--text-column {text_column!r} is for local text; the column of --dataset {name} is fixed")
    if not path and (hub := HUB.get(name.removesuffix("_validation"))):
        raise ValueError(f"--dataset {name} needs a local copy: run {hub.download}, and give --path {hub.folder}")
    dataset, validation = DATASETS[name], DATASETS.get(f"{name}_validation")
    if path:
        path = TextPath(path, text_column)
    data = dataset.loader(path or dataset.path)
    if not isinstance(data, Dataset):
        raise ValueError(f"--dataset {name} is a stream; download it, and give --dataset text_files and --path")
    sources = [TextSource(data, TRAIN)]
    if validation is None:
        return sources, HELD_OUT if held_out is None else held_out
    if held_out is not None:
        return sources, held_out
    try:
        return [*sources, TextSource(validation.loader(path or validation.path), VALIDATION)], None
    except ValueError as error:
        raise ValueError(f"{error}; or hold documents out with --validation {HELD_OUT}") from error


def plan_of(options: argparse.Namespace) -> tuple[Manifest, list[PrepareTask], list[TextSource], BoundaryTokenizer]:
    """Return manifest without shards, tasks, sources and encoder; equal for equal text, tokenizer and options."""
    name = options.dataset or "text_files"
    config = JobConfig()
    config.model.hf_assets_path, config.data.border = str(options.tokenizer), options.border
    tokenizer = build_tokenizer(config)
    sources, held_out = sources_of(name, options.path, options.text_column, options.validation)
    encoder = BoundaryTokenizer(tokenizer, options.border)
    ids, _ = encoder.encode_documents(texts) if (texts := sources[0].sample()) else ([], [])
    rate = max(1, sum(len(text.encode()) for text in texts)) / max(1, len(ids))
    if options.validation is None and held_out is not None:
        held_out = _default_share(sources[0].sizes, rate)
    facts = tokenizer_facts(options.tokenizer, tokenizer)
    plan = Manifest(
        source={"dataset": name.lower(), "path": options.path} | {source.split: source.facts() for source in sources},
        tokenizer=facts,
        border=options.border,
        dtype=dtype_for(facts["entries"]).name,
        shard_tokens=options.shard_tokens,
        held_out=held_out,
        shards=(),
        held_out_by=None if held_out is None else "text",
    )
    return plan, [p for source in sources for p in source.parts(rate * options.shard_tokens)], sources, encoder


def _default_share(sizes: Tokens, bytes_per_token: float) -> float:
    """Return the share of documents to hold out."""
    wanted = HELD_OUT_TOKENS * bytes_per_token / max(1, int(sizes.sum()))
    return round(min(MOST_HELD_OUT, max(HELD_OUT, wanted)), 4)


def _exclusive_lock(folder: Path) -> IO[str]:
    """Return an open lock file that excludes other processes; workers inherit it for as long as they live."""
    deadline = time.monotonic() + _LOCK_SECONDS
    file = open(folder / LOCK, "w")  # noqa: SIM115  # closed by the caller
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError(f"another process is preparing data in {folder}; wait until it ends") from None
            time.sleep(0.1)
        except OSError:  # The file system does not support locks.
            return file


def _head(path: Path) -> dict[str, Any]:
    """Return the JSON object of a plan or a manifest."""
    try:
        head: dict[str, Any] = dict(parse_json(path.read_bytes()).items())
        return head
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is damaged; delete {path.parent}, or give another --output") from None


def _check_plan(path: Path, folder: Path, plan: Manifest, continues: bool = True) -> None:
    """Raise ValueError if the plan differs from that of a folder, which work continues or not."""
    head = _head(path)
    for key, expected in plan.head().items():
        if not _contains(head.get(key), expected) and (continues or key != "held_out_by"):
            raise ValueError(
                f"{folder} contains data of another {key}: {head.get(key)}, not {expected}; delete it, or give another "
                "--output"
            )


def _contains(saved: Any, expected: Any) -> bool:
    """Return whether a saved value has all entries of the expected one; earlier versions wrote further entries."""
    if isinstance(saved, dict) and isinstance(expected, dict):
        return all(_contains(saved.get(key), value) for key, value in expected.items())
    return bool(saved == expected)


def _begin(folder: Path, unfinished: Path, plan: Manifest, work: PrepareWork) -> bool:
    """Compare the plan with the folder's. Return whether any work is left."""
    if (folder / MANIFEST).exists():
        lost = ""
        try:
            Manifest.read(folder)
        except ValueError as error:
            lost = str(error)
        _check_plan(folder / MANIFEST, folder, plan, continues=bool(lost))
        if not lost:
            return False
        print(f"{lost}: it is prepared again")  # The remaining files count as completed tasks.
        _write_plan(unfinished, plan)
        work.take_over(_head(folder / MANIFEST).get("shards") or [])
        (folder / MANIFEST).unlink()
    elif (unfinished / PLAN).exists():
        _check_plan(unfinished / PLAN, folder, plan)
    else:
        _write_plan(unfinished, plan)
    return True


def _write_plan(unfinished: Path, plan: Manifest) -> None:
    write_whole(unfinished / PLAN, json.dumps(plan.head(), indent=1).encode())


def prepare(options: argparse.Namespace, workers: int) -> None:
    """Create the missing prepared data, and the manifest last."""
    folder: Path = options.output
    unfinished = folder / UNFINISHED
    if folder.is_dir() and not ({MANIFEST, UNFINISHED, LOCK} & set(names := os.listdir(folder))) and names:
        raise ValueError(f"{folder} is not empty, and contains no prepared data; give another --output")
    begin = time.monotonic()
    plan, parts, sources, encoder = plan_of(options)
    if not parts:
        raise ValueError("the data have no document")
    unfinished.mkdir(parents=True, exist_ok=True)
    with _exclusive_lock(folder):
        work = PrepareWork(folder, unfinished, plan, parts, sources, encoder)
        if not _begin(folder, unfinished, plan, work):
            _remove_unfinished(folder)
            print(f"{folder} is finished already")
            return
        size = sum(part.bytes for part in parts)
        print(f"{size / 1e6:,.1f} MB of text in {len(parts)} parts, {min(workers, len(parts))} workers", flush=True)
        run(work, len(parts), workers, size)
        shards = [shard for index in range(len(parts)) for shard in work.shards(index) or ()]
        # Training shards come first, each split in the order of its source.
        shards.sort(key=lambda shard: (shard.split != TRAIN, shard.name))
        if not any(shard.split == TRAIN for shard in shards):
            raise ValueError("the data have no document with text to train on")
        finished = Manifest(**{**vars(plan), "shards": tuple(shards)})
        finished.write(folder)
        _remove_unfinished(folder)
    _print_summary(finished, folder, time.monotonic() - begin)


def _remove_unfinished(folder: Path) -> None:
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    (folder / LOCK).unlink(missing_ok=True)


def _print_summary(manifest: Manifest, folder: Path, seconds: float | None = None) -> None:
    for split in (TRAIN, VALIDATION):
        documents, tokens, n_bytes = (manifest.total(split, what) for what in ("documents", "tokens", "bytes"))
        rate = f", {n_bytes / tokens:.3f} bytes of text per token" if tokens else ""
        print(f"{split}: {documents:,} documents, {tokens:,} tokens{rate}, {len(manifest.of(split))} shards")
    if not manifest.of(VALIDATION):
        print("no document is held out for validation; --validation sets the share")
    print(f"{folder} is complete" if seconds is None else f"{folder} was prepared in {seconds:,.1f} s")


def verify(folder: Path, workers: int) -> None:
    """Read all files of finished data. Raises ValueError with the first damaged shard."""
    manifest = Manifest.read(folder)
    dtype = np.dtype(manifest.dtype)

    def check(index: int, count: Any) -> None:
        shard = manifest.shards[index]
        if wrong := damage(folder, shard, dtype):
            raise ValueError(f"{wrong}; delete {shard.name}.bin, and run the prepare command again")
        count(shard.documents, shard.tokens, shard.bytes)

    run(check, len(manifest.shards), workers, sum(shard.bytes for shard in manifest.shards))
    _print_summary(manifest, folder)


def run(work: Callable[[int, Callable[[int, int, int], None]], None], n: int, workers: int, total: int) -> None:
    """Call `work(index, count)` for every index below `n` in `workers` processes.

    `work` reports completed documents, tokens and bytes of text to `count`. `total` are the bytes of all text. Raises
    ValueError if a worker failed, with its message, or died. The others are terminated.
    """
    context = multiprocessing.get_context("fork")  # Workers inherit sources and tokenizer.
    next_index, errors = context.Value("q", 0), context.SimpleQueue()
    workers = max(1, min(workers, n))
    counts = context.RawArray("q", 3 * workers)
    parent = os.getpid()

    def body(slot: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def count(documents: int, tokens: int, n_bytes: int) -> None:
            for i, more in enumerate((documents, tokens, n_bytes)):
                counts[3 * slot + i] += more
            if os.getppid() != parent:
                os._exit(1)

        try:
            while True:
                with next_index.get_lock():
                    index, next_index.value = next_index.value, next_index.value + 1
                if index >= n:
                    return
                work(index, count)
        except ValueError as error:
            errors.put(one_line(error))
        except Exception:
            traceback.print_exc()
            errors.put("a worker failed; its traceback is above")
        sys.exit(1)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        processes = [context.Process(target=body, args=(slot,), daemon=True) for slot in range(workers)]
        for process in processes:
            process.start()
    begin = last_report = time.monotonic()
    try:
        while alive := [process.sentinel for process in processes if process.exitcode is None]:
            wait(alive, timeout=SECONDS)
            _check(processes, errors)
            if time.monotonic() - last_report >= SECONDS:
                last_report = time.monotonic()
                print(_progress([sum(counts[i::3]) for i in range(3)], last_report - begin, total), flush=True)
        _check(processes, errors)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _check(processes: list[Any], errors: Any) -> None:
    for process in processes:
        if process.exitcode not in (None, 0):
            if not errors.empty():
                raise ValueError(errors.get())
            code = process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ValueError(f"a worker ended with {how}; out of memory? {RESUME_HINT}, with fewer --workers")


def _progress(done: list[int], seconds: float, total: int) -> str:
    documents, tokens, n_bytes = done
    share = n_bytes / max(1, total)
    left = f"{duration_text(seconds * (1 - share) / share)} left" if share else "time left unknown"
    return (
        f"{100 * share:5.1f} %  {documents:,} documents  {tokens / 1e6:,.1f} M tokens  "
        f"{tokens / seconds / 1e6:.2f} M tokens/s  {left}"
    )


def _checked(options: argparse.Namespace) -> int:
    """Check all options, and return the number of workers."""
    makes = options.dataset or options.path
    if not makes and not options.verify:
        raise ValueError("give --dataset NAME or --path PATH, or --verify for data that are prepared already")
    if makes and options.tokenizer is None:
        raise ValueError("give --tokenizer FOLDER")
    if options.shard_tokens < 1:
        raise ValueError(f"--shard-tokens {options.shard_tokens}; it must be 1 or more")
    if options.validation is not None and not 0 <= options.validation < 1:
        raise ValueError(f"--validation {options.validation}; it must be 0 or more, and less than 1")
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        raise ValueError(f"--workers {workers}; it must be 1 or more")
    return workers


def main(arguments: Sequence[str] | None = None) -> int:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # This command runs processes instead.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        options = _parser().parse_args(arguments)
        workers = _checked(options)
        if options.dataset or options.path:
            prepare(options, workers)
        if options.verify:
            verify(options.output, workers)
    except (ValueError, OSError) as error:
        message = one_line(error)
        for key, option in _OPTIONS.items():
            message = message.replace(key, option)
        print(f"prepare: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prepare: stopped; {RESUME_HINT}", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The batches that every validation of a run reads: so many of them, or a whole split in equal shares."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.datasets import check_dataset
from torchtitan_scape.data.exhaustion import raise_together
from torchtitan_scape.data.loader import text_loader
from torchtitan_scape.data.prepared import NAME, Split, open_split
from torchtitan_scape.data.simulated import Batch, SimulatedDataLoader
from torchtitan_scape.titan.data import BaseTokenizer

logger = logging.getLogger(__name__)

WHOLE = -1  # as validation.steps
Rows = tuple[torch.Tensor, torch.Tensor]


class FixedBatches:
    """The first batches of a loader, read once, and the same ones at every iteration.

    Args:
        batches: yields `(inputs, labels)`.
        n_batches: how many to keep, in host memory.

    Attributes:
        rows: sequences of each batch.
        bytes_per_token: of text, UTF-8; None where nobody has counted.

    Raises:
        ValueError: `batches` ends before `n_batches`.
    """

    bytes_per_token: float | None = None

    def __init__(self, batches: Iterable[Batch], n_batches: int) -> None:
        self._batches = list(islice(batches, n_batches))
        if len(self._batches) < n_batches:
            raise ValueError(f"{n_batches} batches wanted, but the data set gives {len(self._batches)}")
        self.rows = [len(labels) for _, labels in self._batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self._batches:
            # Copies: validate() writes device tensors into the dict, context parallelism shards in place.
            yield {name: tensor.clone() for name, tensor in inputs.items()}, labels.clone()


class PreparedBatches:
    """As FixedBatches, of prepared data, which are read when they are asked for.

    samples: of each batch.
    """

    def __init__(self, data: Split, samples: Sequence[Sequence[int]], seq_len: int) -> None:
        self.bytes_per_token = data.bytes_per_token
        self.rows = [len(batch) for batch in samples]
        self._data, self._samples, self._seq_len = data, samples, seq_len

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Batch]:
        return (self._data.batch(samples, self._seq_len) for samples in self._samples)


def validation_batches(
    config: JobConfig, world: int, rank: int, tokenizer: BaseTokenizer, simulated: int
) -> FixedBatches | PreparedBatches:
    """This rank's batches, with those of the replicas that it plays: as many on every rank. A collective call.

    Args:
        config: its section `validation` is read; `steps` is a reader's number of batches, -1 for the whole split.
        world, rank: number of data-parallel ranks, and this one's.
        simulated: replicas of this rank; replica k is reader k world + rank.

    Raises:
        ValueError: on every rank; the data are unusable, end before `steps`, or have fewer sequences than readers.
    """
    validation, readers = config.validation, [k * world + rank for k in range(simulated)]
    if validation.steps == 0 or validation.steps < WHOLE:
        raise ValueError(
            f"validation.steps: {validation.steps}; give the number of batches, e.g. 10, or -1 for the whole split"
        )
    prepared = validation.dataset.lower() == NAME
    if not prepared:
        check_dataset("validation", validation, world * simulated)
    text = [(validation, tokenizer, reader, world * simulated, config.data.border) for reader in readers]
    error: ValueError | None = None
    found: FixedBatches | PreparedBatches | list[Rows] = []
    try:
        if prepared:
            found = _prepared(config, tokenizer, readers, world * simulated)
        elif validation.steps == WHOLE:
            found = [_joined(text_loader(*arguments, passes=1), validation.seq_len) for arguments in text]
        else:
            loaders = [text_loader(*arguments) for arguments in text]
            found = FixedBatches(SimulatedDataLoader(loaders), validation.steps * simulated)
    except ValueError as caught:  # a share without text, say, is one rank's alone
        error = caught
    raise_together(error, "reading the validation data")
    if not isinstance(found, list):
        return found
    size = validation.local_batch_size
    cut = [
        ({"input": inputs}, labels)
        for rows in _equal_shares(dict(zip(readers, found, strict=True)))
        for inputs, labels in zip(*(part.split(size) for part in rows), strict=True)
    ]
    return FixedBatches(cut, len(cut))


def _joined(batches: Iterable[Batch], seq_len: int) -> Rows:
    """Inputs and labels of all sequences, int64 of shape (sequences, seq_len)."""
    all_of = list(batches)
    none = torch.empty(0, seq_len, dtype=torch.int64)
    inputs = torch.cat([none, *(inputs["input"] for inputs, _ in all_of)])
    return inputs, torch.cat([none, *(labels for _, labels in all_of)])


def _equal_shares(own: dict[int, Rows]) -> list[Rows]:
    """As many sequences for every reader: documents differ in length, and who has more gives it to those with less.

    A collective call.

    own: what this rank's readers have read, by reader.
    """
    counts = _of_all_readers({reader: len(labels) for reader, (_, labels) in own.items()})
    share, left = divmod(sum(counts.values()), len(counts))
    _say_what_is_read(share, len(counts), left)
    # Copies: a part of a tensor is sent with all of it.
    more = _of_all_readers({reader: [part[share:].clone() for part in rows] for reader, rows in own.items()})
    given = [torch.cat(parts) for parts in zip(*(more[reader] for reader in sorted(more)), strict=True)]
    found = []
    for reader, rows in own.items():
        begin, end = (sum(max(0, share - counts[r]) for r in range(last)) for last in (reader, reader + 1))
        inputs, labels = (torch.cat([part[:share], rest[begin:end]]) for part, rest in zip(rows, given, strict=True))
        found.append((inputs, labels))
    return found


def _of_all_readers(own: dict[int, Any]) -> dict[int, Any]:
    """By reader; ranks of one data-parallel index tell the same."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return dict(chain.from_iterable(of.items() for of in found))


def _say_what_is_read(share: int, readers: int, left: int, tail: int = 0) -> None:
    """Raises ValueError where a reader's share is nothing."""
    if share == 0:
        raise ValueError(
            f"validation.steps = {WHOLE}: the validation data have less than one sequence for each of {readers} "
            "readers; give more text, or set validation.seq_len lower"
        )
    rest = f"; {left} sequences" + (f" and {tail} tokens" if tail else "") + " are left over" if left or tail else ""
    logger.info(f"Validation reads the whole split: {share * readers:,} sequences, {share:,} a reader{rest}")


def _prepared(config: JobConfig, tokenizer: BaseTokenizer, readers: list[int], world: int) -> PreparedBatches:
    validation = config.validation
    size, seq_len = validation.local_batch_size, validation.seq_len
    data = open_split("validation", validation, tokenizer, config)
    n = data.samples(seq_len)
    if validation.steps == WHOLE:
        share = n // world
        _say_what_is_read(share, world, n - share * world, data.tokens - n * seq_len - 1 if n else 0)
        shares = [range(reader * share, (reader + 1) * share) for reader in readers]
        return PreparedBatches(data, [part[i : i + size] for part in shares for i in range(0, share, size)], seq_len)
    if n < (wanted := validation.steps * world * size):
        raise ValueError(
            f"the validation split of {validation.dataset_path!r} has {n} samples of {seq_len} tokens, and "
            f"validation.steps = {validation.steps} wants {wanted}; set it lower, or to {WHOLE} for the whole split"
        )
    begins = [(step * world + reader) * size for step in range(validation.steps) for reader in readers]
    return PreparedBatches(data, [range(begin, begin + size) for begin in begins], seq_len)


def by_rows(loss: Callable[..., torch.Tensor], rows: Sequence[int]) -> Callable[..., torch.Tensor]:
    """`loss` of a batch, times what it has of a mean batch's rows.

    TorchTitan takes the mean of batches' means. With this it is the mean over tokens where the last batch is smaller.
    """
    mean = sum(rows) / len(rows)

    def weighted(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(predictions, labels) * (len(labels) / mean)

    return loss if len(set(rows)) == 1 else weighted

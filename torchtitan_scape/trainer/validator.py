"""Validation on a fixed number of batches, or on a whole split in equal shares, with perplexity and bits per byte."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.loader import Batch, text_loader
from torchtitan_scape.data.prepared import NAME, Split, open_split
from torchtitan_scape.data.read_ahead import SimulatedDataLoader
from torchtitan_scape.titan.components import MetricsProcessor, Validator
from torchtitan_scape.titan.config import Validation
from torchtitan_scape.titan.data import BaseDataLoader, BaseTokenizer
from torchtitan_scape.titan.distributed import ParallelDims, device_type
from torchtitan_scape.titan.patches import no_validation_loader
from torchtitan_scape.topology.groups import gather_lists
from torchtitan_scape.trainer.parallelize import from_last_stage

logger = logging.getLogger(__name__)

WHOLE = -1  # Value of validation.steps for the whole split.
Rows = tuple[torch.Tensor, torch.Tensor]


class FixedBatches:
    """The first batches of a loader, read once and yielded at every iteration. `rows` are the sequences of each."""

    bytes_per_token: float | None = None

    def __init__(self, batches: Iterable[Batch], n_batches: int) -> None:
        self._batches = list(islice(batches, n_batches))
        if len(self._batches) < n_batches:
            raise ValueError(f"{n_batches} batches requested, but the dataset has {len(self._batches)}")
        self.rows = [len(labels) for _, labels in self._batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self._batches:
            # Copies, because validate() writes device tensors into the dict and context parallelism shards in place.
            yield {name: tensor.clone() for name, tensor in inputs.items()}, labels.clone()


class PreparedBatches:
    """Like FixedBatches, for the given samples of each batch of prepared data, which are read on demand.

    `bytes_per_token` is known of a whole split only: documents differ in it.
    """

    def __init__(
        self, data: Split, samples: Sequence[Sequence[int]], seq_len: int, bytes_per_token: float | None = None
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.rows = [len(batch) for batch in samples]
        self._data, self._samples, self._seq_len = data, samples, seq_len

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Batch]:
        return (self._data.batch(samples, self._seq_len) for samples in self._samples)


def validation_batches(
    config: JobConfig, world: int, rank: int, tokenizer: BaseTokenizer, simulated: int
) -> FixedBatches | PreparedBatches:
    """Return the batches of this rank and its simulated replicas; their number is equal on all ranks. Collective.

    `validation.steps` is the number of batches per reader, -1 for the whole split. Replica k of a rank is reader k *
    world + rank. Raises ValueError on every rank.
    """
    validation, readers = config.validation, [k * world + rank for k in range(simulated)]
    if validation.steps == 0 or validation.steps < WHOLE:
        raise ValueError(
            f"validation.steps: {validation.steps}; give the number of batches, e.g. 10, or -1 for the whole split"
        )
    prepared = validation.dataset.lower() == NAME
    own = config.training.text_column, tokenizer, config.data.border
    text = [(validation, *own, reader, world * simulated) for reader in readers]
    errors: list[str] = []
    cause: ValueError | None = None
    data: FixedBatches | PreparedBatches | list[Rows] = []
    tails: list[int] = []
    try:
        if prepared:
            data = _prepared(config, tokenizer, readers, world * simulated)
        elif validation.steps == WHOLE:
            loaders = [text_loader(*arguments, passes=1) for arguments in text]
            data = [_concatenate(loader, validation.seq_len) for loader in loaders]
            tails = [loader.tokens_left() for loader in loaders]
        else:
            loaders = [text_loader(*arguments) for arguments in text]
            data = FixedBatches(SimulatedDataLoader(loaders), validation.steps * simulated)
    except ValueError as error:  # May occur on one rank only, for example for a share without text.
        cause = error
        errors.append(f"{error} (rank {dist.get_rank()})" if dist.is_initialized() else str(error))
    if errors := gather_lists(dist.group.WORLD, errors):
        raise ValueError(errors[0]) from cause
    if not isinstance(data, list):
        return data
    size = validation.local_batch_size
    batches = [
        ({"input": inputs}, labels)
        for rows in _equal_shares(dict(zip(readers, data, strict=True)), dict(zip(readers, tails, strict=True)))
        for inputs, labels in zip(*(part.split(size) for part in rows), strict=True)
    ]
    return FixedBatches(batches, len(batches))


def validated_data(validation: Validation, readers: int) -> dict[str, Any]:
    """Return the values that determine the validated text: losses of other text are not compared.

    A whole split is the same for any number of readers, except for the few sequences that are left over.
    """
    compared = ("dataset", "dataset_path", "steps", "seq_len")
    data = {key: getattr(validation, key) for key in compared}
    if validation.steps != WHOLE:
        data |= {"local_batch_size": validation.local_batch_size, "readers": readers}
    return data


def _concatenate(batches: Iterable[Batch], seq_len: int) -> Rows:
    """Return inputs and labels of all sequences, int64 of shape (sequences, seq_len)."""
    batch_list = list(batches)
    empty = torch.empty(0, seq_len, dtype=torch.int64, device="cpu")
    inputs = torch.cat([empty, *(inputs["input"] for inputs, _ in batch_list)])
    return inputs, torch.cat([empty, *(labels for _, labels in batch_list)])


def _equal_shares(local_rows: dict[int, Rows], tails: dict[int, int]) -> list[Rows]:
    """Move sequences between readers until each has the same number, because documents differ in length. Collective.

    Args:
        local_rows: The sequences of each reader of this rank.
        tails: Its tokens that fill no sequence, for the log.
    """
    sizes = _gather_by_reader({reader: (len(labels), tails[reader]) for reader, (_, labels) in local_rows.items()})
    counts = {reader: count for reader, (count, _) in sizes.items()}
    share, left = divmod(sum(counts.values()), len(counts))
    _log_whole_split(share, len(counts), left, sum(tail for _, tail in sizes.values()))
    # Copies, because a view is sent with its whole storage.
    surplus = _gather_by_reader(
        {reader: [part[share:].clone() for part in rows] for reader, rows in local_rows.items()}
    )
    redistributed = [torch.cat(parts) for parts in zip(*(surplus[reader] for reader in sorted(surplus)), strict=True)]
    shares = []
    for reader, rows in local_rows.items():
        begin, end = (sum(max(0, share - counts[r]) for r in range(last)) for last in (reader, reader + 1))
        inputs, labels = (
            torch.cat([part[:share], rest[begin:end]]) for part, rest in zip(rows, redistributed, strict=True)
        )
        shares.append((inputs, labels))
    return shares


def _gather_by_reader(local_values: dict[int, Any]) -> dict[int, Any]:
    """Gather values by reader from all ranks. Ranks of one data-parallel index send equal values."""
    return dict(gather_lists(dist.group.WORLD, list(local_values.items())))


def _log_whole_split(share: int, readers: int, left: int, tail: int = 0) -> None:
    """Log the size of the split. Raises ValueError if a reader's share is empty."""
    if share == 0:
        raise ValueError(
            f"validation.steps = {WHOLE}: the validation data have less than one sequence for each of {readers} "
            "readers; provide more text, or lower validation.seq_len"
        )
    rest = f"; {left} sequences" + (f" and {tail} tokens" if tail else "") + " are left over" if left or tail else ""
    logger.info(f"Validation reads the whole split: {share * readers:,} sequences, {share:,} per reader{rest}")


def _prepared(config: JobConfig, tokenizer: BaseTokenizer, readers: list[int], world: int) -> PreparedBatches:
    validation = config.validation
    size, seq_len = validation.local_batch_size, validation.seq_len
    data = open_split("validation", validation.dataset_path or "", validation, tokenizer, config)
    n = data.samples(seq_len)
    if validation.steps == WHOLE:
        share = n // world
        _log_whole_split(share, world, n - share * world, data.tokens - n * seq_len - 1 if n else 0)
        shares = [range(reader * share, (reader + 1) * share) for reader in readers]
        batches = [part[i : i + size] for part in shares for i in range(0, share, size)]
        return PreparedBatches(data, batches, seq_len, data.bytes_per_token)
    if n < (wanted := validation.steps * world * size):
        raise ValueError(
            f"the validation split of {validation.dataset_path!r} has {n} samples of {seq_len} tokens, and "
            f"validation.steps = {validation.steps} needs {wanted}; {_fix(n, world, size, data.tokens)}"
        )
    begins = [(step * world + reader) * size for step in range(validation.steps) for reader in readers]
    return PreparedBatches(data, [range(begin, begin + size) for begin in begins], seq_len)


def _fix(samples: int, readers: int, batch: int, tokens: int) -> str:
    """Return the values with which a split that is too small can be used."""
    more = "hold out more documents with prepare --validation"
    if fewer := samples // (readers * batch):
        return f"set validation.steps to at most {fewer}, or to {WHOLE} for the whole split"
    if samples >= readers:
        return f"set validation.steps = {WHOLE} for the whole split, or {more}"
    if (longest := (tokens - 1) // readers) > 0:
        return f"set validation.steps = {WHOLE} and validation.seq_len to at most {longest}, or {more}"
    return f"{more}, or set --validation.no-enable"


def by_rows(loss: Callable[..., torch.Tensor], rows: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Weight the loss of a batch by its number of rows, relative to the mean.

    TorchTitan takes the mean of the batches' means. With this weight it is the mean over tokens, even if the last batch
    is smaller.
    """
    mean = sum(rows) / len(rows)

    def weighted(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(predictions, labels) * (len(labels) / mean)

    return loss if len(set(rows)) == 1 else weighted


def figures_of(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """Return "perplexity" and, if `bytes_per_token` is known, "bits_per_byte" of a loss in nats per token.

    Bits per byte are comparable between tokenizers: loss / ln(2) / bytes_per_token, in bytes of UTF-8 text.
    """
    figures = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
    if bytes_per_token:
        figures["bits_per_byte"] = loss / math.log(2) / bytes_per_token
    return figures


class _ValidationMetrics:
    """Replacement of the trainer's MetricsProcessor for the validator.

    TorchTitan's validator adds its tokens to the trainer's count, and logging resets the count and the clock, so that
    the throughputs of both are wrong. This class has separate counters, stores the loss, and excludes the validation
    from the trainer's clock.
    """

    def __init__(self, processor: MetricsProcessor, parallel_dims: ParallelDims, bytes_per_token: float | None) -> None:
        self.processor, self.parallel_dims, self.bytes_per_token = processor, parallel_dims, bytes_per_token
        self.last_loss: float | None = None
        self.last_step = 0
        self.figures: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self.ntokens_since_last_log = 0
        self._started = time.perf_counter()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        (loss,) = from_last_stage(self.parallel_dims, [float(loss)], torch.device(device_type))
        self.last_loss, self.last_step = loss, step
        self.figures = figures_of(self.last_loss, self.bytes_per_token)
        processor = self.processor
        n_tokens, last_log = processor.ntokens_since_last_log, processor.time_last_log
        processor.ntokens_since_last_log, processor.time_last_log = self.ntokens_since_last_log, self._started
        shown = {f"validation_metrics/{name}": value for name, value in self.figures.items()}
        processor.log_validation(loss=loss, step=step, extra_metrics={**(extra_metrics or {}), **shown})
        figures = "  ".join(f"{name.replace('_', ' ')}: {value:.4f}" for name, value in self.figures.items())
        logger.info(f"validate step: {step:2}  {figures}")
        processor.ntokens_since_last_log = n_tokens
        processor.time_last_log = last_log + (time.perf_counter() - self._started)


class FixedValidator(Validator):
    """TorchTitan's validator on fixed batches: `validation.steps` of them, or the entire split for -1.

    The parent continues to read where the last validation stopped, so that two losses of a run come from different
    text. This class selects its batches at construction; with `simulated` > 1 those of all simulated replicas. Loss
    (nats per token, over all ranks), step and `figures_of` are those of the last validation.

    Attributes:
        shared_weights: a context manager in which the model contains the weights to validate.
        validated: called after a validation with its step and loss.
    """

    validation_dataloader: BaseDataLoader
    shared_weights: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    validated: Callable[[int, float], None] = staticmethod(lambda step, loss: None)

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        *,
        parallel_dims: ParallelDims,
        metrics_processor: MetricsProcessor,
        simulated: int = 1,
        **kwargs: Any,
    ) -> None:
        batches = validation_batches(job_config, dp_world_size, dp_rank, tokenizer, simulated)
        self._metrics = _ValidationMetrics(metrics_processor, parallel_dims, batches.bytes_per_token)
        # The parent reads the number of batches from the config.
        counted: Any = replace(
            cast(Any, job_config), validation=replace(cast(Any, job_config.validation), steps=len(batches))
        )
        with no_validation_loader():
            super().__init__(
                job_config=counted,
                dp_world_size=dp_world_size,
                dp_rank=dp_rank,
                tokenizer=tokenizer,
                parallel_dims=parallel_dims,
                metrics_processor=cast(MetricsProcessor, self._metrics),
                **kwargs,
            )
        self.validation_dataloader = cast(BaseDataLoader, batches)  # validate() only iterates over it
        self.loss_fn: Any = by_rows(self.loss_fn, batches.rows)
        if (context := self.parallel_dims.cp) > 1:
            # The parent divides the loss of all ranks by the tokens of one part of each sequence.
            sum_of_parts = self.loss_fn
            self.loss_fn = lambda *arguments: sum_of_parts(*arguments) / context

    @property
    def last_loss(self) -> float | None:
        return self._metrics.last_loss

    @property
    def last_step(self) -> int:
        return self._metrics.last_step

    @property
    def figures(self) -> dict[str, float]:
        return self._metrics.figures

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate, log, and store the loss in `last_loss`. The trainer's throughput excludes the validation."""
        self._metrics.start()
        with self.shared_weights():
            super().validate(model_parts, step)
        self.validated(step, float(self._metrics.last_loss or 0.0))

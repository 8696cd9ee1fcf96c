"""Validation on the same batches every time."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, cast

from torch import nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig

from torchtitan_scape.data.datasets import check_dataset
from torchtitan_scape.data.exhaustion import raise_together
from torchtitan_scape.data.loader import text_loader
from torchtitan_scape.data.simulated import Batch, SimulatedDataLoader


class FixedBatches:
    """The first batches of a loader, read once, and the same ones at every iteration.

    Args:
        batches: yields `(inputs, labels)`.
        n_batches: how many to keep, in host memory.

    Raises:
        ValueError: `batches` ends before `n_batches`.
    """

    def __init__(self, batches: Iterable[Batch], n_batches: int) -> None:
        self._batches = list(islice(batches, n_batches))
        if len(self._batches) < n_batches:
            raise ValueError(f"{n_batches} batches wanted, but the data set gives {len(self._batches)}")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self._batches:
            # Copies: validate() writes device tensors into the dict, context parallelism shards in place.
            yield {name: tensor.clone() for name, tensor in inputs.items()}, labels.clone()


class _ValidationMetrics:
    """What the validator sees in place of the trainer's MetricsProcessor.

    TorchTitan's validator adds its tokens to the trainer's count, and logging them resets count and clock, so
    that both throughputs are wrong. This one counts apart, keeps the loss, and stops the trainer's clock
    meanwhile.
    """

    def __init__(self, processor: MetricsProcessor) -> None:
        self.processor = processor
        self.last_loss: float | None = None
        self.last_step = 0
        self.start()

    def start(self) -> None:
        self.ntokens_since_last_log = 0
        self._started = time.perf_counter()

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        self.last_loss, self.last_step = float(loss), step
        processor = self.processor
        n_tokens, last_log = processor.ntokens_since_last_log, processor.time_last_log
        processor.ntokens_since_last_log, processor.time_last_log = self.ntokens_since_last_log, self._started
        processor.log_validation(loss=loss, step=step, extra_metrics=extra_metrics)
        processor.ntokens_since_last_log = n_tokens
        processor.time_last_log = last_log + (time.perf_counter() - self._started)


class FixedValidator(Validator):
    """TorchTitan's validator on the same `validation.steps` batches each time.

    The parent goes on reading where the last validation stopped, so that two losses of one run come from
    different text. This one reads its batches at construction; with `simulated` > 1 those of as many replicas.

    Attributes:
        last_loss: mean loss per token of the last validation in nats, over all ranks; None before the first.
            With pipeline parallelism it is true on the last stage only.
        last_step: training step of the last validation, 0 before the first.
        model_shown: inside it the model has the parameters that are to be validated.

    Raises:
        ValueError: as `build_dataloader`, for the section `validation`; or
            `validation.steps` is not positive.
    """

    validation_dataloader: BaseDataLoader
    model_shown: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        *,
        metrics_processor: MetricsProcessor,
        simulated: int = 1,
        **kwargs: Any,
    ) -> None:
        validation = job_config.validation
        if validation.steps <= 0:
            raise ValueError(
                f"validation.steps: {validation.steps} would read all the data, and ranks with unequal batch "
                "counts would wait for each other for ever; give the number of batches, e.g. 10"
            )
        readers = dp_world_size * simulated
        check_dataset("validation", validation, readers)
        self._metrics = _ValidationMetrics(metrics_processor)
        if simulated > 1:  # the batches of all replicas, one after the other
            job_config = replace(job_config, validation=replace(validation, steps=validation.steps * simulated))
        super().__init__(
            job_config=job_config,
            dp_world_size=readers,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            metrics_processor=cast(MetricsProcessor, self._metrics),
            **kwargs,
        )
        # The parent's own loader, which has read nothing yet, does not pass over empty documents.
        loaders = [
            text_loader(validation, tokenizer, replica * dp_world_size + dp_rank, readers)
            for replica in range(simulated)
        ]
        error: ValueError | None = None
        try:
            batches = FixedBatches(SimulatedDataLoader(loaders), job_config.validation.steps)
        except ValueError as caught:  # a share without text, say, is one rank's alone
            error = caught
        raise_together(error, "reading the validation data")
        self.validation_dataloader = cast(BaseDataLoader, batches)  # validate() only iterates over it

    @property
    def last_loss(self) -> float | None:
        return self._metrics.last_loss

    @property
    def last_step(self) -> int:
        return self._metrics.last_step

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validates, logs, and keeps the loss in `last_loss`; the trainer's throughput does not count it."""
        self._metrics.start()
        with self.model_shown():
            super().validate(model_parts, step)


def build_validator(**kwargs: Any) -> FixedValidator:
    """Builds a `FixedValidator` from the keyword arguments that TorchTitan's trainer passes."""
    return FixedValidator(**kwargs)

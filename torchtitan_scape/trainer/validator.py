"""Validation on a fixed set of batches, with perplexity and bits per byte."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.validation_batches import by_rows, validation_batches
from torchtitan_scape.titan.components import MetricsProcessor, Validator
from torchtitan_scape.titan.data import BaseDataLoader, BaseTokenizer
from torchtitan_scape.titan.distributed import ParallelDims, device_type
from torchtitan_scape.titan.patches import no_validation_loader
from torchtitan_scape.trainer.parallelize import from_last_stage

logger = logging.getLogger(__name__)


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

"""Training on prepared data: the tokens of all documents, concatenated, split into samples, shuffled every pass.

See splits.py for the samples and their order. After C samples, reader r of R takes the samples C + (a R + r) b + j of a
step's global batch, for its micro-batch a and row j of b. The global batch is therefore the same set for every R, and
the position is one number, independent of the number of ranks and replicas.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.files import parse_json
from torchtitan_scape.data.blend import Blend, open_training
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.data.splits import Split
from torchtitan_scape.titan.data import BaseDataLoader, BaseTokenizer

logger = logging.getLogger(__name__)

FORMAT = 1
# Indices permuted per call. A call costs 0.15 ms, for 4 indices as well as for hundreds.
CHUNK_INDICES = 4096


class PreparedDataLoader(BaseDataLoader):
    """Data loader of one rank, which reads for `simulated` replicas in turn.

    Its state is {"position": JSON of format, data (the manifest's digest), samples, seq_len, seed, consumed}, and for
    a pair also `sampled`. Between two steps it is equal on all ranks. The seed is restored from it.

    Args:
        data: The training split, or a blend of several.
        batch, seq_len: Rows and sequence length of a micro-batch.
        seed: Seed of the permutation.
        rank, world: This data-parallel rank and their number. Replica k of this rank is reader k * world + rank.
        simulated: Replicas of this rank.
        each: Micro-batches of a reader per step.
        passes: Passes over the data, 0 for no end. The last step is the last one whose samples are all within them.
        pin_memory: Copy batches to pinned memory.

    Raises:
        ValueError: The split has fewer samples than a global batch.
    """

    def __init__(
        self,
        data: Split | Blend,
        batch: int,
        seq_len: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        simulated: int = 1,
        each: int = 1,
        passes: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.data, self.batch, self.seq_len, self.pin_memory = data, batch, seq_len, pin_memory
        self.seed, self.passes, self.samples = seed, passes, data.samples(seq_len)
        self.rank, self.world, self.simulated, self.each = rank, world, simulated, each
        self.global_batch = batch * world * simulated * each
        if self.samples < self.global_batch:
            raise ValueError(
                f"the prepared data have {self.samples} samples of {seq_len} tokens in this split, fewer than a global "
                f"batch of {self.global_batch}; prepare more text, or reduce the batch size or the sequence length"
            )
        self._start_samples = self._batches_yielded = (
            0  # Samples consumed at the start; batches yielded by this rank since.
        )

    @property
    def consumed(self) -> int:
        """Number of samples that all readers consumed in complete steps."""
        return self._start_samples + self._batches_yielded // (self.each * self.simulated) * self.global_batch

    def __iter__(self) -> Iterator[Batch]:
        per_step = self.each * self.simulated
        while True:
            n = max(1, CHUNK_INDICES // self.batch)
            if self.passes:  # Yield only complete steps.
                steps = (self.passes * self.samples - self._start_samples) // self.global_batch
                n = min(n, steps * per_step - self._batches_yielded)
            if n <= 0:
                return
            for samples in self._samples_of_batches(self._batches_yielded, n):
                inputs, labels = self.data.batch(samples, self.seq_len)
                if self.pin_memory:
                    inputs, labels = {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
                self._batches_yielded += 1
                yield inputs, labels

    def _samples_of_batches(self, first: int, n: int) -> list[list[int]]:
        """Return the samples of this rank's batches `first` to `first` + n - 1."""
        step, within = np.divmod(np.arange(first, first + n), self.each * self.simulated)
        replica, micro = np.divmod(within, self.each)
        reader = replica * self.world + self.rank
        rows = micro * self.world * self.simulated + reader
        begins = self._start_samples + step * self.global_batch + rows * self.batch
        indices = begins[:, None] + np.arange(self.batch)
        chosen: list[list[int]] = self.data.ordered(indices, self.seq_len, self.seed).tolist()
        return chosen

    def empty_documents(self) -> int:
        """Return 0: prepared data contain no empty documents."""
        return 0

    def _identity(self) -> dict[str, Any]:
        found = {"format": FORMAT, "data": self.data.digest, "samples": self.samples, "seq_len": self.seq_len}
        return {**found, "sampled": self.data.sampled} if self.data.sampled else found

    def state_dict(self) -> dict[str, Any]:
        return {"position": json.dumps({**self._identity(), "seed": self.seed, "consumed": self.consumed})}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return a placeholder with the keys of a checkpoint of this many readers."""
        return {"position": ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position.

        Raises:
            ValueError: The position is damaged, or belongs to other data or another sequence length.
        """
        if not state_dict:
            return
        restart = "restart the data with --checkpoint.exclude_from_loading=dataloader"
        try:
            found = parse_json(state_dict["position"])
            seed, consumed = int(found.pop("seed")), int(found.pop("consumed"))
            if self.data.sampled:
                found.setdefault("sampled", self.data.sampled)  # Older checkpoints lack it.
            readable = consumed >= 0 and found.keys() == self._identity().keys()
        except (TypeError, ValueError, KeyError, AttributeError):
            readable = False
        if not readable:
            raise ValueError(f"the data position in the checkpoint is not readable; {restart}")
        for key, expected in self._identity().items():
            if found[key] != expected:
                raise ValueError(
                    f"the checkpoint's position refers to prepared data with {key} = {found[key]}, but this run has "
                    f"{expected}; use the same data and sequence length, or {restart}"
                )
        self.seed, self._start_samples, self._batches_yielded = seed, consumed, 0

    def load_resharded(self, states: Sequence[dict[str, Any]]) -> str:
        """Restore the position of a run with another number of readers. Return a line for the log."""
        self.load_state_dict(states[0])
        return f"data: continuing after {self.consumed:,} samples"


def build_prepared(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, simulated: int = 1
) -> PreparedDataLoader:
    """Return the loader of `training.dataset = "prepared"`; see `datasets.build_dataloader`."""
    training = job_config.training
    data = open_training(training, tokenizer, job_config)
    loader = PreparedDataLoader(
        data,
        training.local_batch_size,
        training.seq_len,
        seed=job_config.debug.seed or 0,
        rank=dp_rank,
        world=dp_world_size,
        simulated=simulated,
        each=max(1, training.global_batch_size // (training.local_batch_size * dp_world_size * simulated)),
        passes=job_config.data.epochs,
        pin_memory=training.dataloader.pin_memory and torch.accelerator.is_available(),
    )
    logger.info(
        f"Prepared data: {data.tokens:,} tokens, {loader.samples:,} samples of {training.seq_len}, "
        f"{loader.samples / loader.global_batch:,.0f} steps per pass"
    )
    return loader

"""Weighted blend of prepared data sets, in one global order.

Of every 65,536 consecutive samples each set provides its share, at even distances. A set's samples come in its own
shuffled order, pass after pass, so that a small set with a large weight is repeated. The sample at any index follows
from the index alone.
"""

import hashlib
import logging
from collections.abc import Sequence

import numpy as np
import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.indexed import Tokens
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.data.splits import Split, blend_of, open_split
from torchtitan_scape.titan.config import Training
from torchtitan_scape.titan.data import BaseTokenizer

logger = logging.getLogger(__name__)

PERIOD = 1 << 16  # Samples after which the pattern of sets repeats.


class Blend:
    """Several sets as one, with the interface of `Split` that the loader uses.

    Args:
        parts: Weight and tokens of each set; weights are relative.

    Attributes:
        counts: Samples of each set per period, int64.

    Raises:
        ValueError: A weight is so small that a set would never be read.
    """

    sampled, bytes_per_token = "", None

    def __init__(self, parts: Sequence[tuple[float, Split]]) -> None:
        self.parts = [part for _, part in parts]
        exact = np.array([weight for weight, _ in parts]) / sum(weight for weight, _ in parts) * PERIOD
        self.counts = exact.astype(np.int64)
        largest = np.argsort(self.counts - exact, kind="stable")  # Largest remainders first.
        self.counts[largest[: PERIOD - self.counts.sum()]] += 1
        if not self.counts.all():
            raise ValueError(f"the smallest weight is below 1/{PERIOD:,} of their sum; leave that set out")
        begins = np.concatenate([(np.arange(n) + 0.5) * PERIOD / n for n in self.counts])
        slots = np.argsort(begins, kind="stable")
        self._set = np.repeat(np.arange(len(parts)), self.counts)[slots]
        self._number = np.concatenate([np.arange(n) for n in self.counts])[slots]
        self.tokens = sum(part.tokens for part in self.parts)
        identity = repr([(int(n), part.digest, part.sampled) for n, part in zip(self.counts, self.parts, strict=True)])
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def samples(self, seq_len: int) -> int:
        """Return the number of samples of all sets."""
        return sum(part.samples(seq_len) for part in self.parts)

    def _begins(self, seq_len: int) -> Tokens:
        """Return the number of the first sample of each set; sets are numbered one after the other."""
        return np.cumsum([0, *(part.samples(seq_len) for part in self.parts)])[:-1]

    def ordered(self, indices: Tokens, seq_len: int, *key: int) -> Tokens:
        """Return the samples at these indices of the order; see `Split.ordered`."""
        period, slot = np.divmod(indices, PERIOD)
        sets = self._set[slot]
        within = period * self.counts[sets] + self._number[slot]
        samples = np.empty_like(within)
        for number, (part, begin) in enumerate(zip(self.parts, self._begins(seq_len), strict=True)):
            chosen = sets == number
            if chosen.any():
                samples[chosen] = part.ordered(within[chosen], seq_len, *key, number) + begin
        return samples

    def batch(self, samples: Sequence[int], seq_len: int) -> Batch:
        """Return inputs and labels of samples, int64 of shape (samples, seq_len)."""
        begins = self._begins(seq_len)
        sets = np.searchsorted(begins, samples, "right") - 1
        rows = [self.parts[n].batch([s - int(begins[n])], seq_len) for n, s in zip(sets, samples, strict=True)]
        return {"input": torch.cat([inputs["input"] for inputs, _ in rows])}, torch.cat([labels for _, labels in rows])


def open_training(config: Training, tokenizer: BaseTokenizer, job: JobConfig) -> Split | Blend:
    """Open the set, or the sets of a blend, that `training.dataset_path` names; see `open_split`.

    Raises:
        ValueError: As `open_split`; or a set of a blend has no sample, or `data.epochs` is set with a blend.
    """
    sets = blend_of(config.dataset_path or "")
    parts = [(weight, open_split("training", path, config, tokenizer, job)) for weight, path in sets]
    if len(parts) == 1:
        return parts[0][1]
    if job.data.epochs:
        raise ValueError("[data] epochs: the sets of a blend end at different steps; set training.steps instead")
    blend = Blend(parts)
    for (_, path), count, part in zip(sets, blend.counts, blend.parts, strict=True):
        samples = part.samples(config.seq_len)
        if not samples:
            raise ValueError(f"training.dataset_path: {path} has no sample of {config.seq_len} tokens")
        logger.info(
            f"Blend: {count / PERIOD:.2%} of the samples from {path}, {part.tokens:,} tokens, one pass in "
            f"{samples * PERIOD // count:,} samples"
        )
    return blend

"""Training on prepared data: the tokens of all documents, concatenated, split into samples, shuffled every pass.

Sample i of sequence length S consists of tokens [i S, i S + S]: S inputs and, shifted by one, S labels. A pass reads
the samples in the order of a keyed permutation, which needs no memory and can be evaluated at any index. After C
samples, reader r of R takes the samples C + (a R + r) b + j of a step's global batch, for its micro-batch a and row j
of b. The global batch is therefore the same set for every R, and the position is one number, independent of the number
of ranks and replicas.

Of every 65,536 consecutive samples of a blend each set provides its share, at even distances. A set's samples come in
its own shuffled order, pass after pass, so that a small set with a large weight is repeated.
"""

import bisect
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.files import parse_json
from torchtitan_scape.data.loader import Batch
from torchtitan_scape.data.manifest import (
    TRAIN,
    VALIDATION,
    Manifest,
    Tokens,
    map_tokens,
    open_pair,
    paths_of,
    tokenizer_facts,
)
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import BaseDataLoader, BaseTokenizer

logger = logging.getLogger(__name__)

FORMAT = 1
# Indices permuted per call. A call costs 0.15 ms, for 4 indices as well as for hundreds.
CHUNK_INDICES = 4096
PERIOD = 1 << 16  # Samples after which the pattern of sets repeats.
NAME = "prepared"
ROUNDS = 4
_U64 = np.uint64


def mixed(x: Tokens) -> Tokens:
    """Return a 64-bit hash of each number: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


class Permutation:
    """Keyed permutation of 0 to n - 1: four rounds of a Feistel network on the smallest square that contains n.

    A number is a pair of digits to the base ceil(sqrt(n)); a round adds a keyed function of one digit to the other.
    Results beyond n pass through the rounds again ("cycle walking", Black, Rogaway 2002): fewer than 2 sqrt(n) numbers.
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._side = _U64(math.isqrt(n - 1) + 1)
        self._keys = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest(), "<u8")

    def __call__(self, indices: Tokens) -> Tokens:
        """Return the permuted numbers at `indices`, both int64 from 0 to n - 1."""
        numbers = self._rounds(indices.astype(_U64))
        while (beyond := np.flatnonzero(numbers >= _U64(self.n))).size:
            numbers[beyond] = self._rounds(numbers[beyond])
        return numbers.astype(np.int64)

    def _rounds(self, numbers: Tokens) -> Tokens:
        left, right = np.divmod(numbers, self._side)
        for key in self._keys:
            left, right = right, (left + mixed(right + key) % self._side) % self._side
        return left * self._side + right


class Split:
    """The tokens of a split as one sequence.

    Args:
        shards: Path without extension, and tokens of unsigned type, of each shard; none is empty.
        digest: Digest of the manifest, or of a pair.
        entries: Entries of the tokenizer.
        bytes_per_token: UTF-8 bytes of text per token; None if unknown.
    """

    def __init__(
        self,
        shards: Sequence[tuple[str, Tokens]],
        digest: str,
        entries: int,
        bytes_per_token: float | None = None,
    ) -> None:
        self._names = [name for name, _ in shards]
        self._shards = [tokens for _, tokens in shards]
        self._ends = np.cumsum([0, *map(len, self._shards)]).tolist()[1:]
        self.tokens, self.digest, self.bytes_per_token = (self._ends or [0])[-1], digest, bytes_per_token
        self._entries = entries

    def samples(self, seq_len: int) -> int:
        return max(0, (self.tokens - 1) // seq_len)

    def ordered(self, indices: Tokens, seq_len: int, *key: int) -> Tokens:
        """Return the samples at these indices of the order of all passes with this key, int64 of any shape.

        Pass p begins at p times the number of samples.
        """
        n = self.samples(seq_len)
        passes, within = np.divmod(indices, n)
        samples = np.empty_like(within)
        for number in np.unique(passes):
            in_pass = passes == number
            samples[in_pass] = Permutation(n, *key, int(number))(within[in_pass])
        return samples

    def read(self, begin: int, end: int) -> Tokens:
        """Return tokens `begin` to `end` - 1. Raises ValueError if one is outside the tokenizer's vocabulary."""
        shard = bisect.bisect_right(self._ends, begin)
        first = self._ends[shard - 1] if shard else 0
        if end <= self._ends[shard]:
            tokens = self._shards[shard][begin - first : end - first]
        else:
            border = self._ends[shard]
            tokens = np.concatenate([self._shards[shard][begin - first :], self.read(border, end)])
        if tokens.max() >= self._entries:
            raise ValueError(
                f"{self._names[shard]}.bin has a token {tokens.max()} near number {begin - first}, but the tokenizer "
                f"has {self._entries} entries: the data are damaged, or were prepared with another tokenizer"
            )
        return tokens

    def batch(self, samples: Sequence[int], seq_len: int) -> Batch:
        """Return inputs and labels of samples, int64 of shape (samples, seq_len)."""
        inputs = np.empty((len(samples), seq_len), np.int64)
        labels = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            tokens = self.read(sample * seq_len, (sample + 1) * seq_len + 1)
            inputs[row], labels[row] = tokens[:-1], tokens[1:]
        return {"input": torch.from_numpy(inputs)}, torch.from_numpy(labels)


def blend_of(path: str) -> list[tuple[float, str]]:
    """Return weight and path of every set that `dataset_path` names: one, or several as in "0.7 a, 0.3 b"."""
    if "," not in path or Path(path).exists():
        return [(1.0, path)]
    sets = []
    for entry in path.split(","):
        weight, _, name = entry.strip().partition(" ")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not (0 < value < math.inf and name.strip()):
            raise ValueError(
                f"dataset_path: {entry.strip()!r} in {path!r}; write a weight and a path for each set, as in "
                '"0.7 a, 0.3 b"'
            )
        sets.append((value, name.strip()))
    return sets


def open_split(
    section: str, given: str, config: Training | Validation, tokenizer: BaseTokenizer, job: JobConfig
) -> Split:
    """Open the split of a section ("training" or "validation"), after checks, from the path of a folder or of a pair.

    Raises ValueError if the data are missing, unfinished or damaged, were prepared with another tokenizer or border, or
    are one pair for both training and validation.
    """
    key = f"{section}.dataset_path"
    if not given:
        raise ValueError(f"{key}: dataset {NAME!r} needs a folder of prepared data, or a pair's path without extension")
    path, facts = Path(given), tokenizer_facts(Path(job.model.hf_assets_path), tokenizer)
    try:
        if path.is_dir():
            return _from_manifest(path, TRAIN if section == "training" else VALIDATION, facts, job)
        return _from_pair(key, path, facts, job)
    except OSError as error:
        raise ValueError(f"{key}: {error.filename or path} cannot be read: {error.strerror}") from error


def _prefix(path: str | None) -> Path:
    """Return the path of a pair without extension. `path` may also name one of its files."""
    prefix = Path(path or "")
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix


def _from_pair(key: str, path: Path, facts: dict[str, Any], job: JobConfig) -> Split:
    prefix = _prefix(str(path))
    if not any(file.exists() for file in paths_of(prefix)):
        raise ValueError(
            f"{key}: {str(path.absolute())!r} is neither a folder of prepared data nor a pair of .bin and .idx; "
            "python -m torchtitan_scape.data.prepare creates them"
        )
    both = job.validation.enable and job.validation.dataset.lower() == job.training.dataset.lower() == NAME
    trained = {_prefix(path).resolve() for _, path in blend_of(job.training.dataset_path or "")}
    if both and _prefix(job.validation.dataset_path).resolve() in trained:
        raise ValueError(
            f"{key}: {str(path)!r} is a pair, which has no splits: use a separate pair or another dataset for "
            "validation"
        )
    tokens, digest = open_pair(prefix)
    logger.warning(
        f"{prefix} does not record its tokenizer: {job.model.hf_assets_path} must contain the one that encoded it"
    )
    return Split([(str(prefix), tokens)], digest, facts["entries"])


def _from_manifest(folder: Path, split: str, facts: dict[str, Any], job: JobConfig) -> Split:
    manifest = Manifest.read(folder)
    for key, expected in facts.items():
        if (actual := manifest.tokenizer[key]) != expected:
            raise ValueError(
                f"{folder} was prepared with another tokenizer than the one in {job.model.hf_assets_path}: its {key} "
                f"is {actual}, not {expected}; train with that tokenizer, or prepare the data again"
            )
    if manifest.border != job.data.border:
        raise ValueError(
            f"{folder} was prepared with the border {manifest.border!r} between documents, and [data] border = "
            f"{job.data.border!r}; set [data] border = {manifest.border!r}, or prepare them with --border "
            f"{job.data.border}"
        )
    n_bytes, n_tokens = manifest.total(split, "bytes"), manifest.total(split, "tokens")
    dtype = np.dtype(manifest.dtype)
    shards = [
        (str(folder / shard.name), map_tokens(paths_of(folder / shard.name)[0], dtype)) for shard in manifest.of(split)
    ]
    rate = n_bytes / n_tokens if n_tokens else None
    return Split(shards, Manifest.digest(folder), facts["entries"], rate)


class Blend:
    """Several sets, with relative weights, as one, with the interface of `Split` that the loader uses.

    `counts` are the samples of each set per period. A weight with which a set would never be read is a ValueError.
    """

    bytes_per_token = None

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
        identity = repr([(int(n), part.digest) for n, part in zip(self.counts, self.parts, strict=True)])
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
    """Open the set, or the sets of a blend, that `training.dataset_path` names; see `open_split`."""
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


class PreparedDataLoader(BaseDataLoader):
    """Data loader of one rank, which reads for `simulated` replicas in turn.

    Its state is {"position": JSON of format, data (the digest), samples, seq_len, seed, consumed}. Between two steps it
    is equal on all ranks. The seed is restored from it.

    Args:
        batch, seq_len: Rows and sequence length of a micro-batch.
        seed: Seed of the permutation.
        rank, world: This data-parallel rank and their number. Replica k of this rank is reader k * world + rank.
        each: Micro-batches of a reader per step.
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
    ) -> None:
        self.data, self.batch, self.seq_len = data, batch, seq_len
        self.seed, self.samples = seed, data.samples(seq_len)
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

    def steps_left(self, passes: int) -> int:
        """Return the number of further steps whose samples are all within the first passes over the data."""
        return max(0, passes * self.samples - self.consumed) // self.global_batch

    def __iter__(self) -> Iterator[Batch]:
        n = max(1, CHUNK_INDICES // self.batch)
        while True:
            for samples in self._samples_of_batches(self._batches_yielded, n):
                batch = self.data.batch(samples, self.seq_len)
                self._batches_yielded += 1
                yield batch

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
        return {"format": FORMAT, "data": self.data.digest, "samples": self.samples, "seq_len": self.seq_len}

    def state_dict(self) -> dict[str, Any]:
        return {"position": json.dumps({**self._identity(), "seed": self.seed, "consumed": self.consumed})}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return a placeholder with the keys of a checkpoint of this many readers."""
        return {"position": ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position. Raises ValueError if it is damaged, or of other data or another sequence length."""
        if not state_dict:
            return
        restart = "restart the data with --checkpoint.exclude_from_loading=dataloader"
        try:
            position = parse_json(state_dict["position"])
            seed, consumed = int(position.pop("seed")), int(position.pop("consumed"))
            readable = consumed >= 0 and position.keys() == self._identity().keys()
        except (TypeError, ValueError, KeyError, AttributeError):
            readable = False
        if not readable:
            raise ValueError(f"the data position in the checkpoint is not readable; {restart}")
        for key, expected in self._identity().items():
            if position[key] != expected:
                raise ValueError(
                    f"the checkpoint's position refers to prepared data with {key} = {position[key]}, but this run has "
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
    )
    logger.info(
        f"Prepared data: {data.tokens:,} tokens, {loader.samples:,} samples of {training.seq_len}, "
        f"{loader.samples / loader.global_batch:,.0f} steps per pass"
    )
    return loader

"""Prepared data as sequences of tokens: a folder with a manifest, a Megatron pair, or a blend of several.

Sample i of sequence length S consists of tokens [i S, i S + S]: S inputs and, shifted by one, S labels. A pass reads
the samples in the order of a keyed permutation, which needs no memory and can be evaluated at any index.
"""

import bisect
import hashlib
import logging
import math
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.indexed import Pair, Tokens, map_tokens, paths_of
from torchtitan_scape.data.manifest import TRAIN, VALIDATION, Manifest, tokenizer_facts
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import BaseTokenizer

logger = logging.getLogger(__name__)

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
        digest: Digest of the manifest, or of the index of a single pair.
        entries: Entries of the tokenizer.
        bytes_per_token: UTF-8 bytes of text per token; None if unknown.
        sampled: Digest of a sample of the tokens, for a pair, whose index has only their number; "" otherwise.

    Attributes:
        tokens: Number of tokens.
        digest, bytes_per_token, sampled: As above.
    """

    def __init__(
        self,
        shards: Sequence[tuple[str, Tokens]],
        digest: str,
        entries: int,
        bytes_per_token: float | None = None,
        sampled: str = "",
    ) -> None:
        self._names = [name for name, _ in shards]
        self._shards = [tokens for _, tokens in shards]
        self._ends = np.cumsum([0, *map(len, self._shards)]).tolist()[1:]
        self.tokens, self.digest, self.bytes_per_token = (self._ends or [0])[-1], digest, bytes_per_token
        self.sampled, self._entries = sampled, entries

    def samples(self, seq_len: int) -> int:
        return max(0, (self.tokens - 1) // seq_len)

    def ordered(self, indices: Tokens, seq_len: int, *key: int) -> Tokens:
        """Return the samples at these indices of the order of all passes, int64.

        Args:
            indices: From 0 on, of any shape; pass p begins at p times the number of samples.
            seq_len: Sequence length.
            key: Key of the order.
        """
        n = self.samples(seq_len)
        passes, within = np.divmod(indices, n)
        samples = np.empty_like(within)
        for number in np.unique(passes):
            in_pass = passes == number
            samples[in_pass] = Permutation(n, *key, int(number))(within[in_pass])
        return samples

    def read(self, begin: int, end: int) -> Tokens:
        """Return tokens `begin` to `end` - 1.

        Raises:
            ValueError: A token is outside the tokenizer's vocabulary.
        """
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
    """Return weight and path of every set that `dataset_path` names: one, or several as in "0.7 a, 0.3 b".

    Raises:
        ValueError: A weight is missing or is not positive.
    """
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
    """Open a split, after checks: of a folder with a manifest, or a pair.

    Args:
        section: "training" or "validation"; also selects the split.
        given: The folder, or the path of the pair.
        config: The section.
        tokenizer: Tokenizer of the run, from the folder `model.hf_assets_path`.
        job: Configuration of the run.

    Raises:
        ValueError: The path is missing; the data are unfinished or damaged, or were prepared with another tokenizer or
            border; or one pair is used for both training and validation.
    """
    key = f"{section}.dataset_path"
    if not given:
        raise ValueError(f"{key}: dataset {NAME!r} needs a folder of prepared data, or a pair's path without extension")
    if config.dataloader.num_workers:
        raise ValueError(
            f"{section}.dataloader.num_workers = {config.dataloader.num_workers}: prepared data are memory-mapped and "
            "do not support workers; set it to 0"
        )
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
            f"{key}: {str(path)!r} is neither a folder of prepared data nor a pair of .bin and .idx; "
            "python -m torchtitan_scape.data.prepare creates them"
        )
    both = job.validation.enable and job.validation.dataset.lower() == job.training.dataset.lower() == NAME
    trained = {_prefix(path).resolve() for _, path in blend_of(job.training.dataset_path or "")}
    if both and _prefix(job.validation.dataset_path).resolve() in trained:
        raise ValueError(
            f"{key}: {str(path)!r} is a pair, which has no splits: use a separate pair or another dataset for "
            "validation"
        )
    pair = Pair(prefix)
    logger.warning(
        f"{prefix} does not record its tokenizer: {job.model.hf_assets_path} must contain the one that encoded it"
    )
    digest, sampled = pair.digest()[:16], pair.sampled_digest()[:16]
    return Split([(str(prefix), pair.tokens)], digest, facts["entries"], sampled=sampled)


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
    _check_special_tokens(folder, manifest.allow_special_tokens, job.data.allow_special_tokens)
    n_bytes, n_tokens = manifest.total(split, "bytes"), manifest.total(split, "tokens")
    dtype = np.dtype(manifest.dtype)
    _allow_files(len(manifest.of(split)))
    shards = [
        (str(folder / shard.name), map_tokens(paths_of(folder / shard.name)[0], dtype)) for shard in manifest.of(split)
    ]
    rate = n_bytes / n_tokens if n_tokens else None
    return Split(shards, Manifest.digest(folder), facts["entries"], rate)


def _check_special_tokens(folder: Path, prepared: bool | None, wanted: bool) -> None:
    if prepared is None and not wanted:
        logger.warning(
            f"{folder} was prepared by a version that encoded text that spells a special token as that token; prepare "
            "the data again if documents may contain such text"
        )
    elif prepared not in (None, wanted):
        raise ValueError(
            f"{folder} was prepared with{'' if prepared else 'out'} --allow-special-tokens, and [data] "
            f"allow_special_tokens = {str(wanted).lower()}; set it to {str(prepared).lower()}, or prepare the data "
            "again"
        )


def _allow_files(n: int) -> None:
    """Raise the limit of open files by `n`, if permitted. Each memory map uses one, and a stream has a thousand
    shards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if n > soft // 4:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + n, hard), hard))

"""Training on prepared data: tokens of all documents in a row, cut to samples, in a new order every pass.

Sample i of a sequence length S is tokens [i S, i S + S]: S inputs and, one further, S labels. A pass reads samples in
the order of a keyed permutation, which needs no memory and is known at any place at once. With C samples read so far,
reader r of R takes of a step's global batch the samples at C + (a R + r) b + j, for its micro-batch a and row j of b:
the global batch is the same set for every R. So the position is one number, on any number of ranks and replicas.
"""

import bisect
import hashlib
import json
import logging
import math
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.indexed import Pair, Tokens, map_tokens, paths_of
from torchtitan_scape.data.manifest import TRAIN, VALIDATION, Manifest, tokenizer_facts
from torchtitan_scape.data.simulated import Batch
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import BaseDataLoader, BaseTokenizer

logger = logging.getLogger(__name__)

NAME = "prepared"
FORMAT = 1
ROUNDS = 4
# So many positions are permuted at once: a call costs 0.15 ms, whether for 4 or for hundreds.
AT_ONCE = 4096
_U64 = np.uint64


def mixed(x: Tokens) -> Tokens:
    """A well mixed function of 64 bits: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


class Permutation:
    """A keyed permutation of 0 to n - 1: four rounds of a Feistel network on the square that holds n.

    A number is a pair of digits to the base ceil(sqrt(n)); a round adds a keyed function of one digit to the other.
    What falls beyond n goes through the rounds again (Black, Rogaway 2002, "cycle walking"): under 2 sqrt(n) numbers.
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self._side = _U64(math.isqrt(n - 1) + 1)
        self._keys = np.frombuffer(hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest(), "<u8")

    def __call__(self, places: Tokens) -> Tokens:
        """The numbers at `places`, both int64 from 0 to n - 1."""
        found = self._rounds(places.astype(_U64))
        while (beyond := np.flatnonzero(found >= _U64(self.n))).size:
            found[beyond] = self._rounds(found[beyond])
        return found.astype(np.int64)

    def _rounds(self, numbers: Tokens) -> Tokens:
        left, right = np.divmod(numbers, self._side)
        for key in self._keys:
            left, right = right, (left + mixed(right + key) % self._side) % self._side
        return left * self._side + right


class Split:
    """The tokens of a split, as if they lay in one row.

    Attributes:
        tokens: how many there are.
        digest: of the manifest, or of a bare pair's index.
        bytes_per_token: of text, UTF-8; None where nobody has counted.

    Args:
        shards: their paths without ending, and their tokens, of unsigned type; none is empty.
        entries: of the tokenizer.
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

    def read(self, begin: int, end: int) -> Tokens:
        """Tokens from `begin` to before `end`. Raises ValueError for one that the tokenizer does not have."""
        shard = bisect.bisect_right(self._ends, begin)
        first = self._ends[shard - 1] if shard else 0
        if end <= self._ends[shard]:
            found = self._shards[shard][begin - first : end - first]
        else:
            border = self._ends[shard]
            found = np.concatenate([self._shards[shard][begin - first :], self.read(border, end)])
        if found.max() >= self._entries:
            raise ValueError(
                f"{self._names[shard]}.bin has a token {found.max()} near number {begin - first}, but the tokenizer "
                f"has {self._entries} entries: the data are damaged, or were prepared with another tokenizer"
            )
        return found

    def batch(self, samples: Sequence[int], seq_len: int) -> Batch:
        """Inputs and labels of some samples, int64 of shape (samples, seq_len)."""
        inputs = np.empty((len(samples), seq_len), np.int64)
        labels = np.empty_like(inputs)
        for row, sample in enumerate(samples):
            tokens = self.read(sample * seq_len, (sample + 1) * seq_len + 1)
            inputs[row], labels[row] = tokens[:-1], tokens[1:]
        return {"input": torch.from_numpy(inputs)}, torch.from_numpy(labels)


def open_split(section: str, config: Training | Validation, tokenizer: BaseTokenizer, job: JobConfig) -> Split:
    """The split that a section's `dataset_path` names, after checks: a folder with a manifest, or a pair's path.

    Args:
        section: "training" or "validation", which is also the split.
        tokenizer: the run's, from the folder `model.hf_assets_path`.

    Raises:
        ValueError: the path is missing; the data are unfinished, damaged, or of another tokenizer or border; a pair is
            to be trained on and validated with.
    """
    key = f"{section}.dataset_path"
    if not config.dataset_path:
        raise ValueError(f"{key}: dataset {NAME!r} needs a folder of prepared data, or a pair's path without ending")
    if config.dataloader.num_workers:
        raise ValueError(
            f"{section}.dataloader.num_workers = {config.dataloader.num_workers}: prepared data are memory-mapped, and "
            "read without workers; set it to 0"
        )
    path, facts = Path(config.dataset_path), tokenizer_facts(Path(job.model.hf_assets_path), tokenizer)
    try:
        if path.is_dir():
            return _from_manifest(path, TRAIN if section == "training" else VALIDATION, facts, job)
        return _from_pair(key, path, facts, job)
    except OSError as error:
        raise ValueError(f"{key}: {error.filename or path} cannot be read: {error.strerror}") from error


def _prefix(path: str | None) -> Path:
    """Of a pair, which may be called by a file of it."""
    prefix = Path(path or "")
    return prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix


def _from_pair(key: str, path: Path, facts: dict[str, Any], job: JobConfig) -> Split:
    prefix = _prefix(str(path))
    if not any(file.exists() for file in paths_of(prefix)):
        raise ValueError(
            f"{key}: {str(path)!r} is neither a folder of prepared data nor a pair of .bin and .idx; "
            "python -m torchtitan_scape.data.prepare makes them"
        )
    both = job.validation.enable and job.validation.dataset.lower() == job.training.dataset.lower() == NAME
    if both and _prefix(job.training.dataset_path).resolve() == _prefix(job.validation.dataset_path).resolve():
        raise ValueError(
            f"{key}: {str(path)!r} is a pair, which has no splits: give validation a pair of its own, or another "
            "data set"
        )
    pair = Pair(prefix)
    logger.warning(f"{prefix} says nothing of its tokenizer: {job.model.hf_assets_path} has to be that of its tokens")
    return Split([(str(prefix), pair.tokens)], pair.digest()[:16], facts["entries"])


def _from_manifest(folder: Path, split: str, facts: dict[str, Any], job: JobConfig) -> Split:
    manifest = Manifest.read(folder)
    for key, here in facts.items():
        if (there := manifest.tokenizer[key]) != here:
            raise ValueError(
                f"{folder} was prepared with another tokenizer than that in {job.model.hf_assets_path}: its {key} is "
                f"{there}, not {here}; train with that tokenizer, or prepare the data again"
            )
    if manifest.border != job.data.border:
        raise ValueError(
            f"{folder} was prepared with the border {manifest.border!r} between documents, and [data] border = "
            f"{job.data.border!r}; set [data] border = {manifest.border!r}, or prepare them with --border "
            f"{job.data.border}"
        )
    n_bytes, n_tokens = manifest.total(split, "bytes"), manifest.total(split, "tokens")
    dtype = np.dtype(manifest.dtype)
    _allow_files(len(manifest.of(split)))
    shards = [
        (str(folder / shard.name), map_tokens(paths_of(folder / shard.name)[0], dtype)) for shard in manifest.of(split)
    ]
    rate = n_bytes / n_tokens if n_tokens else None
    return Split(shards, Manifest.digest(folder), facts["entries"], rate)


def _allow_files(n: int) -> None:
    """Room for so many more open files, where the system lets: a memory map is one, a stream has a thousand shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if n > soft // 4:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + n, hard), hard))


class PreparedDataLoader(BaseDataLoader):
    """The batches of one rank, which reads for `simulated` replicas, one after the other.

    Args:
        data: the training split.
        batch, seq_len: of a micro-batch.
        rank, world: this data-parallel rank and their number; replica k of it is reader k world + rank.
        each: micro-batches of a reader in a step.
        passes: over the data, 0 for no end: no step begins of which a sample would be beyond.

    Its state is {"position": JSON of format, data (the manifest's digest), samples, seq_len, seed, consumed}, the
    same on all ranks between two steps; the seed goes on with it.

    Raises:
        ValueError: the split has fewer samples than a global batch.
    """

    def __init__(
        self,
        data: Split,
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
                f"batch of {self.global_batch}; prepare more text, or make the batch or the sequence shorter"
            )
        self._begin = self._given = 0  # samples consumed at the start, batches that this rank was given since

    @property
    def consumed(self) -> int:
        """Samples of all readers in the whole steps so far."""
        return self._begin + self._given // (self.each * self.simulated) * self.global_batch

    def __iter__(self) -> Iterator[Batch]:
        per_step = self.each * self.simulated
        while True:
            n = max(1, AT_ONCE // self.batch)
            if self.passes:  # whole steps alone, so that none begins that cannot be taken
                steps = (self.passes * self.samples - self._begin) // self.global_batch
                n = min(n, steps * per_step - self._given)
            if n <= 0:
                return
            for samples in self._places(self._given, n):
                inputs, labels = self.data.batch(samples, self.seq_len)
                if self.pin_memory:
                    inputs, labels = {key: value.pin_memory() for key, value in inputs.items()}, labels.pin_memory()
                self._given += 1
                yield inputs, labels

    def _places(self, first: int, n: int) -> list[list[int]]:
        """The samples of this rank's batches `first` to `first` + n - 1."""
        step, within = np.divmod(np.arange(first, first + n), self.each * self.simulated)
        replica, micro = np.divmod(within, self.each)
        reader = replica * self.world + self.rank
        rows = micro * self.world * self.simulated + reader
        begins = self._begin + step * self.global_batch + rows * self.batch
        passes, places = np.divmod(begins[:, None] + np.arange(self.batch), self.samples)
        found = np.empty_like(places)
        for number in np.unique(passes):
            of = passes == number
            found[of] = Permutation(self.samples, self.seed, int(number))(places[of])
        chosen: list[list[int]] = found.tolist()
        return chosen

    def empty_documents(self) -> int:
        """Documents of no text, of which prepared data have none."""
        return 0

    def _own(self) -> dict[str, Any]:
        return {"format": FORMAT, "data": self.data.digest, "samples": self.samples, "seq_len": self.seq_len}

    def state_dict(self) -> dict[str, Any]:
        return {"position": json.dumps({**self._own(), "seed": self.seed, "consumed": self.consumed})}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """What a checkpoint of so many readers holds, as room for it."""
        return {"position": ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where the position is damaged, or of other data or another sequence length."""
        if not state_dict:
            return
        again = "begin the data again with --checkpoint.exclude_from_loading=dataloader"
        try:
            found = json.loads(state_dict["position"])
            seed, consumed = int(found.pop("seed")), int(found.pop("consumed"))
            known = consumed >= 0 and found.keys() == self._own().keys()
        except (TypeError, ValueError, KeyError, AttributeError):
            known = False
        if not known:
            raise ValueError(f"the data position in the checkpoint is not readable; {again}")
        for key, here in self._own().items():
            if found[key] != here:
                raise ValueError(
                    f"the checkpoint's position is in prepared data of which {key} is {found[key]}, here it is {here}; "
                    f"give it the same data and sequence length, or {again}"
                )
        self.seed, self._begin, self._given = seed, consumed, 0

    def load_old(self, states: Sequence[dict[str, Any]]) -> str:
        """Goes on where a run of another number of readers was. Returns a line for the log."""
        self.load_state_dict(states[0])
        return f"data: {self.consumed:,} samples were read, and the next one follows"


def build_prepared(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, simulated: int = 1
) -> PreparedDataLoader:
    """The loader of `training.dataset = "prepared"`; see `datasets.build_dataloader`."""
    training = job_config.training
    data = open_split("training", training, tokenizer, job_config)
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
        f"{loader.samples / loader.global_batch:,.0f} steps a pass"
    )
    return loader

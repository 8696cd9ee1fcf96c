"""What prepared data are: `manifest.json`, written when all else is there."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_scape.core.files import write_whole
from torchtitan_scape.data.indexed import IndexedShard, paths_of
from torchtitan_scape.titan.data import BaseTokenizer

MANIFEST, FORMAT = "manifest.json", 1
TRAIN, VALIDATION = "train", "validation"
# The first that is there is what TorchTitan reads; a vocabulary beside merges belongs to these.
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))


def tokenizer_digest(folder: Path) -> str:
    """The first 16 digits of the SHA-256 of the file or files that say how text becomes ids.

    Raises:
        ValueError: the folder has none.
    """
    for names in _TOKENIZER_FILES:
        if (folder / names[0]).is_file():
            files = [folder / name for name in names if (folder / name).is_file()]
            return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    raise ValueError(f"{str(folder)!r} has no tokenizer: none of {', '.join(names[0] for names in _TOKENIZER_FILES)}")


def tokenizer_entries(tokenizer: BaseTokenizer) -> int:
    """Rows that a table needs for all ids: more than there are tokens where the vocabulary has gaps."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=0))


def tokenizer_facts(folder: Path, tokenizer: BaseTokenizer) -> dict[str, Any]:
    """What has to be the same where data are prepared and where they are trained on."""
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos")}
    return {"digest": tokenizer_digest(folder), "entries": tokenizer_entries(tokenizer), **ids}


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of prepared data.

    Attributes:
        source: where the text is from: dataset, path, revision, documents and bytes of its text.
        tokenizer: see `tokenizer_facts`.
        border: what stands between documents, as [data] border.
        dtype: of the ids.
        shard_tokens: about how many tokens a shard was to have.
        held_out: share of the documents that were held out; None where the source has a validation split of its own.
        shards: in the order in which their tokens follow each other, those for training first.
    """

    source: dict[str, Any]
    tokenizer: dict[str, Any]
    border: str
    dtype: str
    shard_tokens: int
    held_out: float | None
    shards: tuple[IndexedShard, ...]

    def of(self, split: str) -> list[IndexedShard]:
        return [shard for shard in self.shards if shard.split == split]

    def total(self, split: str, what: str) -> int:
        """Documents, tokens, or bytes of text of a split."""
        return sum(getattr(shard, what) for shard in self.of(split))

    def head(self) -> dict[str, Any]:
        """All but what was made."""
        return {"format": FORMAT, **{key: value for key, value in vars(self).items() if key != "shards"}}

    def write(self, folder: Path) -> None:
        counts = ("documents", "tokens", "bytes")
        found = self.head() | {
            "splits": {split: {what: self.total(split, what) for what in counts} for split in (TRAIN, VALIDATION)},
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(folder / MANIFEST, (json.dumps(found, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a folder, whose files are there with the sizes that it says.

        Raises:
            ValueError: the folder has none, since preparing them was not finished; it is damaged; a shard is.
        """
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_bytes())
            if found.pop("format") != FORMAT:
                raise ValueError
            found["shards"] = tuple(IndexedShard(**shard) for shard in found["shards"])
            del found["splits"]
            manifest = cls(**found)
            if lacking := {"digest", "entries", "bos", "eos"} - manifest.tokenizer.keys():
                raise ValueError(f"its tokenizer lacks {', '.join(sorted(lacking))}")
            dtype = np.dtype(manifest.dtype)
        except FileNotFoundError:
            raise ValueError(
                f"{str(folder)!r} has no {MANIFEST}: it holds no prepared data, or they are unfinished; run "
                "python -m torchtitan_scape.data.prepare to its end"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error or 'another format'}); prepare the data again") from None
        for shard in manifest.shards:
            for file, size in zip(paths_of(folder / shard.name), shard.sizes(dtype), strict=True):
                there = file.stat().st_size if file.is_file() else None
                if there != size:
                    wrong = "is missing" if there is None else f"has {there} bytes, {size} expected"
                    raise ValueError(f"the prepared data are damaged: {file} {wrong}; run the prepare command again")
        return manifest

    @staticmethod
    def digest(folder: Path) -> str:
        """Tells two sets of prepared data apart."""
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]

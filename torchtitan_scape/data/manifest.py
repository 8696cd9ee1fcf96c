"""The manifest of prepared data: `manifest.json`, written after all other files."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_scape.core.files import parse_json, refuse_pointers, require_plain_name, write_whole
from torchtitan_scape.data.indexed import IndexedShard, paths_of
from torchtitan_scape.titan.data import BaseTokenizer

MANIFEST, FORMAT = "manifest.json", 1
TRAIN, VALIDATION = "train", "validation"
# TorchTitan reads the first existing file; vocab.json and merges.txt belong together.
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))


def tokenizer_digest(folder: Path) -> str:
    """Return the first 16 digits of the SHA-256 of the tokenizer's file or files.

    Raises:
        ValueError: The folder contains no tokenizer.
    """
    for names in _TOKENIZER_FILES:
        if (folder / names[0]).is_file():
            files = [folder / name for name in names if (folder / name).is_file()]
            return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    raise ValueError(f"{str(folder)!r} has no tokenizer: none of {', '.join(names[0] for names in _TOKENIZER_FILES)}")


def tokenizer_entries(tokenizer: BaseTokenizer) -> int:
    """Return the rows of an embedding for all ids: more than the number of tokens if the vocabulary has gaps."""
    return max(tokenizer.get_vocab_size(), 1 + max(tokenizer.get_vocab().values(), default=0))


def tokenizer_facts(folder: Path, tokenizer: BaseTokenizer) -> dict[str, Any]:
    """Return the properties of a tokenizer that must be equal in preparation and training."""
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos")}
    return {"digest": tokenizer_digest(folder), "entries": tokenizer_entries(tokenizer), **ids}


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of prepared data.

    Attributes:
        source: Origin of the text: dataset, path, revision, documents and bytes of text.
        tokenizer: See `tokenizer_facts`.
        border: Tokens between documents, as [data] border.
        dtype: Dtype of the ids.
        shard_tokens: Approximate tokens per shard, as requested.
        held_out: Share of held-out documents; None if the source has its own validation split.
        shards: Shards in token order, training shards first.
        allow_special_tokens: As [data] allow_special_tokens; None in data of versions before this key, which encoded
            text that spells a special token as that token.
    """

    source: dict[str, Any]
    tokenizer: dict[str, Any]
    border: str
    dtype: str
    shard_tokens: int
    held_out: float | None
    shards: tuple[IndexedShard, ...]
    allow_special_tokens: bool | None = None

    def of(self, split: str) -> list[IndexedShard]:
        return [shard for shard in self.shards if shard.split == split]

    def total(self, split: str, quantity: str) -> int:
        """Return the sum of an attribute of the shards of a split, such as its documents, tokens or bytes."""
        return sum(getattr(shard, quantity) for shard in self.of(split))

    def head(self) -> dict[str, Any]:
        """Return all fields except the shards."""
        return {"format": FORMAT, **{key: value for key, value in vars(self).items() if key != "shards"}}

    def write(self, folder: Path) -> None:
        counts = ("documents", "tokens", "bytes")
        found = self.head() | {
            "splits": {split: {count: self.total(split, count) for count in counts} for split in (TRAIN, VALIDATION)},
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_whole(folder / MANIFEST, (json.dumps(found, indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a folder, and check that its files exist with the recorded sizes.

        Raises:
            ValueError: The folder has no manifest, because preparation is unfinished; or the manifest or a shard is
                damaged.
        """
        path = folder / MANIFEST
        refuse_pointers(path)
        try:
            found = parse_json(path.read_bytes())
            if found.pop("format") != FORMAT:
                raise ValueError
            found["shards"] = tuple(IndexedShard(**shard) for shard in found["shards"])
            for shard in found["shards"]:
                require_plain_name(shard.name, path)
            del found["splits"]
            manifest = cls(**found)
            if missing := {"digest", "entries", "bos", "eos"} - manifest.tokenizer.keys():
                raise ValueError(f"its tokenizer lacks {', '.join(sorted(missing))}")
            dtype = np.dtype(manifest.dtype)
        except FileNotFoundError:
            raise ValueError(
                f"{str(folder)!r} has no {MANIFEST}: it contains no prepared data, or they are unfinished; run "
                "python -m torchtitan_scape.data.prepare to completion"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read ({error or 'another format'}); prepare the data again") from None
        for shard in manifest.shards:
            for file, size in zip(paths_of(folder / shard.name), shard.sizes(dtype), strict=True):
                actual = file.stat().st_size if file.is_file() else None
                if actual != size:
                    refuse_pointers(file)
                    wrong = "is missing" if actual is None else f"has {actual} bytes, {size} expected"
                    raise ValueError(f"the prepared data are damaged: {file} {wrong}; run the prepare command again")
        return manifest

    @staticmethod
    def digest(folder: Path) -> str:
        """Return a digest that identifies a set of prepared data."""
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]

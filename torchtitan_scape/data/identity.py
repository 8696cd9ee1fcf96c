"""Digests of data and tokenizer, which show whether a resumed run reads those of its checkpoint."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from datasets import Dataset

WHOLE = 1 << 26  # Stored bytes up to which all documents are hashed, which takes a tenth of a second.
SAMPLED, SAMPLED_CHARACTERS = 1024, 1 << 14
_BATCH = 4096


def data_digest(data: Any) -> str:
    """Return a digest of a dataset; "" if it has nothing to identify it by.

    Of more than `WHOLE` bytes, the first characters of 1,024 evenly spaced documents are hashed. The digest of a stream
    is that of the names of its files, which contain the revision in the case of a dataset of the hub.

    Args:
        data: A dataset or a stream of the datasets library.
    """
    if not isinstance(data, Dataset):
        arguments = getattr(getattr(data, "_ex_iterable", None), "kwargs", {})
        files = arguments.get("base_files") or arguments.get("files") or []
        return _digest(str(file).encode() for file in files) if files else ""
    if "text" not in data.column_names:
        return ""
    text = data.select_columns(["text"])
    if data.data.nbytes <= WHOLE:
        chunks = (text[begin : begin + _BATCH]["text"] for begin in range(0, len(data), _BATCH))
        return _digest(_encoded(document) for chunk in chunks for document in chunk)
    rows = np.linspace(0, len(data) - 1, SAMPLED).astype(int)
    return _digest(_encoded((text[int(row)]["text"] or "")[:SAMPLED_CHARACTERS]) for row in rows)


def tokenizer_digest(definition: str) -> str:
    """Return a digest of the definition of a tokenizer, in the JSON of the tokenizers library."""
    return _digest([definition.encode()])


def _encoded(document: str | None) -> bytes:
    return (document or "").encode(errors="surrogatepass")


def _digest(parts: Iterable[bytes]) -> str:
    """Return the first 16 digits of the SHA-256 of byte strings and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]

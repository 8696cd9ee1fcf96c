"""Pairs in Megatron's format, compared with bytes written here from the description of the format alone."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from torchtitan_scape.data.manifest import IndexedShard, PairWriter, damage, dtype_for, open_pair

DOCUMENTS = [[3, 1, 4, 1], [5], [9, 2, 65_535]]


def literal(prefix: Path, documents: list[list[int]] = DOCUMENTS, code: int = 8) -> Path:
    """Write a pair as Megatron-LM's library does: int32 for dtype code 4, uint16 for code 8."""
    size, letter = {4: (4, "i"), 8: (2, "H")}[code]
    ids = [token for document in documents for token in document]
    prefix.with_name(prefix.name + ".bin").write_bytes(struct.pack(f"<{len(ids)}{letter}", *ids))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(documents)) + struct.pack("<Q", len(documents) + 1)
    begin = 0
    lengths, offsets = b"", b""
    for document in documents:
        lengths += struct.pack("<i", len(document))
        offsets += struct.pack("<q", begin)
        begin += size * len(document)
    index += lengths + offsets + struct.pack(f"<{len(documents) + 1}q", *range(len(documents) + 1))
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    return prefix


def lengths_of(prefix: Path) -> list[int]:
    """Return the tokens of each document of a pair."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    (n,) = struct.unpack("<Q", index[18:26])
    return list(struct.unpack(f"<{n}i", index[34 : 34 + 4 * n]))


def written(folder: Path, documents: list[list[int]] = DOCUMENTS, entries: int = 65_535) -> IndexedShard | None:
    (folder / "parts").mkdir(parents=True)
    writer = PairWriter(folder / "parts", "ours", "train", dtype_for(entries))
    writer.add(
        [token for document in documents[:2] for token in document], [len(document) for document in documents[:2]], 10
    )
    for document in documents[2:]:
        writer.add(document, [len(document)], 7)
    shard = writer.finish(folder)
    assert not list((folder / "parts").iterdir())
    return shard


@pytest.mark.parametrize("code, entries", [(8, 65_535), (4, 65_536)])
def test_a_pair_is_read_and_written_as_by_megatron(code: int, entries: int, tmp_path: Path) -> None:
    theirs = literal(tmp_path / "a.b", code=code)
    assert open_pair(theirs)[0].tolist() == [3, 1, 4, 1, 5, 9, 2, 65_535]
    shard = written(tmp_path / "ours", entries=entries)
    assert shard is not None
    assert (shard.documents, shard.tokens, shard.bytes) == (3, 8, 17)
    for ending in (".bin", ".idx"):
        ours = (tmp_path / "ours" / f"ours{ending}").read_bytes()
        assert ours == (tmp_path / f"a.b{ending}").read_bytes()
    assert shard.sizes(dtype_for(entries)) == tuple(
        (tmp_path / "ours" / f"ours{ending}").stat().st_size for ending in (".bin", ".idx")
    )
    assert damage(tmp_path / "ours", shard, dtype_for(entries)) == ""


def test_documents_of_several_sequences_and_modes_are_read(tmp_path: Path) -> None:
    """Megatron can split documents into sentences, and marks sequences of multimodal data."""
    prefix = literal(tmp_path / "a")
    index = tmp_path / "a.idx"
    head = index.read_bytes()[:-32]
    index.write_bytes(head[:18] + struct.pack("<QQ", 3, 3) + head[34:] + struct.pack("<3q", 0, 2, 3) + bytes(3))
    assert len(open_pair(prefix)[0]) == 8


def test_nothing_is_written_without_a_token(tmp_path: Path) -> None:
    assert written(tmp_path, []) is None
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OverflowError):
        written(tmp_path, [[1], [65_536]])


@pytest.mark.parametrize(
    "name, harm, message",
    [
        ("a.bin", lambda data: data[:-1], r"a\.bin is damaged: 15 bytes, 16 expected by a\.idx"),
        ("a.bin", None, r"a\.bin: No such file"),
        ("a.idx", None, r"a\.idx: No such file"),
        ("a.idx", lambda data: data[:-8], r"a\.idx is damaged: \d+ bytes, \d+ expected for 3 sequences"),
        ("a.idx", lambda data: b"", "is not an index of Megatron's format"),
        ("a.idx", lambda data: b"X" + data[1:], "is not an index of Megatron's format"),
        ("a.idx", lambda data: data[:9] + b"\2" + data[10:], "version 2"),
        ("a.idx", lambda data: data[:17] + b"\7" + data[18:], "type 7"),
        ("a.idx", lambda data: data[:42] + b"\5" + data[43:], "is damaged: "),
    ],
)
def test_a_damaged_pair_is_named(name: str, harm: object, message: str, tmp_path: Path) -> None:
    literal(tmp_path / "a")
    path = tmp_path / name
    path.write_bytes(harm(path.read_bytes())) if callable(harm) else path.unlink()
    with pytest.raises(ValueError, match=message) as error:
        open_pair(tmp_path / "a")
    assert "\n" not in str(error.value)


def test_a_sparse_index_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file of 20 GB with a header and a hole takes no space on disk."""
    literal(tmp_path / "a")
    header = (tmp_path / "a.idx").read_bytes()[:34]
    n = 10**9
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(header[:18] + struct.pack("<QQ", n, n + 1))
        file.truncate(34 + 12 * n + 8 * (n + 1))
    for size in (16, 0):
        os.truncate(tmp_path / "a.bin", size)
        with pytest.raises(ValueError, match=rf"a\.bin is damaged: {size} bytes, 0 expected by a\.idx"):
            open_pair(tmp_path / "a")


def test_a_shard_is_compared_with_its_manifest(tmp_path: Path) -> None:
    shard = written(tmp_path)
    assert shard is not None
    dtype = dtype_for(100)
    path = tmp_path / "ours.bin"
    data = np.frombuffer(path.read_bytes(), "<u2").copy()
    data[0] ^= 1
    path.write_bytes(data.tobytes())
    assert damage(tmp_path, shard, dtype) == f"{path} is damaged: its SHA-256 is not the manifest's"
    path.write_bytes(data[:-1].tobytes())
    assert damage(tmp_path, shard, dtype) == f"{path} is damaged: 14 bytes, 16 expected"
    path.unlink()
    assert damage(tmp_path, shard, dtype) == f"{path}: No such file or directory"

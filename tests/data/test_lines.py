"""Damaged lines and files are refused and named."""

import errno
import gzip
import json
import multiprocessing
import os
from pathlib import Path

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data import local

GOOD = [json.dumps({"text": f"document {i} é", "meta": i}, ensure_ascii=False).encode() for i in range(30)]
BAD = {
    "no JSON": (b"plain text", "is no JSON in UTF-8"),
    "cut off": (b'{"text": "document', "is no JSON in UTF-8"),
    "no object": (b'["document"]', "is a list, not an object"),
    "no text": (b'{"body": "document"}', r"has no column 'text', but \['body'\]"),
    "a number": (b'{"text": 3}', "has a text of type int; expected strings"),
    "nested": (b'{"text": {"a": "b"}}', "has a text of type dict"),
    "no UTF-8": (b'{"text": "\xff\xfe"}', "is no JSON in UTF-8"),
    "half a pair": (b'{"text": "\\ud800"}', r"has a text that is no Unicode"),
    "too deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is no JSON in UTF-8"),
    # Outside of the text, where another parser may crash.
    "metadata too deep": (b'{"text": "one", "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is no JSON in UTF-8"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


def write(path: Path, content: list[bytes]) -> Path:
    data = b"\n".join(content) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("location", [0, 7])
@pytest.mark.parametrize("bad, reason", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_named(bad: bytes, reason: str, location: int, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / ("a.jsonl.gz" if location else "a.jsonl"), [*GOOD[:location], b"", bad, *GOOD[location:]])
    with pytest.raises(ValueError, match=rf"cannot be read as json: {path}:{location + 2} {reason}") as error:
        ours.load_text_files(path)
    assert "\n" not in str(error.value) and not list(cache.rglob("*.arrow"))  # The file may be repaired.


def test_empty_texts_stay_and_readers_skip_them(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", [*GOOD, b'{"text": ""}', b'{"text": null}', *GOOD])
    for _ in range(2):
        assert len(ours.load_text_files(tmp_path)) == 92
    write(tmp_path / "b.jsonl", GOOD)  # other content under the same name
    assert len(ours.load_text_files(tmp_path)) == 60


def test_files_are_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", GOOD)
    assert len(ours.load_text_files(path)) == 30
    monkeypatch.setattr(local, "read_line", None)
    assert len(ours.load_text_files(path)) == 30 and len(list(cache.rglob("*.arrow"))) == 1


def texts(path: Path) -> list[str]:
    return sorted(ours.load_text_files(path)["text"])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    """The second link is a loop."""
    (tmp_path / "data").mkdir()
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "data" / "a.jsonl", GOOD)
    write(tmp_path / "elsewhere" / "b.jsonl", [b'{"text": "linked"}'])
    (tmp_path / "data" / "wiki").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to("../data")
    assert len(texts(tmp_path / "data")) == 31 and "linked" in texts(tmp_path / "data")


def test_other_endings_of_json_lines_are_read_and_the_rest_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.jsonl", [b'{"text": "plain"}'])
    write(tmp_path / "b.ndjson", [b'{"text": "newline-delimited"}'])
    with pyarrow.output_stream(tmp_path / "c.jsonl.zst", compression="zstd") as stream:
        stream.write(b'{"text": "compressed"}\n{"text": "twice"}\n')
    for name in ("d.json", "e.md", "f.md", ".hidden"):
        (tmp_path / name).write_text("{}")
    with caplog.at_level("INFO"):
        assert texts(tmp_path) == ["compressed", "newline-delimited", "plain", "twice"]
    assert "3 files are not read (2 .md, 1 .json)" in caplog.text


def test_a_damaged_compressed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(ValueError, match=r"a.jsonl.zst' cannot be read as json: "):
        ours.load_text_files(tmp_path)


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_wildcards_in_names_are_literal(kind: str, tmp_path: Path) -> None:
    """`part*` must not read `part-2` a second time, and `[wiki]` is no set of characters."""
    folder = tmp_path / "[wiki] ?"
    folder.mkdir()
    for name in ("part*", "part-2", "[ab]"):
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), path)
        else:
            path.write_text(json.dumps({"text": name}) if kind == "jsonl" else name)
    for _ in range(2):  # the second time from the cache
        assert texts(folder) == ["[ab]", "part*", "part-2"]


def test_a_text_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    for i in range(5):
        text = "first line\nsecond caf\u00e9\n" if i == 3 else "first line\n"
        (tmp_path / f"{i}.txt").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"cannot be read as text: .*/3.txt:2 is not UTF-8"):
        ours.load_text_files(tmp_path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffdocument".encode())
    assert texts(tmp_path) == ["document"]


def test_columnar_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    good, bad = pyarrow.array(["text"] * 10), pyarrow.array([b"\xff\xfe"] * 10).view(pyarrow.string())
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", pyarrow.schema([("text", pyarrow.string())])) as writer:
        for column in (good, bad):
            writer.write_table(pyarrow.table({"text": column}))
    with pytest.raises(ValueError, match=r"a.parquet' cannot be read as parquet: it has a text that is not UTF-8"):
        ours.load_text_files(tmp_path)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join(GOOD * 500))
    write(tmp_path / "a.jsonl.gz", GOOD)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"b.jsonl.gz' cannot be read as json: Compressed file ended"):
        ours.load_text_files(tmp_path)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:1000] + b"\0" * 20 + whole[1020:])
    with pytest.raises(ValueError, match=r"b.jsonl.gz' cannot be read as json: "):
        ours.load_text_files(tmp_path)


def test_rows_of_parquet_without_text(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, "", *["document"] * 18]}), path)
    assert len(ours.load_text_files(path)) == 20
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", ""]}), path)
    with pytest.raises(ValueError, match="zero documents with text"):
        ours.load_text_files(path)


def _load(cache: str, path: str, n: int) -> None:
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    assert len(ours.load_text_files(path)) == n


def test_ranks_load_at_the_same_time(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", GOOD * 2000)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_load, args=(str(cache), str(path), 60_000)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert len(list((cache / "torchtitan_scape").glob("*.arrow"))) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_full_disk_is_no_damage_of_the_data(
    name: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path / "a.jsonl", GOOD)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["document"]}), tmp_path / "a.parquet")
    monkeypatch.setattr(local, "_copy", full)
    with pytest.raises(OSError, match="No space left on device"):
        ours.load_text_files(tmp_path / name)
    assert not list((cache / "torchtitan_scape").glob("*.arrow"))

"""Damaged lines are left out and counted; files that are damaged as a whole are refused."""

import gzip
import json
import multiprocessing
import re
from pathlib import Path

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data import lines

GOOD = [json.dumps({"text": f"document {i} é", "meta": i}, ensure_ascii=False).encode() for i in range(30)]
BAD = {
    "no JSON": (b"plain text", "no JSON in UTF-8"),
    "cut off": (b'{"text": "document', "no JSON in UTF-8"),
    "no object": (b'["document"]', "is a list, not an object"),
    "no text": (b'{"body": "document"}', r"has no column 'text', but \['body'\]"),
    "null": (b'{"text": null}', "has a text of type NoneType"),
    "a number": (b'{"text": 3}', "has a text of type int; expected strings"),
    "nested": (b'{"text": {"a": "b"}}', "has a text of type dict"),
    "no UTF-8": (b'{"text": "\xff\xfe"}', "no JSON in UTF-8"),
    "half a pair": (b'{"text": "\\ud800"}', r"has a text that is no Unicode"),
    "too deep": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "no JSON in UTF-8"),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(lines.logger, "warning", messages.append)
    return messages


def write(path: Path, content: list[bytes]) -> Path:
    data = b"\n".join(content) + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("location", [0, 7])
@pytest.mark.parametrize("bad, reason", BAD.values(), ids=BAD.keys())
def test_a_bad_line_is_left_out_and_named(
    bad: bytes, reason: str, location: int, tmp_path: Path, messages: list[str]
) -> None:
    path = write(tmp_path / ("a.jsonl.gz" if location else "a.jsonl"), [*GOOD[:location], bad, b"", *GOOD[location:]])
    data = ours.load_text_files(path)
    texts = [text for text in data["text"] if text]
    assert texts == [json.loads(line)["text"] for line in GOOD]
    assert f"{path}: 1 unusable of 31 documents are left out; the first: {path}:{location + 1} " in messages[-1]
    assert re.search(reason, messages[-1])


def test_counts_go_over_all_files_and_survive_in_the_cache(tmp_path: Path, messages: list[str]) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", [*GOOD, b'{"text": ""}', b"plain text", b'{"text": 3}', *GOOD])
    for _ in range(2):
        assert len(ours.load_text_files(tmp_path)) == 90
        assert (
            f"2 unusable and 1 empty of 93 documents are left out; the first: {tmp_path}/b.jsonl:31 has an"
            in messages[-1]
        )
    assert sum("read line by line" in message for message in messages) == 1
    write(tmp_path / "b.jsonl", GOOD)  # other content under the same name
    assert len(ours.load_text_files(tmp_path)) == 60


def test_good_files_are_not_copied(tmp_path: Path, messages: list[str], cache: Path) -> None:
    assert len(ours.load_text_files(write(tmp_path / "a.jsonl", GOOD))) == 30
    assert not messages and not list(cache.rglob("text.arrow"))


@pytest.mark.parametrize("bad, kept", [(3, True), (4, False)])
def test_more_than_a_tenth_of_bad_lines_is_refused(bad: int, kept: bool, tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*GOOD[: 30 - bad], *[b"plain text"] * bad])
    if kept:
        assert len(ours.load_text_files(path)) == 27
    else:
        with pytest.raises(ValueError, match=r"a.jsonl' cannot be read as json: 4 of 30 .* the first: .*a.jsonl:27 no"):
            ours.load_text_files(path)
        assert not list(cache.rglob("report.json"))  # The files may be repaired.


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"\n".join(GOOD * 500))
    write(tmp_path / "a.jsonl.gz", GOOD)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"b.jsonl.gz' cannot be read as json: Compressed file ended"):
        ours.load_text_files(tmp_path)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:1000] + b"\0" * 20 + whole[1020:])
    with pytest.raises(ValueError, match=r"b.jsonl.gz' cannot be read as json: "):
        ours.load_text_files(tmp_path)


def test_rows_of_parquet_without_text(tmp_path: Path, messages: list[str]) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [None, "", *["document"] * 18]}), path)
    assert len(ours.load_text_files(path)) == 20
    assert "1 unusable and 1 empty of 20 documents are left out" in messages[-1]
    broken = pyarrow.array([b"\xff\xfe"] * 3).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), path)
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        ours.load_text_files(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["", ""]}), path)
    with pytest.raises(ValueError, match="zero documents with text"):
        ours.load_text_files(path)


def _load(cache: str, path: str, n: int) -> None:
    datasets.config.HF_DATASETS_CACHE = Path(cache)
    assert len(ours.load_text_files(path)) == n


def test_ranks_load_at_the_same_time(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*GOOD, b"plain text"] * 2000)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_load, args=(str(cache), str(path), 60_000)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert len(list((cache / "torchtitan_scape").glob("*/"))) == 1

"""Sequences out of documents of any length."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data import test_positions as positions
from tests.data.test_positions import stream
from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data import encoding
from torchtitan_scape.data.encoding import BoundaryTokenizer
from torchtitan_scape.data.loader import TextDataLoader, documents


def dataset(texts: list[str], tokenizer: Any, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> TextDataLoader:
    config = ours.DATASETS["text_files"]
    given = type(config)("", lambda _: Dataset.from_dict({"text": texts}), ours._text)
    monkeypatch.setitem(ours.DATASETS, "text_files", given)
    return TextDataLoader("text_files", "any", BoundaryTokenizer(tokenizer, "bos_eos"), seq_len, passes=1)


def tokens(items: Any) -> list[list[int]]:
    return [[*inputs["input"].tolist(), int(labels[-1])] for inputs, labels in items]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5), seq_len=st.integers(1, 9), stop=st.integers(0, 30))
def test_sequences_are_taken_from_the_concatenated_documents(
    lengths: list[int], seq_len: int, stop: int, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stopped after any sequence continues with the next one, in the last document too."""
    texts = [chr(ord("a") + i) * n for i, n in enumerate(lengths)]
    row = [i for text in texts for i in tokenizer.encode(text, add_bos=True, add_eos=True)]
    expected = [row[i : i + seq_len + 1] for i in range(0, len(row) - seq_len, seq_len + 1)]
    first = dataset(texts, tokenizer, seq_len, monkeypatch)
    items, found = first.sequences(), []
    for _ in range(min(stop, len(expected))):
        found += tokens([next(items)])
    again = dataset(texts, tokenizer, seq_len, monkeypatch)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + tokens(again.sequences()) == expected
    assert tokens(items) == expected[len(found) :]


def test_time_is_linear_in_the_length_of_a_document(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the rest of the document per sequence took 60 times as long."""
    document = dataset(["x" * 300_000], tokenizer, 16, monkeypatch)
    monkeypatch.setattr(document._tokenizer, "encode_pieces", lambda *_: [(0, list(range(300_000)))])
    begin = time.process_time()
    assert sum(1 for _ in document.sequences()) == 300_000 // 17
    assert time.process_time() - begin < 3


PIECE = 64


def loader(path: Path, tokenizer: Any, rank: int = 0, world: int = 1) -> TextDataLoader:
    return positions.loader(path, tokenizer, rank, world, epochs=1)


def labels(batches: Any, n: int | None = None) -> list[list[int]]:
    return [row for _, batch in itertools.islice(batches, n) for row in batch.tolist()]


@pytest.fixture
def novel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Documents of 1 to 3,000 words in four files, with pieces of 64 characters."""
    monkeypatch.setattr(encoding, "PIECE", PIECE)
    for file, lengths in enumerate([(3, 3000), (500, 1), (1, 2), (900,)]):
        texts = [" ".join(f"{file}w{i}" for i in range(n)) for n in lengths]
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


@pytest.fixture(params=["stored", "streamed"])
def kind(request: pytest.FixtureRequest, novel: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "streamed":
        stream(novel, monkeypatch)
    return str(request.param)


def test_a_run_resumes_inside_a_document(kind: str, novel: Path, tokenizer: Any) -> None:
    """The position was as long as the document's tokens, and was copied for every batch."""
    expected = labels(iter(loader(novel, tokenizer)))
    for n in (1, 2, 9, 150, 300):
        first = loader(novel, tokenizer)
        batches = iter(first)
        found = labels(batches, n)
        state = json.loads(json.dumps(first.state_dict()))
        assert len(state["dp_rank_0"]) < 700
        again = loader(novel, tokenizer)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert found + labels(iter(again)) == expected


@pytest.mark.parametrize("worlds", [(2, 1), (2, 3), (4, 1), (1, 2), (4, 2)])
def test_partial_documents_are_redistributed(worlds: tuple[int, int], novel: Path, tokenizer: Any) -> None:
    """Every token of an epoch once: those of sequences, and the rest of each reader."""
    old = [loader(novel, tokenizer, rank, worlds[0]) for rank in range(worlds[0])]
    found = [labels(iter(one), 11) for one in old]
    states = [one.state_dict() for one in old]
    assert max(len(json.loads(state[f"dp_rank_{i}"])["tokens"]) for i, state in enumerate(states)) <= 17
    new = [loader(novel, tokenizer, rank, worlds[1]) for rank in range(worlds[1])]
    for one in new:
        one.load_resharded(states)
        found.append(labels(iter(one)))
    left = [json.loads(one.state_dict()[f"dp_rank_{i}"])["tokens"] for i, one in enumerate(new)]
    rows = [json.loads(line) for file in novel.glob("*.jsonl") for line in file.read_text().splitlines()]
    total = sum(len(tokenizer.encode(row["text"], add_bos=True, add_eos=True)) for row in rows)
    # A sequence of 16 labels takes 17 tokens.
    assert 17 * sum(map(len, found)) + sum(map(len, left)) == total


def test_a_stream_refers_to_a_document_by_a_recent_position(tmp_path: Path, tokenizer: Any) -> None:
    """Resuming at document 1,000 does not read the 999 before it."""
    rows = [{"text": f"<{i}>"} for i in range(1200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_dataset("json", data_files=[str(tmp_path / "a.jsonl")], split="train", streaming=True)
    reader = documents("test", data, lambda sample: str(sample["text"]), 0, 1)
    for number, sample in enumerate(reader):
        unit = json.loads(json.dumps(reader.current))
        assert 0 <= number - unit[2] < 64
        if number % 111 == 0:
            assert reader.document(unit) == sample
    with pytest.raises(ValueError, match="test has no document 1200 in file 0"):
        reader.document([*unit[:5], 1200])


def test_no_more_than_a_piece_is_encoded_at_once(novel: Path, tokenizer: Any) -> None:
    """A text of 20 MB took 2.9 GB and 73 s; `prepare` encodes in the same pieces."""
    sizes: list[int] = []

    class Recorded:
        def __init__(self, encode: Any) -> None:
            self.encode = encode

        def __call__(self, texts: Any, **options: Any) -> Any:
            sizes.extend(map(len, [texts] if isinstance(texts, str) else texts))
            return self.encode(texts, **options)

    text = " ".join(f"w{i}" for i in range(3000))
    encoder, whole = BoundaryTokenizer(tokenizer, "bos_eos"), tokenizer.encode(text, add_bos=True, add_eos=True)
    library = encoder.tokenizer
    encoder.tokenizer = SimpleNamespace(
        to_str=library.to_str, encode=Recorded(library.encode), encode_batch_fast=Recorded(library.encode_batch_fast)
    )
    assert encoder.encode(text) == whole
    ids, lengths = encoder.encode_documents(["short", text, "x"])
    assert ids[7 : 7 + len(whole)].tolist() == whole and lengths == [7, len(whole), 3]
    assert max(sizes) < PIECE + 10 and sum(sizes) == 2 * len(text) + 6

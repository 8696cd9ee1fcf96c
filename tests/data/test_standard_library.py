"""The embedded corpus and the tokenizer trained on it."""

import importlib.util
import json
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_scape.data import EMBEDDED_TOKENIZER
from torchtitan_scape.data.corpora import MAX_DOCUMENT_BYTES, STANDARD_LIBRARY, Corpus, _read, lines, python_sources

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return STANDARD_LIBRARY.read()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED_TOKENIZER / "tokenizer.json"))


def test_every_reading_gives_the_same_corpus(corpus: Corpus) -> None:
    random.seed(1)  # The shuffle has its own generator.
    assert _read.__wrapped__(STANDARD_LIBRARY, None, MAX_DOCUMENT_BYTES) == corpus
    assert len(corpus.digest) == 12


def test_train_and_validation_share_nothing(corpus: Corpus) -> None:
    train, held_out = STANDARD_LIBRARY.sources(None)
    assert max(train) < min(held_out)
    assert not set(corpus.train) & set(corpus.validation)


def test_validation_is_a_twentieth_and_documents_are_small(corpus: Corpus) -> None:
    def size(documents: tuple[str, ...]) -> int:
        return sum(len(document.encode()) for document in documents)

    assert 0.04 < size(corpus.validation) / corpus.n_bytes < 0.08
    assert size(corpus.train) + size(corpus.validation) <= corpus.n_bytes
    for document in (*corpus.train, *corpus.validation):
        assert document
        assert len(document.encode()) <= MAX_DOCUMENT_BYTES or document.count("\n") <= 1


def test_documents_are_shuffled(corpus: Corpus) -> None:
    """Replicas read contiguous ranges; in file order each would train on different modules."""
    sources, _ = STANDARD_LIBRARY.sources(None)
    in_order = [piece for text in sources.values() for piece in lines(text, MAX_DOCUMENT_BYTES)]
    assert sorted(in_order) == sorted(corpus.train)
    half = len(in_order) // 2
    from_first_half = len(set(in_order[:half]) & set(corpus.train[:half])) / half
    assert 0.4 < from_first_half < 0.6


def test_data_sets_are_in_memory(corpus: Corpus) -> None:
    train, validation = STANDARD_LIBRARY.data_set("train"), STANDARD_LIBRARY.data_set("validation")
    assert tuple(train["text"]) == corpus.train
    assert tuple(validation["text"]) == corpus.validation
    assert train.column_names == ["text"]
    assert not train.cache_files


@given(st.text(alphabet=st.sampled_from("ab\n\f\r\u2028é"), max_size=60), st.integers(1, 20))
def test_concatenated_slices_equal_the_text(text: str, max_bytes: int) -> None:
    pieces = list(lines(text, max_bytes))
    assert "".join(pieces) == text
    for piece in pieces:
        assert piece
        assert len(piece.encode()) <= max_bytes or piece.count("\n") <= 1
    for piece in pieces[:-1]:
        assert piece.endswith("\n")


def test_sources_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("# coding: latin-1\nx = 'é'\n", encoding="latin-1")
    (tmp_path / "bad.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "blank.py").write_text("\n")
    (tmp_path / "_sysconfigdata_x.py").write_text("build = 1\n")
    (tmp_path / "note.txt").write_text("text\n")
    for folder in ("test", "site-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "b.py").write_text("y = 1\n")
    assert python_sources(tmp_path) == {"a.py": "# coding: latin-1\nx = 'é'\n"}
    with pytest.raises(ValueError, match="1 Python sources under"):
        STANDARD_LIBRARY.read(tmp_path)


def test_no_sources_is_an_error_with_a_fix(tmp_path: Path) -> None:
    """A zipped standard library has no folder of sources."""
    with pytest.raises(ValueError, match=r"0 Python sources .* full installation"):
        STANDARD_LIBRARY.read(tmp_path / "python311.zip")


def test_one_line_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(f"{name[0]} = 1\n")
    with caplog.at_level(logging.INFO):
        corpus = STANDARD_LIBRARY.read(tmp_path)
    assert (corpus.train, corpus.validation) == (("a = 1\n",), ("b = 1\n",))
    assert [record.message for record in caplog.records] == [
        "Standard-library corpus: 2 files, 0.0 MB, 1 training and 1 validation documents, digest " + corpus.digest
    ]


def test_tokenizer_has_4096_entries_with_both_special_tokens(tokenizer: Tokenizer) -> None:
    vocab = tokenizer.get_vocab()
    assert sorted(vocab.values()) == list(range(4096))
    config = json.loads((EMBEDDED_TOKENIZER / "tokenizer_config.json").read_text())
    assert vocab[config["bos_token"]] == 0
    assert vocab[config["eos_token"]] == 1


@given(st.text())
def test_tokenizer_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_TOKENIZER / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_compresses_the_validation_part(corpus: Corpus, tokenizer: Tokenizer) -> None:
    text = "".join(corpus.validation[:20])
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(text.encode()) / len(ids) > 3


def test_training_the_tokenizer_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_tokenizer", ROOT / "scripts" / "train_tokenizer.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    documents = STANDARD_LIBRARY.read().train[:20]
    for name in ("one", "two"):
        script.save(script.train(documents, 512), tmp_path / name, "twenty documents")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()

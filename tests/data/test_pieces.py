"""A text encoded in pieces has the tokens of the whole text."""

import logging
import random
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.data.conftest import tokenizer_in
from torchtitan_scape.data import BYTE_TOKENIZER, EMBEDDED_TOKENIZER, encoding
from torchtitan_scape.data.encoding import BoundaryTokenizer, rule_of

WORDS = ["the", "foo", "Bar", "don't", "we'LL", "x1y2", "2023", "123456", "é", "e\u0301", "ﬁ", "½", "²3", "日本語"]
WORDS += ["于2023年", "안녕1", "。", ".", "...", "!!", "/", "//", "_", "__init__", "'s", "🙂", "\u200b", "\u017f"]
WORDS += ["<s>", "<|end_of_text|>", "</s>1", "▁", "▁a"]
SPACES = [" "] * 12 + ["\n"] * 6 + [""] * 3
SPACES += ["  ", "   ", "\n\n", "\r\n", "\t", " \n", "\n ", "\n  ", "\x0b", "\x1c", "\x85", "\xa0", "\u3000"]
LLAMA_3, QWEN, GPT_OSS = sorted(encoding._KNOWN_SPLITS, key=lambda known: ("Lu" in known, "1,3" not in known))
WITHOUT_SPACE = [AddedToken("<s>"), AddedToken("</s>1"), AddedToken("2023", normalized=False)]
ADDED = [*WITHOUT_SPACE, AddedToken("<a b>", normalized=False), AddedToken("  "), AddedToken("!!", rstrip=True)]


def text_of(seed: int, words: int = 400) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(SPACES) for _ in range(words))


def trained(pre_tokenizer: Any, normalizer: Any = None, added: Any = ADDED, **model: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "ByteLevel" in str(pre_tokenizer) else []
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    # Words with the space before them, as SentencePiece counts them.
    text = "".join(text_of(i) for i in range(60)).replace("▁", "").replace(" ", "\n ")
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def byte_level(*steps: Any, normalizer: Any = None, **options: Any) -> Tokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, **{"use_regex": not steps, **options})
    return trained(pre_tokenizers.Sequence([*steps, last]) if steps else last, normalizer)


def known_split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def repository(folder: Any) -> Tokenizer:
    return tokenizer_in(folder).tokenizer


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
SENTENCE_PIECE: dict[str, Any] = {"unk_token": "<unk>", "fuse_unk": True, "added": WITHOUT_SPACE}
SAFE = {
    "bytes": lambda: repository(BYTE_TOKENIZER),
    "embedded": lambda: repository(EMBEDDED_TOKENIZER),
    "speeches": lambda: repository(EMBEDDED_TOKENIZER.parent / "speeches_tokenizer"),
    "GPT-2": byte_level,
    "GPT-NeoX": lambda: byte_level(normalizer=normalizers.NFC()),
    "StarCoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "Llama 3": lambda: byte_level(known_split(LLAMA_3)),
    "Qwen 2": lambda: byte_level(known_split(QWEN), normalizer=normalizers.NFC()),
    "gpt-oss": lambda: byte_level(known_split(GPT_OSS)),
    "Llama 2": lambda: trained(None, PREPEND, **SENTENCE_PIECE),
    "Llama 2, new form": lambda: trained(
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False), **SENTENCE_PIECE
    ),
    "always": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="always"), **SENTENCE_PIECE),
    "never": lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="never"), **SENTENCE_PIECE),
    "no prefix": lambda: trained(None, normalizers.Replace(" ", "▁"), **SENTENCE_PIECE),
}


@pytest.mark.parametrize("name", SAFE)
def test_pieces_have_the_tokens_of_the_whole_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming at any piece too."""
    monkeypatch.setattr(encoding, "PIECE", 1)
    tokenizer = SAFE[name]()
    rule = rule_of(tokenizer)
    assert rule is not None
    for seed in range(100, 140):
        text = text_of(seed)
        parts = list(rule.pieces(text))
        ids = [tokenizer.encode(part, add_special_tokens=False).ids for _, part in parts]
        assert list(chain(*ids)) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(parts) > 60
        assert list(rule.pieces(text, parts[7][0])) == parts[7:]


UNKNOWN = {
    "prefix space": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "another expression": lambda: byte_level(known_split(r"\p{L}+|\s+")),
    "no expression": lambda: byte_level(use_regex=False),
    "whitespace": lambda: trained(pre_tokenizers.Whitespace()),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "dropout": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), dropout=0.1),
    "tokens across spaces": lambda: _across_spaces(),
    "unigram": lambda: Tokenizer(models.Unigram([("a", -1.0), ("▁", -2.0)])),
    "word level": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}


def _across_spaces() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"a": 0, "▁": 1, "a▁": 2}, [("a", "▁")]))
    tokenizer.normalizer = PREPEND
    return tokenizer


def encoder_of(tokenizer: Any) -> BoundaryTokenizer:
    without_borders: Any = SimpleNamespace(tokenizer=tokenizer, bos_id=None, eos_id=None)
    return BoundaryTokenizer(without_borders, "eos")


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_tokenizers_encode_texts_whole(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = UNKNOWN[name]()
    assert rule_of(tokenizer) is None
    monkeypatch.setattr(encoding, "LONG", 1 << 16)
    split, text = encoder_of(tokenizer)._split, "a b " * (1 << 15)
    with caplog.at_level(logging.WARNING):
        assert list(split(text)) == list(split(text)) == [(0, text, True)]
    assert [record.getMessage() for record in caplog.records] == [
        "A text of 131,072 characters is encoded at once, because this tokenizer has no known place to split"
    ]


def test_a_text_without_a_place_is_one_piece(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(encoding, "LONG", 1 << 16)
    split = encoder_of(repository(BYTE_TOKENIZER))._split
    text = "x" * 100_000 + " y"
    assert list(split(text)) == [(0, text[:100_000], False), (100_000, " y", True)]
    assert "100,000 characters is encoded at once, because it has no safe place to split" in caplog.text

"""Encoding of documents: in pieces if they are long, and with tokens between them.

The tokenizers library needs over a hundred bytes of memory per character. A long text is therefore split where the
pre-tokenizer always splits, independent of the text around it, so that the tokens of the pieces, concatenated, are
those of the whole text:

    byte-level BPE   between a character and a single space or line break, and between letters and digits
    SentencePiece    at a single space, which the tokenizer writes as "▁" in front of the next piece

`rule_of` reads the rule from the tokenizer's definition. A tokenizer with another definition has none: its texts are
encoded whole. So is a text without a place to split, as far as the next one.

Characters that spell a special token, such as <|end_of_text|>, are ordinary text: as the token, they would end a
document in its middle.

Published tokenizers define the tokens between documents in one of three ways: names of BOS and EOS in
tokenizer_config.json, a template in tokenizer.json that adds them to every text, or neither (GPT-2). Documents get the
tokens that `[data] border` selects.
"""

import json
import logging
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from torchtitan_scape.titan.data import BaseTokenizer

logger = logging.getLogger(__name__)

LONG = 1 << 23  # Characters of a piece that are reported, because its tokens need gigabytes of memory.
Piece = tuple[int, str, bool]  # Index of its first character, its text, and whether it is the last one.
CHARACTERS_AT_ONCE = 1 << 20  # That are encoded together.
PIECE = 1 << 15  # Characters after which a text is split at the next possible place.

# Latin letters and those of scripts with few spaces. Letters that a library might classify differently are left out.
_LETTER = "A-Za-z\u3041-\u3096\u4e00-\u9fff\uac00-\ud7a3"
_BYTE_LEVEL = re.compile(rf"(?<=\S)(?= \S)|(?<=\S\n)(?=[^\W_])|(?<=[{_LETTER}])(?=[0-9])|(?<=[0-9])(?=[{_LETTER}])")
_SENTENCE_PIECE = re.compile(r"(?<=[^\s▁])(?= [^\s▁])")

# Expressions of Llama 3, Qwen 2 and 3, and gpt-oss. None has a match across one of the places of _BYTE_LEVEL.
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN_SPLITS = {
    _CONTRACTION + "|" + _WORD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE,
    _CONTRACTION + "|" + _WORD + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACE,
    f"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACE,
}


@dataclass(frozen=True)
class SplitRule:
    """Places where a text may be split.

    Attributes:
        places: Expression with empty matches.
        skipped: Characters after a place that belong to neither piece.
        added: Tokens that are found in the text before it is split. A place next to one of them is not used.
    """

    places: re.Pattern[str]
    skipped: int
    added: tuple[str, ...]

    def place(self, text: str, begin: int) -> int | None:
        """Return the first place at or after `begin`, or None."""
        for match in self.places.finditer(text, begin):
            place = match.start()
            if not any(text.find(a, max(0, place - len(a)), place + 1 + len(a)) >= 0 for a in self.added):
                return place
        return None

    def pieces(self, text: str, begin: int = 0) -> Iterator[tuple[int, str]]:
        """Yield the first character's index and the text of each piece, from the piece that starts at `begin` on."""
        while (place := self.place(text, begin + PIECE)) is not None:
            yield begin, text[begin:place]
            begin = place + self.skipped
        yield begin, text[begin:]


def rule_of(tokenizer: Any) -> SplitRule | None:
    """Return the rule of a tokenizer of the tokenizers library, or None if it is not known to have one."""
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    model, added = definition["model"], definition["added_tokens"]
    normalizers, splitters = _steps(definition, "normalizer"), _steps(definition, "pre_tokenizer")
    # Such a token is compared with the normalized text, where it might not look as in the text.
    if normalizers and any(token["normalized"] and not token["content"].isascii() for token in added):
        return None
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    contents = tuple(token["content"] for token in added)
    if _is_byte_level(normalizers, splitters):
        return SplitRule(_BYTE_LEVEL, 0, contents)
    prefixed = _sentence_piece_prefix(normalizers, splitters)
    if prefixed is None or any(re.search("[^▁]▁", token) for token in model["vocab"]):
        return None
    if any(re.search(r"\s", content) for content in contents):
        return None
    return SplitRule(_SENTENCE_PIECE, int(prefixed), contents)


def _steps(definition: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the normalizers or pre-tokenizers of a definition, in order."""
    step = definition[key]
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    steps: list[dict[str, Any]] = step.get("normalizers") or step.get("pretokenizers") or []
    return steps


def _is_byte_level(normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]]) -> bool:
    if any(step["type"] != "NFC" for step in normalizers):
        return False
    splits = False
    for step in splitters:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            splits |= step["use_regex"]
        elif step["type"] == "Split" and step["pattern"].get("Regex") in _KNOWN_SPLITS:
            if (step["behavior"], step["invert"]) not in (("Isolated", False), ("Removed", True)):
                return False
            splits = True
        elif step["type"] != "Digits":
            return False
    return splits and splitters[-1]["type"] == "ByteLevel"


def _sentence_piece_prefix(normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]]) -> bool | None:
    """Return whether a text gets a space in front, or None for another kind of tokenizer."""
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if not splitters and normalizers in ([prepend, replace], [replace]):
        return len(normalizers) == 2
    if not normalizers and len(splitters) == 1 and splitters[0]["type"] == "Metaspace":
        (step,) = splitters
        return step["prepend_scheme"] != "never" if step["replacement"] == "▁" else None
    return None


def border_ids(tokenizer: BaseTokenizer, border: str) -> tuple[list[int], list[int]]:
    """Return the ids before and after a document; empty if the tokenizer has no such token."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return [bos] if border == "bos_eos" and bos is not None else [], [eos] if eos is not None else []


def groups(items: Iterable[Any], most: int | None = None) -> Iterator[list[Any]]:
    """Yield items, tuples with a text in the second place, in groups that are encoded together."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += len(item[1])
        if size >= CHARACTERS_AT_ONCE or len(group) == most:
            yield group
            group, size = [], 0
    if group:
        yield group


class BoundaryTokenizer:
    """Encoder of documents with the border that `[data] border` selects, instead of the tokenizer's own template.

    Long texts are encoded in pieces.
    """

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self.tokenizer = tokenizer.tokenizer
        self.definition: str | None = getattr(tokenizer, "definition", None)  # See `name_borders`.
        self._before, self._after = border_ids(tokenizer, border)
        self._reported = False

    @cached_property
    def _rule(self) -> SplitRule | None:
        return rule_of(self.tokenizer)

    def _split(self, text: str, begin: int = 0) -> Iterator[Piece]:
        """Yield each piece of a text from `begin` on; see `SplitRule`."""
        if len(text) - begin <= PIECE:
            yield begin, text[begin:], True
            return
        for first, piece in self._rule.pieces(text, begin) if self._rule else ((begin, text[begin:]),):
            if len(piece) > LONG and not self._reported:
                self._reported = True
                reason = "it has no safe place to split" if self._rule else "this tokenizer has no known place to split"
                logger.warning(f"A text of {len(piece):,} characters is encoded at once, because {reason}")
            yield first, piece, first + len(piece) == len(text)

    def encode_pieces(self, text: str, begin: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of the first character and the ids of each piece of a text, from `begin` on."""
        for first, piece, last in self._split(text, begin):
            ids = self.tokenizer.encode(piece, add_special_tokens=False).ids
            yield first, self._around(first, ids, last)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [token for _, ids in self.encode_pieces(text) for token in ids]

    def encode_documents(self, documents: Sequence[str]) -> tuple["array[int]", list[int]]:
        """Return the concatenated ids of all documents, and the number of ids of each."""
        ids, ends = array("i"), [0]
        for pieces in groups(chain.from_iterable(map(self._split, documents))):
            texts = [piece for _, piece, _ in pieces]
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for (first, _, last), one in zip(pieces, encoded, strict=True):
                ids.extend(array("i", self._around(first, one.ids, last)))
                if last:
                    ends.append(len(ids))
        return ids, [end - begin for begin, end in pairwise(ends)]

    def _around(self, first: int, ids: list[int], last: bool) -> list[int]:
        """Return the ids of a piece with those before and after its document, if the piece begins or ends it."""
        return (self._before if first == 0 else []) + ids + (self._after if last else [])

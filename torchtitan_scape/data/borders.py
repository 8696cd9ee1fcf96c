"""Tokens between documents, for `prepare` and the text loader alike.

Published tokenizers define them in one of three ways: names of BOS and EOS in tokenizer_config.json, a template in
tokenizer.json that adds them to every text, or neither (GPT-2). Documents get the tokens that `[data] border` selects.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torchtitan_scape.data.encoding import SpecialTokenCount, TextEncoder
from torchtitan_scape.data.pieces import PIECE, SplitRule, rule_of
from torchtitan_scape.titan.data import BaseTokenizer

logger = logging.getLogger(__name__)

LONG = 1 << 23  # Characters of a piece that are reported, because its tokens need gigabytes of memory.


def border_ids(tokenizer: BaseTokenizer, border: str) -> tuple[list[int], list[int]]:
    """Return the ids before and after a document; empty if the tokenizer has no such token.

    Args:
        tokenizer: The tokenizer.
        border: "bos_eos" or "eos".
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return [bos] if border == "bos_eos" and bos is not None else [], [eos] if eos is not None else []


class Border:
    """The ids around documents; see `border_ids`."""

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self._before, self._after = border_ids(tokenizer, border)

    def around(self, first: int, ids: list[int], last: bool) -> list[int]:
        """Return the ids of a piece with those before and after its document.

        Args:
            first: First character of the piece; 0 if it begins the document.
            ids: Ids of the piece.
            last: Whether it ends the document.
        """
        return (self._before if first == 0 else []) + ids + (self._after if last else [])


class PieceSplitter:
    """Splitter of long texts for one tokenizer; see pieces.py."""

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self._tokenizer = tokenizer.tokenizer
        self._rule: SplitRule | None = None
        self._inspected = self._reported = False

    def __call__(self, text: str, begin: int = 0) -> Iterator[tuple[int, str, bool]]:
        """Yield index of the first character, text, and whether it is the last, of each piece from `begin` on."""
        if len(text) - begin <= PIECE:
            yield begin, text[begin:], True
            return
        if not self._inspected:
            self._rule, self._inspected = rule_of(self._tokenizer), True
        for first, piece in self._rule.pieces(text, begin) if self._rule else ((begin, text[begin:]),):
            if len(piece) > LONG and not self._reported:
                self._reported = True
                reason = "it has no safe place to split" if self._rule else "this tokenizer has no known place to split"
                logger.warning(f"A text of {len(piece):,} characters is encoded at once, because {reason}")
            yield first, piece, first + len(piece) == len(text)


class BoundaryTokenizer:
    """Tokenizer that adds the document border to a text and ignores the tokenizer's own template."""

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self.tokenizer = tokenizer.tokenizer
        self.definition: str | None = getattr(tokenizer, "definition", None)  # See `name_borders`.
        self._encode, self._special = TextEncoder(self.tokenizer).encode, SpecialTokenCount(self.tokenizer)
        self._border, self._split = Border(tokenizer, border), PieceSplitter(tokenizer)

    def encode_pieces(self, text: str, begin: int = 0) -> Iterator[tuple[int, list[int]]]:
        """Yield the index of the first character and the ids of each piece of a text, from `begin` on."""
        if begin == 0:
            self._special.add_and_log(text)
        for first, piece, last in self._split(text, begin):
            yield first, self._border.around(first, self._encode(piece), last)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [token for _, ids in self.encode_pieces(text) for token in ids]

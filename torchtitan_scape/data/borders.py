"""Tokens between documents, for `prepare` and the text loader alike.

Published tokenizers define them in one of three ways: names of BOS and EOS in tokenizer_config.json, a template in
tokenizer.json that adds them to every text, or neither (GPT-2). Documents get the tokens that `[data] border` selects.
"""

from typing import Any

from torchtitan_scape.titan.data import BaseTokenizer


def border_ids(tokenizer: BaseTokenizer, border: str) -> tuple[list[int], list[int]]:
    """Return the ids before and after a document; empty if the tokenizer has no such token.

    Args:
        tokenizer: The tokenizer.
        border: "bos_eos" or "eos".
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return [bos] if border == "bos_eos" and bos is not None else [], [eos] if eos is not None else []


class BoundaryTokenizer:
    """Tokenizer whose `encode` adds the document border to a text and ignores the tokenizer's own template."""

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self._encode = tokenizer.tokenizer.encode
        self._before, self._after = border_ids(tokenizer, border)

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return self._before + ids + self._after

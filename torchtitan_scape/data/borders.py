"""What stands between documents: written by `prepare` and by the text loader alike.

Published tokenizers say it in three ways: names of BOS and EOS in tokenizer_config.json, a template in tokenizer.json
that puts them around a text by itself, or neither (GPT-2's). Documents get what `[data] border` asks for.
"""

from typing import Any

from torchtitan_scape.titan.data import BaseTokenizer


def border_ids(tokenizer: BaseTokenizer, border: str) -> tuple[list[int], list[int]]:
    """The ids in front of a document and after it; none where the tokenizer has no such token.

    border: "bos_eos" or "eos".
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    return [bos] if border == "bos_eos" and bos is not None else [], [eos] if eos is not None else []


class BoundaryTokenizer:
    """A tokenizer whose `encode` puts the border around a text, whatever its own template would add."""

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self._encode = tokenizer.tokenizer.encode
        self._before, self._after = border_ids(tokenizer, border)

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return self._before + ids + self._after

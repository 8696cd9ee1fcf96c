"""What stands between documents: written by `prepare` and by the text loader alike."""

from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer


def border_ids(tokenizer: BaseTokenizer, border: str) -> tuple[list[int], list[int]]:
    """The ids in front of a document and after it; none where the tokenizer has no such token.

    Args:
        border: "bos_eos" or "eos". Where BOS and EOS are one token it stands after a document alone.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    before = [bos] if border == "bos_eos" and bos is not None and bos != eos else []
    return before, [eos] if eos is not None else []


class Bordered:
    """A tokenizer whose `encode` puts the border around a text, whatever its own template would add."""

    def __init__(self, tokenizer: BaseTokenizer, border: str) -> None:
        self._encode = tokenizer.tokenizer.encode
        self._before, self._after = border_ids(tokenizer, border)

    def encode(self, text: str, **_: Any) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False).ids
        return self._before + ids + self._after

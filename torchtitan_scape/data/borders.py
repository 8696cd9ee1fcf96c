"""Tokens between documents, for `prepare` and the text loader alike.

Published tokenizers define them in one of three ways: names of BOS and EOS in tokenizer_config.json, a template in
tokenizer.json that adds them to every text, or neither (GPT-2). Documents get the tokens that `[data] border` selects.
"""

from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"  # GPT-2's token, both BOS and EOS.


def name_borders(tokenizer: HuggingFaceTokenizer) -> None:
    """Set `eos_id` if TorchTitan's class does not find it.

    If BOS and EOS are the same token, as for GPT-2, TorchTitan's class finds only BOS. Documents would have no end, and
    masks that keep attention within a document would fail. The token then becomes EOS and BOS is removed, so that it is
    written once. A tokenizer that defines neither but has the entry <|endoftext|> uses it as EOS.
    """
    config: dict[str, Any] = tokenizer.config or {}
    if tokenizer.eos_id is None and tokenizer.bos_id is not None:
        if tokenizer._get_token_from_config(config, "eos_token") != tokenizer.bos_token:
            return
        tokenizer.eos_id, tokenizer.eos_token = tokenizer.bos_id, tokenizer.bos_token
        tokenizer.bos_id = tokenizer.bos_token = None
    elif tokenizer.eos_id is None and (found := tokenizer.token_to_id(END_OF_TEXT)) is not None:
        tokenizer.eos_id, tokenizer.eos_token = found, END_OF_TEXT


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

"""What stands between documents: written by `prepare` and by the text loader alike.

Published tokenizers say it in three ways: names of BOS and EOS in tokenizer_config.json, a template in tokenizer.json
that puts them around a text by itself, or neither (GPT-2's). Documents get what `[data] border` asks for.
"""

from typing import Any

from torchtitan_scape.titan.data import BaseTokenizer, HuggingFaceTokenizer

END_OF_TEXT = "<|endoftext|>"  # GPT-2's, both at once


def name_borders(tokenizer: HuggingFaceTokenizer) -> None:
    """Sets `eos_id` where TorchTitan's class does not find it.

    Where BOS and EOS are one token, as GPT-2's are, that class finds BOS alone: documents would get no end, and masks
    that keep attention inside a document fail. It becomes EOS, and there is no BOS, so that one border is written. A
    tokenizer that names neither and has the entry <|endoftext|> ends documents with it.
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

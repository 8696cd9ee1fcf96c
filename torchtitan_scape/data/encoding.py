"""Encoding of texts, and text that spells a special token of the tokenizer, such as <|end_of_text|>.

By default such characters are ordinary text: as the token, they would end a document in its middle.
`data.allow_special_tokens` encodes them as the token, for text that contains special tokens on purpose.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from torchtitan_scape.titan.tokenizer import panic_text, special_tokens_in_text

logger = logging.getLogger(__name__)


class TextEncoder:
    """Encoder of texts by the tokenizers library, without the tokenizer's template.

    Args:
        tokenizer: Tokenizer of the tokenizers library; its `encode_special_tokens` makes special tokens ordinary text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._as_text = tokenizer, tokenizer.encode_special_tokens

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokenizer.encode_special_tokens = self._as_text  # Pickling a tokenizer loses it.

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError if the tokenizer fails on it."""
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            return ids
        except BaseException as error:
            if reason := panic_text(error):
                text = f"a text of {len(text):,} characters, {text[:40]!r}..."
                raise ValueError(f"the tokenizer failed on {text}: {reason}") from None
            raise

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Raises ValueError if the tokenizer fails on one."""
        try:
            return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:
            if not panic_text(error):
                raise
        return [self.encode(text) for text in texts]  # Raises the error of the text on which it fails.


class SpecialTokenCount:
    """Count of the documents that spell a special token of a tokenizer.

    Args:
        tokenizer: Tokenizer of the tokenizers library.

    Attributes:
        documents: Number of such documents.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        parts = map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))
        self._pattern = re.compile("|".join(parts) or r"(?!)")
        self._as_token = special_tokens_in_text(tokenizer)
        self.documents = 0

    def is_in(self, text: str) -> bool:
        """Return whether a document spells a special token, without counting it."""
        return self._pattern.search(text) is not None

    def add_and_log(self, text: str) -> None:
        """Count a document, and log the 1st, 10th, 100th, ... one that spells a special token."""
        if (found := self._pattern.search(text)) is None:
            return
        self.documents += 1
        if re.fullmatch("10*", str(self.documents)):
            how = "the token" if found[0] in self._as_token else "ordinary text"
            logger.warning(
                f"documents that spell a special token: {self.documents:,}, the last one {found[0]!r}; it is encoded "
                f"as {how} (data.allow_special_tokens)"
            )

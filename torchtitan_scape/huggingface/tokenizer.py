"""Tokenizer of an exported model: it encodes text as in training."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.encoding import border_ids
from torchtitan_scape.huggingface.folder import DifferentError, quiet
from torchtitan_scape.titan.tokenizer import build_tokenizer

_TEXT = "It's 3.14,\n\tdef f(x):  # two  spaces\n        return 'é'"


@dataclass(frozen=True)
class Tokenizer:
    """The contents of tokenizer.json and tokenizer_config.json, and the ids for config.json.

    Attributes:
        start: Token before a text in training: BOS, or the EOS of the previous text; None if there was none.
        eos: Token after a text.
        encode: Encodes a text as in training, without the token after it.
    """

    encoder: str
    config: dict[str, Any]
    start: int | None
    eos: int | None
    encode: Callable[[str], list[int]]

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.encoder, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def check(self, folder: Path) -> None:
        """Raise DifferentError if transformers, with the folder's files, encodes a text otherwise than in training."""
        import transformers

        with quiet():
            tokens = transformers.AutoTokenizer.from_pretrained(folder)(_TEXT)["input_ids"]
        if tokens != (expected := self.encode(_TEXT)):
            raise DifferentError(f"the tokenizer of transformers encodes {_TEXT!r} as {tokens}, not as {expected}")


def tokenizer_of(config: JobConfig, length: int) -> Tokenizer:
    """Return the recipe's tokenizer. It adds BOS before a text if `[data] border` does, and nothing after it.

    Its class reads tokenizer.json unchanged; other classes rebuild it and split runs of spaces differently.
    """
    built = build_tokenizer(config)
    before, _ = border_ids(built, config.data.border)
    file = Path(config.model.hf_assets_path) / "tokenizer.json"
    # The original file, because newer libraries write merges in a format that older ones cannot read.
    encoder = json.loads(file.read_text(encoding="utf-8") if file.is_file() else built.tokenizer.to_str())
    start = before[0] if before else built.eos_id
    special_tokens = {"bos_token": built.bos_token if before else built.eos_token, "eos_token": built.eos_token}
    special_tokens |= {key: built._get_token_from_config(built.config or {}, key) for key in ("unk_token", "pad_token")}
    encoder["post_processor"] = _template(special_tokens["bos_token"], start) if before else None
    encoder["truncation"] = encoder["padding"] = None
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: token for key, token in special_tokens.items() if token is not None},
        "add_bos_token": bool(before),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }

    def encode(text: str) -> list[int]:
        return before + list(built.tokenizer.encode(text, add_special_tokens=False).ids)

    return Tokenizer(json.dumps(encoder, ensure_ascii=False), settings, start, built.eos_id, encode)


def _template(token: str | None, number: int | None) -> Any:
    """Return a post-processor that adds one token before each text."""
    pair = [token, "$A", f"{token}:1", "$B:1"]
    processor = TemplateProcessing(single=[token, "$A"], pair=pair, special_tokens=[(token, number)])
    return json.loads(processor.__getstate__())

"""TorchTitan's tokenizer, with checks of its folder and an EOS token for every document."""

import logging
import shlex
from itertools import chain
from pathlib import Path
from typing import Any

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.files import refuse_pointers
from torchtitan_scape.titan.config import JobConfig
from torchtitan_scape.titan.data import BaseTokenizer, HuggingFaceTokenizer, build_hf_tokenizer

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"  # GPT-2's token, both BOS and EOS.
# TorchTitan reads the first existing file; vocab.json and merges.txt belong together.
FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))


def name_borders(tokenizer: HuggingFaceTokenizer) -> None:
    """Set `eos_id` if TorchTitan's class does not find it.

    If BOS and EOS are the same token, as for GPT-2, TorchTitan's class finds only BOS. Documents would then have no
    EOS, and attention masks by document would fail. This function makes the token EOS and removes BOS, so that it is
    written once. A tokenizer that defines neither but has the entry <|endoftext|> uses it as EOS.
    """
    config: dict[str, Any] = tokenizer.config or {}
    if tokenizer.eos_id is None and tokenizer.bos_id is not None:
        if tokenizer._get_token_from_config(config, "eos_token") != tokenizer.bos_token:
            return
        tokenizer.eos_id, tokenizer.eos_token = tokenizer.bos_id, tokenizer.bos_token
        tokenizer.bos_id = tokenizer.bos_token = None
    elif tokenizer.eos_id is None and (token_id := tokenizer.token_to_id(END_OF_TEXT)) is not None:
        tokenizer.eos_id, tokenizer.eos_token = token_id, END_OF_TEXT
        added = tokenizer.tokenizer.get_added_tokens_decoder().get(token_id)
        if added is not None and not added.special:  # Otherwise it would be found in the text of documents.
            tokenizer.definition = tokenizer.tokenizer.to_str()  # Its digest in checkpoints is that of the folder's.
            tokenizer.tokenizer.add_special_tokens([END_OF_TEXT])


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """Return TorchTitan's tokenizer from the folder `model.hf_assets_path`, or raise ValueError."""
    folder = Path(job_config.model.hf_assets_path)
    expected = "tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json, which names BOS and EOS"
    fetch = f"hf download REPOSITORY tokenizer.json tokenizer_config.json --local-dir {shlex.quote(str(folder))}"
    if not folder.is_dir():
        raise ValueError(
            f"model.hf_assets_path: {str(folder)!r} is not a folder; expected one with {expected}: {fetch}"
        )
    if not any((folder / names[0]).is_file() for names in FILES):
        raise ValueError(f"model.hf_assets_path: {str(folder)!r} has no tokenizer; expected {expected}: {fetch}")
    try:
        refuse_pointers(*(folder / name for name in (*chain(*FILES), "tokenizer_config.json")))
        tokenizer = build_hf_tokenizer(job_config)
    except Exception as error:  # The tokenizers library raises no narrower type.
        raise ValueError(f"model.hf_assets_path: {str(folder)!r} cannot be read: {one_line(error)}") from error
    # A published tokenizer.json may enable truncation, or padding to the longest document of a batch.
    tokenizer.tokenizer.no_truncation()
    tokenizer.tokenizer.no_padding()
    name_borders(tokenizer)
    tokenizer.tokenizer.encode_special_tokens = True  # Text that spells a special token is ordinary text.
    if tokenizer.eos_id is None:
        logger.warning(f"The tokenizer in {str(folder)!r} defines no EOS: documents are concatenated without a border")
    return tokenizer

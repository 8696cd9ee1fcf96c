"""Datasets and tokenizers, including the embedded ones."""

from pathlib import Path

EMBEDDED_TOKENIZER = Path(__file__).parent / "tokenizer"
BYTE_TOKENIZER = Path(__file__).parent / "byte_tokenizer"
SPEECHES_TOKENIZER = Path(__file__).parent / "speeches_tokenizer"

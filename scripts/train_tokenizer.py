"""Train a committed tokenizer: byte-level BPE, 4096 entries, on the training part of a corpus.

Run from the repository root:

    python -m scripts.train_tokenizer    # the standard library
    python -m scripts.train_tokenizer --corpus speeches
    python -m scripts.train_tokenizer --bytes    # of the study: 256 bytes, BOS and EOS, no merges

Writes tokenizer.json and tokenizer_config.json, and prints the bytes per token on the validation part. The standard
library, and so its tokenizer, depends on the version of Python.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from platform import python_version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.common import run_command, write
from torchtitan_scape.data import BYTE_TOKENIZER, EMBEDDED_TOKENIZER, SPEECHES_TOKENIZER
from torchtitan_scape.data.corpora import PACKAGE, SPEECHES, STANDARD_LIBRARY, VERSION

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"
ENTRIES = 4096  # special tokens included
SMALLEST = 256 + 2  # bytes and special tokens
# Corpus, folder of its tokenizer, and description.
CORPORA = {
    "standard_library": (STANDARD_LIBRARY, EMBEDDED_TOKENIZER, f"standard library of Python {python_version()}"),
    "speeches": (SPEECHES, SPEECHES_TOKENIZER, f"messages of {PACKAGE} {VERSION}"),
}


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries, including the 256 bytes and both special tokens.

    It encodes any text, and `decode(encode(text)) == text`. BOS and EOS have ids 0 and 1.
    """
    tokenizer = Tokenizer(models.BPE())
    # The pattern of GPT-2 does not split a run of spaces, so that an indentation is one token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, trained_on: str) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`, which is created."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        # The dataset adds both; a prompt is encoded without them.
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "trained_on": trained_on,
    }
    write(folder / "tokenizer.json", tokenizer.to_str(pretty=False) + "\n")
    write(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def run(args: argparse.Namespace) -> None:
    source, own, text = CORPORA[args.corpus]
    corpus = source.read()
    tokenizer = train((), SMALLEST) if args.bytes else train(corpus.train, ENTRIES)
    folder = args.output or (BYTE_TOKENIZER if args.bytes else own)
    save(tokenizer, folder, "nothing: the 256 bytes" if args.bytes else f"{text}, digest {corpus.digest}")

    n_bytes = sum(len(document.encode()) for document in corpus.validation)
    n_tokens = sum(len(tokenizer.encode(document).ids) for document in corpus.validation)
    print(
        f"{folder}: {tokenizer.get_vocab_size()} entries, {n_bytes / n_tokens:.3f} bytes per token on "
        f"{n_bytes / 1e6:.2f} MB of validation text (corpus digest {corpus.digest})"
    )


if __name__ == "__main__":
    options = {
        "--output": dict(type=Path, help="folder (default: the package's)"),
        "--corpus": dict(choices=CORPORA, default="standard_library", help="text to train on (standard_library)"),
        "--bytes": dict(action="store_true", help=f"{SMALLEST} entries: bytes and special tokens, no text"),
    }
    sys.exit(run_command(__doc__, run, options))

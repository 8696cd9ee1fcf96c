"""Command-line parsing of the package's modules."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ValueError instead of exiting, so that all errors are reported as one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parser_of(module: str, doc: str | None) -> Parser:
    """Return the parser of `python -m MODULE`, with the docstring as help text and without abbreviated options."""
    raw = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"python -m {module}", description=doc, formatter_class=raw, allow_abbrev=False)


def one_line(error: BaseException) -> str:
    """Return the error message on a single line."""
    return " ".join(str(error).split())

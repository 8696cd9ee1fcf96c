"""Command lines of the modules that are started by themselves."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Raises ValueError in the place of ending the process: what is wrong is told in one line, as other input is."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parser_of(module: str, doc: str | None) -> Parser:
    """Of `python -m MODULE`, whose docstring is the help as it stands; options are spelled out."""
    raw = argparse.RawDescriptionHelpFormatter
    return Parser(prog=f"python -m {module}", description=doc, formatter_class=raw, allow_abbrev=False)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())

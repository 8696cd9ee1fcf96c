"""Parser of README and docs/: text, code blocks, commands, links and quoted text."""

import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass
class Command:
    """A command in a shell block: environment variables, program and arguments."""

    page: str
    text: str
    program: str
    arguments: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return [code for found, code in _BLOCK.findall(read(page)) if found == language]


def prose(page: str) -> str:
    """Return the page without code blocks."""
    return _BLOCK.sub("", read(page))


def quoted(page: str) -> list[str]:
    """Return the texts in backticks."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


def links(page: str) -> list[str]:
    """Return the targets of links and images inside the repository."""
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]


def headings(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def parse_command(page: str, text: str) -> Command | None:
    words = shlex.split(text, comments=True)
    variables = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return Command(page, text, words[0], words[1:], variables) if words else None


def commands(page: str) -> list[Command]:
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := parse_command(page, line)) is not None]


def tables(page: str) -> list[tuple[str, list[str]]]:
    """Return (text between the previous table or heading and this one, lines) of each table."""
    found: list[tuple[str, list[str]]] = []
    before: list[str] = []
    lines: list[str] = []
    for line in [*prose(page).splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if lines:
            found.append(("\n".join(before), lines))
            before, lines = [], []
        before = [] if line.startswith("#") else [*before, line]
    return found


def value_of(text: str) -> Any:
    """Return a TOML value, or None if the text is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, without names that contain digits, as "-1.50"."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return [one.lstrip("+") for one in re.findall(r"(?<![\w.`-])[+-]?\d+(?:\.\d+)?(?![\w.]*[A-Za-z_]|\.\d)", text)]

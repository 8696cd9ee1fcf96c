"""Smoke detectors for the language of README and docs/: riddle clauses, long table cells, titles, length."""

import re

import pytest

from tests.docs.pages import PAGES, prose, read

_CLAUSE = re.compile(r"\b(what|who|where|which|whose|whom)\b", re.I)
# The page that quotes TorchTitan's own descriptions.
_EXCEPTIONS = {"docs/reference/configuration.md"}
CHECKED = [page for page in PAGES if page not in _EXCEPTIONS]


def text_of(page: str) -> str:
    """The page's words: no blocks of code, no inline code, no targets of links, no HTML comments."""
    text = re.sub(r"<!--.*?-->", "", prose(page), flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`code`", text))


def cells_of(page: str) -> list[str]:
    """All cells of the page's tables, apart from rules."""
    rows = [line for line in text_of(page).splitlines() if line.startswith("|")]
    cells = [cell.strip() for row in rows for cell in row.strip().strip("|").split("|")]
    return [cell for cell in cells if not re.fullmatch(r":?-+:?", cell)]


@pytest.mark.parametrize("page", CHECKED)
def test_relative_clauses_are_rare(page: str) -> None:
    words = re.findall(r"[A-Za-z][\w'-]*", text_of(page))
    clauses = _CLAUSE.findall(text_of(page))
    assert len(clauses) <= max(1, 8 * len(words) / 1000), f"{len(clauses)} in {len(words)} words: {clauses}"


@pytest.mark.parametrize("page", CHECKED)
def test_table_cells_are_short(page: str) -> None:
    most = 12 if page == "README.md" else 20
    assert [cell for cell in cells_of(page) if len(cell.split()) > most] == []


@pytest.mark.parametrize("page", CHECKED)
def test_titles_are_no_questions(page: str) -> None:
    assert [line for line in prose(page).splitlines() if line.startswith("#") and "?" in line] == []


def test_the_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= 110

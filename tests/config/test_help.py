"""The help of the command line, and the configuration page that has the same text."""

import pytest

from tests.docs.pages import read
from torchtitan_scape.config.help import help_text
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.config.reference import page, sections
from torchtitan_scape.methods.registry import METHODS


def test_the_overview_fits_on_a_screen() -> None:
    lines = help_text().splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 110
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    assert names >= {"topology", "checkpoint", *(f"sync.{name}" for name in METHODS)}


def test_a_section_has_its_keys_with_types_and_defaults() -> None:
    text = help_text("sync.scape")
    assert "  --sync.scape.density: float (default 0.1)\n      Share of the entries" in text
    assert '--sync.scape.selection: "block" or "tensor" (default "block")' in text
    assert "--sync.method" not in text and "--sync.method" in help_text("sync")
    assert len(help_text("all").splitlines()) > 500


def test_every_key_of_this_project_has_a_description() -> None:
    assert [f"{s.name}.{key.name}" for s in sections() if s.is_own for key in s.keys if not key.description] == []


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match="--help sink: there is no such section; the sections are sync, sync"):
        parse(["--help", "sink"])


@pytest.mark.parametrize("arguments", [["--help"], ["--help", "sync"], ["-h", "--training.steps=3"]])
def test_help_ends_the_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 0 and "--" in capsys.readouterr().out


def test_the_configuration_page_is_up_to_date() -> None:
    """`python -m torchtitan_scape.config.reference > docs/reference/configuration.md` writes it."""
    assert read("docs/reference/configuration.md") == page()

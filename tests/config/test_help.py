"""The help of the command line."""

from dataclasses import dataclass, field, fields
from typing import Literal

import pytest

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse
from torchtitan_scape.config.reference import _descriptions, _type_text, help_text, sections
from torchtitan_scape.config.resolved import values_of
from torchtitan_scape.methods.registry import METHODS


@dataclass
class Base:
    first: int | None = None
    """Overridden"""

    second: list[list[int]] = field(default_factory=list)
    """
    Two
    lines.
    """


@dataclass
class Derived(Base):
    first: int | None = 3
    """Of the derived class"""

    bare: Literal["a", 1] = "a"
    last: str = ""
    """After a field without a description"""


def test_descriptions_are_the_strings_after_the_fields() -> None:
    expected = {"first": "Of the derived class", "second": "Two lines", "last": "After a field without a description"}
    assert _descriptions(Derived) == expected


def test_types_are_words() -> None:
    types = [_type_text(one.type) for one in fields(Derived)]
    assert types == ["integer", "list of lists of integers", '"a" or 1', "string"]
    assert _type_text(list[str] | str) == "list of strings or string" and _type_text(float | int) == "number or integer"


def test_every_key_of_the_configuration_is_listed() -> None:
    listed = [f"{one.name}.{key.name}" for one in sections() for key in one.keys]
    assert sorted(listed) == sorted(key for key, _ in values_of(JobConfig()))


def test_layout_and_free_keys_are_marked() -> None:
    marks = {f"{one.name}.{key.name}": key.marks for one in sections() for key in one.keys}
    assert marks["sync.scape.code"] == ("layout",) and marks["sync.scape.offload"] == ("free",)
    layout = {key for key, of_key in marks.items() if "layout" in of_key and key.startswith("sync.")}
    recorded = {f"sync.{name}.{key}" for name, entry in METHODS.items() for key in entry.options().layout()}
    assert layout == recorded & marks.keys()  # constants of the code are recorded, too


def test_the_overview_fits_on_a_screen() -> None:
    text = help_text()
    lines = text.splitlines()
    assert len(lines) <= 55 and max(map(len, lines)) <= 80
    names = {line.split()[0] for line in lines if line.startswith("  ")}
    assert names >= {"topology", "checkpoint", "training", "quantize", *(f"sync.{name}" for name in METHODS)}
    assert all(f"  {name} " in text for name in {one.name for one in fields(JobConfig)})


def test_a_section_has_its_keys_with_types_and_defaults() -> None:
    text = help_text("sync.scape")
    assert "  --sync.scape.density: number, default 0.1\n      Share of the entries" in text
    assert '--sync.scape.selection: "block" or "tensor", default "block"\n' in text
    assert "--sync.method" not in text


def test_a_section_names_its_subsections() -> None:
    text = help_text("sync")
    assert "--sync.method" in text and "--sync.scape" not in text
    assert "Subsections: sync.dense, sync.scape, " in text
    assert help_text("quantize").startswith("[quantize.linear.float8] "), "it has no keys of its own"


def test_the_help_has_80_columns() -> None:
    lines = help_text("all").splitlines()
    assert len(lines) > 500
    # Only words without spaces, such as addresses, are longer.
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--help sink: the section is unknown; known are sync, sync\.dense, "):
        parse(["--help", "sink"])


@pytest.mark.parametrize("arguments", [["--help"], ["--help", "sync"], ["-h", "--training.steps=3"]])
def test_help_ends_the_program(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 0 and "--" in capsys.readouterr().out

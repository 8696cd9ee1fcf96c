"""scripts/version_table.py: the lines of releases that passed, failed and could not be installed."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from scripts import version_table
from tests.docs.pages import ROOT
from torchtitan_scape.topology.torch_version import NEWEST, OLDEST, release_of

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="10"
 time="90.0"><testcase classname="tests.kernels.test_triton" name="test_a[0]"><failure message="m"/></testcase>
<testcase classname="tests.data.test_lines" name="test_b"><error message="m">e</error></testcase>
<testcase classname="tests.data.test_lines" name="test_c"/></testsuite></testsuites>"""


def main(arguments: list[str]) -> int:
    with patch.object(sys, "argv", ["version_table", *arguments]):
        return version_table.main()


def test_the_table_has_a_line_for_each_release(tmp_path: Path) -> None:
    (tmp_path / "new.xml").write_text(JUNIT)
    assert main(["2.15.0", "--not-installed", "no\nwheel", "--output", str(tmp_path)]) == 0
    assert main(["2.9.1", "--junit", str(tmp_path / "new.xml"), "--tests", "some", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "table.md").read_text()
    first, second = [line for line in page.splitlines() if line.startswith("| 2.")]
    assert " | some | 6 | 2 | 2 | 1.5 | " in first and first.split(" | ")[3].count(".") == 2
    assert second.startswith("| 2.15.0 | - | - | - | none | - |")
    assert "- 2.9.1: failed: `tests/kernels/test_triton.py::test_a[0]`\n- 2.9.1: failed: `tests/data/test_lines" in page
    assert "- 2.15.0: not tested, because it could not be installed: no wheel" in page
    # A later run replaces the line.
    assert main(["2.15.0", "--junit", str(tmp_path / "new.xml"), "--output", str(tmp_path)]) == 0
    assert "not tested" not in (tmp_path / "table.md").read_text()


def test_an_incomplete_run_leaves_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "half.xml").write_text(JUNIT[:200])
    for arguments in (["--junit", str(tmp_path / "half.xml")], ["--junit", str(tmp_path / "none.xml")], []):
        assert main(["2.14.1", *arguments, "--output", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3 and not (tmp_path / "table.md").exists()


def test_the_script_covers_the_supported_releases() -> None:
    text = (ROOT / "scripts" / "test_versions.sh").read_text()
    releases = [release_of(name) for name in text.split("releases=(2")[1].split(")")[0].join(("2", "")).split()]
    assert min(releases) == OLDEST and NEWEST in releases
    assert releases == [(2, minor) for minor in range(OLDEST[1], releases[-1][1] + 1)]

"""Stored results of scripts/test_versions.sh: one line for each release of torch.

python -m scripts.version_table 2.14.1 --junit 2.14.1.xml --tests "all but slow"
"""

import datetime
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.common import RESULTS, commit, guarded, markdown, package_version, parser, read, write

FOLDER = RESULTS / "torch_versions"
COLUMNS = ("torch", "triton", "numpy", "python", "tests", "passed", "failed", "skipped", "minutes", "commit", "date")


def counts(junit: Path) -> dict[str, Any]:
    """Return the numbers of tests in a JUnit file of pytest, and the names of those that failed.

    Raises:
        ValueError: The file is missing or incomplete: pytest ended early.
    """
    try:
        suite = ElementTree.parse(junit).getroot().find("testsuite")
        assert suite is not None
    except (OSError, ElementTree.ParseError, AssertionError) as error:
        raise ValueError(f"{junit} has no results ({error}); see the log of pytest") from error
    number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = number["failures"] + number["errors"]
    return {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
        "minutes": round(float(suite.get("time", "0")) / 60, 1),
        "failures": [
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return the page: a line for each release, oldest first, then failures and releases that were not tested."""
    order = sorted(results, key=lambda release: [int(part) for part in release.split(".")])
    rows = [{column: results[release].get(column, "-") for column in COLUMNS} for release in order]
    notes = []
    for release in order:
        result = results[release]
        notes += [f"- {release}: failed: `{name}`" for name in result.get("failures", [])]
        notes += [
            f"- {release}: failed, and passed when it was run again with commit {again['commit']}: `{again['name']}`"
            for again in result.get("rerun", [])
        ]
        if "not_installed" in result:
            notes.append(f"- {release}: not tested, because it could not be installed: {result['not_installed']}")
    parts = ["# Releases of torch", "`scripts/test_versions.sh`, on CPUs.", markdown(rows), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("release")
    options.add_argument("--junit", type=Path, help="results of pytest, run by this Python")
    options.add_argument("--tests", default="all but slow", help="the tests that ran")
    options.add_argument("--not-installed", help="why there are no results")
    options.add_argument("--output", type=Path, default=FOLDER)
    chosen = options.parse_args(arguments)

    def work() -> None:
        results = read(chosen.output / "versions.json") or {}
        result: dict[str, Any] = {"torch": chosen.release, "tests": chosen.tests}
        result |= {"commit": commit(".", ":!results/torch_versions"), "date": datetime.date.today().isoformat()}
        if chosen.not_installed:
            result |= {"tests": "none", "not_installed": " ".join(chosen.not_installed.split())}
        elif chosen.junit:
            result |= {name: package_version(name) for name in ("torch", "triton", "numpy")} | counts(chosen.junit)
            result["python"] = platform.python_version()
        else:
            raise ValueError("give --junit FILE, or --not-installed REASON")
        results |= {chosen.release: result}
        write(chosen.output / "versions.json", results)
        write(chosen.output / "table.md", table(results))

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())

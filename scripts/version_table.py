"""Stored results of scripts/test_versions.sh: one line for each release of torch.

python -m scripts.version_table 2.14.1 --junit 2.14.1.xml --tests "all but slow"
"""

import argparse
import datetime
import platform
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.common import RESULTS, commit, markdown, package_version, read, run_command, write

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
    tests, failures, errors, skipped = (
        int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    )
    return {
        "passed": tests - failures - errors - skipped,
        "failed": failures + errors,
        "skipped": skipped,
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
        lines = [f"failed: `{name}`" for name in result.get("failures", [])]
        for again in result.get("rerun", []):
            lines.append(f"failed, and passed when it was run again with commit {again['commit']}: `{again['name']}`")
        if "not_installed" in result:
            lines.append(f"not tested, because it could not be installed: {result['not_installed']}")
        notes += [f"- {release}: {line}" for line in lines]
    parts = ["# Releases of torch", "`scripts/test_versions.sh`, on CPUs.", markdown(rows), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def run(args: argparse.Namespace) -> None:
    results = read(args.output / "versions.json") or {}
    result: dict[str, Any] = {"torch": args.release, "tests": args.tests}
    result |= {"commit": commit(".", ":!results/torch_versions"), "date": datetime.date.today().isoformat()}
    if args.not_installed:
        result |= {"tests": "none", "not_installed": " ".join(args.not_installed.split())}
    elif args.junit:
        result |= {name: package_version(name) for name in ("torch", "triton", "numpy")} | counts(args.junit)
        result["python"] = platform.python_version()
    else:
        raise ValueError("give --junit FILE, or --not-installed REASON")
    results |= {args.release: result}
    write(args.output / "versions.json", results)
    write(args.output / "table.md", table(results))


def main() -> int:
    options = {
        "release": {},
        "--junit": dict(type=Path, help="results of pytest, run by this Python"),
        "--tests": dict(default="all but slow", help="the tests that ran"),
        "--not-installed": dict(help="why there are no results"),
        "--output": dict(type=Path, default=RESULTS / "torch_versions"),
    }
    return run_command(__doc__, run, options)


if __name__ == "__main__":
    sys.exit(main())

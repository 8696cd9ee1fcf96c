"""Wheels of all required packages for x86-64 and aarch64: dry runs of pip, which install nothing.

    python -m scripts.wheels    # the extras "trainer" and "torch"; writes results/wheels/

Needs a network. An index that serves metadata sends only that. A package without a wheel for a target is an error.
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from scripts.common import RESULTS, ROOT, RunError, markdown, names, package_version, read, run_command, write

MACHINES, PYTHONS = ("x86_64", "aarch64"), ("3.11", "3.12")
GLIBC = range(17, 29)  # minor numbers: manylinux_2_17 to manylinux_2_28
OLD_NAMES = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
# --platform and --python-version select wheels, but pip evaluates markers such as platform_machine == "aarch64" for the
# running interpreter. This program runs pip with the target's values.
PIP = """import platform, runpy, sys
machine, python = sys.argv[1:3]
platform.machine, platform.python_version = (lambda: machine), (lambda: python + ".0")
platform.python_version_tuple = lambda: (*python.split("."), "0")
del sys.argv[1:3]
runpy.run_module("pip", run_name="__main__")"""
Found = dict[str, tuple[str, str]]  # package -> version, platform of its wheel


def requirements(extras: list[str]) -> list[str]:
    """Return the dependencies of pyproject.toml with those of extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, left = list(project["dependencies"]), list(extras)
    while left:
        for line in project["optional-dependencies"][left.pop(0)]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", line)
            if own:
                left += names(own[1])
            else:
                found.append(line)
    return found


def platform_of(wheel: str) -> str:
    """Return the platform of a wheel's file name. Of several, the one with the lowest version of glibc."""
    tags = wheel.removesuffix(".whl").rsplit("-", 1)[1].split(".")
    minor = [int(match[1]) for tag in tags if (match := re.match(r"manylinux_2_(\d+)_", tag))]
    minor += [OLD_NAMES[name] for tag in tags if (name := tag.partition("_")[0]) in OLD_NAMES]
    return f"manylinux_2_{min(minor)}" if minor else tags[0]


def wheels(report: Mapping[str, Any]) -> Found:
    """Return the packages of a report of pip (--report), by normalized name."""
    found: Found = {}
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        file = unquote(item["download_info"]["url"].rpartition("/")[2])
        found[name] = (item["metadata"]["version"], platform_of(file))
    return found


def resolve(machine: str, python: str, wanted: list[str]) -> Found:
    """Resolve requirements for a machine and a version of Python. Raises RunError with pip's reason."""
    with tempfile.TemporaryDirectory() as folder:
        platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in GLIBC]
        command = [sys.executable, "-c", PIP, machine, python, "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += [f"--report={folder}/report.json", f"--target={folder}/none", "--only-binary=:all:"]
        command += [*platforms, f"--platform=manylinux2014_{machine}", f"--python-version={python}", *wanted]
        # No local folder of wheels: it may contain builds for this machine only.
        result = subprocess.run(command, env=os.environ | {"PIP_FIND_LINKS": folder}, capture_output=True, text=True)
        report = read(Path(folder) / "report.json")
    if result.returncode or report is None:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise RunError(f"{machine}, Python {python}: {errors[-1] if errors else result.stderr[-500:]}")
    return wheels(report)


def page(found: Mapping[tuple[str, str], Found]) -> str:
    """Return the page: numbers for each machine and Python version, then all packages."""
    heads = []
    for (machine, python), of in found.items():
        compiled = sum(tag != "any" for _, tag in of.values())
        head = {"machine": machine, "Python": python, "packages": len(of), "with compiled code": compiled}
        heads.append(head | {"torch": of.get("torch", ("-",))[0]})
    rows = []
    for name in sorted({name for of in found.values() for name in of}):
        # All different values, in the order of the targets.
        cells: dict[str, list[str]] = {"version": [], **{machine: [] for machine, _ in found}}
        for (machine, _), of in found.items():
            version, platform = of.get(name, ("", ""))
            cells["version"].append(version)
            cells[machine].append(platform)
        rows.append({"package": name} | {k: ", ".join(filter(None, dict.fromkeys(v))) or "-" for k, v in cells.items()})
    date = datetime.date.today().isoformat()
    note = (
        f"`python -m scripts.wheels`, {date}, pip {package_version('pip')}. Every package has a wheel. "
        "The columns of machines\nname the lowest version of glibc for the wheel, or any platform."
    )
    return "\n\n".join(["# Wheels of the required packages", note, markdown(heads), markdown(rows)]) + "\n"


def run(args: argparse.Namespace) -> None:
    wanted = requirements(["trainer", "torch"])
    found = {}
    for machine in MACHINES:
        for python in PYTHONS:
            found[machine, python] = resolve(machine, python, wanted)
            print(f"{machine}, Python {python}: wheels of {len(found[machine, python])} packages", flush=True)
    write(args.output / "table.md", page(found))


if __name__ == "__main__":
    sys.exit(run_command(__doc__, run, {"--output": dict(type=Path, default=RESULTS / "wheels")}))

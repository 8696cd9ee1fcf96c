"""scripts/wheels.py with made-up reports of pip: no network."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import wheels
from scripts.common import RunError


def item(name: str, version: str, file: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "version": version}, "download_info": {"url": f"https://host/a/{file}"}}


def report(machine: str) -> dict[str, Any]:
    many = f"manylinux2014_{machine}.manylinux_2_17_{machine}.manylinux_2_28_{machine}"
    return {
        "install": [
            item("PyYAML", "6.0.4", f"pyyaml-6.0.4-cp312-cp312-{many}.whl"),
            item("typing_extensions", "4.16.0", "typing_extensions-4.16.0-py3-none-any.whl"),
            item("torch", "2.13.0+x", f"torch-2.13.0%2Bx-cp312-cp312-manylinux_2_28_{machine}.whl"),
            *([item("nvidia-nvtx", "13", f"nvidia_nvtx-13-py3-none-manylinux1_{machine}.whl")] * (machine == "x86_64")),
        ]
    }


def pip(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Write a report as pip does; fail for aarch64 with Python 3.11 if the requirements contain "none"."""
    machine, python = command[3:5]
    if "none" in command and (machine, python) == ("aarch64", "3.11"):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: a\nERROR: No matching distribution found for none\n")
    path = next(word for word in command if word.startswith("--report=")).removeprefix("--report=")
    Path(path).write_text(json.dumps(report(machine)))
    return subprocess.CompletedProcess(command, 0, "", "")


def test_the_requirements_are_those_of_the_project() -> None:
    found = wheels.requirements(["trainer", "torch"])
    assert "torchtitan==0.2.2" in found and "torch>=2.13,<2.14" in found and "triton>=3.6" in found
    assert not any("scape" in line for line in found) and not any("pytest" in line for line in found)
    assert any("pytest" in line for line in wheels.requirements(["test"]))


def test_a_report_has_the_versions_and_platforms() -> None:
    assert wheels.wheels(report("x86_64")) == {
        "pyyaml": ("6.0.4", "manylinux_2_17"),
        "typing-extensions": ("4.16.0", "any"),
        "torch": ("2.13.0+x", "manylinux_2_28"),
        "nvidia-nvtx": ("13", "manylinux_2_5"),
    }


def test_the_table_has_both_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(sys, "argv", ["wheels"])
    wheels.run(argparse.Namespace(output=tmp_path))
    text = (tmp_path / "table.md").read_text()
    assert "| x86_64 | 3.11 | 4 | 3 | 2.13.0+x |\n" in text and "| aarch64 | 3.12 | 3 | 2 | 2.13.0+x |\n" in text
    assert "| pyyaml | 6.0.4 | manylinux_2_17 | manylinux_2_17 |\n" in text
    assert "| nvidia-nvtx | 13 | manylinux_2_5 | - |\n" in text and "host" not in text


def test_versions_that_differ_are_all_named() -> None:
    found = {("aarch64", "3.11"): {"a": ("1", "any")}, ("aarch64", "3.12"): {"a": ("2", "manylinux_2_28")}}
    assert "| a | 1, 2 | any, manylinux_2_28 |\n" in wheels.page(found)


def test_a_package_without_a_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(RunError, match=r"aarch64, Python 3.11: ERROR: No matching distribution found for none"):
        wheels.resolve("aarch64", "3.11", ["none"])


def test_markers_are_evaluated_for_the_target() -> None:
    """A requirement of another machine is ignored, and one that cannot be found is reported. pip reads no index."""

    def answer(machine: str, python: str, marker: str) -> str:
        command = [sys.executable, "-c", wheels.PIP, machine, python, "install", "--no-index", "--dry-run"]
        result = subprocess.run([*command, f"not-a-package; {marker}"], capture_output=True, text=True)
        return result.stdout + result.stderr

    for marker in ('platform_machine == "riscv64"', 'python_version == "3.9"', 'python_full_version == "3.9.0"'):
        assert "No matching distribution" in answer("riscv64", "3.9", marker)
        assert "No matching distribution" not in answer("x86_64", "3.12", marker)

"""The Containerfile: its sources and extras exist, and a wheel from its files has all packages."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from scripts.common import ROOT

FILE = (ROOT / "scripts" / "container" / "Containerfile").read_text()


def test_the_image_of_the_paper_is_the_default() -> None:
    assert "ARG BASE=nvcr.io/nvidia/pytorch:26.01-py3\nFROM ${BASE}\nARG EXTRAS=trainer\n" in FILE
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"trainer", "torch"} <= extras.keys() and "EXTRAS=torch,trainer" in FILE


def test_the_copied_files_make_a_complete_package(tmp_path: Path) -> None:
    """`COPY` keeps links, so their targets are copied too."""
    for given in re.findall(r"^COPY (.+)$", FILE, re.MULTILINE):
        *sources, target = given.split()
        for source in sources:
            if target == "./":
                shutil.copy(ROOT / source, tmp_path)
            else:
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, tmp_path / target, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "built", "."]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (wheel,) = (tmp_path / "built").iterdir()
    found = set(zipfile.ZipFile(wheel).namelist())
    needed = ("kernels/backends.py", "topology/layout.py", "train_configs/machines/h100.toml", "train.py")
    assert {f"torchtitan_scape/{name}" for name in needed} <= found

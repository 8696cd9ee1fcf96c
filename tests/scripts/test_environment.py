"""scripts/environment.sh and pyproject.toml: an installed torch is kept, on every kind of machine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

import torchtitan_scape
from tests.marks import slow
from torchtitan_scape.topology.torch_version import OLDEST

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ROCM_PATH", "LOADEDMODULES")
VERSION = torchtitan_scape.__version__
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def fake_python(path: Path, **has: bool) -> Path:
    """Write a Python that has the named packages, or is in a virtual environment, and prints what it should install."""
    answers = {"version('torch')": "torch", "find_spec('triton')": "triton", "sys.base_prefix": "environment"}
    cases = "\n".join(f'*"{part}"*) exit {0 if has.get(name) else 1} ;;' for part, name in answers.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/bash\n"
        'case "$1 $2" in\n'
        '"-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo "venv ${@:3}" ;;\n'
        '"-m pip") echo "install $6" ;;\n'
        f"{cases}\n"
        "*) exit 1 ;;\nesac\n"
    )
    path.chmod(0o755)
    return path


def source(folder: Path, python: Path, extra: str = "trainer", **environment: str) -> subprocess.CompletedProcess[str]:
    """Source a copy of the script as run_train.sh and run_tests.sh do."""
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "environment.sh", folder / "scripts" / "environment.sh")
    inherited = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    command = f'set -euo pipefail; source scripts/environment.sh "{extra}"'
    full = {**inherited, "PYTHON": str(python), **environment}
    return subprocess.run(["bash", "-c", command], cwd=folder, env=full, capture_output=True, text=True)


def installed(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return [line for line in result.stdout.splitlines() if line.startswith(("install ", "venv "))]


@pytest.mark.parametrize("extra, requirement", [("trainer", ".[torch,trainer]"), ("test", ".[torch,test]")])
def test_without_torch_the_tested_release_is_installed(extra: str, requirement: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python")
    result = source(tmp_path, python, extra, CUDA_VISIBLE_DEVICES="")
    assert installed(result) == ["venv .venv", f"install {requirement}"]


@pytest.mark.parametrize("triton, requirement", [(True, ".[trainer]"), (False, ".[triton,trainer]")])
def test_the_torch_of_the_system_is_kept(triton: bool, requirement: str, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", torch=True, triton=triton)
    result = source(tmp_path, python, ROCM_PATH="/opt/rocm-7.1.1")
    assert installed(result) == ["venv --system-site-packages .venv", f"install {requirement}"]


def test_the_torch_of_the_own_environment_is_kept(tmp_path: Path) -> None:
    """After `python -m venv .venv` and the installation of a build for ROCm."""
    fake_python(tmp_path / ".venv" / "bin" / "python", torch=True, triton=True, environment=True)
    result = source(tmp_path, fake_python(tmp_path / "python"), LOADEDMODULES="PrgEnv-gnu/8.7.0:rocm/7.1.1")
    assert installed(result) == ["install .[trainer]"]


def test_an_environment_of_the_user_is_not_changed(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "python", torch=True, triton=True, environment=True)
    result = source(tmp_path, python, "test")
    assert result.returncode == 1 and f"run: {python} -m pip install -e '.[test]'" in result.stderr
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name, value", [("ROCM_PATH", "/opt/rocm-7.1.1"), ("LOADEDMODULES", "cpe/26.03:rocm/7.1.1")])
def test_a_build_for_cuda_is_not_installed_on_a_machine_with_rocm(name: str, value: str, tmp_path: Path) -> None:
    result = source(tmp_path, fake_python(tmp_path / "python"), **{name: value})
    assert result.returncode == 1 and "no build for ROCm; install one first, see" in result.stderr
    assert result.stdout == "" and len(result.stderr.splitlines()) == 1 and not (tmp_path / ".venv").exists()
    allowed = source(tmp_path, fake_python(tmp_path / "python"), **{name: value}, CUDA_VISIBLE_DEVICES="")
    assert installed(allowed)[-1] == "install .[torch,trainer]"


def test_the_bound_of_the_script_is_that_of_the_package() -> None:
    text = (ROOT / "scripts" / "environment.sh").read_text()
    assert re.findall(r">= \((\d+), (\d+)\)", text) == [tuple(map(str, OLDEST))]


# ---------------------------------------------------------------------------------------------- pip's resolution

# The packages of an index, with the requirements of their real releases that matter here.
INDEX = {
    ("torch", "2.13.0"): ["triton==3.7.1"],
    ("torch", "2.13.0+cpu"): [],
    ("torch", "2.15.0"): ["triton==3.9.0"],
    ("torchtitan", "0.2.2"): ["torchdata>=0.8.0", "datasets>=2.21.0", "tokenizers", "tensorboard"],
    ("torchdata", "0.11.0"): ["torch>=2"],
    ("triton", "3.7.1"): [],
    ("triton", "3.9.0"): [],
    ("accelerate", "1.15.0"): ["torch>=2.0.0"],
}
KEPT = [  # installed: torch, and the package of its triton
    ("2.10.0+rocm7.1", "pytorch-triton-rocm", "3.6.0"),
    ("2.14.1+rocm7.2", "triton-rocm", "3.8.0"),
    ("2.10.0", "triton", "3.6.0"),
    ("2.11.0+cu129", "triton", "3.6.0"),
    ("2.12.1", "triton", "3.7.0"),
    ("2.13.0+cpu", "triton", "3.9.0"),
    ("2.14.1", "triton", "3.8.0"),
    ("2.15.0", "triton", "3.9.0"),
    ("2.11.0a0+eb65b36914.nv26.2", "pytorch-triton", "3.6.0+nv"),  # an NGC container
]


def metadata(name: str, version: str, requires: list[str], extras: dict[str, list[str]]) -> str:
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    for extra, required in extras.items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {one} ; extra == "{extra}"' for one in required)]
    return "\n".join(lines) + "\n"


def wheel(folder: Path, name: str, version: str, requires: list[str], extras: dict[str, list[str]]) -> None:
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata(name, version, requires, extras))
        kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{stem}.dist-info/WHEEL", kind)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of wheels without content: this project with its real requirements, and what it requires."""
    folder = tmp_path_factory.mktemp("index")
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in ("docs", "eval")}
    extras["test"] = [line.replace(",docs", "") for line in extras["test"]]
    wheel(folder, PROJECT["name"], VERSION, PROJECT["dependencies"], extras)
    for (name, version), requires in INDEX.items():
        wheel(folder, name, version, requires, {})
    for requirement in chain(PROJECT["dependencies"], *extras.values()):
        own = re.match(r"([\w-]+)[>=]=([\d.]+)", requirement)  # None for another extra of the project
        if own and not any(own[1] == known for known, _ in INDEX):
            wheel(folder, own[1], own[2], [], {})
    return folder


def would_install(python: Path, index: Path, requirement: str) -> dict[str, str]:
    """Return the packages that pip would install for this Python, with their versions."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run", "--quiet", "--no-index"]
    command += ["--find-links", str(index), "--report", "-", requirement]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PYTHONPATH": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in report["install"]}


@pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip")
@pytest.mark.parametrize("kept", [[KEPT[0], KEPT[3]], slow(KEPT)], ids=["some", "all"])
def test_pip_keeps_the_installed_torch_and_its_triton(
    kept: list[tuple[str, str, str]], index: Path, tmp_path: Path
) -> None:
    """For the builds of PyTorch, AMD and NVIDIA; --slow takes every supported release."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python3*/site-packages")
    name = PROJECT["name"]

    assert set(would_install(python, index, name)) == {name, "numpy"}
    clean = would_install(python, index, f"{name}[trainer,torch]")
    assert (clean["torch"], clean["triton"], clean["torchtitan"]) == ("2.13.0+cpu", "3.9.0", "0.2.2")
    assert set(clean) >= {"torchdata", "tokenizers", "datasets", "numpy"}
    for version, triton, triton_version in kept:
        made = []
        for package, release in (("torch", version), (triton, triton_version)):
            made.append(packages / f"{package.replace('-', '_')}-{release}.dist-info")
            made[-1].mkdir()
            (made[-1] / "METADATA").write_text(metadata(package, release, [], {}))
            (made[-1] / "INSTALLER").write_text("pip\n")
        found = would_install(python, index, f"{name}[{'test' if version == KEPT[0][0] else 'trainer'}]")
        assert not {"torch", "triton", triton} & set(found), (version, found)
        assert found["torchtitan"] == "0.2.2" and found["torchdata"] == "0.11.0"
        for folder in made:
            shutil.rmtree(folder)

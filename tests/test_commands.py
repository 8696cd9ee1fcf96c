"""The command `torchtitan-scape`, the extras of the project, and the files of the package that recipes name."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchtitan_scape
from tests import server
from tests.test_architecture import FILES, ROOT, graph, imports_of
from torchtitan_scape import start
from torchtitan_scape.__main__ import COMMANDS
from torchtitan_scape.config.recipes import load
from torchtitan_scape.core.command import EXTRAS, PROJECT, import_advice, install_command
from torchtitan_scape.core.files import packaged

LIBRARY = {"torch", "triton", "numpy"}
PUBLIC = graph()["torchtitan_scape.api"]


def third_party(modules: set[str]) -> set[str]:
    """Return the packages that these modules import, without this project's and Python's."""
    imported = {name.partition(".")[0] for module in modules for name in imports_of(FILES[module])}
    return imported - {"torchtitan_scape"} - set(sys.stdlib_module_names)


def test_every_import_is_a_requirement_or_of_an_extra() -> None:
    known = {package for packages in EXTRAS.values() for package in packages}
    product = {module for module in FILES if module.startswith("torchtitan_scape")}
    assert third_party(product) <= LIBRARY | known
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"docs", "test"}


def test_the_library_imports_torch_triton_and_numpy_only() -> None:
    edges, needed, left = graph(), set[str](), set(PUBLIC)
    while left:
        module = left.pop()
        needed.add(module)
        left |= edges[module] - needed
    assert "torchtitan_scape.methods.scape.method" in needed and "torchtitan_scape.checkpoint.migration" in needed
    assert third_party(needed) <= LIBRARY


def test_a_missing_package_ends_every_command_in_one_line(tmp_path: Path) -> None:
    """Without torch, which all of them import first."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CONFIG_FILE": ""}
    environment.pop("SCAPE_TRACEBACK", None)
    expected = f"error: the package torch is not installed; run: {install_command('torch')} (or install the build"
    module = [sys.executable, "-m"]
    for command in (
        *([*module, "torchtitan_scape", name] for name in ("train", "prepare")),
        *([*module, name] for name in ("torchtitan_scape.train", "torchtitan_scape.export")),
    ):
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 2 and result.stderr.startswith(expected), result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_advice_names_the_extra() -> None:
    missing = ModuleNotFoundError("No module named 'datasets.config'", name="datasets.config")
    assert import_advice(missing) == f"the package datasets is not installed; run: {install_command('trainer')}"
    assert import_advice(ImportError("torch 2.9.0 is installed;\ninstall")) == "torch 2.9.0 is installed; install"


def test_programs_of_others_keep_their_tracebacks(tmp_path: Path) -> None:
    """A package of a user that imports this library, as a command, with an import that fails."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text("import torchtitan_scape\n")
    (tmp_path / "theirs" / "train.py").write_text("import missing\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "theirs.train"]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and "Traceback" in result.stderr


def test_recipes_of_the_package_can_be_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").write_text('extends = "train_configs/embedded.toml"\n[training]\nsteps = 5\n')
    recipe = load("own.toml")
    assert recipe.table["training"]["steps"] == 5 and recipe.table["sync"]["method"] == "scape"


def test_versions_and_unknown_commands() -> None:
    result = server.run("torchtitan_scape.__main__", "--version")
    assert result.returncode == 0 and result.stdout.startswith(f"{PROJECT} {torchtitan_scape.__version__}, Python 3.")
    assert "torchtitan 0.2.2" in result.stdout
    for arguments in ([], ["tarin"], ["--port"]):
        result = server.run("torchtitan_scape.__main__", *arguments)
        assert result.returncode == 2 and ", ".join(COMMANDS) in result.stderr


def test_the_embedded_recipe_runs_in_any_folder(tmp_path: Path) -> None:
    """The recipe and its tokenizer are found in the package, and the output is written to the working directory."""
    environment = {**os.environ, "COMM_MODE": "fake_backend", "NGPU": "2"}
    result = server.run("torchtitan_scape.__main__", "train", environment=environment, folder=tmp_path)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "Recipe: /" in output and "torchtitan_scape/train_configs/embedded.toml" in output
    assert "does not exist" not in output and "the command line sets model" not in output
    planned = server.run(
        "torchtitan_scape.__main__", "plan", "--model", "train_configs/radius_2b.toml", folder=tmp_path
    )
    assert planned.returncode == 0 and "[sync]" in planned.stdout, planned.stderr


@pytest.mark.parametrize("optimizer", ["Muon", "AdamW"])
def test_a_dry_run_divides_the_optimizer(optimizer: str, tmp_path: Path) -> None:
    """The state of an optimizer is created, or has no values that can be read."""
    environment = {**os.environ, "COMM_MODE": "fake_backend", "NGPU": "4"}
    options = ["--sync.method=quantized_update", f"--optimizer.name={optimizer}"]
    result = server.run("torchtitan_scape.__main__", "train", *options, environment=environment, folder=tmp_path)
    output = result.stdout + result.stderr
    assert result.returncode == 0 and "Dry run: everything was built" in output, output


def test_files_of_the_package_are_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = Path(torchtitan_scape.__file__).parent
    assert packaged("train_configs/embedded.toml") == str(package / "train_configs/embedded.toml")
    assert packaged("./torchtitan_scape/data/tokenizer") == str(package / "data/tokenizer")
    for name in ("data/tokenizer", "train_configs/none.toml", "torchtitan_scape/../data", "/nowhere", "embedded.toml"):
        assert packaged(name) == name
    Path("train_configs").mkdir()
    Path("train_configs/embedded.toml").touch()
    assert packaged("train_configs/embedded.toml") == "train_configs/embedded.toml"


def test_the_launcher_starts_the_recipe_on_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.toml").touch()
    for name, value in {"NGPU": "3", "NNODES": "2", "RDZV_ENDPOINT": "node0:29500", "CONFIG_FILE": "own.toml"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher, recipe = start.prepare()
    assert {"--nnodes=2:2", "--nproc_per_node=3", "--rdzv_endpoint=node0:29500"} <= set(launcher)
    assert recipe == "own.toml"
    assert int(os.environ["OMP_NUM_THREADS"]) >= 1
    for name, given, message in (
        ("CONFIG_FILE", "own.toml, other.toml", r"CONFIG_FILE: other\.toml does not exist; recipes are in /"),
        ("CONFIG_FILE", ".", r"CONFIG_FILE: \. is a folder"),
        ("LOG_RANK", "a", r"LOG_RANK=a; it must be numbers of ranks, such as 0,1"),
        ("LOG_RANK", "5,3", r"LOG_RANK=5,3: a node has 3 ranks here, from 0 on; no output would be shown"),
    ):
        with monkeypatch.context() as wrong, pytest.raises(ValueError, match=message):
            wrong.setenv(name, given)
            start.prepare()
    monkeypatch.setenv("LOG_RANK", "2,5")
    start.prepare()


def test_gpus_are_counted_behind_the_output_of_a_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    for script, expected in (("echo welcome 7; echo 4", 4), ("echo lost >&2; exit 1", None), ("true", None)):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        if expected is not None:
            assert start.count_devices() == expected
        else:
            with pytest.raises(ValueError, match=r"cannot be counted: (lost|no output); set NGPU"):
                start.count_devices()

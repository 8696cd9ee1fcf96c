"""The installed package, outside of a clone and beside other packages. Needs a network and about 2 GB of disk."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USED_BY_OTHERS = "from kernels import get_kernel; import torchtitan_scape; print(torchtitan_scape.__file__)"
TORCH = "torch>=2.13,<2.14"  # that of the extra `torch`, which also installs Triton

pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment. Commands run in a folder that is no clone, with this project from the environment only."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
        self.programs, self.folder = folder / "environment" / "bin", folder / "work"
        self.folder.mkdir()
        (self.packages,) = (folder / "environment").glob("lib/python3*/site-packages")

    def run(self, program: str, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run a program of the environment, check its exit code and return its output."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "NGPU", "CONFIG_FILE")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{self.programs}:{os.environ['PATH']}", **variables}
        command = [str(self.programs / program), *arguments]
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=1800)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    def install(self, *requirements: str) -> None:
        self.run("pip", "install", "--quiet", *requirements)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as pip does from a Git address: from the source distribution of a clone without other files."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", folder / "clone"], check=True)
    build = "from setuptools import build_meta; build_meta.build_sdist('..')"
    environment = Environment(folder)
    environment.install("setuptools>=77")
    subprocess.run(
        [environment.programs / "python", "-c", build], cwd=folder / "clone", check=True, capture_output=True
    )
    (source,) = folder.glob("*.tar.gz")
    environment.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    before = {path.name for path in environment.packages.iterdir()}
    environment.install(str(wheel))
    added = {path.name for path in environment.packages.iterdir()} - before
    names = {name for name in added if not name.startswith("numpy")}
    assert names == {"torchtitan_scape", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    return environment


def test_the_wheel_contains_one_package_with_recipes(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in files if ".dist-info" not in name} == {"torchtitan_scape"}
    for folder, inside in (("kernels", "kernels"), ("topology", "topology"), ("train_configs", "train_configs")):
        tracked = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*.[pt][yo]*") if path.is_file()}
        assert {f"torchtitan_scape/{inside}/{path}" for path in tracked if "__pycache__" not in path.parts} <= files


def test_without_torch_the_planner_answers_and_other_commands_name_what_is_missing(installed: Environment) -> None:
    planned = installed.run("torchtitan-scape", "plan", "--machine", "vista", "--nodes", "8")
    assert "8 ranks (GH200" in planned
    for command, extra in (("train", "torch"), ("prepare", "trainer"), ("export", "torch")):
        assert f"-m pip install 'torchtitan-scape[{extra}]'" in installed.run("torchtitan-scape", command, code=2)


@pytest.mark.parametrize("first", ["kernels", "ours"])
def test_beside_the_package_kernels(first: str, installed: Environment, wheel: Path) -> None:
    """transformers uses the package `kernels` of Hugging Face, whose name a folder of this repository has."""
    own = ("--no-deps", "--force-reinstall")
    order = [("kernels",), (*own, str(wheel))] if first == "kernels" else [(*own, str(wheel)), (*own, "kernels")]
    for requirements in order:
        installed.install(*requirements)
    installed.install(TORCH, "transformers")
    assert str(installed.packages) in installed.run("python", "-c", USED_BY_OTHERS)
    # Nor does a clone on Python's path, without an installation, hide it.
    assert str(ROOT) in installed.run("python", "-c", USED_BY_OTHERS, PYTHONPATH=str(ROOT))


def test_the_program_of_the_page_trains(installed: Environment) -> None:
    page = (ROOT / "docs/getting_started/own_loop.md").read_text()
    program = next(code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "init_process_group" in code)
    Path(installed.folder, "toy.py").write_text(f"{program}print(stats['sent_bytes'])\ndist.destroy_process_group()\n")
    installed.install(TORCH)
    printed = installed.run("torchrun", "--nproc_per_node=2", "toy.py", OMP_NUM_THREADS="1")
    assert re.search(r"^\d+\.0", printed, re.M), printed


def test_the_embedded_run_ends(installed: Environment, wheel: Path) -> None:
    """Training, exact size of the default run, then export of its checkpoint."""
    assert "pip install 'torchtitan-scape[trainer]'" in installed.run("torchtitan-scape", "train", code=2)
    installed.install(f"{wheel}[trainer,triton]", TORCH)
    printed = installed.run("torchtitan-scape", "train", "--checkpoint.enable")
    assert "Summary of 200 steps" in printed and Path(installed.folder, "outputs/embedded/summary.json").exists()
    config = ("--config", "outputs/embedded/resolved.toml")
    installed.run("torchtitan-scape", "export", *config, "--output", "exported", "--no-check")
    assert Path(installed.folder, "exported/model.safetensors").exists()
    text = ("--dataset", "standard_library", "--tokenizer", "torchtitan_scape/data/tokenizer")
    installed.run("torchtitan-scape", "prepare", *text, "--output", "tokens", "--workers", "2")
    assert Path(installed.folder, "tokens/manifest.json").exists()
    assert "[eval]" in installed.run(
        "torchtitan-scape", "evaluate", "run", "--model", "exported", "--tasks", "piqa", code=2
    )

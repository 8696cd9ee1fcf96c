"""Launchers of the ranks, and the modules, caches and packages of the nodes; with the stand-ins of jobs.py."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests import server
from tests.marks import covering
from tests.scripts.slurm.jobs import EMBEDDED, REPORT, ROOT, SLURM, program, stand_ins, submit
from torchtitan_scape.runtime.device_settings import check_queues

# A stand-in for Open MPI's mpirun and TACC's ibrun: the variables of the ranks, and Slurm's of the daemons.
MPI = """#!/usr/bin/env python3
import os, subprocess, sys
given, ranks, names = sys.argv[1:], 0, []
if given == ["--version"]:
    print("mpirun (Open MPI) 4.1.4" if os.environ.get("VARIABLES") != "MPICH" else "HYDRA build details:")
    sys.exit(0)
while given and given[0].startswith("-"):
    option, value = given[0], given[1]
    ranks = int(value) if option in ("-n", "-np") else ranks
    names += [value] if option == "-x" else []
    given = given[2:]
kept = dict(os.environ) if sys.argv[0].endswith("ibrun") else {name: os.environ[name] for name in names}
assert not any(name.startswith(("SLURM", "OMPI")) for name in names), names
slurm = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
slurm |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
running = []
for rank in range(ranks):
    each = ranks // 2
    own = {"SLURMD_NODENAME": ("localhost", "second")[rank // each]}
    if os.environ["VARIABLES"] == "OMPI":
        own |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": ranks, "OMPI_COMM_WORLD_LOCAL_SIZE": each}
        own |= {"OMPI_COMM_WORLD_LOCAL_RANK": rank % each}
    elif os.environ["VARIABLES"] == "PMIX":
        own |= {"PMIX_RANK": rank}
    elif os.environ["VARIABLES"] == "cyclic":
        own |= {"PMIX_RANK": rank, "SLURMD_NODENAME": ("localhost", "second")[rank % 2]}
    running.append(subprocess.Popen(given, env={**kept, **slurm, **{k: str(v) for k, v in own.items()}}))
sys.exit(max([abs(process.wait()) for process in running]))
"""


def mpi(folder: Path) -> None:
    programs = stand_ins(folder)
    for name in ("mpirun", "ibrun"):
        program(programs / name, MPI)


@pytest.mark.parametrize("launcher, variables", covering(product(("mpirun", "ibrun"), ("OMPI", "PMIX"))))
def test_ranks_of_mpi_are_those_of_srun(launcher: str, variables: str, tmp_path: Path) -> None:
    """Slurm's variables are those of the daemons, one per node, in such a job."""
    mpi(tmp_path)
    environment = {"TRAIN_SCRIPT": REPORT, "LAUNCHER": launcher, "VARIABLES": variables, "RANKS_PER_NODE": "2"}
    result, _ = submit("vista", tmp_path, environment, "--a.key=two words")
    assert result.returncode == 0, result.stderr
    for rank in range(4):
        facts = json.loads((tmp_path / "logs" / f"facts-{rank}.json").read_text())
        assert (facts["RANK"], facts["WORLD_SIZE"], facts["LOCAL_RANK"]) == (str(rank), "4", str(rank % 2))
        assert facts["ranks_per_node"] == 2 and facts["arguments"] == ["--a.key=two words"]
        assert facts["NCCL_NET"] == "IB"


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"LAUNCHER": "jsrun"}, "LAUNCHER=jsrun; it must be auto, srun, ibrun or mpirun"),
        ({"LAUNCHER": "mpirun", "VARIABLES": "none"}, "set none of OMPI_COMM_WORLD_RANK, PMIX_RANK and PMI_RANK"),
        ({"LAUNCHER": "mpirun", "VARIABLES": "cyclic"}, "but ranks must fill one node after the other"),
        ({"LAUNCHER": "mpirun", "VARIABLES": "MPICH"}, "/mpirun is not that of Open MPI; use srun or ibrun"),
        ({"LAUNCHER": "ibrun", "NNODES": "1:2"}, "NNODES=1:2 needs LAUNCHER=srun, not ibrun"),
        ({"REQUEUE": "yes"}, "REQUEUE=yes; it must be 0 or 1"),
        ({"BROADCAST_NODES": "many"}, "BROADCAST_NODES=many; it must be a number of nodes"),
    ],
)
def test_a_wrong_launcher_is_refused(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    mpi(tmp_path)
    given = {"TRAIN_SCRIPT": REPORT, "CONFIG_FILE": EMBEDDED, "RANKS_PER_NODE": "2", **environment}
    result, _ = submit("vista", tmp_path, given)
    assert result.returncode == 2 and message in result.stderr, result.stderr
    if environment.get("VARIABLES") in (None, "MPICH"):
        assert len(result.stderr.splitlines()) == 1


def test_a_launcher_that_is_missing_is_named(tmp_path: Path) -> None:
    result, _ = submit("vista", tmp_path, {"TRAIN_SCRIPT": REPORT, "LAUNCHER": "ibrun"})
    assert result.returncode == 2 and "LAUNCHER=ibrun, but there is no ibrun on PATH" in result.stderr


@pytest.mark.parametrize("works", [True, False])
def test_vista_takes_the_first_launcher_that_starts_all_ranks(works: bool, tmp_path: Path) -> None:
    """Here srun fails, ibrun starts one rank too few, and mpirun works or hangs."""
    mpi(tmp_path)
    programs = tmp_path / "bin"
    shutil.copy(programs / "mpirun", programs / "works")
    ends = f'exec {programs / "works"} "$@"' if works else "sleep 60"
    for name, text in (("srun", "exit 1"), ("ibrun", "echo started"), ("mpirun", ends)):
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
    environment = {"TRAIN_SCRIPT": REPORT, "VARIABLES": "OMPI", "RANKS_PER_NODE": "1"}
    result, seconds = submit("vista", tmp_path, environment, srun=(programs / "srun").read_text())
    assert seconds < 60
    assert "srun started 0 of 2 ranks within 18 s" in result.stdout and "ibrun started 1 of 2 ranks" in result.stdout
    assert (result.returncode, (tmp_path / "logs" / "facts-1.json").exists()) == ((0, True) if works else (2, False))
    assert works or result.stderr.startswith("error: no launcher started the 2 ranks; set LAUNCHER to srun, ")


# A stand-in for Apptainer: writes its options, and runs the command on this host.
APPTAINER = """#!/bin/bash
echo "$*" >>"$STANDIN_FILE"
[ "$1" = exec ] || exit 1
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""


def test_ranks_in_a_container_of_apptainer(tmp_path: Path) -> None:
    """The batch host needs no Python with torch, and the environment of the submitting shell does not count."""
    program(stand_ins(tmp_path) / "apptainer", APPTAINER)
    (tmp_path / "bin" / "python3").symlink_to(server.python())
    environment = {"TRAIN_SCRIPT": REPORT, "PYTHON": "", "VIRTUAL_ENV": "/of/the/host", "PYTHONPATH": "/of/the/host"}
    environment |= {"CONTAINER": "image.sif", "CONTAINER_MOUNTS": "/data,/a:/b", "STANDIN_FILE": f"{tmp_path}/given"}
    result, _ = submit("vista", tmp_path, environment, "--a.key=two words")
    assert result.returncode == 0, result.stderr
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert facts["arguments"] == ["--a.key=two words"] and facts["PYTHONPATH"] == str(ROOT)
    lines = (tmp_path / "given").read_text().splitlines()
    logs = tmp_path / "logs"
    options = f"exec --nv --bind {ROOT}:{ROOT},{logs}:{logs},/data:/data,/a:/b --pwd {ROOT} image.sif"
    assert lines[0].startswith(f"{options} python3 -c import importlib"), "the packages are looked for in the image"
    assert lines.count(f"{options} scripts/slurm/rank.sh --a.key=two words") == 2


def test_ranks_in_a_container_of_pyxis(tmp_path: Path) -> None:
    """srun starts the container; rank.sh, and the check of the packages, run in it."""
    stand_ins(tmp_path)
    (tmp_path / "bin" / "python3").symlink_to(server.python())
    environment = {"TRAIN_SCRIPT": REPORT, "PYTHON": "", "CONTAINER": "registry#image:1", "NCCL_DEBUG": "WARN"}
    result, _ = submit("cluster", tmp_path, environment | {"SLURM_CPUS_PER_TASK": "1", "RANKS_PER_NODE": "1"})
    assert result.returncode == 0, result.stderr
    given = json.loads((tmp_path / "logs" / "facts-1.json").read_text())["srun"].split()
    logs = tmp_path / "logs"
    assert "--container-image=registry#image:1" in given and f"--container-workdir={ROOT}" in given
    assert f"--container-mounts={ROOT}:{ROOT},{logs}:{logs}" in given
    (names,) = (option for option in given if option.startswith("--container-env="))
    assert {"PYTHONPATH", "NCCL_DEBUG", "HF_HOME", "TRITON_CACHE_DIR"} <= set(names.split("=")[1].split(","))


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"CONTAINER_RUNTIME": "docker"}, "CONTAINER_RUNTIME=docker; it must be pyxis or apptainer"),
        ({"LAUNCHER": "mpirun", "VARIABLES": "OMPI"}, "CONTAINER_RUNTIME=pyxis needs LAUNCHER=srun; use apptainer"),
        ({"CONTAINER": "image.sif"}, "CONTAINER_RUNTIME=apptainer, but there is no apptainer on PATH"),
        ({"PYTHON": "/bin/false"}, "/bin/false in CONTAINER=image cannot import torch, triton and torchtitan, or the"),
    ],
)
def test_a_wrong_container_is_refused(environment: dict[str, str], message: str, tmp_path: Path) -> None:
    mpi(tmp_path)
    result, _ = submit("vista", tmp_path, {"TRAIN_SCRIPT": REPORT, "CONTAINER": "image", **environment})
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_caches_are_on_the_nodes_and_downloads_stay(tmp_path: Path) -> None:
    home = tmp_path / "home"
    node = tmp_path / "new" / "node"
    environment = {"TRAIN_SCRIPT": REPORT, "HOME": str(home), "NODE_DIR": str(node)}
    shown = {"HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_TOKEN_PATH", "TRITON_CACHE_DIR"}
    shown |= {"TORCHINDUCTOR_CACHE_DIR"}
    inherited = dict.fromkeys(shown, "")  # an empty value counts as none
    result, _ = submit("vista", tmp_path, {**environment, **inherited, "HF_DATASETS_CACHE": "/mine"})
    assert result.returncode == 0, result.stderr
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert {name: facts[name] for name in shown} == {
        "HF_HOME": f"{node}/huggingface",
        "HF_DATASETS_CACHE": "/mine",
        "HF_HUB_CACHE": f"{home}/.cache/huggingface/hub",
        "HF_TOKEN_PATH": f"{home}/.cache/huggingface/token",
        "TRITON_CACHE_DIR": f"{node}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{node}/inductor",
    }


def packages_to_copy(folder: Path) -> Path:
    """Return a folder with a module; sbcast is a stand-in."""
    packages = folder / "packages"
    packages.mkdir()
    (packages / "from_the_copy.py").write_text("")
    program(stand_ins(folder) / "sbcast", '#!/bin/bash\n[ "$1" = --force ] && cp "$2" "$3"\n')
    return packages


def test_large_jobs_copy_the_packages_to_the_nodes(tmp_path: Path) -> None:
    packages = packages_to_copy(tmp_path)
    node = tmp_path / "node"
    environment = {"TRAIN_SCRIPT": REPORT, "NODE_DIR": str(node), "BROADCAST_FROM": str(packages)}
    result, _ = submit("vista", tmp_path, {**environment, "BROADCAST_NODES": "3"})
    assert result.returncode == 0 and node.stat().st_mode & 0o777 == 0o700 and not list(node.iterdir())
    result, _ = submit("vista", tmp_path, {**environment, "BROADCAST_NODES": "2"})
    assert result.returncode == 0 and f"copying {packages} to 2 nodes" in result.stdout, result.stderr
    assert (node / "packages" / "from_the_copy.py").exists()
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert facts["PYTHONPATH"].endswith(f":{node}/packages") and not list(tmp_path.rglob("*.tar"))


@pytest.mark.parametrize("foreign", ["a link", "writable", "of another user"])
def test_a_folder_of_another_user_is_refused(foreign: str, tmp_path: Path) -> None:
    """Its name below /tmp can be predicted, and files in it would be imported and executed."""
    packages, node, other = packages_to_copy(tmp_path), tmp_path / "node", tmp_path / "other"
    for planted in (other / "packages", tmp_path / "node-packages"):
        planted.mkdir(parents=True)
        (planted / "sitecustomize.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    if foreign == "a link":
        node.symlink_to(other)
    else:
        other.rename(node)
        node.chmod(0o777 if foreign == "writable" else 0o755)
    if foreign == "of another user":
        if os.getuid():
            pytest.skip("only root can give a folder to another user")
        os.chown(node, 65534, 65534)
    environment = {"TRAIN_SCRIPT": REPORT, "NODE_DIR": str(node), "BROADCAST_FROM": str(packages)}
    result, _ = submit("vista", tmp_path, environment | {"BROADCAST_NODES": "2"})
    assert result.returncode == 2 and not (tmp_path / "executed").exists(), result.stderr
    reason = {"a link": "is a link", "writable": "can be written by other users (mode 777)"}.get(foreign, "belongs to ")
    assert result.stderr.startswith(f"error: NODE_DIR: {node} on ") and reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.fixture
def default_folder() -> Iterator[Path]:
    """The folder of the caches of the user "me" in job 7."""
    folder = Path("/tmp/scape-me-7")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_packages_and_caches_of_frontier_are_on_the_nvme(tmp_path: Path, default_folder: Path) -> None:
    """/mnt/bb/USER exists in jobs with -C nvme. Other jobs use /tmp, and NODE_DIR precedes both."""
    packages, nvme = packages_to_copy(tmp_path), tmp_path / "nvme"
    environment = {"TRAIN_SCRIPT": REPORT, "NVME_DIR": str(nvme), "NODE_DIR": "", "SLURM_JOB_ID": "7", "USER": "me"}
    environment |= {"BROADCAST_FROM": str(packages), "RANKS_PER_NODE": "1"}
    copy, none = {"BROADCAST_NODES": "2"}, {"BROADCAST_NODES": "0"}
    result, _ = submit("frontier", tmp_path, environment | none)
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert result.returncode == 0 and facts["TRITON_CACHE_DIR"] == f"{default_folder}/triton", result.stderr
    nvme.mkdir()
    result, _ = submit("frontier", tmp_path, environment | copy)
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert result.returncode == 0 and facts["TRITON_CACHE_DIR"] == f"{nvme}/scape-7/triton", result.stderr
    assert facts["PYTHONPATH"].endswith(f":{nvme}/scape-7/packages"), facts["PYTHONPATH"]
    assert f"into {nvme}/scape-7/packages\n" in result.stdout
    assert [path.name for path in nvme.glob("*/*/*.py")] == ["from_the_copy.py"]
    program(tmp_path / "bin" / "apptainer", APPTAINER)
    image = {"CONTAINER": "image.sif", "CONTAINER_MOUNTS": "/data", "STANDIN_FILE": f"{tmp_path}/given"}
    submit("frontier", tmp_path, environment | none | image)
    assert f",/data:/data,{nvme}:{nvme} --pwd" in (tmp_path / "given").read_text()
    result, _ = submit("frontier", tmp_path, environment | none | {"NODE_DIR": str(tmp_path / "own")})
    facts = json.loads((tmp_path / "logs" / "facts-1.json").read_text())
    assert result.returncode == 0 and facts["TRITON_CACHE_DIR"] == f"{tmp_path}/own/triton", result.stderr


@pytest.mark.parametrize(
    "hip, available, expected",
    [
        ("'6.4.43482'", "rocm/6.2.4 rocm/6.4.1 rocm/6.4.2 rocm/7.1.1", "rocm/6.4.2"),
        ("'7.1.25424-4179531dcd'", "rocm/6.4.1 rocm/7.1.1(D)", "rocm/7.1.1"),
        (
            "'7.2.1'",
            "rocm/6.4.1 rocm/7.1.1",
            "torch was built for ROCm 7.2, and there is no module rocm/7.2; available:",
        ),
        ("None", "rocm/7.1.1", "is not built for ROCm"),
    ],
)
def test_the_rocm_module_matches_the_torch_build(hip: str, available: str, expected: str, tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("raise ImportError('not on a login node')\n")
    (torch / "version.py").write_text(f"cuda: str | None = None\nhip: str | None = {hip}\n")
    module = f'module() {{ tr " " "\\n" <<<"{available}" >&2; }}; '
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = f"{module} source scripts/slurm/machines.sh; rocm_module"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if expected.startswith("rocm/"):
        assert result.stdout == f"{expected}\n" and result.returncode == 0, result.stderr
    else:
        assert expected in result.stderr and result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_torchrun_has_the_settings_of_the_jobs(tmp_path: Path, default_folder: Path) -> None:
    """A job script may source machines.sh and start torchrun."""
    command = "source scripts/slurm/machines.sh frontier && env"
    given = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "MODULES": "", "SLURM_JOB_NUM_NODES": "2", "USER": "me"}
    given |= {"SLURM_JOB_ID": "7", "FI_CXI_RX_MATCH_MODE": "software"}
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, env=given, capture_output=True, text=True)
    found = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    assert found["NCCL_NET"] == "AWS Libfabric" and found["FI_CXI_RX_MATCH_MODE"] == "software"
    assert not check_queues(found, rocm=True, collectives_overlap=True)
    assert found["MIOPEN_USER_DB_PATH"] == f"{default_folder}/miopen"
    assert found["TRITON_CACHE_DIR"] == f"{default_folder}/triton" and found["TOKENIZERS_PARALLELISM"] == "false"


def test_the_rocm_release_may_be_that_of_the_environment_in_the_repository(tmp_path: Path) -> None:
    """As a job uses `.venv` if PYTHON has no torch."""
    program(tmp_path / ".venv" / "bin" / "python", "#!/bin/sh\necho 7.1\n")
    command = f"source {SLURM / 'machines.sh'}; rocm_of_torch"
    environment = {**os.environ, "PYTHON": "/bin/false"}
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout == "7.1\n", result.stderr


@pytest.mark.parametrize("replaced", [False, True])
def test_a_signal_does_not_end_a_launcher_that_is_a_shell_script(replaced: bool, tmp_path: Path) -> None:
    """The program that the script started, or that replaced it, receives the signal; here it ends with exit code 7.

    The children of a program are daemons, which the signal would end.
    """
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        "import signal, subprocess, sys\n"
        "daemon = subprocess.Popen(['sleep', '60'])\n"
        "def end(*_):\n    alive = daemon.poll() is None\n    daemon.kill()\n    sys.exit(7 if alive else 8)\n"
        "signal.signal(signal.SIGUSR1, end)\nprint('ready', flush=True)\ndaemon.wait()\nsignal.pause()\n"
    )
    script = program(tmp_path / "ibrun", f"#!/bin/bash\n{'exec ' * replaced}{sys.executable} {ranks}\nexit $?\n")
    command = """source scripts/slurm/launch.sh
"$1" >"$2" & child=$!
until grep -q ready "$2"; do sleep 0.1; done
pass_signal "$child"; wait "$child"; echo $?"""
    arguments = ["bash", "-c", command, "job", str(script), str(tmp_path / "out")]
    result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout == "7\n", result.stderr

"""Jobs with stand-ins for srun and scontrol, and processes as nodes."""

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import server

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
SLURM = ROOT / "scripts" / "slurm"
REPORT = "-m tests.scripts.slurm.report"
EMBEDDED = "train_configs/embedded.toml"
SET_BY_JOBS = (
    "CONFIG_FILE",
    "TRAIN_SCRIPT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TRITON_CACHE_DIR",
)  # not those of the tests


def free_job() -> int:
    """Return a job id whose port (see launch.sh) is free."""
    for _ in range(100):
        job = random.randrange(100_000, 1_000_000)
        with socket.socket() as s:
            if s.connect_ex(("localhost", 15000 + job % 15000)):
                return job
    raise RuntimeError("no port is free")


def program(path: Path, text: str) -> Path:
    """Write an executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def stand_ins(folder: Path) -> Path:
    """Return a folder for PATH with stand-ins for srun and scontrol."""
    programs = folder / "bin"
    for name, text in (
        ("srun", f'exec "{sys.executable}" "{HERE}/srun.py" "$@"'),
        (
            "scontrol",
            'case "$1 $2" in "show hostnames") tr "," "\\n" <<<"$3" ;;\n'
            f'requeue\\ *) echo "$2" >>"{folder}/requeued" ;;\nesac',
        ),
    ):
        program(programs / name, f"#!/bin/bash\n{text}\n")
    return programs


def real_mpi(folder: Path, launcher: str) -> dict[str, str]:
    """Place a real launcher of MPI in a folder for PATH; return the variables of a job with it. Skips without it.

    Args:
        launcher: "mpirun" for Open MPI's, "hydra" for MPICH's, which is started as `ibrun` starts it on some systems.
    """
    names = {"mpirun": ("mpirun.openmpi", "mpirun"), "hydra": ("mpiexec.hydra",)}[launcher]
    package = {"mpirun": "openmpi-bin", "hydra": "mpich"}[launcher]
    found = next(filter(None, map(shutil.which, names)), None)
    if found and launcher == "mpirun":
        version = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
        found = found if "Open MPI" in version or "OpenRTE" in version else None
    if found is None:
        pytest.skip(f"there is no {names[0]}; on Debian: apt install {package}")
    script = program(folder / ("mpirun" if launcher == "mpirun" else "ibrun"), f'#!/bin/bash\nexec {found} "$@"\n')
    # Open MPI refuses to run as root otherwise. Slurm removes CUDA_VISIBLE_DEVICES if a job has no GPU.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # Hydra starts its daemons with srun in a job of Slurm, and here srun is a stand-in. All ranks are on this host.
    return {"LAUNCHER": script.name, "HIP_VISIBLE_DEVICES": "", "HYDRA_BOOTSTRAP": "fork", **root}


def allocation(directory: Path) -> dict[str, str]:
    """Return the environment of the batch script of a job on two nodes."""
    job = str(free_job())
    return {
        "SLURM_JOB_ID": job,
        "SLURM_JOBID": job,
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "localhost,second",
        "SLURM_SUBMIT_DIR": str(directory),
        "SLURM_TASKS_PER_NODE": "8(x2)",
        "SLURM_NTASKS_PER_NODE": "8",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }


def submit(
    machine: str, folder: Path, environment: dict[str, str], *arguments: str, directory: Path = ROOT, **keep: str
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the batch script as slurmd does: a copy of it, in the directory of submission, on the first of two nodes."""
    programs = stand_ins(folder)
    for name, text in keep.items():  # other stand-ins
        (programs / name).write_text(text)
    script = folder / "slurm_script"
    shutil.copy(SLURM / f"{machine}.sbatch", script)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in SET_BY_JOBS
        and not name.startswith("NCCL_")
        and not (name.endswith("_VISIBLE_DEVICES") and value)  # an empty value selects the CPU
    }
    ours = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": server.python(),
        "MODULES": "",
        "LOG_DIR": str(folder / "logs"),
        "NODE_DIR": str(folder / "node"),
        "OMP_NUM_THREADS": "1",
    }
    begin = time.monotonic()
    result = subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=directory,
        env={**inherited, **allocation(directory), **ours, **environment},
    )
    return result, time.monotonic() - begin


# ------------------------------------------------------------------------------------------------ training

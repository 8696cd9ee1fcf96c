"""Jobs on a real Slurm cluster."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.common import ROOT
from scripts.faults.fault_runs import COMMON
from scripts.slurm_cluster import SlurmCluster

EMBEDDED = "train_configs/embedded.toml"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "GONE")
SMALL = [*COMMON, "--checkpoint.interval=1000", "--training.local_batch_size=1", "--training.seq_len=64"]


class Job:
    """A submitted job, its output and its state.

    Args:
        folder: for the job's output, its logs and the run.
        arguments: of the trainer.
        options: of sbatch.
        user: who submits the job, by default root.
        environment: overrides the variables of the job.
    """

    def __init__(
        self,
        slurm: SlurmCluster,
        machine: str,
        folder: Path,
        *arguments: str,
        options: Sequence[str] = (),
        user: str | None = None,
        **environment: str,
    ) -> None:
        self.slurm, self.folder, self.output = slurm, folder, folder / "job.out"
        folder.mkdir(exist_ok=True)
        own = {"CONFIG_FILE": EMBEDDED, "LOG_DIR": str(folder / "logs"), "MODULES": "", "PYTHON": sys.executable}
        own |= {"NCCL_NET": "none", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "LOG_RANK": "0"} | environment
        ranks = environment.get("RANKS_PER_NODE", "1")
        common = ["--parsable", "--nodes=2", "--time=20", f"--output={self.output}", f"--ntasks-per-node={ranks}"]
        common += [f"--gpus-per-node={ranks}"] if machine == "frontier" else []
        script = str(ROOT / "scripts" / "slurm" / f"{machine}.sbatch")
        given = [*SMALL, f"--job.dump_folder={folder / 'run'}", *arguments]
        answer = slurm.run("sbatch", *common, *options, script, *given, env=own, timeout=60, user=user)
        assert answer.returncode == 0, answer.stderr
        self.number = answer.stdout.strip()

    @classmethod
    def submitted(cls, slurm: SlurmCluster, number: str, output: Path) -> "Job":
        """Return a job that something else has submitted."""
        job = cls.__new__(cls)
        job.slurm, job.number, job.output = slurm, number, output
        return job

    def state(self) -> str:
        text = self.slurm.output("scontrol", "show", "job", self.number)
        return text.split("JobState=")[1].split()[0] if "JobState=" in text else "GONE"

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, until: Callable[[], object], what: str, seconds: float = 900.0) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            ended = self.state() in ENDED and not until()  # The state may change between both.
            assert not ended, f"{what}: {self.state()}\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"{what}: {self.state()}\n{self.text()[-3000:]}"
            time.sleep(0.5)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: f"step: {step:2d}  " in self.text(), f"step {step}")

    def wait_for_end(self) -> None:
        self.wait(lambda: self.state() in ENDED, "the end")

    def start_now(self) -> None:
        """Start a requeued job, which Slurm would do after two minutes.

        Not within the same second: nodes refuse the credential of a job that was revoked then.
        """
        self.wait(lambda: self.state() == "PENDING", "the requeue")
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+5")


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "run" / "checkpoint" / f"step-{step}"

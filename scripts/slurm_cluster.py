"""Run a command on a real Slurm cluster on this host: slurmctld and slurmd in namespaces of their own.

    python -m scripts.slurm_cluster --nodes 2 -- sbatch --wait --nodes=2 scripts/slurm/vista.sbatch
    python -m scripts.slurm_cluster --nodes 2 --user $USER -- bash       # try sbatch, squeue, scancel; not as root

The controller and every node have a network namespace (scripts/emulated_cluster.py) and a host name. The command runs
on the controller, the login node, as root or as the user that --user names, and so do its jobs. Needs root, iproute2
and Slurm: on Debian, apt install slurm-wlm munge. The configuration of the host's own Slurm is neither read nor
changed, and everything is ended and removed with the command.

Nodes are node1, node2, ... with 64 CPUs, whatever the host has, and 2 GPUs, which are ordinary files. Partitions are
"gh" and "batch", as on Vista and Frontier; a node runs one job at a time.
"""

import argparse
import os
import pwd
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError, given_command, kill, run_command
from scripts.emulated_cluster import Cluster

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo", "unshare", "mount")
CPUS, GPUS = 64, 2  # of a node, whatever the host has
READY_SECONDS = 60.0
CONFIGURATION = """
ClusterName=local
SlurmctldHost=controller({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort=6817
SlurmdPort=6818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=sched_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={timeout}
KillWait={kill_wait}
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=gh Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
PartitionName=batch Nodes=ALL MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP
"""
# Sets the host name, and the names of all hosts, in namespaces of the program.
NAMED = 'hostname "$0" && mount --make-rprivate / && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class SlurmError(RunError):
    """The cluster cannot be started on this host; the message names what is missing."""


class SlurmCluster:
    """A Slurm cluster as a context manager.

    Args:
        nodes: Number of nodes without the controller.
        node_timeout: SlurmdTimeout, seconds after which a node that does not answer is down.
        kill_wait: KillWait, seconds between SIGTERM and SIGKILL at the end of a job.

    Attributes:
        cluster: Network namespaces of the controller, which is node 0, and of the nodes.
        folder: Configuration, state and logs (slurmctld.log, node1.log, ...).

    Raises:
        SlurmError, ClusterError: On entry, without root, Slurm or iproute2.
    """

    def __init__(self, nodes: int, node_timeout: int = 60, kill_wait: int = 30) -> None:
        self.nodes, self.node_timeout, self.kill_wait = nodes, node_timeout, kill_wait
        self.cluster = Cluster(nodes + 1)
        self._daemons: dict[str, subprocess.Popen[Any]] = {}

    def __enter__(self) -> "SlurmCluster":
        missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
        if missing:
            raise SlurmError(f"there is no {', '.join(missing)}; on Debian: apt install slurm-wlm munge")
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="scape-slurm-", ignore_cleanup_errors=True)
            self.folder = Path(stack.enter_context(folder))
            stack.enter_context(self.cluster)  # ends the daemons and all jobs
            self._configure()
            self._start_daemons()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _configure(self) -> None:
        addresses = self.cluster.addresses
        names = ["controller", *(f"node{i}" for i in range(1, self.nodes + 1))]
        hosts = "".join(f"{address} {name}\n" for address, name in zip(addresses, names, strict=True))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        declared = [
            f"NodeName={name} NodeAddr={address} CPUs={CPUS} RealMemory=100000 Gres=gpu:{GPUS} State=UNKNOWN"
            for name, address in zip(names[1:], addresses[1:], strict=True)
        ]
        files = [self.folder / f"gpu{i}" for i in range(GPUS)]
        for file in files:
            file.touch()
        values = {"controller": addresses[0], "folder": self.folder, "nodes": "\n".join(declared)}
        text = CONFIGURATION.format(**values, timeout=self.node_timeout, kill_wait=self.kill_wait)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={file}\n" for file in files))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # detection needs /sys/fs/cgroup
        for name in ("munge", "state", *(f"spool-node{i}" for i in range(1, self.nodes + 1))):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge" / "key").chmod(0o600)
        self.folder.chmod(0o755)  # jobs of other users read the configuration

    def _start_daemons(self) -> None:
        munge, conf = self.folder / "munge", str(self.folder / "slurm.conf")
        files = [f"--{name}={munge / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        self._daemon(0, "munged", ["munged", "--foreground", "--force", f"--key-file={munge / 'key'}", *files])
        self._wait("munged", lambda: (munge / "socket").exists())
        self._daemon(0, "slurmctld", ["slurmctld", "-D", "-f", conf])
        for node in range(1, self.nodes + 1):
            self._start_slurmd(node)
        self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle."""
        self._wait(
            "the nodes",
            lambda: self.output("sinfo", "-h", "-N", "-p", "gh", "-o", "%T").split() == ["idle"] * self.nodes,
        )

    def _start_slurmd(self, node: int) -> None:
        command = ["slurmd", "-D", "-N", f"node{node}", "-f", str(self.folder / "slurm.conf")]
        self._daemon(node, f"node{node}", command)

    def lose_node(self, node: int) -> None:
        """End a node as a loss of power does: its connections stay open, and slurmd and all jobs are gone."""
        self.cluster.set_link(node, up=False)
        kill(self.cluster.processes(node))

    def restore_node(self, node: int) -> None:
        """Start a lost node again, without the jobs that it had."""
        self.cluster.set_link(node, up=True)
        self._start_slurmd(node)

    def _daemon(self, node: int, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons[name] = self.cluster.start(node, self._named(node, command), self.environment(), log)

    def _named(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs with the host name of a node; node 0 is the controller."""
        name = "controller" if node == 0 else f"node{node}"
        return ["unshare", "--uts", "--mount", "sh", "-c", NAMED, name, str(self.folder / "hosts"), *command]

    def environment(self) -> dict[str, str]:
        return {"PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _wait(self, what: str, ready: Any) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not ready():
            ended = [name for name, process in self._daemons.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                files = [self.folder / f"{name}.log" for name in ended or self._daemons]
                logs = "\n".join(f"{file.stem}: {file.read_text(errors='replace')[-800:]}" for file in files)
                raise SlurmError(f"{what} did not start within {READY_SECONDS:g} s:\n{logs}")
            time.sleep(0.3)

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, user: str | None = None, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the controller, as root or another user, from the repository's root, with captured text.

        `options` are further ones of subprocess.run, and override these.
        """
        environment = {**os.environ, **(env or {}), **self.environment(), **_identity(user)}
        given = ["runuser", "-u", user, "--", *command] if user else command
        run_options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True} | options
        return subprocess.run(self.cluster.inside(0, self._named(0, given)), env=environment, **run_options)

    def output(self, *command: str) -> str:
        """Return the standard output of a command on the controller."""
        return self.run(*command, timeout=60).stdout


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _identity(user: str | None) -> dict[str, str]:
    """Return the variables of a login. Raises ValueError for an unknown user."""
    if user is None:
        return {}
    try:
        return {"USER": user, "LOGNAME": user, "HOME": pwd.getpwnam(user).pw_dir}
    except KeyError as error:
        raise ValueError(f"--user={user}: there is no such user on this host") from error


def run(args: argparse.Namespace) -> int:
    command = given_command(args.command)
    _identity(args.user)
    with SlurmCluster(args.nodes) as cluster:
        return cluster.run(*command, user=args.user, cwd=None, capture_output=False).returncode


if __name__ == "__main__":
    options = {
        "--nodes": dict(type=int, default=2),
        "--user": dict(help="runs the command and its jobs; by default root"),
        "command": dict(nargs=argparse.REMAINDER, help="-- and the command that the controller runs"),
    }
    sys.exit(run_command(__doc__, run, options))

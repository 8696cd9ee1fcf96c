"""Runs of ./run_train.sh for fault injection, for kill_ranks.py, soak.py and the tests.

with Launch(["--training.steps=20"], folder, nodes=2) as run:
    run.wait_for_training(1)
    os.kill(run.ranks()[1], signal.SIGKILL)
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError, kill, process_state

STARTED = re.compile(r"rank0\]:.* Training starts at step (\d+)")
# A run without validation that logs every step and can resume from each of its checkpoints.
COMMON = [
    *("--metrics.log_freq=1", "--metrics.no-enable-tensorboard", "--validation.no-enable"),
    *("--checkpoint.enable", "--checkpoint.no-last-save-model-only"),
]
# A run of seconds on two CPU processes.
TINY = [
    *COMMON,
    # With 64 tokens a step the rate of the recipe diverges, which ends a run.
    *("--training.local_batch_size=1", "--training.seq_len=32", "--lr_scheduler.warmup_steps=2", "--optimizer.lr=2e-4"),
    *("--sync.scape.density_warmup_steps=3", "--checkpoint.interval=2"),
]


def free_endpoint() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return f"localhost:{s.getsockname()[1]}"


class Launch:
    """Launchers of ./run_train.sh, one per node of this host; a context manager that ends them.

    Args:
        arguments: of the trainer.
        folder: dump folder, and folder of node0.log, node1.log, ...
        nodes, ranks_per_node: launchers, and ranks of each.
        environment: overrides os.environ.
        start: starts a node's command: (node, command, environment, log file) -> Popen.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        nodes: int = 1,
        ranks_per_node: int = 2,
        environment: Mapping[str, str] | None = None,
        start: Callable[..., "subprocess.Popen[Any]"] | None = None,
    ) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        own = {
            "PYTHON": sys.executable,
            "NGPU": str(ranks_per_node),
            "LOG_RANK": ",".join(str(rank) for rank in range(ranks_per_node)),
            "OMP_NUM_THREADS": "1",
            **({"NNODES": str(nodes), "RDZV_ENDPOINT": free_endpoint()} if nodes > 1 and start is None else {}),
            **(environment or {}),
        }
        self._command = [str(ROOT / "run_train.sh"), *arguments, f"--job.dump_folder={folder}"]
        self._environment, self._start = own, start or start_process
        self._logs = [folder / f"node{node}.log" for node in range(nodes)]
        self._read = [log.stat().st_size if log.exists() else 0 for log in self._logs]
        self.launchers = [self.start(node) for node in range(nodes)]

    def start(self, node: int) -> "subprocess.Popen[Any]":
        """Start a node's launcher again; its output is appended to the log."""
        with open(self._logs[node], "ab") as log:
            return self._start(node, self._command, self._environment, log)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *error: Any) -> None:
        running = [process for process in self.launchers if process.poll() is None]
        pids = [pid for process in running for pid in _ranks_of(process.pid).values()]
        for process in self.launchers:
            if process.poll() is None:
                process.kill()
        kill(pids)
        for process in self.launchers:
            process.wait()

    def ranks(self) -> dict[int, int]:
        """Return the process ids of the running ranks, by rank."""
        found: dict[int, int] = {}
        for process in self.launchers:
            if process.poll() is None:
                found |= _ranks_of(process.pid)
        return dict(sorted(found.items()))

    def output(self) -> str:
        """Return the output since the first start, node by node."""
        return "".join(self._outputs())

    def _outputs(self) -> list[str]:
        texts = []
        for log, begin in zip(self._logs, self._read, strict=True):
            with open(log, "rb") as file:
                file.seek(begin)
                texts.append(file.read().decode(errors="replace"))
        return texts

    def wait_until(self, condition: Callable[[], Any], seconds: float, what: str, every: float = 0.02) -> Any:
        """Wait for a true value of the condition, and return it. Raises RunError with the output after `seconds`."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline or all(p.poll() is not None for p in self.launchers):
                raise RunError(f"{what} did not happen within {seconds:g} s:\n{self.output()[-5000:]}")
            time.sleep(every)
        return value

    def steps(self) -> list[int]:
        """Return the logged steps, in order."""
        return [int(step) for step in re.findall(r" step: +(\d+)  loss", self.output())]

    def starts(self) -> int:
        """Return how often training has started on all nodes, by the output of the first rank of each."""
        return min(len(STARTED.findall(text)) for text in self._outputs())

    def resumed_at(self) -> list[int]:
        """Return the steps at which training has started, node by node."""
        return [int(step) for step in STARTED.findall(self.output())]

    def wait_for_training(self, start: int, seconds: float = 120.0) -> None:
        """Wait until training has started for the `start`-th time, counted from 1."""
        self.wait_until(lambda: self.starts() >= start, seconds, f"start {start} of training")

    def wait_for_a_save(self, seconds: float = 60.0) -> bool:
        """Wait for a new checkpoint; return whether it is still incomplete."""
        before = _entries(self.checkpoints)
        new = self.wait_until(lambda: _entries(self.checkpoints) - before, seconds, "a save", every=0.001)
        return not all((self.checkpoints / name / ".metadata").exists() for name in new)

    def wait(self, seconds: float) -> list[int]:
        """Return the launchers' exit codes. Raises RunError if one does not end."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.launchers]
        except subprocess.TimeoutExpired:
            raise RunError(f"a launcher did not end within {seconds:g} s:\n{self.output()[-5000:]}") from None


def start_process(
    node: int, command: Sequence[str], environment: Mapping[str, str], log: Any
) -> "subprocess.Popen[Any]":
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


class PrivateFolders:
    """Starts commands in mount namespaces, in which `folder` is a folder of the node.

    Args:
        folder: of the command; it exists.
        own: parent of the nodes' folders, node0, node1, ...
        start: starts a node's command, as for `Launch`.
    """

    def __init__(self, folder: Path, own: Path, start: Any = start_process) -> None:
        self._folder, self._own, self._start = folder, own, start

    def of(self, node: int) -> Path:
        """Return the folder of a node, as seen from outside of its namespace."""
        path = self._own / f"node{node}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(
        self, node: int, command: Sequence[str], environment: Mapping[str, str], log: Any
    ) -> "subprocess.Popen[Any]":
        script = 'mount --make-rprivate / && mount --bind "$0" "$1" && shift && exec "$@"'
        inside = ["unshare", "--mount", "sh", "-c", script, str(self.of(node)), str(self._folder), *command]
        process: subprocess.Popen[Any] = self._start(node, inside, environment, log)
        return process

    def merge(self, step: int, nodes: int, target: Path) -> Path:
        """Copy the files of a step from all nodes into one folder, and return it."""
        path = target / f"step-{step}"
        for node in range(nodes):
            source = self.of(node) / "checkpoint" / path.name
            if source.is_dir():
                shutil.copytree(source, path, dirs_exist_ok=True)
        return path


def kill_node(launch: Launch, node: int) -> None:
    """Kill a node's launcher and rank."""
    process = launch.launchers[node]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def _entries(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _ranks_of(pid: int) -> dict[int, int]:
    """Return the process ids of a launcher's ranks. `ip netns exec` replaces itself by the launcher."""
    found: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            found |= {int(v[5:]): int(child) for v in variables if v.startswith(b"RANK=")}
    return found


def running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    return process_state(pid)[:1] not in ([], ["Z"], ["X"])


def seconds_until_gone(pids: Sequence[int], limit: float) -> float:
    """Wait until none of the processes runs; return the seconds. Raises RunError after `limit` seconds."""
    begin = time.monotonic()
    while any(running(pid) for pid in pids):
        if time.monotonic() - begin > limit:
            raise RunError(f"ranks still run {limit:g} s after the fault: {[p for p in pids if running(p)]}")
        time.sleep(0.02)
    return time.monotonic() - begin


def differences(checkpoint: Path, other: Path, scratch: Path) -> list[str]:
    """Return the names of the tensors that differ in any bit between two checkpoints, optimizer state included."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.utils._pytree import keystr, tree_leaves_with_path

    found = []
    for path in (checkpoint, other):
        dcp_to_torch_save(path, scratch / "tensors")
        leaves = tree_leaves_with_path(torch.load(scratch / "tensors", weights_only=False))
        tensors = {keystr(name): leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
        found.append({name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()})
    (scratch / "tensors").unlink()
    first, second = found
    changed = {name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])}
    return sorted(changed | (first.keys() ^ second.keys()))

"""Run a command on an emulated cluster: network namespaces as nodes, shaped links as their NICs, real TCP.

    python -m scripts.emulated_cluster --nodes 4 --ranks-per-node 1 --rate 100 -- ./run_train.sh --training.steps=20

Each node is a network namespace with an interface on a bridge, limited by `tc tbf` in both directions. Ranks of a node
communicate over its loopback, without a limit. Needs root and iproute2. The bridge has its own namespace, so that the
host's network is unchanged. Each node runs the command with the variables of ./run_train.sh and torchrun
(`Cluster.environment`); node 0's output is shown, that of the others goes to files.

The summary of ./run_train.sh (summary.json, "interfaces") has the bytes on each node's interfaces in the training
steps, and those that the ranks counted. Namespaces and processes are always removed; those of a killed run by the next
run.
"""

import argparse
import atexit
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.common import ROOT, RunError, given_command, kill, process_state, run_command

NIC = "eth0"
PORT = 29500
# A bucket fills while the ranks compute, and the next bytes then pass at full speed: with the usual 128 kB a payload of
# 0.1 MB crossed a 100 Mbit/s link at 207 Mbit/s. So the bucket is small. Frames are large, as on such networks: with
# small ones headers are 1 % of the bytes.
BURST = "16kb"
MTU = 9000
LATENCY = "400ms"  # of the NIC's queue; with less, packets are dropped when several nodes send to one
GRACE_SECONDS = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_NAME = re.compile(r"scape-(\d+)-(\d+)-\d+-\w+")
_serial = itertools.count()


class ClusterError(RunError):
    """The cluster cannot be created on this host; the message names what is missing."""


class Cluster:
    """Nodes as network namespaces on a bridge; a context manager that removes them.

    Inside, SIGTERM and SIGHUP raise SystemExit in the main thread, so that the block is left and cleaned up. All
    programs in its namespaces are ended with them.

    Args:
        nodes: 1 to 99.
        rate_mbit: limit of each NIC, each way, in 1e6 bits per second; None for no limit.

    Attributes:
        addresses: the nodes' IPv4 addresses.

    Raises:
        ValueError: arguments out of range.
        ClusterError: on entry, without root or iproute2.
    """

    def __init__(self, nodes: int, rate_mbit: float | None = None) -> None:
        if not 1 <= nodes <= 99:
            raise ValueError(f"{nodes} nodes; give 1 to 99")
        if rate_mbit is not None and not 0.1 <= rate_mbit <= 1e5:
            raise ValueError(f"a rate of {rate_mbit} Mbit/s; give 0.1 to 100000, or None for no limit")
        self.nodes = nodes
        # Three digits: the rendezvous numbers the nodes by their addresses.
        self.addresses = [f"198.18.0.{101 + node}" for node in range(nodes)]
        self._prefix = f"scape-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}-"
        self._bridge = f"{self._prefix}bridge"
        self._rate = rate_mbit
        self._processes: list[subprocess.Popen[Any]] = []
        self._handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Cluster":
        _check_tools()
        _remove_stale()
        atexit.register(self.close)  # in case a signal arrives before the block begins
        try:
            if threading.current_thread() is threading.main_thread():
                for number in SIGNALS:
                    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                        self._handlers[number] = signal.signal(number, _raise)
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all processes in the nodes and remove the namespaces. Can be called again."""
        arrived: list[int] = []
        for number in self._handlers:  # a second Ctrl-C waits until all is removed
            signal.signal(number, lambda number, frame: arrived.append(number))
        try:
            self.end_processes()
            for name in namespaces():
                if name.startswith(self._prefix):
                    _run("ip", "netns", "delete", name)
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}
            atexit.unregister(self.close)
        if arrived:
            os.kill(os.getpid(), arrived[0])

    def _name(self, node: int) -> str:
        return f"{self._prefix}node{node}"

    def _build(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "mtu", str(MTU), "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for node, address in enumerate(self.addresses):
            name, port = self._name(node), f"port{node}"
            _run("ip", "netns", "add", name)
            # Both ends are created in their namespaces, none on the host.
            ends = (NIC, "netns", name, "mtu", str(MTU), "type", "veth", "peer", "name", port, "mtu", str(MTU))
            _run("ip", "link", "add", *ends, "netns", self._bridge)
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", NIC)
            _run("ip", "-n", name, "link", "set", NIC, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if self._rate is not None:
                limit = ("rate", f"{round(self._rate * 1e6)}bit", "burst", BURST, "latency", LATENCY)
                for namespace, device in ((name, NIC), (self._bridge, port)):  # the bridge sends what the node receives
                    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def set_link(self, node: int, up: bool) -> None:
        """Set a node's link down or up, at the switch. Connections stay open."""
        _run("ip", "-n", self._bridge, "link", "set", f"port{node}", "up" if up else "down")

    # ----------------------------------------------------------------------------------------- the processes

    def processes(self, node: int) -> list[int]:
        """Return the ids of the processes in a node."""
        return processes_in(self._name(node))

    def environment(self, node: int) -> dict[str, str]:
        """Return a node's variables for the command, except NGPU, its number of ranks."""
        return {
            "PYTHON": sys.executable,
            "NNODES": str(self.nodes),
            "NODE_RANK": str(node),
            "RDZV_ENDPOINT": f"{self.addresses[0]}:{PORT}",
            # torchrun would use the host's name as the address of the workers' store, and would not recognize its own
            # endpoint.
            "PET_LOCAL_ADDR": self.addresses[node],
            "PET_RDZV_CONF": f"is_host={int(node == 0)}",
            "PET_MONITOR_INTERVAL": "1",  # seconds; by default torchrun polls node 0 ten times per second
            "GLOO_SOCKET_IFNAME": NIC,
            "TP_SOCKET_IFNAME": NIC,
            "OMP_NUM_THREADS": "1",
            "TRAIN_PROGRAM": "scripts.interfaces",
            "SCAPE_COUNT_INTERFACES": "1",
        }

    def inside(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs in the network namespace of a node."""
        return ["ip", "netns", "exec", self._name(node), *command]

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str] | None = None, log: Any = None
    ) -> "subprocess.Popen[Any]":
        """Start a command in a node, in its own session, with its output in `log`, if given.

        `env` overrides `environment` and os.environ.
        """
        process = subprocess.Popen(
            self.inside(node, command),
            env={**os.environ, **self.environment(node), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        ranks_per_node: int,
        env: Mapping[str, str] | None,
        log_dir: Path,
        timeout: float | None,
        show: bool = True,
    ) -> int:
        """Run one command in every node. Return 0, or the exit code of the node that failed first.

        A failed node ends the others. A signal counts as 128 plus its number.

        Args:
            log_dir: folder of nodeN.log, the output of node N.
            timeout: in seconds; then all nodes are ended, and 124 is returned.
            show: print node 0's output instead.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        own = {"NGPU": str(ranks_per_node), **(env or {})}
        deadline = None if timeout is None else time.monotonic() + timeout
        running: dict[int, subprocess.Popen[Any]] = {}
        try:
            for node in range(self.nodes):
                shown = node == 0 and show
                with contextlib.nullcontext() if shown else open(log_dir / f"node{node}.log", "wb") as log:
                    running[node] = self.start(node, command, own, log)
            while running:
                for node, process in list(running.items()):
                    code = process.poll()
                    if code:
                        code = code if code > 0 else 128 - code
                        where = "stands above" if node == 0 and show else f"is in {log_dir / f'node{node}.log'}"
                        failed = f"node {node} ended with exit code {code}, the others are ended"
                        print(f"error: {failed}; its output {where}", file=sys.stderr)
                        return code
                    if code == 0:
                        del running[node]
                if deadline is not None and time.monotonic() > deadline:
                    print(f"error: the command did not end within {timeout:g} s; it was ended", file=sys.stderr)
                    return 124
                time.sleep(0.05)
            return 0
        finally:
            self.end_processes()

    def torchrun(
        self,
        arguments: Sequence[str],
        ranks_per_node: int,
        log_dir: Path,
        timeout: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Run `arguments` ("-m", a module, its arguments) on all ranks. Raises RunError with a one-line reason."""
        command = [sys.executable, "-m", "torchtitan_scape.runtime.launch", f"--nnodes={self.nodes}"]
        command += [f"--nproc_per_node={ranks_per_node}", "--rdzv_backend=launchers"]
        command += [f"--rdzv_endpoint={self.addresses[0]}:{PORT}", "--local-ranks-filter=0", "--tee=3", *arguments]
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        env = {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **(env or {})}
        if code := self.run(command, ranks_per_node, env, log_dir, timeout, show=False):
            lines = (log_dir / "node0.log").read_text(errors="replace").splitlines()
            errors = [line for line in lines if "error:" in line.lower()]
            why = errors[-1].strip() if errors else "no error was printed"
            raise RunError(f"{arguments[1]} ended with exit code {code}: {why} (log in {log_dir})")

    def end_processes(self) -> None:
        """End the started processes, then all others in the nodes: torchrun's workers have their own sessions."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while left := [pid for name in namespaces() if name.startswith(self._prefix) for pid in processes_in(name)]:
            if time.monotonic() > deadline or all(process.poll() is not None for process in self._processes):
                kill(left)
            time.sleep(0.05)
            for process in self._processes:
                process.poll()
        for process in self._processes:
            process.wait()
        self._processes = []


def _raise(number: int, frame: Any) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _check_tools() -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ClusterError(f"the emulated cluster needs iproute2: there is no {tool!r} on PATH; install it")
    if os.geteuid() != 0:
        raise ClusterError("the emulated cluster makes network namespaces, which needs root; run it with sudo")


def _run(*command: str) -> str:
    # In its own session, so that Ctrl-C does not interrupt it.
    result = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if result.returncode:
        why = " ".join(result.stderr.split())
        raise ClusterError(f"the emulated cluster needs network namespaces, veth and tbf: {' '.join(command)}: {why}")
    return result.stdout


def namespaces() -> list[str]:
    """Return the names of the host's network namespaces."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def processes_in(namespace: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    return [int(pid) for pid in _run("ip", "netns", "pids", namespace).split()]


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks; "" if there is none. Distinguishes reused ids."""
    return "".join(process_state(pid)[19:20])


def _remove_stale() -> None:
    """Remove the namespaces of killed runs, and end the processes in them."""
    for name in namespaces():
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != match[2]:
            with contextlib.suppress(ClusterError):  # another run may be removing it, too
                kill(processes_in(name))
                _run("ip", "netns", "delete", name)


def run(args: argparse.Namespace) -> int:
    command = given_command(args.command)
    if args.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node is {args.ranks_per_node}; it must be 1 or more")
    with Cluster(args.nodes, args.rate or None) as cluster:
        return cluster.run(command, args.ranks_per_node, None, args.log_dir, args.timeout)


if __name__ == "__main__":
    options = {
        "--nodes": dict(type=int, default=2, help="1 to 99"),
        "--ranks-per-node": dict(type=int, default=1),
        "--rate": dict(type=float, default=100.0, help="of a NIC, each way, in Mbit/s; 0: not limited"),
        "--timeout": dict(type=float, help="seconds after which the run is ended"),
        "--log-dir": dict(type=Path, default="outputs/emulated_cluster", help="for the output of the nodes but node 0"),
        "command": dict(nargs=argparse.REMAINDER, help="-- and the command that every node runs"),
    }
    sys.exit(run_command(__doc__, run, options, "error: interrupted; the nodes are removed"))

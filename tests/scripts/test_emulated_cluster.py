"""The emulated cluster: execution, byte counts, and cleanup."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.common import ROOT
from scripts.emulated_cluster import Cluster, ClusterError, namespaces, processes_in
from scripts.faults.fault_runs import running
from scripts.interfaces import parse_counters
from tests.runtime.test_launch import SHORT

# Leaves a process with its own session in the node, like torchrun's workers.
LINGER = ["sh", "-c", "setsid sleep 300 & echo started; sleep 300"]


@pytest.fixture(scope="module")
def works() -> None:
    """Skip the tests if no cluster can be created; being root is not enough in some containers."""
    try:
        with Cluster(1, 100.0):
            pass
    except ClusterError as error:
        pytest.skip(str(error))


def script(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "scripts.emulated_cluster", *arguments]


def run_script(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = script(*arguments)
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)


def namespaces_of(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"scape-{pid}-")]


def veths() -> set[str]:
    return set(subprocess.check_output(["ip", "-o", "link", "show", "type", "veth"], text=True).splitlines())


def started(command: Sequence[str], tmp_path: Path) -> "tuple[subprocess.Popen[str], list[int]]":
    """Start the script with LINGER on two nodes, and return the processes in its namespaces."""
    arguments = ["--nodes=2", "--rate=0", f"--log-dir={tmp_path}", "--", *command]
    process = subprocess.Popen(script(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    deadline = time.monotonic() + 20
    while True:
        pids = [pid for name in namespaces_of(process.pid) for pid in processes_in(name)]
        if len(pids) >= 6:  # on each node the shell and two sleeping processes
            return process, pids
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


@pytest.mark.slow
def test_counted_bytes_are_on_the_interfaces_of_two_nodes_with_two_ranks(works: None, tmp_path: Path) -> None:
    """Property 7, by level and for training steps only: a validation between them is excluded."""
    result = run_script(
        *("--nodes=2", "--ranks-per-node=2", "--rate=0", f"--log-dir={tmp_path}", "--", str(ROOT / "run_train.sh")),
        *SHORT,
        "--training.steps=5",
        "--validation.freq=3",
        "--validation.steps=1",
        "--topology.machine=local",
        "--sync.scape.density=0.1",
        "--sync.scape.code=float32",
        "--sync.scape.density_warmup_steps=0",
        f"--job.dump_folder={tmp_path}",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "4 ranks on 2 node(s) of 2" in summary["layout"]
    figures = summary["interfaces"]
    assert figures["steps"] == 4, "all but the first"
    assert list(figures["sent_per_step"]) == ["node", "network"]
    for level, nodes in figures["sent_per_step"].items():
        assert [node["node"] for node in nodes] == [0, 1]
        for node in nodes:
            assert node["counted"] > 5e5, "large enough for 5 % to hold"
            assert 0.999 <= node["ratio"] <= 1.05, (level, node)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_processes_and_namespaces(
    works: None, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    before = veths()
    process, pids = started(LINGER, tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in errors, errors
    assert namespaces_of(process.pid) == [] and veths() <= before
    assert not any(map(running, pids))


def test_the_next_run_removes_the_remains_of_a_killed_one(works: None, tmp_path: Path) -> None:
    process, pids = started(LINGER, tmp_path)
    process.kill()
    process.wait(timeout=30)
    assert len(namespaces_of(process.pid)) == 3
    with Cluster(1):
        assert namespaces_of(process.pid) == []
    assert namespaces_of(os.getpid()) == []
    assert not any(map(running, pids))


def test_a_node_that_fails_ends_the_others_and_gives_its_exit_code(works: None, tmp_path: Path) -> None:
    begin = time.monotonic()
    command = ["sh", "-c", 'if [ "$NODE_RANK" = 1 ]; then exit 7; fi; sleep 300']
    result = run_script("--nodes=3", f"--log-dir={tmp_path}", "--", *command)
    assert result.returncode == 7 and time.monotonic() - begin < 60
    assert f"error: node 1 ended with exit code 7, the others are ended; its output is in {tmp_path}" in result.stderr


def test_a_command_that_takes_too_long_is_ended(works: None, tmp_path: Path) -> None:
    result = run_script("--nodes=1", "--timeout=0.5", f"--log-dir={tmp_path}", "--", "sleep", "300")
    assert result.returncode == 124 and "did not end within 0.5 s" in result.stderr


RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
peers = [server.accept()[0] for _ in range(int(sys.argv[2]))]
begin = time.monotonic()
for peer in peers:
    peer.sendall(b"g")
for peer in peers:
    while peer.recv(1 << 20):
        pass
print(time.monotonic() - begin, flush=True)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    peer.recv(1)
    peer.sendall(bytes(int(sys.argv[2])))
"""


def counters(cluster: Cluster) -> list[dict[str, tuple[int, int]]]:
    """Return (bytes sent, bytes received) by interface, of each node since its creation."""
    commands = [cluster.inside(node, ["cat", "/proc/net/dev"]) for node in range(cluster.nodes)]
    return [parse_counters(subprocess.check_output(command, text=True)) for command in commands]


def test_a_network_interface_is_limited_in_both_directions(works: None) -> None:
    """One sender reaches its own limit; two senders to one node reach that node's limit. There is no lower bound."""
    size, rate, buckets = 500_000, 20.0, 2 * 16 * 1024
    with Cluster(3, rate) as cluster:
        for senders in ([1], [1, 2]):
            before = counters(cluster)
            listen = [sys.executable, "-c", RECEIVE, cluster.addresses[0], str(len(senders))]
            receiver = cluster.start(0, listen, log=subprocess.PIPE)
            assert receiver.stdout.readline() == b"listening\n"
            for node in senders:
                cluster.start(node, [sys.executable, "-c", SEND, cluster.addresses[0], str(size)])
            seconds = float(receiver.communicate(timeout=60)[0])
            assert seconds >= (size * len(senders) - buckets * len(senders)) * 8 / (rate * 1e6)
            moved = counters(cluster)
            for node in senders:
                assert size <= moved[node]["eth0"][0] - before[node]["eth0"][0] <= 1.1 * size
            assert moved[0]["eth0"][1] - before[0]["eth0"][1] >= size * len(senders)


def test_missing_requirements_give_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_script("--", "true", PATH=str(tmp_path))
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: the emulated cluster needs iproute2: there is no 'ip' on PATH; install it"
    ]
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="root"), Cluster(1):
        pass


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no command is given"),
        (["--nodes=0", "--", "true"], "0 nodes; give 1 to 99"),
        (["--rate=-1", "--", "true"], "a rate of -1.0 Mbit/s"),
        (["--ranks-per-node=0", "--", "true"], "--ranks-per-node is 0"),
    ],
)
def test_invalid_cluster_arguments_are_named(arguments: list[str], message: str) -> None:
    result = run_script(*arguments)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr

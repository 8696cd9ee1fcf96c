"""The rendezvous of launchers: in threads of one process, on the loopback interface."""

import json
import pickle
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError

from tests.runtime.test_liveness import wait_until
from torchtitan_scape.runtime import listening, rendezvous
from torchtitan_scape.runtime.listening import WrongEndpointError
from torchtitan_scape.runtime.rendezvous import LauncherRendezvous, RunEndedError

JOIN_SECONDS = 4.0


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("JOIN_SECONDS", JOIN_SECONDS),
        ("REPORT_SECONDS", 0.5),
        ("SILENT_SECONDS", 1.5),
        ("_ANSWER_SECONDS", 2.0),
    ):
        monkeypatch.setattr(rendezvous, name, seconds)


class Launcher:
    """A launcher in a thread, with its result or error and the lines that it printed."""

    def __init__(
        self,
        port: int,
        nodes: int,
        host: str = "127.0.0.1",
        counts: tuple[int, ...] = (),
        endpoints: str = "",
        expected: int = 0,
    ) -> None:
        self.lines: list[str] = []
        self.found: Any = None
        self.joins = 0
        self.handler = LauncherRendezvous(
            endpoints or f"{host}:{port}", counts or (nodes,), "run", self.lines.append, 1.5, self._on_join, expected
        )
        self._thread = threading.Thread(target=self._attend, daemon=True)
        self._thread.start()

    def _on_join(self) -> None:
        self.joins += 1

    def end(self) -> None:
        """End the store, as the end of the launcher's process does."""
        self.found = self.handler._store = self.handler._joining = None

    def _attend(self) -> None:
        try:
            self.found = self.handler.next_rendezvous()
        except Exception as error:
            self.found = error

    def result(self, seconds: float = 15.0) -> Any:
        self._thread.join(seconds)
        assert not self._thread.is_alive()
        return self.found


def test_nodes_are_numbered_and_share_one_store(port: int) -> None:
    launchers = [Launcher(port, 3) for _ in range(3)]
    infos = [launcher.result() for launcher in launchers]
    assert sorted(info.rank for info in infos) == [0, 1, 2] and {info.world_size for info in infos} == {3}
    (served,) = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
    assert served == ("127.0.0.1", port)
    infos[0].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"


def test_a_single_node_listens_on_the_loopback_interface_alone() -> None:
    info = Launcher(0, 1, "node0").result()
    address = info.bootstrap_store_info
    assert address.master_addr == "127.0.0.1"
    # Columns 2 and 4 of the kernel's table: local address and state; 0A is listening.
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == address.master_port]
    assert listening == [f"0100007F:{address.master_port:04X}"]
    six = [line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    assert not [local for local in six if local.endswith(f":{address.master_port:04X}")]


class Executes:
    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Executes, "ran", True)


@pytest.mark.parametrize(
    "key, value",
    [
        ("node/2", pickle.dumps(Executes())),
        ("node/2", json.dumps({"host": "x"}).encode()),
        ("group", pickle.dumps(Executes())),
        ("group", b"[" * 100_000),
        ("joined", b"text"),
    ],
    ids=str,
)
def test_a_value_of_another_program_ends_the_rendezvous(key: str, value: bytes, port: int) -> None:
    """It is never unpickled, also under the keys of PyTorch's own rendezvous."""
    first = Launcher(port, 2)
    intruder = _store_of_launchers(port)
    for other in ("torch.rendezvous.run", "torch.rendezvous.none"):
        intruder.set(other, pickle.dumps(Executes()))
    if key == "node/2":
        intruder.add("joined", 1)
    intruder.set(key, value)
    intruder.add("beat/2", 1)
    error = first.result()
    assert isinstance(error, RendezvousError) and not Executes.ran
    assert f"another program writes to the store at 127.0.0.1:{port}; choose another port: " in str(error)


def _store_of_launchers(port: int) -> dist.TCPStore:
    """Return the store once a launcher has joined, so that launchers and tests add to its counters in one order."""
    wait_until(lambda: _connects(port))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wait_until(lambda: store.add("joined", 0) > 0)
    return store


def _connects(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_different_numbers_of_nodes_are_refused_on_every_node(port: int) -> None:
    launchers = [Launcher(port, 2), Launcher(port, 3)]
    for launcher in launchers:
        error = launcher.result()
        assert isinstance(error, WrongEndpointError) and "NNODES=2" in str(error)
        assert "set the same number on every node" in str(error)


def test_missing_nodes_are_reported_while_waiting_and_at_the_end(port: int) -> None:
    launchers = [Launcher(port, 3) for _ in range(2)]
    for launcher in launchers:
        error = launcher.result()
        assert isinstance(error, RendezvousError)
        assert f"2 ({socket.gethostname()}, {socket.gethostname()}) of 3 nodes have joined at 127.0.0.1:{port}" in str(
            error
        )
        assert "NNODES and RDZV_ENDPOINT" in str(error)
        assert len(launcher.lines) >= 2 and launcher.lines[-1].startswith("waiting: 2 (")


def test_a_node_that_left_does_not_count(port: int) -> None:
    first = Launcher(port, 2)
    gone = _store_of_launchers(port)
    number = gone.add("joined", 1)
    gone.set(f"node/{number}", json.dumps({"host": "gone", "address": "127.0.0.1", "nodes": "2"}))
    gone.add(f"beat/{number}", 1)
    time.sleep(0.5)
    second = Launcher(port, 2)
    assert {first.result().rank, second.result().rank} == {0, 1}


def test_a_node_that_comes_back_waits_until_the_others_restart(port: int) -> None:
    """It must not join the store of the start that is about to end."""
    first, second = Launcher(port, 2), Launcher(port, 2)
    serving, other = sorted((first, second), key=lambda one: one.result().rank)
    back = Launcher(port, 2)
    wait_until(lambda: back.lines)
    assert "has all of its 2 node(s), without this one" in back.lines[0]
    for one in (serving, other):  # The launchers restart, and their store ends.
        one.end()
    restarted = Launcher(port, 2)
    assert {back.result().rank, restarted.result().rank} == {0, 1}


def test_a_run_starts_with_fewer_nodes_and_takes_one_that_joins_later(port: int) -> None:
    """Of one to four nodes, three cannot be used: with three present, one waits."""
    counts = (1, 2, 4)
    first, second, third = (Launcher(port, 4, counts=counts) for _ in range(3))
    wait_until(lambda: sum(one.found is not None for one in (first, second, third)) == 2, 15.0)
    serving, other, waiting = sorted((first, second, third), key=lambda one: one.found.rank if one.found else 2)
    assert serving.found.world_size == other.found.world_size == 2
    assert "starting with 2 node(s) of 1, 2, 4" in serving.lines[-1]
    time.sleep(2.5)  # For two heartbeats of the waiting node.
    for one in (serving, other):
        assert one.handler.num_nodes_waiting() == 0 and not one.handler.regroups, "3 nodes cannot be used"
    fourth = Launcher(port, 4, counts=counts)
    wait_until(lambda: serving.handler.num_nodes_waiting() == 0 and serving.handler.regroups, 15.0)
    other.handler.look_after_stop()  # the ranks have ended before it looks again
    assert serving.handler.regroups == other.handler.regroups == 4
    assert (serving.joins, other.joins) == (1, 0) and "from 2 to 4 nodes after a checkpoint" in serving.lines[-1]
    time.sleep(1.0)  # The ranks write a checkpoint.
    for one in (serving, other):
        one.end()
    restarted = []
    for _ in range(2):
        restarted.append(Launcher(port, 4, counts=counts, expected=4))
        time.sleep(3.0)  # Longer than the time in which nodes join otherwise.
    found = [one.result() for one in (waiting, fourth, *restarted)]
    assert {info.rank for info in found} == {0, 1, 2, 3} and {info.world_size for info in found} == {4}


def test_a_waiting_node_ends_with_the_run(port: int) -> None:
    running = Launcher(port, 2, counts=(1, 3))
    assert running.result().world_size == 1
    waiting = Launcher(port, 2, counts=(1, 3))
    time.sleep(JOIN_SECONDS + 1.0)  # The time to join does not apply to a node that waits.
    wait_until(lambda: running.handler.num_nodes_waiting() == 0 and waiting.found is None)
    running.handler.close(75)
    error = waiting.result()
    assert isinstance(error, RunEndedError) and error.code == 75


def test_another_endpoint_serves_if_the_first_one_is_lost(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first node joins there when it comes back."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        endpoints = f"no-such-host.invalid:{port},127.0.0.1:{one.getsockname()[1]}"
    begin = time.monotonic()
    serving = Launcher(port, 2, counts=(1, 2), endpoints=endpoints)
    assert serving.result().world_size == 1
    assert time.monotonic() - begin > 3.0, "once for the endpoint, once for the second node"
    back = Launcher(port, 2, counts=(1, 2), endpoints=endpoints.replace("no-such-host.invalid", "127.0.0.1"))
    wait_until(lambda: serving.handler.num_nodes_waiting() == 0 and serving.handler.regroups, 15.0)
    assert back.found is None and serving.joins == 1


@pytest.mark.parametrize(
    ("host", "message"),
    [("no-such-host.invalid", "the host 'no-such-host.invalid' of RDZV_ENDPOINT cannot be resolved")],
)
def test_an_unknown_host_is_named(host: str, message: str, port: int) -> None:
    error = Launcher(port, 2, host).result()
    assert isinstance(error, WrongEndpointError) and message in str(error)


def test_a_port_of_another_program_is_named() -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen(16)
        port = int(foreign.getsockname()[1])
        error = Launcher(port, 2).result()
    assert isinstance(error, WrongEndpointError)
    assert f"another program listens at 127.0.0.1:{port}" in str(error)


def test_a_launcher_that_is_not_there_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "listen_at", lambda *_: None)  # As on another machine than that of the endpoint.
    launcher = Launcher(port, 2)
    error = launcher.result()
    assert isinstance(
        error, RendezvousError
    ) and f"no launcher answers at 127.0.0.1:{port} (Connection refused) after 4 s" in str(error)
    assert launcher.lines and "Connection refused" in launcher.lines[0]


def test_rank_0_waits_for_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without launchers, rank 0 serves the store at MASTER_PORT: after a requeue an old process may still have it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = int(other.getsockname()[1])
        monkeypatch.setattr(listening, "PORT_SECONDS", 0.5)
        with pytest.raises(SystemExit, match=f"error: MASTER_PORT={port} has been in use on .*; set it to a free port"):
            listening.listen_when_free("127.0.0.1", port)
        monkeypatch.setattr(listening, "PORT_SECONDS", 30.0)
        threading.Timer(0.5, other.close).start()
        served = listening.listen_when_free("127.0.0.1", port)
    assert served is not None and served.getsockname()[1] == port
    served.close()

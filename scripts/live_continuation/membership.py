"""Which replicas take part in an exchange, and whether its result is applied, decided in a TCPStore.

A quorum is a numbered list of replicas. Every replica arrives at the open quorum; the first one that sees all members
of the last quorum there, or lost, closes it with `compare_set`. A list is thus the same for all, and so is the decision
after it: to apply the result, or to try again in the next quorum. No replica leads.
"""

import contextlib
import json
import socket
import threading
import time
from dataclasses import asdict, dataclass

import torch.distributed as dist

HOST = "127.0.0.1"
POLL_SECONDS = 0.003


@dataclass(frozen=True)
class Arrival:
    """A replica at a quorum.

    Attributes:
        name: of the process; a process that is started again has another one.
        round: exchanges that its state contains; -1 before it has received a state.
        trained: it has taken the inner steps of the round, so that it has a displacement to send.
    """

    name: str
    round: int
    trained: bool


@dataclass(frozen=True)
class Quorum:
    """The members, and whether the run ends with their exchange."""

    number: int
    members: tuple[Arrival, ...]
    ends: bool = False


class Coordinator:
    """Serves the store, and marks a replica as lost when the kernel closes its connection. It does not train.

    A process that is killed is therefore noticed at once, and one that is only slow is not lost.
    """

    def __init__(self, names: list[str]) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.store.set("open", "0")
        self.store.set("quorum/-1", _to_json([Arrival(name, 0, False) for name in names]))
        self._listener = socket.create_server((HOST, 0))
        self.ports = self.store.port, self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._watch, args=self._listener.accept()[:1], daemon=True).start()

    def _watch(self, connection: socket.socket) -> None:
        name = connection.recv(64).decode()
        with contextlib.suppress(ConnectionError):
            connection.recv(1)  # returns when the process has ended
        self.store.set(f"lost/{name}", "")


class Membership:
    """A replica's view of the quorums.

    Args:
        name: of this replica.
        ports: those of the `Coordinator`.
        patience: seconds after the first arrival, or from a vote on, after which a silent replica is left out.
    """

    def __init__(self, name: str, ports: tuple[int, int], patience: float) -> None:
        self.store = dist.TCPStore(HOST, ports[0], is_master=False)
        self._patience = patience
        self._connection = socket.create_connection((HOST, ports[1]))
        self._connection.sendall(name.encode())

    def agree(self, own: Arrival) -> Quorum | None:
        """Wait for the others and return the next quorum that this replica belongs to; None if the run has ended."""
        while not self.store.check(["ended"]):
            number = int(self.store.get("open"))
            self.store.append(f"arrived/{number}", json.dumps(asdict(own)) + "\n")
            self._close(number)
            self.store.compare_set("open", str(number), str(number + 1))
            members, ends = _from_json(self.store.get(f"quorum/{number}"))
            if own in members:
                return Quorum(number, members, ends)
        return None

    def _close(self, number: int) -> None:
        """Wait until the quorum is closed, and close it if all members of the last one have arrived or are lost."""
        expected, _ = _from_json(self.store.get(f"quorum/{number - 1}"))
        first_seen = None  # of an expected replica: without one, all of them may still train
        while not self.store.check([f"quorum/{number}"]) and not self.store.check(["ended"]):
            lines = self.store.get(f"arrived/{number}").splitlines()
            arrived = {each.name: each for each in (Arrival(**json.loads(line)) for line in lines)}
            missing = [each for each in expected if each.name not in arrived and not self._is_lost(each.name)]
            if first_seen is None and any(each.name in arrived for each in expected):
                first_seen = time.monotonic()
            if missing and (first_seen is None or time.monotonic() - first_seen < self._patience):
                time.sleep(POLL_SECONDS)
                continue
            alive = [arrived[name] for name in sorted(arrived) if not self._is_lost(name)]
            self.store.compare_set(f"quorum/{number}", "", _to_json(alive, self.store.check(["stop"])))

    def vote(self, number: int, ready: bool, names: list[str]) -> bool:
        """Return whether all participants of a quorum apply its result: all were ready, and none was lost before."""
        key, begin = f"decision/{number}", time.monotonic()
        if not ready:
            self.store.compare_set(key, "", "abort")
        elif self.store.add(f"ready/{number}", 1) == len(names):
            self.store.compare_set(key, "", "commit")
        while not self.store.check([key]):
            if time.monotonic() - begin > self._patience or any(map(self._is_lost, names)):
                self.store.compare_set(key, "", "abort")
            else:
                time.sleep(POLL_SECONDS)
        return self.store.get(key) == b"commit"

    def close(self) -> None:
        self._connection.close()

    def _is_lost(self, name: str) -> bool:
        return self.store.check([f"lost/{name}"])


def _to_json(members: list[Arrival], ends: bool = False) -> str:
    return json.dumps([[asdict(each) for each in members], ends])


def _from_json(text: bytes) -> tuple[tuple[Arrival, ...], bool]:
    members, ends = json.loads(text)
    return tuple(Arrival(**each) for each in members), ends

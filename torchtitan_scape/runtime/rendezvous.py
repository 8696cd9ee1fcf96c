"""Rendezvous of the launchers of a run: one TCP store, plain text, one or several usable numbers of nodes.

PyTorch's own rendezvous (`c10d`) unpickles the data of any process that reaches its port, compares the clocks of
the nodes, and starts with fewer nodes than intended if a clock is wrong. Here the store contains numbers and JSON only,
and a node is present as long as its heartbeat counter grows, measured by the clock of one node.

The launcher on the host of the endpoint serves the store and decides which nodes take part. A single node uses a port
on the loopback interface. Ranks use the same store, so no second port is opened.

With several endpoints the first one whose launcher is alive serves. With several numbers of nodes (NNODES=2:4) a node
that joins later waits in the store, and `on_join` is called if a larger usable number of nodes is then present.
"""

import contextlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan_scape.core.files import parse_json
from torchtitan_scape.runtime.listening import WrongEndpointError, from_json, listen_at, resolve, silence, to_json

BACKEND = "launchers"
DEFAULT_PORT = 29400
JOIN_SECONDS = 600.0  # Time for all nodes to join, by default.
REPORT_SECONDS = 30.0  # Interval of the lines about missing nodes.
SILENT_SECONDS = 5.0  # Without a heartbeat for so long, a node has left.
_POLL_SECONDS = 0.2
_EXPECTED_CALLS = 4
_ANSWER_SECONDS = 20.0  # Time for a server to answer as a store does.


class LostStoreError(RuntimeError):
    """The launcher that serves the store has ended, for example to restart."""


class RunEndedError(Exception):
    """The run ended while this node waited to join. `code` is its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the run ended with exit code {code} while this node waited to join")
        self.code = code


@dataclass(frozen=True)
class Node:
    """The entry of a launcher, which the others read: its host, the IP address by which it reaches the store, and the
    usable numbers of nodes that it was started with.
    """

    host: str
    address: str
    nodes: str

    def place(self) -> tuple[Any, ...]:
        """Return the key by which nodes are numbered after the first one: by address, so that restarts agree."""
        address = ipaddress.ip_address(self.address.partition("%")[0])
        return address.version, int(address)


class LauncherRendezvous(RendezvousHandler):
    """Waits for launchers and numbers them. Node 0 is the one that serves the store.

    Args:
        endpoints: "host:port" of one or, separated by commas, several nodes; ignored for a single node.
        counts: usable numbers of nodes, ascending.
        run_id: name of the run, for torchrun.
        say: prints a line.
        last_call: seconds in which more nodes can join once the smallest number has joined. An endpoint is served in
            place of each one before it after as many seconds.
        on_join: called once on node 0, if waiting nodes make a larger number of nodes usable.
        expected: number of nodes with which the run restarts, if it was stopped for nodes that wait; they have
            `_EXPECTED_CALLS` times `last_call`, because a launcher that starts slowly would stop the run again.
        join: seconds for the smallest number of nodes to join; by default `JOIN_SECONDS`.
    """

    def __init__(
        self,
        endpoints: str,
        counts: tuple[int, ...],
        run_id: str,
        say: Callable[[str], None],
        last_call: float = 30.0,
        on_join: Callable[[], None] = lambda: None,
        expected: int = 0,
        join: float = 0.0,
    ) -> None:
        self._endpoints, self._join = [("127.0.0.1", 0)], join or JOIN_SECONDS
        if counts[-1] > 1:
            self._endpoints = [parse_rendezvous_endpoint(one, DEFAULT_PORT) for one in endpoints.split(",")]
        self._host, self._port = self._endpoints[0]
        self._counts, self._run_id, self._say = counts, run_id, say
        self._last_call, self._on_join, self._expected = last_call, on_join, expected
        self._store: TCPStore | None = None
        self._joining: _Joining | None = None
        self._next_look = 0.0
        self.regroups = 0  # If the ranks stop for nodes that wait: the number of nodes afterwards.

    # ------------------------------------------------------------------------- the interface of torchrun's agent

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: a launcher that fails ends."""

    def num_nodes_waiting(self) -> int:
        """Look for waiting nodes, at most once a second. Return 0, because torchrun would kill the ranks after 30 s."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + 1.0
            if self._look() and self._joining is not None and self._joining.serves:
                self._on_join()
        return 0

    def look_after_stop(self) -> None:
        """Read the decision of node 0 if it is not known: the ranks may have ended within a second after it."""
        if self._joining is not None and not self._joining.serves:
            self._look()

    def _look(self) -> bool:
        """Return whether it is known now, and was not before, that the ranks stop for nodes that wait."""
        if self._joining is not None and len(self._counts) > 1 and not self.regroups:
            # The store is gone, which the ranks detect, or another program writes to it.
            with contextlib.suppress(RuntimeError, ConnectionError, ValueError):
                self.regroups = self._joining.regroups()
                return self.regroups > 0
        return False

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until enough nodes have joined. Raises RunEndedError if the run ended without this node."""
        deadline = time.monotonic() + self._join
        while True:
            store, served = self._open(deadline)
            earlier = self._endpoints[: served or 0]
            node = Node(socket.gethostname(), self._own_address(), ", ".join(map(str, self._counts)))
            joining = _Joining(store, node, served is not None, self._where, self._say, self._counts)
            joining.expected, joining.last_call, joining.join = self._expected, self._last_call, self._join
            joining.superseded = lambda: not all(map(silence, earlier))  # noqa: B023
            try:
                rank, nodes = joining.attend(deadline)
            except LostStoreError as error:
                if joining.waited:
                    deadline, self._expected = time.monotonic() + self._join, joining.expected
                if time.monotonic() >= deadline:
                    raise RendezvousError(f"the launcher at {self._where} was lost: {error}") from None
                self._say(f"the launcher at {self._where} has ended; waiting for its restart")
                del store, joining  # A store that is served here ends with its last reference.
                time.sleep(1.0)
                continue
            store.set_timeout(timedelta(seconds=JOIN_SECONDS))
            self._store, self._joining = store, joining  # The store serves the ranks.
            info = RendezvousStoreInfo(self._host, store.port)
            return RendezvousInfo(PrefixStore("agents", store), rank, nodes, info)

    def close(self, code: int) -> None:
        """Report the exit code of the run to waiting nodes, if this node serves the store."""
        if self._joining is not None and self._joining.serves and len(self._counts) > 1:
            with contextlib.suppress(RuntimeError, ConnectionError):
                if self._joining.report_end(code):
                    time.sleep(10 * _POLL_SECONDS)

    # ---------------------------------------------------------------------------------------- the store

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    def _own_address(self) -> str:
        """Return the address of this machine on the route to the store."""
        if self._counts[-1] == 1:
            return "127.0.0.1"
        family, _, _, _, address = resolve(self._host, self._port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # A datagram socket sends nothing when it connects.
            probe.connect(address)
            return str(probe.getsockname()[0])

    def _open(self, deadline: float) -> tuple[TCPStore, int | None]:
        """Connect to the store of the first endpoint that answers, or serve it, and return its index or None."""
        begin = reported = time.monotonic()
        while True:
            reasons = []
            for endpoint in self._endpoints:
                self._host, self._port = endpoint
                reason = silence(endpoint)
                try:
                    if not reason:
                        return self._client(), None
                except OSError as error:
                    reason = str(error)
                reasons.append(f"{self._where} ({reason})")
            now = time.monotonic()
            for index, endpoint in enumerate(self._endpoints):
                self._host, self._port = endpoint
                if now - begin >= index * self._last_call and (store := self._serve()) is not None:
                    return store, index
            where = " and ".join(reasons)
            if now >= deadline:
                raise RendezvousError(
                    f"no launcher answers at {where} after {self._join:.0f} s; start the run on that host too, and "
                    "open the port between the nodes"
                )
            if now - reported >= REPORT_SECONDS:
                reported = now
                self._say(f"waiting for the launcher at {where}")
            time.sleep(1.0)

    def _serve(self) -> TCPStore | None:
        """Serve the store at the current endpoint, or return None if that is another machine or served already."""
        try:
            own = listen_at(self._host, self._port, self._counts[-1])
        except WrongEndpointError:
            if len(self._endpoints) > 1:  # the name of a host that was removed
                return None
            raise
        if own is None:
            return None
        self._port = own.getsockname()[1]
        return TCPStore(self._host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach())

    def _client(self) -> TCPStore:
        """Connect to the store. In a thread, because PyTorch waits without end for another program's answer."""
        outcomes: list[Any] = []

        def connect() -> None:
            try:
                outcomes.append(TCPStore(self._host, self._port, is_master=False, wait_for_workers=False))
            except Exception as error:  # A server that closes the connection, or is about to end.
                outcomes.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        if not outcomes:
            raise WrongEndpointError(
                f"another program listens at {self._where}: it does not answer as a launcher does; choose another port"
            )
        if isinstance(outcomes[0], Exception):
            raise OSError(str(outcomes[0]).split("\n")[0])
        store: TCPStore = outcomes[0]
        return store


class _Joining:
    """One attempt of a node to join.

    Keys: "joined" counts nodes, "node/N" describes one (JSON), "beat/N" counts its heartbeats. The serving node writes
    "present" (text for the log), and at the end "group" (JSON list of numbers, in rank order) or "refused" (text). Then
    it writes "regroup" (number of nodes) if nodes that wait can join, and "ended" (exit code of the run).
    """

    def __init__(
        self,
        store: Store,
        node: Node,
        serves: bool,
        where: str,
        say: Callable[[str], None],
        counts: tuple[int, ...],
    ) -> None:
        self._store, self._node, self.serves, self._where, self._say = store, node, serves, where, say
        self._counts = counts
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._beats: dict[int, tuple[int, float]] = {}  # The count, and when it grew; 0.0 at the first look.
        self._described: dict[int, Node] = {}
        self._enough_since: float | None = None
        self.waited = False  # The run had started without this node.
        self.expected, self.last_call, self.join = 0, 0.0, 0.0  # See `LauncherRendezvous`.
        self.superseded = lambda: False

    def attend(self, deadline: float) -> tuple[int, int]:
        """Return this node's rank and the number of nodes."""
        try:
            return self._attend(deadline)
        except (LostStoreError, WrongEndpointError):
            raise
        except (RuntimeError, ConnectionError, ValueError) as error:  # Includes DistNetworkError.
            # Values that no launcher writes; the store ends the connection after a text in the place of a counter.
            if self.serves or isinstance(error, ValueError):
                raise RendezvousError(
                    f"another program writes to the store at {self._where}; choose another port: "
                    f"{str(error).splitlines()[0]}"
                ) from None
            raise LostStoreError(str(error)) from None

    def _attend(self, deadline: float) -> tuple[int, int]:
        store = self._store
        number = store.add("joined", 1)
        store.set(f"node/{number}", to_json(self._node))
        reported, elastic, status = time.monotonic(), len(self._counts) > 1, ""
        while True:
            store.add(f"beat/{number}", 1)
            if self.serves:
                self._decide(number)
            if store.check(["refused"]):
                text = store.get("refused").decode(errors="replace")
                time.sleep(10 * _POLL_SECONDS)  # The others read it, too, before this process ends with the store.
                raise WrongEndpointError(text)
            group = self._group()
            if number in group:
                return group.index(number), len(group)
            now = time.monotonic()
            self.waited = elastic and bool(group)
            if self.waited:
                self.expected = self.regroups()
            if self.waited and store.check(["ended"]):
                raise RunEndedError(int(store.get("ended")))
            if now >= deadline and not self.waited:
                raise RendezvousError(
                    f"{self._status(group)} after {self.join:.0f} s; start the others with the same "
                    "NNODES and RDZV_ENDPOINT, and open the port between the nodes"
                )
            if now - reported >= REPORT_SECONDS and (not self.waited or self._status(group) != status):
                reported, status = now, self._status(group)
                self._say(f"waiting: {status}")
            time.sleep(_POLL_SECONDS)

    def regroups(self) -> int:
        """Return the number of nodes if the run restarts with more, else 0; the serving node decides it."""
        if not self.serves:
            return int(self._store.get("regroup")) if self._store.check(["regroup"]) else 0
        group = self._group()
        waiting = [self._described[number].host for number in self._present() if number not in group]
        larger = self._usable(len(group) + len(waiting))
        if larger <= len(group):
            return 0
        self._store.set("regroup", str(larger))
        self._say(f"{', '.join(waiting)} can join: from {len(group)} to {larger} nodes after a checkpoint")
        return larger

    def report_end(self, code: int) -> bool:
        """Write the exit code of the run. Return whether a node waits for it."""
        self._store.set("ended", str(code))
        group = self._group()
        return any(number not in group for number in self._present())

    def _group(self) -> list[int]:
        """Return the numbers of the nodes in rank order, empty until the group is formed."""
        value = self._store.get("group") if self._store.check(["group"]) else b"[]"
        group: list[int] = parse_json(value)
        return group

    def _status(self, group: list[int]) -> str:
        if group:
            return f"the run at {self._where} has all of its {len(group)} node(s), without this one"
        known = self._store.check(["present"])
        present = self._store.get("present").decode(errors="replace") if known else self._node.host
        return f"{present} of {self._node.nodes} nodes have joined at {self._where}"

    def _usable(self, nodes: int) -> int:
        """Return the largest usable number of nodes up to `nodes`; 0 if there is none."""
        return max((count for count in self._counts if count <= nodes), default=0)

    def _present(self) -> list[int]:
        """Return the numbers of the nodes whose heartbeats arrive. Called on the serving node."""
        store, now = self._store, time.monotonic()
        for number in range(1, store.add("joined", 0) + 1):
            beat = store.add(f"beat/{number}", 0)
            if beat == 0 or self._beats.get(number, (0, 0.0))[0] == beat:
                continue
            if number not in self._described:
                self._described[number] = from_json(Node, store.get(f"node/{number}"))
            self._beats[number] = beat, now if number in self._beats else 0.0
        return [number for number, (_, seen) in self._beats.items() if seen and now - seen < SILENT_SECONDS]

    def _decide(self, own: int) -> None:
        """On the serving node, which has the number `own`: form the group once enough nodes are present."""
        store, now = self._store, time.monotonic()
        if store.check(["group"]):
            return
        present = self._present()
        for number in present:
            other = self._described[number]
            if other.nodes != self._node.nodes:
                settings = (f"{node.host} with NNODES={node.nodes}" for node in (other, self._node))
                store.set("refused", f"{' and '.join(settings)} were started; set the same number on every node")
                return
        names = ", ".join(self._described[number].host for number in present)
        store.set("present", f"{len(present)} ({names})")
        nodes = self._usable(len(present))
        self._enough_since = (self._enough_since or now) if nodes else None
        wait = self.last_call * (_EXPECTED_CALLS if nodes < self.expected else 1)
        if self._enough_since is None or (nodes < self._counts[-1] and now - self._enough_since < wait):
            return
        if self.superseded():
            raise LostStoreError("the launcher of an earlier endpoint has started")
        others = [number for number in present if number != own][: nodes - 1]
        others.sort(key=lambda number: self._described[number].place())
        if nodes < self._counts[-1]:
            self._say(f"starting with {nodes} node(s) of {self._node.nodes}: {names} joined within {wait:.0f} s")
        store.set("group", json.dumps([own, *others]))

"""Rendezvous of the launchers of a run: a fixed number of nodes, one TCP store, plain text.

PyTorch's own rendezvous (`c10d`) unpickles the data of any process that reaches its port, compares the clocks of
the nodes, and starts with fewer nodes than intended if a clock is wrong. Here the store contains numbers and JSON only,
and a node is present as long as its heartbeat counter grows, measured by the clock of one node.

The launcher on the host of the endpoint serves the store and decides who takes part. A single node uses a port on the
loopback interface. Ranks use the same store, so no second port is opened.
"""

import contextlib
import errno
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
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from torchtitan_scape.core.files import parse_json
from torchtitan_scape.runtime.store_records import from_json, shown, to_json

BACKEND = "fixed"
DEFAULT_PORT = 29400
JOIN_SECONDS = 600.0  # Time for all nodes to join.
REPORT_SECONDS = 30.0  # Interval of the lines about missing nodes.
SILENT_SECONDS = 5.0  # Without a heartbeat for so long, a node has left.
PORT_SECONDS = 60.0  # Time for another program to release the port.
_POLL_SECONDS = 0.2
_MOST_JOINED = 100_000  # Launchers that have joined one store, restarts included; each costs a request.
_ANSWER_SECONDS = 20.0  # Time for a server to answer as a store does.


class WrongEndpointError(ValueError):
    """The endpoint, or a node's settings, cannot work: a restart does not help."""


class LostStoreError(RuntimeError):
    """The launcher that serves the store has ended, for example to restart."""


@dataclass(frozen=True)
class Node:
    """The entry of a launcher, which the others read.

    Attributes:
        host: name of the machine.
        address: IP address by which it reaches the store.
        nodes: number of nodes that it expects.
    """

    host: str
    address: str
    nodes: int

    def __post_init__(self) -> None:
        self.place()  # ValueError if it is not an address.

    def place(self) -> tuple[Any, ...]:
        """Return the key by which nodes are numbered after the first one: by address, so that restarts agree."""
        address = ipaddress.ip_address(self.address.partition("%")[0])
        return address.version, int(address)


class FixedRendezvous(RendezvousHandler):
    """Waits for a fixed number of launchers and numbers them. Node 0 is the one that serves the store.

    Args:
        endpoint: "host:port" of one of the nodes; ignored for a single node.
        nodes: number of nodes.
        run_id: name of the run, for torchrun.
        say: prints a line.
    """

    def __init__(self, endpoint: str, nodes: int, run_id: str, say: Callable[[str], None]) -> None:
        self._host: str = "127.0.0.1"
        self._port: int = 0
        if nodes > 1:
            self._host, self._port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        self._nodes, self._run_id, self._say = nodes, run_id, say
        self._store: TCPStore | None = None

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
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have joined.

        Raises:
            WrongEndpointError: the host is unknown, the port is taken, or the nodes expect different numbers of nodes.
            RendezvousError: nodes are missing after `JOIN_SECONDS`; the message has their names.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            store, serves = self._open(deadline)
            try:
                rank = _Joining(store, self._node(), serves, self._where, self._say).attend(deadline)
            except LostStoreError as error:
                if time.monotonic() >= deadline:
                    raise RendezvousError(f"the launcher at {self._where} was lost: {error}") from None
                self._say(f"the launcher at {self._where} has ended; waiting for its restart")
                time.sleep(1.0)
                continue
            store.set_timeout(timedelta(seconds=JOIN_SECONDS))
            self._store = store  # It serves the ranks.
            info = RendezvousStoreInfo(self._host, store.port)
            return RendezvousInfo(PrefixStore("agents", store), rank, self._nodes, info)

    # ---------------------------------------------------------------------------------------- the store

    @property
    def _where(self) -> str:
        return f"{self._host}:{self._port}"

    def _node(self) -> Node:
        return Node(socket.gethostname(), self._own_address(), self._nodes)

    def _own_address(self) -> str:
        """Return the address of this machine on the route to the store."""
        if self._nodes == 1:
            return "127.0.0.1"
        family, _, _, _, address = _resolve(self._host, self._port)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # A datagram socket sends nothing when it connects.
            probe.connect(address)
            return str(probe.getsockname()[0])

    def _open(self, deadline: float) -> tuple[TCPStore, bool]:
        """Serve the store if the endpoint is on this machine, else connect to it. Return whether it is served here."""
        own = listen_at(self._host, self._port, self._nodes)
        if own is not None:
            self._port = own.getsockname()[1]
            store = TCPStore(
                self._host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=own.detach()
            )
            return store, True
        return self._connect(deadline), False

    def _connect(self, deadline: float) -> TCPStore:
        reported = time.monotonic()
        while True:
            try:
                with socket.create_connection((self._host, self._port), timeout=5.0):
                    pass
                return self._client()
            except OSError as error:
                now = time.monotonic()
                reason = error.strerror or str(error)
                if now >= deadline:
                    raise RendezvousError(
                        f"no launcher answers at {self._where} after {JOIN_SECONDS:.0f} s ({reason}); start the run on "
                        "that host too, and open the port between the nodes"
                    ) from None
                if now - reported >= REPORT_SECONDS:
                    reported = now
                    self._say(f"waiting for the launcher at {self._where}: {reason}")
                time.sleep(1.0)

    def _client(self) -> TCPStore:
        """Connect to the store. In a thread, because PyTorch waits without end for another program's answer."""
        found: list[Any] = []

        def connect() -> None:
            try:
                found.append(TCPStore(self._host, self._port, is_master=False, wait_for_workers=False))
            except Exception as error:  # A server that closes the connection, or is about to end.
                found.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_ANSWER_SECONDS)
        if not found:
            raise WrongEndpointError(
                f"another program listens at {self._where}: it does not answer as a launcher does; choose another port"
            )
        if isinstance(found[0], Exception):
            raise OSError(str(found[0]).split("\n")[0])
        store: TCPStore = found[0]
        return store


class _Joining:
    """One attempt of a node to join.

    Keys: "joined" counts nodes, "node/N" describes one (JSON), "beat/N" counts its heartbeats. The serving node writes
    "present" (text for the log), and at the end "group" (JSON list of numbers, in rank order) or "refused" (text).
    """

    def __init__(self, store: Store, node: Node, serves: bool, where: str, say: Callable[[str], None]) -> None:
        self._store, self._node, self._serves, self._where, self._say = store, node, serves, where, say
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._beats: dict[int, tuple[int, float]] = {}  # The count, and when it grew; 0.0 at the first look.
        self._described: dict[int, Node] = {}
        self._ignored: set[int] = set()  # Entries of other programs.

    def attend(self, deadline: float) -> int:
        """Return this node's rank."""
        try:
            return self._attend(deadline)
        except (RuntimeError, ConnectionError) as error:  # Includes DistNetworkError.
            if self._serves:  # The store ends the connection if another program wrote a text to a counter.
                raise RendezvousError(f"{self._foreign()}: {str(error).splitlines()[0]}") from None
            raise LostStoreError(str(error)) from None

    def _attend(self, deadline: float) -> int:
        store = self._store
        number = store.add("joined", 1)
        store.set(f"node/{number}", to_json(self._node))
        reported = time.monotonic()
        while True:
            store.add(f"beat/{number}", 1)
            if self._serves:
                self._decide(number)
            if store.check(["refused"]):
                text = store.get("refused").decode(errors="replace")
                time.sleep(10 * _POLL_SECONDS)  # The others read it, too, before this process ends with the store.
                raise WrongEndpointError(text)
            group = self._group()
            if number in group:
                return group.index(number)
            now = time.monotonic()
            if now >= deadline:
                raise RendezvousError(f"{self._status(group)} after {JOIN_SECONDS:.0f} s; {_ADVICE}")
            if now - reported >= REPORT_SECONDS:
                reported = now
                self._say(f"waiting: {self._status(group)}")
            time.sleep(_POLL_SECONDS)

    def _group(self) -> list[int]:
        """Return the numbers of the nodes in rank order, empty until the group is formed."""
        value = self._store.get("group") if self._store.check(["group"]) else b"[]"
        with contextlib.suppress(ValueError):
            group = parse_json(value)
            if isinstance(group, list) and all(type(number) is int for number in group):
                return group
        raise RendezvousError(f"{self._foreign()}: the group of nodes is {shown(value)}")

    def _foreign(self) -> str:
        return f"another program writes to the store at {self._where}; choose another port"

    def _status(self, group: list[int]) -> str:
        if group:
            return f"the run at {self._where} has all of its {len(group)} nodes, without this one"
        known = self._store.check(["present"])
        present = self._store.get("present").decode(errors="replace") if known else self._node.host
        return f"{present} of {self._node.nodes} nodes have joined at {self._where}"

    def _decide(self, own: int) -> None:
        """On the serving node, which has the number `own`: see who is present, and form the group when all are."""
        store, now = self._store, time.monotonic()
        if store.check(["group"]):
            return
        joined = store.add("joined", 0)
        if joined > _MOST_JOINED:
            raise RendezvousError(f"{self._foreign()}: {joined} launchers have joined")
        for number in range(1, joined + 1):
            beat = store.add(f"beat/{number}", 0)
            if beat == 0 or number in self._ignored or self._beats.get(number, (0, 0.0))[0] == beat:
                continue
            if number not in self._described and not self._describe(number):
                continue
            self._beats[number] = beat, now if number in self._beats else 0.0
        present = [number for number, (_, seen) in self._beats.items() if seen and now - seen < SILENT_SECONDS]
        for number in present:
            other = self._described[number]
            if other.nodes != self._node.nodes:
                settings = (f"{node.host} with NNODES={node.nodes}" for node in (other, self._node))
                store.set("refused", f"{' and '.join(settings)} were started; set the same number on every node")
                return
        names = ", ".join(self._described[number].host for number in present)
        store.set("present", f"{len(present)} ({names})")
        if len(present) >= self._node.nodes:
            others = [number for number in present if number != own][: self._node.nodes - 1]
            others.sort(key=lambda number: self._described[number].place())
            store.set("group", json.dumps([own, *others]))

    def _describe(self, number: int) -> bool:
        """Read the entry of a node; return whether a launcher has written it."""
        value = self._store.get(f"node/{number}") if self._store.check([f"node/{number}"]) else b""
        try:
            self._described[number] = from_json(Node, value)
        except ValueError as error:
            self._say(f"node {number} in the store at {self._where} was not written by a launcher; ignored: {error}")
            self._ignored.add(number)
            return False
        return True


_ADVICE = "start the others with the same NNODES and RDZV_ENDPOINT, and open the port between the nodes"


def _resolve(host: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise WrongEndpointError(
            f"the host {host!r} of RDZV_ENDPOINT cannot be resolved ({error.strerror or error}); use a name or address "
            "that all nodes know"
        ) from None


def listen_at(host: str, port: int, nodes: int) -> socket.socket | None:
    """Return a socket that listens at the endpoint, or None if the endpoint is another machine or served already.

    It listens at the address of `host` alone, so that other networks of the machine cannot reach it.
    """
    return _try_to_listen(host, port, nodes)[0]


def listen_when_free(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens for several nodes, or None if the address is not of this machine.

    A program that uses the port may end soon: a requeued job has the port of its last start.

    Raises:
        SystemExit: The port remained in use for `PORT_SECONDS`.
    """
    deadline, waits = time.monotonic() + PORT_SECONDS, False
    while True:
        own, in_use = _try_to_listen(host, port, nodes=2)
        if not in_use:
            return own
        if not waits:
            print(
                f"MASTER_PORT={port} is in use on {socket.gethostname()}; waiting up to {PORT_SECONDS:.0f} s",
                flush=True,
            )
            waits = True
        if time.monotonic() >= deadline:
            raise SystemExit(
                f"error: MASTER_PORT={port} has been in use on {socket.gethostname()} for {PORT_SECONDS:.0f} s; "
                "set it to a free port"
            )
        time.sleep(1.0)


def _try_to_listen(host: str, port: int, nodes: int) -> tuple[socket.socket | None, bool]:
    """Return (the result of `listen_at`, whether the port is in use on this machine)."""
    in_use = False
    for family, _, _, _, address in _resolve(host, port):
        own = socket.socket(family, socket.SOCK_STREAM)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        loopback = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
        named = host == "localhost" or host == address[0]
        try:
            # Some systems resolve their own name to a loopback address, where other nodes cannot connect.
            own.bind(("" if loopback and nodes > 1 and not named else address[0], port, *address[2:]))
            own.listen(1024)
            return own, False
        except PermissionError:
            raise WrongEndpointError(
                f"port {port} of RDZV_ENDPOINT is reserved for root; choose one above 1023"
            ) from None
        except OSError as error:  # Not an address of this machine, or served by another launcher or program.
            own.close()
            in_use |= error.errno == errno.EADDRINUSE
    return None, in_use


def use_fixed_rendezvous(say: Callable[[str], None]) -> None:
    """Register this rendezvous for torchrun, as `--rdzv_backend=fixed`."""

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        if parameters.min_nodes != parameters.max_nodes:
            raise WrongEndpointError(
                f"the number of nodes is {parameters.min_nodes}:{parameters.max_nodes}; it must be fixed, for example "
                f"NNODES={parameters.max_nodes}"
            )
        return FixedRendezvous(parameters.endpoint, parameters.max_nodes, parameters.run_id, say)

    rendezvous_handler_registry.register(BACKEND, create)

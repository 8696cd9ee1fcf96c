"""Sockets at the endpoint of a run, and the records that ranks and launchers exchange there as JSON."""

import errno
import ipaddress
import json
import socket
import time
from dataclasses import asdict
from typing import Any, TypeVar

from torchtitan_scape.core.files import parse_json

_Record = TypeVar("_Record")
PORT_SECONDS = 60.0  # Time for another program to release the port.


class WrongEndpointError(ValueError):
    """The endpoint, or a node's settings, cannot work: a restart does not help."""


def resolve(host: str, port: int) -> list[Any]:
    """Return the addresses of a host, as `socket.getaddrinfo` does. Raises WrongEndpointError if it is unknown."""
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

    A program that uses the port may end soon: a requeued job has the port of its last start. Raises SystemExit after
    `PORT_SECONDS`.
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
    for family, _, _, _, address in resolve(host, port):
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


def silence(endpoint: tuple[str, int]) -> str:
    """Return why nothing answers at the endpoint; empty if a program accepts connections."""
    try:
        with socket.create_connection(endpoint, timeout=5.0):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def to_json(record: Any) -> str:
    """Return the JSON text of a dataclass whose fields are numbers, strings and flags."""
    return json.dumps(asdict(record))


def from_json(kind: type[_Record], value: bytes) -> _Record:
    """Return the dataclass `kind` from the text of `to_json`. Raises ValueError for another text."""
    try:
        return kind(**parse_json(value))
    except (ValueError, TypeError):
        raise ValueError(f"another program has written {value[:60]!r}") from None

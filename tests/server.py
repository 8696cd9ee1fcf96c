"""Fork server: one process imports the trainer, and its forks run the ranks of pools and the commands of tests.

A new interpreter needs 5 s of CPU for imports that a fork inherits. A request contains the module, its arguments, the
environment, the working directory and open files, as for `python -m module arguments`. The server returns the process
id, and at the end the exit code. It is killed when pytest ends, for whatever reason. A fork is killed when the server
ends, or when the client closes the connection.

Run as a script, this file replaces the Python interpreter for scripts and launchers (see `python`): the server runs
the modules of this repository, and the interpreter runs everything else.
"""

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "SCAPE_TEST_SERVER"  # environment variable with the path of the server's socket
FORKED = ("torchtitan_scape.", "scripts.", "tests.")
_PR_SET_PDEATHSIG = 1


class Process:
    """`python -m module arguments` in a fork of the server.

    Args:
        module: name of the module, which runs as `__main__`.
        arguments: its command line.
        environment: all environment variables of the process; those of this process by default.
        folder: working directory; the root of the repository by default.
        files: file descriptors of this process. The new process has them as 0, 1, 2 and so on, and no others.
        at: path of the server's socket; `address()` by default.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        files: Sequence[int] = (0, 1, 2),
        at: str | None = None,
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(at or address())
        variables = dict(os.environ) if environment is None else environment
        request = json.dumps([module, list(arguments), variables, str(folder or ROOT)]).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        self._connection.sendmsg([len(request).to_bytes(4, "big")], [rights])
        self._connection.sendall(request)
        self.pid = int.from_bytes(_receive(self._connection, 4), "big")

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code, or the negative number of the signal.

        Raises:
            TimeoutError: if the process still runs after `timeout` seconds.
            EOFError: if the server has ended.
        """
        self._connection.settimeout(timeout)
        return int.from_bytes(_receive(self._connection, 4), "big", signed=True)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._connection.close()


def run(
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
    timeout: float = 120,
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m module arguments` in a fork and return its exit code and output, as `subprocess.run` does."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        files = [file.fileno() for file in (nothing, out, err)]
        process = Process(module, arguments, environment, folder, files)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, out.read(), err.read())


@functools.cache
def address() -> str:
    """Return the path of the server's socket. The first call starts the server, which child processes then share."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    folder = tempfile.mkdtemp()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{folder}/server")
    listener.listen(64)
    number = listener.fileno()
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **hidden, **own}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server", "serve", str(number)], cwd=ROOT, env=environment, pass_fds=[number]
    )
    listener.close()

    # The interpreter for scripts and launchers: see `python`.
    python = Path(folder, "python")
    python.write_text(f'#!/bin/sh\n{ADDRESS}={folder}/server exec {sys.executable} -IS {__file__} "$@"\n')
    python.chmod(0o755)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    os.environ[ADDRESS] = f"{folder}/server"
    return os.environ[ADDRESS]


def python() -> str:
    """Return the path of a program that scripts and launchers can use as Python, with this file as its script."""
    return str(Path(address()).with_name("python"))


# ---------------------------------------------------------------------------------------- the server's side


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the test server has ended")
        data += part
    return data


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(listener: socket.socket) -> NoReturn:
    _die_with_parent()
    importlib.import_module("tests.preload")
    threads = [Path("/proc/self/task", task, "comm").read_text() for task in os.listdir("/proc/self/task")]
    # A fork has only the thread that forked. Arrow's allocator starts its thread again after a fork.
    others = [name for name in threads[1:] if not name.startswith("jemalloc")]
    assert not others, f"the imports of the test server started threads, which its forks would not have: {others}"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest handles Ctrl-C, and then ends the server
    selector = selectors.DefaultSelector()

    def begin() -> None:
        connection, _ = listener.accept()
        files: list[int] = []
        try:
            length, files, *_ = socket.recv_fds(connection, 4, 16)
            if not length:
                raise EOFError
            request = json.loads(_receive(connection, int.from_bytes(length, "big")))
        except (EOFError, ConnectionResetError):  # the client was killed before it had sent everything
            for file in files:
                os.close(file)
            connection.close()
            return
        if (pid := os.fork()) == 0:
            selector.close()
            sys.executable = str(Path(listener.getsockname()).with_name("python"))
            _become(request, files)
        for file in files:
            os.close(file)
        child = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            connection.sendall(pid.to_bytes(4, "big"))

        def end() -> None:
            """Called when the process has ended, or the client has closed its connection: it sends one request."""
            selector.unregister(child)
            selector.unregister(connection)
            signal.pidfd_send_signal(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                connection.sendall(code.to_bytes(4, "big", signed=True))
            connection.close()
            os.close(child)

        selector.register(child, selectors.EVENT_READ, end)
        selector.register(connection, selectors.EVENT_READ, end)

    selector.register(listener, selectors.EVENT_READ, begin)
    while True:
        selector.select()[0][0].data()  # only the first event: the call may unregister the files of the others


def _become(request: list[Any], files: list[int]) -> NoReturn:
    """Run the requested command in this fork, and exit with its exit code."""
    code = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Duplicate to numbers above all final ones first, so that no file overwrites another.
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, 64) for file in files]
        for number, file in enumerate(high):
            os.dup2(file, number)
        os.closerange(len(files), 256)
        module, arguments, environment, folder = request
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = [module, *arguments]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        warnings.filterwarnings("ignore", message=f"'{module}' found in sys.modules")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: list[str]) -> NoReturn:
    if arguments[0] == "serve":
        try:
            _serve(socket.socket(fileno=int(arguments[1])))
        finally:
            traceback.print_exc()
            os._exit(1)
    own = arguments[1:] if arguments[0] == "-u" else arguments  # torchrun adds -u; forks buffer lines
    if own[0] == "-m" and own[1].startswith(FORKED):
        process = Process(own[1], own[2:], folder=Path.cwd(), at=os.environ[ADDRESS])
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

        def forward(number: int, _: Any) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit code is on the way
                os.kill(process.pid, number)

        for number in numbers:
            signal.signal(number, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the launcher starts its ranks with these blocked
        code = process.wait()
        os._exit(code if code >= 0 else 128 - code)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])

"""The fork server outlives clients that are killed while they ask for a process."""

import array
import os
import socket

from tests import server


def test_a_client_that_ends_before_its_request_does_not_end_the_server() -> None:
    with open(os.devnull) as file:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 3))
        for parts in ([], [b"\0\0\1\0"], [b"\0\0\1\0", b"[1, "]):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.connect(server.address())
                for part in parts:
                    client.sendmsg([part], [rights])
    assert server.run("tests.fresh", "print('alive')").stdout == "alive\n"

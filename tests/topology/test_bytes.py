"""Counted bytes equal the input of collectives and the bytes on the network interface."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.marks import slow


def isolated() -> list[str]:
    """Return a command prefix that creates a network namespace, so that no other traffic is counted."""
    for command in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        if shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip("cannot create a network namespace (needs root or user namespaces)")


@pytest.mark.parametrize(
    "world, density, update, wire",
    [slow(2, 0.1, "replicated", "float32"), (3, 0.05, "sharded", "float32"), (2, 0.2, "replicated", "int4")],
)
def test_counted_bytes_are_on_the_interface(world: int, density: float, update: str, wire: str) -> None:
    arguments = [str(world), str(density), update, wire]
    result = subprocess.run(
        [*isolated(), sys.executable, "-m", "tests.topology.interface_bytes", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    ranks = json.loads(result.stdout.splitlines()[-1])
    assert len(ranks) == world
    for rank in ranks:
        assert rank["given"] == rank["intercepted"] > 0
    counted = sum(rank["sent"] for rank in ranks)
    moved = max(rank["interface"] for rank in ranks)
    assert counted <= moved * 1.001 and moved <= 1.05 * counted, (counted, moved)

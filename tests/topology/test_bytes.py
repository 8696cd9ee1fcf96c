"""Counted bytes equal the input of collectives and the bytes on the network interface."""

import json
from typing import Any

import pytest

from tests import server
from tests.marks import slow
from tests.topology.interface_bytes import NO_NAMESPACE


def measured(module: str, *arguments: str) -> Any:
    """Return the result of a script with a network namespace of its own."""
    result = server.run(module, *arguments)
    if result.returncode == NO_NAMESPACE:
        pytest.skip("cannot create a network namespace (needs root or user namespaces)")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "world, density, update, code",
    [slow(2, 0.1, "replicated", "float32"), (3, 0.05, "sharded", "float32"), (2, 0.2, "replicated", "int4")],
)
def test_counted_bytes_are_on_the_interface(world: int, density: float, update: str, code: str) -> None:
    ranks = measured("tests.topology.interface_bytes", str(world), str(density), update, code)
    assert len(ranks) == world
    for rank in ranks:
        assert rank["given"] == rank["intercepted"] > 0
    counted = sum(rank["sent"] for rank in ranks)
    moved = max(rank["interface"] for rank in ranks)
    assert counted <= moved * 1.001 and moved <= 1.05 * counted, (counted, moved)

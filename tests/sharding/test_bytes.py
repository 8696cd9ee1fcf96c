"""Counted bytes equal those on the network interface: FSDP2's own collectives, all of ZeRO++, and TAGC."""

import json
import os
import subprocess
import sys

from tests.topology.test_bytes import isolated


def test_counted_bytes_are_on_the_interface() -> None:
    done = subprocess.run(
        [*isolated(), sys.executable, "-m", "tests.sharding.interface_bytes"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for form, one in found.items():
        assert one["counted"] <= 1.001 * one["interface"] and one["interface"] <= 1.05 * one["counted"], (form, one)
    assert found["all"]["counted"] < 0.3 * found["dense"]["counted"]  # against FP32, of both links

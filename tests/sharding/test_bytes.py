"""Counted bytes equal those on the network interface: FSDP2's own collectives, all of ZeRO++, and TAGC."""

from tests.topology.test_bytes import measured


def test_counted_bytes_are_on_the_interface() -> None:
    found = measured("tests.sharding.interface_bytes")
    for form, one in found.items():
        assert one["counted"] <= 1.001 * one["interface"] and one["interface"] <= 1.05 * one["counted"], (form, one)
    assert found["all"]["counted"] < 0.3 * found["dense"]["counted"]  # against FP32, of both links

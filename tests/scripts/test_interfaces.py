"""Byte counters of network interfaces: parsing, and comparison with counted bytes."""

import socket
from pathlib import Path

import pytest

from scripts import interfaces
from scripts.interfaces import RankBytes, by_level, compare, parse_counters, read_interfaces

HEADINGS = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
"""
SAMPLE = (
    HEADINGS
    + """\
    lo: 1500000   10    0    0    0     0          0         0  1500000      10    0    0    0     0       0          0
  eth0:     700    7    0    0    0     0          0         0      900       9    0    0    0     0       0          0
wlan0.5:12345678901234 7 0    0    0     0          0         0       50       9    0    0    0     0       0          0
eth0:1:       1    1    0    0    0     0          0         0        2       1    0    0    0     0       0          0
"""
)


def test_the_table_of_the_kernel_is_parsed() -> None:
    """Received bytes come first; there may be no space after the colon, and names may contain one."""
    assert parse_counters(SAMPLE) == {
        "lo": (1_500_000, 1_500_000),
        "eth0": (900, 700),
        "wlan0.5": (50, 12_345_678_901_234),
        "eth0:1": (2, 1),
    }
    assert parse_counters(HEADINGS) == {}


@pytest.mark.parametrize("line", ["eth0 1 2 3", "eth0: 1 2 3", ": " + "1 " * 16, "eth0: " + "x " * 16])
def test_an_invalid_line_is_quoted(line: str) -> None:
    with pytest.raises(ValueError, match="expected an interface's name"):
        parse_counters(HEADINGS + line + "\n")


def test_the_loopback_is_the_node_and_all_others_the_network() -> None:
    assert by_level(parse_counters(SAMPLE)) == {"node": (1_500_000, 1_500_000), "network": (952, 12_345_678_901_935)}
    assert by_level({}) == {"node": (0, 0), "network": (0, 0)}


def test_without_proc_net_dev_there_are_no_counters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interfaces, "COUNTERS", tmp_path / "none")
    assert read_interfaces() is None


@pytest.mark.skipif(not interfaces.COUNTERS.exists(), reason="this system has no /proc/net/dev")
def test_loopback_traffic_is_counted() -> None:
    before = read_interfaces()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            peer, _ = server.accept()
            client.sendall(bytes(20_000))
            with peer:
                while len(peer.recv(20_000, socket.MSG_PEEK)) < 20_000:
                    pass
    except OSError:
        pytest.skip("this system has no loopback")
    after = read_interfaces()
    assert before is not None and after is not None
    assert after["node"][0] - before["node"][0] >= 20_000


def test_bytes_are_compared_by_node_and_level() -> None:
    """Traffic of pairs and nodes uses the loopback; interface counters are per node, not per rank."""
    first = {"node": 4_400, "network": 1_020}
    ranks = [
        RankBytes(0, {("gcd_pair", "payload"): 1000.0, ("network", "payload"): 1000.0}, first),
        RankBytes(1, {("node", "mask"): 500.0}, {"node": 510, "network": 7}),
        RankBytes(0, {("gcd_pair", "mask"): 1000.0, ("node", "payload"): 2000.0}, first),
    ]
    table = compare(ranks, steps=10)
    assert table == {
        "node": [
            {
                "node": 0,
                "counted": 400.0,
                "by_kind": {"mask": 100.0, "payload": 300.0},
                "interface": 440.0,
                "ratio": 1.1,
            },
            {"node": 1, "counted": 50.0, "by_kind": {"mask": 50.0}, "interface": 51.0, "ratio": 1.02},
        ],
        "network": [
            {"node": 0, "counted": 100.0, "by_kind": {"payload": 100.0}, "interface": 102.0, "ratio": 1.02},
            {"node": 1, "counted": 0.0, "by_kind": {}, "interface": 0.7, "ratio": None},
        ],
    }

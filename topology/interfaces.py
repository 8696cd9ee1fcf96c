"""Byte counters of the network interfaces, for a comparison with the bytes of the ledger.

The counters include headers, acknowledgements, retransmissions and the traffic of other programs. The comparison is
therefore meaningful only without other traffic, for example in a network namespace with one interface besides its
loopback (scripts/emulated_cluster.py). They include gloo's TCP traffic but not NCCL's own transports.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank over some steps.

    Attributes:
        node: Index of the rank's node.
        counted: Bytes that the rank's ledger counted as sent, by (link level, kind of message).
        interfaces: Bytes that the interfaces of the node sent in the same steps, by level as in `by_level`.
    """

    node: int
    counted: Mapping[tuple[str, str], float]
    interfaces: Mapping[str, int]


def parse_counters(text: str) -> dict[str, tuple[int, int]]:
    """Parse the text of /proc/net/dev into (bytes sent, bytes received) by interface.

    Raises ValueError, which quotes the line, for an unknown format.
    """
    counters = {}
    for line in text.splitlines()[2:]:  # after two header lines
        # Old kernels print no space after the colon, and interface names may contain a colon.
        name, _, figures = line.rpartition(":")
        fields = figures.split()
        if not name.strip() or len(fields) < 16 or not (fields[0].isdigit() and fields[8].isdigit()):
            raise ValueError(f"{COUNTERS} has the line {line!r}; expected an interface's name and 16 counters")
        counters[name.strip()] = (int(fields[8]), int(fields[0]))
    return counters


def by_level(counters: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Return (bytes sent, bytes received) of the loopback ("node") and of all other interfaces together ("network")."""
    others = [figures for name, figures in counters.items() if name != "lo"]
    return {
        "node": counters.get("lo", (0, 0)),
        "network": (sum(sent for sent, _ in others), sum(received for _, received in others)),
    }


def read_interfaces() -> dict[str, tuple[int, int]] | None:
    """Return `by_level` of this process's network namespace since its creation; None without /proc/net/dev."""
    try:
        text = COUNTERS.read_text()
    except OSError:
        return None
    return by_level(parse_counters(text))


def compare(ranks: Sequence[RankBytes], steps: int) -> dict[str, list[dict[str, Any]]]:
    """Compare the counted bytes of each node's ranks with the node's interface counters.

    The ranks of a node report the same interfaces, so the counters of its first rank are used. Traffic within a GCD
    pair also uses the loopback.

    Returns:
        By level one entry per node, in bytes sent per step. `by_kind` is `counted` by kind of message; `ratio` is
        `interface` / `counted`, None if nothing was counted.
    """
    nodes: dict[int, list[RankBytes]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.node].append(rank)
    table: dict[str, list[dict[str, Any]]] = {}
    for level, counted_as in (("node", ("gcd_pair", "node")), ("network", ("network",))):
        table[level] = []
        for node, members in sorted(nodes.items()):
            by_kind: dict[str, float] = defaultdict(float)
            for member in members:
                for (name, kind), sent in member.counted.items():
                    if name in counted_as:
                        by_kind[kind] += sent
            counted = sum(by_kind.values())
            interface = members[0].interfaces[level]
            table[level].append(
                {
                    "node": node,
                    "counted": counted / steps,
                    "by_kind": {kind: sent / steps for kind, sent in sorted(by_kind.items())},
                    "interface": interface / steps,
                    "ratio": interface / counted if counted else None,
                }
            )
    return table

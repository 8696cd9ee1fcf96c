"""The byte counters of the network interfaces themselves, beside which counted bytes are held.

They see everything that crosses an interface: headers, acknowledgements, retransmissions, other programs. A
comparison means something only where nothing else talks, such as in a network namespace with one interface beside
its loopback (scripts/emulated_cluster.py). NCCL's own transports do not pass here; gloo's TCP does.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True)
class RankBytes:
    """What one rank knows of some steps.

    node: the node that it is on.
    counted: bytes that it counted as sent, by (link level, kind of message).
    interfaces: bytes that its node's interfaces sent meanwhile, by level as `by_level` has them.
    """

    node: int
    counted: Mapping[tuple[str, str], float]
    interfaces: Mapping[str, int]


def parse_counters(text: str) -> dict[str, tuple[int, int]]:
    """(bytes sent, bytes received) by interface, from the text of /proc/net/dev.

    Raises ValueError with a line that is not understood.
    """
    counters = {}
    for line in text.splitlines()[2:]:  # two lines of headings
        # Old kernels leave no space after the colon; names may have a colon of their own.
        name, _, figures = line.rpartition(":")
        fields = figures.split()
        if not name.strip() or len(fields) < 16 or not (fields[0].isdigit() and fields[8].isdigit()):
            raise ValueError(f"{COUNTERS} has the line {line!r}; expected an interface's name and 16 counters")
        counters[name.strip()] = (int(fields[8]), int(fields[0]))
    return counters


def by_level(counters: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """(bytes sent, bytes received) of the loopback ("node") and of all other interfaces together ("network")."""
    others = [figures for name, figures in counters.items() if name != "lo"]
    return {
        "node": counters.get("lo", (0, 0)),
        "network": (sum(sent for sent, _ in others), sum(received for _, received in others)),
    }


def read_interfaces() -> dict[str, tuple[int, int]] | None:
    """`by_level` of this process's network namespace, since it exists; None on systems without /proc/net/dev."""
    try:
        text = COUNTERS.read_text()
    except OSError:
        return None
    return by_level(parse_counters(text))


def compare(ranks: Sequence[RankBytes], steps: int) -> dict[str, list[dict[str, Any]]]:
    """Counted bytes of each node's ranks beside its interfaces', by level: one entry a node, bytes sent per step.

    Ranks of a node report the same interfaces; the first one's figures are taken. What a GCD pair exchanges goes over
    the loopback as well. `by_kind` is `counted` by kind of message; `ratio` is interface over counted, None where
    nothing was counted.
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
            moved = members[0].interfaces[level]
            table[level].append(
                {
                    "node": node,
                    "counted": counted / steps,
                    "by_kind": {kind: sent / steps for kind, sent in sorted(by_kind.items())},
                    "interface": moved / steps,
                    "ratio": moved / counted if counted else None,
                }
            )
    return table

"""What SCAPE sends best where a share of the dense bytes is all that may travel. Plain arithmetic: no torch.

The rule is that of the quality study (docs/results.md, "Loss for bytes"): what fewer bits an entry save is worth more
as density, down to four bits; at less than about 1 % of the bytes two bits do.
"""

import math

from torchtitan_scape.methods.topk.blocks import Shapes, entries_of
from torchtitan_scape.planner.volumes import PlannedRun, messages

BLOCK = 1024
# Entries of a block: with 192 and 320 the study's loss was 2 and 7 % higher (results/quality_study/frontier.md)
MOST = 112
# (least budget, wire): the first that the budget reaches, or else the next that it suffices for.
WIRES = ((0.009, "int4"), (0.0, "2bit"), (0.0, "1bit"))


def share(method: PlannedRun, shapes: Shapes, replicas: int) -> float:
    """Bytes that a replica sends in a step at the target density, masks and scales included, over those of dense FP32.

    Of the outermost level, where replicas are on nodes of their own.
    """
    tiers = [("network", max(2, replicas))]
    sent = sum(stage.sent for one in messages(method, shapes, max(2, replicas)) for stage in one.stages(tiers))
    dense = 2.0 * (tiers[0][1] - 1) / tiers[0][1] * 4.0 * entries_of(shapes)
    return sent / dense if dense else 0.0


def within(
    budget: float, shapes: Shapes, replicas: int, update: str = "replicated", weights: str = "float32"
) -> PlannedRun:
    """The setting that the study found best among those that send at most `budget`, a share of the dense bytes.

    shapes: of a rank's shards. Raises ValueError, which names the least, where there is none.
    """

    def setting(wire: str, k: int) -> PlannedRun:
        # New values go as the payload does; but to BF16 weights as such.
        values = "float32" if update == "replicated" else wire if weights == "float32" else "bfloat16"
        return PlannedRun("scape", k / BLOCK, wire, update=update, values=values, weights=weights, block=BLOCK)

    for wire in (wire for least, wire in WIRES if budget >= least):
        for k in range(MOST, 0, -1):
            if share(setting(wire, k), shapes, replicas) <= budget:
                return setting(wire, k)
    least = min(share(setting(wire, 1), shapes, replicas) for _, wire in WIRES)
    raise ValueError(
        f"the least that a step of this model can send is {math.ceil(1e5 * least) / 1e5:g} of the dense bytes"
    )

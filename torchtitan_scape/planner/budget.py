"""What SCAPE sends best where a share of the dense bytes is all that may travel. Plain arithmetic: no torch.

The rule is that of the quality study (docs/results.md, "Loss for bytes"): what fewer bits an entry save is worth more
as density, down to four bits; two bits pay where masks take most of the bytes.
"""

from torchtitan_scape.planner.payload import Shapes, entries_of
from torchtitan_scape.planner.volumes import Method, messages

BLOCK = 1024
# (least budget, wire): the first that the budget reaches.
WIRES = ((0.05, "int8"), (0.009, "int4"), (0.0, "2bit"))


def share(method: Method, shapes: Shapes, replicas: int) -> float:
    """Bytes that a replica sends in a step at the target density, masks and scales included, over those of dense FP32.

    Of the outermost level, where replicas are on nodes of their own.
    """
    tiers = [("network", max(2, replicas))]
    sent = sum(stage.sent for one in messages(method, shapes, max(2, replicas)) for stage in one.stages(tiers))
    dense = 2.0 * (tiers[0][1] - 1) / tiers[0][1] * 4.0 * entries_of(shapes)
    return sent / dense


def within(
    budget: float, shapes: Shapes, replicas: int, update: str = "replicated", weights: str = "float32"
) -> Method:
    """The setting that the study found best among those that send at most `budget`, a share of the dense bytes.

    shapes: of a rank's shards. Raises ValueError, which names the least, where there is none.
    """
    wire = next(wire for least, wire in WIRES if budget >= least)

    # New values go as the payload does; but to BF16 weights as such.
    values = "float32" if update == "replicated" else wire if weights == "float32" else "bfloat16"

    def setting(k: int) -> Method:
        return Method("scape", k / BLOCK, wire, update=update, values=values, weights=weights, block=BLOCK)

    fits = (k for k in range(BLOCK // 2, 0, -1) if share(setting(k), shapes, replicas) <= budget)
    k = next(fits, 0)
    if not k:
        least = share(setting(1), shapes, replicas)
        raise ValueError(f"the least that a step of this model can send is {least:.3g} of the dense bytes")
    return setting(k)

"""What shard_axis.py measures on the shard axis: forms, and how the trainer is told."""

from typing import NamedTuple

RANKS = 4  # on two nodes


class Form(NamedTuple):
    """options: of the trainer. shard: degree; what is left of the ranks is the replicate axis. sync: the method there,
    and the optimizer. again: weights cross nodes in every forward pass, as ZeRO++ has been published, not once an
    update."""

    title: str
    options: tuple[str, ...] = ()
    shard: int = RANKS
    sync: tuple[str, ...] = ("--sync.method=dense", "--optimizer.name=AdamW")
    again: bool = False

    def arguments(self) -> tuple[str, ...]:
        return (f"--parallelism.data_parallel_shard_degree={self.shard}", *self.sync, *self.options)


WEIGHTS, SECONDARY = "--sharding.weights=int8", "--sharding.secondary"
LEVELS = ("--sharding.levels.weights=2", "--sharding.levels.gradients=2", WEIGHTS, "--sharding.gradients=int4")
SUM = "--sharding.levels.sum=int8"
SCAPE = (
    "--sync.method=scape",
    "--optimizer.name=AdamS",
    "--sync.scape.density=0.05",
    "--sync.scape.wire=int4",
    "--sync.scape.density_warmup_steps=0",
)


def gradients(code: str) -> str:
    return f"--sharding.gradients={code}"


DENSE, PUBLISHED = "dense", "zeropp-published"
SPEED = {
    DENSE: Form("FSDP2's own (ZeRO-3)"),
    "weights-int8": Form("INT8 weights", (WEIGHTS,)),
    "gradients-int8": Form("INT8 gradients", (gradients("int8"),)),
    "gradients-int8-int4": Form("INT8+INT4 gradients", (gradients("int8+int4"),)),
    "secondary": Form("secondary, once an update", (SECONDARY,)),
    PUBLISHED: Form("ZeRO++ as published", (WEIGHTS, SECONDARY, gradients("int4")), again=True),
    "zeropp": Form("ZeRO++, ours", (WEIGHTS, SECONDARY, gradients("int8+int4"))),
    "levels-published": Form(
        "three levels as published",
        (*LEVELS, "--sharding.levels.update=bfloat16", "--sharding.levels.secondary=2"),
        shard=2,
    ),
    "levels": Form("three levels, ours", LEVELS, shard=2),
    "levels-int8": Form("three levels, INT8 sum across nodes", (*LEVELS, SUM), shard=2),
    "levels-scape": Form("three levels, SCAPE across nodes", LEVELS, shard=2, sync=SCAPE),
}
# What must be so many times faster than what.
FASTER = [
    *((name, PUBLISHED, 1.71) for name in ("levels", "levels-int8", "levels-scape")),
    *((name, DENSE, 1.0) for name in (PUBLISHED, "zeropp", "levels-published", "levels")),
]


def tagc(sparsity: float, *others: str) -> tuple[str, ...]:
    return (gradients("tagc"), f"--sharding.tagc.sparsity={sparsity}", *others)


PUBLISHED_TAGC = (
    "--sharding.tagc.codec=sketch",
    "--sharding.tagc.index=bit_sum",
    "--sharding.tagc.micro=each",
    "--sharding.tagc.selection=table",
    "--sharding.tagc.left_over=estimate",
    "--sharding.tagc.no-fill",
    "--sharding.tagc.reproduce",
)
TAGC = {
    DENSE: Form("FSDP2's own", shard=2),
    "tagc-0.9": Form("TAGC, 10 %", tagc(0.9), shard=2),
    "tagc-0.9875": Form("TAGC, 1.25 %", tagc(0.9875), shard=2),
    "tagc-published": Form("TAGC as published, 1.25 %", tagc(0.9875, *PUBLISHED_TAGC), shard=2),
    "tagc-0.9875-weights": Form("TAGC, 1.25 %, INT8 weights once an update", tagc(0.9875, WEIGHTS, SECONDARY), shard=2),
}
SHORTER = 5.0  # times, TAGC's exchange of gradients against FSDP2's

LOSSES = {
    DENSE: Form("FSDP2's own"),
    "int8": Form("INT8 weights and gradients", (WEIGHTS, gradients("int8"))),
    "int8-int4": Form("INT8 weights, INT8+INT4 gradients", (WEIGHTS, gradients("int8+int4"))),
    "levels": Form("three levels", LEVELS, shard=2),
    "levels-int8": Form("three levels, INT8 sum across nodes", (*LEVELS, SUM), shard=2),
    "tagc-0.9": Form("TAGC, 10 % once a step", tagc(0.9)),
    "tagc-0.9875": Form("TAGC, 1.25 % once a step", tagc(0.9875)),
}
# Of the dense loss, by which a form's may be higher: ours, and what TAGC's paper has.
CLOSE, CLOSE_TAGC = 0.005, 0.036

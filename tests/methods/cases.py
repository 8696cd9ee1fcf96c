"""The cases of `test_contract`: every method of the replicate axis, with options."""

from dataclasses import dataclass, field
from typing import Any

# Matrices: one with a short last block, one of a single entry, an empty shard, one whose gradient is always zero. Then
# uncompressed parameters.
SHAPES = [(40, 24), (33, 5), (1, 1), (0, 4), (16, 16), (7,), (1,)]
WITHOUT = 4
STEPS = 8
CHUNK_ENTRIES = 256  # six chunks of the 1,390 entries
EQUAL = 1e-12  # relative tolerance of byte counts, which are sums of floats


@dataclass(frozen=True, eq=False)
class Case:
    """A method with options.

    Attributes:
        dense: changed options for which the method equals dense training, up to `tolerance`.
        lag: steps by which that training applies a gradient later than dense training.
        begins: steps before it compresses. After that the bytes per step repeat every `period` steps.
        conserves: applied plus pending updates equal the sum of all gradients.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, Any] | None = None
    begins: int = 0
    period: int = 1
    tolerance: float = 1e-5
    conserves: bool = True
    lag: int = 0

    def __str__(self) -> str:
        return " ".join([self.method, *map(str, self.options.values())])


CASES = [
    Case("dense"),
    Case("topk", {"density": 0.1, "block_size": 64}, dense={"density": 1.0}),
    Case("topk", {"density": 0.05, "selection": "tensor", "density_warmup_steps": 3}, {"density": 1.0}, begins=3),
    Case("topk", {"density": 0.1, "block_size": 16, "start": 2}, {"start": STEPS}, begins=2),
    Case("topk", {"density": 0.1, "selection": "tile", "code": "2bit"}, dense={"density": 1.0}),
    Case("topk", {"density": 0.1, "block_size": 64, "code": "2bit"}, dense={"density": 1.0}),
    Case("tagc", {"density": 0.1}, dense={"density": 1.0}),
    Case("demo", {"chunk": 8, "k": 4}, dense={"k": 64}, conserves=False),  # the mean is over the senders of a component
    Case("demo", {"chunk": 6, "k": 4, "code": "sign"}, {"k": 64, "code": "float32"}, conserves=False),
    Case("powersgd", {"rank": 2, "start": 0}, dense={"start": STEPS}),
    Case("powersgd", {"rank": 4, "start": 3}, dense={"rank": 1000}, begins=3),
    Case("radius", {"density": 0.25, "interval": 3, "start": 2}, dense={"density": 1.0}, begins=3, period=3),
    Case("radius", {"interval": 2, "start": 0}, dense={"interval": 1}, begins=2, period=2),
    Case("quantized", {"block": 32}, dense={"code": "int8"}, tolerance=2e-2),
    Case("quantized", {"code": "1bit", "block": 32}, dense={"code": "int8"}, tolerance=2e-2),
    Case("quantized", {"code": "2bit", "block": 64}, dense={"code": "int8"}, tolerance=2e-2),
    Case(
        "quantized_update",
        {"code": "e2m1", "update_code": "e2m1", "block": 32},
        dense={"code": "int8", "update_code": "int8"},
        tolerance=2e-2,
    ),
    Case(
        "quantized_update",
        {"update_code": "1bit_unbiased", "block": 64},
        dense={"code": "int8", "update_code": "int8"},
        tolerance=2e-2,
    ),
    Case(
        "quantized_update",
        {"update_code": "2bit", "interval": 2, "whiten_every": 0, "block": 32},
        dense={"code": "int8", "update_code": "int8", "interval": 1},
        tolerance=2e-2,
        period=2,
    ),
    Case("onebit_adam", {"warmup_steps": 2, "block": 32}, dense={"warmup_steps": STEPS}, begins=2),
    Case(
        "onebit_adam",
        {"warmup_steps": 4, "block": 64, "code": "2bit"},
        dense={"warmup_steps": STEPS},
        begins=4,
    ),
    Case("diloco", {"inner_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0}, {"inner_steps": 1}, period=3),
    Case(
        "diloco",
        {"inner_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "code": "int4", "decay": 1.0},
        {"inner_steps": 1, "code": "float32", "decay": 0.0},
        period=3,
    ),
    Case(
        "streaming_diloco",
        {"inner_steps": 4, "delay": 2, "outer_momentum": 0.5},
        {"inner_steps": 1, "delay": 0, "mix": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0, "code": "float32"},
        period=4,
        conserves=False,
    ),
    Case("sparta", {"interval": 3, "warmup_steps": 2}, {"interval": 1, "code": "float32"}, begins=2, period=3),
    Case(
        "sparseloco",
        {"inner_steps": 3, "density": 0.1, "decay": 1.0, "divisor": "replicas"},
        dense={"inner_steps": 1, "density": 1.0},
        period=3,
    ),
    Case(
        "co2",
        {"inner_steps": 3, "outer_momentum": 0.0, "gap_penalty": False, "momentum_clip": 0.0},
        dense={"inner_steps": 1},
        period=3,
        lag=1,
    ),
    Case(
        "co2",
        {"inner_steps": 2, "momentum_clip": 0.5},
        {"inner_steps": 1, "outer_momentum": 0.0, "gap_penalty": False, "momentum_clip": 0.0},
        period=2,
        conserves=False,
        lag=1,
    ),
    # The model is the mean over replicas. With three nodes, each rests in one of three rounds.
    Case("noloco", {"inner_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0}, {"inner_steps": 1}, period=6),
    Case(
        "noloco",
        {"inner_steps": 2, "outer_momentum": 0.5, "averaging_rate": 0.9},
        {"inner_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0},
        period=6,
        conserves=False,
    ),
]

"""Time the passes of an optimizer step, against fused AdamW and dense AdamS; and the block codes.

The optimizer is the product's, as the first of 8 replicas: it selects in its own run of the masks, encodes its payload
and decodes the size of what it would receive, without a network. Reported for each pass are milliseconds (median,
least, most), the bytes that it must move, and the bandwidth relative to a copy in the same process.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.common import write
from scripts.gpu.timing import Clock, clock_of
from scripts.scape_passes import pack_all, squares_all, update_all
from torchtitan_scape import AdamS, Scape, ScapeOptions
from torchtitan_scape.core.parameters import contiguous_gradient
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, Shape, count_entries
from torchtitan_scape.kernels.backends import block_code
from torchtitan_scape.kernels.codec.formats import FORMATS
from torchtitan_scape.kernels.common.launching import TileSchedule
from torchtitan_scape.kernels.scape.step import PassInputs
from torchtitan_scape.methods.interface import StepInfo
from torchtitan_scape.topology.in_process import DryRunCollectives
from torchtitan_scape.topology.stages import Codec, Handle

REPLICAS, REPEATS = 8, 20
CODE_REPLICAS, CODE_ENTRIES = 16, 2**26
SETTINGS = ((0.1, "float32"), (0.05, "int4"), (0.01, "float32"))
SMOKE: tuple[Shape, ...] = ((70, 40), (3, 1024), (40,))
# Entries of a tile and of a warp, and the tensors of these trials, which are far larger than the cache.
TILES = ((2048, 512), (2048, 256), (1024, 256), (1024, 512), (4096, 512))
TILED: tuple[Shape, ...] = ((4096, 8192),) * 4
RATES: dict[str, Any] = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# Dense optimizers, and the bytes a parameter of their steps: FP32 parameter and moments there and back, the gradient.
ADAMW = 28.0
DENSE: dict[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "fused AdamW": (partial(torch.optim.AdamW, fused=True), ADAMW),
    "dense AdamS": (partial(AdamS, kernels="triton"), 20.0),
}


class FirstOfMany(DryRunCollectives):
    """The first of `REPLICAS` replicas; an exchange takes time on the device, but not on a network."""

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        """Return what `topology.stages.all_reduce_encoded` gives on one level if all ranks send the same payload."""
        if codec is None:
            tensor.mul_(1.0)
            return Handle()
        rows, rounding = tensor.view(self.replicas, -1), carried_error
        errors = None if error is None else error.view(self.replicas, -1)
        if rounding is None and errors is not None:
            rounding = torch.empty_like(errors[0])
        sent = codec.encode(rows, errors)
        mean = codec.encode_mean(sent, rows.shape[1], divisor, rounding, carried_error is not None)
        if carried_error is None and errors is not None and rounding is not None:
            errors[self.replica] += rounding * divisor
        codec.decode(mean.view(1, -1).repeat(self.replicas, 1), rows)
        return Handle()

    def reduces_together(self, device: torch.device) -> bool:
        return True

    def _all_reduce_together(self, tensors: list[Tensor], mean: bool) -> Handle:
        torch._foreach_mul_(tensors, 1.0)
        return Handle()

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        """Compute the mean of this replica's slice; the others' messages are equal to it."""
        means.copy_(codec.encode_mean(sent, count, float(self.replicas), error, adds_error).expand_as(means))
        return Handle()

    def _send_to_owners(self, received: Tensor, messages: Tensor, owners: Sequence[int]) -> Handle:
        if self.replica in owners:
            received.copy_(messages[owners.index(self.replica)].expand_as(received))
        return Handle()


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def parameters_of(shapes: Sequence[Shape], device: torch.device) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def draw(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Replace the gradients by random ones, as `zero_grad` and a backward pass do."""
    for p in parameters:
        p.grad = None
    for p in parameters:
        p.grad = torch.empty_like(p).normal_(std=1e-3)


def scape(shapes: Sequence[Shape], density: float, code: str, device: torch.device) -> Scape:
    """Return an optimizer at its target density: the masks of the first steps are full."""
    parameters = parameters_of(shapes, device)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    options = ScapeOptions(density=density, code=code)  # type: ignore[arg-type]
    replicas = FirstOfMany(replicas=REPLICAS)
    optimizer = Scape(named, **RATES, options=options, replicas=replicas, kernels="triton")
    for _ in range(3):
        draw(parameters)
        optimizer.step()
    draw(parameters)
    return optimizer


def least_bytes(optimizer: Scape, shapes: Sequence[Shape]) -> dict[str, float]:
    """Return the bytes that each pass must move. Packing also adds the last quantization error."""
    model, cost = LocalModel.of_shapes(shapes), optimizer.method.options
    least = cost.pass_bytes(model, REPLICAS)
    if "coding" in least:
        errors = cost.carry_bytes(model.shapes)
        least["exchange"] = least.pop("coding") - errors
        least["pack"] += errors
    return least


class Passes:
    """The passes of an optimizer's next step.

    Attributes:
        works: Each pass, which can run any number of times. Packing selects nothing. exchange: additional work with a
            code. entering: part of update, counts the entries that enter each row and column of a mask.
    """

    def __init__(self, optimizer: Scape) -> None:
        optimizer.finish_previous_step()
        method = optimizer.method
        p = self.passes = method.passes
        gradients = [contiguous_gradient(shard) for shard in method.ordered]
        info = StepInfo(optimizer.attempted_steps + 1, optimizer.guard.check(gradients))
        self.step: PassInputs = method._inputs(gradients, info)
        p.bind(self.step)
        own = pack_all(p)
        assert own is not None
        self.received = own.repeat(REPLICAS)
        self.spare = self.step.in_use.bits.clone(), self.step.previous.bits.clone()
        p.bind(replace(self.step, next_density=1.0))  # selects nothing

        def exchange() -> None:
            for part in p.parts:
                method.payload_exchange.wait(method.payload_exchange.start(part))

        self.works: dict[str, Callable[[], Any]] = {"finite": lambda: optimizer.guard._finite(gradients)}
        if method.options.code != "float32":
            self.works["exchange"] = exchange
        self.works |= {
            "pack": lambda: pack_all(p),
            "squares": lambda: squares_all(p),
            "update": lambda: update_all(p),
            "rotate": lambda: p.rotate(self.received, p.density, *self.spare),
        }
        if (visits := p.visits) is not None:
            self.works["entering"] = lambda: p.count_entering(visits)

    def times(self, clock: Clock, least: dict[str, float], entries: int) -> dict[str, Any]:
        """Return figures by pass. select: additional time of packing."""
        p, masks = self.passes, 2.0 * self.passes.layout.mask_bytes()
        least = least | {"entering": masks, "rotate": 1.5 * masks}
        found = {name: clock.rates(work, least[name], entries) for name, work in self.works.items()}
        p.bind(self.step)
        found["pack + select"] = clock.rates(self.works["pack"], least["pack"], entries)
        found["select"] = {"ms": found["pack + select"]["ms"] - found["pack"]["ms"]}
        return found


def measure(shapes: Sequence[Shape], density: float, code: str, clock: Clock) -> dict[str, Any]:
    """Return figures of the passes and the whole step of one setting."""
    optimizer, entries = scape(shapes, density, code, clock.device), count_entries(shapes)
    least = least_bytes(optimizer, shapes)
    return {
        "density": density,
        "code": code,
        "entries": entries,
        "step": clock.rates(optimizer.step, sum(least.values()), entries),
        "passes": Passes(optimizer).times(clock, least, entries),
    }


def passes(result: Path, smoke: bool, model: str) -> None:
    clock = clock_of(smoke, REPEATS)
    shapes = SMOKE if smoke else WORKLOADS[model].shapes()
    found: dict[str, Any] = {"model": model, "copy_bandwidth": clock.bandwidth, "settings": [], "dense": {}}
    print(f"a copy moves {clock.bandwidth / 1e9:.0f} GB/s", flush=True)
    for name, (create, least) in DENSE.items():
        parameters, entries = parameters_of(shapes, clock.device), count_entries(shapes)
        draw(parameters)
        found["dense"][name] = clock.rates(create(parameters, **RATES).step, least * entries, entries)
        free()
    write(result, found)
    for density, code in SETTINGS[1:2] if smoke else SETTINGS:
        free()
        one = measure(shapes, density, code, clock)
        found["settings"].append(one)
        write(result, found)
        against = one["step"]["ms"] / found["dense"]["fused AdamW"]["ms"]
        print(f"{model} at {density:g}, {code}: {one['step']['ms']:.3f} ms, {against:.2f} x AdamW's", flush=True)


def tiles(result: Path, smoke: bool) -> None:
    """Time packing and updating at the target density with tiles of several sizes."""
    clock, shapes = clock_of(smoke, REPEATS), SMOKE if smoke else TILED
    found: dict[str, Any] = {"copy_bandwidth": clock.bandwidth, "entries": count_entries(shapes), "tiles": []}
    for density, code in SETTINGS[1:2] if smoke else SETTINGS:
        free()
        passes = Passes(scape(shapes, density, code, clock.device))
        for name, schedule in (("pack", "pack_tiles"), ("update", "update_tiles")):
            product = getattr(passes.passes, schedule)
            for entries, per_warp in TILES:
                tried = TileSchedule(product.sizes, product.block_size, entries, per_warp, clock.device)
                setattr(passes.passes, schedule, tried)
                ms = clock(passes.works[name])["ms"]
                row = {"density": density, "code": code, "pass": name, "tile": entries, "per warp": per_warp, "ms": ms}
                found["tiles"].append(row)
            setattr(passes.passes, schedule, product)
        write(result, found)
        print(f"tiles at {density:g}, {code}: {len(TILES)} of either pass", flush=True)


def codes(result: Path, smoke: bool) -> None:
    """Time the block codes. An entry moves 4 bytes and its code, and 4 more for its rounding error."""
    clock = clock_of(smoke, REPEATS)
    entries = 256 if smoke else CODE_ENTRIES
    found: dict[str, Any] = {"copy_bandwidth": clock.bandwidth, "entries": entries, "codes": {}}
    x = torch.randn(1, entries, device=clock.device)
    error, total = torch.empty_like(x), torch.empty_like(x)
    for name in FORMATS:
        code = block_code("triton", name)
        message = code.encode(x, error)
        messages, coded = message.repeat(CODE_REPLICAS, 1), message.shape[1]
        added = 4 * entries + CODE_REPLICAS * coded
        found["codes"][name] = {
            "encode": clock.rates(partial(code.encode, x, error), 8 * entries + coded, entries),
            "decode": clock.rates(partial(code.decode, message, total), 4 * entries + coded, entries),
            f"add up {CODE_REPLICAS}": clock.rates(partial(code.decode_and_sum, messages, total[0]), added, entries),
        }
        write(result, found)
    print(f"{len(found['codes'])} codes on {entries:,} entries", flush=True)

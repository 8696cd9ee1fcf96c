"""Times the passes of an optimizer step beside fused AdamW, dense AdamS and plain PyTorch, all in one run.

    python -m scripts.gpu.passes --model llama_1_8b --result FILE
    python -m scripts.gpu.passes --model llama_500m --sweep --result FILE    # with other tiles
    TRITON_INTERPRET=1 python -m scripts.gpu.passes --smoke --result FILE    # a tiny model, anywhere

The optimizer is the product's, as the first of 8 replicas: it selects in its own run of the masks, codes what it would
send and decodes as much as would arrive; nothing travels. Of every pass: milliseconds (median, least, most), the bytes
that it cannot do without, and what that is of the bandwidth of a copy measured in this run.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.scape import triton_passes as tiles
from kernels.scape.passes import pack_all, squares_all, update_all
from kernels.scape.step import PassInputs
from scripts.common import guarded, parser, write
from scripts.gpu.plain import plain_step
from scripts.gpu.timing import Clock, copy_bandwidth, device_for, free_running, of
from topology.codecs import Codec
from topology.comm_stream import Handle
from topology.dry_run import DryRunCollectives
from torchtitan_scape import AdamS, Scape, ScapeOptions
from torchtitan_scape.core.parameters import flat_gradient
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, Shape
from torchtitan_scape.methods.scape.payload import payload_bytes, payload_entries

REPLICAS = 8
SETTINGS = ((0.1, "float32"), (0.05, "int4"), (0.01, "float32"))
SMOKE: tuple[Shape, ...] = ((70, 40), (3, 1024), (40,))
RATES: dict[str, Any] = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ADAMW, ADAMS = 28.0, 20.0  # bytes a parameter of their steps: FP32 parameter and moments there and back, the gradient


class FirstOfMany(DryRunCollectives):
    """The first of `REPLICAS` replicas, whose exchange takes the device's time and no network's."""

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        """Return what `topology.stages.all_reduce_encoded` gives on one level if all ranks send the same payload."""
        if codec is None:
            tensor.mul_(1.0)
            return Handle()
        assert error is not None and carried_error is None
        rows = tensor.view(self.replicas, -1)
        error.zero_()
        arrived = codec.encode(rows, error.view(self.replicas, -1))
        part = torch.empty_like(rows[0])
        codec.decode_and_sum(arrived, part)
        part.div_(divisor)
        rounding = torch.empty_like(part)
        message = codec.encode(part.view(1, -1), rounding.view(1, -1))
        error.view(self.replicas, -1)[self.replica] += rounding * divisor
        codec.decode(message.repeat(self.replicas, 1), rows)
        return Handle()


def free(clock: Clock) -> None:
    gc.collect()
    if clock.cuda:
        torch.cuda.empty_cache()


def parameters_of(shapes: Sequence[Shape], device: torch.device) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]


def draw(parameters: Sequence[torch.nn.Parameter]) -> None:
    for p in parameters:
        p.grad = torch.randn_like(p).mul_(1e-3) if p.grad is None else p.grad.normal_(std=1e-3)


def scape(parameters: Sequence[torch.nn.Parameter], density: float, wire: str) -> Scape:
    """At its target density: after steps that have left full masks behind."""
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    options = ScapeOptions(density=density, wire=wire)  # type: ignore[arg-type]
    replicas = FirstOfMany(replicas=REPLICAS)
    optimizer = Scape(named, **RATES, options=options, replicas=replicas, kernels="triton")
    for _ in range(3):
        draw(parameters)
        optimizer.step()
    draw(parameters)
    return optimizer


class Passes:
    """The passes of an optimizer's next step, one by one; each can be taken any number of times."""

    def __init__(self, optimizer: Scape) -> None:
        optimizer.finish_previous_step()
        self.optimizer, self.passes = optimizer, optimizer.method.passes
        self.gradients = [flat_gradient(shard) for shard in optimizer.method.ordered]
        applied = optimizer.guard.check(self.gradients)
        self.step: PassInputs = optimizer._begin(self.gradients, applied)
        self.passes.bind(self.step)
        own = pack_all(self.passes)
        assert own is not None
        self.received = own.repeat(REPLICAS)
        self.spare = self.step.in_use.bits.clone(), self.step.previous.bits.clone()

    def times(self, clock: Clock, method: ScapeOptions, shapes: Sequence[Shape], bandwidth: float) -> dict[str, Any]:
        """Figures by pass. carry and exchange: what a code adds to a step, the first as part of packing. select: what
        packing takes longer with it. entering, part of update: counts what enters each row and column of a mask."""
        p, least, found = self.passes, method.cost().pass_bytes(LocalModel.of_shapes(shapes), REPLICAS), {}
        entries = sum(map(_size, shapes))
        masks = 2.0 * p.layout.mask_bytes()

        def take(name: str, work: Callable[[], Any], nbytes: float) -> None:
            found[name] = of(clock(work).figures(), nbytes, entries, bandwidth)

        take("finite", lambda: self.optimizer.guard._finite(self.gradients), least["finite"])
        p.bind(replace(self.step, next_density=1.0))  # selects nothing
        coding = least.get("coding", 0.0)
        carried = 12.0 * payload_entries(shapes, method.density) if coding else 0.0
        if coding:
            take("carry", lambda: [p.carry(part) for part in p.parts], carried)  # type: ignore[attr-defined]
            take("exchange", self._exchange, coding - carried)
        take("pack", lambda: pack_all(p), least["pack"] + carried)
        take("squares", lambda: squares_all(p), least["squares"])
        take("update", lambda: update_all(p), least["update"])
        if p.visits is not None:
            visits = p.visits
            take("entering", lambda: p.updates.count_entering(visits), masks)
        p.bind(self.step)
        take("pack + select", lambda: pack_all(p), least["pack"] + carried)
        take("rotate", lambda: p.rotate(self.received, method.density, *self.spare), 1.5 * masks)
        found["select"] = {"ms": found["pack + select"]["ms"] - found["pack"]["ms"]}
        return found

    def _exchange(self) -> None:
        for part in self.passes.parts:
            self.optimizer.method.payload_exchange.start(part).wait()


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def measure(shapes: Sequence[Shape], density: float, wire: str, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """The passes, the whole step and the plain one, of one setting."""
    method = ScapeOptions(density=density, wire=wire)  # type: ignore[arg-type]
    entries = sum(map(_size, shapes))
    parameters = parameters_of(shapes, clock.device)
    optimizer = scape(parameters, density, wire)
    least = method.cost().pass_bytes(LocalModel.of_shapes(shapes), REPLICAS)
    found: dict[str, Any] = {
        "density": density,
        "wire": wire,
        "entries": entries,
        "payload_bytes": payload_bytes(tuple(shapes), density, wire),
        "parts": len(optimizer.method.passes.parts),
        "step": of(clock(optimizer.step).figures(), sum(least.values()), entries, bandwidth),
    }
    found["step"]["free_running_ms"] = free_running(clock, optimizer.step, clock.repeats)
    found["plain"] = clock(plain_step(optimizer)).figures()
    found["passes"] = Passes(optimizer).times(clock, method, shapes, bandwidth)
    return found


def dense(shapes: Sequence[Shape], clock: Clock, bandwidth: float) -> dict[str, Any]:
    """The steps of dense optimizers."""
    found, entries = {}, sum(map(_size, shapes))
    parameters = parameters_of(shapes, clock.device)
    draw(parameters)
    kinds: dict[str, tuple[Callable[[], torch.optim.Optimizer], float]] = {
        "fused AdamW": (lambda: torch.optim.AdamW(parameters, **RATES, fused=True), ADAMW),
        "dense AdamS": (lambda: AdamS(parameters, **RATES, kernels="triton"), ADAMS),
    }
    for name, (make, least) in kinds.items():
        optimizer = make()
        found[name] = of(clock(optimizer.step).figures(), least * entries, entries, bandwidth)
        found[name]["free_running_ms"] = free_running(clock, optimizer.step, clock.repeats)
        del optimizer
        free(clock)
    return found


def sweep(shapes: Sequence[Shape], clock: Clock) -> list[dict[str, Any]]:
    """Milliseconds of pack and update with other tiles, and of selection with other numbers of warps."""
    rows = []
    kinds = {"COMPACT": (1024, 2048, 4096, 8192), "SELECT": (1024, 2048)}
    for kind, entries in kinds.items():
        before = getattr(tiles, f"{kind}_TILE"), getattr(tiles, f"{kind}_WARP")
        for tile in entries:
            for warp in (256, 512, 1024):
                setattr(tiles, f"{kind}_TILE", tile)
                setattr(tiles, f"{kind}_WARP", warp)
                passes = Passes(scape(parameters_of(shapes, clock.device), 0.1, "float32"))
                row = {"kind": kind, "tile": tile, "entries a warp": warp}
                row |= {"pack + select": clock(lambda p=passes: pack_all(p.passes)).ms}  # type: ignore[misc]
                row |= {"update": clock(lambda p=passes: update_all(p.passes)).ms}  # type: ignore[misc]
                rows.append(row)
                del passes
                free(clock)
        setattr(tiles, f"{kind}_TILE", before[0])
        setattr(tiles, f"{kind}_WARP", before[1])
    return rows


def run(args: argparse.Namespace) -> None:
    clock = Clock(device_for(args.smoke), 1 if args.smoke else args.repeats)
    shapes = SMOKE if args.smoke else WORKLOADS[args.model].shapes()
    bandwidth = copy_bandwidth(clock, 0.001 if args.smoke else 4.0)
    found: dict[str, Any] = {"model": args.model, "copy_bandwidth": bandwidth, "settings": []}
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s", flush=True)
    if args.sweep:
        found["sweep"] = sweep(shapes, clock)
        write(args.result, found)
        return
    found["dense"] = dense(shapes, clock, bandwidth)
    write(args.result, found)
    for density, wire in SETTINGS[1:2] if args.smoke else SETTINGS:
        free(clock)
        found["settings"].append(measure(shapes, density, wire, clock, bandwidth))
        write(args.result, found)
        one = found["settings"][-1]
        against = one["step"]["ms"] / found["dense"]["fused AdamW"]["ms"]
        print(f"{args.model} at {density:g}, {wire}: {one['step']['ms']:.3f} ms, {against:.2f} x AdamW's", flush=True)


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--result", type=Path, required=True)
    own.add_argument("--model", choices=[*WORKLOADS], default="llama_500m")
    own.add_argument("--repeats", type=int, default=20)
    own.add_argument("--sweep", action="store_true", help="only other tiles")
    own.add_argument("--smoke", action="store_true", help="a tiny model, on whatever device there is")
    args = own.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())

"""Time the passes of an optimizer step, against fused AdamW and dense AdamS; and the block codes.

    python -m scripts.gpu.passes passes --model llama_1_8b --result FILE
    python -m scripts.gpu.passes codes --result FILE
    TRITON_INTERPRET=1 python -m scripts.gpu.passes passes --smoke --result FILE    # a tiny model, anywhere

The optimizer is the product's, as the first of 8 replicas: it selects in its own run of the masks, encodes its payload
and decodes the size of what it would receive, without a network. Reported for each pass are milliseconds (median,
least, most), the bytes that it must move, and the bandwidth relative to a copy in the same process.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels import block_code
from kernels.codec.formats import FORMATS
from kernels.scape.passes import pack_all, squares_all, update_all
from kernels.scape.step import PassInputs
from scripts.common import write
from scripts.gpu.machine import run_step
from scripts.gpu.timing import Clock, copy_bandwidth, device_for, of
from topology.codecs import Codec
from topology.comm_stream import Handle
from topology.dry_run import DryRunCollectives
from torchtitan_scape import AdamS, Scape, ScapeOptions
from torchtitan_scape.core.parameters import flat_gradient
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, Shape
from torchtitan_scape.methods.interface import StepInfo

REPLICAS, REPEATS = 8, 20
CODE_REPLICAS, CODE_ENTRIES = 16, 2**26
SETTINGS = ((0.1, "float32"), (0.05, "int4"), (0.01, "float32"))
SMOKE: tuple[Shape, ...] = ((70, 40), (3, 1024), (40,))
RATES: dict[str, Any] = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ADAMW, ADAMS = 28.0, 20.0  # bytes a parameter of their steps: FP32 parameter and moments there and back, the gradient


class FirstOfMany(DryRunCollectives):
    """The first of `REPLICAS` replicas; an exchange takes time on the device, but not on a network."""

    def _all_reduce(
        self, tensor: Tensor, divisor: float, codec: Codec | None, error: Tensor | None, carried_error: Tensor | None
    ) -> Handle:
        """Return what `topology.stages.all_reduce_encoded` gives on one level if all ranks send the same payload."""
        if codec is None:
            tensor.mul_(1.0)
            return Handle()
        rows, count = tensor.view(self.replicas, -1), tensor.numel() // self.replicas
        sent = codec.encode(rows, None if error is None else error.view(self.replicas, -1))
        rounding = tensor.new_empty(count) if carried_error is None and error is not None else carried_error
        mean = codec.encode_mean(sent, count, divisor, rounding, carried_error is not None)
        if error is not None and carried_error is None and rounding is not None:
            error.view(self.replicas, -1)[self.replica] += rounding * divisor
        codec.decode(mean.view(1, -1).repeat(self.replicas, 1), rows)
        return Handle()

    def _all_reduce_messages(
        self, sent: Tensor, means: Tensor, count: int, codec: Codec, error: Tensor | None, adds_error: bool
    ) -> Handle:
        """Compute the mean of this replica's slice; the others' messages are equal to it."""
        means.copy_(codec.encode_mean(sent, count, float(self.replicas), error, adds_error).expand_as(means))
        return Handle()

    def _reduce_to_owners(
        self, rows: Tensor, owners: Sequence[int], codec: Codec | None, error: Tensor | None
    ) -> Handle:
        if codec is not None:
            sent = codec.encode(rows, error)
            if self.replica in owners:
                own = owners.index(self.replica)
                codec.decode_and_sum(sent[own].repeat(self.replicas, 1), rows[own])
                rows[own].div_(self.replicas)
        return Handle()

    def _reduce_messages_to_owners(self, messages: Tensor, mean: Tensor, owners: Sequence[int], codec: Codec) -> Handle:
        if self.replica in owners:
            own = owners.index(self.replica)
            codec.decode_and_sum(messages[own].repeat(self.replicas, 1), mean)
            mean.div_(self.replicas)
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
    """Return an optimizer at its target density: the masks of the first steps are full."""
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
    """The passes of an optimizer's next step. Each can run any number of times."""

    def __init__(self, optimizer: Scape) -> None:
        optimizer.finish_previous_step()
        self.optimizer, self.passes = optimizer, optimizer.method.passes
        self.gradients = [flat_gradient(shard) for shard in optimizer.method.ordered]
        applied = optimizer.guard.check(self.gradients)
        info = StepInfo(optimizer.attempted_steps + 1, applied)
        self.step: PassInputs = optimizer.method._inputs(self.gradients, info)
        self.passes.bind(self.step)
        own = pack_all(self.passes)
        assert own is not None
        self.received = own.repeat(REPLICAS)
        self.spare = self.step.in_use.bits.clone(), self.step.previous.bits.clone()

    def times(self, clock: Clock, method: ScapeOptions, shapes: Sequence[Shape], bandwidth: float) -> dict[str, Any]:
        """Return figures by pass.

        exchange: additional work with a code; packing also adds the last quantization error. select: additional time of
        packing. entering: part of update, counts the entries that enter each row and column of a mask.
        """
        model = LocalModel.of_shapes(shapes)
        p, least, found = self.passes, method.cost().pass_bytes(model, REPLICAS), {}
        entries = sum(map(_size, shapes))
        masks = 2.0 * p.layout.mask_bytes()

        def take(name: str, work: Callable[[], Any], nbytes: float) -> None:
            found[name] = of(clock(work).figures(), nbytes, entries, bandwidth)

        take("finite", lambda: self.optimizer.guard._finite(self.gradients), least["finite"])
        p.bind(replace(self.step, next_density=1.0))  # selects nothing
        coding = least.get("coding", 0.0)
        carry_bytes = method.cost().carry_bytes(model) if coding else 0.0
        if coding:
            take("exchange", self._exchange, coding - carry_bytes)
        take("pack", lambda: pack_all(p), least["pack"] + carry_bytes)
        take("squares", lambda: squares_all(p), least["squares"])
        take("update", lambda: update_all(p), least["update"])
        if p.visits is not None:
            visits = p.visits
            take("entering", lambda: p.updates.count_entering(visits), masks)
        p.bind(self.step)
        take("pack + select", lambda: pack_all(p), least["pack"] + carry_bytes)
        take("rotate", lambda: p.rotate(self.received, method.density, *self.spare), 1.5 * masks)
        found["select"] = {"ms": found["pack + select"]["ms"] - found["pack"]["ms"]}
        return found

    def _exchange(self) -> None:
        for part in self.passes.parts:
            self.optimizer.method.payload_exchange.start(part).wait()


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()


def measure(shapes: Sequence[Shape], density: float, wire: str, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Return figures of the passes and the whole step of one setting."""
    method = ScapeOptions(density=density, wire=wire)  # type: ignore[arg-type]
    entries = sum(map(_size, shapes))
    parameters = parameters_of(shapes, clock.device)
    optimizer = scape(parameters, density, wire)
    least = method.cost().pass_bytes(LocalModel.of_shapes(shapes), REPLICAS)
    return {
        "density": density,
        "wire": wire,
        "entries": entries,
        "step": of(clock(optimizer.step).figures(), sum(least.values()), entries, bandwidth),
        "passes": Passes(optimizer).times(clock, method, shapes, bandwidth),
    }


def dense_step(name: str, parameters: Sequence[torch.nn.Parameter], clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Return figures of a step of "fused AdamW" or "dense AdamS"."""
    draw(parameters)
    if name == "fused AdamW":
        optimizer, least = torch.optim.AdamW(parameters, **RATES, fused=True), ADAMW
    else:
        optimizer, least = AdamS(parameters, **RATES, kernels="triton"), ADAMS
    entries = sum(p.numel() for p in parameters)
    return of(clock(optimizer.step).figures(), least * entries, entries, bandwidth)


def dense(shapes: Sequence[Shape], clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Return figures of the steps of dense optimizers."""
    found, parameters = {}, parameters_of(shapes, clock.device)
    for name in ("fused AdamW", "dense AdamS"):
        found[name] = dense_step(name, parameters, clock, bandwidth)
        free(clock)
    return found


def passes(args: argparse.Namespace) -> None:
    clock = Clock(device_for(args.smoke), 1 if args.smoke else REPEATS)
    shapes = SMOKE if args.smoke else WORKLOADS[args.model].shapes()
    bandwidth = copy_bandwidth(clock, 0.001 if args.smoke else 4.0)
    found: dict[str, Any] = {"model": args.model, "copy_bandwidth": bandwidth, "settings": []}
    print(f"a copy moves {bandwidth / 1e9:.0f} GB/s", flush=True)
    found["dense"] = dense(shapes, clock, bandwidth)
    write(args.result, found)
    for density, wire in SETTINGS[1:2] if args.smoke else SETTINGS:
        free(clock)
        found["settings"].append(measure(shapes, density, wire, clock, bandwidth))
        write(args.result, found)
        one = found["settings"][-1]
        against = one["step"]["ms"] / found["dense"]["fused AdamW"]["ms"]
        print(f"{args.model} at {density:g}, {wire}: {one['step']['ms']:.3f} ms, {against:.2f} x AdamW's", flush=True)


def code_figures(name: str, entries: int, clock: Clock, bandwidth: float) -> dict[str, Any]:
    """Return figures by pass of one code. An entry moves 4 bytes and its code, and 4 more for its rounding error."""
    code = block_code("triton", name)
    x = torch.randn(1, entries, device=clock.device)
    error, total = torch.empty_like(x), torch.empty(entries, device=clock.device)
    message = code.encode(x, error)
    messages = message.repeat(CODE_REPLICAS, 1)
    coded = message.shape[1] / entries
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "encode": (8 + coded, lambda: code.encode(x, error)),
        "decode": (4 + coded, lambda: code.decode(message, x)),
        f"add up {CODE_REPLICAS}": (4 + CODE_REPLICAS * coded, lambda: code.decode_and_sum(messages, total)),
    }
    return {
        name: of(clock(work).figures(), least * entries, entries, bandwidth) for name, (least, work) in works.items()
    }


def codes(args: argparse.Namespace) -> None:
    clock = Clock(device_for(args.smoke), 1 if args.smoke else REPEATS)
    bandwidth = copy_bandwidth(clock, 0.001 if args.smoke else 4.0)
    entries = 256 if args.smoke else CODE_ENTRIES
    found: dict[str, Any] = {"copy_bandwidth": bandwidth, "entries": entries, "codes": {}}
    for name in FORMATS:
        found["codes"][name] = code_figures(name, entries, clock, bandwidth)
        write(args.result, found)
    print(f"{len(found['codes'])} codes on {entries:,} entries", flush=True)


WORK = {"passes": passes, "codes": codes}

if __name__ == "__main__":
    models = dict(choices=[*WORKLOADS], default="llama_500m")
    sys.exit(run_step(__doc__, lambda args: WORK[args.what](args), {"what": dict(choices=[*WORK]), "--model": models}))

"""Time whole optimizer steps of methods and of other optimizers, with and without clipping.

Each step is one of the first of 8 replicas, in the steady state: the check for non-finite gradients, the norm, the
method and the update. Messages are encoded and decoded, and not sent. Gradients are drawn before every step.

python -m scripts.gpu.step scripts.gpu.method_steps:method_steps llama_500m 1 muon dense-muon,torch-muon --result FILE
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import profile

from scripts.common import RunError, names, write
from scripts.gpu.passes import RATES, REPLICAS, SMOKE, FirstOfMany, draw, free, parameters_of
from scripts.gpu.timing import Clock, clock_of
from torchtitan_scape import AdamS, Muon
from torchtitan_scape.core.hidden_matrices import is_hidden_matrix
from torchtitan_scape.core.workloads import WORKLOADS, LocalModel, layer_of, local_shapes
from torchtitan_scape.kernels.backends import norms
from torchtitan_scape.methods.interface import clip_factor
from torchtitan_scape.methods.registry import METHODS
from torchtitan_scape.optimizers.pytorch import AdamWPass
from torchtitan_scape.replica.optimizer import ReplicaOptimizer
from torchtitan_scape.topology.collectives import OneReplica

Kernel = tuple[str, float, float]  # name, start and end in microseconds
Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Named, bool], Any]  # returns an object whose `step` is timed; True to clip
BUSY_MS = 150.0  # longer than the host needs for a step
SMOKE_NAMES = ("layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "norm.weight")
# Steps. The last one of the warm-up changes the bases of `quantized_update`, which then stay for 19 steps.
WARM_UP, REPEATS, PHASED = 21, 10, 3
BELOW, ABOVE = 1e-3, 1e9  # max_norm, of the norms of all gradients


def fused_adamw(parameters: Sequence[Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **RATES, fused=True)


ADAMS = partial(AdamS, **RATES, allocate_state=False, kernels="triton")
MUON = partial(Muon, lr=RATES["lr"], fused=True, kernels="triton")
TORCH_MUON = partial(torch.optim.Muon, lr=RATES["lr"], adjust_lr_fn="match_rms_adamw")


def method(name: str, optimizer: Callable[[Named], Optimizer] = fused_adamw, **options: Any) -> Make:
    """Return the step of a method with options of its section."""

    def make(named: Named, clips: bool) -> ReplicaOptimizer:
        common: dict[str, Any] = dict(max_norm=BELOW if clips else ABOVE, total_steps=1000, kernels="triton")
        replicas = OneReplica(FirstOfMany(replicas=REPLICAS))
        return ReplicaOptimizer(optimizer(named), METHODS[name].options(**options), replicas, **common)

    return make


def peer(make: Callable[[list[Any], list[Any]], Sequence[Optimizer]]) -> Make:
    """Return the step of optimizers of (hidden matrices, other parameters), after `clip_grad_norm_` if it clips."""

    def of(named: Named, clips: bool) -> Any:
        hidden = [p for name, p in named if is_hidden_matrix(name, p.shape)]
        optimizers = make(hidden, [p for name, p in named if not is_hidden_matrix(name, p.shape)])

        def step() -> None:
            if clips:
                nn.utils.clip_grad_norm_([p for _, p in named], BELOW, foreach=True)
            for optimizer in optimizers:
                optimizer.step()

        return SimpleNamespace(step=step)

    return of


def adamw_kernel(named: Named, clips: bool) -> Any:
    """Return AdamW by one kernel that multiplies by the clip factor, after a pass of norms if it clips."""
    parameters, norms_of = [p for _, p in named], norms("triton")
    adamw, applied = AdamWPass(fused_adamw(parameters), "triton"), parameters[0].isfinite().all()

    def step() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        adamw.step(applied, clip_factor(norms_of(gradients).norm().float(), BELOW) if clips else None)

    return SimpleNamespace(step=torch.no_grad()(step))


def dion_muon(hidden: list[Any], others: list[Any]) -> list[Optimizer]:
    """Return Muon of github.com/microsoft/dion with our iterations, if the package is installed."""
    options = dict(lr=RATES["lr"], nesterov=True, adjust_lr="rms_norm", use_polar_express=False)
    groups = [{"params": hidden}, {"params": others, "algorithm": "adamw"}]
    return [import_module("dion").Muon(groups, use_triton=hidden[0].is_cuda, **options)]


SPARTA: dict[str, Any] = dict(interval=3, code="1bit", warmup_steps=0)
BASELINES: dict[str, Make] = {
    "fused AdamW": peer(lambda hidden, others: [fused_adamw(hidden + others)]),
    "AdamW, one kernel": adamw_kernel,
}
GROUPS: dict[str, dict[str, Make]] = {
    "adamw": {
        "scape": method("scape", ADAMS, density=0.05, code="int4"),
        "dense": method("dense"),
        "sparta": method("sparta", **SPARTA),
        "quantized-int4": method("quantized", code="int4"),
        "quantized-2bit": method("quantized", code="2bit"),
        "quantized_update": method("quantized_update"),
        "topk": method("topk", density=0.01, start=0),
        "powersgd": method("powersgd", rank=4, start=0),
        "onebit_adam": method("onebit_adam", warmup_steps=1),
        "radius": method("radius", start=0, interval=WARM_UP),  # selects a mask in the last step of the warm-up
        "radius-refresh": method("radius", start=0, interval=1),
        "diloco-local": method("diloco", inner_steps=1000),
    },
    "muon": {  # for whole matrices
        "torch-muon": peer(lambda hidden, others: [TORCH_MUON(hidden), fused_adamw(others)]),
        "dense-muon": method("dense", MUON),
        "sparta-muon": method("sparta", MUON, **SPARTA),
        "quantized_update-muon": method("quantized_update", MUON),
        "quantized_update-muon-no-bases": method("quantized_update", MUON, whiten_every=0),
        "quantized_update-muon-2": method("quantized_update", MUON, interval=2),
        "quantized_update-muon-2-no-bases": method("quantized_update", MUON, interval=2, whiten_every=0),
        "dion-muon": peer(dion_muon),  # last, because its kernels are tuned for a long time
    },
}


def measure(make: Make, model: LocalModel, clock: Clock, clips: bool) -> dict[str, Any]:
    """Return figures of a step; with clipping, also phases and launches."""
    free()
    parameters = parameters_of(model.shapes, clock.device)
    optimizer, setup = make(list(zip(model.names, parameters, strict=True)), clips), partial(draw, parameters)

    def steps(count: int) -> None:
        for _ in range(count):
            setup()
            optimizer.step()

    steps(WARM_UP if clock.repeats > 1 else 1)
    figures = clock(optimizer.step, setup)
    if not clips:
        return figures
    if isinstance(optimizer, ReplicaOptimizer):
        optimizer.timer.enabled = True
        steps(PHASED)
        optimizer.timer.enabled = False
        figures["phases_ms"] = {name: 1e3 * seconds / PHASED for name, seconds in optimizer.timer.take().items()}
        figures["clip_factor"] = float(optimizer.clip_factor)  # below 1
    setup()
    return figures | {"profile": gaps(kernels_of(clock, optimizer.step))}


def kernels_of(clock: Clock, work: Callable[[], Any]) -> list[Kernel]:
    """Return the kernels of a call, by start, from the profiler's trace of the device; none without a GPU."""
    with profile() as profiler:  # of the host, and of the device if there is one
        clock.spin(BUSY_MS)  # so that gaps between kernels belong to the device
        work()
        if clock.cuda:
            torch.cuda.synchronize()
    events = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    # `Optimizer.step` is an annotation among the kernels that would cover the gaps.
    on_device = [e for e in events if not e.is_user_annotation]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in on_device), key=lambda kernel: kernel[1])


def gaps(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Return busy and idle milliseconds, the longest gap, and the time by kernel. Concurrent kernels count once."""
    own = [kernel for kernel in kernels if "spin" not in kernel[0]]
    busy = idle = longest = 0.0
    until = own[0][1] if own else 0.0
    by_name: Any = Counter[str]()  # of microseconds
    for name, start, end in own:
        gap = max(0.0, start - until)
        idle, longest = idle + gap, max(longest, gap)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
        by_name[name[:60]] += end - start
    milliseconds = {"busy_ms": busy / 1e3, "gaps_ms": idle / 1e3, "longest_gap_ms": longest / 1e3}
    by_kernel = {name: microseconds / 1e3 for name, microseconds in by_name.most_common(12)}
    return {"launches": len(own), **milliseconds, "ms_by_kernel": by_kernel}


def part_of(model: str, ranks: int, group: str) -> LocalModel:
    """Return what one of `ranks` ranks with a shard of the model updates: with AdamW its rows of each tensor, with Muon
    the whole matrices of its part of the layers, and its rows of the other tensors.
    """
    workload = WORKLOADS[model]
    if group != "muon":
        return workload.local(ranks)
    layers, whole, local = workload.layers // ranks, workload.whole(), workload.local(ranks)
    numbers = [i for i, name in enumerate(whole.names) if (layer_of(name) or 0) < layers]
    shapes = [whole.shapes[i] if whole.is_hidden(i) else local.shapes[i] for i in numbers]
    return LocalModel(tuple(whole.names[i] for i in numbers), tuple(shapes), whole.hidden_names)


def method_steps(result: Path, smoke: bool, name: str, shard: str, group: str, only: str = "") -> None:
    """Time the rows of a group, or those in `only`, for one of `shard` ranks with a shard of the model."""
    if unknown := [row for row in names(only) if row not in GROUPS[group]]:
        raise ValueError(f"{group} has no row {unknown[0]!r}, only {', '.join(GROUPS[group])}")
    clock, ranks = clock_of(smoke, REPEATS), int(shard)
    model = LocalModel(SMOKE_NAMES, local_shapes(SMOKE, ranks)) if smoke else part_of(name, ranks, group)
    found: dict[str, Any] = {"model": name, "shard": ranks, "entries": model.entries, "copy_bandwidth": clock.bandwidth}
    found |= {"baselines": [*BASELINES], "methods": {}, "profiles": {}}
    rows = BASELINES | {name: GROUPS[group][name] for name in names(only) or GROUPS[group]}
    for row, make in rows.items():
        try:
            figures, clipped = (measure(make, model, clock, clips) for clips in (False, True))
        except ModuleNotFoundError as error:
            print(f"{row}: left out, {error}", flush=True)
        except Exception as error:  # of torch, Triton or the method; the other methods are measured nevertheless
            found["methods"][row] = {"failed": f"{type(error).__name__}: {error}"[:600]}
            print(f"{row}: {found['methods'][row]['failed']}", flush=True)
        else:
            found["profiles"][row] = clipped.pop("profile")
            found["methods"][row] = figures | {"clipped": clipped}
            print(f"{row}: {figures['ms']:.3f} ms, with clipping {clipped['ms']:.3f} ms", flush=True)
        write(result, found)
    if failed := [row for row, one in found["methods"].items() if "failed" in one]:
        raise RunError(f"not timed: {', '.join(failed)}")

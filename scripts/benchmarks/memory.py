"""Memory of one rank, predicted and measured, and memory traffic of a step. CPU only; large tensors are never written.

    python -m scripts.benchmarks.memory states      # optimizer states of one of 64 replicas
    python -m scripts.benchmarks.memory frontier    # by kind on Frontier
    python -m scripts.benchmarks.memory kernels     # bytes that the passes of a SCAPE step move at least, closed form

states: Predicted is `PlannedRun.total_memory`, as in the trainer's report at startup. Measured are the bytes of all
tensors that exist once the optimizer is built (dense AdamW: once it has taken a step), in a fake process group.

frontier: The trainer builds each case as one rank of the fake backend, and the optimizer takes a step on fake tensors.
The Frontier paper is arXiv:2501.04266.
"""

import argparse
import gc
import itertools
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from scripts.benchmarks.harness import Benchmark, in_new_process, main
from scripts.common import markdown, names
from torchtitan_scape import AdamS, Scape
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.patching import environment, replaced
from torchtitan_scape.core.workloads import Shape, Workload, get_workload
from torchtitan_scape.kernels.common import offload
from torchtitan_scape.methods.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions, block_layout, payload_entries
from torchtitan_scape.planner.run import PlannedRun
from torchtitan_scape.topology.torch_version import fsdp_parameter_group

# ---------------------------------------------------------------------------------------- optimizer states

REPLICAS, DENSITY = 64, 0.01
TINY = Workload("tiny", 2, 64, 4, 2, 128, 4000, 64, 64)
NOT_MEASURED = ("gradients", "chunks in flight", "working copy", "activations")  # what exists in a step alone


def scape(**options: Any) -> PlannedRun:
    return PlannedRun(ScapeOptions(density=DENSITY, **options))


OWNER_ONLY: dict[str, Any] = {"update": "sharded", "weights_dtype": "bfloat16"}
STATES = {
    "dense AdamW": PlannedRun(DenseOptions(), "AdamW"),
    "dense AdamS": PlannedRun(DenseOptions(), "AdamS"),
    "SCAPE replicated": scape(),
    "SCAPE replicated, offload state": scape(offload=["state"]),
    "SCAPE sharded": scape(update="sharded"),
    "SCAPE sharded, offload state": scape(update="sharded", offload=["state"]),
    "SCAPE sharded, master at its owner alone": scape(**OWNER_ONLY),
    "SCAPE sharded, master at its owner alone, offload state": scape(**OWNER_ONLY, offload=["state"]),
}


def measured(run: PlannedRun, shapes: tuple[Shape, ...]) -> tuple[float, float]:
    """Return the bytes of parameters and optimizer on the device and on the host."""
    before, moments, host, options = storages(), 0, 0, run.options
    model = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    optimizer: Any = None  # kept until the bytes are counted
    if isinstance(options, ScapeOptions):
        if options.weights_dtype == "bfloat16":
            hold_in_bfloat16(model, scaled=True)
        # Host memory is reserved, not used. The buffers are those of a GPU; no kernel is launched.
        with replaced(offload, "check_host_memory", lambda *_: None), environment(TRITON_INTERPRET="1"):
            world, kernels = dist.group.WORLD, "triton"
            optimizer = Scape(model.named_parameters(), lr=1e-3, options=options, replicas=world, kernels=kernels)
        state = optimizer.method.passes.storage
        host = 0 if state.window is None else state.flat.nbytes
    elif run.optimizer == "AdamS":
        optimizer = AdamS(model.named_parameters(), lr=1e-3)
    else:
        for p in model:  # one at a time: AdamW has no state before a step
            p.grad = torch.zeros_like(p)
            adamw = torch.optim.AdamW([p])
            adamw.step()
            moments += sum(t.nbytes for t in adamw.state[p].values())
            p.grad = None
            del adamw
    found = sum(nbytes for address, nbytes in storages().items() if address not in before)
    return float(found + moments - host), float(host)


def storages() -> dict[int, int]:
    """Return the bytes of the storages of all tensors, by address."""
    gc.collect()
    tensors = (one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def workload_table(workload: Workload) -> str:
    shapes, local, rows = workload.shapes(), workload.local(1), []
    found = {name: measured(run, shapes) for name, run in STATES.items()}
    dense = found["dense AdamS"][0]
    for name, run in STATES.items():
        kinds, (device, host) = run.total_memory(workload, 1, REPLICAS, 1), found[name]
        predicted = sum(nbytes for kind, nbytes in kinds.items() if kind not in NOT_MEASURED)
        row = {"": name, "device, GB: predicted": f"{predicted / 1e9:.3f}", "measured": f"{device / 1e9:.3f}"}
        row["over dense AdamS, measured"] = f"{(device - dense) / 1e9:+.3f}"
        offloaded = {
            "host, GB: predicted": sum(run.options.host_memory(local, REPLICAS).values()),
            "measured ": host,
            "over the host link a step, GB: predicted": sum(run.options.host_link_traffic(local, REPLICAS)),
        }
        rows.append(row | {title: f"{nbytes / 1e9:.3f}" if host else "" for title, nbytes in offloaded.items()})
    n, payload = workload.parameters, 4 * payload_entries(shapes, DENSITY)
    over, allowed = found["SCAPE replicated"][0] - dense, n / 4 + 2 * payload
    rates = STATES["SCAPE replicated"].total_memory(workload, 1, REPLICAS, 1)["rates of visits"]
    return f"""### {workload.name}: {n:,} parameters

{markdown(rows)}

SCAPE replicated over dense AdamS: {over / 1e6:.1f} MB. n/4 bytes and two payload buffers are \
{allowed / 1e6:.1f} MB ({n / 4e6:.1f} + 2 x {payload / 1e6:.1f}): {100 * (over / allowed - 1):+.1f} %.
{rates / 1e6:.1f} MB are the rates at which the mask visits rows and columns (none without
`staleness_scaling`). Within a step the selection of the own run comes on top, \
{block_layout(shapes, REPLICAS, 1024).wire_bytes(DENSITY, "block") / 1e6:.1f} MB."""


def states_table(args: argparse.Namespace) -> str:
    dist.init_process_group("fake", rank=0, world_size=REPLICAS, store=FakeStore())
    tables = [workload_table(TINY if name == "tiny" else get_workload(name)) for name in args.models]
    return f"""## Memory of parameters and optimizer state

`python -m scripts.benchmarks.memory states`: one of {REPLICAS} replicas, no shards, density {DENSITY:g}, payload in \
FP32. GB are 1e9 bytes. Without gradients (4 bytes a parameter), messages in flight and activations. Measured: bytes of
all tensors on a CPU, nothing on a GPU.

{(chr(10) * 2).join(tables)}
"""


# ------------------------------------------------------------------------------- kinds of memory on Frontier

RECIPE = "train_configs/llama_1_8b_frontier.toml"
GIB = 2**30
INT8 = 1 + 4 / 256  # bytes of an encoded entry
MODELS = {"20B": ("GPT-NeoX-20B's size", 384), "1.8B": ("Llama-1.8B", 64)}  # title and ranks, 8 of them per node
_DENSE = ("--sync.method=dense", "--optimizer.name=AdamW", "--optimizer.implementation=foreach")
_ONE = ("--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=-1")
_FLAT = (*_DENSE, *_ONE, "--sharding.levels.weights=0", "--sharding.levels.gradients=0")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # title and options of the trainer
    "zero3": ("FSDP2 over all ranks", (*_FLAT, "--sharding.weights_code=dense", "--sharding.gradients_code=dense")),
    "zeropp": ("ZeRO++", (*_FLAT, "--sharding.secondary", "--sharding.gradients_code=int8+int4")),
    "levels": ("three levels", _DENSE),
    "published": ("three levels, secondary on the pair", (*_DENSE, "--sharding.levels.secondary=2")),
    "scape": ("three levels, SCAPE across nodes", ()),
}


def closed_forms(ranks: int) -> dict[str, dict[str, float]]:
    """Return the bytes per parameter by case and kind."""
    zero3 = {"parameters": 4 / ranks, "gradients": 4 / ranks, "state": 8 / ranks}
    levels = {"parameters": 2 / 2, "gradients": 4 / 8, "masters": 4 / ranks, "state": 8 / ranks}
    return {
        "zero3": zero3,
        "zeropp": zero3 | {"secondary weights": INT8 / 8},
        "levels": levels,
        "published": levels | {"secondary weights": INT8 / 2},
        "scape": levels | {"masters": 4 / 8, "state": 4 / 8},
    }


def measure_case(flavor: str, name: str) -> dict[str, Any]:
    """Return the bytes by kind of what the trainer builds if this process is one of the model's ranks."""
    ranks = MODELS[flavor][1]
    os.environ |= {"NGPU": str(ranks), "LOCAL_RANK": "0"}
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    config = parse(
        [
            *(f"--job.config_file={RECIPE}", f"--model.flavor={flavor}", "--comm.mode=fake_backend"),
            *("--training.steps=0", "--validation.no-enable", "--checkpoint.no-enable", "--debug.seed=1"),
            *(f"--training.global_batch_size={4 * ranks}", "--metrics.no-enable_tensorboard", *CASES[name][1]),
        ]
    )
    trainer = ScapeTrainer(config)
    n = sum(p.numel() for p in trainer.model_parts[0].parameters())
    assert trainer.memory is not None
    report = {kind: float(value) for kind, value in trainer.memory.kinds.items()}
    return {"n": n, "held": held(trainer), "report": report}


def held(trainer: Any) -> dict[str, float]:
    """Return the bytes of the trainer's tensors by kind.

    Without levels, FSDP2 creates the gradients in a backward pass: they count as FP32 of the parameters' shapes.
    """
    from torchtitan_scape.core.parameters import local, stored
    from torchtitan_scape.sharding.base import param_groups_of

    optimizers, model = trainer.replica_optimizer, trainer.model_parts[0]
    weights = [stored(p) for p in model.parameters()]
    kinds: dict[str, float] = {"parameters": nbytes(weights)}
    levels, optimizer = optimizers.levels, optimizers.inner
    if levels is not None:
        kinds["gradients"] = nbytes([group.reduce.buffer for group in levels.groups])
        kinds["masters"] = nbytes([group.master for group in levels.groups])
    else:
        kinds["gradients"] = 4.0 * sum(weight.numel() for weight in weights)
    method: Any = optimizers.methods[0]
    fake_mode: Any = local(weights[0]).fake_mode  # type: ignore[attr-defined]
    if method.options.holds_optimizer_state:  # SCAPE creates its state at once; masks and payload are extra
        kinds["state"] = nbytes([method.passes.storage.flat])
    else:
        with fake_mode, torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
        kinds["state"] = nbytes([local(t) for state in optimizer.state.values() for t in state.values() if t.ndim])
    with fake_mode:
        if secondary := nbytes([one for flat in param_groups_of(model) for one in secondary_weights(flat)]):
            kinds["secondary weights"] = secondary
    return kinds


def secondary_weights(flat: Any) -> list[torch.Tensor]:
    """Return what one of FSDP2's groups keeps after an all-gather. Messages have their size, but no content."""
    from torchtitan_scape.sharding.base import entries
    from torchtitan_scape.sharding.row_codec import RowCodec

    group = fsdp_parameter_group(flat.modules[0])
    gather, ranks = group._all_gather_comm, group._all_gather_process_group
    if getattr(gather, "cache", None) is None:
        return []
    row, position = entries(flat.gathered), ranks.rank()
    output = torch.empty(ranks.size() * row, dtype=torch.bfloat16)
    with replaced(RowCodec, "encode", lambda *_: None):
        gather(output_tensor=output, input_tensor=output[position * row :][:row], group=ranks)
    return [gather.cache.get()]


def nbytes(tensors: list[Any]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


def frontier_rows(runs: Mapping[str, Any], model: str) -> list[dict[str, str]]:
    rows, forms = [], closed_forms(MODELS[model][1])
    for name, one in runs[model].items():
        found = {kind: (one["n"] * each, one["held"][kind]) for kind, each in forms[name].items()}
        found["all of these"] = (
            sum(expected for expected, _ in found.values()),
            sum(held for _, held in found.values()),
        )
        for kind, (expected, held) in found.items():
            row = {"form": CASES[name][0] if kind == "parameters" else "", "kind": kind}
            row |= {"closed form, GB": f"{expected / 1e9:.3f}", "dry run, GB": f"{held / 1e9:.3f}"}
            rows.append(row | {"off": f"{100 * (held / expected - 1):+.2f} %"})
    return rows


def largest_rows() -> list[dict[str, str]]:
    """Return the largest models by permanent bytes per parameter, as published (weights and gradients in 16 bits)
    and here."""
    forms = [("ZeRO-3", 16, "68 B", 16 / 16, 16 / 16), ("ZeRO++", 16, "55 B", 16 / 16 + 2 / 8, 16 / 16 + INT8 / 8)]
    for ranks, printed in ((16, ""), (80, "about 36 B"), (384, "")):
        published, here = 2 / 2 + 1 / 2 + 2 / 8 + 12 / ranks, 2 / 2 + 4 / 8 + 12 / ranks
        forms.append(("three levels", ranks, printed, published, here))
    rows = []
    for name, ranks, printed, published, here in forms:
        row = {"form": name, "GCDs": str(ranks), "printed": printed}
        for title, per_parameter in (("as published", published), ("here", here)):
            row[f"{title}, bytes a parameter"] = f"{per_parameter:.3f}"
            row[f"{title}, largest"] = f"{64 * GIB / per_parameter / 1e9:.1f} B"
        rows.append(row)
    return rows


def frontier_table(facts: Mapping[str, Any]) -> str:
    parts = []
    for name, (title, ranks) in MODELS.items():
        n = facts["runs"][name]["zero3"]["n"]
        parts.append(f"### {title}, {n:,} parameters, {ranks} GCDs\n\n{markdown(frontier_rows(facts['runs'], name))}")
    body = "\n\n".join(parts)
    return f"""## Memory of a rank on Frontier

What lasts from step to step, by kind, GB (1e9 bytes): in closed form, and as the tensors of rank 0 of a dry run on the
fake backend are, on a CPU; no activations, no messages. AdamW, with SCAPE AdamS. Gradients of FSDP2 are counted by its
rule, FP32 of a rank's shards; a secondary is what gathers keep after one of every group. Made by

```
python -m scripts.benchmarks.memory frontier
```

"GPT-NeoX-20B's size" is a Llama of its 44 layers, width 6144, 64 heads and 50,432 tokens, untied; its feed-forward has
three matrices of 16,384 where GPT-NeoX has two of 24,576, which are as many entries. GPT-NeoX-20B has 20,554,567,680
parameters, biases included. What SCAPE keeps besides, masks and a payload, is not among these kinds.

{body}

### The largest model on GCDs of 64 GiB

Arithmetic: 64 GiB by the bytes that last. ZeRO-3 here is FSDP2: FP32 shards and gradients in the place of 16 bits and a
master. The paper says 36 B of three levels without a number of GCDs: its bytes leave room for that on 80, and for
27.5 B on 16.

{markdown(largest_rows())}
"""


def measure_frontier(*_: Any) -> dict[str, Any]:
    runs: dict[str, Any] = {model: {} for model in MODELS}
    for model, case in itertools.product(MODELS, CASES):
        print(f"{MODELS[model][0]}: {CASES[case][0]} ...", flush=True)
        runs[model][case] = in_new_process(measure_case, model, case)
    return {"runs": runs}


# ---------------------------------------------------------------------------------------- memory traffic

KERNEL_REPLICAS, PASSES = 8, ("finite", "pack", "squares", "update", "coding")


def kernel_table(_: Mapping[str, Any]) -> str:
    """Return bytes per parameter that the passes of a SCAPE step read and write if each input and output moves once."""
    rows = []
    for title, workload in {"llama-500m": "llama_500m", "llama-1.8b": "llama_1_8b"}.items():
        model = get_workload(workload).local(1)
        for options in (ScapeOptions(density=0.1), ScapeOptions(density=0.05, code="int4"), ScapeOptions(density=0.01)):
            least = options.pass_bytes(model, KERNEL_REPLICAS)
            sums = {name: least.get(name, 0.0) for name in PASSES}
            sums["pack + update + coding"] = sums["pack"] + sums["update"] + sums["coding"]
            sums["all"] = sum(least.values())
            row = {"model": title, "parameters": f"{model.entries:,}"}
            row["density, code"] = f"{options.density:g}, {options.code}"
            rows.append(row | {name: f"{nbytes / model.entries:.2f}" for name, nbytes in sums.items()})
    return f"""## Memory traffic of a SCAPE step

`python -m scripts.benchmarks.memory kernels`: bytes a parameter that must move, FP32, blocks of 1024, \
{KERNEL_REPLICAS} replicas.
Fused AdamW moves 28, dense AdamS 20, both without a finite check.

{markdown(rows)}
"""


BENCHMARKS = {
    "states": Benchmark(
        lambda args, _: {"text": states_table(args)},
        lambda facts: facts["text"],
        arguments={"--models": dict(type=names, default=["llama_500m", "llama_1_8b"], help="workloads, or tiny")},
    ),
    "frontier": Benchmark(measure_frontier, frontier_table),
    "kernels": Benchmark(lambda *_: {}, kernel_table),
}

if __name__ == "__main__":
    sys.exit(main("scripts.benchmarks.memory", __doc__, BENCHMARKS))

"""What parameters and optimizer state cost on one of 64 ranks, predicted and measured: results/memory_states/table.md.

    python -m scripts.benchmarks.memory_table [--smoke]

Predicted: `PlannedRun.total_memory`, as the trainer's report at the start. Measured: the bytes of all tensors
that exist once the optimizer is built (dense AdamW's moments: once it has taken a step), in a process group that
pretends to have 64 replicas, on a CPU, where zeros take no memory before they are written. No gradients, no
activations.
"""

import gc
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from scripts.common import RESULTS, markdown, parser, write
from torchtitan_scape import AdamS, Scape
from torchtitan_scape.core.bf16_weights import hold_in_bfloat16
from torchtitan_scape.core.workloads import Shape, Workload, get_workload
from torchtitan_scape.methods.dense.options import DenseOptions
from torchtitan_scape.methods.scape.options import ScapeOptions
from torchtitan_scape.methods.scape.payload import mask_bytes, payload_bytes
from torchtitan_scape.planner.run import PlannedRun

REPLICAS, DENSITY = 64, 0.01
NOT_HERE = ("gradients", "working copy", "activations")


def scape(**options: Any) -> PlannedRun:
    return PlannedRun(ScapeOptions(density=DENSITY, **options))


NARROW: dict[str, Any] = {"update": "sharded", "values": "bfloat16", "weights_dtype": "bfloat16"}
FORMS = {
    "dense AdamW": PlannedRun(DenseOptions(), "AdamW"),
    "dense AdamS": PlannedRun(DenseOptions(), "AdamS"),
    "SCAPE replicated": scape(),
    "SCAPE replicated, offload state": scape(offload=["state"]),
    "SCAPE replicated, BF16 weights, offload master": scape(weights_dtype="bfloat16", offload=["master"]),
    "SCAPE replicated, BF16 weights, offload state, master": scape(
        weights_dtype="bfloat16", offload=["state", "master"]
    ),
    "SCAPE sharded": scape(update="sharded"),
    "SCAPE sharded, offload state": scape(update="sharded", offload=["state"]),
    "SCAPE sharded, BF16 values": scape(update="sharded", values="bfloat16"),
    "SCAPE sharded, master at its owner alone": scape(**NARROW),
    "SCAPE sharded, master at its owner alone, offload master": scape(**NARROW, offload=["master"]),
    "SCAPE sharded, master at its owner alone, offload state": scape(**NARROW, offload=["state"]),
    "SCAPE sharded, master at its owner alone, offload state, master": scape(**NARROW, offload=["state", "master"]),
}


def predicted(method: PlannedRun, workload: Workload) -> tuple[float, float]:
    """Bytes on the device and on the host."""
    kinds = method.total_memory(workload, 1, REPLICAS, 1)
    host = method.host_memory(workload.local(1), REPLICAS)
    return sum(v for k, v in kinds.items() if k not in NOT_HERE), sum(host.values())


def measured(method: PlannedRun, shapes: tuple[Shape, ...]) -> tuple[float, float]:
    """Bytes on the device and on the host."""
    before = storages()
    model = nn.ParameterList(torch.zeros(shape) for shape in shapes)
    options = method.options
    if method.is_dense and method.optimizer == "AdamW":
        extra = 0
        for p in model:  # one at a time: it has no state before a step
            p.grad = torch.zeros_like(p)
            optimizer = torch.optim.AdamW([p])
            optimizer.step()
            extra += sum(t.nbytes for t in optimizer.state[p].values())
            p.grad = None
            del optimizer
        return total(storages(), before) + extra, 0.0
    if not isinstance(options, ScapeOptions):
        kept: Any = AdamS(model.named_parameters(), lr=1e-3)
        return total(storages(), before), 0.0
    if options.weights_dtype == "bfloat16":
        hold_in_bfloat16(model, scaled=options.update == "sharded")
    with patch("kernels.common.storage.check_host_memory"):  # of what is only reserved
        kept = Scape(model.named_parameters(), lr=1e-3, options=options, replicas=dist.group.WORLD)
    host = sum(window.host.nbytes for window in kept.method.passes.storage.windows.values())
    return total(storages(), before) - host, float(host)


def storages() -> dict[int, int]:
    """Bytes by address of all tensors' storage."""
    gc.collect()
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, nn.Parameter):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def total(now: dict[int, int], before: dict[int, int]) -> float:
    return float(sum(nbytes for address, nbytes in now.items() if address not in before))


def table(workload: Workload) -> str:
    shapes, rows = workload.shapes(), []
    found = {name: measured(method, shapes) for name, method in FORMS.items()}
    plain = found["dense AdamS"][0]
    for name, method in FORMS.items():
        (device, host), (here, there) = predicted(method, workload), found[name]
        moved = sum(method.host_link_traffic(workload.local(1), REPLICAS))
        row = {"": name, "device, GB: predicted": f"{device / 1e9:.3f}", "measured": f"{here / 1e9:.3f}"}
        row["over dense AdamS, measured"] = f"{(here - plain) / 1e9:+.3f}"
        on_host = [f"{nbytes / 1e9:.3f}" if there else "" for nbytes in (host, there, moved)]
        titles = ("host, GB: predicted", "measured ", "over the host link a step, GB: predicted")
        rows.append(row | dict(zip(titles, on_host, strict=True)))
    n = workload.parameters
    payload = payload_bytes(shapes, DENSITY)
    over, allowed = found["SCAPE replicated"][0] - plain, n / 4 + 2 * payload
    rates = FORMS["SCAPE replicated"].total_memory(workload, 1, REPLICAS, 1)["rates of visits"]
    own = mask_bytes(shapes, DENSITY, REPLICAS)
    return f"""{markdown(rows)}

SCAPE replicated over dense AdamS: {over / 1e6:.1f} MB. n/4 bytes and two payload buffers are \
{allowed / 1e6:.1f} MB ({n / 4e6:.1f} + 2 x {payload / 1e6:.1f}): {100 * (over / allowed - 1):+.1f} %.
{rates / 1e6:.1f} MB are the rates at which the mask visits rows and columns (none without
`staleness_scaling`). Within a step the selection of the own run comes on top, {own / 1e6:.1f} MB."""


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--smoke", action="store_true", help="a tiny model, and nothing is written")
    smoke = own.parse_args().smoke
    dist.init_process_group("fake", rank=0, world_size=REPLICAS, store=FakeStore())
    if smoke:
        print(table(Workload("tiny", 2, 64, 4, 2, 128, 4000, 64, 64)))
        return 0
    tables = {name: table(get_workload(name)) for name in ("llama_500m", "llama_1_8b")}
    text = "\n\n".join(f"## {name}: {get_workload(name).parameters:,} parameters\n\n{t}" for name, t in tables.items())
    write(
        RESULTS / "memory_states" / "table.md",
        f"""# Memory of parameters and optimizer state

`python -m scripts.benchmarks.memory_table`: one of {REPLICAS} replicas, no shards, density {DENSITY:g}, payload in \
FP32. GB are 1e9 bytes. Without gradients (4 bytes a parameter)
and activations. Measured: bytes of all tensors on a CPU, nothing on a GPU.

{text}
""",
    )
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

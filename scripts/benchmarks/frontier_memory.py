"""Memory of a rank by kind on Frontier, in dry runs against closed forms: results/frontier_memory/table.md.

    python -m scripts.benchmarks.frontier_memory run        # every case that is not stored yet; nothing is allocated
    python -m scripts.benchmarks.frontier_memory report     # table.md, from the stored runs alone

The Frontier paper (arXiv:2501.04266) trains GPT-NeoX-20B on 384 GCDs. Here that is a Llama of its layers, width, heads,
vocabulary and parameters (flavor "20B"). A case is built by the trainer as one of so many ranks of the fake backend,
and takes a step of its optimizer on gradients that are not there; what is counted are its tensors.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from scripts.common import RESULTS, ROOT, RunError, command_of, guarded, markdown, parser, read, write

RECIPE = "train_configs/llama_1_8b_frontier.toml"
GIB = 2**30
INT8 = 1 + 4 / 256  # bytes of a coded entry


class Model(NamedTuple):
    title: str
    flavor: str
    ranks: int


class Form(NamedTuple):
    """options: of the trainer. closed: bytes by kind of n parameters on so many ranks, 8 of them a node."""

    title: str
    options: tuple[str, ...]
    closed: Any


def _sharded(n: float, ranks: int) -> dict[str, float]:
    return {"parameters": 4 * n / ranks, "gradients": 4 * n / ranks, "state": 8 * n / ranks}


def _with_secondary(n: float, ranks: int) -> dict[str, float]:
    return _sharded(n, ranks) | {"secondary weights": INT8 * n / 8}


def _on_levels(n: float, ranks: int) -> dict[str, float]:
    return {"parameters": 2 * n / 2, "gradients": 4 * n / 8, "masters": 4 * n / ranks, "state": 8 * n / ranks}


def _published(n: float, ranks: int) -> dict[str, float]:
    return _on_levels(n, ranks) | {"secondary weights": INT8 * n / 2}


def _with_scape(n: float, ranks: int) -> dict[str, float]:
    return {"parameters": 2 * n / 2, "gradients": 4 * n / 8, "masters": 4 * n / 8, "state": 4 * n / 8}


MODELS = {
    "20B": Model("GPT-NeoX-20B's size", "20B", 384),
    "1.8B": Model("Llama-1.8B", "1.8B", 64),
}
_DENSE = ("--sync.method=dense", "--optimizer.name=AdamW", "--optimizer.implementation=foreach")
_ONE = ("--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=-1")
_FLAT = (*_DENSE, *_ONE, "--sharding.levels.weights=0", "--sharding.levels.gradients=0")
FORMS = {
    "zero3": Form("FSDP2 over all ranks", (*_FLAT, "--sharding.weights=dense", "--sharding.gradients=dense"), _sharded),
    "zeropp": Form("ZeRO++", (*_FLAT, "--sharding.secondary", "--sharding.gradients=int8+int4"), _with_secondary),
    "levels": Form("three levels", _DENSE, _on_levels),
    "published": Form("three levels, secondary on the pair", (*_DENSE, "--sharding.levels.secondary=2"), _published),
    "scape": Form("three levels, SCAPE across nodes", (), _with_scape),
}


# ------------------------------------------------------------------------------------------------- a dry run


def measure(model: Model, form: Form) -> dict[str, Any]:
    """Bytes by kind of what the trainer has built, as this process is one of the model's ranks."""
    os.environ |= {"NGPU": str(model.ranks), "LOCAL_RANK": "0"}
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    config = parse(
        [
            *(f"--job.config_file={RECIPE}", f"--model.flavor={model.flavor}", "--comm.mode=fake_backend"),
            *("--training.steps=0", "--validation.no-enable", "--checkpoint.no-enable", "--debug.seed=1"),
            *(f"--training.global_batch_size={4 * model.ranks}", "--metrics.no-enable_tensorboard", *form.options),
        ]
    )
    trainer = ScapeTrainer(config)
    n = sum(p.numel() for p in trainer.model_parts[0].parameters())
    assert trainer.memory is not None
    told = {kind: float(value) for kind, value in trainer.memory.kinds.items()}
    return {"n": n, "held": held(trainer), "report": told}


def held(trainer: Any) -> dict[str, float]:
    """Of gradients without levels their shapes are taken, FP32: FSDP2 makes them in a backward pass."""
    import torch

    from torchtitan_scape.core.parameters import local, stored
    from torchtitan_scape.sharding.base import flat_groups

    optimizers, model = trainer.replica_optimizer, trainer.model_parts[0]
    weights = [stored(p) for p in model.parameters()]
    kinds: dict[str, float] = {"parameters": nbytes(weights)}
    levels, optimizer = optimizers.levels, optimizers.inner
    if levels is not None:
        kinds["gradients"] = nbytes([group.reduce.buffer for group in levels.groups])
        kinds["masters"] = nbytes([master.values for master in levels.masters])
    else:
        kinds["gradients"] = 4.0 * sum(weight.numel() for weight in weights)
    method: Any = optimizers.methods[0]
    if method.holds_optimizer_state:  # SCAPE creates its state at once; masks and payload besides
        kinds["state"] = nbytes([method.passes.storage.flat["state"]])
    else:
        with local(weights[0]).fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            optimizer.step()
        state = [local(t) for entries in optimizer.state.values() for t in entries.values() if t.ndim]
        kinds["state"] = nbytes(state)
    with local(weights[0]).fake_mode:  # type: ignore[attr-defined]
        if kept := nbytes([one for flat in flat_groups(model) for one in kept_after_a_gather(flat)]):
            kinds["secondary weights"] = kept
    return kinds


def kept_after_a_gather(flat: Any) -> list[Any]:
    """What the gather of one of FSDP2's groups keeps of it: a message is made of nothing, of the size it has."""
    import torch

    from torchtitan_scape.sharding.base import entries
    from torchtitan_scape.sharding.messages import RowCodec

    group = flat.modules[0]._get_fsdp_state()._fsdp_param_group
    gather, ranks = group._all_gather_comm, group._all_gather_process_group
    if getattr(gather, "_kept", None) is None:
        return []
    row, place = entries(flat.gathered), ranks.rank()
    output = torch.empty(ranks.size() * row, dtype=torch.bfloat16)
    with patch.object(RowCodec, "encode", lambda *_: None):
        gather(output_tensor=output, input_tensor=output[place * row :][:row], group=ranks)
    return [gather._kept.get()]


def nbytes(tensors: list[Any]) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))


# -------------------------------------------------------------------------------------------------- commands


def run(args: argparse.Namespace) -> None:
    path = args.output / "runs.json"
    stored: dict[str, Any] = read(path) or {"command": command_of("scripts.benchmarks.frontier_memory"), "runs": {}}
    for model in MODELS:
        for form in FORMS:
            if form in stored["runs"].setdefault(model, {}):
                continue
            print(f"{MODELS[model].title}: {FORMS[form].title} ...", flush=True)
            given = [sys.executable, "-m", "scripts.benchmarks.frontier_memory", "measure", model, form]
            done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=args.timeout)
            if done.returncode:
                raise RunError(f"{model} {form} failed: {done.stderr.strip().splitlines()[-1]}")
            stored["runs"][model][form] = json.loads(done.stdout.splitlines()[-1])
            write(path, stored)
    report(args)


def rows_of(runs: Mapping[str, Any], model: str) -> list[dict[str, str]]:
    rows = []
    for name, one in runs[model].items():
        closed = FORMS[name].closed(float(one["n"]), MODELS[model].ranks)
        for kind, expected in [*closed.items(), ("all of these", sum(closed.values()))]:
            got = one["held"][kind] if kind in closed else sum(one["held"][k] for k in closed)
            row = {"form": FORMS[name].title if kind == "parameters" else "", "kind": kind}
            row |= {"closed form, GB": f"{expected / 1e9:.3f}", "dry run, GB": f"{got / 1e9:.3f}"}
            rows.append(row | {"off": f"{100 * (got / expected - 1):+.2f} %"})
    return rows


# Bytes that last, a parameter, on so many GCDs: as published (weights and gradients in 16 bits), and here.
LARGEST: dict[str, tuple[Any, Any, str]] = {
    "ZeRO-3": (lambda ranks: 16 / ranks, lambda ranks: 16 / ranks, "68 B"),
    "ZeRO++": (lambda ranks: 16 / ranks + 2 / 8, lambda ranks: 16 / ranks + INT8 / 8, "55 B"),
    "three levels": (
        lambda ranks: 2 / 2 + 1 / 2 + 2 / 8 + 12 / ranks,
        lambda ranks: 2 / 2 + 4 / 8 + 12 / ranks,
        "about 36 B",
    ),
}


def largest_rows() -> list[dict[str, str]]:
    rows = []
    for name, (published, ours, printed) in LARGEST.items():
        for ranks in (16, 80, 384) if "levels" in name else (16,):
            row = {
                "form": name,
                "GCDs": str(ranks),
                "printed": printed if ranks == (80 if "levels" in name else 16) else "",
            }
            for title, of in (("as published", published), ("here", ours)):
                row[f"{title}, bytes a parameter"] = f"{of(ranks):.3f}"
                row[f"{title}, largest"] = f"{64 * GIB / of(ranks) / 1e9:.1f} B"
            rows.append(row)
    return rows


def table(stored: Mapping[str, Any]) -> str:
    """table.md, from runs.json."""
    runs = stored["runs"]
    parts = []
    for name, model in MODELS.items():
        n = next(iter(runs[name].values()))["n"]
        parts.append(f"## {model.title}, {n:,} parameters, {model.ranks} GCDs\n\n{markdown(rows_of(runs, name))}")
    body = "\n\n".join(parts)
    return f"""# Memory of a rank on Frontier

What lasts from step to step, by kind, GB (1e9 bytes): in closed form, and as the tensors of rank 0 of a dry run on the
fake backend are, on a CPU; no activations, no messages. AdamW, with SCAPE AdamS. Gradients of FSDP2 are counted by its
rule, FP32 of a rank's shards; a secondary is what gathers keep after one of every group. Made by

```
{stored["command"]}
```

"GPT-NeoX-20B's size" is a Llama of its 44 layers, width 6144, 64 heads and 50,432 tokens, untied; its feed-forward has
three matrices of 16,384 where GPT-NeoX has two of 24,576, which are as many entries. GPT-NeoX-20B has 20,554,567,680
parameters, biases included. What SCAPE keeps besides, masks and a payload, is not among these kinds.

{body}

## The largest model on GCDs of 64 GiB

Arithmetic: 64 GiB by the bytes that last. ZeRO-3 here is FSDP2: FP32 shards and gradients in the place of 16 bits and a
master. The paper says 36 B of three levels without a number of GCDs: its bytes leave room for that on 80, and for
27.5 B on 16.

{markdown(largest_rows())}
"""


def report(args: argparse.Namespace) -> None:
    text = table(json.loads((args.output / "runs.json").read_text()))
    write(args.output / "table.md", text)
    print(text)


def main() -> int:
    own = parser(__doc__)
    commands = own.add_subparsers(dest="command", required=True)
    for name, work in (("run", run), ("report", report)):
        one = commands.add_parser(name)
        one.set_defaults(do=work)
        one.add_argument("--output", type=Path, default=RESULTS / "frontier_memory")
        if name == "run":
            one.add_argument("--timeout", type=float, default=600.0, help="seconds after which a case is ended")
    one = commands.add_parser("measure", help="one case, as JSON")
    one.add_argument("model", choices=MODELS)
    one.add_argument("form", choices=FORMS)
    one.set_defaults(do=lambda args: print(json.dumps(measure(MODELS[args.model], FORMS[args.form]))))
    args = own.parse_args()
    return guarded(lambda: args.do(args))


if __name__ == "__main__":
    sys.exit(main())

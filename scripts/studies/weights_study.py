"""What it costs to keep weights in BF16: the sharded form's losses, and how far its weights are from their master.

    python -m scripts.studies.weights_study            # trains what is not stored yet, then writes the table
    python -m scripts.studies.weights_study report     # the table alone, from results/weights_study/runs.json

Two replicas (processes, gloo) train the quality study's recipe with `update = "sharded"`; forward and backward in
BF16, as mixed precision has it, or in FP32, so that all that is rounded are weights. One form is not in the product:
weights kept in BF16 and decayed there step by step, which is what the scale of `kernels.scape.updaters` avoids.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scripts.common import RESULTS, guarded, markdown, parser, read, spread, torchrun, write

FOLDER = RESULTS / "weights_study"
STEPS = 980
# (Density, dtype of forward and backward), and seeds. At 0.01 runs that differ in rounding alone end 2 % apart.
SETTINGS = {(0.01, "bfloat16"): 7, (0.1, "bfloat16"): 3, (0.01, "float32"): 2, (0.1, "float32"): 2}
FORMS = {
    "FP32 weights": [],
    "FP32 weights, BF16 values": ["--sync.scape.values=bfloat16"],
    "BF16 weights with a scale": ["--sync.scape.values=bfloat16", "--sync.scape.weights_dtype=bfloat16"],
    "BF16 weights decayed in place": ["--sync.scape.values=bfloat16", "--sync.scape.weights_dtype=bfloat16"],
}
IN_PLACE = "BF16 weights decayed in place"


def arguments(form: str, density: float, compute: str, seed: int) -> list[str]:
    return [
        "--job.config_file=train_configs/study.toml",
        "--optimizer.lr=0.004",
        f"--training.steps={STEPS}",
        "--training.local_batch_size=16",
        "--training.global_batch_size=32",
        f"--lr_scheduler.warmup_steps={STEPS // 20}",
        f"--sync.scape.density_warmup_steps={STEPS // 10}",
        f"--validation.freq={STEPS}",
        "--validation.steps=10",
        "--topology.simulate_replicas=1",
        "--sync.scape.update=sharded",
        f"--sync.scape.density={density}",
        f"--training.mixed_precision_param={compute}",
        f"--debug.seed={seed}",
        *FORMS[form],
    ]


def rank(form: str, output: str, options: list[str]) -> None:
    """One rank of one run; rank 0 writes what came out."""
    import torch.distributed as dist

    from kernels.scape.updaters import ShardedUpdate
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    def decay_in_place(owner: ShardedUpdate, step: Any) -> None:
        owner.scales = owner.scales[:0]  # then `write` decays what BF16 holds, and rounds it

    patches = [patch.object(ShardedUpdate, "begin_update", decay_in_place)] if form == IN_PLACE else []
    for one in patches:
        one.start()
    trainer = ScapeTrainer(parse([*options, f"--job.dump_folder={output}"]))
    trainer.train()
    scape = trainer.replica_optimizer.methods[0]
    figures: dict[str, Any] = {"validation_loss": trainer.validator.last_loss} | distance(scape)
    if dist.get_rank() == 0:
        (Path(output) / "figures.json").write_text(json.dumps(figures))
    trainer.close()
    dist.destroy_process_group()
    os._exit(0)  # as the trainer does: gloo's threads abort a process now and then that takes its time to end


def distance(scape: Any) -> dict[str, float]:
    """Of what the model sees from the master of what this rank owns: all entries of matrices together.

    error: relative, L2. excess: how much longer the weights are, along the master: what has not decayed.
    """
    import torch

    from torchtitan_scape.core.parameters import local
    from torchtitan_scape.methods.scape.state import StateByParameter

    masters, state = scape.passes.kept("master"), StateByParameter(scape)
    if not masters:
        return {}
    seen, master = [], []
    for shard, pieces in zip(scape.ordered[: state.sparsified], state.pieces, strict=False):
        weight = (local(shard.parameter).detach() * 1.0).view(-1)
        for number, start, end in pieces:
            if scape.passes.updater.owns(number):
                seen.append(weight[start:end].double())
                master.append(masters[number].double())
    w, m = torch.cat(seen), torch.cat(master)
    return {"error": ((w - m).norm() / m.norm()).item(), "excess": ((w @ m) / (m @ m) - 1).item()}


def train(form: str, density: float, compute: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given = ["-m", "scripts.studies.weights_study", "rank", form, folder, *arguments(form, density, compute, seed)]
        torchrun(2, given, Path(folder) / "log.txt")
        found: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
    return {"form": form, "density": density, "compute": compute, "seed": seed} | found


def table(runs: list[dict[str, Any]]) -> str:
    rows = []
    found = {(r["density"], r["compute"], r["form"], r["seed"]): r for r in runs}
    for (density, compute), seeds in SETTINGS.items():
        for form in FORMS:
            chosen = [r for s in range(seeds) if (r := found.get((density, compute, form, s)))]
            pairs = [(r, p) for r in chosen if (p := found.get((density, compute, "FP32 weights", r["seed"])))]
            gaps = [100 * (r["validation_loss"] / p["validation_loss"] - 1) for r, p in pairs]
            error, excess = (max((r[key] for r in chosen if key in r), default=None) for key in ("error", "excess"))
            row = {"density": f"{density:g}", "forward": compute, "form": form}
            row["validation loss, by seed"] = ", ".join(f"{r['validation_loss']:.4f}" for r in chosen)
            compared = gaps and form != "FP32 weights"
            row["against FP32 weights, mean ± deviation"] = f"{spread(gaps, '+.2f')} %" if compared else ""
            row["from the master, L2"] = "" if error is None else f"{error:.2e}"
            row["not decayed"] = "" if excess is None else f"{excess:+.2e}"
            rows += [row] if chosen else []
    return markdown(rows)


def report(runs: list[dict[str, Any]]) -> str:
    return f"""# Weights in BF16

`python -m scripts.studies.weights_study`: Llama of 0.2 M parameters on the bytes of Python's standard library,
two replicas, {STEPS} steps of 4,096 tokens, lr 0.004, weight decay 0.1, `update = "sharded"`.
A step of weight decay is at most 4e-4 of a weight; BF16 rounds by up to 3.9e-3. "From the master": distance of what
the model sees from the FP32 master, relative, over the matrices that a replica owns, the largest of the seeds. "Not
decayed": how much too long the weights are along their master. The last form is not in the product.

{table(runs)}
"""


def forms_of(seed: int) -> list[str]:
    """The one that is not in the product with one seed; after three seeds the two ends alone."""
    if seed > 2:
        return ["FP32 weights", "BF16 weights with a scale"]
    return [form for form in FORMS if form != IN_PLACE or seed == 0]


def run(args: Any) -> None:
    store = args.output / "runs.json"
    runs: list[dict[str, Any]] = read(store) or []
    done = {(r["form"], r["density"], r["compute"], r["seed"]) for r in runs}
    wanted = [(f, *setting, s) for setting, seeds in SETTINGS.items() for s in range(seeds) for f in forms_of(s)]
    for cell in [cell for cell in wanted if cell not in done and args.command == "run"]:
        runs.append(train(*cell))
        write(store, runs)
        print(runs[-1], flush=True)
    if not runs:
        raise ValueError(f"{store} has no runs; first run python -m scripts.studies.weights_study run")
    write(args.output / "table.md", report(runs))
    print(table(runs))


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2], sys.argv[3], sys.argv[4:])
    own = parser(__doc__)
    own.add_argument("command", nargs="?", choices=("run", "report"), default="run")
    own.add_argument("--output", type=Path, default=FOLDER, help="runs.json, table.md")
    args = own.parse_args()
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())

"""Losses of a Llama of 11 M parameters with 4 simulated replicas, and repeated runs of SPARTA.

The text is prepared on any machine with `python -m scripts.study.prepare_text --larger`. Runs of a step share the GPU
and begin at the same time, because the host limits a run of a small model.
"""

from pathlib import Path
from typing import Any

from scripts.common import EMBEDDED, ROOT, names, read, write
from scripts.gpu.machine import output_of
from scripts.gpu.training import PLAIN, SMOKE, train
from scripts.study.prepare_text import LARGER_PREPARED as TEXT
from torchtitan_scape.data.manifest import MANIFEST

REPLICAS, SEQUENCE, BATCH = 4, 512, 65536  # tokens
STEPS = 1526  # 100 M tokens
SIZES = (
    "--model.flavor=50M",
    "--model.sizes.dim=320",
    "--model.sizes.n_layers=6",
    "--model.sizes.n_heads=5",
    "--model.sizes.n_kv_heads=5",
)
WARM_UP = 0.05  # of the steps
MUON = ("--optimizer.name=Muon", "--optimizer.beta1=0.95")
UPDATE = ("--sync.method=quantized_update", "--sync.quantized_update.update_code=1bit_unbiased", *MUON)
SPARTA = ("--sync.method=sparta", "--sync.sparta.interval=3", "--sync.sparta.code=1bit", *MUON)
SCAPE = ("--sync.method=scape", "--sync.scape.density=0.05", "--sync.scape.code=int4", "--optimizer.name=AdamS")
# The best settings with 0.2 M parameters (docs/benchmarks/loss_for_bytes.md).
MULOCO = (
    "--sync.method=diloco",
    "--sync.diloco.inner_steps=30",
    "--sync.diloco.code=e2m1",
    "--sync.diloco.decay=0.9",
    "--sync.diloco.outer_lr=0.9",
    "--sync.diloco.outer_momentum=0.6",
    "--sync.flush_at_end",
    *MUON,
)
DENSE = ("--sync.method=dense", *MUON)
# Without a rate in the name: the rate of dense Muon, twice that for SPARTA, as smaller models needed it.
RUNS: dict[str, tuple[str, ...]] = {
    "dense-muon": (*DENSE, "--optimizer.lr=0.016"),
    "dense-muon-0.032": (*DENSE, "--optimizer.lr=0.032"),
    "quantized_update": (*UPDATE, "--optimizer.lr=0.016"),
    "quantized_update-0.032": (*UPDATE, "--optimizer.lr=0.032"),
    "muloco": (*MULOCO, "--optimizer.lr=0.016"),
    "muloco-0.008": (*MULOCO, "--optimizer.lr=0.008"),
    "sparta": (*SPARTA, "--optimizer.lr=0.032"),
    "scape": (*SCAPE, "--optimizer.lr=0.002"),
}
# A run of 51.9 M parameters with these arguments ended with a CUDA error (docs/benchmarks/gpu.md).
REPEATED = (*SPARTA, "--optimizer.lr=0.032", "--model.flavor=50M", "--training.local_batch_size=8")
REPEATED_STEPS = 120
KEPT = ("planned_bytes_per_step_and_rank", "dense_bytes_per_step_and_rank", "tokens_per_second", "skipped_steps")


def common(smoke: bool) -> list[str]:
    """Return the trainer's arguments that all runs have in common."""
    found = [f"--job.config_file={EMBEDDED}", *PLAIN]
    if smoke:
        return [*found, "--topology.simulate_replicas=2", "--validation.steps=1", "--validation.seq_len=32", *SMOKE]
    found += [f"--topology.simulate_replicas={REPLICAS}", f"--training.seq_len={SEQUENCE}", "--metrics.log_freq=20"]
    for section in ("training", "validation"):
        found += [f"--{section}.dataset=prepared", f"--{section}.dataset_path={TEXT.relative_to(ROOT)}"]
    found += [f"--validation.seq_len={SEQUENCE}", "--validation.local_batch_size=32", "--validation.steps=-1"]
    return [*found, "--training.mixed_precision_param=bfloat16", "--compile.enable"]


def length(smoke: bool, steps: int) -> list[str]:
    """Return the trainer's arguments that depend on the number of steps."""
    if smoke:
        return ["--sync.scape.density_warmup_steps=2", "--validation.freq=3"]
    start = round(WARM_UP * steps)
    found = [f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={start}", f"--validation.freq={-(-steps // 5)}"]
    return [*found, f"--sync.scape.density_warmup_steps={start}"]


def arguments(smoke: bool, name: str) -> list[str]:
    """Return the trainer's arguments of a run of `RUNS`."""
    sizes = () if smoke else (*SIZES, f"--training.local_batch_size={BATCH // REPLICAS // SEQUENCE}")
    return [*common(smoke), *sizes, *RUNS[name], *length(smoke, STEPS)]


def losses(result: Path, smoke: bool, chosen: str) -> None:
    """Train with methods of `RUNS`, separated by commas, at the same time. Raises RunError if a run failed."""
    steps = 3 if smoke else STEPS
    found = started(smoke, steps)
    commands = {name: arguments(smoke, name) for name in names(chosen)}
    train(commands, dict.fromkeys(commands, steps), lambda runs: note(result, found, runs, commands, steps))


def repeated(result: Path, smoke: bool, count: str) -> None:
    """Start runs with the arguments of `REPEATED` at the same time; store the kernel's messages about the GPU."""
    steps = 3 if smoke else REPEATED_STEPS
    found = started(smoke, steps) | {"messages_before": driver_messages()}
    options = SPARTA if smoke else REPEATED
    one = [*common(smoke), *options, *length(smoke, steps)]
    commands = {f"SPARTA, 51.9 M, {i + 1}": one for i in range(int(count))}
    try:
        train(commands, dict.fromkeys(commands, steps), lambda runs: note(result, found, runs, commands, steps))
    finally:
        write(result, found | {"messages": driver_messages()})


def started(smoke: bool, steps: int) -> dict[str, Any]:
    """Return the first figures of a step."""
    found: dict[str, Any] = {
        "arguments": common(smoke),
        "replicas": 2 if smoke else REPLICAS,
        "steps": steps,
        "runs": {},
    }
    if not smoke:
        found["text"] = read(TEXT / MANIFEST)
        found["text"]["source"].pop("path", None)  # differs between machines
    return found


def note(result: Path, found: dict[str, Any], runs: dict[str, Any], commands: dict[str, list[str]], steps: int) -> None:
    """Store the figures of the logs and of the summaries, and print the last losses."""
    for name, run in runs.items():
        points, summary = run["points"], run["summary"]
        found["runs"][name] = {
            "options": [option for option in commands[name] if option not in found["arguments"]],
            "steps": steps,
            "training": [[point["step"], point["loss"]] for point in points],
            "validation": run["validation"],
            "tokens_per_second_by_step": [[point["step"], point["tps"]] for point in points],
            **{key: run[key] for key in ("exit_code", "error")},
            **{key: summary.get(key) for key in KEPT},
        }
    write(result, found)
    last = {name: run["training"][-1] for name, run in found["runs"].items() if run["training"]}
    print(", ".join(f"{name}: step {step:.0f}, loss {loss:.3f}" for name, (step, loss) in last.items()), flush=True)


def driver_messages() -> list[str]:
    """Return the lines of the kernel's log about the GPU; a line that says so if it cannot be read."""
    said = output_of(["dmesg"])
    if said is None:
        return ["dmesg cannot be read"]
    return [line for line in said.splitlines() if "NVRM" in line or "Xid" in line or "amdgpu" in line][-20:]

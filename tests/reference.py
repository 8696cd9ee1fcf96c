"""Bit-exact comparison of training runs with those of an earlier commit.

    python -m tests.reference record DIR     # in a worktree of the earlier commit, with this file and on this machine
    python -m tests.reference compare DIR    # in the present tree

`record` trains every run of `runs()` for 12 steps and writes DIR/<run>.json: losses and gradient norms of every step
(`float.hex`), SHA-256 of every rank's weights and optimizer and method states, and the byte ledger. Existing files are
kept, so an interrupted recording continues. `compare` repeats the recorded command lines and prints every quantity that
differs, with its first step, rank or tensor; the exit code is 1 if any run differs. Bits depend on the CPU and on the
version of PyTorch: record and compare on one machine.

Options of both commands: `--only REGEX` selects runs by name (search), `--jobs N` trains N runs at a time (default 2).
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------- adapter
# The only lines that name internals of the product.


def with_present_key(argument: str) -> str:
    """Return an argument of a recorded command line with the present key; only for `compare`."""
    from torchtitan_scape.core.options import present_key

    key, equals, value = argument.partition("=")
    return f"--{present_key(key.removeprefix('--'))}{equals}{value}" if key.startswith("--") else argument


def make_trainer(arguments: list[str]) -> Any:
    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.trainer.trainer import ScapeTrainer

    return ScapeTrainer(parse(arguments))


def finish_previous_step(trainer: Any) -> None:
    trainer.replica_optimizer.finish_previous_step()


def skipped_steps(trainer: Any) -> int:
    return trainer.replica_optimizer.guard.skipped


def states_of(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, tensor) of all states of this rank; the name is empty for the optimizer's own. Collective."""
    from torchtitan_scape.checkpoint.state import dense_state, states

    for key, value in dense_state(trainer.replica_optimizer).items():
        yield key, "", value
    for state in states(trainer.replica_optimizer, "exact"):
        for name, value in state.tensors.items():
            yield state.kind, name, value


def ledger_of(trainer: Any) -> dict[str, tuple[int, int, float]]:
    """Return (calls, input bytes, sent bytes) of this rank by "axis level kind"."""
    ledger = trainer.replica_optimizer.collectives.ledger
    return {
        " ".join(entry): (calls, ledger.input_bytes[entry], ledger.sent[entry]) for entry, calls in ledger.calls.items()
    }


# ------------------------------------------------------------------------------------------------------------- runs

_ALONE = ["--parallelism.data_parallel_replicate_degree=1", "--parallelism.data_parallel_shard_degree=1"]
_SIMULATED = [*_ALONE, "--topology.simulate_replicas=4"]
# Simulated replicas refuse these options of SCAPE.
_NOT_SIMULATED = ("update=sharded", "offload=", "weights_dtype=")
_TAGC = ["--sync.method=tagc", "--sync.tagc.density=0.1", "--optimizer.name=AdamW"]
_FOUR_REAL = ("nodes", "2x2")


def runs() -> dict[str, Record]:
    """Return world size, arguments and the step with a NaN gradient (or None) of every run, by name."""
    from tests.training import LAYOUTS, METHODS, RECIPE, TWELVE

    methods = {**METHODS, "tagc": _TAGC}
    found: dict[str, Record] = {}

    def add(name: str, world: int, arguments: list[str], nan_at: int | None = None) -> None:
        found[name] = {"world": world, "arguments": [*RECIPE, *arguments, TWELVE], "nan_at": nan_at}

    for layout, where in LAYOUTS.items():
        for method, options in methods.items():
            if any("simulate_replicas" in option for option in options):
                continue
            add(f"{layout}/{method}", 4 if layout in _FOUR_REAL else 2, [*options, *where])
    for method, options in methods.items():
        if not any(part in option for option in options for part in _NOT_SIMULATED):
            add(f"simulated/{method}", 1, [*options, *_SIMULATED])
    # More than four replicas: the owner of a slice keeps its error.
    one_bit = "--sync.sparta.code=1bit"  # the default then
    add("simulated/sparta-6", 1, [*METHODS["sparta"], one_bit, *_ALONE, "--topology.simulate_replicas=6"])
    return found


# ------------------------------------------------------------------------------------------------------- one rank


def train(folder: str, run: Record) -> Record:
    """Train in this rank and return its part of the record."""
    import torch
    import torch.distributed as dist

    trainer = make_trainer([*run["arguments"], f"--job.dump_folder={folder}"])
    losses: list[str] = []
    norms: list[str] = []
    log, step_optimizers = trainer.metrics_processor.log, trainer.optimizers.step

    def record_step(step: int, loss: float, max_loss: float, norm: float, *more: Any, **named: Any) -> None:
        losses.append(float(loss).hex())
        norms.append(float(norm).hex())
        log(step, loss, max_loss, norm, *more, **named)

    def step_with_nan(*args: Any, **kwargs: Any) -> None:
        gradient = next(trainer.model_parts[0].parameters()).grad
        if trainer.step == run["nan_at"] and gradient is not None and dist.get_rank() == dist.get_world_size() - 1:
            _local(gradient).view(-1)[0] = float("nan")
        step_optimizers(*args, **kwargs)

    trainer.metrics_processor.log, trainer.optimizers.step = record_step, step_with_nan
    real_sleep, time.sleep = time.sleep, lambda _: None
    try:
        trainer.train()
    finally:
        time.sleep = real_sleep
    finish_previous_step(trainer)
    ledger = {key: [calls, size, float(sent).hex()] for key, (calls, size, sent) in ledger_of(trainer).items()}
    weights = {name: _digest(parameter) for name, parameter in trainer.model_parts[0].named_parameters()}
    states: dict[str, str] = {}
    for module in trainer.model_parts[0].modules():
        if hasattr(module, "reshard"):  # the validation's forward pass leaves the root's parameters gathered
            module.reshard()
    for kind, name, value in states_of(trainer):
        if isinstance(value, torch.Tensor) or hasattr(value, "to_local"):
            key = f"{kind}/{name}" if name else kind
            assert key not in states, key
            states[key] = _digest(value)
    found = {"losses": losses, "norms": norms, "skipped": skipped_steps(trainer)}
    trainer.close()
    return {**found, "ledger": ledger, "weights": weights, "states": states}


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _digest(tensor: Any) -> str:
    """Return dtype, number of entries and SHA-256 of this rank's values. Shapes do not count."""
    import torch

    values = _local(tensor).detach()
    if type(values) is not torch.Tensor:  # BF16 weights with a scale, or a parameter: their FP32 values
        values = values * 1.0
    values = values.cpu().clone(memory_format=torch.contiguous_format).view(-1)
    data = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
    return f"{str(values.dtype).removeprefix('torch.')}[{values.numel()}] {hashlib.sha256(data).hexdigest()}"


# ------------------------------------------------------------------------------------------------- both commands


def record_of(run: Record) -> Record:
    """Train the run in new processes and return its record."""
    from tests import reference
    from tests.pool import Pool

    with tempfile.TemporaryDirectory() as folder:
        ranks = Pool(run["world"])(reference.train, folder, run, timeout=600)
        summary = json.loads(Path(folder, "summary.json").read_text())
    of_summary = {
        key: {name: float(value).hex() for name, value in summary[key].items()}
        for key in ("bytes_sent_per_step_and_rank", "shard_axis_bytes_per_step_and_rank", "messages_per_step")
    }
    loss = summary["validation_loss"]
    of_summary["validation_loss"] = {"": float("nan" if loss is None else loss).hex()}
    return {**run, "summary": of_summary, "ranks": ranks}


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{name.replace('/', '-')}.json"


def record(folder: Path, only: str, jobs: int) -> int:
    """Write the records that do not exist yet. Return the number of runs that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {name: run for name, run in runs().items() if re.search(only, name)}
    missing = {name: run for name, run in chosen.items() if not file_of(folder, name).exists()}
    failed = 0
    for name, outcome in _each(missing, record_of, jobs):
        if isinstance(outcome, Exception):
            failed += 1
            print(f"{name}: failed: {outcome}")
            continue
        path = file_of(folder, name)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"run": name, **outcome}, indent=1) + "\n")
        partial.replace(path)
    print(f"{len(missing) - failed} runs recorded, {len(chosen) - len(missing)} existed, {failed} failed")
    return failed


def compare(folder: Path, only: str, jobs: int) -> int:
    """Repeat the recorded runs and print what differs. Return the number of differences."""
    recorded = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    chosen = {one["run"]: one for one in recorded if re.search(only, one["run"])}
    if not chosen:
        raise SystemExit(f"{folder} contains no recorded run that matches {only!r}")
    repeated = {name: {key: one[key] for key in ("world", "arguments", "nan_at")} for name, one in chosen.items()}
    for run in repeated.values():
        run["arguments"] = list(map(with_present_key, run["arguments"]))
    total = 0
    for name, outcome in _each(repeated, record_of, jobs):
        found = [f"failed: {outcome}"] if isinstance(outcome, Exception) else differences(chosen[name], outcome)
        total += len(found)
        for line in found:
            print(f"{name}: {line}")
    print(f"{len(chosen)} runs compared, {total} differences")
    return total


def _each(
    chosen: dict[str, Record], function: Callable[[Record], Record], jobs: int
) -> Iterator[tuple[str, Record | Exception]]:
    """Yield (name, result or exception) of every run, in the order in which they end."""
    from tests import server

    server.address()  # once, before threads ask for it
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(function, run): name for name, run in chosen.items()}
        start = time.perf_counter()
        for number, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            if error is not None:
                traceback.print_exception(error)
            print(f"[{number}/{len(futures)}, {time.perf_counter() - start:.0f} s] {futures[future]}", file=sys.stderr)
            yield futures[future], error if error is not None else future.result()


def differences(old: Record, new: Record) -> list[str]:
    """Return a line for each quantity of a run that differs, with its first difference."""
    found: list[str] = []
    if len(old["ranks"]) != len(new["ranks"]):
        return [f"{len(new['ranks'])} ranks, recorded {len(old['ranks'])}"]
    for quantity in ("losses", "norms"):
        found += _first_step(quantity, old, new)
    for quantity in ("weights", "states", "ledger"):
        found += _first_key(quantity, [one[quantity] for one in old["ranks"]], [one[quantity] for one in new["ranks"]])
    for rank, (a, b) in enumerate(zip(old["ranks"], new["ranks"], strict=True)):
        if a["skipped"] != b["skipped"]:
            found.append(f"skipped steps: rank {rank}: {b['skipped']}, recorded {a['skipped']}")
            break
    for key in old["summary"]:
        found += _first_key(f"summary {key}", [old["summary"][key]], [new["summary"].get(key, {})])
    return found


def _first_step(quantity: str, old: Record, new: Record) -> list[str]:
    """Return a line for the first step, then rank, whose figures differ."""
    figures = [(a[quantity], b[quantity]) for a, b in zip(old["ranks"], new["ranks"], strict=True)]
    for step in range(max(len(row) for pair in figures for row in pair)):
        for rank, (a, b) in enumerate(figures):
            before, now = ((row[step] if step < len(row) else "nothing") for row in (a, b))
            if before != now:
                return [f"{quantity}: first at step {step + 1}, rank {rank}: {_shown(now)}, recorded {_shown(before)}"]
    return []


def _first_key(quantity: str, old: list[Record], new: list[Record]) -> list[str]:
    """Return a line for the first rank and key whose values differ, and how many do."""
    differing: list[str] = []
    for rank, (a, b) in enumerate(zip(old, new, strict=True)):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                before, now = _shown(a.get(key)), _shown(b.get(key))
                differing.append(f"rank {rank}, {key or 'value'}: {now}, recorded {before}")
    return [f"{quantity}: {len(differing)} differ, first {differing[0]}"] if differing else []


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, str) and re.fullmatch(r"-?(0x[0-9a-f.]+p[+-]\d+|nan|inf)", value):
        return f"{float.fromhex(value)!r}"
    return str(value)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reference", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", metavar="REGEX", help="runs whose names match, for example ^2x2/scape")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="runs at a time")
    options = parser.parse_args(arguments)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = {"record": record, "compare": compare}[options.command]
    return 1 if command(options.folder, options.only, options.jobs) else 0


if __name__ == "__main__":
    # Ranks import this module by its name, and unpickle its functions from there.
    from tests import reference

    sys.exit(reference.main(sys.argv[1:]))

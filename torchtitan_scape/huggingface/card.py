"""README.md of an exported model."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_scape.checkpoint import best
from torchtitan_scape.checkpoint.whole import CheckpointInfo
from torchtitan_scape.config.resolved import Resolved
from torchtitan_scape.core.files import parse_json


def card(resolved: Resolved, checkpoint: Path, saved: CheckpointInfo, options: Namespace, compared: str) -> str:
    """Return the text of the model card of an exported checkpoint. `compared` is the result of the check."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(resolved, checkpoint, saved, options))
    return (
        "---\nlibrary_name: transformers\n---\n\n"
        f"Trained with torchtitan-scape, and exported from `{checkpoint}`.\n\n| | |\n| --- | --- |\n{rows}\n"
        f"| check | {compared} |\n"
    )


def _rows(resolved: Resolved, checkpoint: Path, saved: CheckpointInfo, options: Namespace) -> Iterator[tuple[str, Any]]:
    config, run = resolved.config, Path(resolved.config.job.dump_folder)
    training, data = config.training, config.data
    is_in_run = checkpoint.parent == run / config.checkpoint.folder  # Otherwise the run's folder describes other steps.
    summary = _summary(run) if is_in_run else {}
    final = summary if summary.get("steps") == saved.step else {}
    yield "model", config.model.title
    yield "step", "not known" if saved.step is None else saved.step
    tokens = final.get("tokens") if saved.tokens is None else saved.tokens
    yield "tokens", "not known" if tokens is None else f"{tokens:,}"
    yield "data", training.dataset + (f", {training.dataset_path}" if training.dataset_path else "")
    yield "sequence", f"{training.seq_len} tokens; between documents: {data.border.replace('_', ' and ').upper()}"
    yield "recipe", ", ".join(resolved.files)
    yield "method", f"{config.sync.method}, {config.optimizer.name}"
    if (loss := final.get("training_loss")) is not None:
        yield "training loss", f"{loss:.4f}"
    if (loss := _validation_loss(run, saved.step) if is_in_run else None) is not None:
        yield "validation loss", f"{loss:.4f} on {config.validation.dataset}"
    yield "weights", f"{options.weights}, {options.dtype}"


def _summary(run: Path) -> dict[str, Any]:
    try:
        return dict(parse_json((run / "summary.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _validation_loss(run: Path, step: int | None) -> float | None:
    try:
        return next((loss for at, loss, _ in best.read(run)["losses"] if at == step), None)
    except (ValueError, TypeError):
        return None

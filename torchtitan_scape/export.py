"""Export of a checkpoint as a Hugging Face model folder: safetensors, config.json, tokenizer and a README.

    python -m torchtitan_scape.export --config outputs/embedded/resolved.toml --checkpoint latest --output DIR
    python -m torchtitan_scape.export import --config RECIPE --model DIR --output CHECKPOINT

The second command converts such a folder to a checkpoint of the model alone, from which checkpoint.initial_load_path
starts a run. Keys of the recipe may follow, as for the trainer. Both run in one process on a CPU. The output is either
complete or missing. If transformers is installed, its logits are compared with those of this project before the folder
is renamed to its final name.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan_scape.checkpoint import best
from torchtitan_scape.checkpoint.metadata import one_process
from torchtitan_scape.checkpoint.storage import CheckedWriter
from torchtitan_scape.checkpoint.whole import (
    CheckpointInfo,
    check_shapes,
    finished_steps,
    open_checkpoint,
    read_model,
)
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.config.parsing import parse, resolve
from torchtitan_scape.config.resolved import FILE, Resolved
from torchtitan_scape.core.command import install_command, one_line, parser_of
from torchtitan_scape.core.files import parse_json
from torchtitan_scape.huggingface.families import FAMILIES, check_same, read, resolve_tie
from torchtitan_scape.huggingface.folder import (
    CONFIG,
    DifferentError,
    atomic_folder,
    check_finite,
    check_logits,
    filled,
    read_folder,
    write_json,
    write_weights,
)
from torchtitan_scape.huggingface.tokenizer import tokenizer_of
from torchtitan_scape.trainer.specs import whole_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    parser = parser_of(module, doc)
    parser.add_argument(
        "--config",
        required=True,
        help='recipe, or several, "a.toml,b.toml"; best the resolved.toml in the run\'s folder',
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write; it must not be there")
    return parser


def _export_parser() -> argparse.ArgumentParser:
    parser = _parser("torchtitan_scape.export", __doc__)
    parser.add_argument(
        "--checkpoint",
        default="latest",
        help='its folder; "latest" or "best" (lowest validation loss) of the run\'s (latest)',
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the tensors written (float32)")
    parser.add_argument(
        "--weights",
        choices=("model", "master"),
        default="model",
        help="of a run with BF16 weights: these, which were validated, or the FP32 masters they are made of (model)",
    )
    parser.add_argument("--no-check", action="store_true", help="do not compare with what transformers makes of it")
    return parser


def _import_parser() -> argparse.ArgumentParser:
    parser = _parser("torchtitan_scape.export import", "A checkpoint of a model of Hugging Face's.")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and safetensors")
    return parser


def choose(which: str, config: JobConfig) -> Path:
    """Return the folder of a checkpoint: `which` itself, or the "latest" or "best" one of the recipe's run."""
    run = Path(config.job.dump_folder)
    folder = run / config.checkpoint.folder
    if which == "latest":
        steps = finished_steps(folder)
        if not steps:
            raise ValueError(
                f"--checkpoint latest: {folder} has no complete checkpoint; train with "
                "--checkpoint.enable, or give the resolved.toml of a run that wrote elsewhere as --config"
            )
        return folder / f"step-{steps[-1]}"
    if which == "best":
        step = best.read(run)["checkpoint_step"]
        if step is None:
            raise ValueError(f"--checkpoint best: {run / best.FILE} has no validated step that was saved")
        return folder / f"step-{step}"
    return Path(which)


def export(options: argparse.Namespace, keys: list[str]) -> None:
    """Export a checkpoint, compare it with transformers, and print a summary. `keys` are further keys of the recipe.

    Raises ValueError for invalid input, and DifferentError if the comparison failed.
    """
    resolved = resolve(["--job.config_file", options.config, *keys])
    config, dtype = resolved.config, DTYPES[options.dtype]
    with atomic_folder(options.output) as part:
        path = choose(options.checkpoint, config)
        saved = open_checkpoint(path)
        spec, args, model = whole_model(config)
        values = read_model(path, _shapes(model), options.weights == "master")
        check_finite(values, str(path))
        _check_same_run(saved, path, config)
        tokenizer = tokenizer_of(config, config.training.seq_len)
        theirs = spec.state_dict_adapter(args, config.model.hf_assets_path).to_hf(_trained(values, config))
        ids = {"bos_token_id": tokenizer.start, "eos_token_id": tokenizer.eos}
        # Versions before 5 read the second name only.
        written = FAMILIES[config.model.name](args, theirs) | ids
        write_json(part / CONFIG, written | {"dtype": options.dtype, "torch_dtype": options.dtype})
        write_json(part / "generation_config.json", ids)
        tokenizer.write(part)
        files = write_weights(part, theirs, dtype)
        count = sum(value.numel() for value in theirs.values())
        del theirs
        said = "not compared with transformers, as --no-check asks"
        if not options.no_check:
            said = "not compared: transformers is not installed (it is in the extra export-check)"
        if not options.no_check and find_spec("transformers"):
            if dtype != torch.float32:
                values = {name: value.to(dtype).float() for name, value in values.items()}
            said = check_logits(
                part, filled(spec.model_cls, args, values), written["vocab_size"], config.training.seq_len
            )
            tokenizer.check(part)
        (part / "README.md").write_text(card(resolved, path, saved, options, said), encoding="utf-8")
    print(f"{options.output}: {path} with {count:,} parameters in {options.dtype}, {len(files)} file(s) of weights")
    print(f"weights: {options.weights}; {said}")


def card(
    resolved: Resolved, checkpoint: Path, saved: CheckpointInfo, options: argparse.Namespace, compared: str
) -> str:
    """Return the text of the model card of an exported checkpoint. `compared` is the result of the check."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(resolved, checkpoint, saved, options))
    return (
        "---\nlibrary_name: transformers\n---\n\n"
        f"Trained with torchtitan-scape, and exported from `{checkpoint}`.\n\n| | |\n| --- | --- |\n{rows}\n"
        f"| check | {compared} |\n"
    )


def _rows(
    resolved: Resolved, checkpoint: Path, saved: CheckpointInfo, options: argparse.Namespace
) -> Iterator[tuple[str, Any]]:
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


def _shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _trained(values: dict[str, Tensor], config: JobConfig) -> dict[str, Tensor]:
    """Return the values without learned positions beyond the training's sequence length."""
    name = "pos_embeddings.weight"
    if name not in values:
        return values
    return values | {name: values[name][: config.training.seq_len].clone()}  # safetensors does not accept views.


def _check_same_run(saved: CheckpointInfo, path: Path, config: JobConfig) -> None:
    """Raise ValueError if the recipe differs from the checkpoint's run in something that shapes do not determine.

    A checkpoint of the model alone has no record; resolved.toml in the folder of its run has the same values.
    """
    record = saved.record
    if record is None:
        try:
            record = _of_run(parse(["--job.config_file", str(path.absolute().parent.parent / FILE)]))
        except (ValueError, OSError):  # There is none, or an earlier version wrote it.
            return
    for key, value in _of_run(config).items():
        if (there := record.get(key, value)) != value:
            raise ValueError(f"the checkpoint's run had the {key} {there!r}, the recipe has {value!r}; give that run's")


def _of_run(config: JobConfig) -> dict[str, Any]:
    return {"model": config.model.title, "border": config.data.border, "seq_len": config.training.seq_len}


def import_model(options: argparse.Namespace, keys: list[str]) -> None:
    """Write a checkpoint with the model alone, FP32. Raises ValueError for a model other than the recipe's."""
    if not find_spec("transformers"):
        raise ValueError(f"transformers is not installed, which reads config.json: {install_command('export-check')}")
    config = resolve(["--job.config_file", options.config, *keys]).config
    spec, args, model = whole_model(config)
    with atomic_folder(options.output) as part:
        described, theirs = read_folder(options.model)
        check_finite(theirs, str(options.model))
        adapter = spec.state_dict_adapter(args, None)
        try:
            ours = FAMILIES[config.model.name](args, adapter.to_hf(dict(model.named_parameters())))
            described = read({"model_type": ours["model_type"]} | described)
            check_same(ours, described)
            theirs, note = resolve_tie(described, theirs)
            values = adapter.from_hf(theirs)
        except (KeyError, ValueError) as error:
            what = f"it has {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{options.model} is not {config.model.title}: {what}") from None
        check_shapes({name: tuple(value.shape) for name, value in values.items()}, _shapes(model), str(options.model))
        values = {name: value.float().contiguous() for name, value in values.items()}
        with one_process():
            dcp.save(values, storage_writer=CheckedWriter(part), checkpoint_id=part, no_dist=True)
    if note:
        print(note)
    print(f"{options.output} holds the model of {options.model}; a run of {options.config} starts from it with")
    given = shlex.join([*keys, "--checkpoint.enable", f"--checkpoint.initial_load_path={options.output}"])
    print(f"  {given} --job.dump_folder=NEW_FOLDER")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    logging.disable(logging.WARNING)  # TorchTitan misses an index beside the tokenizer
    try:
        if given[:1] == ["import"]:
            import_model(*_import_parser().parse_known_args(given[1:]))
        else:
            export(*_export_parser().parse_known_args(given))
    except (ValueError, OSError) as error:
        print(f"export: {one_line(error)}", file=sys.stderr)
        return 2
    except DifferentError as error:
        print(f"export: nothing was written: {one_line(error)}", file=sys.stderr)
        return 3
    finally:
        logging.disable(logging.NOTSET)
    return 0


if __name__ == "__main__":
    sys.exit(main())

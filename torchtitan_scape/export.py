"""A checkpoint as a folder that Hugging Face's transformers load: weights, config, tokenizer, and what it is.

    python -m torchtitan_scape.export --config train_configs/embedded.toml --output DIR
    python -m torchtitan_scape.export --config RECIPE --checkpoint best --dtype bfloat16 --output DIR

In one process, without a process group. Keys of the recipe may follow, as for the trainer: those that the run was
started with, such as --job.dump_folder. The folder appears when all of it is written, and compared: transformers'
logits are those of this project's model.
"""

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_scape import device

device.prepare()  # before the first import of torchtitan

from tokenizers.processors import TemplateProcessing  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec  # noqa: E402

from torchtitan_scape.checkpoint.folder import names_in, read_record, steps_in  # noqa: E402
from torchtitan_scape.checkpoint.metadata import RUN_METADATA  # noqa: E402
from torchtitan_scape.checkpoint.safe_load import CheckedReader  # noqa: E402
from torchtitan_scape.checkpoint.state import load_into  # noqa: E402
from torchtitan_scape.checkpoint.storage import find_damage, is_finished  # noqa: E402
from torchtitan_scape.config.job_config import JobConfig  # noqa: E402
from torchtitan_scape.config.parsing import parse  # noqa: E402
from torchtitan_scape.data.borders import border_ids  # noqa: E402
from torchtitan_scape.data.datasets import build_tokenizer  # noqa: E402
from torchtitan_scape.models.huggingface import CONFIGS  # noqa: E402
from torchtitan_scape.report.best import FILE as BEST  # noqa: E402
from torchtitan_scape.specs import register  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASTERS = "optimizer.master."
COMPARED = (4, 128)  # sequences, and tokens of each at most
CLOSE = 1e-5  # of FP32 logits, the norm of the difference by their norm


@dataclass(frozen=True)
class Source:
    """A checkpoint of the config's model.

    weights: whole tensors by name, FP32. record: what the run said of itself; {} where the model alone was saved.
    """

    config: JobConfig
    path: Path
    spec: TrainSpec
    args: Any
    weights: dict[str, Tensor]
    record: dict[str, Any]

    def model(self, dtype: torch.dtype) -> nn.Module:
        """This project's. Parameters are cast, and buffers are not: Llama's rotations are complex."""
        model: nn.Module = self.spec.model_cls(self.args)
        model.load_state_dict(self.weights)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model.eval()


def find(config: JobConfig, checkpoint: str) -> Path:
    """The folder of `checkpoint`: a folder, "latest" or "best" of the config's run. Raises ValueError."""
    run = Path(config.job.dump_folder)
    folder = run / config.checkpoint.folder
    if checkpoint == "latest":
        steps = [step for step in steps_in(str(folder)) if is_finished(folder / f"step-{step}")]
        if not steps:
            raise ValueError(
                f"{folder} has no finished checkpoint; name a folder with --checkpoint, or --job.dump_folder"
            )
        path = folder / f"step-{steps[-1]}"
    elif checkpoint == "best":
        try:
            step = json.loads((run / BEST).read_text())["checkpoint_step"]
        except (OSError, ValueError, KeyError):
            step = None
        if step is None:
            raise ValueError(f"{run / BEST} names no checkpoint; take --checkpoint latest, or a folder")
        path = folder / f"step-{step}"
    else:
        path = Path(checkpoint)
    if (damage := find_damage(path)) is not None:
        raise ValueError(f"{damage}; name another checkpoint with --checkpoint")
    return path


def read(config: JobConfig, path: Path, masters: bool = False) -> Source:
    """masters: FP32 numbers of which the run's weights were made, where it kept these in fewer bits.

    Raises ValueError where the checkpoint is of another model, with the first shape that differs, or has no masters.
    """
    register(config, with_data=False)
    spec = get_train_spec(config.model.name)
    args = spec.model_args[config.model.flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in spec.model_cls(args).named_parameters()}
    saved = CheckedReader(path).read_metadata().state_dict_metadata
    for name, shape in shapes.items():
        there = tuple(saved[name].size) if name in saved else None
        if there != shape:
            raise ValueError(
                f"{path} is of another model than {config.model.name} {config.model.flavor}: {name} is "
                f"{there or 'not there'}, and {shape} is expected; set --model.name and --model.flavor"
            )
    if masters and not any(MASTERS + name in saved for name in shapes):
        raise ValueError(f"{path} has no masters beside its weights; leave --weights out")
    keys = {name: MASTERS + name if masters and MASTERS + name in saved else name for name in shapes}
    state = {key: torch.empty(shapes[name]) for name, key in keys.items()}
    load_into(str(path), state)
    record = read_record(str(path)) if RUN_METADATA in names_in(str(path)) else {}
    return Source(config, path, spec, args, {name: state[key] for name, key in keys.items()}, record)


def write(source: Source, folder: Path, dtype: str) -> None:
    """All files of an export into a new folder."""
    from huggingface_hub import save_torch_state_dict

    config = source.config
    tokenizer = build_tokenizer(config)
    adapter = source.spec.state_dict_adapter(source.args, config.model.hf_assets_path)  # type: ignore[misc]
    theirs = {name: value.to(DTYPES[dtype]) for name, value in adapter.to_hf(source.weights).items()}
    shapes = {name: tuple(value.shape) for name, value in source.weights.items()}
    entries = getattr(adapter, "entries", source.args.vocab_size)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    told = CONFIGS[config.model.name](source.args, shapes, entries, config.training.seq_len)
    # transformers 4 reads the second, 5 the first.
    told |= {**ids, "dtype": dtype, "torch_dtype": dtype, "use_cache": True}
    folder.mkdir(parents=True)
    save_torch_state_dict(theirs, folder, max_shard_size="5GB")
    _write_json(folder / "config.json", told)
    for path in folder.glob("*.safetensors"):  # which are their writer's alone
        path.chmod((folder / "config.json").stat().st_mode)
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(tokenizer, config, folder)
    (folder / "README.md").write_text(_card(source, dtype))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _write_tokenizer(tokenizer: BaseTokenizer, config: JobConfig, folder: Path) -> None:
    """It puts BOS in front of a text exactly where training did."""
    own = tokenizer.tokenizer
    if wanted := bool(border_ids(tokenizer, config.data.border)[0]):
        before = [(tokenizer.bos_token, tokenizer.bos_id)]
        first = f"{tokenizer.bos_token} "
    else:
        before, first = [], ""
    if wanted != (tokenizer.bos_id is not None and tokenizer.bos_id in own.encode("").ids):
        own.post_processor = TemplateProcessing(
            single=f"{first}$A", pair=f"{first}$A {first}$B:1", special_tokens=before
        )
    own.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    told |= {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    _write_json(folder / "tokenizer_config.json", told | {"model_max_length": config.training.seq_len})


def _card(source: Source, dtype: str) -> str:
    config, record = source.config, source.record
    count = sum(value.numel() for value in source.weights.values())
    rows = {
        "model": f"{config.model.name} {config.model.flavor}, {count:,} parameters in {dtype}",
        "checkpoint": source.path.name,
        "trained on": f"{config.training.dataset}, sequences of {config.training.seq_len} tokens",
        "between documents": f"[data] border = {config.data.border!r}",
    }
    rows |= {key: str(record[key]) for key in ("method", "optimizer", "lr", "replicas") if key in record}
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join(["# An export of torchtitan-scape", "", "| | |", "| --- | --- |", *lines, ""])


@torch.no_grad()
def compare(source: Source, folder: Path, dtype: str) -> str:
    """Loads the folder with transformers; what was found, for a person.

    FP32: logits differ by rounding. BF16: they are no farther from ours in BF16 than these are from ours in FP32.
    Raises ValueError where that is not so, ImportError without transformers.
    """
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    shape = COMPARED[0], min(COMPARED[1], source.config.training.seq_len)
    entries = int(theirs.config.vocab_size)
    tokens = torch.randint(entries, shape, generator=torch.Generator().manual_seed(0))
    found, exact = theirs(tokens).logits.float(), source.model(torch.float32)(tokens)[..., :entries]
    ours, bound = exact, CLOSE
    if dtype != "float32":
        ours = source.model(DTYPES[dtype])(tokens)[..., :entries].float()
        bound = float((ours - exact).norm() / exact.norm())
    distance = float((found - ours).norm() / ours.norm())
    same = float((found.argmax(-1) == ours.argmax(-1)).float().mean())
    if not distance <= bound:
        raise ValueError(
            f"transformers computes other logits from {folder}: they differ by {distance:.2g}, and {bound:.2g} is "
            "rounding; it is left there, to be looked at"
        )
    return f"transformers' logits differ by {distance:.2g} ({bound:.2g} is rounding), first choices agree on {same:.2%}"


def export(source: Source, output: Path, dtype: str = "float32", check: bool = True) -> str:
    """Writes `output`, a folder that is not there yet, or none of it; what was found, for a person.

    Raises ValueError.
    """
    if output.exists():
        raise ValueError(f"--output {output} is there already; name another folder")
    part = output.with_name(f"{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    write(source, part, dtype)
    told = "not compared"
    if check:
        try:
            told = compare(source, part, dtype)
        except ImportError:
            told = "not compared: transformers is not installed (pip install -e '.[export-check]')"
    os.replace(part, output)
    return f"{output}: {source.path} in {dtype}; {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torchtitan_scape.export", description="Writes a checkpoint as a folder that transformers load"
    )
    parser.add_argument("--config", required=True, help="the recipe of the run; keys of it may follow")
    parser.add_argument("--checkpoint", default="latest", help='a folder, or "latest" or "best" of the run (latest)')
    parser.add_argument("--output", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--weights", choices=("model", "master"), default="model", help="what BF16 weights are made of")
    parser.add_argument("--no-check", action="store_true", help="does not compare logits with transformers")
    options, keys = parser.parse_known_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
    try:
        config = parse([f"--job.config_file={options.config}", *keys])
        source = read(config, find(config, options.checkpoint), options.weights == "master")
        print(export(source, options.output, options.dtype, not options.no_check))
    except (ValueError, OSError) as error:
        print(f"torchtitan_scape.export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

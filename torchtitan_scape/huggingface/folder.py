"""Model folders: tensors as safetensors and text files, written atomically, and compared with transformers' model."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from torchtitan_scape.core.files import parse_json, refuse_pointers, require_plain_name

MAX_FILE_BYTES = 5_000_000_000
WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# Exceptions for damaged files, or for JSON of another structure.
_STRUCTURE = (KeyError, TypeError, AttributeError, RecursionError)
_DAMAGES = (SafetensorError, ValueError, *_STRUCTURE)
MAX_DISTANCE = 1e-5  # FP32: the order of sums explains 1e-6; the rest is margin.
_TOKENS = 512


class DifferentError(Exception):
    """The folder contains another model than the trained one."""


def load_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Return the model of a folder, for inference, in this dtype; "auto" for that of config.json.

    Raises DifferentError if tensors are missing, unexpected or of another shape: transformers would draw them randomly.
    """
    import transformers

    try:
        with quiet():
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[key]:
            raise DifferentError(
                f"transformers {transformers.__version__} finds {key.replace('_', ' ')}: {loaded[key]}"
            )
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and advice of transformers."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def atomic_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `output` on success and deleted on failure.

    Raises:
        ValueError: `output` exists already, or another process writes it.
    """
    if output.exists():
        raise ValueError(f"--output {output} exists already; give another, or delete it")
    part = output.with_name(f"{output.name}.part")
    try:
        part.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{part} exists: another process writes it; if that was killed, delete the folder") from None
    try:
        yield part
        part.rename(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
    """Write the tensors in this dtype, in files of at most `MAX_FILE_BYTES` (but at least one tensor), and an index if
    there are several files. Return the names of the files.
    """
    converted = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_torch_state_dict(converted, folder, max_shard_size=MAX_FILE_BYTES)
    return sorted(path.name for path in folder.glob("*.safetensors"))


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise ValueError with the first tensor that contains NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and (wrong := int((~tensor.float().isfinite()).sum())):
            raise ValueError(
                f"the tensor {name} in {where} has {wrong:,} of {tensor.numel():,} entries that are NaN or infinite; "
                "take the model of an earlier step, or download the file again"
            )


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and all tensors. Raises ValueError if a file is missing or damaged."""
    try:
        config = parse_json((folder / CONFIG).read_bytes())
        if not isinstance(config, dict):
            raise TypeError(f"{CONFIG} is not a table")
        files = [WEIGHTS]
        if (folder / INDEX).is_file():
            files = sorted(set(parse_json((folder / INDEX).read_bytes())["weight_map"].values()))
        tensors: dict[str, Tensor] = {}
        for file in files:
            require_plain_name(file, folder / INDEX)
            with safe_open(folder / file, framework="pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        missing = error.filename or files[0]
        raise ValueError(f"{folder} is not a Hugging Face model: {missing} is missing") from None
    except _DAMAGES as error:
        refuse_pointers(folder / CONFIG, *folder.glob("*.safetensors*"))
        raise ValueError(f"{folder} is damaged: {type(error).__name__}: {error}") from None
    return config, tensors


def filled(model_cls: type[nn.Module], args: Any, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a model with these parameters, without copying them, and with causal attention, which needs no masks."""
    if hasattr(args, "attn_type"):
        args = replace(args, attn_type="sdpa", attn_mask_type="causal")
    with torch.device("meta"):
        model = model_cls(args)
    model.load_state_dict(dict(values), assign=True)
    precompute = getattr(model, "_precompute_freqs_cis", None)
    if precompute is not None:  # A buffer of Llama that is not in checkpoints.
        model.freqs_cis = precompute()
    return model.eval()


def distance(logits: Tensor, reference: Tensor) -> float:
    """Return the largest relative L2 distance of the logits (batch, sequence, entries) of one position."""
    return float(((logits - reference).norm(dim=-1) / logits.norm(dim=-1)).max())


@torch.no_grad()
def check_logits(folder: Path, model: nn.Module, entries: int, length: int) -> str:
    """Compare FP32 logits of a model with those of the folder, on random tokens below `entries`, and return a summary.

    Raises DifferentError if they differ by more than `MAX_DISTANCE`, or if the folder's tensors do not match
    transformers' model.
    """
    import transformers

    loaded = load_model(folder, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(entries, (2, min(length, _TOKENS)), generator=generator, device="cpu")
    error = distance(model(tokens), loaded(tokens).logits)
    if not error <= MAX_DISTANCE:  # Also true for NaN.
        raise DifferentError(
            f"logits of transformers {transformers.__version__} differ from this project's by {error:.1e} "
            f"(at most {MAX_DISTANCE:.0e})"
        )
    return f"logits of transformers {transformers.__version__} agree to {error:.1e}"

"""Comparison of an exported folder, loaded by transformers, with this project's model and tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_scape.huggingface.loading import DifferentError, load_model, quiet
from torchtitan_scape.huggingface.tokenizer import Tokenizer

MAX_DISTANCE = 1e-5  # FP32: the order of sums explains 1e-6; the rest is margin.
_TOKENS = 512
_TEXT = "It's 3.14,\n\tdef f(x):  # two  spaces\n        return 'é'"


def filled(model_cls: type[nn.Module], args: Any, values: Mapping[str, Tensor]) -> nn.Module:
    """Return a model with these parameters, without copying them."""
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
    """Compare FP32 logits on random tokens. Return a summary.

    Args:
        folder: The exported folder.
        model: Model with the folder's weights, in FP32.
        entries: Logits to compare; further entries of the model are ignored.
        length: Maximum sequence length.

    Raises:
        DifferentError: Logits differ by more than `MAX_DISTANCE`, or the folder's tensors do not match transformers'
            model.
    """
    import transformers

    loaded = load_model(folder, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(entries, (2, min(length, _TOKENS)), generator=generator, device="cpu")
    error = distance(model(tokens)[..., :entries], loaded(tokens).logits)
    if not error <= MAX_DISTANCE:  # Also true for NaN.
        raise DifferentError(
            f"logits of transformers {transformers.__version__} differ from this project's by {error:.1e} "
            f"(at most {MAX_DISTANCE:.0e})"
        )
    return f"logits of transformers {transformers.__version__} agree to {error:.1e}"


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Check that transformers encodes a text as in training.

    Raises:
        DifferentError: The tokens differ.
    """
    import transformers

    with quiet():
        tokens = transformers.AutoTokenizer.from_pretrained(folder)(_TEXT)["input_ids"]
    expected = tokenizer.encode(_TEXT)
    if tokens != expected:
        raise DifferentError(f"the tokenizer of transformers encodes {_TEXT!r} as {tokens}, not as {expected}")

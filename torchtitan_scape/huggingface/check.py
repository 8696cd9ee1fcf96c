"""Whether transformers makes of a folder what this project makes of the same weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_scape.huggingface.loading import DifferentError, load_model, quiet
from torchtitan_scape.huggingface.tokenizer import Tokenizer

LARGEST = 1e-5  # of FP32: what the order of sums explains, 1e-6, and room
_TOKENS = 512
_TEXT = "It's 3.14,\n\tdef f(x):  # two  spaces\n        return 'é'"


def filled(model_cls: type[nn.Module], args: Any, values: Mapping[str, Tensor]) -> nn.Module:
    """The model with these parameters, not copied."""
    with torch.device("meta"):
        model = model_cls(args)
    model.load_state_dict(dict(values), assign=True)
    turns = getattr(model, "_precompute_freqs_cis", None)
    if turns is not None:  # a buffer of Llama's that no checkpoint has
        model.freqs_cis = turns()
    return model.eval()


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest relative distance (L2) of one position's logits (batch, sequence, entries)."""
    return float(((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).max())


@torch.no_grad()
def check_logits(folder: Path, model: nn.Module, entries: int, length: int) -> str:
    """Compares logits in FP32 on random tokens; returns what there is to say.

    Args:
        model: with the weights as the folder has them, in FP32.
        entries: of their logits; what the model has beyond is not compared.
        length: of the longest sequence.

    Raises:
        DifferentError: logits differ by more than `LARGEST`, or the folder has other tensors than transformers wants.
    """
    import transformers

    theirs = load_model(folder, torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(entries, (2, min(length, _TOKENS)), generator=generator)
    apart = distance(model(tokens)[..., :entries], theirs(tokens).logits)
    if not apart <= LARGEST:  # a NaN is not
        raise DifferentError(
            f"logits of transformers {transformers.__version__} differ from ours by {apart:.1e} (at most {LARGEST:.0e})"
        )
    return f"logits of transformers {transformers.__version__} are ours, to {apart:.1e}"


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raises DifferentError where a text becomes other tokens than in the training."""
    import transformers

    with quiet():
        found = transformers.AutoTokenizer.from_pretrained(folder)(_TEXT)["input_ids"]
    expected = tokenizer.encode(_TEXT)
    if found != expected:
        raise DifferentError(f"the tokenizer of transformers encodes {_TEXT!r} as {found}, not as {expected}")

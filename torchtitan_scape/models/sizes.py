"""Arguments of a model with the sizes of [model.sizes]."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtitan_scape.config.model_sizes import CUSTOM, Model
from torchtitan_scape.models.gpt2 import GPT2Args
from torchtitan_scape.titan.models import BaseModelArgs, TransformerModelArgs

# Keys that the flavor "custom" needs; the others have defaults.
_NEEDED = ("dim", "n_layers", "n_heads", "vocab_size")


def with_sizes(args: BaseModelArgs, model: Model) -> BaseModelArgs:
    """Return the arguments of the flavor with the sizes that [model.sizes] sets.

    Raises:
        ValueError: The family does not have a size, sizes do not divide each other, or "custom" needs more.
    """
    given = model.sizes.given()
    if model.flavor == CUSTOM and (missing := [key for key in _NEEDED if key not in given]):
        raise ValueError(f"[model] flavor = 'custom' needs [model.sizes] {', '.join(missing)}; set them to the model's")
    if not given:
        return args
    if isinstance(args, GPT2Args):
        _refuse(given, ("n_kv_heads", "ffn_dim", "rope_theta"), model)
        if positions := given.pop("positions", 0):
            given["max_seq_len"] = positions
        _check_divides("n_heads", given.get("n_heads", args.n_heads), "dim", given.get("dim", args.dim), model)
        return replace(args, **given)
    assert isinstance(args, TransformerModelArgs)
    _refuse(given, ("positions",), model)
    ffn = given.pop("ffn_dim", 0)
    sized = replace(args, **given)
    _check_divides("n_heads", sized.n_heads, "dim", sized.dim, model)
    if sized.n_kv_heads is not None:
        _check_divides("n_kv_heads", sized.n_kv_heads, "n_heads", sized.n_heads, model)
    if sized.dim // sized.n_heads % 2:
        raise ValueError(
            f"[model.sizes] dim = {sized.dim} with n_heads = {sized.n_heads}: a head has {sized.dim // sized.n_heads} "
            "entries, and rotary positions need an even number; set n_heads so that dim / n_heads is even"
        )
    # TorchTitan takes 8/3 of dim, times a factor, and rounds up to a multiple. This rounds up to `ffn` itself.
    return replace(sized, multiple_of=ffn, ffn_dim_multiplier=ffn / int(8 * sized.dim / 3)) if ffn else sized


def _refuse(given: Mapping[str, Any], keys: tuple[str, ...], model: Model) -> None:
    for key in keys:
        if key in given:
            raise ValueError(f"[model.sizes] {key} = {given[key]:g}: {model.name!r} has no such size; delete the key")


def _check_divides(key: str, value: int, of: str, whole: int, model: Model) -> None:
    if whole % value:
        largest = max(n for n in range(1, min(value, whole) + 1) if whole % n == 0)
        raise ValueError(
            f"[model.sizes] {key} = {value} is no divisor of {of} = {whole} ({model.title}); set {key} = {largest}, "
            f"or another {of}"
        )

"""GPT-2's parameters under the names and in the shapes of Hugging Face's `GPT2LMHeadModel`, and back."""

import re
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.data.manifest import tokenizer_entries
from torchtitan_scape.models.gpt2 import GPT2Args
from torchtitan_scape.titan.data import HuggingFaceTokenizer
from torchtitan_scape.titan.models import StateDictAdapter

_PREFIX = "transformer."
_OUTER = {
    "tok_embeddings.weight": "wte.weight",
    "pos_embeddings.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
# Of a block; `wq`, `wk`, `wv` besides.
_INNER = {
    "attention_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attention.wo": "attn.c_proj",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
_JOINED, _PARTS = "attn.c_attn", ("attention.wq", "attention.wk", "attention.wv")
_TABLE, _PLACES, _HEAD = "wte.weight", "wpe.weight", "lm_head.weight"
# Of the causal mask, which older versions of transformers have saved.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias$")
_OURS, _THEIRS = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$"), re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)$")


class GPT2StateDictAdapter(StateDictAdapter):
    """Their matrices have the inputs first (`Conv1D`), and one has queries, keys and values together. The head is tied,
    and has no entry. Rows of the table of tokens behind the tokenizer's last are not theirs.

    Plain tensors, or DTensors of any layout.

    Args:
        hf_assets_path: a folder with the tokenizer; without one, or without a tokenizer in it, no row is cut.
    """

    def __init__(self, model_args: GPT2Args, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args

    @cached_property
    def entries(self) -> int:
        """Rows of their table."""
        rows = self.model_args.vocab_size
        if not self.hf_assets_path:
            return rows
        try:
            return min(rows, tokenizer_entries(HuggingFaceTokenizer(self.hf_assets_path)))
        except FileNotFoundError:
            return rows

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Their entries, contiguous. Raises KeyError for a name that is no parameter of GPT-2."""
        found: dict[str, Any] = {}
        for name, value in state_dict.items():
            if name in _OUTER:
                if _OUTER[name] == _TABLE and self.entries < value.shape[0]:
                    value = value[: self.entries].clone()  # safetensors takes no part of another tensor
                found[_PREFIX + _OUTER[name]] = value.contiguous()
                continue
            layer, module, kind = _split(_OURS, name)
            if module not in _PARTS:
                found[f"{_PREFIX}h.{layer}.{_INNER[module]}.{kind}"] = _turned(value)
            elif module == _PARTS[0]:
                parts = [_turned(state_dict[f"layers.{layer}.{part}.{kind}"]) for part in _PARTS]
                found[f"{_PREFIX}h.{layer}.{_JOINED}.{kind}"] = torch.cat(parts, dim=-1)
        return found

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our entries. Keys with or without "transformer." are taken, masks are left out.

        Rows of the table of tokens that are missing become the mean of the others. The mean's logit is the mean of the
        logits, so that each such row adds to the softmax's denominator at most what a row has on average; of 47 rows
        beside 50257 the loss is larger by 0.001 at most.

        Positions that are missing become zeros: an export has those alone that were trained.

        Raises ValueError for a head that is not tied, and KeyError for other unknown names.
        """
        theirs = {name.removeprefix(_PREFIX): value for name, value in hf_state_dict.items()}
        outer, inner = ({their: our for our, their in names.items()} for names in (_OUTER, _INNER))
        found: dict[str, Any] = {}
        for name, value in theirs.items():
            if _MASK.match(name):
                continue
            if name == _HEAD:
                if value is not theirs[_TABLE] and not torch.equal(value, theirs[_TABLE]):
                    raise ValueError(
                        f"{_HEAD} differs from {_TABLE}; GPT-2's head is tied here: tie it, or leave it out"
                    )
            elif name in outer:
                found[outer[name]] = self._filled(name, value)
            else:
                layer, module, kind = _split(_THEIRS, name)
                if module == _JOINED:
                    parts = zip(_PARTS, value.chunk(3, dim=-1), strict=True)
                    found |= {f"layers.{layer}.{part}.{kind}": _turned(own) for part, own in parts}
                else:
                    found[f"layers.{layer}.{inner[module]}.{kind}"] = _turned(value)
        return found

    def _filled(self, name: str, values: Tensor) -> Tensor:
        """Both tables with all their rows."""
        rows = {_TABLE: self.model_args.vocab_size, _PLACES: self.model_args.max_seq_len}.get(name, 0)
        if (missing := rows - values.shape[0]) < 1:
            return values
        row = values.mean(dim=0, keepdim=True) if name == _TABLE else torch.zeros_like(values[:1])
        return torch.cat([values, row.expand(missing, -1)])


def _split(pattern: re.Pattern[str], name: str) -> tuple[str, str, str]:
    """The layer's number, the module in it, and "weight" or "bias"."""
    if (match := pattern.match(name)) is None:
        raise KeyError(name)
    return match[1], match[2], match[3]


def _turned(value: Tensor) -> Tensor:
    """A matrix transposed; norms and biases as they are."""
    return (value.t() if value.ndim == 2 else value).contiguous()

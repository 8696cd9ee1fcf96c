"""Conversion of GPT-2's parameters to and from names and shapes of Hugging Face's `GPT2LMHeadModel`."""

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
# Modules of a block, except `wq`, `wk` and `wv`.
_INNER = {
    "attention_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attention.wo": "attn.c_proj",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
_JOINED, _PARTS = "attn.c_attn", ("attention.wq", "attention.wk", "attention.wv")
_TABLE, _POSITIONS, _HEAD = "wte.weight", "wpe.weight", "lm_head.weight"
# Buffers of the causal mask, saved by older versions of transformers.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias$")
_OURS, _THEIRS = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$"), re.compile(r"h\.(\d+)\.(.+)\.(weight|bias)$")


class GPT2StateDictAdapter(StateDictAdapter):
    """Adapter of state dicts of plain tensors or DTensors of any layout.

    Hugging Face's matrices have the input dimension first (`Conv1D`), and one contains queries, keys and values. The
    output layer is tied and has no entry. Rows of the token embedding beyond the entries of the tokenizer in
    `hf_assets_path` are not exported.
    """

    def __init__(self, model_args: GPT2Args, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args

    @cached_property
    def entries(self) -> int:
        """Rows of the exported token embedding."""
        rows = self.model_args.vocab_size
        if not self.hf_assets_path:
            return rows
        try:
            return min(rows, tokenizer_entries(HuggingFaceTokenizer(self.hf_assets_path)))
        except FileNotFoundError:
            return rows

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return Hugging Face's entries, contiguous. Raises KeyError for a name that is not a parameter of GPT-2."""
        entries: dict[str, Any] = {}
        for name, value in state_dict.items():
            if name in _OUTER:
                if _OUTER[name] == _TABLE and self.entries < value.shape[0]:
                    value = value[: self.entries].clone()  # safetensors does not accept views.
                entries[_PREFIX + _OUTER[name]] = value.contiguous()
                continue
            layer, module, kind = _split(_OURS, name)
            if module not in _PARTS:
                entries[f"{_PREFIX}h.{layer}.{_INNER[module]}.{kind}"] = _transposed(value)
            elif module == _PARTS[0]:
                parts = [_transposed(state_dict[f"layers.{layer}.{part}.{kind}"]) for part in _PARTS]
                entries[f"{_PREFIX}h.{layer}.{_JOINED}.{kind}"] = torch.cat(parts, dim=-1)
        return entries

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this project's entries. Keys are accepted with or without "transformer."; masks are ignored.

        Missing rows of the token embedding become the mean of the others. The logit of the mean is the mean of the
        logits, so each such row adds at most an average row's share to the softmax denominator; 47 rows in addition to
        50257 raise the loss by at most 0.001. Missing positions become zeros, because an export contains only the
        trained ones.

        Raises:
            ValueError: The output layer is not tied.
            KeyError: Another name is unknown.
        """
        theirs = {name.removeprefix(_PREFIX): value for name, value in hf_state_dict.items()}
        outer, inner = ({their: our for our, their in names.items()} for names in (_OUTER, _INNER))
        entries: dict[str, Any] = {}
        for name, value in theirs.items():
            if _MASK.match(name):
                continue
            if name == _HEAD:
                if value is not theirs[_TABLE] and not torch.equal(value, theirs[_TABLE]):
                    raise ValueError(
                        f"{_HEAD} differs from {_TABLE}; the output layer of this GPT-2 is tied: tie it, or remove it"
                    )
            elif name in outer:
                entries[outer[name]] = self._pad_rows(name, value)
            else:
                layer, module, kind = _split(_THEIRS, name)
                if module == _JOINED:
                    parts = zip(_PARTS, value.chunk(3, dim=-1), strict=True)
                    entries |= {
                        f"layers.{layer}.{part}.{kind}": _transposed(part_values) for part, part_values in parts
                    }
                else:
                    entries[f"layers.{layer}.{inner[module]}.{kind}"] = _transposed(value)
        return entries

    def _pad_rows(self, name: str, values: Tensor) -> Tensor:
        """Return an embedding with all of its rows; other tensors unchanged."""
        rows = {_TABLE: self.model_args.vocab_size, _POSITIONS: self.model_args.max_seq_len}.get(name, 0)
        if (missing := rows - values.shape[0]) < 1:
            return values
        row = values.mean(dim=0, keepdim=True) if name == _TABLE else torch.zeros_like(values[:1])
        return torch.cat([values, row.expand(missing, -1)])


def _split(pattern: re.Pattern[str], name: str) -> tuple[str, str, str]:
    """Return the layer's number, the module in it, and "weight" or "bias"."""
    if (match := pattern.match(name)) is None:
        raise KeyError(name)
    return match[1], match[2], match[3]


def _transposed(value: Tensor) -> Tensor:
    """Return a matrix transposed; vectors unchanged."""
    return (value.t() if value.ndim == 2 else value).contiguous()

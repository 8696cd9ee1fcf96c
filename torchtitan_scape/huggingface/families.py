"""config.json of each model family, and comparison of two such configurations."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchtitan_scape.core.command import one_line
from torchtitan_scape.models.gpt2 import GPT2Args
from torchtitan_scape.titan.models import TransformerModelArgs

Config = dict[str, Any]


def _llama(args: TransformerModelArgs, tensors: Mapping[str, Tensor]) -> Config:
    """Return the configuration of a Llama model.

    Theta occurs twice, because transformers before 5 uses 10,000 if it finds only `rope_parameters`.
    """
    scaling = args.rope_scaling_args
    scaled = {
        "rope_type": "llama3",
        "factor": float(scaling.scaling_factor),
        "low_freq_factor": float(scaling.low_freq_factor),
        "high_freq_factor": float(scaling.high_freq_factor),
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
    plain = scaling.scaling_factor == 1
    theta = float(args.rope_theta)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": args.dim,
        "intermediate_size": tensors["model.layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.dim // args.n_heads,
        "max_position_embeddings": args.max_seq_len,  # Trained sequence length.
        "rms_norm_eps": args.norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if plain else scaled,
        "rope_parameters": {"rope_theta": theta, **({"rope_type": "default"} if plain else scaled)},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    }


def _gpt2(args: GPT2Args, tensors: Mapping[str, Tensor]) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": tensors["transformer.wte.weight"].shape[0],
        "n_positions": tensors["transformer.wpe.weight"].shape[0],
        "n_embd": args.dim,
        "n_layer": args.n_layers,
        "n_head": args.n_heads,
        "n_inner": tensors["transformer.h.0.mlp.c_fc.bias"].shape[0],
        "layer_norm_epsilon": args.norm_eps,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }


# By [model] name: builder of config.json from the model's arguments and its tensors, without tokens and dtype.
FAMILIES: dict[str, Callable[[Any, Mapping[str, Tensor]], Config]] = {"llama3": _llama, "gpt2": _gpt2}

# Keys that cannot be derived from the shapes of the tensors. The number of heads precedes the keys that depend on it.
_COMPARED = (
    *("model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("hidden_act", "attention_bias", "mlp_bias", "n_layer", "n_head", "layer_norm_epsilon", "activation_function"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
)
# Names of one function, by the name that an export writes.
_SAME_FUNCTION = {
    "silu": ("silu", "swish"),
    "gelu_new": ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"),
}
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # Of Llama.


def read(config: Config) -> Any:
    """Return a config.json as transformers reads it, with defaults for missing keys and nulls.

    Raises ValueError if it cannot be read.
    """
    import transformers

    stated = _without_nulls(config)
    stated |= {key: _without_nulls(value) for key, value in stated.items() if isinstance(value, dict)}
    try:
        return transformers.AutoConfig.for_model(**stated)
    except Exception as error:  # of transformers' and the hub's own kinds
        raise ValueError(f"its config.json cannot be read: {one_line(error)}") from None


def _without_nulls(values: Config) -> Config:
    return {key: value for key, value in values.items() if value is not None}


def check_same(ours: Config, theirs: Any) -> None:
    """Check that two configurations describe the same model. `theirs` is the result of `read`.

    Raises ValueError with the first key that differs.
    """
    expected = read(ours)
    pairs = [(key, getattr(expected, key), getattr(theirs, key, None)) for key in _COMPARED if key in ours]
    if "rope_theta" in ours and theirs.model_type == ours["model_type"]:
        rotation = _rotation(theirs)
        pairs += [(key, value, rotation.get(key)) for key, value in _rotation(expected).items()]
    for key, expected_value, value in pairs:
        if not _equal(expected_value, value):
            raise ValueError(f"its config.json means {key} = {value!r}, but the recipe's model has {expected_value!r}")


def _equal(expected: Any, value: Any) -> bool:
    """Return whether two values describe the same model. Numbers may differ by the rounding of FP32."""
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(expected, value, rel_tol=1e-6)
    return bool(value in _SAME_FUNCTION.get(expected, ()) if expected in _SAME_FUNCTION else expected == value)


def _rotation(config: Any) -> Config:
    """Return the parameters of the rotary embedding."""
    rotation: Config = dict(config.rope_parameters)
    if rotation["rope_type"] in ("linear", "llama3") and rotation.get("factor") == 1:  # Scaling by 1.
        return {"rope_type": "default", "rope_theta": rotation["rope_theta"]}
    return rotation


def resolve_tie(theirs: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors with the output layer of a model that ties it to the embedding, and a note on that. `theirs`
    is the result of `read`.

    Llama has separate parameters here, so its output layer becomes a copy of the embedding. GPT-2 is tied here too.
    Raises ValueError if the folder contradicts its config.json, so that versions of transformers read different models.
    """
    weights = dict(tensors)
    tied = theirs.tie_word_embeddings
    if not tied and _OUTPUT not in weights:
        raise ValueError(f"it has no {_OUTPUT}, and tie_word_embeddings is false; set it to true if they are tied")
    if not tied or theirs.model_type != "llama":
        return weights, ""
    if _OUTPUT in weights and _EMBEDDING in weights and not torch.equal(weights[_OUTPUT], weights[_EMBEDDING]):
        raise ValueError(f"{_OUTPUT} differs from {_EMBEDDING}, but tie_word_embeddings is true; set it to false")
    for missing, source in ((_OUTPUT, _EMBEDDING), (_EMBEDDING, _OUTPUT)):
        if source in weights:
            weights.setdefault(missing, weights[source])
    return weights, "the model ties its output layer to the embedding; here it is a copy, which training may change"

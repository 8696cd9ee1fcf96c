"""config.json of each model family, and comparison of two such configurations."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

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

# Values that transformers uses for keys that are missing or null, by model type. A key that is not listed here has the
# value of the recipe's model, because the shapes of the tensors decide.
_DEFAULTS: dict[str, Config] = {
    "llama": {
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "n_head": 12,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
}
# Alternative names that transformers accepts for keys of GPT-2.
_ALIASES = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
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


def check_same(ours: Config, theirs: Config) -> None:
    """Check that two configurations describe the same model, as transformers reads the second one, of a config.json.

    Raises ValueError with the first key that differs.
    """
    stated, values = _stated(ours, theirs), _with_defaults(ours, theirs)
    pairs = [(key, ours[key], values[key]) for key in _COMPARED if key in ours]
    if "rope_theta" in ours:
        expected, rotation = _rotation(ours), _rotation(theirs)
        pairs += [(key, value, rotation.get(key)) for key, value in expected.items()]
        stated |= _rotation_stated(theirs)
    for key, expected_value, value in pairs:
        if not _equal(expected_value, value):
            has = f"has {key} = {value!r}" if key in stated else f"lacks {key}, whose default is {value!r}"
            raise ValueError(f"its config.json {has}, but the recipe's model has {expected_value!r}")


def _stated(ours: Config, theirs: Config) -> Config:
    """Return the values of their keys that are not null, with the names of this project's exports."""
    aliases = _ALIASES if ours["model_type"] == "gpt2" else {}
    return {aliases.get(key, key): value for key, value in theirs.items() if value is not None}


def _with_defaults(ours: Config, theirs: Config) -> Config:
    """Return their values, with defaults in the place of missing keys and nulls."""
    stated = _stated(ours, theirs)
    values = ours | _DEFAULTS[ours["model_type"]] | stated
    if "num_key_value_heads" in ours and "num_key_value_heads" not in stated:
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def _equal(expected: Any, value: Any) -> bool:
    """Return whether two values describe the same model. Numbers may differ by the rounding of FP32."""
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(expected, value, rel_tol=1e-6)
    return bool(value in _SAME_FUNCTION.get(expected, ()) if expected in _SAME_FUNCTION else expected == value)


def _rotation(config: Config) -> Config:
    """Return the parameters of the rotary embedding, from the keys of either generation of transformers."""
    rotation: Config = {"rope_theta": config.get("rope_theta") or 10000.0} | _rotation_stated(config)
    rotation.setdefault("rope_type", "default")
    if rotation["rope_type"] in ("linear", "llama3") and rotation.get("factor") == 1:  # Scaling by 1.
        rotation["rope_type"] = "default"
    if rotation["rope_type"] == "llama3":
        rotation.setdefault("original_max_position_embeddings", config.get("max_position_embeddings") or 2048)
    return rotation


def _rotation_stated(config: Config) -> Config:
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"its config.json has the rotary parameters {given!r}; they must be a table")
    given = {key: value for key, value in given.items() if value is not None}
    if "type" in given:  # Older name.
        given.setdefault("rope_type", given.pop("type"))
    return given


def resolve_tie(ours: Config, theirs: Config, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Return the tensors with the output layer of a model that ties it to the embedding, and a note on that.

    Llama has separate parameters here, so its output layer becomes a copy of the embedding. GPT-2 is tied here too.
    Raises ValueError if the folder contradicts its config.json, so that versions of transformers read different models.
    """
    weights = dict(tensors)
    tied = _with_defaults(ours, theirs)["tie_word_embeddings"]
    if not tied and _OUTPUT not in weights:
        raise ValueError(f"it has no {_OUTPUT}, and tie_word_embeddings is false; set it to true if they are tied")
    if not tied or ours["model_type"] != "llama":
        return weights, ""
    if _OUTPUT in weights and _EMBEDDING in weights and not torch.equal(weights[_OUTPUT], weights[_EMBEDDING]):
        raise ValueError(f"{_OUTPUT} differs from {_EMBEDDING}, but tie_word_embeddings is true; set it to false")
    for missing, source in ((_OUTPUT, _EMBEDDING), (_EMBEDDING, _OUTPUT)):
        if source in weights:
            weights.setdefault(missing, weights[source])
    return weights, "the model ties its output layer to the embedding; here it is a copy, which training may change"

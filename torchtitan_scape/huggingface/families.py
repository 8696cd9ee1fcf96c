"""config.json of each model family, and comparison of two such configurations."""

from collections.abc import Callable, Mapping
from typing import Any

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

# Keys that cannot be derived from the shapes of the tensors.
_COMPARED = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act"),
    *("n_head", "layer_norm_epsilon", "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
)


def check_same(ours: Config, theirs: Config) -> None:
    """Check that two configurations describe the same model. For a key missing in `theirs`, the shapes decide.

    Raises:
        ValueError: Names the first key that differs.
    """
    pairs = [(key, ours[key], theirs[key]) for key in _COMPARED if key in ours and key in theirs]
    if "rope_theta" in ours:
        expected, found = _rotation(ours), _rotation(theirs)
        pairs += [(key, value, found.get(key)) for key, value in expected.items()]
    for key, expected_value, value in pairs:
        if expected_value != value:
            raise ValueError(f"its config.json has {key} = {value!r}, but the recipe's model has {expected_value!r}")


def _rotation(config: Config) -> Config:
    """Return the parameters of the rotary embedding, from the keys of either generation of transformers."""
    found: Config = {"rope_theta": float(config.get("rope_theta") or 10000.0)}
    found |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    found["rope_type"] = found.get("rope_type", found.pop("type", "default"))
    return found

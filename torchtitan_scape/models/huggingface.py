"""`config.json` of an export: what Hugging Face's transformers are told of a model, by family."""

from collections.abc import Callable
from typing import Any

from torchtitan.models.llama3 import TransformerModelArgs

from torchtitan_scape.models.gpt2 import GPT2Args

Shape = tuple[int, ...]


def _llama(args: TransformerModelArgs, shapes: dict[str, Shape], entries: int, length: int) -> dict[str, Any]:
    """Raises ValueError where rotary frequencies are stretched."""
    if args.rope_scaling_args.scaling_factor != 1.0:
        raise ValueError(
            f"this flavor's rotary frequencies are stretched by {args.rope_scaling_args.scaling_factor:g}; flavors "
            "without that are exported, and no others"
        )
    head = args.dim // args.n_heads
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": shapes["layers.0.feed_forward.w1.weight"][0],
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": shapes["layers.0.attention.wk.weight"][0] // head,
        "head_dim": head,
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "rms_norm_eps": args.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # transformers 4 reads the first and takes 10000 without it; 5 has the second.
        "rope_theta": float(args.rope_theta),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.rope_theta)},
    }


def _gpt2(args: GPT2Args, shapes: dict[str, Shape], entries: int, length: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": entries,
        "n_positions": args.max_seq_len,
        "n_embd": args.dim,
        "n_layer": args.n_layers,
        "n_head": args.n_heads,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": args.norm_eps,
        "initializer_range": 0.02,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
    }


# By `[model] name`: of arguments, shapes of parameters, the tokenizer's entries, and tokens of a trained sequence.
CONFIGS: dict[str, Callable[[Any, dict[str, Shape], int, int], dict[str, Any]]] = {"llama3": _llama, "gpt2": _gpt2}

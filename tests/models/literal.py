"""GPT-2 implemented from its description on a dictionary of tensors, independent of the product's model."""

import math

import torch
from torch import Tensor


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(dim=-1, keepdim=True)
    return centered / (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(p: dict[str, Tensor], tokens: Tensor, layers: int, heads: int) -> Tensor:
    """Map tokens (batch, sequence) to (batch, sequence, vocabulary): pre-norm blocks, learned positions, a tied output
    layer.
    """
    length = tokens.shape[1]
    h = p["tok_embeddings.weight"][tokens] + p["pos_embeddings.weight"][:length]
    hidden = torch.full((length, length), -math.inf).triu(1)
    for i in range(layers):

        def at(name: str, x: Tensor, i: int = i) -> Tensor:
            return x @ p[f"layers.{i}.{name}.weight"].T + p[f"layers.{i}.{name}.bias"]

        def norm(name: str, x: Tensor, i: int = i) -> Tensor:
            return _norm(x, p[f"layers.{i}.{name}.weight"], p[f"layers.{i}.{name}.bias"])

        x = norm("attention_norm", h)
        q, k, v = (at(f"attention.{w}", x).chunk(heads, dim=-1) for w in ("wq", "wk", "wv"))
        mixed = []
        for head in range(heads):
            scores = q[head] @ k[head].transpose(1, 2) / math.sqrt(q[head].shape[-1]) + hidden
            mixed.append(scores.softmax(dim=-1) @ v[head])
        h = h + at("attention.wo", torch.cat(mixed, dim=-1))
        h = h + at("feed_forward.w2", _gelu(at("feed_forward.w1", norm("ffn_norm", h))))
    return _norm(h, p["norm.weight"], p["norm.bias"]) @ p["tok_embeddings.weight"].T

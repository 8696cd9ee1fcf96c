"""The model and the data of the examples: a small GPT on bytes of the standard library's sources."""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A GPT of bytes; `forward` returns logits (batch, length, 256)."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def text() -> Tensor:
    """Return the bytes of some modules of the standard library, uint8 (n,)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "collections/__init__", "datetime", "inspect", "tarfile", "typing")
    return torch.frombuffer(bytearray(b"".join((folder / f"{n}.py").read_bytes() for n in names)), dtype=torch.uint8)


def loss_at(model: nn.Module, data: Tensor, seed: int, batch: int = 8, length: int = 64) -> Tensor:
    """Return the mean loss over a random batch, which `seed` determines."""
    starts = torch.randint(len(data) - length - 1, (batch,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([data[i : i + length + 1] for i in starts.tolist()]).long()
    rows = rows.to(next(model.parameters()).device)
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def arguments(description: str, **defaults: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", default=defaults.get("method", "sparta"), help="any name in [sync] method")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", default="", help="folder to save to, and to resume from if it has a state")
    parser.add_argument("--interval", type=int, default=20, help="steps between two saves")
    parser.add_argument("--stop", type=int, default=0, help="stop after this step, as a job that is interrupted")
    return parser.parse_args()

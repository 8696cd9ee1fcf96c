"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) for TorchTitan.

Modules have the names of TorchTitan's Llama, so that activation checkpointing, torch.compile and reports find them. The
three matrices of attention are separate, because tensor parallelism splits them by heads.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torchtitan_scape.models.initial import initialize
from torchtitan_scape.titan.config import JobConfig
from torchtitan_scape.titan.data import BaseTokenizer
from torchtitan_scape.titan.models import (
    AttentionMasksType,
    BaseModelArgs,
    ModelProtocol,
    ScaledDotProductAttentionWrapper,
)

_STD = 0.02


@dataclass
class GPT2Args(BaseModelArgs):
    """Sizes of a GPT-2 model.

    Attributes:
        max_seq_len: Rows of the position embedding; a shorter `seq_len` does not change it.
        vocab_size: Rows of the token embedding: GPT-2's 50257 and 47 unused ones, as in Megatron.
    """

    dim: int = 1024
    n_layers: int = 24
    n_heads: int = 16
    vocab_size: int = 50304
    max_seq_len: int = 1024
    norm_eps: float = 1e-5

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        """Raise ValueError if sequences are longer than the position embedding."""
        sections = {"training": job_config.training}
        if job_config.validation.enable:
            sections["validation"] = job_config.validation
        for name, section in sections.items():
            if section.seq_len > self.max_seq_len:
                raise ValueError(
                    f"[{name}] seq_len = {section.seq_len}: {job_config.model.name} {job_config.model.flavor} has "
                    f"learned positions for {self.max_seq_len} tokens; set it to {self.max_seq_len} or less"
                )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and FLOPs per token of forward and backward, with full attention.

        The token embedding is multiplied as the output layer; the position embedding is only looked up.
        """
        counts = {name: p.numel() for name, p in model.named_parameters()}
        total = sum(counts.values())
        multiplied = total - counts["pos_embeddings.weight"]
        return total, 6 * multiplied + 12 * self.n_layers * self.dim * seq_len


GPT2_ARGS = {
    # Sizes are those of [model.sizes] alone.
    "custom": GPT2Args(),
    # 124,928 parameters on bytes, like Llama's "study": for tests and studies.
    "tiny": GPT2Args(dim=64, n_layers=2, n_heads=4, vocab_size=260, max_seq_len=128),
    "124M": GPT2Args(dim=768, n_layers=12, n_heads=12),
    # The SCAPE paper's GPT-345M (Section V), called GPT-355M in the Radius paper.
    "345M": GPT2Args(),
    # The larger model of the Radius paper.
    "2.0B": GPT2Args(dim=2560, n_layers=24, n_heads=32),
}


class Attention(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim)
        self.wk = nn.Linear(args.dim, args.dim)
        self.wv = nn.Linear(args.dim, args.dim)
        self.wo = nn.Linear(args.dim, args.dim)
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, dim) to the same shape. The number of heads, which TP splits, is inferred."""
        rows, length, _ = x.shape
        heads = [w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)]
        mixed = self.inner_attention(*heads).transpose(1, 2).contiguous()
        return self.wo(mixed.view(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, 4 * args.dim)
        self.w2 = nn.Linear(4 * args.dim, args.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, args: GPT2Args) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class TiedOutput(nn.Module):
    """The output layer. A parameter of its own would be a second name of the tied one, in FSDP2 and checkpoints."""

    def forward(self, h: Tensor, weight: Tensor) -> Tensor:
        return F.linear(h, weight)


class GPT2(ModelProtocol):
    """Map tokens (batch, sequence) to logits (batch, sequence, vocab_size).

    Weights are initialized from N(0, 0.02). Those added to the residual stream, `wo` and `w2`, are divided by the
    square root of their number, 2 * n_layers. Biases are 0.
    """

    # TorchTitan's validator reads this attribute of rotary models under context parallelism, and does not use it.
    freqs_cis: None = None

    def __init__(self, model_args: GPT2Args) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.pos_embeddings = nn.Embedding(model_args.max_seq_len, model_args.dim)
        self.layers = nn.ModuleDict({str(i): Block(model_args) for i in range(model_args.n_layers)})
        self.norm = nn.LayerNorm(model_args.dim, eps=model_args.norm_eps)
        self.output = TiedOutput()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        initialize(self, self._draw, self._drawn)

    def _draw(self) -> None:
        added = _STD / (2 * self.model_args.n_layers) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=added if name.endswith((".wo", ".w2")) else _STD)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=_STD)

    def _drawn(self) -> "GPT2":
        with torch.device("meta"):
            whole = GPT2(self.model_args)
        whole.to_empty(device="cpu")
        whole._draw()
        return whole

    def get_attention_masks(
        self,
        input_batch: Tensor,
        tokenizer: BaseTokenizer,
        extra_inputs: dict[str, Tensor] | None = None,
    ) -> AttentionMasksType:
        """Raise TypeError, because attention is causal. TorchTitan's validator calls this, and handles the error."""
        raise TypeError("GPT-2's attention is causal and takes no masks")

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits. Context parallelism passes `positions`, of the shape of `tokens`, by default 0, 1, ..."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        h = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h), self.tok_embeddings.weight)

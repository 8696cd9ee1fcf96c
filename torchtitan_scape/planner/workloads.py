"""Models and batches as data, for predictions before anything is built. Plain arithmetic: no torch.

Sizes are those of the SCAPE paper's models (Section V). Tensor shapes come from formulas, so that payloads, masks
and memory can be told for a model that does not fit on this machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """A decoder and what it is trained on.

    sequence: tokens a sequence. batch: sequences a step, over all ranks.
    gpt2: GPT-2's form (learned positions, biases, tied output, GELU) instead of Llama's.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    batch: int
    gpt2: bool = False

    def shapes(self) -> tuple[Shape, ...]:
        """Every parameter tensor, in the order of the model."""
        return self._gpt2_shapes() if self.gpt2 else self._llama_shapes()

    def _llama_shapes(self) -> tuple[Shape, ...]:
        w, kv = self.width, self.kv_width
        layer: tuple[Shape, ...] = ((w, w), (kv, w), (kv, w), (w, w))
        layer += ((self.ffn, w), (w, self.ffn), (self.ffn, w), (w,), (w,))
        return ((self.vocab, w), *layer * self.layers, (w,), (self.vocab, w))

    def _gpt2_shapes(self) -> tuple[Shape, ...]:
        w, f = self.width, self.ffn
        layer: tuple[Shape, ...] = ((w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,))
        layer += ((w,), (w,), (f, w), (f,), (w, f), (w,))
        return ((self.vocab, w), (self.sequence, w), *layer * self.layers, (w,), (w,))

    def names(self) -> tuple[str, ...]:
        """Of the tensors of `shapes`, as TorchTitan has them; of GPT-2, as its authors do."""
        if self.gpt2:
            norms = [f"ln_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")]
            parts = [f"{part}.{kind}" for part in ("attn.c_attn", "attn.c_proj") for kind in ("weight", "bias")]
            feed = [f"{part}.{kind}" for part in ("mlp.c_fc", "mlp.c_proj") for kind in ("weight", "bias")]
            first, own, last = (
                ["wte.weight", "wpe.weight"],
                [*norms[:2], *parts, *norms[2:], *feed],
                ["ln_f.weight", "ln_f.bias"],
            )
        else:
            parts = [f"attention.{part}.weight" for part in ("wq", "wk", "wv", "wo")]
            feed = [f"feed_forward.{part}.weight" for part in ("w1", "w2", "w3")]
            own = [*parts, *feed, "attention_norm.weight", "ffn_norm.weight"]
            first, last = ["tok_embeddings.weight"], ["norm.weight", "output.weight"]
        return (*first, *(f"layers.{i}.{name}" for i in range(self.layers) for name in own), *last)

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes()))

    def flops_per_token(self) -> float:
        """Forward and backward: 6 a parameter that is multiplied, and 6 * layers * width * sequence for attention.

        The input embedding is a look-up and not counted (a tied one is the output's matrix, and is). Attention is
        causal: half of 12 * layers * width * sequence. Recomputation is not counted.
        """
        looked_up = self.sequence * self.width if self.gpt2 else self.vocab * self.width
        return 6.0 * (self.parameters - looked_up) + 6.0 * self.layers * self.width * self.sequence

    def activation_bytes(self, micro_batch: int) -> float:
        """Estimated peak for `micro_batch` sequences, BF16, every second layer recomputed (selective checkpointing).

        A kept layer holds the inputs of its matrices, norms and products: 2 * (6 width + 2 kv + 4 ffn) bytes a token
        for Llama, 2 * (8 width + 2 ffn) for GPT-2. A recomputed one holds its input, and one at a time is whole
        again. Logits: BF16, their FP32 copy and its gradient, 10 bytes an entry. Attention keeps no scores.
        """
        w, f = self.width, self.ffn
        kept = 2.0 * (8 * w + 2 * f) if self.gpt2 else 2.0 * (6 * w + 2 * self.kv_width + 4 * f)
        recomputed = self.layers // 2
        layers = (self.layers - recomputed) * kept + recomputed * 2 * w + kept
        return micro_batch * self.sequence * (layers + 10.0 * self.vocab)

    def working_bytes(self) -> float:
        """Estimated: FSDP's largest unit (a layer or an embedding), gathered while the next one arrives.

        Two BF16 copies of its parameters (4 bytes a parameter), BF16 gradients and what is reduced in FP32 (2 + 4).
        """
        shapes = self.shapes()
        embeddings = self.vocab * self.width
        outside = sum(math.prod(s) for s in shapes if s in ((self.vocab, self.width), (self.sequence, self.width)))
        layer = (self.parameters - outside) / max(1, self.layers)
        return 10.0 * max(layer, embeddings)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("llama_500m", 16, 1536, 16, 8, 4096, 32000, 4096, 1024),
        Workload("llama_1_8b", 24, 2560, 32, 8, 6912, 32000, 2048, 1024),
        Workload("gpt_345m", 24, 1024, 16, 16, 4096, 50257, 1024, 512, gpt2=True),
    )
}


def get_workload(name: str) -> Workload:
    """The workload of that name. Raises ValueError that lists the names."""
    if name not in WORKLOADS:
        raise ValueError(f"there is no model {name!r}; known are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def local_shapes(shapes: Sequence[Shape], shard: int) -> tuple[Shape, ...]:
    """The first rank's shards: FSDP2 cuts the first dimension into `shard` pieces of ceil(rows / shard)."""
    return tuple((-(-s[0] // shard), *s[1:]) for s in shapes)

"""Models and batches as data, for predictions without building a model. Plain arithmetic: no torch.

Sizes are those of the SCAPE paper's models (Section V). Tensor shapes are computed by formulas, so that payload, masks
and memory can be predicted for models that do not fit on this machine.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torchtitan_scape.core.hidden_matrices import default_hidden_names, is_hidden_matrix

Shape = tuple[int, ...]
Shapes = Sequence[Shape]

# Names of the list of a model's blocks: those of Llama, BERT, nanoGPT and GPT-2, for example.
BLOCK_LISTS = ("layers", "layer", "blocks", "block", "h")
_LAYER = re.compile(rf"(?:^|\.)(?:{'|'.join(BLOCK_LISTS)})\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the number of the block that contains the parameter; None for embedding, output and last norm."""
    layer = _LAYER.search(name)
    return None if layer is None else int(layer[1])


def count_entries(shapes: Shapes) -> int:
    """Return the number of entries of all tensors together."""
    return sum(map(math.prod, shapes))


@dataclass(frozen=True)
class LocalModel:
    """Names and shapes of the parameter shards of one rank, in the order of the model. No shard is left out.

    Attributes:
        hidden_names: The parameters that Muon updates, or would update; None for those of the default rule.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    hidden_names: frozenset[str] | None = None

    @classmethod
    def of_shapes(cls, shapes: Shapes) -> "LocalModel":
        """Return a model whose parameters are named "p0", "p1" and so on."""
        return cls(tuple(f"p{i}" for i in range(len(shapes))), tuple(tuple(shape) for shape in shapes))

    @property
    def sizes(self) -> list[int]:
        """Number of entries of each shard."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def entries(self) -> int:
        """Number of entries of all shards together."""
        return count_entries(self.shapes)

    def select(self, names: Collection[str]) -> "LocalModel":
        """Return the part of the model with these parameter names."""
        return self.select_numbers([i for i, name in enumerate(self.names) if name in names])

    def select_numbers(self, numbers: Sequence[int]) -> "LocalModel":
        """Return the part of the model with these positions."""
        names, shapes = tuple(self.names[i] for i in numbers), tuple(self.shapes[i] for i in numbers)
        return LocalModel(names, shapes, self.hidden_names)

    def is_hidden(self, number: int) -> bool:
        """Return whether Muon updates the parameter at a position."""
        name = self.names[number]
        return is_hidden_matrix(name, self.shapes[number]) if self.hidden_names is None else name in self.hidden_names

    @property
    def hidden_shapes(self) -> list[Shape]:
        """Shapes of the parameters that Muon updates."""
        return [shape for i, shape in enumerate(self.shapes) if self.is_hidden(i)]

    def matrices(self) -> list[Shape]:
        """Return the shapes with two or more dimensions."""
        return [shape for shape in self.shapes if len(shape) > 1]


@dataclass(frozen=True)
class Recomputation:
    """The options that decide which activations are stored until the backward pass.

    Attributes:
        mode: `[activation_checkpoint] mode`: "none", "selective", "full" or "memory_budget".
        option: `selective_ac_option`: every how manyth layer is recomputed, or "op".
        budget: `memory_budget`: share of a layer's activations that is stored.
        compiles_layers: torch.compile is applied to the layers.
        compiles_loss: It is applied to the loss.
    """

    mode: str = "selective"
    option: str = "2"
    budget: float = 1.0
    compiles_layers: bool = True
    compiles_loss: bool = True

    def recomputed(self, layers: int) -> int:
        """Return how many of the layers are recomputed, entirely or in part."""
        if self.mode == "selective" and self.option != "op":
            return layers // int(self.option)
        return layers if self.mode in ("selective", "full") else 0

    def describe(self) -> str:
        """Return the options in words."""
        words = {"none": "nothing recomputed", "full": "every layer recomputed"}
        words["memory_budget"] = f"a memory budget of {self.budget:g}"
        if self.option == "op":
            words["selective"] = "selected operations recomputed"
        else:
            words["selective"] = f"one of {self.option} layers recomputed"
        return words[self.mode] + (", compiled" if self.compiles_layers else ", not compiled")


@dataclass(frozen=True)
class Workload:
    """A decoder model and its training batch.

    Attributes:
        sequence: Tokens per sequence.
        batch: Sequences per step, over all ranks.
        positions: Rows of the learned position embedding for GPT-2, which also has biases, a tied output and GELU; 0
            for Llama.
        recomputation: Activation checkpointing and compilation; by default those of `train_configs/models`.
        entry_bytes: Size of an entry of activations and gathered weights: 2, or 4 in FP32.
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
    positions: int = 0
    recomputation: Recomputation = Recomputation()
    entry_bytes: float = 2.0

    def __post_init__(self) -> None:
        if self.gpt2 and self.sequence > self.positions:
            raise ValueError(
                f"{self.name} has learned positions for {self.positions} tokens, and a sequence has {self.sequence}"
            )

    @property
    def gpt2(self) -> bool:
        """Whether the model has the GPT-2 architecture."""
        return self.positions > 0

    def shapes(self) -> tuple[Shape, ...]:
        """Return the shapes of all parameters, in model order."""
        return self._gpt2_shapes() if self.gpt2 else self._llama_shapes()

    def _llama_shapes(self) -> tuple[Shape, ...]:
        w, kv = self.width, self.kv_width
        layer: tuple[Shape, ...] = ((w, w), (kv, w), (kv, w), (w, w))
        layer += ((self.ffn, w), (w, self.ffn), (self.ffn, w), (w,), (w,))
        return ((self.vocab, w), *layer * self.layers, (w,), (self.vocab, w))

    def _gpt2_shapes(self) -> tuple[Shape, ...]:
        w, f = self.width, self.ffn
        layer: tuple[Shape, ...] = ((w, w), (w,)) * 4 + ((f, w), (f,), (w, f), (w,)) + ((w,), (w,)) * 2
        return ((self.vocab, w), (self.positions, w), *layer * self.layers, (w,), (w,))

    def names(self) -> tuple[str, ...]:
        """Return the names of the parameters of `shapes`, as in the models."""
        kinds = ("weight", "bias") if self.gpt2 else ("weight",)
        parts = [f"attention.{part}" for part in ("wq", "wk", "wv", "wo")]
        parts += [f"feed_forward.{part}" for part in (("w1", "w2") if self.gpt2 else ("w1", "w2", "w3"))]
        layer_names = [f"{part}.{kind}" for part in (*parts, "attention_norm", "ffn_norm") for kind in kinds]
        first = ["tok_embeddings.weight", "pos_embeddings.weight"] if self.gpt2 else ["tok_embeddings.weight"]
        last = ["norm.weight", "norm.bias"] if self.gpt2 else ["norm.weight", "output.weight"]
        return (*first, *(f"layers.{i}.{name}" for i in range(self.layers) for name in layer_names), *last)

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    def local(self, shard: int) -> LocalModel:
        """Return the shards of the first of `shard` ranks."""
        return _local_model(self, shard)

    def whole(self) -> LocalModel:
        """Return the parameters that are not sharded."""
        return self.local(1)

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes()))

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward: 6 per multiplied parameter, and 6 * layers * width * sequence for
        attention.

        The input embedding is a lookup and is not counted; a tied embedding is counted as the output matrix, positions
        are not. Attention is causal: half of 12 * layers * width * sequence. Recomputation is not counted.
        """
        lookup_rows = self.positions if self.gpt2 else self.vocab
        return 6.0 * (self.parameters - lookup_rows * self.width) + 6.0 * self.layers * self.width * self.sequence

    def activation_bytes(self, micro_batch: int, output: bool = True) -> float:
        """Return the estimated peak of activations in bytes for `micro_batch` sequences.

        The peak is at the start of the backward pass: the stored activations of all layers, and the larger of what the
        loss and what the backward pass of one layer need. Without `output`, the loss is on another rank. A compiled
        loss needs the logits and their gradient; another one two copies in FP32 besides, or one if logits are FP32.
        """
        w, options, size = self.width, self.recomputation, self.entry_bytes
        complete, reduced = self._layer_bytes()
        count = options.recomputed(self.layers)
        stored = (self.layers - count) * complete + count * reduced
        layer = 2 * size * (w + self.ffn) + (complete if count else 0.0)
        if options.mode == "memory_budget":
            stored, layer = self.layers * (size * w + options.budget * (complete - size * w)), layer + complete
        loss = (2 * size if options.compiles_loss else 12.0) * self.vocab + 2 * size * w if output else 0.0
        return micro_batch * self.sequence * (stored + max(loss, layer))

    def _layer_bytes(self) -> tuple[float, float]:
        """Return the bytes per token that a layer stores if nothing of it is recomputed, and if it is.

        The former are the inputs of its matrices, norms and products, and FP32 statistics of attention and norms;
        attention stores no scores. torch.compile recomputes SiLU. The latter is the layer's input, and with "op" what
        TorchTitan's list of operations saves: attention, and every second matrix product.
        """
        w, kv, f = self.width, self.kv_width, self.ffn
        statistics = 4.0 * self.heads + 8.0
        complete, operations = 6 * w + 2 * kv + 2 * f, 3 * w + kv + f
        if not self.gpt2:
            complete += f if self.recomputation.compiles_layers else 2 * f
        by_operation = self.recomputation.mode == "selective" and self.recomputation.option == "op"
        reduced = operations * self.entry_bytes + 4.0 * self.heads if by_operation else w * self.entry_bytes
        return complete * self.entry_bytes + statistics, reduced

    def working_bytes(self, shards: int) -> float:
        """Return the estimated memory of FSDP's largest unit (a layer or an embedding), with the next one being
        gathered, of a model on `shards` ranks.

        Two copies of its parameters, its gradients, and the FP32 input of the reduction. GPT-2's embeddings are
        gathered throughout, in addition to its layers: a copy, gradients, and the reduction at the end. An FP32 model
        on one rank is trained without FSDP.
        """
        if shards == 1 and self.entry_bytes == 4.0:
            return 0.0
        tables = (self.positions + self.vocab if self.gpt2 else 2 * self.vocab) * self.width
        layer, unit = (self.parameters - tables) / max(1, self.layers), 3 * self.entry_bytes + 4.0
        if self.gpt2:
            return max(unit * layer + 2 * self.entry_bytes * tables, (2 * self.entry_bytes + 4.0) * tables)
        return unit * max(layer, self.vocab * self.width)


@lru_cache(maxsize=64)  # the planner asks for the same shards many times
def _local_model(workload: Workload, shard: int) -> LocalModel:
    names, shapes = workload.names(), workload.shapes()
    return LocalModel(names, local_shapes(shapes, shard), default_hidden_names(names, shapes))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("llama_500m", 16, 1536, 16, 8, 4096, 32000, 4096, 1024),
        Workload("llama_1_8b", 24, 2560, 32, 8, 6912, 32000, 2048, 1024),
        Workload("gpt_345m", 24, 1024, 16, 16, 4096, 50304, 1024, 512, positions=1024),
    )
}


def get_workload(name: str) -> Workload:
    """Return the workload of that name.

    Raises:
        ValueError: The name is unknown; the message lists the names.
    """
    if name not in WORKLOADS:
        raise ValueError(f"there is no model {name!r}; known are {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def local_shapes(shapes: Shapes, shard: int) -> tuple[Shape, ...]:
    """Return the shapes of the first rank's shards: FSDP2 splits the first dimension into chunks of ceil(rows /
    shard).
    """
    return tuple((-(-s[0] // shard), *s[1:]) if s else s for s in shapes)

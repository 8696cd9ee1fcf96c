"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019) for TorchTitan.

Modules have the names of TorchTitan's Llama, so that activation checkpointing, torch.compile and reports find them. The
three matrices of attention are separate, because tensor parallelism splits them by heads. The adapter converts names
and shapes to and from Hugging Face's `GPT2LMHeadModel`.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_scape.models.initial import initialize
from torchtitan_scape.titan.config import TORCH_DTYPE_MAP, ActivationCheckpoint, JobConfig
from torchtitan_scape.titan.data import BaseTokenizer
from torchtitan_scape.titan.distributed import (
    ParallelDims,
    apply_ac,
    apply_cp_to_attention_module,
    maybe_enable_async_tp,
)
from torchtitan_scape.titan.models import SAVED_OPERATIONS as SAVED
from torchtitan_scape.titan.models import (
    AttentionMasksType,
    BaseModelArgs,
    ModelProtocol,
    ScaledDotProductAttentionWrapper,
    StateDictAdapter,
    apply_compile,
    disable_fsdp_gradient_division,
)
from torchtitan_scape.topology.torch_version import distinguish_embeddings

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
        self, input_batch: Tensor, tokenizer: BaseTokenizer, extra_inputs: dict[str, Tensor] | None = None
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


class GPT2StateDictAdapter(StateDictAdapter):
    """Adapter of state dicts of plain tensors or DTensors of any layout.

    Hugging Face's matrices have the input dimension first (`Conv1D`), and one contains queries, keys and values. The
    output layer is tied and has no entry. The token embedding keeps all of its rows, which are part of the softmax.
    """

    def __init__(self, model_args: GPT2Args, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return Hugging Face's entries, contiguous. Raises KeyError for a name that is not a parameter of GPT-2."""
        entries: dict[str, Any] = {}
        for name, value in state_dict.items():
            if name in _OUTER:
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


# Operations of linear layers without and with bias; TorchTitan handles only the first.
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def parallelize_gpt2(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply tensor and context parallelism, activation checkpointing, torch.compile and FSDP2, in this order."""
    if parallel_dims.tp_enabled:
        mesh = parallel_dims.get_mesh("tp")
        _split_heads(model, mesh, loss_parallel=not job_config.parallelism.disable_loss_parallel)
        maybe_enable_async_tp(job_config, mesh)
    if parallel_dims.cp_enabled:
        attention = [block.get_submodule("attention.inner_attention") for block in _blocks(model)]
        apply_cp_to_attention_module(attention, parallel_dims.get_mesh("cp"), "sdpa")
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    recompute = job_config.activation_checkpoint
    if recompute.mode == "selective" and recompute.selective_ac_option == "op":
        _save_products(model, recompute)
    elif recompute.mode != "none":
        apply_ac(model, recompute, model_compile_enabled=compiled, base_folder=job_config.job.dump_folder)
    if compiled:
        apply_compile(model, job_config.compile)
    if parallel_dims.fsdp_enabled:
        axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
        _shard(model, parallel_dims.get_mesh(axes), job_config)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("layers").children())


def _split_heads(model: nn.Module, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Apply tensor and sequence parallelism: matrices by heads and by hidden units, both embeddings by rows.

    Logits stay sharded along the vocabulary for a parallel loss, and are gathered otherwise.
    """
    distinguish_embeddings()
    lookup = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
    head: ParallelStyle
    if loss_parallel:
        head = PrepareModuleInput(**whole, use_local_output=False)
    else:
        head = PrepareModuleInputOutput(**whole, output_layouts=Shard(-1), desired_output_layouts=Replicate())
    outer = {"tok_embeddings": lookup, "pos_embeddings": lookup, "norm": SequenceParallel(), "output": head}
    parallelize_module(model, mesh, outer)
    for block in _blocks(model):
        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        plan |= {"attention": gather, "feed_forward": gather}
        plan |= {name: ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv")}
        plan |= {"feed_forward.w1": ColwiseParallel()}
        plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.wo", "feed_forward.w2")}
        parallelize_module(block, mesh, plan)


def _save_products(model: nn.Module, config: ActivationCheckpoint) -> None:
    """Apply TorchTitan's selective checkpointing by operation: save the listed ones, and every second matrix product.

    TorchTitan's own function counts only products without bias, and would recompute all products of GPT-2.
    """
    layers = model.get_submodule("layers")
    for number, block in list(layers.named_children()):
        names = config.per_op_sac_force_recompute_mm_shapes_by_fqns
        recomputed = {
            (module.in_features, module.out_features)
            for name, module in block.named_modules()
            if isinstance(module, nn.Linear) and any(part in f"layers.{number}.{name}" for part in names)
        }
        wrapped = checkpoint_wrapper(
            block,
            context_fn=_contexts(recomputed),
            preserve_rng_state=config.preserve_rng_state,
            determinism_check=config.determinism_check,
            early_stop=config.early_stop,
            debug=config.debug,
        )
        layers.register_module(number, wrapped)


def _contexts(recomputed: set[tuple[int, int]]) -> Callable[[], Any]:
    return lambda: create_selective_checkpoint_contexts(_policy(recomputed))


def _policy(recomputed: set[tuple[int, int]]) -> Callable[..., CheckpointPolicy]:
    """Return a checkpoint policy that always recomputes products of matrices with these (inputs, outputs)."""
    counts: defaultdict[bool, int] = defaultdict(int)  # Products in the forward pass, and in its recomputation.

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operation in SAVED
        if operation in PRODUCTS:
            if tuple(args[-1].shape) in recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[context.is_recompute] += 1
            save = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _shard(model: nn.Module, mesh: DeviceMesh, config: JobConfig) -> None:
    """Apply FSDP2 with one unit per block.

    Both embeddings and the final norm belong to the root unit, which stays gathered, because the token embedding is
    used at both ends.
    """
    training, reshard = config.training, config.parallelism.fsdp_reshard_after_forward
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard != "never")
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard == "always")
    disable_fsdp_gradient_division(model)

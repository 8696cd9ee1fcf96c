"""GPT-2 against its description, several ranks against one process, and its counts of parameters and FLOPs."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.loss import cross_entropy_loss

from tests.models.literal import logits
from tests.pool import Pool
from tests.training import RECIPE
from torchtitan_scape.core.workloads import get_workload
from torchtitan_scape.models.gpt2 import GPT2, GPT2_ARGS

GPT2_RECIPE = [*RECIPE, "--model.name=gpt2", "--model.flavor=tiny"]
OPS = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
ROWS, LENGTH = 12, 32  # Of two micro-batches; 1, 2 and 3 ranks divide 12 sequences.


def whole_model(rows: int = 260) -> GPT2:
    model = GPT2(replace(GPT2_ARGS["tiny"], vocab_size=rows))
    torch.manual_seed(3)
    model.init_weights()
    return model


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(260, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: Any, reader: int = 0, readers: int = 1) -> float:
    """Return the loss of this reader's sequences, in two micro-batches, over the number of all tokens; gradients are
    kept.
    """
    total, half = 0.0, ROWS // 2
    for begin in (0, half):
        own = slice(begin + half * reader // readers, begin + half * (reader + 1) // readers)
        inputs, labels = (whole[own] for whole in batch())
        loss = cross_entropy_loss(model(inputs), labels) / (ROWS * LENGTH)
        loss.backward()
        total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    return total


def parallel(arguments: list[str], tensor: int = 1, rows: int = 260) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of all sequences, and every parameter's whole gradient. Called on a rank."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.core.parameters import plain_name
    from torchtitan_scape.trainer.parallelize import ReplicaParallelDims
    from torchtitan_scape.trainer.specs import register

    config = parse([*GPT2_RECIPE, *arguments])
    register(config)
    shards = dist.get_world_size() // tensor
    degrees = {"dp_replicate": 1, "dp_shard": shards, "cp": 1, "tp": tensor, "pp": 1, "ep": 1, "etp": 1}
    dims = ReplicaParallelDims(**degrees, world_size=dist.get_world_size())
    dims.build_mesh()
    with torch.device("meta"):
        model = GPT2(replace(GPT2_ARGS["tiny"], vocab_size=rows))
    model = get_train_spec("gpt2").parallelize_fn(model, dims, config)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    with loss_parallel() if tensor > 1 and not config.parallelism.disable_loss_parallel else nullcontext():
        loss = torch.tensor(loss_of(model, dist.get_rank() // tensor, shards), dtype=torch.float64)
    dist.all_reduce(loss)
    gradients = {plain_name(name): p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return loss.item() / tensor, whole


def all_of(cases: list[dict[str, Any]]) -> list[tuple[float, dict[str, Tensor]]]:
    return [parallel(**case) for case in cases]


def assert_like_one_process(found: tuple[float, dict[str, Tensor]], rows: int = 260) -> None:
    model = whole_model(rows)
    loss, (other, gradients) = loss_of(model), found
    assert other == pytest.approx(loss, rel=1e-6)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        if name.endswith("wk.bias"):  # It shifts all scores of a query equally: its gradient is zero up to rounding.
            assert gradients[name].norm() < 1e-6
        else:
            assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_logits_follow_the_description() -> None:
    """All parameters are random, norms and biases included, so that none can be ignored; attention scores are
    uneven.
    """
    model, generator = whole_model().double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.5 if name.endswith(("wq.weight", "wk.weight")) else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        tokens = batch()[0]
        expected = logits(dict(model.named_parameters()), tokens, layers=2, heads=4)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
        backwards = torch.arange(LENGTH - 1, -1, -1).expand(tokens.shape)
        assert not torch.allclose(model(tokens, backwards), expected, atol=1e-2), "positions that are given are taken"


def test_two_shards_and_two_heads_equal_one_process(pool2: Pool) -> None:
    """An embedding of 321 rows, uneven on two ranks; with recomputation, and without a parallel loss."""
    no_parallel_loss = "--parallelism.disable_loss_parallel"
    cases: list[dict[str, Any]] = [
        {"arguments": []},
        {"arguments": [*OPS, "--parallelism.fsdp_reshard_after_forward=always"]},
        {"arguments": [], "tensor": 2, "rows": 321},
        {"arguments": [no_parallel_loss, *OPS], "tensor": 2, "rows": 321},
    ]
    for rank in pool2(all_of, cases):
        for case, found in zip(cases, rank, strict=True):
            assert_like_one_process(found, case.get("rows", 260))


@pytest.mark.slow
def test_three_uneven_shards_and_both_axes(pool3: Pool, pool4: Pool) -> None:
    assert_like_one_process(pool3(parallel, OPS)[0])
    for found in pool4(parallel, [], tensor=2, rows=321):
        assert_like_one_process(found, 321)


class Products(TorchDispatchMode):
    """Counts layers' products; those of backward passes have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def recomputed(arguments: list[str], theirs: bool = False) -> int:
    """Return how many of a model's products a backward pass recomputes."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import apply_ac

    from torchtitan_scape.config.parsing import parse
    from torchtitan_scape.models.gpt2 import SAVED, parallelize_gpt2

    config, model = parse([*GPT2_RECIPE, *arguments]), whole_model()
    if theirs:
        apply_ac(model, config.activation_checkpoint, op_sac_save_list=SAVED)
    else:
        with patch.object(ParallelDims, "fsdp_enabled", False):
            dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
            parallelize_gpt2(model, dims, config)
    inputs, labels = batch()
    loss = cross_entropy_loss(model(inputs), labels)
    with Products() as products:
        loss.backward()
    return products.count


def test_every_second_product_is_recomputed() -> None:
    """Of two blocks with six products each."""
    assert recomputed(["--activation_checkpoint.mode=none"]) == 0
    assert recomputed(["--activation_checkpoint.mode=full"]) == 12
    assert recomputed(OPS) == 6
    assert recomputed(OPS, theirs=True) == 12, "what would be without a list and a policy of our own"
    named = "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=attention.wq"
    # All four products of attention have this shape; of the other two every second one is recomputed.
    assert recomputed([*OPS, named]) == 2 * (4 + 1)


@pytest.mark.parametrize(
    ("flavor", "parameters", "published"),
    [("124M", 124475904, 124439808), ("345M", 354871296, 354823168), ("2.0B", None, None)],
)
def test_counts(flavor: str, parameters: int | None, published: int | None) -> None:
    """Published checkpoints have 50257 rows, this project's have 47 more."""
    args = GPT2_ARGS[flavor]
    with torch.device("meta"):
        model = GPT2(args)
    total, flops = args.get_nparams_and_flops(model, 1024)
    assert total == sum(p.numel() for p in model.parameters())
    if parameters is None or published is None:
        assert 2.0e9 < total < 2.1e9
    else:
        assert total == parameters == published + 47 * args.dim
    if flavor == "345M":
        assert flops == pytest.approx(2.425e9, rel=1e-4)
        assert (
            get_workload("gpt_345m").flops_per_token() == flops - 6 * 24 * 1024 * 1024
        )  # Causal attention counts half.


def test_initial_weights_are_as_published() -> None:
    model = whole_model()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert bool((parameter == float("norm.weight" in name)).all()), name
        else:
            std = 0.02 / 2 if name.endswith(("wo.weight", "w2.weight")) else 0.02  # two layers: the root of 4
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
            assert abs(float(parameter.detach().mean())) < 0.1 * std, name


def test_masks_are_refused_as_the_validator_expects() -> None:
    with pytest.raises(TypeError, match="causal"):
        whole_model().get_attention_masks(batch()[0], None)  # type: ignore[arg-type]

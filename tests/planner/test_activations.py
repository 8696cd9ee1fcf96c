"""Predicted memory against the peaks of GPUs in results/gpu, and a layer against the tensors that it saves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from torchtitan_scape.config.parsing import parse
from torchtitan_scape.core.workloads import Recomputation, Workload, get_workload
from torchtitan_scape.models.registry import workload_of
from torchtitan_scape.planner.configured import method_of

RESULTS = Path(__file__).parents[2] / "results" / "gpu"
LLAMA, GPT2 = get_workload("llama_500m"), get_workload("gpt_345m")


def measured() -> list[Any]:
    """Return (arguments, reserved GiB) of every timed training run."""
    found = []
    for path in sorted(RESULTS.glob("*/results.json")):
        for name, step in json.loads(path.read_text()).get("training", {}).get("steps", {}).items():
            result = step.get("result") or {}
            if result.get("memory_gib"):
                found.append(pytest.param(result["arguments"], result["memory_gib"], id=f"{path.parent.name}, {name}"))
    return found


@pytest.mark.parametrize("arguments, gib", measured())
def test_the_prediction_is_within_a_tenth_of_the_measured_peak(arguments: list[str], gib: float) -> None:
    config = parse([each for each in arguments if not each.startswith("--sample.")])  # a removed key
    workload, run, micro_batch = workload_of(config), method_of(config), config.training.local_batch_size
    if (replicas := config.topology.simulate_replicas) > 1:
        kinds = run.simulated_memory(workload.local(1), replicas)
        kinds |= {"copy": workload.working_bytes(1), "activations": workload.activation_bytes(micro_batch)}
    else:
        kinds = run.total_memory(workload, 1, 1, micro_batch)
    assert sum(kinds.values()) == pytest.approx(gib * 2**30, rel=0.1)


def test_every_mode_is_read_from_the_configuration() -> None:
    def activations(*options: str) -> float:
        config = parse(["--job.config_file=train_configs/llama_500m.toml", *options])
        return workload_of(config).activation_bytes(1)

    modes = [["none"], ["selective"], ["selective", "--activation_checkpoint.selective_ac_option=op"], ["full"]]
    found = [activations(f"--activation_checkpoint.mode={mode}", *more) for mode, *more in modes]
    assert found == sorted(found, reverse=True) and len(set(found)) == 4
    assert found[0] < activations("--activation_checkpoint.mode=none", "--compile.no-enable")
    every_third = activations("--activation_checkpoint.selective_ac_option=3")
    assert found[1] < every_third < found[0]
    assert found[1] == LLAMA.activation_bytes(1)  # the default is that of the recipes


def test_an_fp32_run_needs_larger_activations_and_on_one_rank_no_copy_of_fsdp() -> None:
    given = "--job.config_file=train_configs/llama_500m.toml"
    half, full = (workload_of(parse([given, f"--training.mixed_precision_param={t}"])) for t in ("bfloat16", "float32"))
    assert 1.9 * half.activation_bytes(1) < full.activation_bytes(1) < 2 * half.activation_bytes(1)
    assert full.working_bytes(1) == 0 and full.working_bytes(8) == pytest.approx(1.6 * half.working_bytes(8))


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_a_memory_budget_lies_between_full_and_none(budget: float) -> None:
    def stored(recomputation: Recomputation) -> float:
        """Return what the layers store: the difference of two depths."""
        deep, shallow = (replace(LLAMA, layers=n, recomputation=recomputation) for n in (16, 8))
        return deep.activation_bytes(1) - shallow.activation_bytes(1)

    full, none = stored(Recomputation("full")), stored(Recomputation("none"))
    found = stored(Recomputation("memory_budget", budget=budget))
    assert found == pytest.approx(full + budget * (none - full), rel=0.01)


def saved_bytes_per_token(workload: Workload, compiled: bool, by_operation: bool) -> float:
    """Return the bytes of the tensors that one block keeps for its backward pass, without its parameters."""
    import torch
    from torchtitan.distributed.activation_checkpoint import apply_ac

    from torchtitan_scape.models import gpt2
    from torchtitan_scape.models.registry import MODEL_FAMILIES, model_args

    name = "gpt_345m" if workload.gpt2 else "llama_500m"
    config = parse([f"--job.config_file=train_configs/models/{name}.toml", "--training.seq_len=32"])
    args: Any = model_args(config.model)
    args.n_layers, args.vocab_size, args.max_seq_len = 1, 64, 32
    model = MODEL_FAMILIES[config.model.name].model_cls(args)
    dtype = torch.bfloat16 if workload.entry_bytes == 2 else torch.float32
    model.layers["0"].to(dtype)
    # TorchTitan's list has the attention of GPUs only.
    saved = gpt2.SAVED | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
    recompute = config.activation_checkpoint
    recompute.selective_ac_option = "op"
    x = torch.randn(2, 32, workload.width, dtype=dtype, requires_grad=True)
    inputs = (x,) if workload.gpt2 else (x, model.freqs_cis, None)
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    found: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with patch.object(gpt2, "SAVED", saved), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if by_operation and workload.gpt2:
            gpt2._save_products(model, recompute)
        elif by_operation:
            apply_ac(model, recompute, op_sac_save_list=saved)
        block = model.layers["0"]
        run = torch.compile(block, backend="aot_eager_decomp_partition") if compiled else block
        run(*inputs)
    return sum(storage.nbytes() for address, storage in found.items() if address not in own) / 64


@pytest.mark.parametrize(
    "workload, compiled, by_operation",
    [
        (LLAMA, True, False),
        (GPT2, True, False),
        (GPT2, False, False),
        (LLAMA, True, True),
        (GPT2, True, True),
        (replace(LLAMA, entry_bytes=4.0), True, False),
        (replace(GPT2, entry_bytes=4.0), True, True),
    ],
)
def test_a_layer_stores_the_predicted_tensors(workload: Workload, compiled: bool, by_operation: bool) -> None:
    """Llama's norms are not fused on a CPU without compilation, and then store FP32 copies."""
    chosen = Recomputation("selective" if by_operation else "none", "op", compiles_layers=compiled)
    deep, shallow = (replace(workload, layers=n, recomputation=chosen) for n in (2, 1))
    predicted = (deep.activation_bytes(1) - shallow.activation_bytes(1)) / workload.sequence
    assert saved_bytes_per_token(workload, compiled, by_operation) == pytest.approx(predicted, rel=0.01)

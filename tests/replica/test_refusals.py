"""Misuse of `replicate` ends in one line with the cause, on every rank, before anything is trained or lost."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool, attempts
from tests.replica.own_loop import batch, make_model, make_optimizer, train
from torchtitan_scape.replica import checks
from torchtitan_scape.replica.replicate import Scape, replicate
from torchtitan_scape.topology.groups import ReplicaGroups


def refuse(case: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from torchtitan_scape.checkpoint.own_loop import checkpoint_states, load_checkpoint

    class Wrapper(DistributedDataParallel):
        pass

    def hsdp(module: Any) -> Any:
        return fully_shard(module, mesh=mesh)

    model, rank = make_model(), dist.get_rank()
    mesh: Any = None
    if case.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    adamw, world = torch.optim.AdamW(model.parameters()), dist.group.WORLD
    match case:
        case "ddp":
            replicate(DistributedDataParallel(model), adamw, "dense", world)
        case "ddp around it":  # as Lightning Fabric's setup(model, optimizer)
            optimizer = make_optimizer(model, "topk")
            wrapped = Wrapper(model)
            wrapped(batch(0, rank)[0]).sum().backward()
            optimizer.step()
        case "ddp with a hook":  # as Hugging Face's Trainer
            optimizer = make_optimizer(model, "topk")
            wrapped = Wrapper(model)
            wrapped.register_comm_hook(None, noop_hook)
            wrapped(batch(0, rank)[0]).sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            model(batch(0, rank)[0]).sum().backward()
            assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
            optimizer.step()
            raise ValueError("accepted")
        case "ddp inside":
            model[0] = DistributedDataParallel(model[0])
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", world)
        case "fsdp1":
            flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
            replicate(flat, torch.optim.AdamW(flat.parameters()), "dense", world)
        case "hsdp":
            replicate(hsdp(model), torch.optim.AdamW(model.parameters()), "topk", mesh["replicate"])
        case "hsdp inside":
            hsdp(model[0])
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", mesh["replicate"])
        case "hsdp with groups":  # as an earlier message advised
            groups = ReplicaGroups(mesh["replicate"].get_group(), mesh["shard"].get_group())
            replicate(hsdp(model), torch.optim.AdamW(model.parameters()), "dense", groups)
        case "hsdp without a model":
            Scape(hsdp(model).named_parameters(), 0.1, replicas=mesh["replicate"])
        case "hsdp without a model, with groups":
            groups = ReplicaGroups(mesh["replicate"].get_group(), mesh["shard"].get_group())
            optimizer = Scape(hsdp(model).named_parameters(), 0.1, replicas=groups)
            model(batch(0, rank)[0]).sum().backward()
            optimizer.step()
        case "hsdp around it":
            hsdp(nn.Sequential(model))
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", mesh["replicate"])
        case "twice":
            replicate(model, make_optimizer(model, "dense"), "topk", world)
        case "no replicas":
            replicate(model, adamw)
        case "lbfgs":
            replicate(model, torch.optim.LBFGS(model.parameters()), "dense", world)
        case "sparse":
            replicate(model, torch.optim.SparseAdam(model.parameters()), "dense", world)
        case "classes":
            kind = (torch.optim.Adam, torch.optim.AdamW)[rank]
            replicate(model, kind(model.parameters()), "dense", world)
        case "flags":
            replicate(model, torch.optim.AdamW(model.parameters(), maximize=rank == 1), "dense", world)
        case "step" | "flush" | "state_dict" | "load_state_dict" | "checkpoint_states" | "load_checkpoint" | "dcp.save":
            optimizer = make_optimizer(model, "sparta")
            state, states = optimizer.state_dict(), checkpoint_states(model, optimizer)
            with optimizer.shared_weights():
                with optimizer.shared_weights():
                    pass
                {
                    "step": lambda: train(model, optimizer, range(1)),
                    "flush": optimizer.flush,
                    "state_dict": optimizer.state_dict,
                    "load_state_dict": lambda: optimizer.load_state_dict(state),
                    "checkpoint_states": lambda: checkpoint_states(model, optimizer),
                    "load_checkpoint": lambda: load_checkpoint(folder, model, optimizer),
                    "dcp.save": states["optimizer"].state_dict,  # of states from outside
                }[case]()
        case "dcp":
            dcp.save({"optimizer": make_optimizer(model, "topk")}, checkpoint_id=folder)
        case "foreign":
            replicate(model, torch.optim.AdamW(make_model().parameters()), "dense", world)
        case "missing":
            replicate(model, torch.optim.AdamW(model[0].parameters()), "dense", world)
        case "list":  # as nanochat
            replicate(model, [adamw, torch.optim.Muon([model[0].weight])], "dense", world)  # type: ignore[arg-type]
        case "function of a list":
            replicate(model, lambda named: [torch.optim.AdamW(named)], "dense", world)  # type: ignore[arg-type, return-value]
        case "matrices only":
            replicate(model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]), "dense", world)
        case "complex":
            model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            replicate(model, torch.optim.AdamW(model.parameters()), "dense", world)
        case "method":
            replicate(model, adamw, "topp", world)
        case "option":
            replicate(model, adamw, {"method": "topk", "densty": 0.1}, world)
        case "renamed option":
            replicate(model, adamw, {"method": "topk", "values": "2bit"}, world)
        case "value":
            replicate(model, adamw, {"method": "topk", "density": 2.0}, world)
        case "mesh":
            replicate(model, adamw, "dense", init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
        case "optimizer":
            replicate(model, adamw, "scape", world)
        case "sgd":
            replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), "scape", world)
        case "factory":
            replicate(model, partial(torch.optim.AdamW, lr=0.1), "scape", world)
        case "radius":
            replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), "radius", world)
        case "scalar state":
            replicate(model, torch.optim.NAdam(model.parameters()), "sparta", world)
        case "start of the state":
            replicate(model, torch.optim.Rprop(model.parameters()), "sparta", world)
        case "overlap":
            replicate(model, adamw, "diloco", world, overlap=True)
        case "norm":
            replicate(model, adamw, "dense", world, max_norm=0.0)
        case "reduction":
            replicate(model, adamw, "dense", world, reduction="average")  # type: ignore[arg-type]
        case "rates":
            make_optimizer(model, "dense", lr=0.1 * (1 + rank))
        case "options":
            replicate(model, adamw, {"method": "topk", "density": 0.1 * (1 + rank)}, world)
        case "kernels":  # "auto" without Triton on one machine
            with patch.object(checks, "choose_backend", return_value=("torch", "triton")[rank]):
                replicate(model, adamw, "quantized", world)
        case "kernels of one rank":
            replicate(model, adamw, "quantized", world, kernels=("torch", "triton")[rank])
        case "models":
            other = nn.Linear(4 + rank, 4)
            replicate(other, torch.optim.AdamW(other.parameters()), "dense", world)
        case "state of another method":
            make_optimizer(make_model(), "topk").load_state_dict(make_optimizer(model, "quantized").state_dict())
        case "state of another replica":
            states: list[Any] = [None, None]
            optimizer = make_optimizer(model, "topk")
            dist.all_gather_object(states, optimizer.state_dict())
            optimizer.load_state_dict(states[1 - rank])
        case "state of one rank":
            optimizer = make_optimizer(model, "topk")
            state = optimizer.state_dict()
            if rank == 1:
                state["replica"]["layout"]["density"] = 0.5
            optimizer.load_state_dict(state)
        case "state of the wrapped optimizer":
            make_optimizer(model, "topk").load_state_dict(adamw.state_dict())
        case "copy":
            deepcopy(make_optimizer(model, "topk"))
        case "file":
            torch.save({"optimizer": make_optimizer(model, "topk")}, f"{folder}/{rank}.pt")
        case "group":
            make_optimizer(model, "dense").add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


REFUSALS = {
    "ddp": "it is wrapped in DistributedDataParallel.* pass the module inside it",
    "ddp inside": "its module '0' is wrapped in DistributedDataParallel",
    "fsdp1": r"wrapped in FullyShardedDataParallel \(FSDP1\).*; shard with torch.distributed.fsdp.fully_shard",
    "hsdp": r"it is on a mesh on which FSDP2 has 2 copies of the parameters \(HSDP\).*to fully_shard, mesh\['shard'\]",
    "hsdp inside": r"its module '0' is on a mesh on which FSDP2 has 2 copies of the parameters",
    "hsdp with groups": "it is on a mesh on which FSDP2 has 2 copies of the parameters",
    "hsdp without a model": r"more than one mesh dimension; with FSDP2 alone, .* fully_shard, such as mesh\['shard'\]",
    "hsdp without a model, with groups": "the parameters are on a mesh on which FSDP2 has 2 copies of the parameters",
    "hsdp around it": "more than one mesh dimension",
    "twice": r"the optimizer is the result of replicate\(\) already",
    "no replicas": "replicas is None, but the job has 2 ranks and the model is on 1 of them",
    "lbfgs": "LBFGS evaluates the loss several times in a step; pass another optimizer",
    "sparse": "SparseAdam needs sparse gradients",
    "classes": "optimizer='Adam.*every replica needs the same model, optimizer and options",
    "flags": "maximize of group 0=(True|False).*every replica needs the same",
    "step": r"step\(\) was called inside shared_weights\(\), .*; leave it first",
    "flush": r"flush\(\) was called inside shared_weights\(\)",
    "state_dict": r"state_dict\(\) was called inside shared_weights\(\)",
    "load_state_dict": r"load_state_dict\(\) was called inside shared_weights\(\)",
    "checkpoint_states": r"checkpoint_states\(\) was called inside shared_weights\(\)",
    "dcp.save": r"dcp\.save\(\) was called inside shared_weights\(\)",
    "load_checkpoint": r"load_checkpoint\(\) was called inside shared_weights\(\)",
    "dcp": r"the others' state would be lost; save checkpoint_states\(model, optimizer\)",
    "ddp with a hook": "accepted",
    "ddp around it": "the parameters belong to a DistributedDataParallel module",
    "foreign": r"the optimizer has a parameter of shape \(64, 32\) that the model does not contain",
    "list": r"the optimizer is a list; replicate\(\) takes one optimizer .* pass torchtitan_scape.Muon\(",
    "function of a list": "the function that builds the optimizer returned a list; replicate.* takes one optimizer",
    "matrices only": r"3 trainable parameters .*'0.bias'; .* pass torchtitan_scape.Muon\(model.named_parameters\(\)\)",
    "complex": "parameter 'phase' has dtype torch.complex64; .*store torch.view_as_real.*, or freeze it",
    "missing": "4 trainable parameters are not in the optimizer, first '2.weight'",
    "method": "method is 'topp'; it must be one of dense, scape",
    "option": "method 'topk' has no option 'densty'; its options are density, ",
    "renamed option": r'\[sync.topk\] values is now code: set code = "2bit"',
    "value": "density = 2.0; ",
    "mesh": r"a mesh of 2 dimensions; pass one of them: mesh\['replicate'\]",
    "optimizer": "method 'scape' works with AdamS, not with AdamW",
    "sgd": "method 'scape' works with AdamS, not with SGD",
    "factory": "method 'scape' works with AdamS, not with AdamW",
    "radius": r"method 'radius' works with AdamW or AdamS, not with SGD \(torch",
    "scalar state": "NAdam keeps 'mu_product' of shape",
    "start of the state": "Rprop keeps state that does not start from zeros",
    "overlap": "overlap = True does not go with method 'diloco'",
    "norm": "max_norm is 0.0; it must be positive; pass None to switch clipping off",
    "reduction": "reduction is 'average'; it must be 'mean' or 'sum'",
    "rates": "lr of group 0=0.[12].*every replica needs the same",
    "options": "density=0.[12].*every replica needs the same",
    "kernels": "has kernels='(torch|triton)', rank [01] has.*install triton on all machines, or set kernels to 'torch'",
    "kernels of one rank": "kernels is 'triton', and the parameters are on 'cpu'; Triton needs a GPU",
    "models": "parameters=.*every replica needs the same model",
    "state of another method": "the saved state has method='quantized', this run has 'topk'",
    "state of another replica": "the saved state has replica=[01], this run has [01].*load the file that it saved",
    "state of one rank": "the saved state has density=0.5, this run has 0.1",
    "state of the wrapped optimizer": "the state has no 'replica' entry.* optimizer that you pass to replicate",
    "copy": r"would lose the method's state; save optimizer.state_dict\(\)",
    "file": r"would lose the method's state; save optimizer.state_dict\(\)",
    "group": "all parameters must be passed at construction",
}


def all_refusals(folder: str) -> list[tuple[bool, Any]]:
    return attempts(refuse, *((case, folder) for case in REFUSALS))


def test_errors_of_replicate_name_the_cause_in_one_line(pool2: Pool, tmp_path: Path) -> None:
    for rank in pool2(all_refusals, str(tmp_path)):
        for (accepted, text), pattern in zip(rank, REFUSALS.values(), strict=True):
            assert not accepted, pattern
            last = text.strip().splitlines()[-1]
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(last)
            assert last.startswith("ValueError: "), last

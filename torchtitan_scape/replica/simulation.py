"""The replicas of one process: their weights, if these differ, and the rows of their states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchtitan_scape.core.parameters import Shard, collect_shards, stored
from torchtitan_scape.methods.interface import REPLICA_WEIGHTS, State
from torchtitan_scape.optimizers.matrix_choice import unreported
from torchtitan_scape.optimizers.pytorch import create_state, set_counter, state_by_kind
from torchtitan_scape.replica.checks import ONE_OPTIMIZER
from torchtitan_scape.topology.collectives import ReplicaCollectives

Named = list[tuple[str, nn.Parameter]]
MakeOptimizer = Callable[[Named], torch.optim.Optimizer]


@dataclass(frozen=True)
class ReplicaWeights:
    """The weights, the optimizer and the moments of one replica, for methods whose replicas differ.

    Attributes:
        moments: the optimizer's state by kind and parameter name, local tensors.
        others: the state of other shapes than the parameters', in the same way.
    """

    shards: list[Shard]
    optimizer: torch.optim.Optimizer
    moments: dict[str, dict[str, Tensor]]
    others: dict[str, dict[str, Tensor]]

    @classmethod
    def of(cls, shards: list[Shard], optimizer: torch.optim.Optimizer) -> "ReplicaWeights":
        """Create the optimizer's state if it has none yet: checkpoints read and write it in place.

        Raises:
            ValueError: the optimizer keeps state that checkpoints of per-replica weights cannot store.
        """
        if not all(optimizer.state.get(shard.parameter) for shard in shards):
            create_state(optimizer)
        made = cls(shards, optimizer, *state_by_kind(optimizer, shards))
        for kind, tensors in made.others.items():
            name, values = next(iter(tensors.items()))
            raise ValueError(
                f"{type(optimizer).__name__} keeps {kind!r} of shape {tuple(values.shape)} for {name!r}; methods with "
                "per-replica weights need state of the parameters' shapes: use AdamW, for example"
            )
        return made

    @classmethod
    def copy_of(cls, shards: Sequence[Shard], make_optimizer: MakeOptimizer) -> "ReplicaWeights":
        """Return another replica with equal weights and an optimizer of its own."""
        with unreported():
            optimizer = make_optimizer([(s.name, nn.Parameter(s.parameter.detach().clone())) for s in shards])
        copies = collect_shards(optimizer.param_groups)
        for copy, shard in zip(copies, shards, strict=True):
            copy.counted = shard.counted
        return cls.of(copies, optimizer)

    def within(self, name: str, values: Tensor) -> Tensor:
        """Return values of a parameter, (n,), in the shape of its moments."""
        return values.view(next(kind[name] for kind in self.moments.values() if name in kind).shape)

    def states(self) -> list[State]:
        weights = {shard.name: stored(shard.parameter) for shard in self.shards}
        moments = [
            State(kind, tensors, per_replica=True, on_migration="copy") for kind, tensors in self.moments.items()
        ]
        return [State(REPLICA_WEIGHTS, weights, per_replica=True, on_migration="displacement"), *moments]

    def steps(self) -> list[Any]:
        """Return the counters of applied steps in the optimizer's state, one per parameter."""
        return [state["step"] for state in self.optimizer.state.values() if "step" in state]

    def set_steps(self, steps: float) -> None:
        """Set these counters."""
        for state in self.optimizer.state.values():
            set_counter(state, steps)

    def copy_rates(self, param_groups: Sequence[dict]) -> None:
        """Take the rates of another optimizer's param groups."""
        for group, rates in zip(self.optimizer.param_groups, param_groups, strict=True):
            group.update({k: v for k, v in rates.items() if k not in ("params", "param_names")})

    def swap(self, shards: Sequence[Shard]) -> None:
        """Exchange this replica's weights with those of `shards`."""
        for shard, own in zip(shards, self.shards, strict=True):
            first, second = stored(shard.parameter), stored(own.parameter)
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


def build_optimizer(
    optimizer: torch.optim.Optimizer | MakeOptimizer, model: nn.Module | None
) -> tuple[torch.optim.Optimizer, MakeOptimizer | None]:
    """Return an optimizer, and the function that builds further ones if that was passed.

    Raises:
        ValueError: it is neither of them, or builds no optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer, None
    if not callable(optimizer):
        raise ValueError(f"the optimizer is a {type(optimizer).__name__}; {ONE_OPTIMIZER}")
    if model is None:
        raise ValueError("a function that builds the optimizer needs `model`, whose parameters it receives")
    made = optimizer([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"the function that builds the optimizer returned a {type(made).__name__}; {ONE_OPTIMIZER}")
    return made, optimizer


def weights_of_replicas(
    count: int,
    shards: list[Shard],
    optimizer: torch.optim.Optimizer,
    make_optimizer: MakeOptimizer | None,
) -> list[ReplicaWeights]:
    """Return the weights of each replica of this process; the first one's are those of the model.

    Args:
        make_optimizer: builds the optimizers of the others.

    Raises:
        ValueError: there are several replicas and no `make_optimizer`.
    """
    if count > 1 and make_optimizer is None:
        raise ValueError(
            f"{count} simulated replicas of a method whose weights differ need an optimizer each; pass a function that "
            "builds one, for example partial(torch.optim.AdamW, lr=1e-3)"
        )
    others = [ReplicaWeights.copy_of(shards, make_optimizer) for _ in range(count - 1) if make_optimizer]
    return [ReplicaWeights.of(shards, optimizer), *others]


def rows_of(each: Sequence[list[State]]) -> list[State]:
    """Combine the states of this process's replicas: tensors of per-replica states get one row per replica.

    A tensor of another state is that of the first replica that has it, or consists of the parts of all.
    """
    combined = []
    for states in zip(*each, strict=True):
        first, starts = states[0], states[0].starts
        tensors = {name: values for state in reversed(states) for name, values in state.tensors.items()}
        if first.per_replica:
            rows = {name: [state.tensors[name] for state in states] for name in tensors}
            tensors = {name: torch.stack(r) if len(r) > 1 else r[0].unsqueeze(0) for name, r in rows.items()}
        elif starts is not None and len(states) > 1:
            tensors, starts = _joined(states), dict.fromkeys(tensors, 0)
        combined.append(replace(first, tensors=tensors, starts=starts))
    return combined


def _joined(states: Sequence[State]) -> dict[str, Tensor]:
    """Return whole tensors, of which each replica has a part."""
    parts: dict[str, dict[int, Tensor]] = {}
    for state in states:
        for name, values in state.tensors.items():
            parts.setdefault(name, {})[(state.starts or {})[name]] = values
    return {name: torch.cat([each[start] for start in sorted(each)]) for name, each in parts.items()}


def mean_of_rows(rows: Tensor, collectives: ReplicaCollectives) -> Tensor:
    """Return the mean over all replicas; `rows` (r, ...) are those of this process. Collective."""
    mean = rows.mean(0, dtype=torch.promote_types(rows.dtype, torch.float32))
    collectives.sum_over_replicas(mean)
    return mean.div_(collectives.replicas)


def refuse_stash(stashed: int, simulated: int) -> NoReturn:
    """Raise ValueError for a step without the gradients of all simulated replicas."""
    raise ValueError(
        f"the gradients of {stashed} replicas were stashed, and {simulated} replicas are simulated; call "
        "stash_replica_gradients() after the backward pass of each of them, then step()"
    )

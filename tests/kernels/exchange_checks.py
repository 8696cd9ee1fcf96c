"""Steps of methods with one backend, for comparisons of kernels with PyTorch, in the interpreter and on a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_scape import AdamS, Muon
from torchtitan_scape.core.parameters import collect_shards
from torchtitan_scape.methods.interface import MethodContext, StepInfo
from torchtitan_scape.methods.local_options import LocalOptions
from torchtitan_scape.methods.local_updates import LocalUpdates
from torchtitan_scape.methods.onebit_adam.method import OnebitAdam
from torchtitan_scape.methods.onebit_adam.options import OnebitAdamOptions
from torchtitan_scape.methods.quantized.method import Quantized
from torchtitan_scape.methods.quantized.options import QuantizedOptions
from torchtitan_scape.methods.quantized_update.method import QuantizedUpdate
from torchtitan_scape.methods.quantized_update.options import QuantizedUpdateOptions
from torchtitan_scape.methods.radius.method import Radius
from torchtitan_scape.methods.radius.options import RadiusOptions
from torchtitan_scape.methods.sparta.method import Sparta
from torchtitan_scape.methods.sparta.options import SpartaOptions
from torchtitan_scape.topology.collectives import ReplicaCollectives
from torchtitan_scape.topology.in_process import SimulatedReplicas

# Several tiles, a short last block, less than a block, nothing, one entry.
SHAPES = [(20, 130), (129,), (4, 5), (0, 4), (1,)]


def parameters(device: str, dtype: torch.dtype, seed: int) -> list[nn.Parameter]:
    """Return parameters of `SHAPES`; the first is not aligned to 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    shifted = torch.cat((drawn[0].new_zeros(1), drawn[0].flatten()))[1:].view(SHAPES[0])
    return [nn.Parameter(tensor) for tensor in (shifted, *drawn[1:], drawn[0].clone())]


def all_tensors(methods: list[Any]) -> list[Tensor]:
    tensors = [shard.parameter.detach() for method in methods for shard in method.context.shards]
    return tensors + [t for method in methods for state in method.states() for t in state.tensors.values()]


def move_parameters(method: Any, seed: int) -> None:
    """Add random numbers to the parameters, in place of an optimizer's step."""
    generator = torch.Generator().manual_seed(seed)
    for shard in method.context.shards:
        moved = shard.parameter.detach()
        moved += torch.randn(moved.shape, generator=generator).to(moved)


def load_owner_errors(method: Any) -> None:
    """Load errors of all entries, those of other owners included, as from a run with another layout."""
    method.prepare_to_load()
    generator = torch.Generator().manual_seed(method.collectives.replica)
    for errors in (state.tensors for state in method.states() if state.kind == "owner_error"):
        for each in errors.values():
            each.copy_(torch.randn(each.shape, generator=generator))


def sparta(
    device: str,
    backend: str,
    replicas: int,
    dtype: torch.dtype,
    steps: int = 3,
    loaded: int = 0,
    replaced: int = 0,
    **options: Any,
) -> list[Tensor]:
    """Return parameters and states after a few steps, of which the second one is skipped.

    loaded: Step before which an owner's errors of all entries are loaded.
    replaced: Step before which the parameters get another storage.
    """
    simulated, methods = SimulatedReplicas(replicas), []
    for endpoint in simulated.endpoints:
        endpoint.chunk_entries = 4096
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters(device, dtype, 0))]
        optimizer = Muon(named, lr=1e-2) if dtype == torch.float32 else torch.optim.AdamW(named)
        shards = collect_shards(optimizer.param_groups)
        context = MethodContext(shards, endpoint, optimizer, total_steps=20, kernels=backend)
        methods.append(Sparta(context, SpartaOptions(**options)))

    def work(i: int) -> None:
        for number in range(1, steps + 1):
            methods[i].finish_previous_step(number - 1 not in (0, 2))
            move_parameters(methods[i], 10 * number + i)
            if number == loaded:
                load_owner_errors(methods[i])
            for shard in methods[i].context.shards if number == replaced else ():
                shard.parameter.data = shard.parameter.data.clone()
            methods[i].exchange(StepInfo(number, torch.tensor(number != 2, device=device)))

    with torch.no_grad():
        simulated.run(work)
    return all_tensors(methods)


def limit_chunks(collectives: Any, limits: tuple[int, int]) -> None:
    """Set the most entries of a chunk with a buffer, and of one without."""
    collectives.chunk_limit = lambda entries, codec=None, in_place=False: limits[in_place]


def quantized(
    device: str,
    backend: str,
    replicas: int,
    steps: int = 3,
    full: int = 0,
    loaded: int = 0,
    unchecked: bool = False,
    limits: tuple[int, int] = (2048, 2048),
    **options: Any,
) -> list[Tensor]:
    """Return the synchronized gradients and the errors of a few steps. In the second one gradients are not finite.

    full: Step of a full exchange.
    loaded: Step before which an owner's errors of all entries are loaded.
    limits: Most entries of a chunk with a buffer, and of one without.
    unchecked: The exchange starts before it is known whether the step is skipped, as during a backward pass.
    """
    simulated, methods, found = SimulatedReplicas(replicas), [], []
    for endpoint in simulated.endpoints:
        limit_chunks(endpoint, limits)
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters(device, torch.float32, 0))]
        optimizer = torch.optim.SGD(named)
        shards = collect_shards(optimizer.param_groups)
        scale = float(replicas)
        context = MethodContext(shards, endpoint, optimizer, gradient_scale=scale, kernels=backend)
        methods.append(Quantized(context, QuantizedOptions(**options)))

    def work(i: int) -> list[Tensor]:
        results = []
        for number in range(1, steps + 1):
            methods[i].finish_previous_step(number - 1 not in (0, 2))
            if number == full:
                methods[i].request_full_exchange()
            if number == loaded:
                load_owner_errors(methods[i])
            gradients = [p.detach().flatten() for p in parameters(device, torch.float32, 10 * number + i)]
            gradients[-1] = torch.cat((gradients[-1][:1], gradients[-1]))[1:]  # not aligned
            if number == 2:
                gradients[0][3:5] = torch.tensor([torch.nan, torch.inf])
            info, method = StepInfo(number, torch.tensor(number != 2, device=device)), methods[i]
            if unchecked:
                method.begin()
                method.bind(gradients)
                started = [method.start_chunk(k, gradients, applied=None) for k in range(len(method.chunks))]
                for sent in started:
                    sent.handle.wait()
                    method.finish_early(sent, info)
            else:
                gradients = method.synchronize(gradients, info)
            results += gradients if number != 2 else []
        return results

    with torch.no_grad():
        found = [tensor for each in simulated.run(work) for tensor in each]
    return found + [t for method in methods for state in method.states() for t in state.tensors.values()]


class _Started:
    """An exchange that has started, in the place of `methods.overlap.BackwardOverlap`."""

    def __init__(self, method: QuantizedUpdate, gradients: list[Tensor], number: int) -> None:
        self._method = method
        self._sent = [method.start_early(chunk, gradients) for chunk in method.begin_early(number)]
        self.active = bool(self._sent)

    def finish(self, info: StepInfo) -> None:
        for sent in self._sent:
            sent.handle.wait()
            self._method.finish_early(sent, info)


def quantized_update(
    device: str, backend: str, replicas: int, optimizer: str, full: int = 0, early: bool = False, **options: Any
) -> list[Tensor]:
    """Return the weights and all states of four steps, of which the second one is skipped.

    full: Step of a full exchange.
    early: The exchange starts before it is known whether the step is skipped, as during a backward pass.
    """
    simulated, own = SimulatedReplicas(replicas), parameters(device, torch.float32, 0)
    named = [(f"layers.{i}.weight", p) for i, p in enumerate(own)]
    inner = Muon(named, lr=1e-2) if optimizer == "Muon" else AdamS(named, lr=1e-2, kernels="torch")
    shards, methods = collect_shards(inner.param_groups), list[QuantizedUpdate]()

    def make(i: int) -> QuantizedUpdate:
        endpoint = simulated.endpoints[i]
        endpoint.chunk_entries = 2048
        context = MethodContext(shards, endpoint, inner, gradient_scale=1.5, max_norm=1.0, kernels=backend)
        return QuantizedUpdate(context, QuantizedUpdateOptions(**options))

    methods += simulated.run(make)

    def work(i: int) -> None:
        for number in range(1, 5):
            gradients = [p.detach().flatten() for p in parameters(device, torch.float32, 10 * number + i)]
            gradients[-1] = torch.cat((gradients[-1][:1], gradients[-1]))[1:]  # not aligned
            methods[i].finish_previous_step(number - 1 not in (0, 2))
            if number == full:
                methods[i].request_full_exchange()
            if early:
                methods[i].overlap = _Started(methods[i], gradients, number)
            methods[i].step(gradients, StepInfo(number, torch.tensor(number != 2, device=device)))

    with torch.no_grad():
        simulated.run(work)
    return all_tensors(methods) + [t for m in methods for state in m.owned.states() for t in state.tensors.values()]


def radius(device: str, backend: str, replicas: int, chunk_entries: int) -> list[Tensor]:
    """Return parameters, residuals and masks after five steps, of which the fourth one is skipped."""
    simulated, own = SimulatedReplicas(replicas) if replicas > 1 else None, parameters(device, torch.float32, 0)
    optimizer = AdamS([(f"p{i}", p) for i, p in enumerate(own)], lr=1e-2)
    shards = collect_shards(optimizer.param_groups)
    methods = []
    for endpoint in simulated.endpoints if simulated else [ReplicaCollectives(None)]:
        endpoint.chunk_entries = chunk_entries
        context = MethodContext(shards, endpoint, optimizer, gradient_scale=1.5, kernels=backend, max_norm=1.0)
        methods.append(Radius(context, RadiusOptions(start=0, interval=2, density=0.2)))

    def work(i: int) -> None:
        for number in range(1, 6):
            gradients = [p.detach().flatten() for p in parameters(device, torch.float32, 10 * number + i)]
            methods[i].step(gradients, StepInfo(number, torch.tensor(number != 4, device=device)))

    with torch.no_grad():
        simulated.run(work) if simulated else work(0)
    return all_tensors(methods)


def local(device: str, backend: str, cls: type[LocalUpdates], options: LocalOptions) -> list[Tensor]:
    """Return parameters and states after four steps of two replicas, of which the second one is skipped."""
    simulated, methods = SimulatedReplicas(2), []
    for endpoint in simulated.endpoints:
        named = [(f"layers.{i}.weight", p) for i, p in enumerate(parameters(device, torch.float32, 0))]
        optimizer = AdamS(named, lr=1e-2)
        methods.append(
            cls(MethodContext(collect_shards(optimizer.param_groups), endpoint, optimizer, kernels=backend), options)
        )

    def work(i: int) -> None:
        for number in range(1, 5):
            move_parameters(methods[i], 10 * number + i)
            methods[i].exchange(StepInfo(number, torch.tensor(number != 2, device=device)))

    with torch.no_grad():
        simulated.run(work)
    return all_tensors(methods)


def adam(device: str, backend: str, limits: tuple[int, int] = (1 << 16, 1 << 16)) -> list[Tensor]:
    """Return first moments and errors after three steps, of which the last two send the momentum.

    limits: As in `quantized`.
    """
    simulated, own = SimulatedReplicas(2), parameters(device, torch.float32, 0)
    optimizer = torch.optim.AdamW([(f"p{i}", p) for i, p in enumerate(own)], lr=1e-2)
    shards = collect_shards(optimizer.param_groups)
    methods = []
    for endpoint in simulated.endpoints:
        context = MethodContext(shards, endpoint, optimizer, gradient_scale=1.5, kernels=backend, total_steps=3)
        limit_chunks(endpoint, limits)
        methods.append(OnebitAdam(context, OnebitAdamOptions(warmup_steps=1, code="e2m1")))

    def work(i: int) -> None:
        for number in range(1, 4):
            gradients = [p.detach().flatten() for p in parameters(device, torch.float32, 10 * number + i)]
            methods[i].step(gradients, StepInfo(number, torch.tensor(True, device=device)))

    with torch.no_grad():
        simulated.run(work)
    errors = [t for method in methods for state in method.states() for t in state.tensors.values()]
    return [optimizer.state[p]["exp_avg"] for p in own] + errors

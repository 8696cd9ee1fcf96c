"""Muon for the hidden matrices of a model and AdamW for the other parameters, as one optimizer.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), kellerjordan.github.io/posts/muon; the
step size is that of Liu et al., "Muon is Scalable for LLM Training" (2025), arXiv:2502.16982.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard as Cut
from torch.optim import Optimizer

from torchtitan_scape.core.options import check_hyperparameters
from torchtitan_scape.core.parameters import (
    Shard,
    StoredTensors,
    collect_shards,
    contiguous_gradient,
    is_slice,
    local,
)
from torchtitan_scape.core.tensors import add_to_each_
from torchtitan_scape.kernels.backends import choose_backend, muon_passes
from torchtitan_scape.kernels.codec.formats import ALIGNED_BYTES
from torchtitan_scape.optimizers.cost import ITERATIONS
from torchtitan_scape.optimizers.matrix_choice import (
    ROWS,
    MatrixChoice,
    MatrixSplit,
    blocks_of,
    check_names,
    check_state,
    checksum,
    choose_matrices,
    is_hidden,
    report_choice,
    unreported,
)
from torchtitan_scape.optimizers.pytorch import AdamWPass

A, B, C = 3.4445, -4.7750, 2.0315  # Coefficients of Jordan et al.
_BATCH_ENTRIES = 1 << 26  # whose directions exist at once, 2 bytes each


class Muon(Optimizer):
    """PyTorch's Muon and AdamW on synchronized gradients, with decoupled weight decay.

    Muon steps along its momentum orthogonalized by five Newton-Schulz iterations in BF16. By default it updates the
    matrices inside numbered lists of blocks, such as `layers.0.attention.wq.weight`; see `core.hidden_matrices`. AdamW
    updates embeddings, output, norms and biases, as recommended by Muon's authors and PyTorch's documentation. Both use
    one learning rate: the root mean square of a Muon step is 0.2 lr, about that of AdamW (PyTorch's
    `match_rms_adamw`). A log line of level INFO has the numbers of both and the largest three names of each.

    Every matrix of a stack (experts, rows, columns) is orthogonalized by itself.

    Matrices sharded by FSDP2 are exchanged within the replica in BF16, so that each rank iterates on whole matrices,
    bitwise equal to an unsharded run. A step is then collective over these ranks. With `share`, replicas with equal
    gradients also divide the matrices, and gather the results in BF16, with equal bits again.

    With `fused`, a step is skipped on the device if `found_inf` is set, as by `torch.amp.GradScaler`. The gradients are
    multiplied by `gradient_factor`, FP32 () or None, as they are read.

    The state of every parameter is "step" and "exp_avg", FP32, which is Muon's momentum; AdamW also has "exp_avg_sq". A
    parameter without a gradient is not changed; the gradient must then be missing on all ranks of the replica.

    Args:
        params: (name, parameter), in one or several param groups; plain tensors or DTensors, which may be sharded along
            the first dimension.
        lr: Learning rate.
        betas: The first is also Muon's (Nesterov) momentum.
        eps: AdamW's epsilon. Muon uses PyTorch's, which prevents 0 / 0 for a zero gradient.
        weight_decay: Decoupled weight decay.
        fused, foreach: AdamW's implementation.
        count: Receives the bytes sent to each rank of the replica; see `MatrixExchange`.
        share: Divides the matrices among replicas; None for no division. Every replica updates all stacks.
        matrices: The parameters that Muon updates: a function of (name, parameter), or names or patterns with
            wildcards, such as "encoder.*.weight". Patterns leave out vectors. None for the default.
        split: Fused matrices that are orthogonalized in contiguous blocks, by name or pattern: a number of equal blocks
            of rows, as in `{"*.c_attn.weight": 3}` for query, key and value, or the sizes of all blocks, which add up
            to the rows or the columns; to the rows, if the matrix is square. The length of a block's step follows from
            its own shape. None for whole matrices. Leave out matrices with interleaved rows, whose blocks would mix
            heads: TorchTitan 0.3.0's `wqkv` (KV heads, query heads per KV head + 2, head dimension), and
            `query_key_value` of GPT-NeoX (heads, 3, head dimension).
        kernels: Of everything but the matrix products, as in `AdamS`.

    Attributes:
        hidden: The parameters that Muon updates, the largest first.

    Raises:
        ValueError: Parameters have no names, no matrix is chosen, or a matrix is sharded otherwise. In a step:
            parameters are not in FP32.
    """

    found_inf: Tensor | None = None  # `GradScaler` sets and deletes that of an object
    gradient_factor: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        fused: bool = False,
        foreach: bool = False,
        count: Callable[[Sequence[int]], None] | None = None,
        share: "ReplicaShare | None" = None,
        matrices: MatrixChoice = None,
        split: MatrixSplit | None = None,
        kernels: str = "auto",
    ) -> None:
        check_hyperparameters(lr, betas, eps, weight_decay)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        check_names(self.param_groups)
        self._shards = shards = collect_shards(self.param_groups)
        self._is_checked = False  # by `step`, because the model may be converted after `check_dtypes`
        # Sorted by size, so that matrices exchanged together take about the same time.
        self.hidden = sorted(choose_matrices(shards, matrices), key=lambda shard: -shard.entries)
        self._blocks = blocks_of(self.hidden, split)
        rest = [
            [s.parameter for s in shards if s.group == i and not self.updates(s)] for i in range(len(self.param_groups))
        ]
        self._rest_groups = [i for i, parameters in enumerate(rest) if parameters]
        self._exchange = MatrixExchange(_group_of(self.hidden), count)
        self._share = share or ReplicaShare()
        self._settings: dict[str, Any] = {"fused": fused, "foreach": foreach, "count": count, "kernels": kernels}
        self._step_supports_amp_scaling = fused
        device = shards[0].device
        backend = choose_backend(kernels, device)
        self._applied = torch.ones((), dtype=torch.bool, device=device)  # without `found_inf`
        self._passes, self._stored = muon_passes(backend), StoredTensors(self.hidden)
        self._adamw = self._adamw_pass = None
        if self._rest_groups:
            groups = [{"params": rest[i]} for i in self._rest_groups]
            self._adamw = torch.optim.AdamW(groups, fused=fused, foreach=foreach)
            self._adamw_pass = AdamWPass(self._adamw, backend) if backend == "triton" else None
        for shard in shards:
            parameter = shard.parameter
            step = torch.zeros((), dtype=torch.float32, device=local(parameter).device if fused else "cpu")
            kinds = ("exp_avg",) if self.updates(shard) else ("exp_avg", "exp_avg_sq")
            moments = {kind: torch.zeros_like(parameter, dtype=torch.float32).detach() for kind in kinds}
            self.state[parameter] = {"step": step, **moments}
        report_choice(shards, self.hidden, sum(len(one.sizes) > 1 for one in self._blocks.values()), matrices)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch's constructor does.

        Raises:
            RuntimeError: The optimizer is built already.
        """
        if hasattr(self, "_shards"):
            raise RuntimeError(
                f"Muon has chosen its matrices and cannot add the param group {list(param_group)} afterwards; build "
                "a new Muon with all param groups"
            )
        super().add_param_group(param_group)

    def for_parts(self, param_groups: list[dict[str, Any]], wholes: Mapping[str, Tensor]) -> Optimizer:
        """Return an optimizer with the same settings for parts of the parameters, without a `share`.

        Args:
            param_groups: Have names. Parts of matrices are whole matrices.
            wholes: The parameters of which they are parts, by their names.
        """
        matrices = {name: self._blocks[id(whole)] for name, whole in wholes.items() if id(whole) in self._blocks}
        if not matrices:
            settings = {key: self._settings[key] for key in ("fused", "foreach")}
            return torch.optim.AdamW(param_groups, **settings)
        split = {name: blocks.sizes for name, blocks in matrices.items() if len(blocks.sizes) > 1}
        with unreported():
            return Muon(param_groups, matrices=lambda name, _: name in matrices, split=split, **self._settings)

    def check_dtypes(self) -> None:
        """Raise ValueError if a parameter is not in FP32, so that small changes would be lost."""
        for shard in self._shards:
            if (dtype := shard.parameter.dtype) != torch.float32:
                raise ValueError(
                    f"Muon needs parameters in FP32, and {shard.name!r} is {dtype}; keep them in FP32 and compute in "
                    "BF16 by mixed precision or autocast, or use the method 'quantized_update', which adds FP32 copies"
                )

    def updates(self, shard: Shard) -> bool:
        """Return whether Muon updates the parameter; if not, AdamW does."""
        return id(shard.parameter) in self._blocks

    def fingerprint(self) -> dict[str, str]:
        """Return numbers and checksums of the chosen matrices and of the divided ones, equal on all replicas."""
        chosen = [(s.name, self._blocks[id(s.parameter)]) for s in self.hidden]
        divided = [(name, blocks) for name, blocks in chosen if len(blocks.sizes) > 1]
        return {"matrices": checksum([name for name, _ in chosen]), "split": checksum(divided)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as torch does, but keep the step counters on their devices.

        Raises:
            ValueError: Muon updated other matrices when the state was saved, or the state is another optimizer's.
        """
        if self.state:  # else it was released
            check_state(state_dict, self._shards, self.updates)
        devices = {parameter: state["step"].device for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, device in devices.items():
            self.state[parameter]["step"] = self.state[parameter]["step"].to(device, torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step. Return the closure's value, or None without a closure."""
        loss = None
        if not self._is_checked:
            self.check_dtypes()
            self._is_checked = True
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        applied = self._applied if self.found_inf is None else self.found_inf == 0
        weights = dict(zip(map(id, self.hidden), self._stored(), strict=True))
        for shards in self._batches():
            directions = self._average(shards, applied)
            self._move(shards, weights, self._orthogonalized_by_all(shards, directions), applied)
        if self._adamw is not None:
            self._step_of_rest(self._adamw, applied)
        return loss

    def _step_of_rest(self, adamw: torch.optim.AdamW, applied: Tensor) -> None:
        """Take AdamW's step on the parameters that are not Muon's."""
        adamw.state = self.state
        for own, i in zip(adamw.param_groups, self._rest_groups, strict=True):
            own.update({key: self.param_groups[i][key] for key in ("lr", "betas", "eps", "weight_decay")})
        if self._adamw_pass is not None and self._adamw_pass.has_rule():
            self._adamw_pass.step(applied, self.gradient_factor)
            return
        parameters = [p for group in adamw.param_groups for p in group["params"] if p.grad is not None]
        if self.gradient_factor is not None and parameters:
            torch._foreach_mul_([local(p.grad) for p in parameters], self.gradient_factor)  # type: ignore[arg-type]
        adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        adamw.step()

    def _orthogonalize(self, shards: Sequence[Shard], directions: list[Tensor]) -> list[Tensor]:
        """Return matrices, BF16, or their blocks, orthogonalized. Collective over the ranks of the replica.

        Args:
            shards: At most as many as ranks exchange a matrix.
            directions: This rank's rows of a matrix, or this rank's matrices of a stack, for each shard.
        """
        sharded = [i for i, shard in enumerate(shards) if shard.parameter.ndim == 2]
        if sharded:
            self._exchange.work(
                [directions[i] for i in sharded],
                [shards[i].parameter.shape for i in sharded],
                lambda number, matrix: self._orthogonalized(shards[sharded[number]], matrix),
            )
        for i in (i for i in range(len(shards)) if i not in sharded):
            directions[i] = self._orthogonalized(shards[i], directions[i])
        return directions

    def parts(self, shard: Shard, local_values: Tensor) -> Iterator[tuple[Tensor, float]]:
        """Yield views of this rank's values of the blocks of a matrix, (n, b), or of a stack, and the scales of steps.

        A step moves a block by learning rate times scale times the orthogonalized block. The scales give updates a root
        mean square of 0.2 at a learning rate of 1: 0.2 sqrt(max(rows, columns)) of the block.
        """
        blocks, first, end = self._blocks[id(shard.parameter)], 0, 0
        if len(blocks.sizes) == 1:
            yield local_values, 0.2 * math.sqrt(max(blocks.shape))
            return
        if blocks.dim == ROWS and shard.parameter.ndim == 2:  # this rank may have a part of a block
            first = self._exchange.first_row(shard.parameter.shape[0])
        for size in blocks.sizes:
            begin, end = end, end + size
            low, high = max(begin, first), min(end, first + local_values.shape[blocks.dim])
            longest = max(size, blocks.shape[1] if blocks.dim == ROWS else blocks.shape[0])
            if low < high:
                yield local_values.narrow(blocks.dim, low - first, high - low), 0.2 * math.sqrt(longest)

    def _orthogonalized(self, shard: Shard, matrix: Tensor) -> Tensor:
        """Return a whole matrix, or whole matrices of a stack, with orthogonalized blocks."""
        blocks = self._blocks[id(shard.parameter)]
        if len(blocks.sizes) == 1:
            return orthogonalized(matrix)
        parts: Sequence[Tensor] = torch.split(matrix, blocks.sizes, blocks.dim)  # type: ignore[no-untyped-call]
        return torch.cat([orthogonalized(part) for part in parts], blocks.dim)

    def _batches(self) -> Iterator[list[Shard]]:
        """Yield the parameters with gradients in parts, whose directions exist at once: matrices, then stacks."""
        present = [shard for shard in self.hidden if shard.parameter.grad is not None]
        matrices = [shard for shard in present if shard.parameter.ndim == 2]
        together, batch = self._exchange.ranks * self._share.replicas, list[Shard]()
        for first in range(0, len(matrices), together):
            batch += matrices[first : first + together]
            if sum(shard.size for shard in batch) >= _BATCH_ENTRIES:
                yield batch
                batch = []
        if batch:
            yield batch
        yield from ([shard] for shard in present if shard.parameter.ndim == 3)

    def _is_own(self, number: int) -> bool:
        """Return whether this replica orthogonalizes the matrix of this number in a batch."""
        return number // self._exchange.ranks % self._share.replicas == self._share.replica

    def _average(self, shards: Sequence[Shard], applied: Tensor) -> list[Tensor]:
        """Add the gradients to the momenta, and count the step, if `applied`, bool ().

        Returns:
            The directions to be orthogonalized, BF16; empty tensors for matrices of other replicas.
        """
        states = [self.state[shard.parameter] for shard in shards]
        for device in {state["step"].device for state in states}:
            one = torch.ones((), dtype=torch.bool, device=device) if self.found_inf is None else applied.to(device)
            add_to_each_([state["step"] for state in states if state["step"].device == device], one)
        directions: list[Tensor] = self._passes.average(
            [contiguous_gradient(shard) for shard in shards],
            [local(state["exp_avg"]) for state in states],
            [self.param_groups[shard.group]["betas"][0] for shard in shards],
            applied,
            self.gradient_factor,
            [shard.parameter.ndim == 3 or self._is_own(i) for i, shard in enumerate(shards)],
        )
        return directions

    def _orthogonalized_by_all(self, shards: Sequence[Shard], directions: list[Tensor]) -> list[Tensor]:
        """Return the orthogonalized directions of a batch, of which each replica computes its share. Collective."""
        if shards[0].parameter.ndim == 3:
            return self._orthogonalize(shards, directions)
        gathered, ranks = list[Tensor](), self._exchange.ranks
        for first in range(0, len(shards), ranks * self._share.replicas):
            numbers = range(first, min(first + ranks * self._share.replicas, len(shards)))
            own = [i for i in numbers if self._is_own(i)]
            mine = self._orthogonalize([shards[i] for i in own], [directions[i] for i in own]) if own else []
            shapes = [shards[i].local_shape for i in numbers]
            by_replica = [shapes[at : at + ranks] for at in range(0, len(shapes), ranks)]
            gathered += self._share.gather(mine, by_replica, shards[0].device)
        return gathered

    def _move(
        self, shards: Sequence[Shard], stored: dict[int, Tensor], directions: Sequence[Tensor], applied: Tensor
    ) -> None:
        """Decay the weights and move them along orthogonalized directions. stored: All weights, by id of the shard."""
        weights, steps, factors = [], [], []
        for shard, direction in zip(shards, directions, strict=True):
            lr, decay = self.param_groups[shard.group]["lr"], self.param_groups[shard.group]["weight_decay"]
            parts = zip(self.parts(shard, stored[id(shard)]), self.parts(shard, direction), strict=True)
            for (weight, scale), (step, _) in parts:
                weights.append(weight)
                steps.append(step)
                factors.append((1 - lr * decay, -lr * scale))
        self._passes.move(weights, steps, factors, applied)


class MatrixExchange:
    """All-to-all that assigns one whole matrix to each rank at a time, so that no work is repeated.

    Args:
        group: The ranks, in the order of their rows, sharded as by FSDP2: ceil(rows / ranks) each, fewer or none on the
            last ranks. None for one rank.
        count: Called for every exchange with the bytes sent to each rank, in rank order.
    """

    def __init__(self, group: ProcessGroup | None, count: Callable[[Sequence[int]], None] | None = None) -> None:
        self._group, self._count = group, count
        self.ranks = 1 if group is None else group.size()
        self._group_rank = 0 if group is None else group.rank()

    def first_row(self, rows: int) -> int:
        """Return the first row of this rank's shard of a matrix with so many rows."""
        return self._group_rank * -(-rows // self.ranks)

    def work(
        self, shards: Sequence[Tensor], shapes: Sequence[torch.Size], on_whole: Callable[[int, Tensor], Tensor]
    ) -> None:
        """Replace matrices by `on_whole` of the whole matrices. Collective.

        Args:
            shards: This rank's rows of at most `ranks` matrices, contiguous and of one dtype; overwritten by the rows
                of the result.
            shapes: Shapes of the whole matrices, equal on all ranks.
            on_whole: Function of the position of a matrix among `shards` and the whole matrix; called on the one rank
                that owns the matrix.
        """
        assert len(shards) <= self.ranks
        if self._group is None:
            shards[0].copy_(on_whole(0, shards[0]))
            return
        send_sizes = [-(-rows // self.ranks) * columns for rows, columns in shapes] + [0] * (self.ranks - len(shards))
        receive_sizes = [send_sizes[self._group_rank]] * self.ranks
        parts = shards[0].new_zeros(sum(send_sizes))
        views = [
            part[: shard.numel()].view_as(shard)
            for shard, part in zip(shards, parts.split(send_sizes)[: len(shards)], strict=True)
        ]
        torch._foreach_copy_(views, list(shards))
        whole = parts.new_empty(sum(receive_sizes))
        self._exchange(whole, receive_sizes, parts, send_sizes)
        if self._group_rank < len(shards):
            rows, columns = shapes[self._group_rank]
            matrix = whole.view(-1, columns)[:rows]
            matrix.copy_(on_whole(self._group_rank, matrix))
        self._exchange(parts, send_sizes, whole, receive_sizes)
        torch._foreach_copy_(list(shards), views)

    def _exchange(self, output: Tensor, outputs: list[int], parts: Tensor, sizes: list[int]) -> None:
        if self._count is not None:
            self._count([size * parts.itemsize for size in sizes])
        dist.all_to_all_single(output, parts, outputs, sizes, group=self._group)


class ReplicaShare:
    """All-gather of matrices that were divided among replicas with equal parameters and gradients.

    Args:
        replicas: Number of replicas.
        replica: Index of this replica.
        all_gather: Called with output (replicas * n,) and input (n,), BF16, in replica order; the input has a multiple
            of 16 bytes. None for one replica.
    """

    def __init__(
        self, replicas: int = 1, replica: int = 0, all_gather: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        assert replicas == 1 or all_gather is not None
        self.replicas, self.replica, self._all_gather = replicas, replica, all_gather

    def gather(
        self, own: Sequence[Tensor], shapes: Sequence[Sequence[torch.Size]], device: torch.device
    ) -> list[Tensor]:
        """Return the matrices of all replicas, in order. Collective.

        Args:
            own: Matrices of this replica, BF16.
            shapes: Shapes of every replica's matrices; replicas without matrices may be missing at the end.
            device: Device of the matrices.
        """
        if self._all_gather is None:
            return list(own)
        sizes = [[shape.numel() for shape in part] for part in shapes]
        entries = ALIGNED_BYTES // 2  # BF16; at least so many, because the last ranks of a replica may have no rows
        length = max(1, -(-max(map(sum, sizes)) // entries)) * entries
        input = torch.zeros(length, dtype=torch.bfloat16, device=device)
        output = input.new_empty(self.replicas * length)
        if own:
            torch.cat([matrix.reshape(-1) for matrix in own], out=input[: sum(sizes[self.replica])])
        self._all_gather(output, input)
        return [
            values.view(shape)
            for row, part, counts in zip(output.split(length), shapes, sizes, strict=False)
            for values, shape in zip(row[: sum(counts)].split(counts), part, strict=True)
        ]


def hidden_names(optimizer: Optimizer, shards: Iterable[Shard]) -> frozenset[str]:
    """Return the names of the parameters that Muon updates; with another optimizer, those of its default rule."""
    updates = optimizer.updates if isinstance(optimizer, Muon) else is_hidden
    return frozenset(shard.name for shard in shards if updates(shard))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return BF16 (a, b) or (n, a, b): every matrix, scaled to norm 1, after Newton-Schulz iterations that move
    singular values towards 1.

    x = A x + (B g + C g^2) x with g = x x^T, for the matrix or, if it has more rows than columns, its transpose. This
    equals PyTorch's Muon, which has no separate function for it, with every product rounded to BF16. On a CPU products
    of the BF16 numbers are computed in FP32: BF16 products take 1.5 to 2.5 times as long with BF16 instructions, and
    more than ten times without. Sums in another order may round differently.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    if matrix.ndim == 2:
        add_product, norm = torch.addmm, x.norm()
    else:
        add_product, norm = torch.baddbmm, torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    dtype = products_dtype(matrix.device)

    def to_bf16(product: Tensor) -> Tensor:
        return product.bfloat16().to(dtype)

    x = (x / norm.clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = to_bf16(x @ x.mT)
        x = to_bf16(add_product(x, to_bf16(add_product(gram, gram, gram, beta=B, alpha=C)), x, beta=A))
    return (x.mT if is_tall else x).bfloat16()


def products_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _group_of(shards: Sequence[Shard]) -> ProcessGroup | None:
    """Return the group over which all matrices are sharded by rows, or None if they are whole.

    Raises:
        ValueError: A matrix is sharded otherwise, or a matrix of a stack is not whole.
    """
    groups: dict[ProcessGroup | None, str] = {}
    for shard in shards:
        parameter, sharded_axes, is_stack = shard.parameter, [], shard.parameter.ndim == 3
        if isinstance(parameter, DTensor):
            sizes = parameter.device_mesh.shape
            # On top of column-wise tensor parallelism, `is_shard` is false for FSDP2's placement.
            sharded_axes = [
                (axis, p) for axis, p in enumerate(parameter.placements) if not p.is_replicate() and sizes[axis] > 1
            ]
        if is_stack:  # FSDP2 and expert parallelism may both divide it: each rank has whole matrices
            needed = "stacks of whole matrices, sharded along their first dimension"
            supported = all(getattr(placement, "dim", None) == 0 for _, placement in sharded_axes)
        else:
            needed = "matrices that are whole or sharded by rows"
            supported = len(sharded_axes) <= 1 and all(placement == Cut(0) for _, placement in sharded_axes)
        if is_slice(parameter) or not supported:
            raise ValueError(
                f"Muon needs {needed} only, and {shard.name!r} of {tuple(parameter.shape)} is not; train without "
                "tensor parallelism and [sharding.levels], leave it to AdamW by matrices=, or set [optimizer] name = "
                "'AdamW'"
            )
        if not is_stack:
            groups[parameter.device_mesh.get_group(sharded_axes[0][0]) if sharded_axes else None] = shard.name
    if len(groups) > 1:
        raise ValueError(
            f"Muon needs matrices with the same sharding, but {' and '.join(map(repr, groups.values()))} differ"
        )
    return next(iter(groups), None)

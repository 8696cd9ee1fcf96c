"""The model in a checkpoint or an export: the weights that all replicas share, under all names of the model."""

from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torchtitan_scape.checkpoint.global_layout import GlobalLayout, own_storage
from torchtitan_scape.checkpoint.slices import FlatSlices
from torchtitan_scape.core.parameters import is_slice, plain_name
from torchtitan_scape.replica.optimizer import ReplicaOptimizer


class ModelCheckpoint(Stateful):
    """The model for a checkpoint or an export: the weights that all replicas share.

    Args:
        own: state of the model itself, with `state_dict` and `load_state_dict`. Loading goes into it.
    """

    def __init__(self, own: Any, optimizers: ReplicaOptimizer, layout: GlobalLayout) -> None:
        self.own, self._optimizers, self._layout = own, optimizers, layout

    def state_dict(self) -> dict[str, Any]:
        shared = self._optimizers.saved_model()
        parameters = {shard.name: shard.parameter for shard in self._optimizers.shards()}
        found: dict[str, Any] = dict(self.own.state_dict())
        others = self._other_names(found)
        found |= {name: self._layout.whole(parameters[name], own_storage(shared[name])) for name in shared}
        return found | {other: found[name] for other, name in others.items()}

    def load_targets(self) -> dict[str, Any]:
        """Return the tensors to read a checkpoint's model into: the model's own, or its FP32 masters.

        A tied parameter is read by its first name: earlier versions saved weights of a single replica under the others.
        """
        own = self.own.state_dict()
        others = self._other_names(own)
        found = {name: values for name, values in own.items() if name not in others}
        for shard in self._optimizers.shards():
            if is_slice(shard.parameter):
                found[shard.name] = self._layout.whole(shard.parameter, shard.parameter.detach())
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        others = self._other_names(self.own.state_dict())
        state_dict = state_dict | {other: state_dict[name] for other, name in others.items()}
        self.own.load_state_dict({k: v for k, v in state_dict.items() if not isinstance(v, FlatSlices)})
        self._optimizers.model_loaded()

    def _other_names(self, own: dict[str, Any]) -> dict[str, str]:
        """Return each further name of a tied parameter in the model's state, with its first name, that of the shard."""
        model = self._optimizers.model
        names = list(model.named_parameters(remove_duplicate=False)) if model is not None else []
        first = {id(parameter): plain_name(name) for name, parameter in reversed(names)}
        pairs = {plain_name(name): first[id(parameter)] for name, parameter in names}
        return {other: name for other, name in pairs.items() if other != name and other in own}

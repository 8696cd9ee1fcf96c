"""Data of the simulated replicas of one rank; each replica reads the same documents as a separate rank would."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from torchtitan_scape.data.loader import TextDataLoader
from torchtitan_scape.titan.data import BaseDataLoader

Batch = tuple[dict[str, Tensor], Tensor]


class SimulatedDataLoader(BaseDataLoader):
    """Data loader that yields `each` batches of each replica's loader in turn, repeatedly.

    It ends when one of the loaders ends, as a run of N ranks does. Its state is the union of the states of all loaders,
    under the names that they have on N ranks. TorchTitan saves between two steps, when every loader has yielded the
    same number of batches.
    """

    def __init__(self, loaders: Sequence[TextDataLoader], each: int = 1) -> None:
        self.loaders, self.each = tuple(loaders), each

    def __iter__(self) -> Iterator[Batch]:
        replicas = [iter(loader) for loader in self.loaders]
        while True:
            for batches in replicas:
                for _ in range(self.each):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                    yield batch

    def empty_documents(self) -> int:
        return sum(loader.empty_documents() for loader in self.loaders)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for loader in self.loaders for key, value in loader.state_dict().items()}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """Return `TextDataLoader.saved_state` for the given number of readers."""
        return self.loaders[0].saved_state(readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state_dict)

    def load_resharded(self, states: Sequence[dict[str, Any]]) -> str:
        """Apply `TextDataLoader.load_resharded` to every replica. Return a line for the log."""
        *_, line = (loader.load_resharded(states) for loader in self.loaders)
        return line

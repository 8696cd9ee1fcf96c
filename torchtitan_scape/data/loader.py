"""TorchTitan's text data set and loader with a position that is plain JSON and fits any number of readers."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_scape.data.borders import BoundaryTokenizer
from torchtitan_scape.data.documents import Documents, documents
from torchtitan_scape.titan.config import Training, Validation
from torchtitan_scape.titan.data import BaseTokenizer, HuggingFaceTextDataset, ParallelAwareDataloader

logger = logging.getLogger(__name__)

FORMAT = 1
Item = tuple[dict[str, torch.Tensor], torch.Tensor]


class NoTextError(ValueError):
    """A reader's share of the data has no token."""

    def __init__(self, message: str) -> None:
        # A loader's worker process wraps it in several lines, a traceback among them; the last one is the message.
        super().__init__(message.strip().splitlines()[-1].rpartition(f"{type(self).__name__}: ")[2])


class TextDataset(HuggingFaceTextDataset):
    """Sequences of `seq_len` tokens from the documents of one reader.

    Args:
        passes: epochs to read; 0 for no end.
    """

    def __init__(
        self,
        name: str,
        path: str | None,
        tokenizer: BaseTokenizer,
        seq_len: int,
        rank: int = 0,
        world: int = 1,
        passes: int = 0,
    ) -> None:
        self._token_buffer: list[int]
        super().__init__(name, path, tokenizer, seq_len, infinite=passes != 1)
        self.passes = passes
        self._begin = 0  # what is before it in the buffer was given out
        self._data: Documents = documents(self.dataset_name, self._data, self._text_processor, rank, world)
        self._given = 0
        self._before: tuple[int, int] | None = None

    def _get_data_iter(self) -> Iterator[dict[str, Any]]:
        """Called at the beginning of every epoch. Raises NoTextError where the last one had no token."""
        now = self._given, len(self._token_buffer)
        if now == self._before:
            raise NoTextError(
                f"{self.dataset_name}: the share of data-parallel reader {self._data.rank} of {self._data.world} has "
                "no token in a whole epoch; look at the data, or read them with fewer ranks"
            )
        self._before = now if self._data.whole else None
        self.infinite = self.passes == 0 or self._data.epoch + 1 < self.passes
        if self.passes and self._data.epoch >= self.passes:
            return iter(())
        return iter(self._data)

    def __iter__(self) -> Iterator[Item]:
        """TorchTitan's, which copies what is left of a document for every sequence of it."""
        yield from self._sequences()  # of what a checkpoint's reader had read
        while True:
            for sample in self._get_data_iter():
                text = self._text_processor(sample)
                self._token_buffer += self._tokenizer.encode(text, add_bos=True, add_eos=True)
                yield from self._sequences()
            if not self.infinite:
                logger.warning(f"{self.dataset_name}: the data have ended")
                return
            logger.warning(f"{self.dataset_name}: the data begin again")
            self._data.set_epoch(self._data.epoch + 1)

    def _sequences(self) -> Iterator[Item]:
        """All whole ones in the buffer."""
        while len(self._token_buffer) - self._begin > self.seq_len:
            end = self._begin + self.seq_len + 1
            tokens = torch.tensor(self._token_buffer[self._begin : end])
            self._begin, self._given = end, self._given + 1
            yield {"input": tokens[:-1]}, tokens[1:]
        del self._token_buffer[: self._begin]
        self._begin = 0

    def state_dict(self) -> dict[str, Any]:
        position = {
            "format": FORMAT,
            "data": [self.dataset_name, self._data.size()],
            **self._data.state_dict(),
            "tokens": self._token_buffer[self._begin :],
        }
        return {"position": json.dumps(position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = self._checked(state["position"])
        self._data.load_state_dict(position)
        self._token_buffer, self._begin = position["tokens"], 0
        self._before = None

    def load_old(self, positions: Sequence[str]) -> str:
        """Goes on where readers of another number stopped. What was done, for the log."""
        old = [self._checked(position) for position in positions]
        text = self._data.load_old(old)
        mine = old[self._data.rank :: self._data.world]
        self._token_buffer, self._begin = [token for position in mine for token in position["tokens"]], 0
        self._before = None
        return text

    def _checked(self, text: str) -> dict[str, Any]:
        """Raises ValueError where a checkpoint's position is damaged or belongs to other data."""
        try:
            position: dict[str, Any] = json.loads(text)
            known = position["format"] == FORMAT and isinstance(position["epoch"], int) and position["left"] != []
            known = known and all(isinstance(token, int) for token in position["tokens"])
            saved = position["data"]
        except (TypeError, ValueError, KeyError):
            known = False
        if not known:
            raise ValueError(
                f"the data position in the checkpoint is not readable: {str(text)[:80]!r}; begin the data again with "
                "--checkpoint.exclude_from_loading=dataloader"
            )
        if saved != [self.dataset_name, self._data.size()]:
            raise ValueError(
                f"the checkpoint's data are {saved[0]} with {saved[1]} documents or files, this run's "
                f"{self.dataset_name} with {self._data.size()}; give it the same data, or begin with the new ones with "
                "--checkpoint.exclude_from_loading=dataloader"
            )
        return position


class TextDataLoader(ParallelAwareDataloader):
    """TorchTitan's loader. Its state has an entry for each data-parallel rank i, and holds no pickle:

        dp_rank_{i}: str     JSON of the position: format, data (name and number of documents or files), epoch, empty
                             (documents passed over), left (see documents.py), tokens (not yet given out)
        world_size: int      data-parallel ranks; with simulated replicas, of all of them

    It is the state after the last batch that was given out, whatever a worker process has read beyond it, and does
    not depend on the number of workers (0 or 1), the batch size or the sequence length.
    """

    dataset: TextDataset

    def position(self) -> str:
        """JSON of the position after the last batch."""
        if self.num_workers == 0 or self._iterator is None:
            return str(self.dataset.state_dict()["position"])
        workers = StatefulDataLoader.state_dict(self)["_snapshot"]["_worker_snapshots"]
        (worker,) = workers.values()
        return str(worker["dataset_state"]["position"])

    def empty_documents(self) -> int:
        """Those that this reader has passed over since the run began."""
        return int(json.loads(self.position())["empty"])

    def state_dict(self) -> dict[str, Any]:
        return {self._rank_id: self.position(), "world_size": self.dp_world_size}

    def saved_state(self, readers: int) -> dict[str, Any]:
        """What a checkpoint of so many readers holds, as room for it."""
        return {f"dp_rank_{i}": "" for i in range(readers)} | {"world_size": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The state of a run of as many ranks; batches go on as if it had not stopped.

        Raises ValueError where it is of another number of ranks (see `load_old`) or of other data.
        """
        if not state_dict:
            return
        if state_dict["world_size"] != self.dp_world_size or self._rank_id not in state_dict:
            raise ValueError(
                f"the checkpoint has the data positions of {state_dict['world_size']} data-parallel ranks, this run "
                f"has {self.dp_world_size}; they have to be dealt out by load_old"
            )
        self._forget()
        self.dataset.load_state_dict({"position": state_dict[self._rank_id]})

    def load_old(self, states: Sequence[dict[str, Any]]) -> str:
        """Goes on with the data of a run of another (or the same) number of data-parallel ranks.

        No collective: every rank gets all states. What was left of an epoch is dealt to the new ranks by the rule at
        the top of documents.py; tokens that old ranks had read and not given out go to new ranks in turn.

        Args:
            states: the old ranks' `state_dict()`s, all of them, in any order (or one dict with all entries).

        Returns:
            One line for the log.

        Raises:
            ValueError: an old rank's state is missing or damaged, or belongs to other data.
        """
        merged = {key: value for state in states for key, value in state.items()}
        world = int(merged.get("world_size", 0))
        missing = [f"dp_rank_{i}" for i in range(world) if f"dp_rank_{i}" not in merged]
        if missing or not world:
            raise ValueError(f"the checkpoint has no data position {missing[0] if missing else 'at all'}")
        if world == self.dp_world_size:
            self.load_state_dict(merged)
            return f"data: every one of {world} ranks goes on where it was"
        self._forget()
        done = self.dataset.load_old([merged[f"dp_rank_{i}"] for i in range(world)])
        return f"data: the checkpoint is of {world} data-parallel ranks; {done}"

    def _forget(self) -> None:
        """Ends a worker that a call of state_dict has started: the next one starts from the new position."""
        StatefulDataLoader.load_state_dict(self, {})


def text_loader(
    config: Training | Validation, tokenizer: BaseTokenizer, rank: int, world: int, border: str, passes: int = 0
) -> TextDataLoader:
    """The loader that a section describes, for data-parallel reader `rank` of `world`."""
    bordered: Any = BoundaryTokenizer(tokenizer, border)
    data = TextDataset(config.dataset, config.dataset_path, bordered, config.seq_len, rank, world, passes)
    options: dict[str, Any] = {**asdict(config.dataloader), "batch_size": config.local_batch_size}
    return TextDataLoader(data, dp_rank=rank, dp_world_size=world, **options)

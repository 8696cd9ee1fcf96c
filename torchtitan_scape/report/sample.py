"""What the model writes at the end of a run: a person judges it better than a loss."""

import logging
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from topology.layout import Layout
from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.borders import border_ids

logger = logging.getLogger(__name__)

TEMPERATURES = {"greedy": 0.0, "temperature 0.8": 0.8}


class SampleView(Protocol):
    """What is asked of a trainer."""

    job_config: JobConfig
    layout: Layout
    device: torch.device
    model_parts: list[nn.Module]
    tokenizer: Any
    maybe_enable_amp: AbstractContextManager[None]

    def post_dataloading_process(self, input_dict: Any, labels: Tensor) -> Any: ...

    def _model_shown(self) -> AbstractContextManager[None]: ...


def log_samples(trainer: SampleView) -> None:
    """Logs `sample.characters` characters of each kind, from what is validated. A collective call over all ranks."""
    n = trainer.job_config.sample.characters
    if n and trainer.layout.context > 1:
        logger.info("No sample is written with context parallelism: each rank has a part of the sequence only")
    elif n:
        with trainer._model_shown():
            texts = _sample(trainer, n)
        for kind, text in zip(TEMPERATURES, texts, strict=True):
            logger.info(f"Sample of what the model writes, {kind}:\n{text}")


@torch.no_grad()
def _sample(trainer: SampleView, characters: int) -> list[str]:
    """Text of that many characters for each of TEMPERATURES, the same on all ranks.

    A row of tokens each, from a document's beginning; no document ends in it. All ranks take the same forward passes,
    which gather what is sharded, and go on with the tokens that rank 0 has chosen.
    """
    model, tokenizer, config = trainer.model_parts[0], trainer.tokenizer, trainer.job_config
    borders = [i for i in (getattr(tokenizer, "bos_id", None), tokenizer.eos_id) if i is not None]
    tokens = torch.tensor([_begin(tokenizer, config.data.border)] * len(TEMPERATURES))
    generator = torch.Generator().manual_seed(config.debug.seed or 0)  # of its own: the run's stay as they are
    texts, length = [""], 2 * trainer.layout.tensor
    model.eval()
    while min(map(len, texts)) < characters and tokens.shape[1] <= 4 * characters:  # of four bytes at most
        window = tokens[:, -config.training.seq_len :]
        while length < window.shape[1]:  # few shapes; what is attended to lies to the left of what is added
            length = min(2 * length, config.training.seq_len)
        padded = pad(window, (0, length - window.shape[1])).to(trainer.device)
        inputs, _, more, masks = trainer.post_dataloading_process({"input": padded}, padded)
        with trainer.maybe_enable_amp:
            logits = model(inputs, **more, **masks)
        logits = (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, window.shape[1] - 1]
        logits = logits.double().cpu()[:, : tokenizer.get_vocab_size()]
        logits[:, borders] = -torch.inf
        chosen = torch.stack([_choose(row, t, generator) for row, t in zip(logits, TEMPERATURES.values(), strict=True)])
        chosen = chosen.to(trainer.device)
        dist.broadcast(chosen, 0)
        tokens = torch.cat([tokens, chosen.cpu()], 1)
        texts = [tokenizer.decode(row[1:]) for row in tokens.tolist()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward pass alone leaves gathered
    model.train()
    return [text[:characters] for text in texts]


def _begin(tokenizer: Any, border: str) -> list[int]:
    """What the model has seen in front of every document: BOS, or the end of the one before."""
    before, after = border_ids(tokenizer, border)
    return before or after or [0]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """The likeliest entry at temperature 0, else one at random. Shape (1,), int64."""
    if temperature == 0:
        return logits.argmax().view(1)
    return torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)

"""Text samples from the model at the end of a run, easier to judge than a loss."""

import logging
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.data.encoding import border_ids
from torchtitan_scape.data.manifest import tokenizer_entries
from torchtitan_scape.topology.layout import Layout

logger = logging.getLogger(__name__)

TEMPERATURES = {"greedy": 0.0, "temperature 0.8": 0.8}


class SampleView(Protocol):
    """The trainer's attributes that sampling uses."""

    job_config: JobConfig
    layout: Layout
    device: torch.device
    model_parts: list[nn.Module]
    tokenizer: Any
    maybe_enable_amp: AbstractContextManager[None]

    def post_dataloading_process(self, input_dict: Any, labels: Tensor) -> Any: ...

    def _shared_weights(self) -> AbstractContextManager[None]: ...


def log_samples(trainer: SampleView) -> None:
    """Log `sample.characters` characters of each kind, generated with the weights that are validated. Collective."""
    n = trainer.job_config.sample.characters
    if n and trainer.layout.context > 1:
        logger.info("No sample is generated with context parallelism, because each rank has only part of the sequence")
    elif n and trainer.layout.pipeline > 1:
        logger.info("No sample is generated with pipeline parallelism, because each rank has only part of the model")
    elif n:
        with trainer._shared_weights():
            texts = _sample(trainer, n)
        for kind, text in zip(TEMPERATURES, texts, strict=True):
            logger.info(f"Sample from the model, {kind}:\n{text}")


@torch.no_grad()
def _sample(trainer: SampleView, characters: int) -> list[str]:
    """Return a text of `characters` characters for each of TEMPERATURES, equal on all ranks.

    Each text starts as a document and contains no document border. All ranks run the same forward passes, which gather
    sharded weights, and use the tokens that rank 0 has drawn.
    """
    model, tokenizer, config = trainer.model_parts[0], trainer.tokenizer, trainer.job_config
    borders = [i for i in (getattr(tokenizer, "bos_id", None), tokenizer.eos_id) if i is not None]
    tokens = torch.tensor([_begin(tokenizer, config.data.border)] * len(TEMPERATURES), dtype=torch.int64, device="cpu")
    generator = torch.Generator().manual_seed(
        config.debug.seed or 0
    )  # Separate, so that the run's generators do not change.
    texts, length = [""], 2 * trainer.layout.tensor
    model.eval()
    while (
        min(map(len, texts)) < characters and tokens.shape[1] <= 4 * characters
    ):  # A character has at most four bytes.
        window = tokens[:, -config.training.seq_len :]
        while length < window.shape[1]:  # Few shapes; causal attention ignores the padding on the right.
            length = min(2 * length, config.training.seq_len)
        padded = pad(window, (0, length - window.shape[1])).to(trainer.device)
        inputs, _, more, masks = trainer.post_dataloading_process({"input": padded}, padded)
        with trainer.maybe_enable_amp:
            logits = model(inputs, **more, **masks)
        logits = (logits.full_tensor() if isinstance(logits, DTensor) else logits)[:, window.shape[1] - 1]
        logits = logits.double().cpu()[:, : tokenizer_entries(tokenizer)]
        logits[:, borders] = -torch.inf
        chosen = torch.stack([_choose(row, t, generator) for row, t in zip(logits, TEMPERATURES.values(), strict=True)])
        chosen = chosen.to(trainer.device)
        dist.broadcast(chosen, 0)
        tokens = torch.cat([tokens, chosen.cpu()], 1)
        texts = [tokenizer.decode(row[1:]) for row in tokens.tolist()]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # A forward pass without a backward pass leaves weights gathered.
    model.train()
    return [text[:characters] for text in texts]


def _begin(tokenizer: Any, border: str) -> list[int]:
    """Return the tokens before the first document: BOS, or the EOS of a previous document."""
    before, after = border_ids(tokenizer, border)
    return before or after or [0]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Return the most likely entry at temperature 0, else a random one; int64 (1,)."""
    if temperature == 0:
        return logits.argmax().view(1)
    return torch.multinomial(torch.softmax(logits / temperature, 0), 1, generator=generator)

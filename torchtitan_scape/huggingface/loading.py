"""Loading of model folders by transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class DifferentError(Exception):
    """The folder contains another model than the trained one."""


def load_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Return the model of a folder, for inference.

    Args:
        folder: The model folder.
        dtype: Dtype of the tensors; "auto" for that of config.json.

    Raises:
        DifferentError: Tensors are missing, unexpected or of another shape; transformers would initialize them
            randomly.
        ValueError: Weight files cannot be read.
    """
    import transformers
    from safetensors import SafetensorError

    try:
        with quiet():
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except SafetensorError as error:
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from None
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[key]:
            raise DifferentError(
                f"transformers {transformers.__version__} finds {key.replace('_', ' ')}: {loaded[key]}"
            )
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars and advice of transformers."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()

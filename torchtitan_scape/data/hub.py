"""Streamed datasets of the Hugging Face hub. If streaming fails, the error contains the download command."""

from dataclasses import dataclass
from typing import Any

import datasets.config
from datasets import load_dataset
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.patching import replaced

SECONDS = 5.0  # Timeout of the hub's first response; the library itself would retry for minutes.


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub.

    Attributes:
        name: Value of `training.dataset`.
        repository: Owner/name.
        revision: Revision to download if it is not the repository's main branch.
    """

    name: str
    repository: str
    revision: str = ""

    def command(self) -> str:
        """Return the command that downloads the dataset."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository} --repo-type dataset{revision} --local-dir {self.folder}"

    @property
    def folder(self) -> str:
        return f"data/{self.name}"

    def stream(self, split: str) -> Any:
        """Return the streamed split.

        Raises:
            ValueError: The split cannot be streamed; the message contains the remedy.
        """
        offline = unreachable()
        try:
            # Offline, the library uses its cache without attempting a connection.
            with replaced(datasets.config, "HF_HUB_OFFLINE", bool(offline) or datasets.config.HF_HUB_OFFLINE):
                return load_dataset(self.repository, split=split, streaming=True)
        except Exception as error:  # The exception types differ between versions of the libraries.
            reason, first = _reason(error, offline)
        raise ValueError(
            f"{self.repository} cannot be streamed: {reason}; on a machine with network access, "
            f"{first}{self.command()}, and here set dataset_path = {self.folder!r}"
        )


def _reason(error: Exception, offline: str) -> tuple[str, str]:
    """Return the reason, and the instructions that precede the download command."""
    message = one_line(error)
    if offline:
        return f"{constants.ENDPOINT} cannot be reached ({offline})", "run "
    if isinstance(error, RuntimeError) and "scripts" in message:
        return "its main branch is a loading script, which the datasets library no longer runs", "run "
    if "gated" in message:
        return f"it is gated ({message})", "accept its terms on its page, then run hf auth login && "
    return message or type(error).__name__, "run "


def unreachable() -> str:
    """Return the reason why the hub does not respond, or "" if it does."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # From httpx or requests, depending on the library's version.
        return one_line(error) or type(error).__name__
    return ""

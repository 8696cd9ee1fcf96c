"""Data sets of the Hugging Face hub, streamed; where they cannot be, one line has the command that fetches them."""

from dataclasses import dataclass
from typing import Any

import datasets.config
from datasets import load_dataset
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from torchtitan_scape.core.command import one_line
from torchtitan_scape.core.patching import replaced

SECONDS = 5.0  # for the hub's first answer; the library would try for minutes


@dataclass(frozen=True)
class HubDataset:
    """A data set of the hub.

    Attributes:
        name: as `training.dataset` says.
        repository: owner/name.
        revision: what to fetch, where it is not the repository's main branch.
    """

    name: str
    repository: str
    revision: str = ""

    def command(self) -> str:
        """What fetches it where there is a network."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository} --repo-type dataset{revision} --local-dir {self.folder}"

    @property
    def folder(self) -> str:
        return f"data/{self.name}"

    def stream(self, split: str) -> Any:
        """The split, streamed. Raises ValueError, with what to do, where it cannot be."""
        offline = unreachable()
        try:
            # The library then looks into its cache at once, and tries nothing else.
            with replaced(datasets.config, "HF_HUB_OFFLINE", bool(offline) or datasets.config.HF_HUB_OFFLINE):
                return load_dataset(self.repository, split=split, streaming=True)
        except Exception as error:  # each version of the libraries raises others
            why, first = _reason(error, offline)
        raise ValueError(
            f"{self.repository} cannot be streamed: {why}; where there is a network, {first}{self.command()}, and here "
            f"set dataset_path = {self.folder!r}"
        )


def _reason(error: Exception, offline: str) -> tuple[str, str]:
    """(what is wrong, what comes before the download)."""
    said = one_line(error)
    if offline:
        return f"{constants.ENDPOINT} cannot be reached ({offline})", "run "
    if isinstance(error, RuntimeError) and "scripts" in said:
        return "its main branch is a loading script, which the datasets library no longer runs", "run "
    if "gated" in said:
        return f"it is gated ({said})", "accept its terms on its page, then run hf auth login && "
    return said or type(error).__name__, "run "


def unreachable() -> str:
    """Why the hub does not answer; "" where it does."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # of httpx or of requests, by the library's version
        return one_line(error) or type(error).__name__
    return ""

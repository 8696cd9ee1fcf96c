"""best.json in the dump folder: the step with the lowest validation loss, and the checkpoint with the lowest."""

import json
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchtitan_scape.core.files import parse_json, write_whole

logger = logging.getLogger(__name__)

FILE = "best.json"


def read(folder: Path) -> dict[str, Any]:
    """Return `checkpoint_step` and `losses` of this dump folder's file, see `BestCheckpoint`.

    Raises:
        ValueError: There is no such file, or it cannot be read.
    """
    try:
        content: dict[str, Any] = parse_json((folder / FILE).read_bytes())
        return {"checkpoint_step": content["checkpoint_step"], "losses": content["losses"]}
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{folder / FILE} is missing or cannot be read: it has no validation losses") from None


class BestCheckpoint:
    """Validation losses of a run, on rank 0.

    The file contains the step and loss of the best validation (`step`, `validation_loss`) and of the best one whose
    step was saved (`checkpoint_step`, `checkpoint_loss`, null without a checkpoint); `validation`, a description of the
    validation data; and `losses`, a row of step, loss and "saved" for each validation. A resumed run removes rows of
    later steps than its checkpoint.

    Args:
        folder: The dump folder.
        validation: Description of the validation data. Losses of other data are not compared.
    """

    def __init__(self, folder: Path, validation: dict[str, Any]) -> None:
        self.path, self.validation = folder / FILE, validation
        self._losses: list[list[Any]] = self._read()
        self._noted = False

    def _read(self) -> list[list[Any]]:
        try:
            content = parse_json(self.path.read_bytes())
            losses = [[int(step), float(loss), bool(saved)] for step, loss, saved in content["losses"]]
            of = dict(content["validation"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError):
            logger.warning(f"{self.path} cannot be read; it is replaced at the next validation")
            return []
        changed = {key: (of[key], value) for key, value in self.validation.items() if of.get(key, value) != value}
        if not changed:
            return losses
        changes = ", ".join(f"{key} {before!r} -> {now!r}" for key, (before, now) in changed.items())
        logger.warning(
            f"{self.path} has losses of other validation data ({changes}), which are not compared with those that "
            "follow: the best checkpoint until now may be deleted"
        )
        return []

    def checkpoint_step(self, steps: Collection[int]) -> int | None:
        """Return the step of the checkpoint with the lowest loss among these steps, or None without a checkpoint."""
        saved = [(loss, step) for step, loss, saved in self._losses if saved and step in steps]
        return min(saved)[1] if saved else None

    def note(self, step: int, loss: float, saved: bool, begun: int) -> None:
        """Add a validation, and replace the file atomically.

        Args:
            saved: Whether a checkpoint of this step is written.
            begun: Step of the checkpoint from which this run started, 0 for none.
        """
        if not self._noted:
            self._losses = [[at, of, saved or at == begun] for at, of, saved in self._losses if at <= begun]
            self._noted = True
        # A step may be validated again, when it is saved at the end.
        self._losses = [row for row in self._losses if row[0] != step]
        if math.isfinite(loss):
            self._losses.append([step, loss, saved])
        self._write()

    def retract(self, step: int) -> None:
        """Record that the checkpoint of `step` could not be written, and replace the file atomically."""
        self._losses = [[at, of, saved and at != step] for at, of, saved in self._losses]
        self._write()

    def _write(self) -> None:
        if not self._losses:
            return
        best_step, best_loss, _ = min(self._losses, key=lambda row: row[1])
        kept = self.checkpoint_step([row[0] for row in self._losses])
        content = {
            "step": best_step,
            "validation_loss": best_loss,
            "checkpoint_step": kept,
            "checkpoint_loss": next((row[1] for row in self._losses if row[0] == kept), None),
            "validation": self.validation,
            "losses": self._losses,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:  # training can continue without the file
            logger.warning(f"{self.path} cannot be written ({error.strerror})")

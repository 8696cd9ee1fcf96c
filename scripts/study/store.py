"""A study's results: OUTPUT/runs.jsonl, one JSON object per line."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.study.grid import RunSpec, digest
from torchtitan_scape.core.options import with_present_keys

Line = dict[str, Any]
SETUP = "setup"  # method of a line that describes the machine and the notes of a set


class Store:
    """The lines of a study by key; the last line of a key counts.

    A line has `key` (digest of `options`), `set`, `method`, `options`, `result`, `command`, `versions` and `source`.
    Lines of earlier versions are read with the present keys of `options`, and stay in the file as they are.
    The result of a failed run contains `error`, the reason.

    Args:
        folder: Contains runs.jsonl; created with the first line.
        shared: Folders of other studies, which are read and never written.
    """

    def __init__(self, folder: Path, shared: Sequence[Path] = ()) -> None:
        self.path = folder / "runs.jsonl"
        self.own = {line["key"]: line for line in read_lines(self.path)}
        others = {line["key"]: line for other in shared for line in read_lines(other / "runs.jsonl")}
        self.lines = others | self.own

    def append(self, line: Line) -> None:
        """Append a line with one write, so that a process that is killed leaves at most one incomplete line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
        with open(self.path, "a+b", buffering=0) as file:
            if (end := file.tell()) and os.pread(file.fileno(), 1, end - 1) != b"\n":
                data = b"\n" + data  # ends an incomplete line
            file.write(data)
            os.fsync(file)
        self.own[line["key"]] = self.lines[line["key"]] = line

    def keep(self, spec: RunSpec, result: dict[str, Any], command: str, versions: dict[str, str]) -> None:
        """Append a run's result."""
        head = {"key": spec.key, "set": spec.of.name, "method": spec.method, "options": spec.options}
        self.append({**head, "result": result, "command": command, "versions": versions, "source": "scripts.study"})

    def note(self, kind: str, name: str, options: dict[str, Any], result: dict[str, Any], command: str = "") -> None:
        """Append a line that is no run: a calibration or a set's setup."""
        key = digest({"kind": kind, "set": name} | options)
        head = {"key": key, "set": name, "method": kind, "options": options}
        self.append({**head, "result": result, "command": command, "versions": {}, "source": "scripts.study"})

    def noted(self, kind: str, name: str, options: dict[str, Any]) -> Any:
        """Return the result of a line that `note` wrote; None without one."""
        line = self.lines.get(digest({"kind": kind, "set": name} | options))
        return line and line["result"]

    def of(self, set_name: str) -> list[Line]:
        """Return the lines of a set, also those that are no runs."""
        return [line for line in self.own.values() if line["set"] == set_name]

    def result(self, key: str) -> dict[str, Any] | None:
        """Return a finished run's result. None if it has not run or has failed."""
        line = self.lines.get(key)
        return None if line is None or "error" in line["result"] else line["result"]

    def loss(self, spec: RunSpec) -> float | None:
        return (self.result(spec.key) or {}).get("validation_loss")


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a store; nothing if the file is missing."""
    for text in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # written by a process that was killed
            yield _with_present_keys(json.loads(text))


def _with_present_keys(line: Line) -> Line:
    """Return a line with the present keys of its options, and their digest if it is a run's."""
    options = with_present_keys(line["options"])
    is_run = options.keys() != line["options"].keys() and line["key"] == digest(line["options"])
    return line | {"options": options} | ({"key": digest(options)} if is_run else {})

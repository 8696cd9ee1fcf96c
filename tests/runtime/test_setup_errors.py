"""Errors of set-up that a restart would repeat: one line, exit code 2. All others keep their traceback."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_scape.config.recipes import load
from torchtitan_scape.core.consistency import ReplicasDifferError
from torchtitan_scape.runtime.shutdown import Shutdown, setup_error
from torchtitan_scape.titan import patches
from torchtitan_scape.trainer.checkpointer import ReplicaCheckpointer


def raised(work: Callable[[], Any]) -> BaseException:
    try:
        work()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def torchtitan(name: str, *values: Any) -> Callable[[], Any]:
    """Return a call of TorchTitan with values that it rejects."""
    from torchtitan.config.job_config import ActivationCheckpoint, JobConfig
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.protocols.model_converter import build_model_converters

    if name == "converters":
        config = JobConfig()
        config.model.converters = list(values)
        return lambda: build_model_converters(config, None)  # type: ignore[arg-type]
    return lambda: apply_ac(torch.nn.Module(), ActivationCheckpoint(mode="memory_budget"))


def full_disk(*names: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *names)


def missing_cause() -> None:
    try:
        os.mkdir("/dev/null/cache")
    except OSError as error:
        raise RuntimeError("the compiler failed") from error


@pytest.mark.parametrize(
    "work, message",
    [
        (lambda: os.mkdir("/dev/null/tb"), "/dev/null/tb cannot be used: Not a directory; choose another path"),
        (lambda: os.mkdir("/dev/null"), "/dev/null cannot be used: it is a file, or a link to nothing; choose another"),
        (lambda: os.mkdir("/dev/null/.cache/huggingface"), "Not a directory; set HF_HOME to a folder"),
        (lambda: os.mkdir("/dev/null/torchinductor_me"), "set TORCHINDUCTOR_CACHE_DIR to a folder"),
        (full_disk, r"No space left on device: free space in job\.dump_folder, HF_HOME, .* or TMPDIR"),
        (
            lambda: full_disk("/data/tb"),
            "/data/tb cannot be used: No space left on device; free space there, or choose",
        ),
        (missing_cause, "/dev/null/cache cannot be used: Not a directory"),
        (lambda: __import__("nosuch"), "a module cannot be imported: No module named 'nosuch'; install it"),
        (
            lambda: torch.compile(torch.nn.Module(), backend="nonsense"),
            "torch.compile failed: InvalidBackend: .*nonsen",
        ),
        (torchtitan("memory_budget"), "TorchTitan rejects .*: AssertionError: Memory budget mode requires model to be"),
        (
            torchtitan("converters", "foo"),
            "TorchTitan rejects the configuration: KeyError: 'foo', in .*model_converter",
        ),
    ],
)
def test_errors_that_a_restart_repeats_are_one_line(work: Callable[[], Any], message: str) -> None:
    text = setup_error(raised(work))
    assert text is not None and re.search(message, text) and "\n" not in text, text


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system", "/opt/outputs"),
        OSError(errno.ENOSPC, "No space left on device"),
        ConnectionError("Couldn't reach 'allenai/c4' on the Hub (LocalEntryNotFoundError)"),
        NotImplementedError("FlexAttention does not support backward on CPU."),
    ],
)
def test_the_text_of_an_error_is_kept(error: Exception) -> None:
    text = setup_error(error)
    assert text and (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) in text


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("connection refused"),
        RuntimeError("[gloo] Connection closed by peer"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("timed out"),
        OSError(errno.ESTALE, "Stale file handle", "/scratch/run/checkpoint"),
        KeyError("ours"),  # not raised in TorchTitan: an error of this project
        AssertionError(),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_no_errors_of_the_input(error: BaseException) -> None:
    assert setup_error(error) is None

    def fail() -> None:
        raise error

    assert setup_error(raised(fail)) is None


def unreadable_recipe(code: int) -> BaseException:
    """Return the error for a recipe whose file system raises an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        return raised(lambda: load("some.toml"))


def failed_save(*codes: int) -> BaseException:
    """Return the error of a save that failed on several ranks."""
    failures = {rank: (OSError(code, os.strerror(code)), None) for rank, code in enumerate(codes)}
    checkpointer: Any = ReplicaCheckpointer.__new__(ReplicaCheckpointer)
    checkpointer.folder, checkpointer._nodes, checkpointer._not_counted = "/nowhere", None, set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: 1)
        return raised(lambda: checkpointer._guarded(lambda: raise_(CheckpointException("write", failures))))


def raise_(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error, code",
    [
        (ValueError("sync.density = 2"), 2),
        (unreadable_recipe(errno.ENOENT), 2),
        (unreadable_recipe(errno.ESTALE), 3),
        (unreadable_recipe(errno.EIO), 3),
        (failed_save(errno.EACCES), 2),
        (failed_save(errno.EIO, errno.EIO), 3),
        (failed_save(errno.ENOSPC), 2),
        (FileNotFoundError(errno.ENOENT, "No such file"), 2),
        (ReplicasDifferError("rank 1 differs"), 3),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), 3),
    ],
)
def test_the_exit_code_is_that_of_the_cause(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a file system that may pass is no wrong input, also if another error replaces it."""
    reported: list[Any] = []
    shutdown: Any = Shutdown.__new__(Shutdown)
    shutdown.rank, shutdown.liveness = 1, SimpleNamespace(print_error=print, report=reported.append)
    assert shutdown._rejected(error, str(error)) == reported[0].code == code
    assert str(error) in capsys.readouterr().out


def test_an_error_in_our_code_called_by_torchtitan_is_not_its_check() -> None:
    from torchtitan.components.lr_scheduler import LRSchedulersContainer

    def ours(step: int) -> float:
        raise KeyError("ours")

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    error = raised(lambda: LRSchedulersContainer([optimizer], ours))  # type: ignore[arg-type]
    assert setup_error(error) is None


def test_lspci_that_cannot_be_run_is_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder on PATH that a user cannot read, a missing program is a PermissionError."""
    from torchtitan.tools import utils

    (tmp_path / "lspci").write_text("")  # not executable, also for root
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(raised(lambda: utils.get_peak_flops("NVIDIA H200")), PermissionError)
    with patches.optional_lspci():
        assert utils.get_peak_flops("NVIDIA H200") == 989e12
    assert not isinstance(utils.subprocess, SimpleNamespace)

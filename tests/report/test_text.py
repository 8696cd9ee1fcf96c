"""Human-readable figures and commands."""

import shlex
from pathlib import Path

from torchtitan_scape.config.job_config import JobConfig
from torchtitan_scape.core.text import duration_text, kinds_text, seconds_text, sent_text, size_text
from torchtitan_scape.report.summary import _to_export


def test_figures_have_a_suitable_unit() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 2.5e6, 3e9, 4e12)] == [
        "0 B", "999 B", "1.00 kB", "2.50 MB", "3.00 GB", "4.00 TB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0.00012, 0.9, 1.0, 123.4)] == ["0.12 ms", "900 ms", "1 s", "123 s"]
    durations = [duration_text(s) for s in (0.4, 45, 725, 12000, 187000, 86400)]
    assert durations == ["0 s", "45 s", "12 min 5 s", "3 h 20 min", "2 d 3 h", "1 d"]
    assert kinds_text({"state": 8e9, "masks": 1e6}) == "state 8.00 GB, masks 1.00 MB"


def test_bytes_sent_are_compared_with_dense() -> None:
    assert sent_text({"node": 1e6, "network": 3e6}, 8e6) == "node 1.00 MB, network 3.00 MB (dense 8.00 MB, 2.0x less)"
    assert sent_text({"node": 8e6}, 8e6) == "node 8.00 MB (dense 8.00 MB)"
    assert sent_text({}, 0.0) == "nothing (one replica)"


def test_the_export_command_is_quoted() -> None:
    config = JobConfig()
    config.checkpoint.enable = True
    ((_, command),) = _to_export(config, Path("/data/my runs/a;b"))
    words = ["python", "-m", "torchtitan_scape.export", "--config", "/data/my runs/a;b/resolved.toml"]
    assert shlex.split(command) == [*words, "--checkpoint", "latest", "--output", "/data/my runs/a;b/export"]

"""scripts/benchmarks/overhead.py: means and shares from seconds that can be worked out by hand."""

from scripts.benchmarks.overhead import mean_of, method_rows, rounds


def test_rare_steps_are_weighted_by_their_frequency() -> None:
    """One of 16 measured steps takes 1.0 s longer; a run has one such step in 200."""
    seconds = [0.1] * 15 + [1.1]
    assert abs(mean_of(seconds, 16, 200) - (0.1 + 1.0 / 200)) < 1e-12
    assert abs(mean_of(seconds, 16, 16) - (0.1 + 1.0 / 16)) < 1e-12
    assert mean_of([0.1, 0.2, 5.0], 1, 1) == 0.2
    assert rounds("radius-0.4") == (16, 200) and rounds("diloco-30") == (30, 30) and rounds("adamw") == (1, 1)


def test_a_method_is_compared_with_dense_training_with_its_optimizer() -> None:
    cells = {name: {"usual": mean, "mean": mean} for name, mean in (("adamw", 0.1), ("adams", 0.2), ("scape-0.1", 0.3))}
    cells["adamw"]["compute"] = 0.3
    assert list(method_rows(cells)[-1].values()) == ["SCAPE 0.1", "300.0", "300.0", "100.0", "+20.0"]

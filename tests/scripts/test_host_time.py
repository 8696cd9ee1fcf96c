"""The host time of a step with empty kernels."""

from scripts.benchmarks.host_time import HostSteps, empty_kernels


def test_a_step_with_empty_kernels_takes_host_time_only() -> None:
    with empty_kernels():
        for method in ("scape", "quantized"):
            steps = HostSteps(method, "llama_500m", 8)
            assert 0.0 < steps.seconds(2) < 5.0

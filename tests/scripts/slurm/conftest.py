"""A real Slurm cluster for the tests of a file; see scripts/slurm_cluster.py."""

from collections.abc import Iterator

import pytest

from scripts.emulated_cluster import ClusterError
from scripts.slurm_cluster import SlurmCluster, SlurmError


@pytest.fixture(scope="module")
def slurm(request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    """A cluster of two nodes, or of as many as the constant NODES of the file."""
    try:
        with SlurmCluster(getattr(request.module, "NODES", 2), node_timeout=10, kill_wait=5) as cluster:
            yield cluster
    except (SlurmError, ClusterError) as error:
        pytest.skip(str(error))

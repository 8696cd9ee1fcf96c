"""A real Slurm cluster for the tests of a file; see scripts/slurm_cluster.py."""

from collections.abc import Iterator

import pytest

from scripts.emulated_cluster import ClusterError
from scripts.slurm_cluster import SlurmCluster, SlurmError


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    try:
        with SlurmCluster(2, node_timeout=10, kill_wait=5) as cluster:
            yield cluster
    except (SlurmError, ClusterError) as error:
        pytest.skip(str(error))

"""One Ray of this machine for all tests: it takes seconds to start."""

import sys
from collections.abc import Iterator

import pytest

from amp_ray.runtime.ray.actors import connect

NUM_CPUS = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """Be connected to a Ray with some CPUs, however many the machine has."""
    with connect("local", num_cpus=NUM_CPUS):
        yield NUM_CPUS


@pytest.fixture(scope="module")
def sent_by_value(request: pytest.FixtureRequest) -> None:
    """Let actors use what a test module defines: they cannot import it."""
    from ray import cloudpickle  # noqa: PLC0415 - not before amp_ray has told it to be silent

    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])

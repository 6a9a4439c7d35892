"""One Ray cluster on this machine for all tests, since it takes seconds to start."""

import sys
from collections.abc import Iterator

import pytest

from amp_ray.runtime.ray.actors import connect

NUM_CPUS = 4


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """Connect to a local Ray with a fixed number of CPUs, whatever the machine has."""
    with connect("local", num_cpus=NUM_CPUS):
        yield NUM_CPUS


@pytest.fixture(scope="module")
def sent_by_value(request: pytest.FixtureRequest) -> None:
    """Let Ray pickle the test module by value, because actors cannot import it."""
    from ray import cloudpickle  # noqa: PLC0415 - not before amp_ray has told it to be silent

    cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])

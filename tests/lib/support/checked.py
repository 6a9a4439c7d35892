"""Values of a kind that a test goes on with, checked as they are taken."""

from typing import Any, TypeVar

from amp_ray.cost.estimate import Estimate
from amp_ray.strategies.candidate import Candidate, StageOptions
from support.commands import Ended

T = TypeVar("T")

GRID_KEYS = ("pp", "micro_batch_size", "num_micro_batches", "virtual_stages")


def grid_of(**degrees: Any) -> Candidate:  # noqa: ANN401 - fields of Candidate and StageOptions
    """Make a candidate of its degrees; those that are left out are 1."""
    of_grid = dict.fromkeys(GRID_KEYS, 1) | {
        key: degrees.pop(key) for key in GRID_KEYS if key in degrees
    }
    return Candidate(options=StageOptions(**{"tp": 1, "dp": 1, **degrees}), **of_grid)


def required(value: T | None) -> T:
    """Return a value that is there."""
    assert value is not None
    return value


def as_estimate(result: object) -> Estimate:
    """Return the estimate that planning came to."""
    assert isinstance(result, Estimate), result
    return result


def check_ended(ended: Ended, code: int, *messages: str) -> None:
    """Check the exit code of a command, and what it says on stderr."""
    assert ended.code == code
    for message in messages:
        assert message in ended.err

"""Metis's formulas (2024) on an experiment, whatever its profile is."""

from amp_ray.baselines.metis2024.planner import Metis2024Planner
from amp_ray.errors import InputError
from amp_ray.formats.metis_export import publish
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.published_profile import PublishedProfile

METIS_2024 = "metis-2024"
"""The planner whose stages have device groups of their own: its space is the heterogeneous one."""


def make_metis_planner(experiment: Experiment) -> Metis2024Planner:
    """Return the planner of an experiment by Metis's formulas."""
    return Metis2024Planner(experiment=experiment, published=published_profile(experiment))


def published_profile(experiment: Experiment) -> PublishedProfile:
    """Return an experiment's profile as Metis has it.

    Where it is not one of Metis's, it says what its profiler would have measured.
    """
    if experiment.profile.published is not None:
        return experiment.profile.published
    try:
        return publish(experiment, sizes=metis_sizes(experiment.global_batch_size))
    except ValueError as error:
        raise InputError(str(error)) from error


def metis_sizes(global_batch_size: int) -> tuple[int, ...]:
    """Return the micro-batch sizes that its formulas look up for a batch.

    Stages of one device type need divisors of the batch, mixed ones powers of two.

    Example:
        >>> metis_sizes(12)
        (1, 2, 3, 4, 6, 8, 12)
    """
    divisors = {size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0}
    powers = {1 << digit for digit in range(global_batch_size.bit_length())}
    return tuple(sorted(divisors | powers))

"""Settings and fixtures of every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from amp_ray.runtime.ray.address import START_VARIABLE

REPOSITORY = Path(__file__).resolve().parent.parent

# Programs that tests start find `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(REPOSITORY / "tests" / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

# Ray's own limit of 30 s for a node that starts would decide on a busy machine.
os.environ.setdefault(START_VARIABLE, "240")
# Its workers run at niceness 15 by default: beside other tests they would hardly run at all.
os.environ.setdefault("RAY_worker_niceness", "0")

# Cases are drawn anew in each run; a failure prints the line that repeats it. Nothing may depend
# on how busy the machine is, so neither the deadline nor the slowness check applies.
settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.register_profile("fuzz", settings.get_profile("ci"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def metis_data() -> Path:
    """Folder of Metis's files beside the checkout; their licence keeps them out of it."""
    folder = REPOSITORY.parent / "shared" / "data" / "metis"
    if not folder.is_dir():
        pytest.skip(f"Metis's profiles, which their licence keeps out of the checkout: no {folder}")
    return folder


@pytest.fixture(scope="session")
def aceso_data() -> Path:
    """Folder of Aceso's published profiles and plans, which lies beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "data" / "aceso"
    if not folder.is_dir():
        pytest.skip(f"Aceso's published profiles are not here: no {folder}")
    return folder

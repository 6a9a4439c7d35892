from amp_ray.clusters.constants import PRIOR_SIGMA, Constants


def test_every_prior_is_of_a_constant() -> None:
    assert set(PRIOR_SIGMA) <= set(Constants.__dataclass_fields__)


def test_every_constant_is_positive() -> None:
    values = {name: getattr(Constants(), name) for name in Constants.__dataclass_fields__}
    assert {name for name, value in values.items() if not value > 0} == set()


def test_every_prior_leaves_room_and_is_no_guess_at_random() -> None:
    assert all(0 < sigma < 1 for sigma in PRIOR_SIGMA.values())

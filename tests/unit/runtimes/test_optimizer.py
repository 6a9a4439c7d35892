import pytest

from amp_ray.runtimes.traits import OPTIMIZERS, find_optimizer
from support.experiments import small_experiment


@pytest.mark.parametrize(
    ("name", "moment_bytes", "update_bytes"), [("adam", 8, 28), ("adamw", 8, 28), ("sgd", 0, 12)]
)
def test_optimizers_keep_and_touch_their_moments(
    name: str, moment_bytes: int, update_bytes: int
) -> None:
    # update: read the gradient; read and write the weight and each moment; 4 bytes each
    optimizer = find_optimizer(name)
    assert optimizer.moment_bytes == moment_bytes
    assert optimizer.update_traffic_bytes == update_bytes


def test_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lion' is not known; known: adam, adamw, sgd"):
        find_optimizer("lion")
    assert set(OPTIMIZERS) == {"adam", "adamw", "sgd"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_experiment_may_name_every_optimizer(name: str) -> None:
    batch = "global_batch_size: 8"
    experiment = small_experiment((batch, f"optimizer: {name}\n{batch}"))
    assert find_optimizer(experiment.optimizer).name == name

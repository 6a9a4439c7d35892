import pytest

from amp_ray.tuner.calibrated_predictions import BoundedPredictor

PREDICTOR = BoundedPredictor()


@pytest.fixture(autouse=True)
def predictor(monkeypatch: pytest.MonkeyPatch) -> BoundedPredictor:
    """Let all drivers share the cache of predictions: it saves time and changes nothing."""
    monkeypatch.setattr("amp_ray.runtime.study.driver.BoundedPredictor", lambda: PREDICTOR)
    return PREDICTOR

"""The tuner: a study folds over outcomes; nothing here waits, launches or draws by chance."""

from amp_ray.tuner.bounded_predictor import BoundedPredictor
from amp_ray.tuner.certificate import Certificate, certify
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.policy import next_trials, why_stop
from amp_ray.tuner.recommendation import Recommendation, Tie, recommend
from amp_ray.tuner.state import (
    POLICIES,
    Policy,
    Trial,
    TrialRecord,
    TunerSettings,
    TunerState,
    begin,
    record,
    start,
)
from amp_ray.tuner.surprise import Surprise, surprises

__all__ = [
    "POLICIES",
    "BoundedPredictor",
    "Certificate",
    "Knowledge",
    "Policy",
    "Recommendation",
    "Surprise",
    "Tie",
    "Trial",
    "TrialRecord",
    "TunerSettings",
    "TunerState",
    "begin",
    "certify",
    "learn",
    "next_trials",
    "recommend",
    "record",
    "start",
    "surprises",
    "why_stop",
]

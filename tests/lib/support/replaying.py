"""Studies with recorded outcomes: no driver and no clock, so the result is always the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from amp_ray.calibration.observation import Observation
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.outcome import Crashed, Measured, Outcome, OutOfMemory
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.certificate import Certificate, certify
from amp_ray.tuner.knowledge import Knowledge, learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.state import Trial, TunerSettings, TunerState, begin, record, start

Answers = Mapping[Strategy, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A study that was played to its end.

    Args:
        state: Last state of the study.
        knowledge: The tuner's knowledge in that state.
        certificate: Last certificate; None if nothing was measured.
    """

    state: TunerState
    knowledge: Knowledge
    certificate: Certificate | None

    @property
    def num_trials(self) -> int:
        """Number of trials."""
        return len(self.state.trials)

    @property
    def num_failed(self) -> int:
        """Number of trials without a measurement."""
        return sum(
            not isinstance(trial_record.outcome, Measured) for trial_record in self.state.trials
        )

    def found_at(self, strategy: Strategy) -> int | None:
        """Return the number of trials up to a strategy's first one; None if it was never run."""
        numbers = (t.trial.number for t in self.state.trials if t.trial.strategy == strategy)
        first = next(numbers, None)
        return None if first is None else first + 1


def measured(time_s: float, *, spread_fraction: float = 0.0) -> Measured:
    """Return the outcome of a trial whose steps took ``time_s`` each."""
    return Measured(
        measured_s=time_s,
        mean_s=time_s,
        spread_s=spread_fraction * time_s,
        step_time_s=(time_s,),
        num_warmup_steps=0,
        peak_memory_bytes=(),
        wall_s=time_s,
    )


def out_of_memory() -> OutOfMemory:
    """Return the outcome of a trial that ran out of memory."""
    return OutOfMemory(reason="recorded as out of memory", rank=None, host="", lines=(), wall_s=0)


def crashed() -> Crashed:
    """Return the outcome of a trial without a result."""
    reason = "no result is recorded"
    return Crashed(reason=reason, kind="no-result", rank=None, host="", lines=(), wall_s=0)


def answers(observations: Sequence[Observation]) -> dict[Strategy, Outcome]:
    """Return the outcomes of observed trials, by strategy."""
    return {
        each.strategy: measured(each.measured_s)
        if each.measured_s is not None
        else out_of_memory()
        if each.outcome == "oom"
        else crashed()
        for each in observations
    }


def fastest(recorded: Answers) -> tuple[Strategy, float]:
    """Return the fastest recorded strategy and its seconds.

    Raises:
        ValueError: If no strategy was measured.
    """
    times = {
        strategy: outcome.measured_s
        for strategy, outcome in recorded.items()
        if isinstance(outcome, Measured)
    }
    best = min(times, key=times.__getitem__)
    return best, times[best]


def with_factors(experiment: Experiment, factors: Mapping[str, float]) -> Experiment:
    """Return an experiment whose constants are multiplied by factors, by name."""
    constants = experiment.constants
    changed = {name: getattr(constants, name) * factor for name, factor in factors.items()}
    return replace(experiment, constants=replace(constants, **changed))


def study(
    experiment: Experiment,
    recorded: Answers,
    settings: TunerSettings,
    order: Sequence[Strategy] | None = None,
) -> TunerState:
    """Return a new study whose candidates are the recorded strategies."""
    planner = AmpRayPlanner(experiment=experiment)
    return begin(experiment, [planner.score(each) for each in recorded], settings, order)


def ran(
    state: TunerState,
    index: int,
    outcome: Outcome | None,
    *,
    predicted_s: float | None = None,
    sigma: float = 0.1,
    repeats: int | None = None,
) -> TunerState:
    """Return a study with one more trial of a candidate; without an outcome, it is running."""
    number, estimate = len(state.trials), state.candidates[index]
    trial = Trial(
        number=number,
        strategy=estimate.strategy,
        predicted_s=estimate.iteration_time_s if predicted_s is None else predicted_s,
        sigma=sigma,
        repeats=repeats,
        reason="asked for",
    )
    running = start(state, trial)
    return running if outcome is None else record(running, number, outcome)


def play(
    state: TunerState,
    answer: Callable[[Strategy, int], Outcome],
    *,
    num_groups: int = 1,
    seed: int = 0,
    predictor: BoundedPredictor | None = None,
) -> Replay:
    """Play a study until it stops.

    Args:
        state: First state of the study.
        answer: Returns the outcome of a strategy's trial, from the strategy and the trial's number.
        num_groups: Number of trials that run in parallel.
        seed: Decides which of several running trials ends first.
        predictor: Predictor to use; it caches predictions.
    """
    predictor = predictor or BoundedPredictor()
    generator = np.random.default_rng(seed)
    while True:
        knowledge = learn(state, predictor)
        free = num_groups - len(state.running)
        for trial in next_trials(state, free, predictor, knowledge):
            state = start(state, trial)
        running = state.running
        if not running:
            certificate = certify(state, knowledge)
            return Replay(state=state, knowledge=knowledge, certificate=certificate)
        ended = running[int(generator.integers(len(running)))]
        state = record(state, ended.number, answer(ended.strategy, ended.number))

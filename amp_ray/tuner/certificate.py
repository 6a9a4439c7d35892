"""When to stop: the possible gain of strategies that were not measured."""

from dataclasses import dataclass, replace
from typing import Final

from amp_ray.tuner.belief import learn_errors
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import TunerSettings, TunerState
from amp_ray.units import counted, figure_text

_SETTLED_SHARE: Final = 0.2
"""Share of the allowed doubt. If only surprises, or strategies that are expected to fail, keep a
certificate from holding, trials of other strategies go on until their doubt is below this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A bound on the times of strategies that were not measured."""

    # Whether, with the study's confidence, no unmeasured strategy is faster than the best measured
    # one by more than the tolerance; strategies that are expected to fail count with their chance
    # to finish
    holds: bool
    # Whether more trials are pointless: the certificate holds, or only a surprise could make a
    # strategy that is expected to run that fast, no trial has been a surprise so far, and the
    # budget is too small to rule surprises out
    settled: bool
    # Whether the certificate would hold after the trials that are left, if they showed no surprise
    within_reach: bool
    bound_s: float  # lower bound on their times with that confidence; never above ``best_s``
    best_s: float
    gain_fraction: float  # by how much the best measured one may be slower than the bound
    chance: float  # upper bound on the chance that one is faster by more than the tolerance
    chance_without_surprises: float  # the same if every error were as the model says
    surprise_fraction: float  # expected share of predictions that are far off
    surprise_sigma: float  # lognormal sigma of these predictions
    num_untested: int  # strategies that may finish and have no outcome
    text: str


def certify(state: TunerState, knowledge: Knowledge) -> Certificate | None:
    """Bound the possible gain of the strategies that were not measured.

    The chance is a sum over strategies, weighted by their chances to finish: an upper bound for any
    correlation of their errors. The errors are those of the calibrated model, including constants
    that the trials left uncertain. Their scale and the share of surprises are uncertain too, since
    they come from few trials. Strategies that were run without a measurement (crashed, timed out)
    are not counted. Returns None until something was measured.
    """
    best_s = knowledge.status.best_s
    if best_s is None:
        return None
    settings, errors = state.settings, knowledge.errors
    doubt = 1.0 - settings.confidence_fraction
    limit_s = best_s / (1.0 + settings.tolerance_fraction)
    untested = knowledge.untested()
    all_of_them, expected = knowledge.chances(untested), knowledge.chances(knowledge.expected())
    chance = all_of_them.any_below(limit_s)
    likely = expected.worth_trials().any_below(limit_s)
    within_reach = _chance_at_end(state, knowledge, limit_s) <= doubt
    bound_s = all_of_them.bound_s(best_s, doubt)
    certificate = Certificate(
        holds=chance <= doubt,
        settled=chance <= doubt or (likely <= _SETTLED_SHARE * doubt and not within_reach),
        within_reach=within_reach,
        bound_s=bound_s,
        best_s=best_s,
        gain_fraction=best_s / bound_s - 1.0,
        chance=chance,
        chance_without_surprises=all_of_them.without_surprises().any_below(limit_s),
        surprise_fraction=errors.surprise_fraction,
        surprise_sigma=errors.surprise_sigma,
        num_untested=len(untested),
        text="",
    )
    text = _text(settings, certificate, len(knowledge.status.silent))
    more = "" if certificate.holds or not knowledge.proposable() else "more trials help: --budget"
    slow = knowledge.calibration.second_population_text if knowledge.calibration else ""
    return replace(certificate, text="; ".join(filter(None, (text, more, slow))))


def _chance_at_end(state: TunerState, knowledge: Knowledge, limit_s: float) -> float:
    """Return the chance that is left if the budget runs the most promising ones as predicted.

    One trial is kept for the second run of the winner.
    """
    promising = knowledge.proposable()[: max(0, state.budget_left - 1)]
    run = {*promising, *knowledge.status.running}
    rest = [index for index in knowledge.untested() if index not in run]
    as_predicted = ((0.0, knowledge.sigma(index)) for index in sorted(run))
    errors = learn_errors([*knowledge.forecasts, *as_predicted])
    return replace(knowledge.chances(rest), errors=errors).any_below(limit_s)


def _text(settings: TunerSettings, certificate: Certificate, num_failed: int) -> str:
    """Say in one sentence what is certain of the strategies that were not measured."""
    best = f"the best measured takes {figure_text(certificate.best_s)} s"
    if not certificate.num_untested:
        failed = f"; {num_failed} of them failed" if num_failed else ""
        return f"every feasible strategy was tried{failed}; {best}"
    failed = f"; {counted(num_failed, 'strategy', 'strategies')} failed" if num_failed else ""
    if certificate.holds:
        return (
            f"with {100 * settings.confidence_fraction:.3g} % confidence no untested strategy is "
            f"faster than {figure_text(certificate.bound_s)} s; {best}{failed}"
        )
    return (
        f"not settled yet: a strategy that is more than {100 * settings.tolerance_fraction:.3g} % "
        f"faster may still exist (up to {100 * certificate.chance:.2g} % likely); {best}{failed}"
    )

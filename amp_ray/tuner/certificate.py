"""When to stop: what is left to gain among strategies that nobody has measured."""

from dataclasses import dataclass
from typing import Final

from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import TunerSettings, TunerState

_SETTLED_SHARE: Final = 0.1
"""Where only strategies that are expected to fail keep a certificate from holding, trials of the
others go on until they can hardly matter: this share of the doubt that is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is known of the strategies that were not measured."""

    # Whether none is more than the tolerance faster than the best measured one, with the confidence
    # asked for; those that are expected to fail may finish after all, and count
    holds: bool
    # Whether more trials are pointless: it holds, or those that are expected to run are almost
    # certainly not that fast
    settled: bool
    bound_s: float  # with that confidence none is faster than this; never above ``best_s``
    best_s: float
    gain_fraction: float  # by how much the best measured one may be slower than the bound
    chance: float  # chance, from above, that one is more than the tolerance faster
    num_untested: int  # how many could still turn out to be faster
    text: str


def certify(state: TunerState, knowledge: Knowledge) -> Certificate | None:
    """Say what the strategies that were not measured can still gain.

    The chance is a sum over strategies, each with its chance to finish: an upper bound whatever
    their errors have in common. The errors are those of the calibrated model, constants left open
    by the trials included, with a scale that few trials tell only roughly. Strategies that were run
    without a measurement (crashed, timed out) are not counted. Returns None until something was
    measured.
    """
    best_s = knowledge.status.best_s
    if best_s is None:
        return None
    settings = state.settings
    doubt = 1.0 - settings.confidence_fraction
    limit_s = best_s / (1.0 + settings.tolerance_fraction)
    untested, expected = knowledge.untested(), knowledge.expected()
    all_of_them, likely = knowledge.chances(untested), knowledge.chances(expected)
    bound_s = all_of_them.bound_s(best_s, doubt)
    chance = all_of_them.any_below(limit_s)
    holds = chance <= doubt
    settled = holds or likely.any_below(limit_s) <= _SETTLED_SHARE * doubt
    silent = len(knowledge.status.silent)
    uncounted = f" ({silent} that crashed or did not end are not counted)" if silent else ""
    text = _bound_text(settings, bound_s, len(untested))
    if settled and not holds:
        likely_s, num_doubtful = likely.bound_s(best_s, doubt), len(untested) - len(expected)
        text += f" ({likely_s:.4g} s without {num_doubtful} that are expected to fail)"
    return Certificate(
        holds=holds,
        settled=settled,
        bound_s=bound_s,
        best_s=best_s,
        gain_fraction=best_s / bound_s - 1.0,
        chance=chance,
        num_untested=len(untested),
        text=f"{text}{uncounted}; the best measured takes {best_s:.4g} s",
    )


def _bound_text(settings: TunerSettings, bound_s: float, num_untested: int) -> str:
    if not num_untested:
        return "every strategy that can run was run"
    confidence = f"{100 * settings.confidence_fraction:.3g} %"
    return f"with {confidence} confidence no untested strategy is faster than {bound_s:.4g} s"

"""Step times of a trial: plausibility, warm-up, trend, median, mean and spread."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, median, quantiles, stdev
from typing import Final, Literal

MAD_TO_SIGMA: Final = 1.4826  # standard deviation / median absolute deviation, normal distribution
NUM_SIGMAS: Final = 3.0
MIN_EXCESS_FRACTION: Final = 0.05  # a slow step exceeds the others by at least this share
MIN_STEPS_FOR_QUARTILES: Final = 2
APART_FRACTION: Final = 0.05  # difference of mean and median that causes a warning
RARE_FRACTION: Final = 0.25  # slow steps rarer than this do not affect the quartiles
# A trial whose steps spread (interquartile range) over more than this share of their mean was
# disturbed. At this spread, ten normal steps determine their median to 7 %, about the difference
# between repeats of one run on a quiet cluster (3-9 %, BigScience chronicles).
UNSTEADY_FRACTION: Final = 0.25
IQR_PER_SIGMA: Final = 1.349  # interquartile range of a normal distribution, in sigmas
SUPPOSED_STEPS: Final = 10  # assumed number of steps if only the spread is known
MOST_CORRELATION: Final = 0.8  # limit of the estimate from a few steps

StepWarning = Literal["periodic", "trend", "unsteady", "warm_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Statistics of a trial's step times."""

    measured_s: float  # median over the steps after warm-up
    mean_s: float  # mean over the same steps
    spread_s: float  # their interquartile range
    num_warmup_steps: int
    warnings: tuple[StepWarning, ...]


def summarise_steps(step_time_s: Sequence[float]) -> StepSummary:
    """Detect the warm-up and summarise the steps after it.

    Example:
        >>> summary = summarise_steps([9.0, 2.0, 1.0, 1.0, 1.25, 1.0, 1.25, 1.0])
        >>> summary.measured_s, summary.spread_s, summary.num_warmup_steps, summary.warnings
        (1.0, 0.1875, 2, ('unsteady',))
    """
    if not step_time_s or min(step_time_s) <= 0:
        message = f"a measurement needs at least one step and positive times, found {step_time_s!r}"
        raise ValueError(message)
    warmup = find_warmup(step_time_s)
    steps = step_time_s[warmup.num_steps :]
    spread_s = 0.0
    if len(steps) >= MIN_STEPS_FOR_QUARTILES:
        low, _, high = quantiles(steps, n=4, method="inclusive")
        spread_s = high - low
    return StepSummary(
        measured_s=median(steps),
        mean_s=fmean(steps),
        spread_s=spread_s,
        num_warmup_steps=warmup.num_steps,
        warnings=(
            *step_warnings(steps, spread_s, has_trend=warmup.has_trend),
            *(("warm_up",) if warmup.is_doubtful else ()),
        ),
    )


def step_warnings(
    steps: Sequence[float], spread_s: float, *, has_trend: bool
) -> tuple[StepWarning, ...]:
    """Return why a single number does not describe the steps after warm-up well.

    ``periodic``: mean and median differ by 5 % or more, and agree without the slow steps, which are
    rare: at most a quarter of all steps, or a single one. ``trend``: the times still rise or fall
    (see `find_warmup`). ``unsteady``: the steps' interquartile range exceeds a quarter of their
    mean, or mean and median differ by 5 % or more for another reason than rare slow steps.
    """
    is_apart, slow = _is_apart(steps), slow_steps(steps)
    usual = [time_s for time_s in steps if time_s not in slow]
    is_rare = len(slow) <= max(1, RARE_FRACTION * len(steps)) and not _is_apart(usual)
    is_so: dict[StepWarning, bool] = {
        "periodic": is_apart and is_rare,
        "trend": has_trend,
        "unsteady": not tells_time(fmean(steps), spread_s) or (is_apart and not is_rare),
    }
    return tuple(warning for warning, applies in is_so.items() if applies)


def tells_time(mean_s: float, spread_s: float) -> bool:
    """Return whether the spread is small enough to compare the mean with other times."""
    return spread_s <= UNSTEADY_FRACTION * mean_s


def standard_error(steps: Sequence[float], mean_s: float, spread_s: float) -> float:
    """Return the standard error of the mean of steps, as a fraction of the mean.

    Disturbances often last for several steps, so the error accounts for the correlation of
    neighbouring steps (first-order autoregressive series). If ``steps`` is empty, the error is that
    of `SUPPOSED_STEPS` normally distributed steps with the spread ``spread_s``.

    Example:
        >>> round(standard_error([0.9, 1.1] * 8, 1.0, 0.2), 3), standard_error([1.0], 1.0, 0.0)
        (0.026, 0.0)
    """
    if len(steps) < MIN_STEPS_FOR_QUARTILES:
        return spread_s / mean_s / IQR_PER_SIGMA / math.sqrt(SUPPOSED_STEPS)
    squares = sum((step - mean_s) ** 2 for step in steps)
    products = sum((a - mean_s) * (b - mean_s) for a, b in pairwise(steps))
    correlation = min(max(products / squares, 0.0), MOST_CORRELATION) if squares else 0.0
    inflation = math.sqrt((1.0 + correlation) / (1.0 - correlation))
    return inflation * stdev(steps) / mean_s / math.sqrt(len(steps))


def slow_steps(steps: Sequence[float]) -> list[float]:
    """Return the times that are much longer than the others."""
    limit = _slow_limit(steps)
    return [time_s for time_s in steps if time_s > limit]


def _is_apart(steps: Sequence[float]) -> bool:
    middle = median(steps)
    return abs(fmean(steps) - middle) >= APART_FRACTION * middle


def _slow_limit(steps: Sequence[float]) -> float:
    """Return the time above which a step counts as slow."""
    middle = median(steps)
    return middle + max(_reach(steps), MIN_EXCESS_FRACTION * middle)


def _reach(steps: Sequence[float]) -> float:
    """Return three standard deviations of the steps, estimated robustly against outliers."""
    middle = median(steps)
    deviation = median([abs(time_s - middle) for time_s in steps])
    return NUM_SIGMAS * MAD_TO_SIGMA * deviation


def count_warmup_steps(step_time_s: Sequence[float]) -> int:
    """Count the slow steps at the start, before the first one that is as fast as the second half.

    At most half of the steps count as warm-up, so that some are left to measure.

    Example:
        >>> count_warmup_steps([5.0, 1.2, 1.0, 1.0, 1.0, 1.0])
        2
        >>> count_warmup_steps([1.0, 1.0, 9.0, 1.0])
        0
    """
    half = len(step_time_s) // 2
    limit = _slow_limit(step_time_s[half:])
    return next((index for index in range(half) if step_time_s[index] <= limit), half)


def has_fast_start(steps: Sequence[float]) -> bool:
    """Return whether the first steps are so much faster than the second half that the mean moves.

    Example:
        >>> has_fast_start([1.0] * 3 + [1.5] * 17), has_fast_start([0.9] + [1.0] * 19)
        (True, False)
    """
    half = len(steps) // 2
    middle = median(steps[half:])
    limit = 2.0 * middle - _slow_limit(steps[half:])
    number = next((index for index in range(half) if steps[index] >= limit), half)
    return number > 0 and fmean(steps[number:]) > (1.0 + LEAST_CHANGE) * fmean(steps)


MIN_STEPS_FOR_TREND: Final = 8
# A change of more sigmas is a trend, over all steps or over their later half; fewer than 1 % of
# series without a trend have such a change (see the tests)
ALARM_SIGMAS: Final = 3.0
LEAST_CHANGE: Final = 0.02  # relative, from the first to the last step; a smaller one is no trend
SURE_SIGMAS: Final = 1.64  # sigmas of an upper bound with 95 % confidence
SETTLED_CHANGE: Final = 0.025  # a trend has ended if the remaining change is surely smaller
HIDDEN_CHANGE: Final = 0.08  # more steps are needed if noise may hide a change of this size
NUM_STARTS: Final = 4  # maximum length of a slowly decaying warm-up, in eighths of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The first steps of a trial that do not count."""

    num_steps: int  # their median is not below that of the steps that count
    has_trend: bool  # whether the later steps still rise or fall
    # Whether another run should confirm it: more than a quarter of the steps, or steps at the start
    # that are faster than the later ones. No warm-up is fast, so these count
    is_doubtful: bool


def find_warmup(step_time_s: Sequence[float]) -> WarmUp:
    """Find the warm-up: steps at the start that are slower than the later ones.

    Slow first steps are warm-up. If they do not explain a trend of the times, the warm-up grows by
    eighths of all steps, to at most half, until the remaining steps demonstrably change little. If
    they never do, the later half is used and has a trend. If the times rise instead, a slow-down
    began during the trial, and nothing tells which part is usual: the faster steps count too.
    """
    number, slow = len(step_time_s), count_warmup_steps(step_time_s)
    start, is_open = slow, False
    if has_trend(step_time_s) and not (slow and _is_level(step_time_s[slow:])):
        eighths = (number * eighth // (2 * NUM_STARTS) for eighth in range(NUM_STARTS + 1))
        starts = sorted({slow, *(start for start in eighths if start > slow)})
        settled = (start for start in starts if _has_settled(step_time_s[start:]))
        end = next(settled, None)
        start, is_open = number // 2 if end is None else end, end is None
    kept = next(at for at in (start, slow, 0) if _is_slower(step_time_s, at, by_mean=at > slow))
    return WarmUp(
        num_steps=kept,
        has_trend=is_open,
        is_doubtful=(kept < start and not is_open)
        or kept > RARE_FRACTION * number
        or has_fast_start(step_time_s[kept:]),
    )


def _is_slower(steps: Sequence[float], number: int, *, by_mean: bool) -> bool:
    """Return whether the first steps are no faster than the others; true of no steps.

    They are compared by their medians, and also by their means where a slow-down that began late
    may have left the medians alike.
    """
    first, later = steps[:number], steps[number:]
    if not first:
        return True
    return median(first) >= median(later) and (not by_mean or fmean(first) >= fmean(later))


def has_trend(steps: Sequence[float]) -> bool:
    """Return whether times rise or fall, over all steps or over their later half."""
    for window in (steps, steps[len(steps) // 2 :]):
        change, error = relative_change(window)
        if abs(change) > max(LEAST_CHANGE, _quantile(ALARM_SIGMAS, len(window)) * error):
            return True
    return False


def num_more_steps(steps: Sequence[float], *, most: int, left_s: float) -> int:
    """Return how many more steps a trial should run to determine its time; 0 if it may end.

    While the mean is uncertain, the number of steps is doubled, limited by ``most`` and the
    remaining time ``left_s``. The mean is uncertain if a trend has not ended, if the warm-up is
    doubtful, if noise may hide a change larger than `HIDDEN_CHANGE`, or if a single slow step
    affects it, which may not recur. Fewer than `MIN_STEPS_FOR_TREND` steps are as many as asked.
    """
    summary = summarise_steps(steps)
    counted = steps[summary.num_warmup_steps :]
    if len(steps) < MIN_STEPS_FOR_TREND or not _is_open(counted, summary.warnings):
        return 0
    affordable = int(max(0.0, left_s) / summary.mean_s)
    return min(len(steps), max(0, most - len(steps)), affordable)


def _is_open(steps: Sequence[float], warnings: Sequence[StepWarning]) -> bool:
    is_open = bool({"trend", "warm_up"} & {*warnings})
    if is_open or len(steps) < MIN_STEPS_FOR_TREND:
        return is_open
    if "periodic" in warnings and len(slow_steps(steps)) == 1:
        return True
    return "unsteady" not in warnings and largest_change(steps) > HIDDEN_CHANGE


def _is_level(steps: Sequence[float]) -> bool:
    """Return whether times neither rise nor fall, and noise hides no large change."""
    return (
        len(steps) >= MIN_STEPS_FOR_TREND
        and not has_trend(steps)
        and largest_change(steps) <= HIDDEN_CHANGE
    )


def _has_settled(steps: Sequence[float]) -> bool:
    if len(steps) < MIN_STEPS_FOR_TREND:
        return False
    return largest_change(steps) <= SETTLED_CHANGE and not has_trend(steps)


def largest_change(steps: Sequence[float]) -> float:
    """Return an upper bound on the change from first to last step, with 95 % confidence."""
    change, error = relative_change(steps)
    return abs(change) + _quantile(SURE_SIGMAS, len(steps)) * error


def _quantile(sigmas: float, number: int) -> float:
    """Return the quantile of Student's t that corresponds to ``sigmas`` of a normal distribution.

    The slope of a line through few steps has this distribution.
    """
    freedom = max(1, number - 2)
    return sigmas * (1 + (sigmas**2 + 1) / (4 * freedom))  # Cornish and Fisher, Student's t


def relative_change(steps: Sequence[float]) -> tuple[float, float]:
    """Return the change from first to last step as a fraction of the median, with its error.

    The change is that of a line fitted to the steps, and the error its standard error. Outliers are
    clipped to three sigmas. Too few steps give no change.
    """
    number, middle = len(steps), median(steps)
    if number < MIN_STEPS_FOR_TREND:
        return 0.0, 0.0
    reach = _reach(steps)
    times = [min(max(time_s, middle - reach), middle + reach) for time_s in steps]
    slope, intercept = linear_regression(range(number), times)
    residual = math.fsum((t - intercept - slope * at) ** 2 for at, t in enumerate(times))
    error = math.sqrt(residual / (number - 2) * 12 / (number * (number**2 - 1)))
    scale = (number - 1) / middle
    return scale * slope, scale * error


LEAST_STEP_S: Final = 1e-6  # shorter than the launch of a single kernel, which takes microseconds
LONGEST_STEP_S: Final = 1e6  # eleven days: more than any trial lasts


def check_times(step_time_s: Sequence[float], *, source: str) -> None:
    """Refuse times that no step can have taken."""
    for index, seconds in enumerate(step_time_s):
        if not LEAST_STEP_S <= seconds <= LONGEST_STEP_S:
            raise ValueError(
                f"entry {index} of {source} says that a step took {seconds:g} s; expected "
                f"{LEAST_STEP_S:g} to {LONGEST_STEP_S:g} s"
            )


def check_total(step_time_s: Sequence[float], *, timeout_s: float) -> None:
    """Refuse times whose sum exceeds the trial's time limit."""
    total_s = sum(step_time_s)
    if total_s > timeout_s:
        raise ValueError(
            f"the steps add up to {total_s:g} s, but the trial took at most {timeout_s:g} s: is "
            "the metric's unit right?"
        )


def same_length(times: Mapping[str, Sequence[float]]) -> int:
    """Return the number of steps, which must be the same for all ranks."""
    counts = {source: len(values) for source, values in times.items()}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{source}: {number}" for source, number in counts.items())
        raise ValueError(
            f"ranks tell different numbers of steps ({numbers}); let one rank tell, or each "
            "equally often"
        )
    return next(iter(counts.values()))


def slowest_of(times: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the time of the slowest rank at every step.

    Example:
        >>> slowest_of([[1.0, 2.0], [3.0, 1.0]])
        (3.0, 2.0)
    """
    return tuple(map(max, zip(*times, strict=True)))

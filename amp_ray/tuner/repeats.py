"""Which measured strategies are run again: leaders whose order their spread leaves open."""

import math
from statistics import NormalDist
from typing import Final

from amp_ray.tuner.state import TunerSettings
from amp_ray.tuner.trial_status import Figure, TrialStatus

_NORMAL: Final = NormalDist()


def to_repeat(status: TrialStatus, settings: TunerSettings) -> tuple[int, ...]:
    """Return the leaders to run again, first the one with the fewest runs, then the fastest.

    The winner is uncertain while another measured strategy has a chance to be in truth more than
    the tolerance faster: then both are run again. How far a figure may be off is told by the
    spread of its steps, and by its runs where there are several.
    """
    leader = status.best  # looked for once: it takes a look at every figure
    if leader is None:
        return ()
    best = status.figures[leader]
    margin = math.log1p(settings.tolerance_fraction)
    doubt = 1.0 - settings.confidence_fraction
    rivals = {
        place
        for place, figure in status.figures.items()
        if place != leader and _chance_of_gain(best, figure, margin) > doubt
    }
    if not rivals:
        return ()
    open_again = (
        place
        for place in rivals | {leader}
        if status.launched[place] <= settings.max_repeats and place not in status.running
    )

    def urgency(place: int) -> tuple[float, ...]:
        """Order by number of runs, then by time."""
        figure = status.figures[place]
        return (len(figure.runs), figure.measured_s, place)

    return tuple(sorted(open_again, key=urgency))


def _chance_of_gain(best: Figure, rival: Figure, margin: float) -> float:
    """Return the chance that a rival's true time lies below the best's by a margin of logarithm."""
    sigma = math.hypot(best.sigma, rival.sigma)
    if sigma <= 0.0:
        return 0.0
    apart = math.log(rival.measured_s / best.measured_s) + margin
    return _NORMAL.cdf(-apart / sigma)

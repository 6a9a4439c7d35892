"""Choose the next strategy among those that nobody has run, by expected gain."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final

from amp_ray.tuner.belief import Belief
from amp_ray.tuner.knowledge import Knowledge
from amp_ray.tuner.state import TunerSettings

_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A strategy to run, and why."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What would be known if every running trial took its predicted time."""

    knowledge: Knowledge
    belief: Belief  # what would be known of the candidates' times
    best_s: float  # the time to beat; infinite before the first trial
    supposed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, knowledge: Knowledge) -> "_View":
        """Return the view with all running trials supposed to have ended."""
        view = cls(
            knowledge=knowledge,
            belief=knowledge.belief,
            best_s=knowledge.status.best_s or math.inf,
        )
        for index in knowledge.status.running:
            if index not in knowledge.status.closed:
                view = view.suppose(index)
        return view

    def suppose(self, index: int) -> "_View":
        """Return the view after one more strategy has taken what is predicted."""
        row = self.belief.indices.index(index)
        predicted_s = self.knowledge.estimates[index].iteration_time_s
        return replace(
            self,
            belief=self.belief.as_if_measured(row),
            best_s=min(self.best_s, predicted_s),
            supposed=self.supposed | {index},
        )

    def is_settled(self, settings: TunerSettings) -> bool:
        """Whether the study could then stop: it waits for what runs instead of launching more."""
        left = [index for index in self.knowledge.expected() if index not in self.supposed]
        limit_s = self.best_s / (1.0 + settings.tolerance_fraction)
        chance = self.knowledge.chances(left, self.belief).any_below(limit_s)
        return chance <= 1.0 - settings.confidence_fraction

    def most_promising(self, indices: Sequence[int]) -> int:
        """Return the one with the largest expected gain; the fastest prediction wins a tie."""
        rows = [self.belief.indices.index(index) for index in indices]
        gains = expected_gain(self.belief, rows, self.best_s, self.knowledge.widening)
        means = [float(self.belief.log_mean[row]) for row in rows]
        return min(zip(indices, gains, means, strict=True), key=lambda it: (-it[1], it[2], it[0]))[
            0
        ]

    def reason(self, index: int, num_left: int) -> str:
        """Say why one is chosen of many, one line."""
        if math.isinf(self.best_s):
            return f"best predicted of {num_left} feasible strategies"
        row = self.belief.indices.index(index)
        apart = math.log(self.best_s) - float(self.belief.log_mean[row])
        sigma = self.knowledge.widening * float(self.belief.sigma[row])
        chance = _NORMAL.cdf(apart / sigma)
        return (
            f"most to gain of {num_left} feasible strategies: {100 * chance:.0f} % chance to be "
            f"faster than {self.best_s:.4g} s"
        )


def explore(knowledge: Knowledge, settings: TunerSettings) -> Iterator[Promise]:
    """Yield strategies that nobody has run, most promising first.

    The first of a study is the one with the fastest prediction. After that the expected gain over
    the best decides. Whatever runs, and whatever was yielded before, counts as if it had taken
    just what is predicted, so that trials side by side do not ask the same question; where their
    answers may well end the study, nothing more is yielded.
    """
    view = _View.of(knowledge)
    proposable = knowledge.proposable()
    near = [index for index in proposable if index in knowledge.belief.indices]
    for num_yielded in range(len(near)):
        if view.supposed and view.is_settled(settings):
            return
        index = view.most_promising(near)
        yield Promise(index=index, reason=view.reason(index, len(proposable) - num_yielded))
        near.remove(index)
        view = view.suppose(index)
    for index in proposable:
        if index not in knowledge.belief.indices:
            yield Promise(index=index, reason="the next prediction, far behind the leaders")


def expected_gain(
    belief: Belief, rows: Sequence[int], best_s: float, widening: float = 1.0
) -> list[float]:
    """Return by how much each is expected to be faster than a time, slower ones counting as 0.

    Against an infinite ``best_s`` all gain alike; errors are ``widening`` times larger than the
    belief says. Gains are in logarithms, times the chance to finish.
    """
    if math.isinf(best_s):
        return [0.0] * len(rows)
    gains = []
    for row in rows:
        sigma = widening * float(belief.sigma[row])
        distance = (math.log(best_s) - float(belief.log_mean[row])) / sigma
        gain = sigma * (_NORMAL.pdf(distance) + distance * _NORMAL.cdf(distance))
        gains.append(max(gain, 0.0) * float(belief.finishes[row]))
    return gains

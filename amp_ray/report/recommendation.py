"""The answer of a study in words, the same ones wherever it stands."""

from collections.abc import Mapping
from typing import Any

from amp_ray.report.variants import figure_text, plan_text
from amp_ray.runtime.study.result import MOST_TIES


def recommendation_lines(recommended: Mapping[str, Any]) -> list[str]:
    """Say what to use, what it takes, why, and what is as good.

    Args:
        recommended: The object ``recommendation`` of ``tune --json``.
    """
    return [
        f"recommended: {strategy_text(recommended['strategy'])}",
        f"  {_times_text(recommended)}; {recommended['reason']}",
        *(f"  as good: {text}" for text in tie_texts(recommended)),
    ]


def tie_texts(recommended: Mapping[str, Any]) -> list[str]:
    """Name the first of the strategies that are as good, with their times."""
    return [
        f"{strategy_text(tie['strategy'])}, {'measured' if tie['measured'] else 'predicted'} "
        f"{figure_text(tie['time_s'])} s"
        for tie in recommended["ties"][:MOST_TIES]
    ]


def time_text(recommended: Mapping[str, Any]) -> str:
    """Write the time that is expected, with its interval where an older study does not lack it."""
    interval = recommended.get("interval_s")
    around = f" ({figure_text(interval[0])} to {figure_text(interval[1])})" if interval else ""
    return f"{figure_text(recommended['time_s'])} s{around}"


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """Name a strategy so that no other one of a study has its name, unless by its placement."""
    bounds = strategy.get("bounds")
    cuts = f", bounds {' '.join(map(str, bounds))}" if bounds and len(bounds) > 2 else ""  # noqa: PLR2004
    return f"{plan_text(strategy)}{cuts}"


def _times_text(recommended: Mapping[str, Any]) -> str:
    """Say what is measured, then what is predicted."""
    expected, predicted_s = time_text(recommended), figure_text(recommended["predicted_s"])
    if recommended["rests_on"] == "predicted":
        return f"predicted {expected}, not measured"
    if recommended["rests_on"] == "measured":
        return f"measured {expected}, predicted {predicted_s} s"
    measured_s = figure_text(recommended["measured_s"])
    return f"expected {expected}: measured {measured_s} s, unsteadily, predicted {predicted_s} s"

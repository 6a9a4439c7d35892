from dataclasses import fields

import pytest

from amp_ray.cost.estimate import Breakdown, Estimate, Reason
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy

STRATEGY = Strategy.uniform(
    Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    (0, 4),
)


def test_reason_reads_as_kind_and_figures() -> None:
    assert str(Reason(kind="out of memory", detail="stage 0")) == "out of memory: stage 0"
    assert str(Reason(kind="out of memory", detail="")) == "out of memory"


def test_parts_add_up_to_the_iteration() -> None:
    names = [part.name for part in fields(Breakdown)]
    parts = Breakdown(**{name: 2.0**i for i, name in enumerate(names)})
    assert parts.total_s == 2.0 ** len(names) - 1


def test_json_names_the_parts_without_their_unit() -> None:
    found = Breakdown(compute_s=1.0, gradient_sync_s=2.0).to_json()
    assert found["compute"] == 1.0
    assert found["gradient_sync"] == 2.0
    assert sum(found.values()) == pytest.approx(3.0)


def test_estimate_is_feasible_without_reasons() -> None:
    fine = Estimate(strategy=STRATEGY, iteration_time_s=1.0)
    failing = Estimate(
        strategy=STRATEGY, iteration_time_s=1.0, reasons=(Reason(kind="x", detail=""),)
    )
    assert fine.feasible
    assert not failing.feasible

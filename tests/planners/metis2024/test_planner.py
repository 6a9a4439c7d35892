import pytest

from amp_ray.cost.estimate import Estimate, Infeasible
from amp_ray.errors import InputError
from amp_ray.inputs.profiles.metis import parse_metis_profile
from amp_ray.planners.metis2024.planner import Metis2024Planner
from amp_ray.strategies.candidate import Candidate, GroupsCandidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from support.experiments import experiment_from
from support.metis import metis_profile_files
from support.metis_oracle import cheapest_plan

TEXT = """\
name: mixed
model: {family: gpt2, num_layers: 2, hidden_size: 64, num_heads: 4, sequence_length: 32,
        vocab_size: 128}
cluster:
  nodes:
    - {device: A100-80, slots: 2, intra_gbit_per_s: 80, inter_gbit_per_s: 8}
    - {device: T4, slots: 2, intra_gbit_per_s: 40, inter_gbit_per_s: 8}
profile: {source: metis, path: p}
global_batch_size: 8
"""


def planner(*changes: tuple[str, str]) -> Metis2024Planner:
    """Plan for two A100 and two T4."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    files = metis_profile_files()
    experiment = experiment_from(text, {f"p/{name}": file for name, file in files.items()})
    return Metis2024Planner(experiment=experiment, stated=parse_metis_profile(files, folder="p"))


def candidate(num_micro_batches: int) -> GroupsCandidate:
    """Return how a batch of 8 is cut."""
    return GroupsCandidate(
        micro_batch_size=8 // num_micro_batches, num_micro_batches=num_micro_batches
    )


def estimate(given: Metis2024Planner, num_micro_batches: int = 4) -> Estimate:
    """Plan where there is a plan."""
    result = given.plan(candidate(num_micro_batches))
    assert isinstance(result, Estimate)
    return result


def test_a_candidate_gets_its_best_plan() -> None:
    given = planner()
    expected = cheapest_plan(given.setting, given.search.limits, 4)
    assert expected is not None
    result = estimate(given)
    assert result.iteration_time_s == pytest.approx(expected[0], rel=1e-12)
    assert result.strategy.num_micro_batches == 4
    assert result.feasible


def test_the_parts_add_up() -> None:
    result = estimate(planner())
    assert result.breakdown is not None
    assert result.breakdown.total_s == pytest.approx(result.iteration_time_s, rel=1e-12)


def test_the_best_of_all_is_the_best_candidate() -> None:
    given = planner()
    best = given.best()
    times = [
        result.iteration_time_s
        for number in (1, 2, 4, 8)
        for result in [given.plan(candidate(number))]
        if isinstance(result, Estimate)
    ]
    assert isinstance(best, Estimate)
    assert best.iteration_time_s == min(times)


def test_a_plan_comes_with_its_proof() -> None:
    result = estimate(planner(), 4)
    assert result.lower_bound_s == pytest.approx(result.iteration_time_s, rel=1e-12)


def test_what_was_not_measured_is_infeasible() -> None:
    result = planner().plan(candidate(1))
    assert isinstance(result, Infeasible)
    assert result.reason.kind == "no plan"


def test_memory_is_that_of_the_device_with_the_least_to_spare() -> None:
    result = estimate(planner())
    for needed, limit in zip(result.peak_memory_bytes, result.memory_limit_bytes, strict=True):
        assert 0 < needed <= limit


def test_stages_of_their_own_are_not_launched() -> None:
    assert not estimate(
        planner(("slots: 2, intra_gbit_per_s: 40", "slots: 3, intra_gbit_per_s: 40"))
    ).launchable


def test_limits_of_the_experiment_hold() -> None:
    limited = planner(("global_batch_size: 8", "global_batch_size: 8\nsearch: {max_tp: 1}"))
    assert limited.search.limits.max_tp == 1
    sizes = planner(
        ("global_batch_size: 8", "global_batch_size: 8\nsearch: {micro_batch_sizes: [1, 2]}")
    )
    assert sizes.search.limits.max_size == 2
    assert planner().search.limits.max_tp == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("recompute: full", "needs recompute: none"),
        ("zero_stage: 1", "needs zero_stage: 0"),
        ("search: {max_pp: 2}", "needs no limits but search.max_tp"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused(line: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        planner(("global_batch_size: 8", f"global_batch_size: 8\n{line}"))


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="needs a model of 4 layers"):
        planner(
            ("profile: {source: metis, path: p}", "profile: {source: analytic}"),
            ("num_layers: 2", "num_layers: 3"),
        )


def test_a_candidate_whose_degrees_are_chosen_is_refused() -> None:
    chosen = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=4
    )
    with pytest.raises(InputError, match="name a whole strategy"):
        planner().plan(chosen)


def test_a_uniform_strategy_is_scored() -> None:
    given = planner()
    chosen = Candidate(
        micro_batch_size=1, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=4
    )
    strategy = Strategy.uniform(chosen, (0, 2, given.experiment.model.num_layers))
    result = given.score(strategy)
    assert isinstance(result, Estimate)
    assert result.strategy == strategy
    assert result.iteration_time_s >= estimate(given).iteration_time_s


def test_a_strategy_that_needs_what_was_not_measured_is_infeasible() -> None:
    given = planner()
    chosen = Candidate(
        micro_batch_size=4, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=1
    )
    result = given.score(Strategy.uniform(chosen, (0, 2, given.experiment.model.num_layers)))
    assert isinstance(result, Infeasible)
    assert result.reason.kind == "not in the profile"


def test_types_can_be_those_of_the_published_rule() -> None:
    unequal = ("device: T4, slots: 2", "count: 2, device: T4, slots: 1")
    rule = ("global_batch_size: 8", "global_batch_size: 8\nsearch: {first_node_counts: true}")
    given = planner(unequal, rule)
    expected = cheapest_plan(given.setting, given.search.limits, 4)
    assert expected is not None
    result = estimate(given)
    assert result.iteration_time_s == pytest.approx(expected[0], rel=1e-12)
    assert result.iteration_time_s != estimate(planner(unequal)).iteration_time_s
    scored = given.score(result.strategy)
    assert isinstance(scored, Estimate)
    assert scored.iteration_time_s == result.iteration_time_s

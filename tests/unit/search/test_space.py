from operator import attrgetter

import pytest

from amp_ray.search.space import candidates_of, group_candidates, uniform_candidates
from amp_ray.spec.candidate import Candidate, StageOptions
from amp_ray.spec.experiment import Experiment, launchable_only
from support.experiments import small_experiment


def cluster(count: int, slots: int) -> tuple[str, str]:
    return ("{count: 2, device: T4, slots: 2", f"{{count: {count}, device: T4, slots: {slots}")


def batch(samples: int) -> tuple[str, str]:
    return ("global_batch_size: 8", f"global_batch_size: {samples}")


def limits(text: str) -> tuple[str, str]:
    return ("global_batch_size: 8", f"global_batch_size: 8\nsearch: {{{text}}}")


def degrees(experiment: Experiment) -> list[tuple[int, int, int, int]]:
    found = uniform_candidates(experiment)
    return [(c.micro_batch_size, c.options.tp, c.options.dp, c.pp) for c in found]


@pytest.mark.parametrize(("samples", "num_candidates"), [(32, 53), (64, 65)])
def test_the_paper_has_53_and_65_candidates(samples: int, num_candidates: int) -> None:
    found = uniform_candidates(small_experiment(cluster(4, 4), batch(samples)))
    assert len(found) == num_candidates


@pytest.mark.parametrize(("count", "slots", "samples"), [(3, 4, 96), (1, 12, 96), (3, 1, 7)])
def test_every_device_and_every_sample_is_used_once(count: int, slots: int, samples: int) -> None:
    found = uniform_candidates(small_experiment(cluster(count, slots), batch(samples)))
    assert {candidate.num_devices for candidate in found} == {count * slots}
    assert {candidate.global_batch_size for candidate in found} == {samples}


def test_candidates_ascend_by_value_and_none_comes_twice() -> None:
    found = uniform_candidates(small_experiment(cluster(3, 4), batch(96)))
    assert list(found) == sorted(set(found))


def test_tensor_parallel_groups_stay_within_a_node() -> None:
    found = uniform_candidates(small_experiment(cluster(3, 4), batch(96)))
    assert {candidate.options.tp for candidate in found} == {1, 2, 4}


def test_unequal_slots_allow_only_groups_that_fit_every_node() -> None:
    nodes = """\
    - {count: 1, device: T4, slots: 4, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
    - {count: 1, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
"""
    old = "    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
    found = uniform_candidates(small_experiment((old, nodes), batch(12)))
    assert {candidate.options.tp for candidate in found} == {1, 2}


def test_groups_may_span_nodes_when_asked() -> None:
    found = uniform_candidates(small_experiment(limits("tp_across_nodes: true")))
    assert {candidate.options.tp for candidate in found} == {1, 2, 4}


@pytest.mark.parametrize(
    ("text", "attribute", "allowed"),
    [
        ("max_tp: 1", "options.tp", {1}),
        ("min_tp: 2", "options.tp", {2}),
        ("max_dp: 2", "options.dp", {1, 2}),
        ("max_pp: 2", "pp", {1, 2}),
        ("micro_batch_sizes: [2, 4]", "micro_batch_size", {2, 4}),
    ],
)
def test_limits_are_kept(text: str, attribute: str, allowed: set[int]) -> None:
    found = uniform_candidates(small_experiment(limits(text)))
    assert {attrgetter(attribute)(candidate) for candidate in found} == allowed


def test_recompute_is_the_experiments() -> None:
    found = uniform_candidates(small_experiment(("name: small", "name: small\nrecompute: full")))
    assert {str(candidate.options.recompute) for candidate in found} == {"full"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("min_tp: 4", r"no tp within min_tp 4 divides the slots of every node \(2\); widen"),
        (
            "micro_batch_sizes: [3]",
            r"global_batch_size 8: with tp 1, 2 and micro_batch_sizes \[3\] no",
        ),
        (
            "max_dp: 1, micro_batch_sizes: [3, 5]",
            r"tp 1, 2 and max_dp 1, micro_batch_sizes \[3, 5\]",
        ),
    ],
)
def test_limits_that_leave_nothing_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        uniform_candidates(small_experiment(limits(text)))
    assert "None" not in str(refused.value)


def test_candidates_of_a_single_device() -> None:
    found = uniform_candidates(small_experiment(cluster(1, 1), batch(2)))
    assert found == (
        Candidate(micro_batch_size=1, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=2),
        Candidate(micro_batch_size=2, options=StageOptions(tp=1, dp=1), pp=1, num_micro_batches=1),
    )


@pytest.mark.parametrize("space", ["uniform", "placement"])
def test_placements_are_of_the_uniform_candidates(space: str) -> None:
    experiment = small_experiment(limits(f"space: {space}"))
    assert candidates_of(experiment) == uniform_candidates(experiment)


def test_stages_of_their_own_choose_all_but_the_micro_batch() -> None:
    experiment = small_experiment(limits("space: heterogeneous"))
    found = candidates_of(experiment)
    assert found == group_candidates(experiment)
    assert [(c.micro_batch_size, c.num_micro_batches) for c in group_candidates(experiment)] == [
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    ]


def test_what_can_be_launched_of_the_heterogeneous_space_are_placements_and_some_groups() -> None:
    experiment = launchable_only(small_experiment(limits("space: heterogeneous")))
    everything = (*uniform_candidates(experiment), *group_candidates(experiment))
    assert candidates_of(experiment) == everything

from operator import attrgetter

import pytest

from amp_ray.inputs.experiment import Experiment, launchable_only
from amp_ray.search.space import (
    candidates_of,
    group_candidates,
    group_zero_choices,
    idle_candidates,
    optional_candidates,
    other_batches,
    searched_dimensions,
    uniform_candidates,
    zero_choices,
)
from amp_ray.strategies.candidate import Candidate, StageOptions
from support.experiments import experiment_from, small_experiment


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


def test_what_can_be_launched_of_the_heterogeneous_space_are_placements() -> None:
    experiment = launchable_only(small_experiment(limits("space: heterogeneous")))
    assert candidates_of(experiment) == uniform_candidates(experiment)
    assert optional_candidates(experiment) == idle_candidates(experiment) != ()


def test_the_heterogeneous_space_holds_that_of_placements() -> None:
    experiment = small_experiment(limits("space: heterogeneous"))
    everything = (*uniform_candidates(experiment), *idle_candidates(experiment))
    assert optional_candidates(experiment) == everything


def test_grids_that_leave_devices_idle_are_those_of_fewer_devices() -> None:
    found = idle_candidates(small_experiment(limits("space: placement, micro_batch_sizes: [2]")))
    assert sorted({(c.options.tp, c.options.dp, c.pp) for c in found}) == [
        (1, 1, 1),
        (1, 1, 2),
        (1, 1, 3),
        (1, 2, 1),
        (2, 1, 1),
    ]
    assert {c.global_batch_size for c in found} == {8}


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("space: uniform, idle_devices: true", True),
        ("space: uniform, idle_devices: false", False),
        ("space: uniform, token_slices: true", False),
        ("space: placement", True),
        ("space: placement, idle_devices: false", False),
        ("space: placement, tp_across_nodes: true", False),
    ],
)
def test_devices_stay_idle_where_the_space_or_the_user_says_so(text: str, allowed: bool) -> None:  # noqa: FBT001 - parametrized
    experiment = small_experiment(
        limits(text), ("global_batch_size: 8", "global_batch_size: 8\nruntime: torch")
    )
    assert bool(idle_candidates(experiment)) == allowed


def test_nodes_of_a_size_of_their_own_allow_degrees_that_leave_some_of_them_idle() -> None:
    old = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
    odd = f"{old}\n    - {old.replace('count: 2', 'count: 1').replace('slots: 2', 'slots: 3')}"
    found = idle_candidates(small_experiment((old, odd), limits("space: placement")))
    assert max(c.num_devices for c in found if c.options.tp == 2) == 6


def test_a_cluster_that_no_grid_uses_up_is_planned_with_idle_devices() -> None:
    seven = cluster(7, 1)
    with pytest.raises(ValueError, match="no candidate for 7 devices"):
        candidates_of(small_experiment(seven, limits("max_pp: 4, idle_devices: false")))
    assert candidates_of(small_experiment(seven, limits("max_pp: 4, idle_devices: true"))) == ()
    experiment = small_experiment(seven, limits("space: placement, max_pp: 4"))
    assert candidates_of(experiment) == ()
    assert {c.num_devices for c in optional_candidates(experiment)} == {1, 2, 3, 4, 6}


@pytest.mark.parametrize(
    ("nodes", "samples", "tolerance", "expected"),
    [
        ((3, 8), 128, 0.1, (120,)),
        ((10, 8), 128, 0.1, (120,)),
        ((3, 4), 32, 0.1, (30,)),
        ((7, 8), 128, 0.1, (126,)),
        ((10, 8), 1024, 0.02, (1040,)),
        ((3, 8), 120, 0.1, ()),
        ((2, 8), 128, 0.1, ()),
        ((3, 8), 128, 0.0, ()),
    ],
)
def test_batches_near_the_one_asked_for_are_those_that_the_devices_divide(
    nodes: tuple[int, int], samples: int, tolerance: float, expected: tuple[int, ...]
) -> None:
    experiment = small_experiment(
        cluster(*nodes),
        (
            "global_batch_size: 8",
            f"global_batch_size: {samples}\nsearch: {{batch_tolerance: {tolerance}}}",
        ),
    )
    assert other_batches(experiment) == expected


LLAMA = """\
name: llama-3-8b
model: {family: llama, num_layers: 32, hidden_size: 4096, num_heads: 32, num_key_value_heads: 8,
  sequence_length: 8192, vocab_size: 128256, feed_forward_size: 14336}
cluster:
  nodes: [{count: 4, device: H100, slots: 8, intra_gbit_per_s: 3600, inter_gbit_per_s: 3200}]
precision: bf16
global_batch_size: 64
"""
OFFLOADING = "runtime: megatron-core\nrecompute: auto\ntraits: {offloaded_blocks: 2}"


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ("runtime: deepspeed", set()),
        ("runtime: deepspeed\nzero_stage: auto", {"zero_stage"}),
        (
            "runtime: deepspeed\nrecompute: auto\nsearch: {space: placement}",
            {"placement", "recompute"},
        ),
        ("runtime: deepspeed\nsearch: {max_tp: 1}", {"-tp"}),
        ("runtime: llm-foundry", {"-dp", "-pp", "-tp"}),
        (f"{OFFLOADING}\nsearch: {{max_cp: 1}}", {"-pp"}),
    ],
)
def test_dimensions_that_are_fixed_are_not_searched(keys: str, more: set[str]) -> None:
    found = set(searched_dimensions(experiment_from(LLAMA + keys + "\n")))
    fixed = {name.removeprefix("-") for name in more if name.startswith("-")}
    assert found == {"tp", "dp", "pp", "micro_batch_size"} - fixed | {
        name for name in more if not name.startswith("-")
    }


@pytest.mark.parametrize(
    ("runtime", "stages", "in_pipelines"),
    [("torch", [0], [0]), ("deepspeed", [0, 1, 2, 3], [0, 1]), ("megatron-core", [0], [0])],
)
def test_a_single_rank_has_stages_that_may_need_less_memory(
    runtime: str, stages: list[int], in_pipelines: list[int]
) -> None:
    experiment = small_experiment(
        ("name: small", f"name: small\nruntime: {runtime}\nzero_stage: auto")
    )
    zeros = zero_choices(experiment, 1, 1, 1)
    assert list(dict.fromkeys(zero.stage for zero in zeros)) == stages
    assert [zero.stage for zero in zero_choices(experiment, 1, 1, 2)] == in_pipelines


@pytest.mark.parametrize(
    ("runtime", "stages"),
    [("torch", [0, 1]), ("deepspeed", [0, 1]), ("fsdp2", [3]), ("llm-foundry", [])],
)
def test_device_groups_have_the_zero_stages_of_pipelines(runtime: str, stages: list[int]) -> None:
    experiment = small_experiment(
        ("name: small", f"name: small\nruntime: {runtime}\nzero_stage: auto")
    )
    assert [zero.stage for zero in group_zero_choices(experiment)] == stages
    assert bool(group_candidates(experiment)) == bool(stages)

import pytest

from amp_ray.clusters.constants import Constants
from amp_ray.errors import InputError
from amp_ray.runtimes.traits import RUNTIMES
from support.experiments import SMALL, experiment_from


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_runtime_can_be_chosen(name: str) -> None:
    text = SMALL + f"runtime: {name}\n"
    assert experiment_from(text).traits == RUNTIMES[name]


def test_a_runtime_that_was_renamed_is_named() -> None:
    with pytest.raises(InputError, match=r"found 'megatron-lm'; .*did you mean 'megatron-lm-2022'"):
        experiment_from(SMALL + "runtime: megatron-lm\n")


def test_traits_are_set_in_the_records_own_types() -> None:
    text = SMALL + "traits: {shards_heads: false, virtual_stages: 2, context_bytes: 7}\n"
    traits = experiment_from(text).traits
    assert (traits.shards_heads, traits.virtual_stages, traits.context_bytes) == (False, 2, 7.0)


def test_a_trait_without_a_value_of_its_own_takes_a_number() -> None:
    text = SMALL + "traits: {launch_limit_s: 60, launch_iterations: 10}\n"
    assert experiment_from(text).traits.launch_limit_s == 60.0


@pytest.mark.parametrize(
    ("trait", "message"),
    [
        ("speed: 1", "traits.speed: unknown trait 'speed'; those that can be set: vocabulary_mul"),
        ("name: x", "traits.name: unknown trait 'name'"),
        ("shards_heads: 1", "traits.shards_heads: found 1; expected true or false"),
        ("virtual_stages: true", "traits.virtual_stages: found true; expected an integer from"),
        ("virtual_stages: 1.5", "traits.virtual_stages: found 1.5; expected an integer from 0"),
        ("virtual_stages: 0", "traits: virtual_stages must be at least 1"),
        ("context_bytes: -1", "traits.context_bytes: found -1; expected a number from 0 to"),
        ("context_bytes: .inf", "traits.context_bytes: found inf; expected a number from 0 to"),
        ("context_bytes: big", "traits.context_bytes: found 'big'; expected a number from 0 to"),
        ("launch_limit_s: 60", "traits: launch_limit_s 60.0 needs launch_iterations of at leas"),
    ],
)
def test_a_wrong_trait_is_refused(trait: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^test\.yaml:\d+: {message}"):
        experiment_from(SMALL + f"traits: {{{trait}}}\n")


TRANSGAN = SMALL.replace(
    SMALL[SMALL.index("{family") : SMALL.index("cluster:")],
    "{family: transgan, depth: [2, 2], hidden_size: 64, num_heads: 4, bottom_width: 2}\n",
)
CAN = "traits: {sequence_parallel: true}\n"


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ("", False),
        (CAN, True),
        (CAN + "sequence_parallel: auto\n", True),
        (CAN + "sequence_parallel: true\n", True),
        (CAN + "sequence_parallel: false\n", False),
        (CAN + "search: {space: heterogeneous}\n", True),
        (CAN + "search: {space: operator}\n", False),
    ],
)
def test_sequence_parallelism_is_used_where_the_runtime_can(keys: str, *, chosen: bool) -> None:
    experiment = experiment_from(SMALL + keys)
    assert experiment.sequence_parallel is chosen
    assert experiment.stage_options(2, 1).sequence_parallel is chosen
    assert not experiment.stage_options(1, 1).sequence_parallel
    assert not experiment.stage_options(3, 1).sequence_parallel  # 128 tokens


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL, "found true; runtime 'deepspeed' has no sequence parallelism, expected false"),
        (SMALL + CAN + "search: {space: heterogeneous}\n", "found true; it is planned in spaces"),
        (TRANSGAN + CAN, "found true; family 'transgan' has no tokens to divide"),
    ],
)
def test_sequence_parallelism_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"test\.yaml:\d+: sequence_parallel: {message}"):
        experiment_from(text + "sequence_parallel: true\n")


def test_a_zero_stage_that_the_runtime_lacks_is_refused() -> None:
    with pytest.raises(
        InputError, match="found 2; runtime 'nanotron' works with zero_stage up to 1"
    ):
        experiment_from(SMALL + "runtime: nanotron\nzero_stage: 2\n")


@pytest.mark.parametrize(
    ("trait", "message"),
    [
        ("max_zero_stage: 4", "max_zero_stage is 4; expected 0, which is min_zero_stage, to 3"),
        ("max_pipeline_zero_stage: 2", "max_pipeline_zero_stage is 2; in a pipeline the cost mode"),
    ],
)
def test_a_trait_cannot_raise_the_zero_stage_beyond_what_is_priced(
    trait: str, message: str
) -> None:
    with pytest.raises(InputError, match=f"traits: {message}"):
        experiment_from(SMALL + f"traits: {{{trait}}}\n")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("shard_ranks: 2", "shard_ranks: shard_ranks 2 need zero_stage 1 to 3, found 0"),
        ("zero_stage: 1\nshard_ranks: 2", "shard_ranks: .*'deepspeed' shards over all data-para"),
        ("reshard_after_forward: false", "reshard_after_forward is for zero_stage 3"),
        (
            "zero_stage: 3\nreshard_after_forward: false\ntraits: {keeps_weights: false}",
            "reshard_after_forward: runtime 'deepspeed' gathers weights again: set reshard_after_",
        ),
        (
            "zero_stage: 2\nsearch: {space: heterogeneous}",
            "zero_stage: found 2; stages with device groups of their own share out optimizer",
        ),
    ],
)
def test_what_a_runtime_cannot_share_out_is_refused_by_name(keys: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment_from(SMALL + keys + "\n")


def test_a_trait_may_lower_the_zero_stage() -> None:
    with pytest.raises(InputError, match="found 1; runtime 'deepspeed' works with zero_stage up"):
        experiment_from(SMALL + "zero_stage: 1\ntraits: {max_zero_stage: 0}\n")


def test_constants_are_the_shipped_ones_unless_set() -> None:
    assert experiment_from(SMALL).constants == Constants()
    assert experiment_from(SMALL + "constants: {gemm_scale: 0.5}\n").constants.gemm_scale == 0.5


def test_a_common_factor_slows_everything_down() -> None:
    found = experiment_from(SMALL + "constants: {program_scale: 2, gemm_scale: 0.5}\n").constants
    assert (found.program_scale, found.gemm_scale) == (2.0, 0.25)
    assert found.host_s_per_kernel == 2 * Constants().host_s_per_kernel


def test_an_unknown_constant_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"constants\.speed: unknown constant 'speed'; known: gemm"
    ):
        experiment_from(SMALL + "constants: {speed: 1}\n")

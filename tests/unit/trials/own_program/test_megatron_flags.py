from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pytest

from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, SELECTIVE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from amp_ray.trials.own_program.megatron_flags import megatron_flags, stage_blocks
from support.experiments import small_experiment

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def experiment(*keys: str, num_layers: int = 6) -> Experiment:
    """Build an experiment with further keys at the top."""
    text = "".join(f"{key}\n" for key in keys)
    return small_experiment(
        ("device: T4", "device: A100-40"),
        ("num_layers: 6", f"num_layers: {num_layers}"),
        ("global_batch_size: 8\n", f"global_batch_size: 8\n{text}"),
    )


def strategy(
    blocks: Sequence[int],
    tp: int = 1,
    recompute: Recompute = NO_RECOMPUTE,
    zero: Zero = NO_ZERO,
) -> Strategy:
    """Make a strategy by the blocks of its stages: an embedding before, norm and head behind."""
    cuts = [1 + number for number in accumulate(blocks[:-1])]
    candidate = Candidate(
        options=StageOptions(tp=tp, dp=1, recompute=recompute, zero=zero),
        pp=len(blocks),
        micro_batch_size=2,
        num_micro_batches=4,
    )
    return Strategy.uniform(candidate, (0, *cuts, sum(blocks) + 3))


def flags(blocks: Sequence[int], *keys: str) -> dict[str, str]:
    """Return every flag with its value."""
    found: dict[str, str] = {}
    name = ""
    given = experiment(*keys, num_layers=sum(blocks))
    plan = strategy(blocks, zero=Zero(stage=given.zero_stage))
    for word in megatron_flags(given, plan):
        if word.startswith("--"):
            name = word
        found[name] = "" if word == name else word
    return found


def test_an_even_strategy_needs_the_plain_flags_only() -> None:
    assert megatron_flags(experiment("precision: bf16"), strategy([3, 3], tp=2)) == (
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"),
        *("--micro-batch-size", "2", "--global-batch-size", "8", "--num-layers", "6"),
        *("--bf16", "--train-iters", "25", "--log-interval", "1"),
    )


def test_blocks_are_counted_without_embedding_norm_and_head() -> None:
    assert stage_blocks(experiment().model, (0, 1, 4, 9)) == (0, 3, 3)


@pytest.mark.parametrize(
    ("blocks", "first", "last"),
    [
        ([6], None, None),
        ([2, 2, 2], None, None),
        ([2, 4], "2", None),
        ([1, 2, 2], "1", None),
        ([2, 2, 1], None, "1"),
        ([1, 2, 2, 3], "1", "3"),
        ([1, 2, 3], "1", "3"),
    ],
)
def test_first_and_last_stage_may_have_a_number_of_their_own(
    blocks: list[int], first: str | None, last: str | None
) -> None:
    found = flags(blocks)
    assert (found.get(FIRST), found.get(LAST)) == (first, last)


@pytest.mark.parametrize(
    ("blocks", "layout"),
    [([2, 1, 2, 2], "Et*2|t|t*2|t*2L"), ([0, 6], "E|t*6L"), ([3, 3, 0], "Et*3|t*3|L")],
)
def test_other_cuts_are_a_layout(blocks: list[int], layout: str) -> None:
    found = flags(blocks)
    assert found["--pipeline-model-parallel-layout"] == layout
    assert not {FIRST, LAST} & found.keys()


def test_megatron_deepspeed_divides_evenly() -> None:
    with pytest.raises(ValueError, match=r"divides the blocks evenly .* 2, 4 blocks"):
        flags([2, 4], "runtime: megatron")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["precision: fp32"], set()),
        (["precision: fp16"], {"--fp16"}),
        (["precision: fp32", "zero_stage: 1"], {"--use-distributed-optimizer"}),
        (["precision: fp32", "runtime: megatron-lm-2022"], set()),
    ],
)
def test_precision_and_optimizer_add_flags(keys: list[str], expected: set[str]) -> None:
    assert flags([3, 3], *keys).keys() - flags([3, 3], "precision: fp32").keys() == expected


@pytest.mark.parametrize("stage", ["0", "1"])
def test_megatron_deepspeed_takes_the_zero_stage(stage: str) -> None:
    found = flags([3, 3], "runtime: megatron", f"zero_stage: {stage}")
    assert found["--zero-stage"] == stage
    assert "--use-distributed-optimizer" not in found


def test_sharded_gradients_and_weights_are_those_of_its_own_fsdp() -> None:
    found = []
    for stage in (2, 3):
        words = megatron_flags(experiment(), strategy([6], zero=Zero(stage=stage)))
        first = words.index("--use-megatron-fsdp")
        found.append(words[first + 2 : first + 6])
    shards, form = "--data-parallel-sharding-strategy", ("--ckpt-format", "fsdp_dtensor")
    assert found == [(shards, "optim_grads", *form), (shards, "optim_grads_params", *form)]


def test_recompute_is_of_whole_blocks() -> None:
    found = megatron_flags(experiment(), strategy([3, 3], recompute=FULL))
    plain = megatron_flags(experiment(), strategy([3, 3]))
    assert [word for word in found if word not in plain] == [
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        "--recompute-num-layers",
    ]
    assert found[found.index("--recompute-num-layers") + 1] == "1"


@pytest.mark.parametrize(
    ("recompute", "expected"),
    [
        (SELECTIVE, ["--recompute-granularity", "selective"]),
        (
            Recompute(kind="full", layers=2),
            [
                *("--recompute-granularity", "full", "--recompute-method", "block"),
                *("--recompute-num-layers", "2"),
            ],
        ),
    ],
)
def test_recompute_may_be_of_the_attention_core_or_of_some_blocks(
    recompute: Recompute, expected: list[str]
) -> None:
    found = megatron_flags(experiment(), strategy([3, 3], recompute=recompute))
    first = found.index("--recompute-granularity")
    assert list(found[first : first + len(expected)]) == expected


def test_the_attention_core_of_some_blocks_is_refused() -> None:
    part = Recompute(kind="selective", layers=2)
    with pytest.raises(ValueError, match="selectively in all layers, found selective:2"):
        megatron_flags(experiment(), strategy([3, 3], recompute=part))


def chunked(blocks: list[int]) -> Sequence[str]:
    """Return the flags of two chunks per stage."""
    plan = replace(strategy(blocks), virtual_stages=2)
    return megatron_flags(experiment("runtime: megatron-core", num_layers=sum(blocks)), plan)


def test_an_interleaved_schedule_names_the_blocks_of_a_part() -> None:
    found = chunked([4, 4])
    assert found[found.index("--num-layers-per-virtual-pipeline-stage") + 1] == "2"


@pytest.mark.parametrize(
    ("blocks", "layout"), [([3, 3], "Et|t|t*2|t*2L"), ([2, 4], "Et|t*2|t|t*2L")]
)
def test_interleaved_parts_of_several_sizes_are_a_layout(blocks: list[int], layout: str) -> None:
    found = chunked(blocks)
    assert found[found.index("--pipeline-model-parallel-layout") + 1] == layout


def test_context_parallelism_and_fp8_have_flags() -> None:
    given = replace(experiment("runtime: megatron-core", num_layers=8), precision="fp8")
    plan = strategy([4, 4])
    shared = tuple(replace(stage, options=replace(stage.options, cp=2)) for stage in plan.stages)
    placement = tuple(range(2 * len(plan.placement)))
    found = megatron_flags(given, replace(plan, stages=shared, placement=placement))
    assert found[found.index("--context-parallel-size") + 1] == "2"
    assert found[found.index("--fp8-format") + 1] == "hybrid"
    assert "--bf16" in found


def test_stages_that_differ_are_refused() -> None:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=2, dp=1)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=1)),
    )
    mixed = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2))
    with pytest.raises(ValueError, match=r"expected one tp, .* found tp \[2, 1\]"):
        megatron_flags(experiment(), mixed)


def test_a_model_of_unequal_blocks_is_refused() -> None:
    model = "{family: transgan, hidden_size: 64, num_heads: 4, depth: [2, 2], bottom_width: 4}"
    old = (
        "{family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,\n"
        "        vocab_size: 1024}"
    )
    image = small_experiment((old, model))
    candidate = Candidate(
        options=StageOptions(tp=1, dp=1), pp=1, micro_batch_size=2, num_micro_batches=4
    )
    whole = Strategy.uniform(candidate, (0, image.model.num_layers))
    with pytest.raises(ValueError, match="a chain of equal blocks, not "):
        megatron_flags(image, whole)

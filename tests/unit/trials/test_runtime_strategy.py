from dataclasses import replace
from typing import Literal

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import NO_ZERO, Zero
from amp_ray.trials.runtime_strategy import runtime_bounds, runtime_strategy, why_not_launchable
from support.checked import grid_of
from support.experiments import PICTURE_MODEL, TEXT_MODEL, experiment_from, small_experiment
from support.published import TEXT

PICTURES = TEXT.replace(
    """{family: gpt2, num_layers: 24, hidden_size: 64, num_heads: 4, sequence_length: 8,
        vocab_size: 64}""",
    """{family: transgan, hidden_size: 1024, num_heads: 4, depth: [12, 0, 0, 0, 0, 12],
        bottom_width: 9, window_size: 18}""",
).replace("amp-2022", "amp-2022-transgan")


def strategy(
    *bounds: int, tp: int = 1, dp: int = 1, samples: int = 8, zero: Zero = NO_ZERO
) -> Strategy:
    pp = len(bounds) - 1
    candidate = grid_of(
        tp=tp, dp=dp, zero=zero, micro_batch_size=2, pp=pp, num_micro_batches=samples // (2 * dp)
    )
    return Strategy.uniform(candidate, bounds)


# Published GPT-2: 0 embedding, 1 no-op, 2 to 25 blocks, 26 no-op, 27 norm, 28 head, 29 loss.
# The program's: 0 embedding, 1 to 24 blocks, 25 norm, 26 head with loss.
@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ((0, 30), (0, 27)),
        ((0, 1, 30), (0, 1, 27)),
        ((0, 2, 30), (0, 1, 27)),
        ((0, 3, 30), (0, 2, 27)),
        ((0, 9, 15, 21, 30), (0, 8, 14, 20, 27)),
        ((0, 26, 30), (0, 25, 27)),
        ((0, 27, 30), (0, 25, 27)),
        ((0, 28, 30), (0, 26, 27)),
    ],
)
def test_published_bounds_of_gpt2_move_with_their_layers(
    published: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert runtime_strategy(experiment_from(TEXT), strategy(*published)).bounds == expected


# Published TransGAN: 0 input, 1 to 2 no-ops, 3 to 14 blocks, 15 to 40 no-ops, 41 to 52 blocks,
# 53 to 55 no-ops. The program's: 0 input, 1 to 24 blocks, 25 head.
@pytest.mark.parametrize(
    ("published", "expected"),
    [
        ((0, 56), (0, 26)),
        ((0, 3, 56), (0, 1, 26)),
        ((0, 15, 56), (0, 13, 26)),
        ((0, 30, 56), (0, 13, 26)),
        ((0, 41, 52, 56), (0, 13, 24, 26)),
    ],
)
def test_published_bounds_of_transgan_move_with_their_layers(
    published: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert runtime_strategy(experiment_from(PICTURES), strategy(*published)).bounds == expected


@pytest.mark.parametrize(
    ("text", "published", "message"),
    [
        (TEXT, (0, 1, 2, 30), r"stage 1 \(layers 1 to 1: noop\) has no layer"),
        (TEXT, (0, 29, 30), r"stage 1 \(layers 29 to 29: loss\) has no layer"),
        (PICTURES, (0, 20, 30, 56), r"stage 1 \(layers 20 to 29: noop\) has no layer"),
        (PICTURES, (0, 53, 56), r"stage 1 \(layers 53 to 55: noop\) has no layer"),
    ],
)
def test_a_stage_of_which_nothing_is_left_is_refused(
    text: str, published: tuple[int, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        runtime_strategy(experiment_from(text), strategy(*published))


def test_blocks_are_computed_twice_where_the_published_runtime_did() -> None:
    chosen = runtime_strategy(experiment_from(TEXT), strategy(0, 9, 30))
    assert chosen.recompute == FULL
    assert runtime_strategy(experiment_from(PICTURES), strategy(0, 56)).recompute == NO_RECOMPUTE


def test_degrees_and_placement_are_kept() -> None:
    candidate = grid_of(tp=2, micro_batch_size=2, pp=2, num_micro_batches=4)
    published = Strategy.uniform(candidate, (0, 15, 30), (3, 1, 2, 0))
    chosen = runtime_strategy(experiment_from(TEXT), published)
    assert (chosen.tp, chosen.dp, chosen.placement) == (2, 1, (3, 1, 2, 0))


def uneven() -> Strategy:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=2, dp=1)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=1)),
    )
    return Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2))


@pytest.mark.parametrize("zero", [Zero(stage=2), Zero(stage=3), Zero(stage=3, keeps_weights=True)])
def test_deepspeed_shares_gradients_and_weights_out_in_one_stage(zero: Zero) -> None:
    assert why_not_launchable(small_experiment(), strategy(0, 9, tp=2, dp=2, zero=zero)) is None


@pytest.mark.parametrize(
    ("experiment", "chosen", "reason"),
    [
        (small_experiment(), uneven(), "different tp or dp"),
        (small_experiment(), strategy(0, 8), "bounds end at 8, the model has 9 layers"),
        (small_experiment(), strategy(0, 9, samples=4), "4 samples per step, global_batch_size"),
        (small_experiment(), strategy(0, 9, tp=16), "on device 15, the cluster has devices 0 to 3"),
        (small_experiment(), strategy(0, 9, tp=3), "tp 3 does not divide num_heads 8"),
        (
            small_experiment(),
            replace(strategy(0, 9), token_slices=((2, (4, 4)),)),
            "token slices, which DeepSpeed's pipeline cannot run",
        ),
        (
            experiment_from(TEXT.replace("amp-2022", "megatron")),
            strategy(0, 27),
            "runtime 'megatron' is another program than ours; give its command as 'trials: ",
        ),
        (
            small_experiment(),
            strategy(0, 4, 9, zero=Zero(stage=2)),
            "runtime 'deepspeed' pipelines with zero_stage 0 or 1, found 2: set pp 1 (max_pp: 1)",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_with_what_to_change(
    experiment: Experiment, chosen: Strategy, reason: str
) -> None:
    assert reason in str(why_not_launchable(experiment, chosen))
    with pytest.raises(InputError, match=r"test\.yaml: strategy tp .* cannot be launched: "):
        runtime_strategy(experiment, chosen)


EXPERTS = """\
name: experts
model: {family: llama, num_layers: 2, hidden_size: 64, num_heads: 4, head_size: 32,
        sequence_length: 12, vocab_size: 64, num_experts: 6, experts_per_token: 2,
        expert_feed_forward_size: 30}
cluster:
  nodes: [{count: 2, device: T4, slots: 4, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]
runtime: torch
global_batch_size: 8
"""


@pytest.mark.parametrize(
    ("runtime", "options", "reason"),
    [
        ("torch", StageOptions(tp=1, dp=2, ep=2), "None"),
        ("torch", StageOptions(tp=2, dp=1, cp=3, ep=2, etp=1), "None"),
        (
            "torch",
            StageOptions(tp=1, dp=1, cp=4),
            "cp 4 needs causal sequences whose length 2 x cp",
        ),
        ("torch", StageOptions(tp=1, dp=4, ep=4), "ep 4 divides the experts of a model, found 6"),
        ("torch", StageOptions(tp=4, dp=2, ep=2), "etp 4 does not divide expert_feed_forward_size"),
        ("torch", StageOptions(tp=4, dp=1, cp=2, ep=2, etp=1), "share of 6 tokens"),
        ("deepspeed", StageOptions(tp=2, dp=1), "None"),
        ("deepspeed", StageOptions(tp=2, dp=1, etp=1), "no expert parallelism, found etp 1 with"),
        ("deepspeed", StageOptions(tp=1, dp=2, ep=2), "no expert parallelism, found ep 2"),
        ("deepspeed", StageOptions(tp=1, dp=1, cp=2), "no context parallelism, found cp 2"),
    ],
)
def test_experts_and_sequences_go_to_as_many_ranks_as_divide_them(
    runtime: str, options: StageOptions, reason: str
) -> None:
    experiment = experiment_from(EXPERTS.replace("torch", runtime))
    candidate = Candidate(
        micro_batch_size=8 // options.dp, options=options, pp=1, num_micro_batches=1
    )
    chosen = Strategy.uniform(candidate, (0, 5))
    assert reason in str(why_not_launchable(experiment, chosen))


def test_widths_of_products_in_fp8_are_multiples_of_16_on_every_rank() -> None:
    text = EXPERTS.replace("T4", "H100").replace("size: 30", "size: 32") + "precision: fp8\n"
    experiment = experiment_from(text)
    whole = StageOptions(tp=2, dp=1, etp=1)
    for options, reason in ((whole, "None"), (replace(whole, tp=4, etp=2), "None")):
        candidate = Candidate(micro_batch_size=8, options=options, pp=1, num_micro_batches=1)
        assert str(why_not_launchable(experiment, Strategy.uniform(candidate, (0, 5)))) == reason
    odd = Candidate(
        micro_batch_size=8, options=replace(whole, tp=4, etp=4), pp=1, num_micro_batches=1
    )
    assert "found expert_feed_forward_size 8 with tp 4" in str(
        why_not_launchable(experiment, Strategy.uniform(odd, (0, 5)))
    )


def test_what_can_be_launched_has_no_reason() -> None:
    assert why_not_launchable(small_experiment(), strategy(0, 2, 9, tp=2)) is None


def test_bounds_with_an_empty_stage_are_mapped_too() -> None:
    assert runtime_bounds(experiment_from(TEXT).model, (0, 1, 2, 30)) == (0, 1, 1, 27)


@pytest.mark.parametrize(
    ("precision", "chosen", "reason"),
    [
        ("fp8", strategy(0, 6), "fp8 is for language models, found pictures"),
        (
            "fp16",
            replace(strategy(0, 6), token_slices=((2, (8, 8)),)),
            "token_slices need causal attention; pictures attend as a whole",
        ),
        (
            "fp16",
            strategy(0, 3, 6, dp=2, zero=Zero(stage=3)),
            "in a pipeline zero_stage 3 keeps its weights",
        ),
    ],
)
def test_what_plain_torch_does_not_train_is_named(
    precision: Literal["fp16", "fp8"], chosen: Strategy, reason: str
) -> None:
    pictures = small_experiment((TEXT_MODEL, PICTURE_MODEL))
    given = replace(pictures, traits=RUNTIMES["torch"], precision=precision)
    assert reason in (why_not_launchable(given, chosen) or "")

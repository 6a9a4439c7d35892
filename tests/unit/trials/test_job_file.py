from dataclasses import replace

import pytest

from amp_ray.errors import InputError
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.trials.job_file import ds_config, torch_device
from support.checked import grid_of
from support.experiments import small_experiment

CANDIDATE = grid_of(dp=2, micro_batch_size=2, pp=2, num_micro_batches=2)
STRATEGY = Strategy.uniform(CANDIDATE, (0, 4, 9))


def with_keys(text: str) -> dict[str, object]:
    experiment = small_experiment(("global_batch_size: 8", f"global_batch_size: 8\n{text}"))
    return ds_config(experiment, STRATEGY)


def test_the_batch_is_that_of_all_replicas_and_micro_batches() -> None:
    config = with_keys("precision: fp32")
    assert config["train_batch_size"] == 8
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("precision", "keys"), [("fp32", set()), ("fp16", {"fp16"}), ("bf16", {"bf16"})]
)
def test_precision_is_that_of_the_experiment(precision: str, keys: set[str]) -> None:
    # A T4 has no bf16 units of its own.
    text = f"precision: {precision}"
    experiment = small_experiment(
        ("global_batch_size: 8", f"global_batch_size: 8\n{text}"), ("device: T4", "device: A100")
    )
    config = ds_config(experiment, STRATEGY)
    assert config.keys() & {"fp16", "bf16"} == keys


def test_gradients_are_not_clipped_by_a_silent_default() -> None:
    assert with_keys("precision: fp32")["gradient_clipping"] == 0.0


def test_the_optimizer_is_the_programs_own() -> None:
    stages = [
        replace(stage, options=replace(stage.options, zero=Zero(stage=1)))
        for stage in STRATEGY.stages
    ]
    config = ds_config(small_experiment(), replace(STRATEGY, stages=tuple(stages)))
    assert "optimizer" not in config
    assert config["zero_optimization"] == {"stage": 1}
    assert config["zero_allow_untested_optimizer"] is True


@pytest.mark.parametrize("stage", [2, 3])
def test_layers_are_gathered_and_reduced_one_at_a_time(stage: int) -> None:
    given = small_experiment(
        ("global_batch_size: 8", "global_batch_size: 8\nprecision: bf16"),
        ("device: T4", "device: A100"),
    )
    options = StageOptions(tp=2, dp=2, zero=Zero(stage=stage))
    candidate = Candidate(options=options, pp=1, micro_batch_size=2, num_micro_batches=2)
    config = ds_config(given, Strategy.uniform(candidate, (0, 9)))
    zero, layers = config["zero_optimization"], given.model.layers
    largest = max(own.sharded_parameters / 2 + own.replicated_parameters for own in layers)
    assert (zero["stage"], zero["overlap_comm"]) == (stage, True)
    assert zero["reduce_bucket_size"] == largest
    assert zero.get("stage3_prefetch_bucket_size") == (largest if stage == 3 else None)
    assert zero.get("stage3_max_reuse_distance") == (0 if stage == 3 else None)
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("gradients", [True, False])
def test_transfers_are_sliced_where_both_kinds_are(gradients: bool) -> None:  # noqa: FBT001
    word = str(gradients).lower()
    config = with_keys(f"traits: {{sliced_activations: true, sliced_gradients: {word}}}")
    assert config["pipeline"] == {"pipe_partitioned": gradients, "grad_partitioned": gradients}


def test_only_a_cpu_is_asked_for_its_cores() -> None:
    assert [torch_device([name]) for name in ("cpu", "CPU", "cpu-slow", "T4")] == [
        "cpu",
        "cpu",
        "cpu",
        "cuda",
    ]


def test_cpus_and_gpus_do_not_train_together() -> None:
    with pytest.raises(InputError, match="not on both, found devices T4, cpu"):
        torch_device(["T4", "cpu", "T4"])

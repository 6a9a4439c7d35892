import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.profile import ANALYTIC
from support.experiments import SMALL, experiment_from, small_experiment

DESCRIPTION = "num_layers: 9\nmodel: m\nprecision: fp16\nhardware: h\nversions: v\n"
TABLE = "layer,tp,micro_batch_size,forward_s\n" + "".join(f"{i},1,1,1e-3\n" for i in range(9))


def test_what_is_left_out_has_the_documented_defaults() -> None:
    experiment = small_experiment()
    assert experiment.profile is ANALYTIC
    assert (experiment.precision, experiment.optimizer, experiment.zero_stage) == (
        "fp16",
        "adam",
        0,
    )
    assert (str(experiment.recompute), experiment.traits.name) == ("none", "deepspeed")
    assert experiment.limits.micro_batch_sizes is None
    assert (experiment.trials.num_steps, experiment.trials.num_warmup_steps) == (20, 5)


def test_limits_are_taken_over_sorted_and_once_each() -> None:
    text = SMALL + "search: {min_tp: 2, max_dp: 3, micro_batch_sizes: [4, 1, 4]}\n"
    limits = experiment_from(text).limits
    assert (limits.min_tp, limits.max_dp, limits.micro_batch_sizes) == (2, 3, (1, 4))


def test_the_settings_of_trials_are_taken_over() -> None:
    text = SMALL + "trials: {backend: local, budget: 3, steps: 7, warmup_steps: 2, timeout_s: 60}\n"
    trials = experiment_from(text).trials
    assert (trials.backend, trials.budget, trials.timeout_s) == ("local", 3, 60.0)


def test_a_measured_profile_is_read_from_its_folder() -> None:
    text = SMALL + "profile: {source: table, path: measured}\n"
    files = {"measured/profile.yaml": DESCRIPTION, "measured/T4.csv": TABLE}
    assert list(experiment_from(text, files).profile.tables) == ["T4"]


def test_a_configuration_gives_the_figures_of_the_model() -> None:
    start, end = SMALL.index("model:"), SMALL.index("cluster:")
    text = SMALL[:start] + "model: {config: c.json, sequence_length: 64}\n" + SMALL[end:]
    config = '{"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, '
    experiment = experiment_from(text, {"c.json": config + '"vocab_size": 99}'})
    assert (experiment.model.shape.hidden_size, experiment.model.shape.sequence_length) == (64, 64)
    assert experiment.model.num_layers == 5


def test_the_runtime_decides_which_layers_are_listed() -> None:
    assert experiment_from(SMALL + "runtime: amp-2022\n").model.num_layers == 12


def test_a_model_says_itself_which_layers_are_listed() -> None:
    text = SMALL.replace("family: gpt2", "family: gpt2, layer_list: amp-2022")
    assert experiment_from(text).model.num_layers == 12


def test_the_vocabulary_is_padded_as_the_runtime_pads_it() -> None:
    text = SMALL.replace("vocab_size: 1024", "vocab_size: 1000")
    plain, padded = experiment_from(text), experiment_from(text + "runtime: megatron\n")
    assert padded.model.num_parameters - plain.model.num_parameters == 24 * 256


def test_an_experiment_remembers_the_places_of_its_keys() -> None:
    experiment = experiment_from(SMALL + "search: {max_tp: 2}\n")
    line = SMALL.count("\n") + 1
    assert str(experiment.where("search")) == f"test.yaml:{line}: search"


def test_an_error_of_another_file_keeps_its_own_line() -> None:
    text = SMALL + "profile: {source: table, path: measured}\n"
    files = {"measured/profile.yaml": DESCRIPTION, "measured/T4.csv": TABLE + "0,1,2,x\n"}
    with pytest.raises(InputError, match=r"^measured/T4\.csv:11: forward_s: found 'x'"):
        experiment_from(text, files)


@pytest.mark.parametrize(("runtime", "fuses"), [("deepspeed", True), ("megatron", False)])
def test_the_runtime_tells_whether_attention_is_fused(runtime: str, *, fuses: bool) -> None:
    block = experiment_from(f"{SMALL}runtime: {runtime}\n").model.layers[1]
    assert any(op.name == "attention" for op in block.operators) is fuses
    assert any("dropout" in op.name for op in block.operators) is not fuses

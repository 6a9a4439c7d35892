from dataclasses import replace

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.planners.metis2024.inputs import MetisArguments, experiment_yaml
from support.experiments import experiment_from
from support.metis import metis_profile_files, metis_setting

ARGUMENTS = MetisArguments(
    num_layers=4, hidden_size=256, sequence_length=128, vocab_size=1024, global_batch_size=24
)
CLUSTER = metis_setting().cluster
HOSTS = "0.0.0.1 slots=2\n0.0.0.2 slots=2\n"


def text_of(arguments: MetisArguments = ARGUMENTS, profile_path: str | None = None) -> str:
    """Write the experiment of two A100 and two T4."""
    return experiment_yaml(
        "it's",
        arguments,
        CLUSTER,
        hostfile="my hosts",
        profile_path=profile_path,
        notes=("one\nline", "another: #"),
    )


def load(text: str) -> Experiment:
    """Read an experiment file with its hostfile and profile."""
    files = {f"my profile/{name}": file for name, file in metis_profile_files().items()}
    return experiment_from(text, {"my hosts": HOSTS} | files)


def test_what_is_written_loads() -> None:
    experiment = load(text_of())
    assert experiment.name == "it's"
    assert experiment.space == "heterogeneous"
    assert experiment.global_batch_size == 24
    assert [node.name for node in experiment.cluster.nodes] == ["0.0.0.1", "0.0.0.2"]
    assert experiment.profile.published is None


def test_the_ends_are_no_blocks() -> None:
    assert load(text_of()).model.shape.num_layers == 2


def test_a_profile_is_named() -> None:
    experiment = load(text_of(profile_path="my profile"))
    assert experiment.profile.published is not None
    assert experiment.profile.published.num_layers == 4


def test_notes_are_comments() -> None:
    assert text_of().startswith("# one line\n# another: #\nname:")


def test_limits_are_passed_on() -> None:
    experiment = load(text_of(replace(ARGUMENTS, max_tp=2, max_size=4)))
    assert experiment.limits.max_tp == 2
    assert experiment.limits.micro_batch_sizes == (1, 2, 4)


@pytest.mark.parametrize(("hidden_size", "heads"), [(256, 2), (192, 3)])
def test_heads_have_a_usual_width(hidden_size: int, heads: int) -> None:
    experiment = load(text_of(replace(ARGUMENTS, hidden_size=hidden_size)))
    assert experiment.model.shape.num_heads == heads


def test_heads_may_be_told() -> None:
    assert load(text_of(replace(ARGUMENTS, num_heads=8))).model.shape.num_heads == 8


def test_a_width_without_usual_heads_is_refused() -> None:
    with pytest.raises(InputError, match="hidden size 100 is no multiple of 128 or 64"):
        text_of(replace(ARGUMENTS, hidden_size=100))


def test_ends_alone_are_refused() -> None:
    with pytest.raises(InputError, match=r"found 2 layers; .* at least 3 are expected"):
        text_of(replace(ARGUMENTS, num_layers=2))

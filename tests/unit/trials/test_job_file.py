import pytest

from amp_ray.errors import InputError
from amp_ray.training.shapes import ImageShape, TextShape, read_shape
from amp_ray.trials.job_file import shape_to_json, torch_device
from support.experiments import experiment_from, small_experiment

TRANSGAN = """\
name: pictures
model: {family: transgan, depth: [2, 2], hidden_size: 64, num_heads: 4, bottom_width: 2}
cluster:
  nodes: [{device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]
global_batch_size: 8
"""


def test_the_training_program_reads_a_language_model() -> None:
    shape = read_shape(shape_to_json(small_experiment().model.shape))
    assert isinstance(shape, TextShape)
    assert (shape.num_layers, shape.hidden_size, shape.tied_embedding) == (6, 256, True)


def test_the_training_program_reads_a_picture_model() -> None:
    shape = read_shape(shape_to_json(experiment_from(TRANSGAN).model.shape))
    assert isinstance(shape, ImageShape)
    assert shape.depth == (2, 2)


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

import json
from pathlib import Path
from typing import Any

import pytest

from amp_ray.training.fields import read_object
from amp_ray.training.profiling.job import read_profile_job
from amp_ray.trials.profile.points import LayerPoint

MODEL = {
    "family": "gpt2",
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "sequence_length": 8,
    "vocab_size": 32,
}
TRIAL = {
    "trial_id": "t",
    "out_dir": ".",
    "model": MODEL,
    "strategy": {
        "tp": 1,
        "pp": 1,
        "dp": 2,
        "micro_batch_size": 1,
        "num_micro_batches": 1,
        "bounds": [0, 5],
    },
    "global_batch_size": 2,
    "steps": 1,
}
IMAGE = {
    "family": "transgan",
    "depth": [1, 1],
    "hidden_size": 16,
    "num_heads": 2,
    "bottom_width": 2,
}

SLICE = {"tp": 1, "micro_batch_size": 1, "layer": 1, "tokens": 4, "context": 4}


def job(**changes: object) -> dict[str, Any]:
    points = [{"tp": 2, "micro_batch_size": 4, "layer": 5}]
    links = [{"what": "p2p", "num_ranks": 2, "bytes": 1024}]
    return {"trial": TRIAL, "links": links, "points": points, "seconds": 5, **changes}


def test_points_and_groups_are_read() -> None:
    found = read_profile_job(job())
    assert found.points == (LayerPoint(tp=2, micro_batch_size=4, layer=5),)
    assert found.group_sizes == (2,)


def test_what_surrounds_the_layers_is_measured_on_demand() -> None:
    assert read_profile_job(job(step=True)).step
    assert not read_profile_job(job()).step


def test_messages_need_no_group() -> None:
    assert read_profile_job(job(points=[])).group_sizes == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": [{"tp": 4, "micro_batch_size": 1, "layer": 0}]}, "groups of 4"),
        ({"points": [{"tp": 1, "micro_batch_size": 1, "layer": 6}]}, "layer 6; .* 5 layers"),
        ({"points": [{"tp": 1, "micro_batch_size": 1}]}, "layer is missing"),
        ({"links": [{"what": "gossip", "num_ranks": 2, "bytes": 4}]}, "gossip"),
        ({"links": [{"what": "all_reduce", "num_ranks": 3, "bytes": 4}]}, "groups of 3"),
        ({"sneaky": 1}, "sneaky"),
        ({"points": [{**SLICE, "layer": 0}]}, "slice of layer 0, which is no block"),
        ({"points": [{**SLICE, "layer": 5}]}, "slice of layer 5, which is no block"),
        ({"points": [{**SLICE, "tokens": 5}]}, "5 tokens behind 4; a sequence has 8"),
        ({"points": [{**SLICE, "tokens": 0}]}, "0 tokens behind 4; a sequence has 8"),
        ({"points": [{**SLICE, "context": -1}]}, "context must be a whole number >= 0"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_profile_job(job(**changes))


def test_tp_has_to_divide_the_model() -> None:
    odd = {**TRIAL, "model": {**MODEL, "num_heads": 1}}
    with pytest.raises(ValueError, match="tp 2 does not divide the model's num_heads 1"):
        read_profile_job(job(trial=odd))


def test_a_generator_has_no_loss_behind_its_last_layer() -> None:
    strategy = {**TRIAL["strategy"], "bounds": [0, 4]}  # type: ignore[dict-item]
    image = {**TRIAL, "model": IMAGE, "strategy": strategy}
    with pytest.raises(ValueError, match="layer 4"):
        read_profile_job(job(trial=image, points=[{"tp": 1, "micro_batch_size": 1, "layer": 4}]))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        read_profile_job(read_object(str(path)))
    path.write_text(json.dumps(job()), encoding="utf-8")
    assert read_profile_job(read_object(str(path))).seconds == 5.0


def test_slices_are_points_too() -> None:
    (point,) = read_profile_job(job(points=[SLICE])).points
    assert point.to_json() == SLICE


@pytest.mark.parametrize(
    "place", [{"micro_batch_size": 2}, {"tokens": 5, "context": 6}, {"tokens": 0, "context": 4}]
)
def test_what_is_larger_in_every_respect_has_no_room_either(place: dict[str, int]) -> None:
    assert LayerPoint(**{**SLICE, **place}).is_as_large_as(LayerPoint(**SLICE))


@pytest.mark.parametrize(
    "place", [{"tp": 2, "micro_batch_size": 4}, {"tokens": 3, "context": 9}, {"context": 0}]
)
def test_what_is_smaller_in_any_respect_may_have(place: dict[str, int]) -> None:
    assert not LayerPoint(**{**SLICE, **place}).is_as_large_as(LayerPoint(**SLICE))

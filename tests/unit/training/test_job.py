from dataclasses import replace
from typing import Any

import pytest

from amp_ray.models.model import ModelShape
from amp_ray.training.job import Job, read_job, read_profile_job
from amp_ray.trials.job_file import shape_to_json
from amp_ray.trials.profile.points import LayerPoint, LinkPoint

SHAPE = ModelShape(
    family="gpt2",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_key_value_heads=4,
    feed_forward_size=256,
    sequence_length=32,
    vocab_size=128,
    tied_embedding=True,
)
LLAMA = replace(SHAPE, family="llama", head_size=8, num_experts=4, experts_per_token=2)
IMAGE = ModelShape(family="transgan", num_layers=3, depth=(2, 0, 1), hidden_size=64, num_heads=4)
STRATEGY = {
    "tp": 2,
    "pp": 2,
    "dp": 1,
    "micro_batch_size": 2,
    "num_micro_batches": 4,
    "bounds": [0, 3, 7],
    "recompute": "none",
    "placement": [["b", 1], ["b", 0], ["a", 0], ["a", 1]],
}
UNEQUAL: dict[str, Any] = {
    "tp": None,
    "dp": None,
    "micro_batch_size": 4,
    "num_micro_batches": 2,
    "stages": [
        {"layers": [0, 3], "tp": 2, "dp": 1, "shares": [4]},
        {"layers": [3, 7], "tp": 1, "dp": 2, "shares": [3, 1]},
    ],
    "placement": None,
}
JOB = {
    "trial_id": "7",
    "out_dir": "out",
    "model": shape_to_json(SHAPE),
    "strategy": STRATEGY,
    "global_batch_size": 8,
    "steps": 5,
}


def job(strategy: dict[str, Any] | None = None, **changes: object) -> Job:
    return read_job({**JOB, **changes, "strategy": {**STRATEGY, **(strategy or {})}})


@pytest.mark.parametrize("shape", [SHAPE, LLAMA, IMAGE], ids=lambda shape: shape.family)
def test_a_model_is_read_as_it_was_written(shape: ModelShape) -> None:
    assert job(model=shape_to_json(shape)).model == shape


def test_ranks_follow_the_placement_when_the_launcher_does() -> None:
    assert job().grid.rank_map == job({"placement": None}).grid.rank_map == (0, 1, 2, 3)


def test_rank_map_makes_up_for_a_launcher_that_counts_host_by_host() -> None:
    order = [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    assert job(launch_order=order).grid.rank_map == (3, 2, 0, 1)


def test_zero_is_read_from_the_strategy_or_the_job() -> None:
    read = job({"zero_stage": 3, "shard_ranks": 1, "reshard_after_forward": False})
    assert (read.zero_stage, read.grid.shard_ranks, read.grid.keeps_weights) == (3, 1, True)
    assert (job().zero_stage, job(zero_stage=1).zero_stage) == (0, 1)


@pytest.mark.parametrize(
    ("recompute", "stages"),
    [
        ("full", [("full", None), ("full", None)]),
        ([{"kind": "selective", "layers": 2}, "none"], [("selective", 2), ("none", None)]),
        ({"kind": "full", "layers": 1}, [("full", 1), ("full", 1)]),
    ],
)
def test_recompute_is_one_for_all_stages_or_one_per_stage(
    recompute: object, stages: list[tuple[str, int | None]]
) -> None:
    grid = job({"recompute": recompute}).grid
    assert [(stage.recompute.kind, stage.recompute.layers) for stage in grid.stages] == stages


def test_stages_may_differ() -> None:
    grid = job(UNEQUAL).grid
    assert [(stage.tp, stage.dp) for stage in grid.stages] == [(2, 1), (1, 2)]
    assert (grid.shares(0), grid.shares(1), grid.num_ranks) == ((4,), (3, 1), 4)


def test_slices_and_chunks_are_read() -> None:
    grid = job(
        {"token_slices": [[2, [20, 12]]], "virtual_stages": 2, "bounds": [0, 2, 3, 4, 7]}
    ).grid
    assert [passage.tokens for passage in grid.passages] == [(20, 12)] * 4
    assert grid.chunks_of(1) == [(2, 3), (4, 7)]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({**JOB, "epochs": 3}, "epochs"),
        ({key: value for key, value in JOB.items() if key != "model"}, "KeyError('model')"),
        ({key: value for key, value in JOB.items() if key != "steps"}, "steps"),
        ({**JOB, "model": {**shape_to_json(SHAPE), "num_blocks": 4}}, "num_blocks"),
        ({**JOB, "strategy": {}}, "KeyError('micro_batch_size')"),
    ],
)
def test_a_job_of_another_version_is_refused(record: dict[str, Any], words: str) -> None:
    for read, job_record in ((read_job, record), (read_profile_job, {"trial": record})):
        with pytest.raises(ValueError, match="not a job of this version of amp-ray: ") as refused:
            read(job_record)
        assert words in str(refused.value)


def test_rotary_positions_need_an_even_head() -> None:
    odd = replace(SHAPE, family="llama", hidden_size=12)
    with pytest.raises(ValueError, match="rotary positions need an even head size, found 3"):
        job(model=shape_to_json(odd))


def test_a_profile_run_has_points_and_groups() -> None:
    point, link = {"tp": 2, "micro_batch_size": 4, "layer": 5}, {"num_ranks": 4, "num_bytes": 1024}
    links = [{"what": "p2p", **link}, {"what": "all_reduce", **link}]
    record = {"trial": JOB, "links": links, "points": [point], "seconds": 5}
    read = read_profile_job(record)
    assert read.points == (LayerPoint(tp=2, micro_batch_size=4, layer=5),)
    assert read.links[1] == LinkPoint(what="all_reduce", num_ranks=4, num_bytes=1024)
    assert (read.trial, read.group_sizes, read.step) == (job(), (2, 4), False)
    assert read_profile_job({**record, "points": [], "links": links[:1]}).group_sizes == ()
    with pytest.raises(ValueError, match=r"not a job of this version.*sneaky"):
        read_profile_job({**record, "sneaky": 1})

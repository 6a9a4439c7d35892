import json
import math
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.trials.profile.points import LayerPoint, LinkPoint
from amp_ray.trials.profile.records import (
    STEP_KEYS,
    LinkPlace,
    ProfileRecords,
    Record,
    heading,
    parse_records,
    record_of_event,
)
from support.checked import required
from support.experiments import small_experiment

MODEL = small_experiment().model
HEADING = heading(MODEL, "fp16")
PLACE = LinkPlace(scope="intra", devices="T4")
TIMES: dict[str, Any] = {
    "forward_s": 1e-3,
    "backward_s": 2e-3,
    "forward_launch_s": 3e-4,
    "backward_launch_s": 4e-4,
    "all_reduce_s": 0.0,
    "spread_s": 1e-5,
    "repeats": 40,
    "kept_bytes": 1024.0,
    "temporary_bytes": 2048.0,
}


def event(kind: str, **values: object) -> dict[str, object]:
    head = {"event": kind, "trial_id": "t", "rank": 0, "host": "h", "pid": 1, "time_s": 2.0}
    return {**head, **values}


def recorded(kind: str, **values: object) -> Record:
    return required(record_of_event(event(kind, **values), place=PLACE, date="2026-11-21"))


def layer(tp: int, size: int, layer: int, **changes: float) -> Record:
    return recorded(
        "layer", **{"tp": tp, "micro_batch_size": size, "layer": layer, **TIMES, **changes}
    )


def text(*records: Record) -> str:
    return "".join(json.dumps(record) + "\n" for record in (HEADING, *records))


def parse(content: str) -> ProfileRecords:
    return parse_records(content, file="records.jsonl", expected=HEADING)


def point(tp: int, size: int, layer: int) -> LayerPoint:
    return LayerPoint(micro_batch_size=size, tp=tp, layer=layer)


def test_what_was_measured_is_not_missing() -> None:
    records = parse(text(layer(1, 2, 0)))
    wanted = [point(1, 2, 0), point(1, 2, 1)]
    assert records.missing_layers("T4", wanted) == (point(1, 2, 1),)
    assert records.missing_layers("V100-16", wanted) == tuple(wanted)


def test_sizes_that_do_not_fit_are_not_tried_again() -> None:
    values = {"tp": 2, "micro_batch_size": 4, "layer": 1}
    records = parse(text(recorded("oom", **values)))
    wanted = [point(2, 2, 0), point(2, 4, 0), point(2, 8, 0), point(1, 8, 0)]
    assert records.missing_layers("T4", wanted) == (point(2, 2, 0), point(1, 8, 0))


def test_the_smallest_size_that_does_not_fit_counts() -> None:
    records = ProfileRecords()
    for size in (8, 4, 16):
        records.add({"record": "oom", "devices": "T4", "tp": 1, "micro_batch_size": size})
    assert records.limits == {("T4", 1): 4}


def test_the_later_of_two_measurements_counts() -> None:
    records = parse(text(layer(1, 2, 0), layer(1, 2, 0, forward_s=5.0)))
    assert records.layers["T4", point(1, 2, 0)]["forward_s"] == 5.0


def test_a_size_is_complete_with_all_layers() -> None:
    records = parse(text(layer(1, 2, 0), layer(1, 2, 1), layer(1, 4, 0)))
    assert records.complete("T4", (0, 1)) == ((1, 2),)


def test_messages_belong_to_their_place() -> None:
    values = {"what": "p2p", "num_ranks": 2, "bytes": 1024, "seconds": 0.5}
    records = parse(text(recorded("link", **values)))
    message = LinkPoint(what="p2p", num_ranks=2, num_bytes=1024)
    assert records.links == {(PLACE, message): 0.5}
    assert records.missing_links(PLACE, [message]) == ()
    assert records.missing_links(LinkPlace(scope="inter", devices="T4"), [message]) == (message,)


def test_hardware_is_dated() -> None:
    values = {"hardware": "a board", "versions": "torch"}
    assert parse(text(recorded("hardware", **values))).dates == {"T4": "2026-11-21"}


@pytest.mark.parametrize("kind", ["started", "failed"])
def test_other_events_are_not_kept(kind: str) -> None:
    assert record_of_event(event(kind), place=PLACE, date="") is None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("layer", {"forward_s": -1.0}),
        ("layer", {"forward_s": math.nan}),
        ("layer", {"kept_bytes": math.inf}),
        ("layer", {"tp": True}),
        ("layer", {"layer": "0"}),
        ("layer", {"repeats": None}),
        ("link", {"what": ["p2p"], "num_ranks": 2, "bytes": 1, "seconds": 1.0}),
        ("link", {"bytes": 1.5, "what": "p2p", "num_ranks": 2, "seconds": 1.0}),
        ("hardware", {"hardware": {}, "versions": "torch"}),
        ("begin", {"tp": -1}),
        ("layer", {"tp": 0}),
        ("layer", {"forward_s": 1e7}),
        ("link", {"seconds": 0.0, "what": "p2p", "num_ranks": 2, "bytes": 1}),
        ("link", {"num_ranks": 1, "what": "all_reduce", "bytes": 1, "seconds": 1.0}),
        ("step", {"memory_bytes_per_s": 0, **dict.fromkeys(STEP_KEYS[:-1], 0.5)}),
        ("oom", {"micro_batch_size": []}),
    ],
)
def test_a_figure_that_nothing_can_have_is_refused(kind: str, changes: dict[str, object]) -> None:
    values = {"tp": 1, "micro_batch_size": 1, "layer": 0, **TIMES, **changes}
    with pytest.raises(ValueError, match=f"event '{kind}' has {next(iter(changes))}"):
        record_of_event(event(kind, **values), place=PLACE, date="")


def test_a_rank_cannot_speak_of_other_devices() -> None:
    values = {"tp": 1, "micro_batch_size": 2, "layer": 0, **TIMES}
    said = event("layer", **values, record="step", devices="V100-16")
    record = required(record_of_event(said, place=PLACE, date=""))
    assert (record["record"], record["devices"]) == ("layer", "T4")


def test_a_torn_last_line_is_left_out() -> None:
    assert list(parse(text(layer(1, 2, 0)) + '{"record": "la').layers) == [("T4", point(1, 2, 0))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (text() + "junk\n" + json.dumps(layer(1, 2, 0)), "2: not JSON"),
        (text() + '{"record": "layer"}\n', "2: not a record of this version"),
        (text() + "[]\n", "2: not a record of this version"),
        (text() + "9" * 5000 + "\n", "2: not a record of this version"),
        (text() + "[" * 100_000 + "\n", "2: not a record of this version"),
        (text({**layer(1, 2, 0), "forward_s": "1"}), "2: not a record of this version"),
        (text({**layer(1, 2, 0), "devices": ["T4"]}), "2: not a record of this version"),
        ("junk\n", "1: not JSON"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(content: str, message: str) -> None:
    with pytest.raises(InputError, match=f"records.jsonl:{message}"):
        parse(content)


@pytest.mark.parametrize(
    "other",
    [
        heading(MODEL, "fp32"),
        heading(small_experiment(("num_layers: 6", "num_layers: 5")).model, "fp16"),
    ],
)
def test_a_profile_of_something_else_is_refused(other: Record) -> None:
    with pytest.raises(InputError, match="name another folder"):
        parse(json.dumps(other) + "\n")


def test_nothing_measured_is_no_mistake() -> None:
    assert parse("") == ProfileRecords()


def test_what_surrounds_the_layers_belongs_to_its_device() -> None:
    values = dict.fromkeys(STEP_KEYS, 0.5)
    assert parse(text(recorded("step", **values))).steps == {"T4": values}


SLICE = {"tp": 1, "micro_batch_size": 1, "layer": 1, "tokens": 64, "context": 32}


def test_slices_are_records_of_their_own() -> None:
    records = parse(text(recorded("slice", **SLICE, **TIMES)))
    assert records.slices["T4", LayerPoint(**SLICE)]["backward_s"] == 2e-3
    assert records.layers == {}
    assert records.missing_layers("T4", [LayerPoint(**SLICE)]) == ()


def test_a_slice_without_room_says_nothing_of_whole_sequences_of_fewer() -> None:
    records = parse(text(recorded("oom", **SLICE, **TIMES)))
    assert records.limits == {}
    changes = [{}, {"tokens": 32}, {"context": 0}, {"micro_batch_size": 4, "context": 64}]
    wanted = [LayerPoint(**{**SLICE, **change}) for change in changes]
    assert records.missing_layers("T4", [*wanted, point(1, 8, 0)]) == (*wanted[1:3], point(1, 8, 0))


def test_whole_sequences_without_room_leave_slices_to_be_tried() -> None:
    values = {"tp": 1, "micro_batch_size": 1, "layer": 0}
    records = parse(text(recorded("oom", **values)))
    assert records.missing_layers("T4", [LayerPoint(**SLICE), point(1, 1, 1)]) == (
        LayerPoint(**SLICE),
    )

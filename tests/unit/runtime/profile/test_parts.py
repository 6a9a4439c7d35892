from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.profile.parts import load_unprofiled, profile_parts
from support.experiments import PICTURE_MODEL, SMALL, TEXT_MODEL, small_experiment

NODES = "{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
T4 = "{device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"
V100 = "{device: V100-16, slots: 4, intra_gbit_per_s: 50, inter_gbit_per_s: 10}"


def test_one_host_of_each_type_and_each_pair_of_types() -> None:
    nodes = f"{T4}\n    - {T4}\n    - {V100}\n    - {V100}"
    parts = profile_parts(
        small_experiment((NODES, nodes), ("batch_size: 8", "batch_size: 24")), is_local=False
    )
    assert [(part.name, [node.name for node in part.nodes]) for part in parts] == [
        ("intra-T4", ["node0"]),
        ("intra-V100-16", ["node2"]),
        ("inter-T4-T4", ["node0", "node1"]),
        ("inter-T4-V100-16", ["node0", "node2"]),
        ("inter-V100-16-V100-16", ["node2", "node3"]),
    ]
    assert [len(part.places) for part in parts] == [2, 4, 2, 2, 2]


def test_links_in_a_rack_and_between_racks_are_measured_apart() -> None:
    nodes = T4.replace("slots", "count: 4, rack: {nodes: 2}, slots")
    parts = profile_parts(small_experiment((NODES, nodes)), is_local=False)
    assert [(part.name, [node.name for node in part.nodes]) for part in parts] == [
        ("intra-T4", ["node0"]),
        ("rack-T4-T4", ["node0", "node1"]),
        ("inter-T4-T4", ["node0", "node2"]),
    ]
    assert [len(part.places) for part in parts] == [2, 2, 2]


def test_what_the_search_may_ask_for_is_measured() -> None:
    part, *_ = profile_parts(small_experiment(), is_local=True)
    pairs = {(point.tp, point.micro_batch_size) for point in part.layers}
    assert pairs == {(tp, size) for tp in (1, 2) for size in (1, 2, 4, 8)}


def test_a_machine_alone_has_no_links_to_others() -> None:
    assert [part.name for part in profile_parts(small_experiment(), is_local=True)] == ["intra-T4"]


def test_the_host_with_most_slots_stands_for_its_type() -> None:
    nodes = f"{T4.replace('slots: 2', 'slots: 1')}\n    - {T4}"
    experiment = small_experiment((NODES, nodes), ("batch_size: 8", "batch_size: 6"))
    part, *_ = profile_parts(experiment, is_local=True)
    assert part.places == [("node1", 0), ("node1", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((NODES, f"{T4}\n    - {V100}"), "one type of device"),
        (("global_batch_size", "runtime: amp-2022\nglobal_batch_size"), "layer list"),
        (
            (
                "device: T4",
                "device: {name: my/board, memory_gib: 1, memory_gbyte_per_s: 1, fp16_tflops: 1}",
            ),
            "my/board",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(change: tuple[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        profile_parts(small_experiment(change), is_local=True)


def test_experts_are_measured_where_no_ranks_share_them_out() -> None:
    experts = ("family: gpt2,", "family: gpt2, num_experts: 4, experts_per_token: 1,")
    spread = ("global_batch_size: 8", "runtime: torch\nglobal_batch_size: 8")
    with pytest.raises(InputError, match=r"set search\.max_ep to 1"):
        profile_parts(small_experiment(experts, spread), is_local=True)
    whole = (spread[0], f"{spread[1]}\nsearch: {{max_ep: 1}}")
    for keys in ([experts], [experts, whole]):
        part, *_ = profile_parts(small_experiment(*keys), is_local=True)
        assert {point.tp for point in part.layers} == {1, 2}


def test_a_profile_that_is_still_to_be_made_is_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(SMALL + "profile: {source: table, path: not-yet}\n", encoding="utf-8")
    assert not load_unprofiled(path).profile.is_measured


def test_slices_need_a_sequence() -> None:
    experiment = small_experiment((TEXT_MODEL, PICTURE_MODEL))
    assert profile_parts(experiment, is_local=True)
    with pytest.raises(InputError, match="'transgan' has no sequence to cut into token slices"):
        profile_parts(experiment, is_local=True, token_slices=True)

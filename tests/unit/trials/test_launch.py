from dataclasses import replace

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.launch import (
    MASTER_ADDRESS,
    Launch,
    fill_in,
    node_commands,
    placement,
    rank_commands,
)
from support.checked import grid_of
from support.experiments import small_experiment

COMMANDS = rank_commands(["run"], [("a", 0), ("a", 1), ("b", 0)])
LAUNCH = Launch(trial_id="t-1", commands=COMMANDS, files={"a/b": b""}, environment={})


def test_ranks_know_their_place() -> None:
    last = COMMANDS[2]
    assert (last.rank, last.host, last.slot) == (2, "b", 0)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR")
    assert [last.environment[name] for name in names] == ["2", "0", "3", "1", MASTER_ADDRESS]


def test_hosts_come_in_the_order_of_their_ranks() -> None:
    commands = rank_commands(["run"], [("b", 0), ("a", 0), ("b", 1)])
    assert replace(LAUNCH, commands=commands).hosts == ("b", "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"commands": ()}, "found ranks"),
        ({"commands": COMMANDS[1:]}, r"found ranks \[1, 2\]"),
        ({"commands": rank_commands(["x"], [("a", 0), ("a", 0)])}, "used twice"),
        ({"files": {"../x": b""}}, "'../x'"),
        ({"files": {"/x": b""}}, "'/x'"),
        ({"files": {"": b""}}, "found ''"),
        ({"timeout_s": 0.0}, "found 0.0"),
        ({"trial_id": "a b"}, "'a b'"),
        ({"trial_id": "a/b"}, "'a/b'"),
        ({"trial_id": ".."}, r"'\.\.'"),
        ({"trial_id": ""}, "''"),
    ],
)
def test_what_cannot_start_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LAUNCH, **change)  # type: ignore[arg-type]


def test_only_placeholders_are_filled_in() -> None:
    values = {MASTER_ADDRESS: "10.0.0.1"}
    assert fill_in(f"{{x}} %s {MASTER_ADDRESS}:5", values) == "{x} %s 10.0.0.1:5"


def node(number: int) -> list[str]:
    return ["launch", str(number)]


def test_a_command_per_host_starts_the_ranks_of_its_host() -> None:
    commands = node_commands(node, [("b", 1), ("a", 0), ("b", 0)])
    assert [(c.host, c.rank, c.slot, c.all_slots) for c in commands] == [
        ("b", 0, 1, (1, 0)),
        ("a", 2, 0, (0,)),
    ]
    assert [c.argv for c in commands] == [("launch", "0"), ("launch", "1")]
    names = ("NODE_RANK", "NUM_NODES", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [commands[0].environment[name] for name in names] == ["0", "2", "3", "2", MASTER_ADDRESS]
    assert "RANK" not in commands[0].environment


def test_commands_for_several_ranks_can_be_launched() -> None:
    commands = node_commands(node, [("b", 1), ("a", 0), ("b", 0)])
    assert replace(LAUNCH, commands=commands).hosts == ("b", "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, r"found ranks \[0, 1\] for slots \[\[0, 1\], \[0\]\]"),
        ({"slot": 3, "slots": (0,)}, "found ranks"),
        ({"host": "a", "slot": 1}, r"\('a', 1\).*used twice"),
    ],
)
def test_ranks_of_several_are_counted_too(change: dict[str, object], message: str) -> None:
    first, second = node_commands(node, [("a", 0), ("a", 1), ("b", 0)])
    slots = {"slots": ()} if "slot" in change and "slots" not in change else {}
    wrong = replace(second, **{**slots, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        replace(LAUNCH, commands=(first, wrong))


CANDIDATE = grid_of(dp=2, micro_batch_size=2, pp=2, num_micro_batches=2)
STRATEGY = Strategy.uniform(CANDIDATE, (0, 4, 9), (3, 0, 1, 2))
GROUPS = (("a", "b"), ("c", "d"))


def experiment(backend: str) -> Experiment:
    plain = small_experiment()
    trials = replace(plain.trials, backend=backend)  # type: ignore[arg-type]
    return replace(plain, trials=trials, host_groups=GROUPS)


def test_every_rank_is_where_its_device_is() -> None:
    found = placement(experiment("ssh"), STRATEGY, ["a", "b"])
    assert found == (("b", 1), ("a", 0), ("a", 1), ("b", 0))


def test_another_group_plays_the_same_nodes() -> None:
    found = placement(experiment("ssh"), STRATEGY, ["c", "d"])
    assert found == (("d", 1), ("c", 0), ("c", 1), ("d", 0))


def test_on_one_machine_no_two_ranks_share_a_device() -> None:
    found = [placement(experiment("local"), STRATEGY, hosts) for hosts in GROUPS]
    assert found[0] == (("b", 3), ("a", 0), ("a", 1), ("b", 2))
    assert found[1] == (("d", 7), ("c", 4), ("c", 5), ("d", 6))


def test_the_hosts_of_a_rack_are_as_many_hosts() -> None:
    plain = small_experiment()
    (rack,) = small_experiment(("slots: 2,", "slots: 2, rack: {nodes: 2},")).cluster.nodes
    assert rack.host_names == ("node0", "node1")
    racked = replace(experiment("ssh"), cluster=replace(plain.cluster, nodes=(rack,)))
    for hosts in GROUPS:
        assert placement(racked, STRATEGY, hosts) == placement(experiment("ssh"), STRATEGY, hosts)


def test_too_few_hosts_are_refused() -> None:
    with pytest.raises(InputError, match="2 hosts, found 1 to play them: a"):
        placement(experiment("ssh"), STRATEGY, ["a"])

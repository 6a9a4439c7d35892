import base64
import json

from amp_ray.trials.command import deepspeed_commands, launch_order
from amp_ray.trials.launch import MASTER_ADDRESS, MASTER_PORT

PLACES = [("b", 1), ("a b", 0), ("b", 0)]
PROGRAM = ["/py", "amp_ray.training", "job.json"]


def test_every_host_gets_the_world_and_its_number() -> None:
    commands = deepspeed_commands(PROGRAM, PLACES)
    assert [command.host for command in commands] == ["b", "a b"]
    for number, command in enumerate(commands):
        options = dict(word.split("=", 1) for word in command.argv if "=" in word)
        world = json.loads(base64.urlsafe_b64decode(options["--world_info"]))
        assert world == {"b": [1, 0], "a b": [0]}
        assert options["--node_rank"] == str(number)
        assert options["--master_addr"] == MASTER_ADDRESS
        assert options["--master_port"] == MASTER_PORT


def test_the_program_comes_last() -> None:
    command = deepspeed_commands(PROGRAM, PLACES)[0]
    assert command.argv[:4] == ("/py", "-u", "-m", "deepspeed.launcher.launch")
    assert command.argv[-2:] == ("amp_ray.training", "job.json")


def test_processes_are_numbered_host_by_host() -> None:
    assert launch_order(PLACES) == (("b", 1), ("b", 0), ("a b", 0))


def test_a_host_whose_first_rank_is_odd_turns_its_devices() -> None:
    """DeepSpeed takes the rank modulo the host's number of ranks for the local rank."""
    places = [("a", 0), ("b", 0), ("b", 1)]
    assert launch_order(places) == (("a", 0), ("b", 1), ("b", 0))

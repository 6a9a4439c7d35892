"""Many scripted hosts in one trial: none is taken for lost, and memory stays small."""

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from amp_ray.runtime.hosts.link import AgentSettings, Message
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.launch import Launch, rank_commands
from amp_ray.trials.outcome import Measured
from support.scripted_host import ScriptedHost, file_messages, well_behaved

NUM_HOSTS: Final = 256
MOST_BYTES: Final = 500 * 2**20
LOG: Final = bytes(2**17)
RESULT: Final = b'{"trial_id": "t", "step_s": [0.5]}'


def measuring(message: Message) -> Iterable[Message | bytes]:
    """Send a log per rank, and a result."""
    if message.get("kind") == "job":
        for rank in message["ranks"]:
            yield from file_messages(f"rank-{rank['rank']}.log", LOG)
            if rank["rank"] == 0:
                yield from file_messages("result.json", RESULT)
    yield from well_behaved(message)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_none_of_many_hosts_is_taken_for_lost(tmp_path: Path) -> None:
    hosts = [ScriptedHost(f"h{number}", measuring) for number in range(NUM_HOSTS)]
    commands = rank_commands(["run"], [(host.name, 0) for host in hosts])
    launch = Launch(
        trial_id="t", commands=commands, files={"x": bytes(2**20)}, environment={}, timeout_s=600.0
    )
    before = peak_bytes()
    # Scripted hosts give no sign of life: the lease is longer than the trial on any machine.
    with Launcher(hosts, AgentSettings(lease_s=600.0)) as launcher:
        outcome = launcher.run(launch, tmp_path / "t")
    assert isinstance(outcome, Measured), outcome
    assert [host.num_agents for host in hosts] == [1] * NUM_HOSTS
    logs = list((tmp_path / "t/hosts").rglob("rank-*.log"))
    assert len(logs) == NUM_HOSTS
    assert all(path.stat().st_size == len(LOG) for path in logs)
    assert peak_bytes() - before < MOST_BYTES

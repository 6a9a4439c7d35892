from dataclasses import replace

import pytest

from amp_ray.errors import InputError
from amp_ray.spec.candidate import Candidate
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.strategy import StageOptions, Strategy
from amp_ray.trials.placement import placement
from support.experiments import small_experiment

CANDIDATE = Candidate(
    micro_batch_size=2, options=StageOptions(tp=1, dp=2), pp=2, num_micro_batches=2
)
STRATEGY = Strategy.uniform(CANDIDATE, (0, 4, 9), (3, 0, 1, 2))
GROUPS = (("a", "b"), ("c", "d"))


def experiment(backend: str) -> Experiment:
    plain = small_experiment()
    trials = replace(plain.trials, backend=backend, host_groups=GROUPS)  # type: ignore[arg-type]
    return replace(plain, trials=trials)


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


def test_too_few_hosts_are_refused() -> None:
    with pytest.raises(InputError, match="2 nodes, found 1 hosts to play them: a"):
        placement(experiment("ssh"), STRATEGY, ["a"])

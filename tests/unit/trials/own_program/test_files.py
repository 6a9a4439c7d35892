import json

import pytest

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.job_file import ds_config
from amp_ray.trials.own_program.program import file_names, generated_files
from support.experiments import small_experiment

PLACES = (("h one", 0), ("h one", 1), ("two", 0), ("two", 1))


def experiment(*files: str) -> Experiment:
    section = f"trials: {{program: {{argv: [x], files: {json.dumps(files)}}}}}\n"
    return small_experiment(("global_batch_size: 8\n", f"global_batch_size: 8\n{section}"))


def strategy() -> Strategy:
    candidate = Candidate(
        options=StageOptions(tp=2, dp=1), pp=2, micro_batch_size=2, num_micro_batches=4
    )
    return Strategy.uniform(candidate, (0, 4, 9))


def test_files_keep_their_path_unless_it_leads_out() -> None:
    found = file_names(experiment("train.py", "./net/a.py", "net/b.py", "../c.py", "/d.py", "~/e"))
    assert found == {
        "train.py": "train.py",
        "net/a.py": "./net/a.py",
        "net/b.py": "net/b.py",
        "c.py": "../c.py",
        "d.py": "/d.py",
        "e": "~/e",
    }


@pytest.mark.parametrize("name", [".", "..", "a/..", "/"])
def test_what_names_no_file_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"test\.yaml:8: trials\.program\.files\.1.*no file"):
        file_names(experiment("a", name))


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(InputError, match=r"files\.1: found '\.\./a', which would be 'a'.* as 'a'"):
        file_names(experiment("a", "../a"))


@pytest.mark.parametrize(
    "name",
    [
        *("ds_config.json", "hostfile", "strategy.json", "amp_ray_metric.py"),
        *("result.json", "rank-0.log", "metric-rank-3.json", "../hostfile"),
    ],
)
def test_names_of_generated_files_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"files\.0: found .* of its own: rename yours"):
        file_names(experiment(name))


def test_below_a_folder_such_names_are_free() -> None:
    assert file_names(experiment("net/hostfile")) == {"net/hostfile": "net/hostfile"}


def test_the_strategy_is_written_with_the_hosts_that_run_it() -> None:
    found, _ = generated_files(experiment(), strategy(), PLACES)
    record = json.loads(found["strategy.json"])
    assert record["placement"] == [list(place) for place in PLACES]
    own = small_experiment().cluster
    names = [["node0", 0], ["node0", 1], ["node1", 0], ["node1", 1]]
    assert strategy_from_json({**record, "placement": names}, _same(own)) == strategy()


def _same(cluster: Cluster) -> Cluster:
    assert [node.name for node in cluster.nodes] == ["node0", "node1"]
    return cluster


def test_the_hostfile_has_the_ranks_of_every_host() -> None:
    found, _ = generated_files(experiment(), strategy(), (*PLACES[2:], ("one", 3)))
    assert found["hostfile"] == b"two slots=2\none slots=1\n"


def test_the_deepspeed_configuration_is_the_strategys_and_logs_every_step() -> None:
    found, reason = generated_files(experiment(), strategy(), PLACES)
    config = json.loads(found["ds_config.json"])
    assert reason is None
    assert config == ds_config(experiment(), strategy())
    assert config["steps_per_print"] == 1


def test_deepspeeds_engines_are_told_to_log_their_speed() -> None:
    text = "trials: {program: {argv: [x], metric: deepspeed}}"
    given = small_experiment(("global_batch_size: 8\n", f"global_batch_size: 8\n{text}\n"))
    found, _ = generated_files(given, strategy(), PLACES)
    assert json.loads(found["ds_config.json"])["log_level"] == "info"


def test_stages_that_differ_have_no_deepspeed_configuration() -> None:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=2, dp=1)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=1)),
    )
    mixed = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2))
    found, reason = generated_files(experiment(), mixed, PLACES[:3])
    assert sorted(found) == ["hostfile", "strategy.json"]
    assert reason is not None
    assert "stages differ" in reason

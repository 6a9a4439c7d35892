import json

import pytest

from amp_ray.training.job import read_job
from amp_ray.trials.profile.launch import profile_job, profile_launch, read_end
from amp_ray.trials.profile.points import layer_points, link_points
from support.experiments import small_experiment

MODEL = small_experiment().model


def trial(device: str = "T4") -> dict[str, object]:
    return profile_job(
        trial_id="profile-0", model=MODEL, precision="fp16", device=device, num_ranks=2
    )


def test_the_training_program_reads_the_job() -> None:
    job = read_job(trial())
    assert job.grid.num_ranks == 2
    assert (job.precision, job.device) == ("fp16", "cuda")


def test_only_a_cpu_is_measured_on_the_cpu() -> None:
    assert trial("cpu")["device"] == "cpu"


def test_the_program_travels_with_its_job() -> None:
    links, layers = link_points(2)[:1], layer_points(MODEL, [(2, 1)])
    launch = profile_launch(
        trial(),
        [("h", 0), ("h", 1)],
        work=(links, layers),
        seconds=10.0,
        step=True,
        program=("/py", {"amp_ray/__init__.py": b""}),
    )
    assert launch.commands[1].argv[0] == "/py"
    assert set(launch.files) == {"amp_ray/__init__.py", "job.json"}
    job = json.loads(launch.files["job.json"])
    assert job["links"] == [{"what": "p2p", "num_ranks": 2, "num_bytes": 1024}]
    whole = {"tokens": 0, "context": 0}
    assert job["points"][0] == {"tp": 2, "micro_batch_size": 1, "layer": 0, **whole}
    assert job["step"] is True
    assert launch.timeout_s > job["seconds"] == 10.0


def test_the_end_is_read_only_from_this_run() -> None:
    result = json.dumps({"trial_id": "profile-0", "elapsed_s": 3.5}).encode()
    assert read_end({"result.json": result}, "profile-0").step_time_s == (3.5,)
    with pytest.raises(ValueError, match="without saying so"):
        read_end({}, "profile-1")
    with pytest.raises(ValueError, match="of trial 'profile-0', not of 'profile-1'"):
        read_end({"result.json": result}, "profile-1")


@pytest.mark.parametrize("data", [b"[]", b"{", b"7", b"[" * 100_000, b"\xff", b"9" * 5000])
def test_an_end_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^result\.json "):
        read_end({"result.json": data}, "p")


@pytest.mark.parametrize("elapsed", [None, "3.5", True, 10**400, [3.5]])
def test_an_end_without_a_time_is_refused(elapsed: object) -> None:
    data = json.dumps({"trial_id": "p", "elapsed_s": elapsed}).encode()
    with pytest.raises(ValueError, match=r"needs .* found elapsed_s"):
        read_end({"result.json": data}, "p")

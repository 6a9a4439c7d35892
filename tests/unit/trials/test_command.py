import base64
import json
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from amp_ray.training.job import read_job
from amp_ray.trials.command import (
    WARM_MODULES,
    deepspeed_commands,
    launch_order,
    trial_launch,
    trial_problem,
    trial_reader,
    trial_warm_up,
)
from amp_ray.trials.launch import FOLDER, MASTER_ADDRESS, MASTER_PORT, Launch
from support.checked import grid_of, required
from support.experiments import experiment_from, small_experiment
from support.published import TEXT

CANDIDATE = grid_of(tp=2, micro_batch_size=2, pp=2, num_micro_batches=4)
PLACED = Strategy.uniform(CANDIDATE, (0, 4, 9), (3, 0, 1, 2))
PROGRAM = OwnProgram(argv=("{python}", "train.py"))


def experiment(**trials: Any) -> Experiment:  # noqa: ANN401 - TrialSettings' own
    plain = small_experiment()
    return replace(plain, trials=replace(plain.trials, **trials))


def launch(given: Experiment, strategy: Strategy = PLACED) -> Launch:
    return trial_launch(
        given,
        strategy,
        trial_id="t-1",
        hosts=["a", "b"],
        files={"amp_ray/__init__.py": b""},
        python="/py",
    )


def job(found: Launch) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(found.files["job.json"])
    return record


def test_the_training_program_reads_the_job() -> None:
    found = read_job(job(launch(experiment(steps=7, warmup_steps=3))))
    grid = found.grid
    assert (grid.tp, grid.dp, grid.pp, grid.bounds) == (2, 1, 2, (0, 4, 9))
    assert grid.rank_map == (0, 1, 2, 3)
    assert (found.trial_id, found.steps, found.warmup_steps) == ("t-1", 7, 3)
    assert (found.precision, found.optimizer, found.device) == ("fp16", "adam", "cuda")


def test_every_rank_is_started_where_the_strategy_places_it() -> None:
    found = launch(experiment())
    assert [(c.host, c.slot) for c in found.commands] == [("b", 1), ("a", 0), ("a", 1), ("b", 0)]
    assert found.commands[0].argv == ("/py", "-u", "-m", "amp_ray.training", "job.json")
    assert job(found)["strategy"]["placement"] == [["b", 1], ["a", 0], ["a", 1], ["b", 0]]


def test_with_deepspeeds_launcher_the_job_says_which_process_is_where() -> None:
    found = launch(experiment(launcher="deepspeed"))
    assert [(c.host, c.all_slots) for c in found.commands] == [("b", (1, 0)), ("a", (0, 1))]
    assert found.commands[0].argv[-2:] == ("amp_ray.training", "job.json")
    assert read_job(job(found)).grid.rank_map == (0, 2, 3, 1)


def test_a_published_strategy_is_run_in_our_layers() -> None:
    strategy = Strategy.uniform(CANDIDATE, (0, 9, 30))
    found = read_job(job(launch(experiment_from(TEXT), strategy)))
    assert found.grid.bounds == (0, 8, 27)
    assert [stage.recompute for stage in found.grid.stages] == [FULL, FULL]


def plain_torch(**traits: Any) -> Experiment:  # noqa: ANN401 - RuntimeTraits' own
    return replace(small_experiment(), traits=replace(RUNTIMES["torch"], **traits))


UNEQUAL = Strategy(
    stages=(
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=2, dp=1), shares=(4,)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(3, 1)),
    ),
    micro_batch_size=4,
    num_micro_batches=2,
    placement=(3, 0, 1, 2),
)


def test_plain_torch_runs_stages_that_differ() -> None:
    found = launch(plain_torch(), UNEQUAL)
    read = read_job(job(found))
    assert read.runtime == "torch"
    assert [(stage.tp, stage.dp) for stage in read.grid.stages] == [(2, 1), (1, 2)]
    assert (read.grid.shares(0), read.grid.shares(1)) == ((4,), (3, 1))
    assert "ds_config.json" not in found.files
    assert "deepspeed runs one of each" in (trial_problem(experiment(), UNEQUAL) or "").lower()


@pytest.mark.parametrize("runtime", ["deepspeed", "torch"])
@pytest.mark.parametrize(
    ("zero", "bounds"), [(Zero(stage=1), (0, 4, 9)), (Zero(stage=3, keeps_weights=True), (0, 9))]
)
def test_both_runtimes_read_what_is_shared_out(
    runtime: str, zero: Zero, bounds: tuple[int, ...]
) -> None:
    options = StageOptions(tp=1, dp=2, zero=zero)
    candidate = replace(CANDIDATE, options=options, pp=len(bounds) - 1, num_micro_batches=2)
    given = replace(small_experiment(), traits=RUNTIMES[runtime])
    read = read_job(job(launch(given, Strategy.uniform(candidate, bounds))))
    assert (read.zero_stage, read.grid.keeps_weights) == (zero.stage, zero.keeps_weights)


def test_plain_torch_divides_tokens() -> None:
    options = StageOptions(tp=2, dp=1, sequence_parallel=True)
    divided = Strategy.uniform(replace(CANDIDATE, options=options), (0, 4, 9))
    stages = read_job(job(launch(plain_torch(), divided))).grid.stages
    assert [stage.sequence_parallel for stage in stages] == [True, True]
    assert "only 'runtime: torch' does" in (trial_problem(experiment(), divided) or "")
    length = small_experiment().model.shape.sequence_length
    cut = replace(divided, token_slices=((2, (length - 3, 3)),))
    assert "tokens over tp 2 ranks; set it" in (trial_problem(plain_torch(), cut) or "")


def sliced(*tokens: int) -> Strategy:
    return replace(PLACED, token_slices=((2, tokens),))


def test_plain_torch_passes_slices_of_tokens() -> None:
    length = small_experiment().model.shape.sequence_length
    found = launch(plain_torch(), sliced(length - 3, 3))
    assert read_job(job(found)).grid.token_slices == ((2, (length - 3, 3)),)
    assert "timeline.json" in found.collect
    assert "token slices, which DeepSpeed's pipeline cannot run" in (
        trial_problem(experiment(), sliced(length)) or ""
    )
    problem = trial_problem(plain_torch(), sliced(length, 3))
    assert problem == f"its token_slices [{length}, 3] must add up to sequence_length {length}"


def test_plain_torch_interleaves_chunks() -> None:
    grid = read_job(job(launch(plain_torch(), replace(PLACED, virtual_stages=2)))).grid
    # Layers 1 to 6 are blocks: three for each stage, one and two for its chunks.
    assert grid.bounds == (0, 2, 3, 5, 9)
    assert (grid.chunks_of(0), grid.chunks_of(1)) == ([(0, 2), (3, 5)], [(2, 3), (5, 9)])
    uneven = Strategy.uniform(replace(CANDIDATE, virtual_stages=2), (0, 3, 4, 5, 9))
    assert read_job(job(launch(plain_torch(), uneven))).grid.bounds == (0, 3, 4, 5, 9)


def test_plain_torch_needs_no_deepspeed() -> None:
    preload = required(trial_warm_up(plain_torch(), "python"))
    assert not any("deepspeed" in module for module in preload.modules)


@pytest.mark.parametrize(
    ("given", "virtual_stages", "words"),
    [
        (plain_torch(), 4, "stage 1 has fewer blocks than virtual_stages 4"),
        (plain_torch(sliced_activations=True), 1, "leave sliced_\\* of traits out"),
        (small_experiment(), 2, "DeepSpeed does not interleave"),
    ],
)
def test_what_a_runtime_does_not_run_is_named(
    given: Experiment, virtual_stages: int, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        launch(given, replace(PLACED, virtual_stages=virtual_stages))


def test_what_cannot_be_launched_is_refused_before_anything_starts() -> None:
    with pytest.raises(InputError, match="bounds end at 8"):
        launch(experiment(), Strategy.uniform(CANDIDATE, (0, 4, 8)))


def test_beside_the_job_lies_what_a_person_repeats_it_with() -> None:
    found = launch(experiment())
    config = json.loads(found.files["ds_config.json"])
    assert config["train_batch_size"] == 8
    assert found.files["hostfile"] == b"b slots=2\na slots=2\n"
    assert "amp_ray/__init__.py" in found.files


def test_no_rank_gives_its_peers_up_before_the_trial_ends() -> None:
    found = launch(experiment(timeout_s=90.0))
    record = job(found)
    assert found.timeout_s == 90.0
    assert record["init_timeout_s"] >= 90.0
    assert record["communication_timeout_s"] >= 90.0


def test_gradient_clipping_is_said() -> None:
    assert job(launch(experiment()))["gradient_clipping"] == 0.0


def test_the_users_variables_win() -> None:
    found = launch(experiment(environment={"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "WARN"}))
    assert found.environment["NCCL_DEBUG"] == "WARN"
    assert found.environment["OMP_NUM_THREADS"] == "4"
    assert job(found)["num_threads"] == 4


@pytest.mark.parametrize("text", ["0", "many", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"trials\.environment\.OMP_NUM_THREADS: found"):
        launch(experiment(environment={"OMP_NUM_THREADS": text}))


def test_nothing_is_written_outside_of_the_trials_folder() -> None:
    found = launch(experiment())
    assert found.environment["TORCHINDUCTOR_CACHE_DIR"].startswith(FOLDER)
    assert job(found)["out_dir"] == "."


def test_warm_processes_import_what_others_wrote() -> None:
    preload = required(trial_warm_up(experiment(environment={"X": "y"}), "python"))
    assert preload.modules == WARM_MODULES
    assert preload.environment["X"] == "y"
    assert preload.environment["DS_ACCELERATOR"] == "cuda"


@pytest.mark.parametrize(
    "settings", [{"warm": False}, {"launcher": "deepspeed"}, {"program": PROGRAM}]
)
def test_where_ranks_are_not_forked_nothing_is_warmed_up(settings: dict[str, Any]) -> None:
    assert trial_warm_up(experiment(**settings), "python") is None


def test_an_own_program_is_started_and_read_its_own_way() -> None:
    given = experiment(program=PROGRAM)
    assert launch(given).commands[0].argv == ("/py", "train.py")
    with pytest.raises(ValueError, match="the metric never appeared"):
        trial_reader(given)({}, "t")
    with pytest.raises(ValueError, match="without writing result"):
        trial_reader(experiment())({}, "t")


def test_a_result_that_no_trial_can_have_had_is_refused() -> None:
    given = experiment()
    steps = [given.trials.timeout_s / 2 + 1] * 2
    files = {"result.json": json.dumps({"trial_id": "t", "step_s": steps}).encode()}
    with pytest.raises(ValueError, match="add up to 602 s, but the trial took at most 600 s"):
        trial_reader(given)(files, "t")


@pytest.mark.parametrize("program", [None, PROGRAM])
def test_what_stands_against_a_trial_can_be_asked_before(program: OwnProgram | None) -> None:
    given = experiment(program=program)
    assert trial_problem(given, PLACED) is None
    wrong = Strategy.uniform(CANDIDATE, (0, 4, 8))
    assert "bounds end at 8" in str(trial_problem(given, wrong))


ORDER = [("b", 1), ("a b", 0), ("b", 0)]
WORDS = ["/py", "amp_ray.training", "job.json"]


def test_every_host_gets_the_world_and_its_number() -> None:
    commands = deepspeed_commands(WORDS, ORDER)
    assert [command.host for command in commands] == ["b", "a b"]
    for number, command in enumerate(commands):
        options = dict(word.split("=", 1) for word in command.argv if "=" in word)
        world = json.loads(base64.urlsafe_b64decode(options["--world_info"]))
        assert world == {"b": [1, 0], "a b": [0]}
        assert options["--node_rank"] == str(number)
        assert options["--master_addr"] == MASTER_ADDRESS
        assert options["--master_port"] == MASTER_PORT


def test_the_program_comes_last() -> None:
    command = deepspeed_commands(WORDS, ORDER)[0]
    assert command.argv[:4] == ("/py", "-u", "-m", "deepspeed.launcher.launch")
    assert command.argv[-2:] == ("amp_ray.training", "job.json")


def test_processes_are_numbered_host_by_host() -> None:
    assert launch_order(ORDER) == (("b", 1), ("b", 0), ("a b", 0))


def test_a_host_whose_first_rank_is_odd_turns_its_devices() -> None:
    """DeepSpeed takes the rank modulo the host's number of ranks for the local rank."""
    places = [("a", 0), ("b", 0), ("b", 1)]
    assert launch_order(places) == (("a", 0), ("b", 1), ("b", 0))

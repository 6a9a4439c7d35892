import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram, Pattern
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.strategy import Strategy
from amp_ray.trials.launch import FOLDER, Launch
from amp_ray.trials.own_program.program import program_launch, program_problem, program_reader
from amp_ray.trials.result import Reader
from support.experiments import small_experiment

HOSTS = ("h0", "h1")
HOSTILE = [
    "it's",
    'a "b"',
    "; rm -rf x",
    "$(id)",
    "`id`",
    "a\nb",
    " a  b ",
    "*",
    "ü",
    "-",
    "\\",
    "",
]


def experiment(trials: str = "", **program: Any) -> Experiment:  # noqa: ANN401 - any YAML
    keys = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in program.items())
    section = f"trials:\n  backend: ssh\n  steps: 3\n  warmup_steps: 1\n{trials}  program:\n{keys}"
    return small_experiment(("global_batch_size: 8\n", f"global_batch_size: 8\n{section}"))


def strategy(bounds: tuple[int, ...] = (0, 4, 9), **changes: Any) -> Strategy:  # noqa: ANN401
    values = {"pp": 2, "micro_batch_size": 2, "num_micro_batches": 2}
    placement = changes.pop("placement", None)
    options = StageOptions(tp=changes.pop("tp", 1), dp=changes.pop("dp", 2))
    return Strategy.uniform(Candidate(options=options, **{**values, **changes}), bounds, placement)


def launch(
    given: Experiment, chosen: Strategy | None = None, files: Mapping[str, bytes] | None = None
) -> Launch:
    return program_launch(
        given,
        chosen or strategy(),
        trial_id="t-1",
        hosts=HOSTS,
        files=files or {},
        python="/opt/a b/python",
    )


# ---------------------------------------------------------------------------- commands


def test_every_rank_has_its_own_command() -> None:
    commands = launch(experiment(argv=["{python}", "-r={node_rank}", "--pp={pp}"])).commands
    assert [command.argv for command in commands] == [
        ("/opt/a b/python", f"-r={node}", "--pp=2") for node in (0, 0, 1, 1)
    ]
    assert [(command.host, command.slot) for command in commands] == [
        *(("h0", 0), ("h0", 1), ("h1", 0), ("h1", 1)),
    ]


def test_ranks_are_where_the_strategy_places_them() -> None:
    commands = launch(experiment(argv=["x"]), strategy(placement=(3, 0, 2, 1))).commands
    assert [(command.host, command.slot) for command in commands] == [
        *(("h1", 1), ("h0", 0), ("h1", 0), ("h0", 1)),
    ]
    assert [command.environment["NODE_RANK"] for command in commands] == ["0", "1", "0", "1"]


def test_a_node_has_one_command_for_all_its_ranks() -> None:
    argv = ["torchrun", "--nnodes={num_nodes}", "--node-rank={node_rank}", "-n={slots_per_node}"]
    commands = launch(experiment(argv=argv, per="node")).commands
    assert [command.argv[1:] for command in commands] == [
        ("--nnodes=2", "--node-rank=0", "-n=2"),
        ("--nnodes=2", "--node-rank=1", "-n=2"),
    ]
    variables = ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "WORLD_SIZE")
    assert [[command.environment[name] for name in variables] for command in commands] == [
        ["0", "2", "2", "4"],
        ["1", "2", "2", "4"],
    ]
    assert [command.slots for command in commands] == [(0, 1), (0, 1)]
    assert all("RANK" not in command.environment for command in commands)


def test_hosts_that_a_strategy_does_not_use_have_no_command() -> None:
    half = strategy((0, 9), pp=1, num_micro_batches=2, dp=2, micro_batch_size=2)
    commands = launch(experiment(argv=["-n={num_nodes}"], per="node"), half).commands
    assert [(command.host, command.argv) for command in commands] == [("h0", ("-n=1",))]


def test_a_command_per_node_needs_ranks_host_by_host() -> None:
    given = experiment(argv=["x"], per="node")
    with pytest.raises(InputError, match=r"program\.per: found 'node', .* h0, h1, h0, h1 in turn"):
        launch(given, strategy(placement=(0, 2, 1, 3)))
    assert len(launch(given, strategy(placement=(2, 3, 1, 0))).commands) == 2


def test_hostile_text_arrives_unchanged() -> None:
    words = [word for word in HOSTILE if word]
    assert launch(experiment(argv=words)).commands[0].argv == tuple(words)


def test_megatrons_flags_become_arguments() -> None:
    argv = launch(experiment(argv=["x", "{megatron_flags}", "--lr=1"])).commands[0].argv
    assert argv[:3] == ("x", "--tensor-model-parallel-size", "1")
    assert argv[argv.index("--train-iters") + 1] == "4"
    assert argv[-1] == "--lr=1"


# ------------------------------------------------------------------------- environment


def test_variables_have_placeholders_too() -> None:
    given = experiment('  environment: {A: "{node_rank} {{}} {pp}"}\n', argv=["x"])
    values = [command.environment["A"] for command in launch(given).commands]
    assert values == [f"{node} {{}} 2" for node in (0, 0, 1, 1)]


def test_a_user_cannot_make_two_ranks_one() -> None:
    given = experiment('  environment: {RANK: "7", MASTER_ADDR: x}\n', argv=["x"])
    assert [command.environment["RANK"] for command in launch(given).commands] == [*"0123"]


def test_the_metrics_module_is_found_before_the_users_own_path() -> None:
    assert launch(experiment(argv=["x"])).commands[0].environment["PYTHONPATH"] == FOLDER
    given = experiment("  environment: {PYTHONPATH: /a}\n", argv=["x"])
    assert launch(given).commands[0].environment["PYTHONPATH"] == f"{FOLDER}:/a"


def test_another_metric_leaves_the_path_alone() -> None:
    commands = launch(experiment(argv=["x"], metric="megatron")).commands
    assert "PYTHONPATH" not in commands[0].environment


def test_the_metrics_module_is_told_the_trial_and_the_size_of_a_stage() -> None:
    environment = launch(experiment(argv=["x"])).environment
    assert environment["AMP_RAY_TRIAL_ID"] == "t-1"
    assert environment["AMP_RAY_RANKS_PER_STAGE"] == "2"


def test_threads_are_one_unless_the_user_says_so() -> None:
    assert launch(experiment(argv=["x"])).environment["OMP_NUM_THREADS"] == "1"
    given = experiment('  environment: {OMP_NUM_THREADS: "4"}\n', argv=["x"])
    assert launch(given).commands[0].environment["OMP_NUM_THREADS"] == "4"


# ------------------------------------------------------------------------- the launch


def test_files_are_the_users_and_the_generated_ones() -> None:
    files = launch(experiment(argv=["x"]), files={"train.py": b"x"}).files
    assert sorted(files) == ["ds_config.json", "hostfile", "strategy.json", "train.py"]


def test_folder_limit_and_patterns_are_the_users() -> None:
    given = experiment("  timeout_s: 7.5\n", argv=["x"], cwd="/code", collect=["*.csv"])
    found = launch(given)
    assert (found.cwd, found.timeout_s) == ("/code", 7.5)
    assert found.collect == ("result.json", "rank-*.log", "metric-rank-*.json", "*.csv")


def test_a_program_is_checked_before_it_is_launched() -> None:
    with pytest.raises(InputError, match=r"trials\.program\.argv\.0: found {foo}"):
        launch(experiment(argv=["{foo}"]))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (strategy((0, 4, 8)), "its bounds end at 8, the model has 9 layers"),
        (strategy(placement=(0, 1, 2, 4)), "it uses device 4, the cluster has 0 to 3"),
        (strategy(num_micro_batches=4), "it makes 16 samples per step, global_batch_size is 8"),
    ],
)
def test_a_strategy_of_another_experiment_is_refused(chosen: Strategy, message: str) -> None:
    with pytest.raises(InputError, match=f"strategy tp 1, pp 2, .* cannot be launched: {message}"):
        launch(experiment(argv=["x"]), chosen)


def test_what_a_strategy_cannot_say_is_refused_where_it_is_asked_for() -> None:
    uneven = strategy((0, 2, 3, 5, 9), pp=4, dp=1, num_micro_batches=4)
    given = replace(experiment(argv=["x", "{megatron_flags}"]), traits=RUNTIMES["megatron"])
    with pytest.raises(InputError, match=r"argv\.1: {megatron_flags} has no value here: Megatron"):
        launch(given, uneven)
    assert launch(experiment(argv=["{pp}"]), uneven).commands[0].argv == ("4",)


def test_a_problem_is_told_without_an_exception() -> None:
    given = replace(experiment(argv=["{megatron_flags}"]), traits=RUNTIMES["megatron"])
    problem = program_problem(given, strategy((0, 2, 3, 5, 9), pp=4, dp=1, num_micro_batches=4))
    assert problem is not None
    assert "1, 1, 2, 2 blocks" in problem
    assert program_problem(given, strategy()) is None


# ---------------------------------------------------------------------------- readers


def told(*steps: float) -> dict[str, bytes]:
    record = {"trial_id": "t", "num_ranks": 1, "stage": 0, "peak_memory_bytes": None}
    return {"metric-rank-0.json": json.dumps({**record, "step_s": steps}).encode()}


def reader_of(metric: Any = "helper", num_steps: int = 2, num_warmup_steps: int = 1) -> Reader:  # noqa: ANN401 - any metric
    """Return the reader of a program whose trials take 600 s and 8 samples a step."""
    trials = replace(
        small_experiment().trials,
        program=OwnProgram(argv=("x",), metric=metric),
        steps=num_steps,
        warmup_steps=num_warmup_steps,
        timeout_s=600.0,
    )
    return program_reader(replace(small_experiment(), global_batch_size=8, trials=trials))


def test_what_was_told_is_read() -> None:
    found = reader_of()(told(3.0, 1.0, 1.5), "t")
    assert (found.step_time_s, found.num_warmup_steps) == ((3.0, 1.0, 1.5), 1)


def test_a_pattern_is_read() -> None:
    reader = reader_of(Pattern(pattern=r"t=(\d+)", unit="ms"))
    found = reader({"rank-0.log": b"t=3000\nt=1000\n"}, "t")
    assert (found.step_time_s, found.num_warmup_steps) == ((3.0, 1.0), 1)


def test_a_rate_is_of_the_global_batch() -> None:
    line = b"global_step=3, RunningAvgSamplesPerSec=1, CurrSamplesPerSec=4.0, MemAllocated=0GB\n"
    found = reader_of("deepspeed", 1, 0)
    assert found({"rank-0.log": line}, "t").step_time_s == (2.0,)


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("helper", "no rank called report_step"),
        ("megatron", "elapsed time per iteration"),
        (Pattern(pattern="x(.)"), r"has 'x\(\.\)'"),
    ],
)
def test_a_metric_that_never_appears_is_refused_with_what_was_asked(metric: Any, name: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=rf"never appeared: .*{name}.*1 warm-up and 2 measured"):
        reader_of(metric)({"rank-0.log": b"done"}, "t")


def test_steps_that_take_longer_than_the_trial_are_refused() -> None:
    reader = reader_of()
    with pytest.raises(
        ValueError, match=r"add up to 700 s, .* at most 600 s: is the .* unit right"
    ):
        reader(told(300.0, 200.0, 200.0), "t")
    assert reader(told(300.0, 100.0, 200.0), "t").num_warmup_steps == 1

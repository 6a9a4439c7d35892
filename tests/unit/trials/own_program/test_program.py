import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram, Pattern
from amp_ray.inputs.placeholders import PLACEHOLDERS, SEVERAL
from amp_ray.inputs.strategies import strategy_from_json
from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.job_file import ds_config
from amp_ray.trials.launch import FOLDER, MASTER_ADDRESS, MASTER_PORT, Launch, rank_commands
from amp_ray.trials.own_program.program import (
    check_program,
    command_values,
    file_names,
    generated_files,
    program_launch,
    program_problem,
    program_reader,
    strategy_values,
)
from amp_ray.trials.result import Reader
from support.experiments import experiment_from, small_experiment

PLACES = (("h one", 0), ("h one", 1), ("two", 0), ("two", 1))
HOSTS = ("h0", "h1")


def experiment(trials: str = "", **program: Any) -> Experiment:  # noqa: ANN401 - any YAML
    keys = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in program.items())
    steps = "  backend: ssh\n  steps: 3\n  warmup_steps: 1\n"
    section = f"trials:\n{trials}  program:\n{keys}{steps}"
    return small_experiment(("global_batch_size: 8\n", f"global_batch_size: 8\n{section}"))


def strategy(bounds: tuple[int, ...] = (0, 4, 9), **changes: Any) -> Strategy:  # noqa: ANN401
    values = {"pp": 2, "micro_batch_size": 2, "num_micro_batches": 2}
    placement = changes.pop("placement", None)
    keys = [key for key in ("tp", "dp", "recompute") if key in changes]
    options = StageOptions(**{"tp": 1, "dp": 2, **{key: changes.pop(key) for key in keys}})
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


DIVIDED = strategy(tp=2, dp=1, num_micro_batches=4)


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


# ----------------------------------------------------------------- values of placeholders


def mixed(options: StageOptions) -> Strategy:
    """Make a strategy whose second stage has other options than the first."""
    first = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=1))
    other = Stage(first_layer=4, end_layer=9, options=options)
    num_ranks = first.num_ranks + other.num_ranks
    return Strategy(
        stages=(first, other),
        micro_batch_size=2,
        num_micro_batches=4,
        placement=tuple(range(num_ranks)),
    )


def test_a_strategy_gives_its_values() -> None:
    assert strategy_values(small_experiment(), strategy(recompute=FULL)).texts == {
        "tp": "1",
        "pp": "2",
        "dp": "2",
        "micro_batch_size": "2",
        "num_micro_batches": "2",
        "global_batch_size": "8",
        "num_blocks": "6",
        "recompute": "full",
        "hidden_size": "256",
        "num_heads": "8",
        "sequence_length": "128",
        "vocab_size": "1024",
        "total_steps": "25",
        "ds_config": f"{FOLDER}/ds_config.json",
        "strategy": f"{FOLDER}/strategy.json",
        "trial_dir": FOLDER,
        "master_addr": MASTER_ADDRESS,
        "master_port": MASTER_PORT,
    }


def test_every_placeholder_has_a_value_somewhere() -> None:
    texts = strategy_values(small_experiment(), strategy(recompute=FULL)).texts
    commands = rank_commands((), PLACES)
    variables = {**commands[0].environment, "NODE_RANK": "0", "NNODES": "2"}
    own = command_values(replace(commands[0], environment=variables)).texts
    assert {*texts, *own, *SEVERAL, "python"} == set(PLACEHOLDERS)


def test_what_stages_differ_in_has_no_value() -> None:
    values = strategy_values(small_experiment(), mixed(StageOptions(tp=1, dp=1, recompute=FULL)))
    assert "recompute" not in values.texts
    assert "the stages of this strategy differ" in values.missing["recompute"]
    assert values.texts["tp"] == "1"


def test_stages_of_different_tp_have_one_dp() -> None:
    values = strategy_values(small_experiment(), mixed(StageOptions(tp=2, dp=1)))
    assert values.missing.keys() == {"tp", "megatron_flags"}
    assert values.texts["dp"] == "1"


def test_shares_of_samples_are_no_micro_batch_size() -> None:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=1), shares=(2,)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
    )
    shared = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2))
    missing = strategy_values(small_experiment(), shared).missing
    assert missing.keys() == {"dp", "micro_batch_size", "megatron_flags"}


def test_shares_of_stages_with_one_dp_are_no_micro_batch_size_either() -> None:
    stages = tuple(
        Stage(first_layer=first, end_layer=end, options=StageOptions(tp=1, dp=2), shares=(1, 3))
        for first, end in ((0, 4), (4, 9))
    )
    shared = Strategy(
        stages=stages, micro_batch_size=4, num_micro_batches=2, placement=(0, 1, 2, 3)
    )
    missing = strategy_values(small_experiment(), shared).missing
    assert missing.keys() == {"micro_batch_size", "megatron_flags"}


def test_a_missing_configuration_has_a_reason() -> None:
    values = strategy_values(small_experiment(), strategy(), no_ds_config="because")
    assert values.missing == {"ds_config": "because"}


# ----------------------------------------------------------------- files


def test_files_keep_their_path_unless_it_leads_out() -> None:
    found = file_names(
        experiment(
            argv=["x"],
            files=["train.py", "./net/a.py", "net/b.py", "net/hostfile", "../c.py", "/d.py", "~/e"],
        )
    )
    assert found == {
        "train.py": "train.py",
        "net/a.py": "./net/a.py",
        "net/b.py": "net/b.py",
        "net/hostfile": "net/hostfile",
        "c.py": "../c.py",
        "d.py": "/d.py",
        "e": "~/e",
    }


def test_the_strategy_is_written_with_the_hosts_that_run_it() -> None:
    found, _ = generated_files(experiment(argv=["x"]), DIVIDED, PLACES)
    record = json.loads(found["strategy.json"])
    assert record["placement"] == [list(place) for place in PLACES]
    names = [["node0", 0], ["node0", 1], ["node1", 0], ["node1", 1]]
    cluster = small_experiment().cluster
    assert strategy_from_json({**record, "placement": names}, cluster) == DIVIDED


def test_the_hostfile_has_the_ranks_of_every_host() -> None:
    found, _ = generated_files(experiment(argv=["x"]), DIVIDED, (*PLACES[2:], ("one", 3)))
    assert found["hostfile"] == b"two slots=2\none slots=1\n"


def test_the_deepspeed_configuration_is_the_strategys_and_logs_every_step() -> None:
    found, reason = generated_files(experiment(argv=["x"]), DIVIDED, PLACES)
    config = json.loads(found["ds_config.json"])
    assert reason is None
    assert config == ds_config(experiment(argv=["x"]), DIVIDED)
    assert config["steps_per_print"] == 1


def test_deepspeeds_engines_are_told_to_log_their_speed() -> None:
    found, _ = generated_files(experiment(argv=["x"], metric="deepspeed"), DIVIDED, PLACES)
    assert json.loads(found["ds_config.json"])["log_level"] == "info"


def test_stages_that_differ_have_no_deepspeed_configuration() -> None:
    found, reason = generated_files(
        experiment(argv=["x"]), mixed(StageOptions(tp=2, dp=1)), PLACES[:3]
    )
    assert sorted(found) == ["hostfile", "strategy.json"]
    assert reason is not None
    assert "stages differ" in reason


# ----------------------------------------------------------------- refusals before any strategy


def test_a_sound_program_is_returned() -> None:
    given = experiment(argv=["{python}", "{megatron_flags}", "a{{b"], files=["a/b"], cwd="/x y")
    assert check_program(given) == given.trials.program


def test_an_unknown_placeholder_is_refused_with_line_and_key() -> None:
    text = """\
name: small
model: {family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
cluster: {nodes: [{count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}]}
global_batch_size: 8
trials:
  program:
    argv:
      - python
      - --tp={t}
"""
    with pytest.raises(InputError) as caught:
        check_program(experiment_from(text))
    message = str(caught.value)
    assert message.startswith("test.yaml:10: trials.program.argv.1: found {t}, which is no")
    assert "did you mean {tp}?" in message
    assert "micro_batch_size" in message


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("", {"argv": ["x", "{"]}, r"10: .*argv\.1: .*a brace that belongs to no placeholder"),
    ("", {"argv": ["x", "a{megatron_flags}"]}, r"10: .*argv\.1: .*has to be one of its own"),
    ("", {"argv": ["x", "a\0b"]}, r"10: .*argv\.1: .*can hold a zero byte"),
    ("environment: {A: '{tq}'}", {}, r"9: .*environment\.A: found {tq}, which is no placeholder\."),
    ("environment: {A: '{megatron_flags}'}", {}, r"9: .*environment\.A: .* one of its own"),
    ('environment: {A: "\\0"}', {}, r"9: .*environment\.A: .*zero byte"),
    ("environment: {'A=B': x}", {}, "9: .*environment.*'A=B'; a variable's name has letters"),
    ("environment: {A;$(id): x}", {}, r"9: .*environment.*'A;\$\(id\)'; a variable's name has"),
    ("environment: {Aä: x}", {}, "9: .*environment.*'Aä'; a variable's name has letters"),
    ("launcher: deepspeed", {}, r"trials\.launcher: found 'deepspeed' .* with per: node"),
    *(
        ("", {"cwd": folder}, r"trials\.program\.cwd: found .* from the root")
        for folder in ("code", "~/code", "{trial_dir}", "/a\0")
    ),
    ("", {"collect": ["*", "a/*"]}, r"collect\.1: found 'a/\*'"),
    *(
        ("", {"files": ["a", name]}, r"11: trials\.program\.files\.1: found .*no file")
        for name in (".", "..", "a/..", "/")
    ),
    ("", {"files": ["a", "../a"]}, r"files\.1: found '\.\./a', which would be 'a'.* as 'a'"),
    *(
        ("", {"files": [name]}, r"files\.0: found .* of its own: rename yours")
        for name in (
            *("ds_config.json", "hostfile", "strategy.json", "amp_ray_metric.py"),
            *("result.json", "rank-0.log", "metric-rank-3.json", "../hostfile"),
        )
    ),
)


@pytest.mark.parametrize(("key", "program", "message"), REFUSED)
def test_what_no_strategy_could_launch_is_refused(
    key: str, program: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_program(experiment(f"  {key}\n" if key else "", **{"argv": ["x"], **program}))

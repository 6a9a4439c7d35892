"""Trials of users' own programs on this machine."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.hosts.host import LocalHost
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.program_files import program_files
from amp_ray.search.planner import make_planner
from amp_ray.search.space import uniform_candidates
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy
from amp_ray.trials.command import trial_launch, trial_reader
from amp_ray.trials.outcome import Crashed, Measured, Outcome
from support.checked import grid_of, required
from support.experiments import small_experiment

pytestmark = pytest.mark.integration

HOSTS = ("node0", "node1")
HOSTILE = (
    "it's",
    'a "b"',
    "; touch x",
    "$(touch x)",
    "`touch x`",
    "a\nb",
    " a  b ",
    "*",
    "ü",
    "\\",
)

Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """A launcher on two hosts for all tests; checks at the end that no file of a trial is left."""
    base = tmp_path_factory.mktemp("hosts") / "base; $(with) 'quotes'"
    settings = AgentSettings(base=str(base), grace_s=0.2)
    with Launcher([LocalHost(name) for name in HOSTS], settings) as opened:
        yield opened
    assert list(base.glob("*")) == []


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    """Run the program of an experiment; its files are read and sent as for every trial."""

    def start(experiment: Experiment, strategy: Strategy, *, files: str = "") -> Outcome:
        launch = trial_launch(
            experiment,
            strategy,
            trial_id="t",
            hosts=HOSTS[: len(experiment.cluster.nodes)],
            files=program_files(experiment, Path(files or tmp_path)),
            python=sys.executable,
        )
        folder = tmp_path / f"trial {len(list(tmp_path.glob('trial *')))}"
        return launcher.run(launch, folder, reader=trial_reader(experiment))

    return start


def needs(*names: str) -> None:
    """Skip a test whose program imports a package that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'amp-ray[training]'")


def experiment(program: str, *arguments: str, trials: str = "", **keys: Any) -> Experiment:  # noqa: ANN401
    """Return an experiment with four CPU slots on two hosts, and a Python program."""
    section = {"argv": ["{python}", "-c", program.replace("{", "{{").replace("}", "}}")], **keys}
    section["argv"] += arguments
    lines = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in section.items())
    text = f"trials:\n  steps: 3\n  warmup_steps: 1\n  timeout_s: 600\n{trials}  program:\n{lines}"
    return small_experiment(
        ("device: T4", "device: cpu"),
        ("global_batch_size: 8\n", f"precision: fp32\nglobal_batch_size: 8\n{text}"),
    )


def strategy(**changes: Any) -> Strategy:  # noqa: ANN401 - any key of a candidate
    values = {"pp": 2, "micro_batch_size": 2, "num_micro_batches": 2}
    options = StageOptions(tp=changes.pop("tp", 1), dp=changes.pop("dp", 2))
    candidate = Candidate(options=options, **{**values, **changes})
    return Strategy.uniform(candidate, (0, 4, 9) if candidate.pp == 2 else (0, 9))


TELL = "import amp_ray_metric; amp_ray_metric.report_iteration_times([9, 3, 1, 2])\n"


def test_a_line_that_looks_like_one_of_our_events_is_the_programs_own(
    run: Run, tmp_path: Path
) -> None:
    line = '{"event": "failed", "cause": "oom", "message": "my own log"}'
    outcome = run(experiment(f"print('{line}')\n{TELL}"), strategy())
    assert isinstance(outcome, Measured), outcome
    assert line in log(tmp_path, 0)
    (events,) = tmp_path.glob("trial 0/events.jsonl")
    assert '"said"' not in events.read_text(encoding="utf-8")


def log(tmp_path: Path, rank: int) -> str:
    (path,) = tmp_path.glob(f"trial 0/hosts/*/rank-{rank}.log")
    return path.read_text(encoding="utf-8")


# ----------------------------------------------------------------------- the documented example


def example(repository: Path, language: str) -> str:
    """Return the document's first code block in a language."""
    text = (repository / "docs/own-program.md").read_text(encoding="utf-8")
    block = required(re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return block[1]


def test_the_documented_example_is_planned_and_measured(
    run: Run, tmp_path: Path, repository: Path
) -> None:
    needs("torch")
    folder = tmp_path / "a user's folder"
    folder.mkdir()
    (folder / "train.py").write_text(example(repository, "python"), encoding="utf-8")
    path = folder / "experiment.yaml"
    path.write_text(example(repository, "yaml"), encoding="utf-8")
    described = load_experiment(path)
    planner = make_planner(described, "amp-ray")
    results = [planner.plan(candidate) for candidate in uniform_candidates(described)]
    strategies = [result.strategy for result in results if isinstance(result, Estimate)]
    assert {(chosen.tp, chosen.pp, chosen.dp) for chosen in strategies} == {(1, 1, 2)}
    assert len(strategies) >= 2
    outcome = run(described, strategies[0], files=str(folder))
    assert isinstance(outcome, Measured), outcome
    trials = described.trials
    assert len(outcome.step_time_s) == trials.num_steps + trials.num_warmup_steps
    assert outcome.num_warmup_steps >= trials.num_warmup_steps
    assert 0 < outcome.measured_s < outcome.wall_s


# --------------------------------------------------------------------------------- delivered files


def test_hostile_arguments_arrive_unchanged(run: Run, tmp_path: Path) -> None:
    program = TELL + "import json, sys; print(json.dumps(sys.argv[1:]))"
    assert isinstance(run(experiment(program, *HOSTILE), strategy()), Measured)
    assert json.loads(log(tmp_path, 3)) == [*HOSTILE]


def test_files_variables_and_folder_are_the_users(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/__init__.py").write_text("NAME = 'mine'\n", encoding="ascii")
    (tmp_path / "code").mkdir()
    program = TELL + "import net, os; print(net.NAME, os.environ['A'], os.getcwd())"
    described = experiment(
        program,
        files=["net/__init__.py"],
        cwd=str(tmp_path / "code"),
        trials='  environment: {A: "{dp} $HOME {{}}"}\n',
    )
    assert isinstance(run(described, strategy()), Measured)
    assert log(tmp_path, 1) == f"mine 2 $HOME {{}} {tmp_path / 'code'}\n"


# ------------------------------------------------------------------------------ measurements


def test_torchrun_starts_the_ranks_of_a_node(run: Run) -> None:
    needs("torch")
    inner = "import os\nfor n in range(1, 5): print(f'took {n}.{os.environ[\"RANK\"]}', flush=True)"
    argv = [
        *("{python}", "-m", "torch.distributed.run", "--tee=3", "--nnodes={num_nodes}"),
        *("--nproc-per-node={slots_per_node}", "--node-rank={node_rank}"),
        *("--master-addr={master_addr}", "--master-port={master_port}"),
        *("--no-python", "{python}", "-c"),
    ]
    escaped = inner.replace("{", "{{").replace("}", "}}")
    metric = {"pattern": "^took (.*)$"}
    outcome = run(experiment("", argv=[*argv, escaped], per="node", metric=metric), strategy())
    assert isinstance(outcome, Measured), outcome
    assert outcome.step_time_s == (1.3, 2.3, 3.3, 4.3)


DEEPSPEED_PROGRAM = """
import os, sys
import deepspeed, torch
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, for minutes
deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config, steps, micro_batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(steps * micro_batches):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # as our own program does: gloo's threads may end an exit in order by a signal
"""


def test_deepspeeds_engine_logs_what_is_read(run: Run) -> None:
    needs("torch", "deepspeed")
    described = experiment(
        DEEPSPEED_PROGRAM,
        *("{ds_config}", "{total_steps}", "{num_micro_batches}"),
        metric="deepspeed",
        trials="  environment: {DS_ACCELERATOR: cpu}\n",
    )
    # One rank on each host: rank 0's log has to be found among the files of both hosts.
    candidate = grid_of(dp=2, micro_batch_size=2, num_micro_batches=2)
    outcome = run(described, Strategy.uniform(candidate, (0, 9), (2, 0)))
    assert isinstance(outcome, Measured), outcome
    # The program measures from the third of its four steps on.
    assert len(outcome.step_time_s) == 2


# ----------------------------------------------------------------------------------- failures


def test_a_metric_that_never_appears_crashes_with_the_pattern_and_the_last_lines(run: Run) -> None:
    program = "import os\nfor n in range(30): print(os.environ['RANK'], n)\n"
    pattern = r"took ([0-9.]+) \w+"
    outcome = run(experiment(program, metric={"pattern": pattern}), strategy())
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "no-result"
    assert repr(pattern) in outcome.reason
    assert "rank-0.log, rank-1.log, rank-2.log, rank-3.log" in outcome.reason
    assert outcome.lines == tuple(f"0 {n}" for n in range(10, 30))


def test_a_rank_that_fails_after_telling_its_times_is_no_measurement(run: Run) -> None:
    program = TELL + "import os, sys; sys.exit('broken' if os.environ['RANK'] == '2' else 0)"
    outcome = run(experiment(program), strategy())
    assert isinstance(outcome, Crashed)
    assert (outcome.kind, outcome.rank, outcome.host) == ("crash", 2, "node1")
    assert outcome.lines[-1] == "broken"


def test_a_program_that_does_not_exist_is_told(run: Run) -> None:
    described = experiment("", argv=["no such program"])
    outcome = run(described, strategy())
    assert isinstance(outcome, Crashed)
    assert outcome.kind == "start"
    assert "no such program" in outcome.reason

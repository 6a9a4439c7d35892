"""Time a study of 10,000 trials: how it is resumed, how it decides, and what memory it takes.

The journal is written as a driver writes it, but
without waiting for the disk; each figure is told by a process of its own, together with its memory.
Strategies have random cuts; they took what is predicted, with 5 % of noise, in 20 steps each.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from amp_ray.__main__ import main as main_command
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.study import events as study_events
from amp_ray.runtime.study.folder import JOURNAL, open_study
from amp_ray.runtime.study.journal import encode
from amp_ray.runtime.study.pool import Task
from amp_ray.runtime.study.space import TuneOptions
from amp_ray.runtime.study.tuning import Tuning, begin_state, prepare, study_header
from amp_ray.trials.outcome import Measured
from amp_ray.tuner.calibrated_predictions import BoundedPredictor
from amp_ray.tuner.knowledge import learn
from amp_ray.tuner.policy import next_trials
from amp_ray.tuner.state import Trial, TunerState, record, start

REPOSITORY: Final = Path(__file__).resolve().parents[2]
EXPERIMENT: Final = REPOSITORY / "experiments" / "homogeneous.yaml"
NUM_TRIALS: Final = 10_000
NUM_SPARE: Final = 100  # strategies that nobody has run
NUM_LAYERS: Final = 30
NUM_STEPS: Final = 20
NOISE: Final = 0.05
DEGREES: Final = ((1, 4, 4), (1, 8, 2), (2, 4, 2), (2, 8, 1), (4, 4, 1))  # tp, pp, dp
MICRO_BATCH_SIZES: Final = (1, 2, 4)
KIB: Final = 2**10
MIB: Final = 2**20
MEGA: Final = 1e6
COLUMNS: Final = ("what", "measured", "target", "remark")

NO_STUDY: Final = "numpy and compiled code; scoring the table"
RESUME: Final = "from the folder to the tuner's state"
DECIDE: Final = "with calibration and every prediction anew"

Row = dict[str, str]


def rows() -> Iterator[Row]:
    """Make the study, and measure it in other processes; one table row each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_study(folder)
        size = (folder / "study" / JOURNAL).stat().st_size / MIB
        num = f"{NUM_TRIALS:,} trials"
        yield _row(folder, "nothing", "interpreter, imports, 10,100 strategies", ["", NO_STUDY])
        yield _row(folder, "journal", f"read {num}, {size:.0f} MiB", ["", ""])
        yield _row(folder, "resume", f"resume {num}", ["2 s, 200 MB more", RESUME])
        yield _row(folder, "decide", "resume and choose the next trial", ["", DECIDE])
        yield _row(folder, "again", "choose the one after that", ["", "what each trial costs"])
        whole = ["", "score, resume, certify, write all results"]
        yield _row(folder, "command", "amp-ray tune --resume, in all", whole)


def main(folder: Path, what: str) -> None:
    """Print one figure, in a process of its own."""
    if what == "command":
        run_command(folder)
    else:
        tell(folder, what)


# ------------------------------------------------------------------------- the study


def write_study(folder: Path) -> None:
    """Write a table of strategies, and the folder of a study in which most of them have run."""
    (folder / "table.csv").write_text(_table(), encoding="utf-8")
    tuning = prepared(folder)
    state = begin_state(tuning.experiment, tuning.space, tuning.options)
    study, cluster = folder / "study", tuning.experiment.cluster
    header = study_header(tuning.experiment, tuning.options)
    with open_study(study, header, resume=False) as opened:
        study_id = opened.study_id
    rng = np.random.default_rng(0)
    number = 1
    with (study / JOURNAL).open("ab") as file:
        for place in rng.permutation(len(state.candidates))[:NUM_TRIALS]:
            estimate = state.candidates[place]
            trial = Trial(
                number=number // 2,
                strategy=estimate.strategy,
                predicted_s=estimate.iteration_time_s,
                sigma=NOISE,
                repeats=None,
                reason="most to gain of 10000 feasible strategies: 50 % chance to be faster",
            )
            task = _task(study, study_id, trial)
            times_s = estimate.iteration_time_s * (1 + NOISE * rng.standard_normal(NUM_STEPS))
            began = study_events.started(trial, task, 0, cluster, float(number))
            ended = study_events.ended(task, _measured(times_s), number + 1.0)
            file.write(encode(number, began) + encode(number + 1, ended))
            number += 2


def prepared(folder: Path) -> Tuning:
    """Score the table's strategies, as ``amp-ray tune`` does first."""
    options = TuneOptions(backend="replay", table=folder / "table.csv", budget=2 * NUM_TRIALS)
    return prepare(load_experiment(EXPERIMENT), options, lambda _done, _total: None)


def _table() -> str:
    """Return strategies with random cuts, each once, as a table that answers."""
    rng = np.random.default_rng(1)
    found: dict[str, None] = {}
    while len(found) < NUM_TRIALS + NUM_SPARE:
        tp, pp, dp = DEGREES[rng.integers(len(DEGREES))]
        cuts = np.sort(rng.choice(np.arange(1, NUM_LAYERS), pp - 1, replace=False))
        bounds = " ".join(map(str, [0, *cuts, NUM_LAYERS]))
        found[f"{tp},{pp},{dp},{rng.choice(MICRO_BATCH_SIZES)},{bounds},2.0"] = None
    return "\n".join(["tp,pp,dp,micro_batch_size,bounds,measured_s", *found]) + "\n"


def _task(study: Path, study_id: str, trial: Trial) -> Task:
    """Return the only attempt at a trial."""
    return Task(
        number=trial.number,
        attempt=0,
        trial_id=f"{study_id}-{trial.number:04d}-0",
        strategy=trial.strategy,
        folder=study / "trials" / f"{trial.number:04d}-0",
    )


def _measured(times_s: np.ndarray) -> Measured:
    """Return the outcome of a trial with these steps."""
    low, middle, high = np.quantile(times_s, [0.25, 0.5, 0.75])
    return Measured(
        measured_s=float(middle),
        mean_s=float(times_s.mean()),
        spread_s=float(high - low),
        step_time_s=tuple(map(float, times_s)),
        num_warmup_steps=0,
        peak_memory_bytes=(4 * 2**30,),
        wall_s=float(times_s.sum()),
    )


# ------------------------------------------------------------------------- in other processes


def tell(folder: Path, what: str) -> None:
    """Measure one thing and print it with the memory of this process."""
    tuning = prepared(folder)
    state = begin_state(tuning.experiment, tuning.space, tuning.options)
    measure = {"journal": _read, "resume": _resume, "decide": _decide, "again": _again}.get(what)
    seconds = time.process_time() if measure is None else measure(folder / "study", tuning, state)
    _print_told(seconds)


def run_command(folder: Path) -> None:
    """Run the whole command in this process; the study's budget is spent, so it shows the end."""
    argv = ["amp-ray", "tune", str(EXPERIMENT), "--resume"]
    argv += ["--trials", f"replay:{folder / 'table.csv'}", "--budget", str(NUM_TRIALS)]
    argv += ["--study", str(folder / "study"), "--json", str(folder / "result.json")]
    sys.argv = argv
    with contextlib.suppress(SystemExit):
        main_command()
    assert (folder / "result.json").exists(), argv
    _print_told(time.process_time())


def _print_told(seconds: float) -> None:
    """Print what a process has taken.

    Its peak is that of its own memory: what ``getrusage`` tells may be its parent's.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    print(json.dumps({"seconds": seconds, "peak_mb": int(line.split()[1]) * KIB / MEGA}))


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of an action, and what it returns."""
    start_s = time.process_time()
    result = action()
    return time.process_time() - start_s, result


def _read(study: Path, tuning: Tuning, _state: TunerState) -> float:
    """Open the folder, which reads the journal."""
    header = study_header(tuning.experiment, tuning.options)

    def read() -> int:
        with open_study(study, header, resume=True) as opened:
            return len(opened.journal.records)

    seconds, number = _timed(read)
    assert number == 1 + 2 * NUM_TRIALS
    return seconds


def _rebuilt(study: Path, tuning: Tuning, state: TunerState) -> TunerState:
    """Resume a study."""
    header = study_header(tuning.experiment, tuning.options)
    with open_study(study, header, resume=True) as opened:
        events = opened.journal.records[1:]
        rebuilt = study_events.rebuild(state, events, file=JOURNAL)
    assert len(rebuilt.state.trials) == NUM_TRIALS
    assert not rebuilt.open
    return rebuilt.state


def _resume(study: Path, tuning: Tuning, state: TunerState) -> float:
    """Resume a study."""
    return _timed(lambda: _rebuilt(study, tuning, state))[0]


def _decide(study: Path, tuning: Tuning, state: TunerState) -> float:
    """Resume a study, and choose what it runs next."""
    return _timed(lambda: _next(_rebuilt(study, tuning, state), BoundedPredictor()))[0]


def _again(study: Path, tuning: Tuning, state: TunerState) -> float:
    """Choose what runs next when one more trial has ended."""
    predictor = BoundedPredictor()
    state = _rebuilt(study, tuning, state)
    trial = _next(state, predictor)
    more = _ended(state, trial)
    return _timed(lambda: _next(more, predictor))[0]


def _ended(state: TunerState, trial: Trial) -> TunerState:
    """Return the study after one more trial."""
    outcome = _measured(np.full(NUM_STEPS, trial.predicted_s))
    return record(start(state, trial), trial.number, outcome)


def _next(state: TunerState, predictor: BoundedPredictor) -> Trial:
    """Learn from all trials, and choose one more."""
    [trial] = next_trials(state, 1, predictor, learn(state, predictor))
    return trial


def _row(folder: Path, what: str, name: str, remarks: list[str]) -> Row:
    """Have a process of its own measure something."""
    argv = [sys.executable, __file__, str(folder), what]
    ended = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    told = json.loads(ended.stdout.splitlines()[-1])
    measured = f"{told['seconds']:.2f} s CPU, {told['peak_mb']:.0f} MB"
    return dict(zip(COLUMNS, [name, measured, *remarks], strict=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

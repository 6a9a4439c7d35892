"""Trials of tiny models as local processes, from one warm process per test session."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from amp_ray.cost.instructions import Schedule
from amp_ray.inputs.experiment import Experiment
from amp_ray.training.events import EXIT_CODES
from support.experiments import experiment_from
from support.losses import TOLERANCE, largest_difference

DEADLINE_S = 600.0
"""Limit against hangs; a trial here takes 1 to 3 s."""

GRACE_S = 60.0
"""Maximum time for the other ranks to notice that a rank has failed."""

PORTS_TO_TRY = 5
"""Ports of one trial; another process may take the port that was free a moment ago."""

WARM_RANKS = Path(__file__).with_name("warm_ranks.py")
REPOSITORY = Path(__file__).parents[3]

GPT2: dict[str, Any] = {
    "family": "gpt2",
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 4,
    "num_key_value_heads": 4,
    "feed_forward_size": 128,
    "sequence_length": 16,
    "vocab_size": 61,
    "tied_embedding": True,
}
LLAMA: dict[str, Any] = {
    **GPT2,
    "family": "llama",
    "num_key_value_heads": 2,
    "feed_forward_size": 64,
    "vocab_size": 64,
    "tied_embedding": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "expert_feed_forward_size": 24}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tied_embedding": False},
    "gpt2-3-heads": {
        **GPT2,
        "hidden_size": 24,
        "num_heads": 3,
        "num_key_value_heads": 3,
        "feed_forward_size": 96,
    },
    "llama": LLAMA,
    "mixtral": {**LLAMA, "head_size": 16, **EXPERTS, "experts_per_token": 2},
    "shared-experts": {
        **GPT2,
        **EXPERTS,
        "experts_per_token": 1,
        "shared_feed_forward_size": 16,
        "first_dense_layers": 1,
    },
    "transgan": {
        "family": "transgan",
        "depth": [2, 0, 2],
        "hidden_size": 64,
        "num_heads": 4,
        "bottom_width": 2,
        "latent_size": 13,
        "window_size": 2,
    },
}
NUM_TEXT_LAYERS = 7
NUM_IMAGE_LAYERS = 6
TEXT_LEARNING_RATE = 0.5
IMAGE_LEARNING_RATE = 0.01
GLOBAL_BATCH_SIZE = 8


def gpt2(**changes: int) -> dict[str, Any]:
    """Return the tiny GPT-2 with other sizes."""
    sizes = {**GPT2, **changes}
    return {**sizes, "feed_forward_size": 4 * sizes["hidden_size"]}


def free_port() -> int:
    """Return a free port that the kernel chooses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_job(model: str, **changes: object) -> dict[str, Any]:
    """Return a job of one rank; keys of the strategy and of the job may be changed."""
    image = model == "transgan"
    strategy: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1, "micro_batch_size": GLOBAL_BATCH_SIZE}
    names = (
        *(*strategy, "bounds", "recompute", "placement", "stages"),
        *("num_micro_batches", "virtual_stages", "token_slices", "cp", "ep", "etp"),
        *("sequence_parallel", "shard_ranks", "reshard_after_forward"),
    )
    strategy |= {key: changes.pop(key) for key in names if key in changes}
    strategy.setdefault("bounds", [0, NUM_IMAGE_LAYERS if image else NUM_TEXT_LAYERS])
    if "num_micro_batches" not in strategy:
        samples = strategy["dp"] * strategy["micro_batch_size"]
        strategy["num_micro_batches"] = GLOBAL_BATCH_SIZE // samples
    return {
        "trial_id": "trial-1",
        "model": MODELS[model],
        "strategy": strategy,
        "precision": "fp32",
        "optimizer": "sgd",
        "learning_rate": IMAGE_LEARNING_RATE if image else TEXT_LEARNING_RATE,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "steps": 5,
        "warmup_steps": 2,
        "seed": 11,
        "device": "cpu",
        "communication_timeout_s": 300,
        **changes,
    }


def num_ranks(strategy: dict[str, Any]) -> int:
    """Return the number of processes of a strategy."""
    if strategy["tp"] is None:
        return sum(stage["tp"] * stage["dp"] for stage in strategy["stages"])
    return int(strategy["tp"] * strategy.get("cp", 1) * strategy["pp"] * strategy["dp"])


@dataclass(kw_only=True)
class Ended:
    """A trial that has ended.

    Args:
        folder: Folder with the trial's files.
        codes: Exit code per rank.
    """

    folder: Path
    codes: list[int]

    @property
    def result(self) -> dict[str, Any]:
        """Content of the result file; fails with the events of all ranks if there is none."""
        path = self.folder / "result.json"
        assert path.exists(), self.failures() or self.codes
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    @property
    def timeline(self) -> dict[str, Any]:
        """Content of the file with all ranks' instructions in the last step."""
        content: dict[str, Any] = json.loads((self.folder / "timeline.json").read_text())
        return content

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the events that a rank wrote to stdout; every line must be one."""
        return [json.loads(line) for line in (self.folder / f"{rank}.out").read_text().splitlines()]

    def failures(self) -> list[dict[str, Any]]:
        """Return the events of the ranks that failed."""
        ranks = range(len(self.codes))
        return [
            event for rank in ranks for event in self.events(rank) if event["event"] == "failed"
        ]


@dataclass(kw_only=True)
class WarmRanks:
    """The warm process and the trials that it has run.

    Args:
        process: The process that runs ``warm_ranks.py``.
        threads: Threads of the process after all imports.
        ended: Trials without a fault, by job: equal jobs run once.
    """

    process: subprocess.Popen[str]
    threads: int
    ended: dict[str, Ended] = field(default_factory=dict)

    def run(
        self,
        job: dict[str, Any],
        folder: Path,
        profile: dict[str, Any] | None = None,
        **changes: object,
    ) -> Ended:
        """Run a trial, or measure the points of ``profile``; ``changes`` is for the request.

        Where another process takes the port before rank 0 does, the trial runs again, as the
        launcher does it.
        """
        for attempt in range(1, PORTS_TO_TRY):
            ended = self._run(job, folder / str(attempt), profile, **changes)
            if "port" in changes or EXIT_CODES["port_taken"] not in ended.codes:
                return ended
        return self._run(job, folder / "last", profile, **changes)

    def _run(
        self,
        job: dict[str, Any],
        folder: Path,
        profile: dict[str, Any] | None,
        **changes: object,
    ) -> Ended:
        folder.mkdir()
        trial = {**job, "out_dir": str(folder)}
        request = {
            "job": trial if profile is None else {"trial": trial, **profile},
            "num_ranks": num_ranks(job["strategy"]),
            "port": free_port(),
            "folder": str(folder),
            "deadline_s": DEADLINE_S,
            "grace_s": GRACE_S,
            **changes,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Ended(folder=folder, codes=json.loads(self.process.stdout.readline()))


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmRanks]:
    """One process that has imported torch and DeepSpeed and forks the ranks of every trial."""
    missing = [name for name in ("torch", "deepspeed") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed: pip install 'amp-ray[training]'")
    with subprocess.Popen(
        [sys.executable, str(WARM_RANKS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        threads = json.loads(process.stdout.readline())["threads"]
        yield WarmRanks(process=process, threads=threads)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def run_trial(
    warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ended]:
    """Return a function that runs a job in a new folder, unless the same job has run before."""

    def run(job: dict[str, Any], **changes: Any) -> Ended:  # noqa: ANN401 - keys of a request
        key = json.dumps(job)
        if changes or key not in warm_ranks.ended:
            ended = warm_ranks.run(job, tmp_path_factory.mktemp("trial"), **changes)
            if changes:
                return ended
            warm_ranks.ended[key] = ended
        return warm_ranks.ended[key]

    return run


def check_timeline(ended: Ended, schedule: Schedule) -> None:
    """Check that ranks executed a schedule's instructions in order, at plausible times."""
    assert (ended.timeline["trial_id"], ended.timeline["step"]) == ("trial-1", 6)
    begins: dict[str, float] = {}
    for rank in ended.timeline["ranks"]:
        spans = rank["instructions"]
        instructions = [str(item) for item in schedule.instructions(rank["stage"])]
        assert [instruction for instruction, _, _ in spans] == instructions
        moments = [moment for _, begin_s, end_s in spans for moment in (begin_s, end_s)]
        assert moments == sorted(moments)
        assert moments[-1] - moments[0] <= ended.result["step_s"][-1]
        begins |= {instruction: begin_s for instruction, begin_s, _ in spans}
    # All times are on one clock: a message is received after it was sent.
    first, second = (
        next(begin_s for name, begin_s in begins.items() if name.startswith(f"{stage}F0"))
        for stage in (0, 1)
    )
    assert first < second
    assert min(begins.values()) == 0


@pytest.fixture
def trains_as_one_rank(run_trial: Callable[..., Ended]) -> Callable[..., None]:
    """Return a function that trains with a strategy and compares the losses with one rank's."""

    def check(
        model: str, changes: dict[str, Any], *, tolerance: float = TOLERANCE, **both: object
    ) -> None:
        """Compare a job with ``changes`` to one rank without them; both jobs have keys ``both``."""
        reference = run_trial(make_job(model, **both)).result["losses"]
        ended = run_trial(make_job(model, **{**both, **changes}))
        assert largest_difference(ended.result["losses"], reference) < tolerance
        assert set(ended.codes) == {0}

    return check


def planned(model: str, search: str = "{}") -> Experiment:
    """Return an experiment with a model of these tests, for runtime torch."""
    figures = dict(MODELS[model])
    if figures["family"] == "gpt2":
        del figures["num_key_value_heads"]  # not a key of the file
    shape = ", ".join(f"{key}: {json.dumps(value)}" for key, value in figures.items())
    links = "intra_gbit_per_s: 10, inter_gbit_per_s: 10"
    return experiment_from(
        f"""
        name: planned
        model: {{{shape}}}
        cluster: {{nodes: [{{device: cpu, slots: 4, {links}}}]}}
        precision: fp32
        optimizer: sgd
        runtime: torch
        global_batch_size: {GLOBAL_BATCH_SIZE}
        search: {search}
        trials: {{backend: local, steps: 4, warmup_steps: 2, timeout_s: {DEADLINE_S}}}
        """
    )

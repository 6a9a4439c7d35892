"""Data between controller and hosts over SSH: results of all ranks, and long logs."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import pytest

from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.trials.outcome import Crashed, Measured
from amp_ray.trials.own_program.metrics import METRIC_FILES, read_told
from amp_ray.trials.result import Measurement

from .conftest import Bench

pytestmark = pytest.mark.hosts

HELPER = (resources.files("amp_ray") / "runtime/launch/metric_helper.py").read_bytes()

STEPS = """
os.environ["AMP_RAY_TRIAL_ID"] = sys.argv[1]
sys.path.insert(0, os.getcwd())
import amp_ray_metric
for _ in range(3):
    amp_ray_metric.report_step(1.0 if rank == 1 else 0.1)
"""

FILL = """
if rank == 1:
    with open("filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass
"""


def read(files: Mapping[str, bytes], trial_id: str) -> Measurement:
    return read_told(files, trial_id, num_warmup_steps=1)


def test_a_slow_rank_whose_disk_is_full_at_its_end_is_missed(
    small_bench: Bench, tmp_path: Path
) -> None:
    files = {"amp_ray_metric.py": HELPER}
    collect = ("rank-*.log", METRIC_FILES)
    with small_bench.launcher() as launcher:
        well = small_bench.launch(STEPS, files=files, collect=collect)
        outcome = launcher.run(well, tmp_path / "well", reader=read)
        assert isinstance(outcome, Measured), outcome
        assert outcome.measured_s == 1.0
        full = small_bench.launch(STEPS + FILL, files=files, collect=collect)
        outcome = launcher.run(full, tmp_path / "full", reader=read)
    assert isinstance(outcome, Crashed), outcome
    assert (outcome.kind, outcome.rank) == ("disk", 1)
    assert outcome.host == small_bench.cluster.hosts[1].address


def test_long_logs_of_many_ranks_are_no_reason_to_lose_a_host(
    bench: Bench, launcher: Launcher
) -> None:
    program = "result()\nline = b'some text of a rank that talks a lot\\n' * 25_000\n"
    program += "for _ in range(18): os.write(1, line)"
    outcome = bench.run(launcher, program, slots=4)
    assert isinstance(outcome, Measured), outcome
    folder = bench.folder / f"trial-{bench.num_trials}" / "hosts"
    assert len([*folder.glob("*/rank-*.log")]) == 8

"""The warm agent: modules are imported once, ranks are forked."""

import sys
from typing import TYPE_CHECKING

import pytest

from amp_ray.trials.launch import WarmUp
from amp_ray.trials.outcome import Crashed, Measured
from support.launching import warm

if TYPE_CHECKING:
    from tests.hosts.conftest import Bench

pytestmark = pytest.mark.hosts

WARM_UP = WarmUp(python=sys.executable, modules=("decimal", "gc:collect"))


def were_warm(bench: "Bench") -> list[bool]:
    return [event["warm"] for event in bench.events() if event["kind"] == "started"]


def test_ranks_are_forked_and_nothing_but_the_warm_process_stays(bench: "Bench") -> None:
    with bench.launcher(warm_up=WARM_UP) as launcher:
        assert [answer["problem"] for answer in warm(launcher).values()] == ["", ""]
        before = [bench.cluster.programs(host) for host in bench.cluster.hosts]
        program = "assert 'decimal' in sys.modules\nimport decimal\nresult()"
        assert isinstance(bench.run(launcher, program, slots=2), Measured)
        assert were_warm(bench) == [True] * 4
        outcome = bench.run(launcher, "os.setsid(); sys.exit(rank)")
        assert isinstance(outcome, Crashed)
        assert outcome.rank == 1
        assert isinstance(bench.run(launcher, "result()"), Measured)
        assert [bench.cluster.programs(host) for host in bench.cluster.hosts] == before
    bench.wait_for(lambda: not any(bench.cluster.programs(host) for host in bench.cluster.hosts))


def test_a_fork_gets_arguments_variables_folder_and_output_like_a_fresh_process(
    bench: "Bench",
) -> None:
    program = """
assert sys.argv[2:] == ["a b", "$(c)"], sys.argv
assert os.environ["X"] == "it's" and "PYTHONPATH" not in os.environ
assert os.getcwd() == os.environ["AMP_RAY_FOLDER"] and sys.path[0] == os.getcwd()
assert sys.stdin.read() == ""
import helper
print("line"); print("other", file=sys.stderr)
result()
"""
    files = {"helper.py": b"x = 1"}
    with bench.launcher(warm_up=WARM_UP) as launcher:
        warm(launcher)
        outcome = bench.run(
            launcher, program, arguments=["a b", "$(c)"], files=files, environment={"X": "it's"}
        )
    assert isinstance(outcome, Measured), outcome
    assert were_warm(bench) == [True] * 2
    log = bench.folder / "trial-1/hosts" / bench.cluster.hosts[0].address / "rank-0.log"
    assert log.read_text(encoding="utf-8") == "line\nother\n"


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("no_such_module", "ModuleNotFoundError"),
        ("threaded", "the imports started 1 threads"),
    ],
)
def test_where_forking_is_not_safe_ranks_start_afresh(
    bench: "Bench", module: str, problem: str
) -> None:
    (bench.folder / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
        encoding="ascii",
    )
    # The disks of test hosts are private, the file system below is not.
    environment = {"PYTHONPATH": str(bench.folder)}
    warm_up = WarmUp(python=sys.executable, modules=(module,), environment=environment)
    with bench.launcher(warm_up=warm_up) as launcher:
        answers = warm(launcher)
        assert all(problem in answer["problem"] for answer in answers.values())
        assert isinstance(bench.run(launcher, "result()"), Measured)
    assert were_warm(bench) == [False] * 2


def test_a_missing_interpreter_is_told(bench: "Bench") -> None:
    warm_up = WarmUp(python="/no such/python", modules=())
    with bench.launcher(warm_up=warm_up) as launcher:
        answers = warm(launcher)
    assert all("/no such/python" in answer["problem"] for answer in answers.values())

"""`make net`: compare the package's answers with the recorded ones; `RECORD=yes` records them."""

import argparse
import json
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from itertools import islice
from multiprocessing import get_context
from typing import Any, Final

from net.comparing import differences, layout
from net.coverage import listed_values, missing
from net.running import answer
from net.table import ANSWERS, Case, Table, read_table

_SHOWN: Final = 3  # maximum number of differences to print per case
_CHANGED, _SAME = 1, 0


def main() -> int:
    """Run the requested cases; return the exit code."""
    options = _options()
    table = read_table()
    cases = [case for case in table.cases if fnmatch(case.name, options.only)]
    complete = _say_coverage(table)
    changed = list(_changed(cases, options.jobs, record=options.record))
    stale = _stale(table, record=options.record) if options.only == "*" else []
    if changed or stale or not complete:
        print(f"{len(changed)} of {len(cases)} cases differ, {len(stale)} answers without a case")
        return _SAME if options.record and complete else _CHANGED
    print(f"same to 12 digits: {len(cases)} cases, {_cpu_s():.0f} s of CPU")
    return _SAME


def _cpu_s() -> float:
    """Return the CPU seconds of the workers."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="net", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what differs as answers")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cases, as plan/gpt2/*")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    return parser.parse_args()


def _say_coverage(table: Table) -> bool:
    """Print which listed values the cases cover; return whether they cover all."""
    complete = True
    for listed in table.listed:
        values, uncovered = listed_values(listed), missing(listed, table.cases)
        num = len(values) - len(uncovered) - len(set(values) & set(listed.left_out))
        print(f"covered: {num} of {len(values)} {listed.name}", end="")
        print(f"; NO CASE: {', '.join(uncovered)}" if uncovered else "")
        complete &= not uncovered
    return complete


def _changed(cases: Sequence[Case], jobs: int, *, record: bool) -> Iterator[Case]:
    """Yield the cases that differ from their record, and print how; ``record`` records them."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for case, now in zip(cases, pool.map(answer, cases), strict=True):
            shown = list(islice(changes(case, now), _SHOWN))
            if shown:
                print(f"{case.name}: {shown[0]}", *shown[1:], sep="\n    ", flush=True)
                if record and all(step["code"] is not None for step in now):
                    case.answer.parent.mkdir(parents=True, exist_ok=True)
                    case.answer.write_text(layout(now) + "\n", encoding="utf-8")
                yield case


def changes(case: Case, now: Any) -> Iterator[str]:  # noqa: ANN401 - a JSON value
    """Yield the differences between an answer and the recorded one."""
    if not case.answer.exists():
        yield "nothing is recorded"
        return
    yield from (f"broken: {step['err']}" for step in now if step["code"] is None)
    yield from differences(json.loads(case.answer.read_text(encoding="utf-8")), now)


def _stale(table: Table, *, record: bool) -> list[str]:
    """Return the recorded answers without a case; with ``record``, remove them."""
    files = {case.answer for case in table.cases}
    stale = sorted(file for file in ANSWERS.rglob("*.json") if file not in files)
    for file in stale:
        print(f"{file.relative_to(ANSWERS)}: no case has this answer")
        if record:
            file.unlink()
    return [str(file) for file in stale]


if __name__ == "__main__":
    sys.exit(main())

import sys
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.ray.searching import Workers
from support.commands import Run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), Workers()),
        (("--workers", "auto"), Workers()),
        (("--workers", "3"), Workers(num=3)),
        (("--address", "head:6379"), Workers(address="head:6379")),
        (("--workers", "2", "--address", "auto"), Workers(num=2, address="auto")),
    ],
)
def test_the_options_say_by_whom(
    amp_ray: Run,
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    expected: Workers,
) -> None:
    seen: list[Workers] = []

    def planned(*_: object, workers: Workers, **__: object) -> None:
        seen.append(workers)
        message = "far enough"
        raise InputError(message)

    monkeypatch.setattr(sys.modules["amp_ray.api.functions"], "plan_experiment", planned)
    assert amp_ray("plan", small, *options).code == 2
    assert seen == [expected]


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_what_is_no_number_of_workers_is_bad_input(amp_ray: Run, small: Path, text: str) -> None:
    ended = amp_ray("plan", small, "--workers", text)
    assert ended.code == 2
    assert f"{text!r} is neither auto nor a number of workers from 1" in ended.err

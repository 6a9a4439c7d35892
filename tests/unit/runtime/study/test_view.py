import inspect

import pytest

from amp_ray.report.study import LiveView, PlainView
from amp_ray.runtime.study.view import View
from support.driving import NotingView

WATCHED = ("started", "ended", "halted", "learned", "note")
"""What a driver tells, and nothing else."""


def test_a_driver_tells_five_things() -> None:
    told = [name for name in vars(View) if not name.startswith("_")]
    assert told == [*WATCHED]


@pytest.mark.parametrize("kind", [PlainView, LiveView, NotingView])
@pytest.mark.parametrize("name", WATCHED)
def test_every_view_takes_what_a_driver_tells(kind: type[View], name: str) -> None:
    expected = inspect.signature(getattr(View, name))
    assert inspect.signature(getattr(kind, name)) == expected

"""Plans of an experiment with some keys changed, side by side."""

from itertools import pairwise
from pathlib import Path

import pytest

from amp_ray.runtime.variants import combinations_of
from support.commands import Run


def test_every_point_is_the_plan_of_the_changed_file(amp_ray: Run, small: Path) -> None:
    sweep = amp_ray("sweep", small, "--set", "recompute=none,full", "--json").json
    assert [point["set"] for point in sweep["points"]] == [["recompute=none"], ["recompute=full"]]
    for point in sweep["points"]:
        plan = amp_ray("plan", small, "--set", *point["set"], "--json").json
        assert point["row"] == plan["ranking"][0]
        assert point["num_devices"] == 4
    assert sweep["knee"] is None


def test_the_knee_is_where_more_devices_bring_little(amp_ray: Run, small: Path) -> None:
    sizes = "cluster.nodes.0.count=1,2,4,8"
    sweep = amp_ray("sweep", small, "--set", sizes, "--json").json
    rates = [point["samples_per_s"] for point in sweep["points"]]
    knee = sweep["knee"]
    assert knee is not None
    gains = [after / before - 1 for before, after in pairwise(rates)]
    assert all(gain >= 0.5 for gain in gains[:knee])
    assert gains[knee] < 0.5
    out = amp_ray("sweep", small, "--set", sizes).out
    assert f"{2 * 2**knee} *" in out
    assert "added devices bring less than half" in out


def test_a_value_that_does_not_fit_is_a_row_with_its_reason(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("sweep", small, "--set", "global_batch_size=16,x", "--json")
    assert ended.code == 0
    good, bad = ended.json["points"]
    assert good["reason"] is None
    assert bad["row"] is None
    assert "--set global_batch_size=x" in bad["reason"]


def test_a_key_that_no_file_has_is_refused(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("sweep", small, "--set", "recompte=none,full")
    assert ended.code == 2
    assert "did you mean 'recompute'?" in ended.err


def test_where_nothing_fits_the_exit_code_says_so(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("sweep", small, "--set", "cluster.nodes.0.memory_gib=0.001")
    assert ended.code == 3


def test_at_80_columns_no_line_is_longer(amp_ray: Run, small: Path) -> None:
    out = amp_ray("sweep", small, "--set", "recompute=none,full,auto", columns="80").out
    assert max(map(len, out.splitlines())) <= 80
    assert "recompute full" in out.replace("\n", " ") or "full" in out


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["recompute"], "expected KEY=VALUE,VALUE"),
        (["recompute="], "expected KEY=VALUE,VALUE"),
        (["=none"], "expected KEY=VALUE,VALUE"),
        (["a=1,2", "a=3"], "key 'a' is set twice"),
        (["a=" + ",".join(map(str, range(40))), "b=" + ",".join(map(str, range(40)))], "1,600"),
        (["a=[1"], "not valid YAML"),
    ],
)
def test_sets_that_mean_nothing_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combinations_of(sets)


def test_values_are_read_as_themselves_again() -> None:
    (text,), (number,), (word,) = combinations_of(['a="8",8,true_'])
    assert (text, number, word) == ('a="8"', "a=8", "a=true_")

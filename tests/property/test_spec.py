"""Properties of every hostfile, cluster and strategy."""

import json
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from amp_ray.clusters.cluster import Cluster
from amp_ray.inputs.hostfile import HostSlots, format_hostfile, parse_hostfile
from amp_ray.inputs.profile import parse_device_table
from amp_ray.inputs.strategies import parse_strategies, strategy_from_json, strategy_to_json
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy, candidate_of
from support.experiments import experiment_on
from support.strategies import (
    bounds,
    candidates,
    clusters,
    hosts,
    strategies_on,
)


@given(lines=hosts())
def test_a_hostfile_is_read_as_it_was_written(lines: tuple[HostSlots, ...]) -> None:
    assert parse_hostfile(format_hostfile(lines)) == lines


@given(candidate=candidates(), data=st.data())
def test_a_strategy_remembers_its_candidate(candidate: Candidate, data: st.DataObject) -> None:
    strategy = Strategy.uniform(candidate, data.draw(bounds(candidate.pp)))
    assert candidate_of(strategy) == candidate
    assert strategy.global_batch_size == candidate.global_batch_size


@given(cluster=clusters(), data=st.data())
def test_a_strategy_is_read_from_json_as_it_was_written(
    cluster: Cluster, data: st.DataObject
) -> None:
    strategy = data.draw(strategies_on(cluster))
    record = json.loads(json.dumps(strategy_to_json(strategy, cluster)))
    assert strategy_from_json(record, cluster) == strategy


@given(candidate=candidates(), data=st.data())
def test_a_csv_file_gives_the_strategies_that_were_written(
    candidate: Candidate, data: st.DataObject
) -> None:
    cuts = data.draw(bounds(candidate.pp))
    node = data.draw(clusters()).nodes[0]
    experiment = experiment_on(
        Cluster(nodes=(replace(node, num_slots=candidate.num_devices),)),
        num_layers=cuts[-1],
        global_batch_size=candidate.global_batch_size,
        recompute=candidate.options.recompute,
    )
    text = (
        "tp,pp,dp,micro_batch_size,bounds\n"
        f"{candidate.options.tp},{candidate.pp},{candidate.options.dp},{candidate.micro_batch_size},"
        f"{' '.join(map(str, cuts))}\n"
    )
    (found,) = parse_strategies(text, file="strategies.csv", experiment=experiment)
    assert (found.candidate, found.strategy) == (candidate, Strategy.uniform(candidate, cuts))


@given(
    times=st.dictionaries(
        st.tuples(st.integers(1, 8), st.integers(1, 64)),
        st.lists(st.tuples(st.floats(1e-9, 1e3), st.floats(0, 1e3)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    data=st.data(),
)
def test_a_table_is_read_in_any_order_of_its_lines(
    times: dict[tuple[int, int], list[tuple[float, float]]], data: st.DataObject
) -> None:
    lines = [
        f"{layer},{tp},{size},{forward_s!r},{backward_s!r}"
        for (tp, size), rows in times.items()
        for layer, (forward_s, backward_s) in enumerate(rows)
    ]
    header = "layer,tp,micro_batch_size,forward_s,backward_s"
    text = "\n".join([header, *data.draw(st.permutations(lines))])
    table = parse_device_table(text, num_layers=3, file="T4.csv")
    assert set(table) == set(times)
    for key, anchor in table.items():
        assert anchor.backward_s is not None
        found = np.stack([anchor.forward_s, anchor.backward_s], axis=1)
        np.testing.assert_array_equal(found, times[key])


_WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _WORDS
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=4),
    max_leaves=12,
)


@given(values=st.dictionaries(_WORDS, _VALUES, max_size=4), indent=st.sampled_from([None, 1]))
def test_json_is_yaml_of_the_same_meaning(values: dict[str, object], indent: int | None) -> None:
    text = json.dumps(values, ensure_ascii=False, indent=indent)
    assert parse_yaml(text, file="x.yaml").values == values


@given(keys=st.lists(_WORDS, unique=True, max_size=8), data=st.data())
def test_every_key_knows_its_line(keys: list[str], data: st.DataObject) -> None:
    text, lines = "{", {}
    for key in keys:
        text += "\n" * data.draw(st.integers(0, 3))
        lines[(key,)] = text.count("\n") + 1
        text += f"{json.dumps(key, ensure_ascii=False)}: 1,"
    assert parse_yaml(text + "}", file="x.yaml").lines == lines

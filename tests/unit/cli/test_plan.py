import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.commands import Run

AMP = pytest.mark.guest("amp2022")

PLAN_KEYS = {
    "schema",
    "experiment",
    "cost_model",
    "searched",
    "num_candidates",
    "num_feasible",
    "num_left_out",
    "search_s",
    "lower_bound_s",
    "ranking",
}


def test_json_alone_on_stdout_has_the_keys_of_the_contract(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("plan", small, "--json")
    assert ended.code == 0
    assert ended.err == ""
    assert ended.json.keys() >= PLAN_KEYS
    assert ended.json["schema"] == 1
    assert ended.json["num_candidates"] == 16


def test_keys_that_are_set_plan_as_the_changed_file(amp_ray: Run, small: Path) -> None:
    changed = small.with_name("changed.yaml")
    text = small.read_text(encoding="utf-8").replace("num_heads: 8", "num_heads: 4")
    changed.write_text(f"{text}recompute: full\n", encoding="utf-8")
    by_file = amp_ray("plan", changed, "--json").json
    by_option = amp_ray(
        "plan", small, "--set", "model.num_heads=4", "--set", "recompute=full", "--json"
    ).json
    assert by_option["ranking"] == by_file["ranking"]
    assert by_file["ranking"] != amp_ray("plan", small, "--json").json["ranking"]


def test_batches_that_the_devices_divide_are_planned_within_the_tolerance(
    amp_ray: Run, small: Path
) -> None:
    three = ("--set", "cluster.nodes.0.count=3", "--set", "global_batch_size=32", "--all", "--json")
    asked = amp_ray("plan", small, *three).json["ranking"]
    rows = amp_ray("plan", small, *three, "--set", "search.batch_tolerance=0.1").json["ranking"]
    samples = [
        own["micro_batch_size"] * own["dp"] * own["num_micro_batches"]
        for own in (row["strategy"] for row in rows)
    ]
    assert set(samples) == {30, 32}
    assert samples.count(32) == len(asked)
    said = ["global_batch_size 30 instead of 32" in row["warnings"] for row in rows]
    assert said == [own == 30 for own in samples]
    each_s = [row["iteration_time_s"] / own for row, own in zip(rows, samples, strict=True)]
    assert each_s[0] <= min(each_s) * 1.06


def test_a_mistake_in_a_key_that_is_set_names_it(amp_ray: Run, small: Path) -> None:
    ended = amp_ray("plan", small, "--set", "search.spac=uniform")
    assert ended.code == 2
    assert ended.err == (
        "amp-ray: --set search.spac=uniform: search.spac: unknown key 'spac'; did you mean "
        "'space'?\n"
    )


def test_json_into_a_file_leaves_stdout_empty(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    ended = amp_ray("plan", small, "--json", target)
    assert ended.out == ""
    assert json.loads(target.read_text(encoding="utf-8"))["experiment"] == "small"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "small.yaml"]


def test_top_limits_the_rows(amp_ray: Run, small: Path) -> None:
    assert len(amp_ray("plan", small, "--top", "3", "--json").json["ranking"]) == 3


def test_all_lists_every_candidate(amp_ray: Run, small: Path) -> None:
    small.write_text(small.read_text().replace("num_heads: 8", "num_heads: 1"), encoding="utf-8")
    plan = amp_ray("plan", small, "--all", "--json").json
    assert len(plan["ranking"]) == plan["num_candidates"] == 16
    assert [row["feasible"] for row in plan["ranking"]] == [True] * 9 + [False] * 7


def test_the_table_names_columns_and_the_rest(amp_ray: Run, small: Path) -> None:
    out = amp_ray("plan", small, "--top", "2").out
    for word in ("s/iter", "compute", "bubble", "p2p", "sync", "optim", "peak/limit", "bounds"):
        assert word in out
    assert "14 more feasible strategies" in out


def test_in_a_narrow_terminal_the_answer_stays_and_the_breakdown_goes(
    amp_ray: Run, small: Path
) -> None:
    whole = amp_ray("plan", small).out
    narrow = amp_ray("plan", small, columns="80").out
    assert max(map(len, narrow.splitlines())) <= 80
    assert ("bounds" in narrow, "bubble" in narrow, "bubble" in whole) == (True, False, True)
    wide = amp_ray("plan", small, "--wide", columns="80").out
    assert ("bounds" in wide, "bubble" in wide) == (True, True)


def test_no_feasible_strategy_counts_every_reason(amp_ray: Run, small: Path) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 1,")
    small.write_text(text.replace("num_heads: 8", "num_heads: 1"), encoding="utf-8")
    ended = amp_ray("plan", small)
    assert ended.code == 3
    assert "no feasible strategy: 9 out of memory, 7 tp does not divide" in ended.err
    assert "; closest: tp 1, pp 4, dp 1, micro-batch size 1, bounds 0 2 " in ended.err
    assert " GiB of 1.00 (T4)\n" in ended.err


@pytest.mark.parametrize("space", ["uniform", "placement", "heterogeneous"])
def test_no_feasible_strategy_names_the_closest_in_every_space(
    amp_ray: Run, small: Path, space: str
) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 1,")
    small.write_text(f"{text}search: {{space: {space}}}\n", encoding="utf-8")
    ended = amp_ray("plan", small)
    assert ended.code == 3
    assert "; closest: tp 2, pp 2, dp 1, micro-batch size 1, bounds 0 4 9: stage " in ended.err


def test_safe_ties_come_first_in_json_too(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = small.read_text().replace("slots: 2,", "slots: 2, memory_gib: 2.85,")
    small.write_text(text, encoding="utf-8")

    def ties(risky_probability: float) -> list[dict[str, Any]]:
        monkeypatch.setattr("amp_ray.search.ranking.RISKY_PROBABILITY", risky_probability)
        rows: list[dict[str, Any]] = amp_ray("plan", small, "--all", "--json").json["ranking"]
        assert [row["position"] for row in rows] == list(range(1, len(rows) + 1))
        fastest_s = min(row["iteration_time_s"] for row in rows)
        return [row for row in rows if row["iteration_time_s"] <= fastest_s * 1.06]

    by_time = ties(1.0)
    assert by_time == sorted(by_time, key=lambda row: row["iteration_time_s"])
    limit = by_time[1]["failure_probability"]  # the second fastest is just risky
    safe = [row for row in by_time if row["failure_probability"] < limit]
    assert by_time != safe + [row for row in by_time if row not in safe]
    risky = [row for row in by_time if row not in safe]
    assert [row["strategy"] for row in ties(limit)] == [row["strategy"] for row in safe + risky]


def test_a_json_result_never_overwrites_an_experiment(amp_ray: Run, small: Path) -> None:
    before = small.read_text(encoding="utf-8")
    ended = amp_ray("plan", small, "--json", small)
    assert ended.code == 2
    assert "not written over an input file" in ended.err
    assert small.read_text(encoding="utf-8") == before


@AMP
def test_the_published_planner_is_selectable(amp_ray: Run) -> None:
    experiment = Path(__file__).parents[3] / "experiments" / "homogeneous.yaml"
    plan = amp_ray("plan", experiment, "--all", "--cost-model", "amp-2022", "--json").json
    assert plan["cost_model"] == "amp-2022"
    assert plan["num_candidates"] == 53
    assert plan["ranking"][0]["iteration_time_s"] == pytest.approx(1.2443, abs=5e-5)


def test_the_same_answer_for_any_hash_seed_and_repetition(amp_ray: Run, small: Path) -> None:
    first, second = (amp_ray("plan", small, "--all", "--json").json for _ in range(2))
    first.pop("search_s")
    second.pop("search_s")
    assert first == second


def test_unknown_commands_and_options_are_bad_input(amp_ray: Run, small: Path) -> None:
    assert amp_ray("plna", small).code == 2
    assert amp_ray("plan", small, "--tpo", "3").code == 2
    assert amp_ray("plan").code == 2


def test_interrupting_ends_with_130(
    amp_ray: Run, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["amp_ray.api.functions"], "plan_experiment", interrupted)
    assert amp_ray("plan", small).code == 130


@AMP
def test_a_calibration_is_refused_where_there_are_no_constants(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    ended = amp_ray(
        "plan", small, "--cost-model", "amp-2022", "--calibration", tmp_path / "any.json"
    )
    assert ended.code == 2
    assert "amp-2022 has none" in ended.err


def mixed(path: Path, space: str, *more: str) -> Path:
    """Make the second of two nodes slower."""
    text = path.read_text(encoding="utf-8")
    [node] = [line for line in text.splitlines() if "count: 2, device: T4" in line]
    pair = "\n".join(
        node.replace("count: 2, device: T4", f"count: 1, device: {device}")
        for device in ("T4", "V100-16")
    )
    path.write_text(
        text.replace(node, pair) + "".join([f"search: {{space: {space}}}\n", *more]),
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("more", ["", ", idle_devices: false"])
def test_a_free_placement_is_never_worse_and_says_where(
    amp_ray: Run, small: Path, more: str
) -> None:
    uniform = amp_ray("plan", mixed(small, "uniform"), "--json").json["ranking"][0]
    text = small.read_text(encoding="utf-8").replace("space: uniform", f"space: placement{more}")
    small.write_text(text, encoding="utf-8")
    placed = amp_ray("plan", small, "--json").json["ranking"][0]
    assert placed["iteration_time_s"] <= uniform["iteration_time_s"]
    devices = set(map(tuple, placed["strategy"]["placement"]))
    everything = {("node0", 0), ("node0", 1), ("node1", 0), ("node1", 1)}
    assert devices == everything if more else devices < everything
    assert placed["launchable"]


def test_stages_with_their_own_devices_are_told_whole(amp_ray: Run, small: Path) -> None:
    plan = amp_ray("plan", mixed(small, "heterogeneous"), "--json").json
    assert plan["num_candidates"] == 4  # batches of 8 samples
    for row in plan["ranking"]:
        assert row["feasible"]
        assert row["lower_bound_s"] <= row["iteration_time_s"] * (1 + 1e-9)
        stages = row["strategy"].get("stages", [])
        size = row["strategy"]["micro_batch_size"]
        assert all(sum(stage["shares"]) == size for stage in stages)
        assert row["launchable"] == (not stages)
    placed = amp_ray("plan", small, "--launchable", "--json").json["ranking"][0]
    assert plan["ranking"][0]["iteration_time_s"] <= placed["iteration_time_s"]


def test_only_what_can_be_launched(amp_ray: Run, small: Path) -> None:
    plan = amp_ray("plan", mixed(small, "heterogeneous"), "--launchable", "--json").json
    assert plan["num_candidates"] == 16 + 1  # all of the grids, and one that may be the fastest
    assert all(row["strategy"]["tp"] and row["launchable"] for row in plan["ranking"])
    strategies = [json.dumps(row["strategy"]) for row in plan["ranking"]]
    assert len(set(strategies)) == len(strategies)


def test_slow_devices_may_stay_idle_in_what_is_launched(amp_ray: Run, small: Path) -> None:
    slow = "{name: slow, memory_gib: 16, memory_gbyte_per_s: 3, fp16_tflops: 0.01}"
    text = mixed(small, "heterogeneous").read_text(encoding="utf-8")
    small.write_text(text.replace("device: T4", f"device: {slow}"), encoding="utf-8")
    best = amp_ray("plan", small, "--launchable", "--json").json["ranking"][0]
    assert {node for node, _ in best["strategy"]["placement"]} == {"node1"}
    assert best["launchable"]


PRICED = """    - {device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10,
       price_per_device_hour: 1}
    - {device: V100-16, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10,
       price_per_device_hour: 2}
"""


@pytest.fixture
def priced(small: Path) -> Path:
    """Two nodes, the faster one at twice the price."""
    head, _, tail = small.read_text().partition("    - {count: 2")
    small.write_text(head + PRICED + tail.partition("\n")[2], encoding="utf-8")
    return small


def test_by_cost_some_of_the_nodes_may_be_best(amp_ray: Run, priced: Path) -> None:
    by_time = amp_ray("plan", priced, "--all", "--json").json
    by_cost = amp_ray("plan", priced, "--objective", "cost", "--all", "--json").json
    assert by_cost["objective"] == "cost"
    costs = [row["cost"]["per_iteration"] for row in by_cost["ranking"] if row["feasible"]]
    assert costs[0] < min(row["cost"]["per_iteration"] for row in by_time["ranking"])
    hosts = {host for host, _ in by_cost["ranking"][0]["strategy"]["placement"]}
    assert len(hosts) == 1


def test_time_and_cost_together_are_a_front(amp_ray: Run, priced: Path) -> None:
    rows = amp_ray("plan", priced, "--objective", "time-cost", "--all", "--json").json["ranking"]
    figures = [
        (row["iteration_time_s"], row["cost"]["per_iteration"], row["pareto"])
        for row in rows
        if row["feasible"]
    ]
    for time_s, cost, is_front in figures:
        beaten = any(
            (other_s, other) != (time_s, cost) and other_s <= time_s and other <= cost
            for other_s, other, _ in figures
        )
        assert is_front is not beaten
    out = amp_ray("plan", priced, "--objective", "time-cost").out
    assert "no other is both faster and cheaper" in out


def test_a_limit_on_money_leaves_nodes_idle(amp_ray: Run, priced: Path) -> None:
    cheapest = amp_ray("plan", priced, "--objective", "cost", "--json").json["ranking"][0]
    most = cheapest["cost"]["per_iteration"] * 1.001
    priced.write_text(
        priced.read_text() + f"search: {{max_cost_per_iteration: {most}}}\n", encoding="utf-8"
    )
    rows = amp_ray("plan", priced, "--json").json["ranking"]
    assert rows
    assert all(row["cost"]["per_iteration"] <= most for row in rows)


@pytest.mark.parametrize("arguments", [(), pytest.param(("--cost-model", "amp-2022"), marks=AMP)])
def test_money_needs_prices(amp_ray: Run, small: Path, arguments: tuple[str, ...]) -> None:
    ended = amp_ray("plan", small, "--objective", "cost", *arguments)
    assert ended.code == 2
    assert "objective 'cost' needs" in ended.err


def test_after_a_loss_the_plan_tells_what_moves(amp_ray: Run, small: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    amp_ray("plan", small, "--json", before)
    ended = amp_ray("plan", small, "--without", "node0", "--from", before, "--json")
    assert ended.code == 0, ended.err
    best = ended.json["ranking"][0]
    assert {host for host, _ in best["strategy"]["placement"]} == {"node1"}
    assert best["moves"].keys() == {
        "moved_bytes",
        "from_checkpoint_bytes",
        "transfer_s",
        "hosts",
    }
    assert [entry["host"] for entry in best["moves"]["hosts"]] == ["node1"]
    out = amp_ray("plan", small, "--without", "node0", "--from", before).out
    assert "the best strategy moves" in out


def test_a_plan_of_hosts_that_the_file_no_longer_names_is_read(
    amp_ray: Run, small: Path, tmp_path: Path
) -> None:
    before = tmp_path / "before.json"
    amp_ray("plan", small, "--json", before)
    small.write_text(small.read_text().replace("count: 2", "count: 1"), encoding="utf-8")
    ended = amp_ray("plan", small, "--from", before, "--json")
    assert ended.code == 0, ended.err
    assert ended.json["ranking"][0]["moves"]["moved_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--without", "nodeX"], "--without nodeX: the hosts are node0, node1"),
        (["--without", "node0", "--without", "node1"], "--without leaves no host"),
        (["--from", "missing.json"], "missing.json: no such file"),
        (["--from", "wrong.json"], "wrong.json"),
        (["--from", "other.json"], "a strategy for 3 layers; the model has 9"),
        pytest.param(
            ["--from", "other.json", "--cost-model", "amp-2022"], "--from compares plans", marks=AMP
        ),
    ],
)
def test_a_wrong_host_or_plan_is_refused(
    amp_ray: Run, small: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "wrong.json").write_text('{"ranking": [{"strategy": 7}]}', encoding="utf-8")
    strategy = {"tp": 1, "dp": 1, "bounds": [0, 3], "micro_batch_size": 1, "num_micro_batches": 8}
    (tmp_path / "other.json").write_text(json.dumps(strategy), encoding="utf-8")
    named = [str(tmp_path / word) if word.endswith(".json") else word for word in arguments]
    ended = amp_ray("plan", small, *named)
    assert ended.code == 2
    assert message in ended.err


def test_where_nothing_fits_the_message_says_what_recompute_would_do(
    amp_ray: Run, tmp_path: Path
) -> None:
    text = (
        "name: large\n"
        "model: {family: gpt2, num_layers: 8, hidden_size: 1024, num_heads: 16,\n"
        "        sequence_length: 4096, vocab_size: 1024}\n"
        "cluster: {nodes: [{count: 1, device: T4, slots: 2, memory_gib: 8,\n"
        "                   intra_gbit_per_s: 50, inter_gbit_per_s: 50}]}\n"
        "search: {min_tp: 2, micro_batch_sizes: [8]}\n"
        "global_batch_size: 8\n"
    )
    experiment = tmp_path / "large.yaml"
    experiment.write_text(text, encoding="utf-8")
    ended = amp_ray("plan", str(experiment))
    assert ended.code == 3
    assert "stage 0 needs" in ended.err
    assert "with 'recompute: auto' some fit, such as tp 2, pp 1, dp 1" in ended.err
    experiment.write_text(f"{text}recompute: auto\n", encoding="utf-8")
    ended = amp_ray("plan", str(experiment))
    assert ended.code == 0
    assert "recompute full" in ended.out

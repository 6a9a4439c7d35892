import json

from amp_ray.runtime.ray.searching import ALONE, search_candidates
from amp_ray.search.planner import AmpRayPlanner
from amp_ray.search.ranking import Ranking
from amp_ray.search.rows import ranking_rows, row
from amp_ray.search.space import candidates_of
from amp_ray.spec.cluster import Cluster
from support.experiments import small_experiment

ROW_KEYS = {
    "position",
    "strategy",
    "iteration_time_s",
    "breakdown_s",
    "peak_memory_bytes",
    "memory_limit_bytes",
    "feasible",
    "reason",
    "launchable",
}
STRATEGY_KEYS = {
    "tp",
    "pp",
    "dp",
    "micro_batch_size",
    "num_micro_batches",
    "bounds",
    "recompute",
    "placement",
}


def ranking(*replacements: tuple[str, str]) -> tuple[Ranking, Cluster]:
    experiment = small_experiment(*replacements)
    planner = AmpRayPlanner(experiment=experiment)
    return search_candidates(planner, candidates_of(experiment), workers=ALONE), experiment.cluster


def test_rows_have_the_keys_of_the_contract() -> None:
    found, cluster = ranking()
    first = ranking_rows(found, cluster, num_rows=1)[0]
    assert first.keys() >= ROW_KEYS
    assert first["strategy"].keys() >= STRATEGY_KEYS
    assert first["breakdown_s"].keys() >= {
        "compute",
        "bubble",
        "pipeline_p2p",
        "gradient_sync",
        "optimizer",
    }


def test_the_breakdown_adds_up_to_the_iteration() -> None:
    found, cluster = ranking()
    for entry in ranking_rows(found, cluster, num_rows=None):
        assert abs(sum(entry["breakdown_s"].values()) / entry["iteration_time_s"] - 1) < 1e-12


def test_positions_count_from_one() -> None:
    found, cluster = ranking()
    rows = ranking_rows(found, cluster, num_rows=3)
    assert [entry["position"] for entry in rows] == [1, 2, 3]


def test_all_rows_list_the_infeasible_last_with_their_reason() -> None:
    found, cluster = ranking(("num_heads: 8", "num_heads: 1"))
    rows = ranking_rows(found, cluster, num_rows=None)
    assert len(rows) == len(found.results)
    assert rows[-1]["feasible"] is False
    assert rows[-1]["reason"].startswith("tp does not divide the attention heads")
    assert rows[-1]["iteration_time_s"] is None


def test_top_rows_leave_the_infeasible_out() -> None:
    found, cluster = ranking(("num_heads: 8", "num_heads: 1"))
    assert all(entry["feasible"] for entry in ranking_rows(found, cluster, num_rows=100))


def test_rows_are_plain_json() -> None:
    found, cluster = ranking()
    text = json.dumps(row(found.results[0], None, cluster), allow_nan=False)
    assert json.loads(text)["position"] is None

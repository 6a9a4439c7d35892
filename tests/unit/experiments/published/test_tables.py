from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.files import load_experiment
from amp_ray.units import GIB
from published.sections import PUBLISHED
from published.tables import amp_strategies, read_rows, read_table

TEMPLATE = """\
name: site
model: {family: gpt2, sequence_length: 64, vocab_size: 500}
cluster: {nodes: [{device: A100-80, slots: 8, intra_gbit_per_s: 1200, inter_gbit_per_s: 400}]}
"""
HEADER = (
    "group,model.num_layers,model.hidden_size,model.num_heads,cluster.nodes.0.count,"
    "global_batch_size,traits.virtual_stages,tp,pp,dp,micro_batch_size,bounds,measured_s"
)
ROW = "g,4,64,4,2,32,2,4,2,2,1,0 3 7,1.5"


def written(folder: Path, header: str = HEADER, *rows: str) -> Path:
    """Write a table and its template, and return their folder."""
    (folder / "site.yaml").write_text(TEMPLATE, encoding="utf-8")
    (folder / "site.csv").write_text("\n".join((header, *rows)), encoding="utf-8")
    return folder


def test_columns_are_keys_of_the_experiment_file(tmp_path: Path) -> None:
    (row,) = read_rows(written(tmp_path, HEADER, ROW), "site")
    experiment = row.observation.experiment
    assert experiment.model.num_layers == 7
    assert experiment.cluster.num_devices == 16
    assert experiment.global_batch_size == 32
    assert experiment.traits.virtual_stages == 2
    assert row.observation.strategy.bounds == (0, 3, 7)
    assert (row.group, row.observation.measured_s, row.tells_time) == ("g", 1.5, True)


def test_rows_of_equal_keys_share_an_experiment(tmp_path: Path) -> None:
    other = ROW.replace("g,4", "g,5").replace("0 3 7", "0 3 8")
    first, second, third = read_rows(written(tmp_path, HEADER, ROW, ROW, other), "site")
    assert first.observation.experiment is second.observation.experiment
    assert first.observation.experiment is not third.observation.experiment


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    header = HEADER.replace("global_batch_size", "globl_batch_size")
    with pytest.raises(InputError, match="globl_batch_size"):
        read_rows(written(tmp_path, header, ROW), "site")


def test_bounds_must_fit_the_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="layer"):
        read_rows(written(tmp_path, HEADER, ROW.replace("0 3 7", "0 3 9")), "site")


def test_a_doubtful_row_tells_no_time_but_stays(tmp_path: Path) -> None:
    header, row = f"{HEADER},doubt,recompute", f"{ROW},swapped,none"
    told = read_rows(written(tmp_path, header, row, f"{ROW},,full"), "site")
    assert [each.tells_time for each in told] == [False, True]


def test_a_dimension_that_is_off_needs_no_column(tmp_path: Path) -> None:
    header, rows = f"{HEADER},cp,ep,recompute", (f"{ROW},1,1,selective", f"{ROW},,,none")
    table = read_table(written(tmp_path, header, *rows), "site")
    assert len(table.rows) == 2
    assert table.not_expressible == {}


def test_rows_that_cannot_be_expressed_are_counted_by_what_they_have(tmp_path: Path) -> None:
    header = f"{HEADER},mtp_layers,model.family"
    rows = [f"{ROW},,gpt2", f"{ROW},3,gpt2", f"{ROW},,hyena", ROW.replace("0 3 7", "") + ",,gpt2"]
    table = read_table(written(tmp_path, header, *rows), "site")
    assert len(table.rows) == 1
    assert table.not_expressible == {"bounds": 1, "model.family hyena": 1, "mtp_layers 3": 1}


@pytest.mark.parametrize(
    ("name", "measured", "failed", "doubtful", "peaks"),
    [("vtrain", 41, 0, 0, 0), ("bloom", 65, 6, 2, 48), ("megatron", 8, 0, 0, 0)],
)
def test_published_tables_are_whole(
    name: str, measured: int, failed: int, doubtful: int, peaks: int
) -> None:
    rows = read_rows(PUBLISHED, name)
    outcomes = [row.observation.outcome for row in rows]
    assert (outcomes.count("measured"), outcomes.count("oom")) == (measured, failed)
    assert sum(not row.tells_time for row in rows) == failed + doubtful
    found = [row.observation.peak_memory_bytes for row in rows if row.observation.peak_memory_bytes]
    assert len(found) == peaks
    assert all(peak % GIB == 0 for (peak,) in found)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("playbook", 1213),
        ("megatron_golden", 305),
        ("llm_foundry", 139),
        ("megatron_bridge", 74),
        ("megatron_bridge_gb", 97),
        ("deepseek", 1),
        ("simumax", 24),
        ("mlperf", 72),
    ],
)
def test_rows_of_recent_tables_are_read_or_counted(name: str, count: int) -> None:
    table = read_table(PUBLISHED, name)
    assert len(table.rows) + sum(table.not_expressible.values()) == count


@pytest.mark.parametrize(("name", "count"), [("het_cluster", 53), ("het_model", 65)])
def test_published_strategies_fit_their_experiment(name: str, count: int, repository: Path) -> None:
    experiment = load_experiment(repository / "experiments" / f"{name}.yaml")
    assert len(amp_strategies(PUBLISHED, experiment)) == count

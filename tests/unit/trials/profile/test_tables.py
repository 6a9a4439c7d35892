import csv

from amp_ray.inputs.profile_file import parse_profile
from amp_ray.trials.profile.points import LayerPoint, LinkPoint, first_positions
from amp_ray.trials.profile.records import LinkPlace, ProfileRecords
from amp_ray.trials.profile.tables import model_text, profile_files
from support.experiments import small_experiment

EXPERIMENT = small_experiment()
MODEL = EXPERIMENT.model


def measured(*pairs: tuple[int, int], layers: tuple[int, ...] | None = None) -> ProfileRecords:
    records = ProfileRecords()
    hardware = {"hardware": "a: board", "versions": "torch 2", "date": "2026-11-21"}
    records.add({"record": "hardware", "devices": "T4", **hardware})
    for tp, size in pairs:
        for layer in first_positions(MODEL) if layers is None else layers:
            place = {"tp": tp, "micro_batch_size": size, "layer": layer}
            times = {"forward_s": size + layer / 10, "backward_s": 2.0 * size}
            launch = {"forward_launch_s": 1e-3, "backward_launch_s": 1e-3}
            rest = {"all_reduce_s": 0.0, "spread_s": 0.0, "repeats": 5}
            sizes = {"kept_bytes": 3.0 * 2**30, "temporary_bytes": 7.0}
            record = {"record": "layer", "devices": "T4"}
            records.add({**record, **place, **times, **launch, **rest, **sizes})
    return records


def files_of(records: ProfileRecords) -> dict[str, str]:
    return profile_files(records, MODEL, EXPERIMENT.precision)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_plans_can_read_what_is_written() -> None:
    files = files_of(measured((1, 1), (2, 4)))
    profile = parse_profile(
        {name: text for name, text in files.items() if "/" not in name},
        folder="p",
        num_layers=MODEL.num_layers,
        precision=EXPERIMENT.precision,
    )
    assert not profile.includes_all_reduces
    assert profile.forward_runs == 1
    assert sorted(profile.tables["T4"]) == [(1, 1), (2, 4)]
    backward_s = profile.tables["T4"][2, 4].backward_s
    assert backward_s is not None
    assert backward_s.tolist() == [8.0] * MODEL.num_layers


def test_equal_layers_get_what_the_first_took() -> None:
    rows = rows_of(files_of(measured((1, 1)))["T4.csv"])
    assert [float(row["forward_s"]) for row in rows] == [1.0, *[1.1] * 6, 1.7, 1.8]


def test_an_incomplete_size_is_in_the_details_only() -> None:
    files = files_of(measured((1, 1), layers=(0, 1)))
    assert "T4.csv" not in files
    assert "profile.yaml" not in files
    assert len(rows_of(files["details/layers.csv"])) == 2


def test_bytes_are_written_whole() -> None:
    (row, *_) = rows_of(files_of(measured((1, 1)))["details/memory.csv"])
    assert (row["kept_bytes"], row["temporary_bytes"]) == ("3221225472", "7")


def test_the_loss_is_named_and_in_no_table_of_layers() -> None:
    records = measured((1, 1))
    point = LayerPoint(micro_batch_size=1, tp=1, layer=MODEL.num_layers)
    records.layers["T4", point] = records.layers[
        "T4", LayerPoint(micro_batch_size=1, tp=1, layer=0)
    ]
    files = files_of(records)
    assert [row["layer"] for row in rows_of(files["details/layers.csv"])][-1] == "loss"
    assert len(rows_of(files["T4.csv"])) == MODEL.num_layers


def test_links_are_listed() -> None:
    records = ProfileRecords()
    message = LinkPoint(what="p2p", num_ranks=2, num_bytes=1024)
    records.links[LinkPlace(scope="inter", devices="T4+V100-16"), message] = 1.23456789e-4
    assert files_of(records)["details/links.csv"].splitlines() == [
        "what,scope,devices,num_ranks,bytes,seconds",
        "p2p,inter,T4+V100-16,2,1024,0.000123457",
    ]


def test_models_are_described() -> None:
    assert model_text(MODEL) == "gpt2, 6 blocks, hidden 256, sequence 128, vocabulary 1024"


def test_what_surrounds_the_layers_is_listed_by_device() -> None:
    records = ProfileRecords()
    records.steps["T4"] = {
        "host_s_per_micro_batch": 1e-4,
        "host_s_per_iteration": 2e-3,
        "memory_bytes_per_s": 240e9,
    }
    assert files_of(records)["details/step.csv"].splitlines() == [
        "device,host_s_per_micro_batch,host_s_per_iteration,memory_bytes_per_s",
        "T4,0.0001,0.002,240000000000",
    ]

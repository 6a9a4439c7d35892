import json

from amp_ray.calibration.fingerprint import describe_differences, differing_parts, fingerprint
from support.experiments import small_experiment

NODE = "- {{device: {}, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}}"


def test_equal_experiments_have_equal_fingerprints() -> None:
    ours, theirs = fingerprint(small_experiment()), fingerprint(small_experiment())
    assert differing_parts(ours, theirs) == ()
    assert describe_differences(ours, theirs) == ""


def test_a_fingerprint_survives_json() -> None:
    found = fingerprint(small_experiment())
    assert json.loads(json.dumps(found)) == found


def test_equal_nodes_are_counted() -> None:
    (node,) = fingerprint(small_experiment())["cluster"]["nodes"]
    assert (node["count"], node["slots"], node["device"]["name"]) == (2, 2, "T4")


def test_every_difference_is_told_with_both_figures() -> None:
    other = small_experiment(
        ("num_layers: 6", "num_layers: 8"), ("vocab_size: 1024", "vocab_size: 2048")
    )
    told = describe_differences(fingerprint(small_experiment()), fingerprint(other))
    assert "model.num_layers is 6 in the calibration, 8 here" in told
    assert "model.vocab_size is 1024 in the calibration, 2048 here" in told


def test_many_differences_are_counted() -> None:
    other = small_experiment(("device: T4", "device: A100-80"))
    told = describe_differences(fingerprint(small_experiment()), fingerprint(other))
    assert told.endswith("more differences")


def test_other_numbers_of_nodes_are_told() -> None:
    other = small_experiment(
        (
            "- {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}",
            NODE.format("T4") + "\n    " + NODE.format("A30"),
        )
    )
    ours, theirs = fingerprint(small_experiment()), fingerprint(other)
    assert differing_parts(ours, theirs) == ("cluster",)
    told = describe_differences(ours, theirs)
    assert told == "cluster.nodes has 1 entries in the calibration, 2 here"

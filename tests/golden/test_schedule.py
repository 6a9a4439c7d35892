"""The schedule as text, written down by hand from the definition of 1F1B."""

from pathlib import Path

from support.pipelines import schedule_text


def test_schedule_of_four_stages_and_six_micro_batches() -> None:
    golden = (Path(__file__).parent / "schedule_pp4_m6.csv").read_text(encoding="utf-8")
    assert schedule_text(4, 6) == golden.rstrip("\n")

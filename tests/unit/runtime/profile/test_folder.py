from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.profile.profiling import ProfileFolder
from amp_ray.trials.profile.tables import RECORDS_FILE
from support.experiments import small_experiment

MODEL = small_experiment().model
OOM = {"record": "oom", "devices": "T4", "tp": 1, "micro_batch_size": 8}


def test_records_are_there_for_the_next_run(tmp_path: Path) -> None:
    ProfileFolder(tmp_path / "a/b", MODEL, "fp16").add(OOM)
    assert ProfileFolder(tmp_path / "a/b", MODEL, "fp16").records.limits == {("T4", 1): 8}


def test_a_torn_line_does_not_spoil_the_next_record(tmp_path: Path) -> None:
    ProfileFolder(tmp_path, MODEL, "fp16")
    with (tmp_path / RECORDS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"record": "o')
    ProfileFolder(tmp_path, MODEL, "fp16").add(OOM)
    assert ProfileFolder(tmp_path, MODEL, "fp16").records.limits == {("T4", 1): 8}


def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    ProfileFolder(tmp_path, MODEL, "fp16").add(OOM)
    before = (tmp_path / RECORDS_FILE).read_bytes()
    with pytest.raises(InputError, match="something else"):
        ProfileFolder(tmp_path, MODEL, "bf16")
    assert (tmp_path / RECORDS_FILE).read_bytes() == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        ProfileFolder(tmp_path / "file", MODEL, "fp16")


def test_every_launch_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = ProfileFolder(tmp_path, MODEL, "fp16")
    first = folder.new_run("intra-T4")
    first.mkdir()
    assert folder.new_run("intra-T4").name == "001-intra-T4"


def test_tables_of_somebody_else_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "T4.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="not measured by this command"):
        ProfileFolder(tmp_path, MODEL, "fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["T4.csv"]

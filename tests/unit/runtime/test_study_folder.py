from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.study_folder import open_study

HEADER = {"event": "study", "experiment": "a", "fingerprint": {"model": [1], "cluster": {"x": 1}}}


def test_a_new_study_writes_its_header_and_has_an_id(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", HEADER, resume=False) as study:
        assert study.is_new
        assert study.study_id.isalnum()
        study.journal.append({"event": "x"})
    with open_study(tmp_path / "s", HEADER, resume=True) as again:
        assert not again.is_new
        assert again.study_id == study.study_id
        assert again.journal.records[1] == {"event": "x"}


def test_an_existing_study_is_not_begun_again(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", HEADER, resume=False):
        pass
    with (
        pytest.raises(InputError, match="--resume"),
        open_study(tmp_path / "s", HEADER, resume=False),
    ):
        pass


def test_there_must_be_a_study_to_go_on_with(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="no study to go on with"),
        open_study(tmp_path / "s", HEADER, resume=True),
    ):
        pass
    assert not (tmp_path / "s").exists()


def test_a_study_of_something_else_is_refused_with_what_differs(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", HEADER, resume=False):
        pass
    other = {**HEADER, "fingerprint": {"model": [1], "cluster": {"x": 2}}}
    with (
        pytest.raises(InputError, match=r"journal.jsonl:1: .*'a'.*fingerprint: cluster"),
        open_study(tmp_path / "s", other, resume=True),
    ):
        pass


def test_a_driver_that_died_before_its_header_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for torn in (b"", b'{"v":1,"n":0'):
        (tmp_path / "s" / "journal.jsonl").write_bytes(torn)
        for resume in (False, True):
            with open_study(tmp_path / "s", HEADER, resume=resume) as study:
                assert study.is_new
            (tmp_path / "s" / "journal.jsonl").write_bytes(torn)


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x", encoding="ascii")
    with (
        pytest.raises(InputError, match="cannot be"),
        open_study(tmp_path / "s", HEADER, resume=False),
    ):
        pass


def test_a_study_at_work_is_refused(tmp_path: Path) -> None:
    with (
        open_study(tmp_path / "s", HEADER, resume=False),
        pytest.raises(InputError, match="being driven by process"),
        open_study(tmp_path / "s", HEADER, resume=True),
    ):
        pass

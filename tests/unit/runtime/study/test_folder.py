import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.study.folder import Study, folder_for, open_study
from amp_ray.runtime.study.journal import Journal

HEADER: dict[str, Any] = {
    "event": "study",
    "experiment": "a",
    "fingerprint": {"model": {"layers": 1}, "cluster": {"x": 1}},
    "policy": "best",
}


def begun(folder: Path) -> Study:
    with open_study(folder, HEADER, resume=False) as study:
        return study


def resumed(folder: Path, **changes: object) -> Study:
    with open_study(folder, {**HEADER, **changes}, resume=True) as study:
        return study


def test_a_new_study_writes_its_header_and_has_an_id(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", HEADER, resume=False) as study:
        assert study.is_new
        assert study.study_id.isalnum()
        assert study.trials_folder.is_dir()
        assert not study.journal.records
        study.journal.append({"event": "x"})
    again = resumed(tmp_path / "s")
    assert not again.is_new
    assert again.study_id == study.study_id
    assert begun(tmp_path / "deep" / "er").study_id != study.study_id
    assert list(again.journal.records) == [
        {**HEADER, "study": study.study_id},
        {"event": "x"},
    ]


def test_a_study_is_its_owners_alone(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", HEADER, resume=False) as study:
        study.write("result.json", "{}")
    assert (tmp_path / "s" / "result.json").read_text(encoding="utf-8") == "{}"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "s").iterdir()}
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    assert modes == {"journal.jsonl": 0o600, "lock": 0o600, "result.json": 0o600, "trials": 0o700}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("small", "small-study"),
        ("größe 3.5_b-x", "größe 3.5_b-x-study"),
        ("../escape/x", "__escape_x-study"),
        ("/etc/x", "_etc_x-study"),
        ("..", "_-study"),
        ("-rf", "_rf-study"),
        ("~root\n", "_root_-study"),
        ("a\\b\0", "a_b_-study"),
    ],
)
def test_a_studys_folder_lies_in_the_current_one_whatever_the_experiment_is_called(
    name: str, folder: str
) -> None:
    assert folder_for(name) == Path(folder)
    assert folder_for(name).parent == Path()


def test_an_existing_study_is_not_begun_again(tmp_path: Path) -> None:
    begun(tmp_path / "s")
    with pytest.raises(InputError, match=r"has a study: go on with it by --resume"):
        begun(tmp_path / "s")


@pytest.mark.parametrize("is_there", [False, True])
def test_there_must_be_a_study_to_go_on_with(tmp_path: Path, *, is_there: bool) -> None:
    folder = tmp_path / "s"
    if is_there:
        folder.mkdir()
    with pytest.raises(InputError, match="no study to go on with"):
        resumed(folder)
    assert folder.exists() == is_there
    assert not is_there or not list(folder.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py", "experiment.yaml"):
        (tmp_path / name).write_text("x", encoding="ascii")
    with pytest.raises(InputError, match=r"something else \(a.py, b.py, c.py, \.\.\.\)"):
        begun(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"fingerprint": {"model": {"layers": 1}, "cluster": {"x": 2}}},
            r"journal.jsonl:1: .*'a'.*\(cluster.x is 1 in the study, 2 here\)",
        ),
        (
            {"experiment": "b", "policy": "random"},
            r"experiment is 'a' in the study, 'b' here; policy is 'best' in the study, 'random' h",
        ),
    ],
)
def test_a_study_of_something_else_is_refused_with_what_differs(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    begun(tmp_path / "s")
    with pytest.raises(InputError, match=told):
        resumed(tmp_path / "s", **changes)


def test_what_json_cannot_tell_apart_does_not_differ(tmp_path: Path) -> None:
    with open_study(tmp_path / "s", {**HEADER, "groups": (("a",),)}, resume=False):
        pass
    assert not resumed(tmp_path / "s", groups=(("a",),)).is_new


def test_a_journal_of_something_else_is_no_study(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    journal = Journal.open(tmp_path / "s" / "journal.jsonl")
    journal.append({"event": "diary"})
    journal.close()
    with pytest.raises(InputError, match=r"journal.jsonl:1: this is no header of a study: 'diary'"):
        resumed(tmp_path / "s")


@pytest.mark.parametrize("torn", [b"", b'{"v":1,"n":0', None])
@pytest.mark.parametrize("resume", [False, True])
def test_a_driver_that_died_before_its_header_leaves_nothing_in_the_way(
    tmp_path: Path, torn: bytes | None, *, resume: bool
) -> None:
    (tmp_path / "lock").touch()
    if torn is not None:
        (tmp_path / "journal.jsonl").write_bytes(torn)
    with open_study(tmp_path, HEADER, resume=resume) as study:
        assert study.is_new
    assert not resumed(tmp_path).is_new


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("x", encoding="ascii")
    for folder in (tmp_path / "s", tmp_path / "s" / "t"):
        with pytest.raises(InputError, match=r"a study cannot be kept here: Not a directory"):
            begun(folder)


@pytest.mark.parametrize("resume", [False, True])
def test_a_study_at_work_is_refused_by_its_driver(tmp_path: Path, *, resume: bool) -> None:
    with (
        open_study(tmp_path / "s", HEADER, resume=False),
        pytest.raises(InputError, match=f"being driven by process {os.getpid()} on"),
        open_study(tmp_path / "s", HEADER, resume=resume),
    ):
        pass


READ_ONLY = """
import sys
from pathlib import Path
from amp_ray.errors import InputError
from amp_ray.runtime.study.folder import open_study
for name, resume in (("old", True), ("old", False), ("new", False)):
    try:
        with open_study(Path(sys.argv[1]) / name, eval(sys.argv[2]), resume=resume):
            print("opened")
    except InputError as error:
        print(error)
"""


def test_a_file_system_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own_mounts, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets us make no user namespace, in which to mount read-only")
    begun(tmp_path / "old")
    shell = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = ["sh", "-c", shell, "sh", str(tmp_path), sys.executable, READ_ONLY, repr(HEADER)]
    ended = subprocess.run(
        [*own_mounts, *command], capture_output=True, text=True, check=True, timeout=600
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "Read-only file system" in line
        assert str(tmp_path) in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("place", ["s", "."])
def test_a_folder_of_another_user_is_refused(tmp_path: Path, place: str, *, resume: bool) -> None:
    if resume:
        begun(tmp_path / "s")
    else:
        (tmp_path / "s").mkdir()
    os.chown(tmp_path / place, 1234, 1234)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=r"belongs to another user \(uid 1234\).*--study"):
        (resumed if resume else begun)(tmp_path / "s")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    begun(tmp_path / "s")
    (tmp_path / "s").chmod(0o777)
    with pytest.raises(InputError, match=r"every user may write to .*/s: chmod go-w it.*--study"):
        resumed(tmp_path / "s")


def test_a_study_below_a_folder_for_all_is_kept_where_that_is_sticky(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert begun(tmp_path / "s").is_new
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="every user may write to"):
        resumed(tmp_path / "s")


@pytest.mark.parametrize("name", ["result.json", "trials/0000-0", "trials/deep/x"])
def test_a_link_that_leads_out_of_a_study_is_refused(tmp_path: Path, name: str) -> None:
    begun(tmp_path / "s")
    (tmp_path / "s/trials/deep").mkdir()
    (tmp_path / "s" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match=rf"s/{name}: a link out of .*{tmp_path}/outside: remove"):
        resumed(tmp_path / "s")


def test_a_link_within_a_study_is_left_alone(tmp_path: Path) -> None:
    begun(tmp_path / "s")
    (tmp_path / "s/newest").symlink_to("trials")
    assert not resumed(tmp_path / "s").is_new


@pytest.mark.parametrize("name", ["journal.jsonl", "lock"])
def test_a_study_does_not_open_links(tmp_path: Path, name: str) -> None:
    begun(tmp_path / "s")
    (tmp_path / "s" / name).rename(tmp_path / "s/other")
    (tmp_path / "s" / name).symlink_to("other")
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        resumed(tmp_path / "s")


def test_what_a_killed_driver_was_writing_is_removed(tmp_path: Path) -> None:
    begun(tmp_path / "s")
    partial = tmp_path / "s/.amp-ray-0123.partial"
    partial.touch()
    resumed(tmp_path / "s")
    assert not partial.exists()

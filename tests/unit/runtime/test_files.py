import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_ray.errors import AmpRayError, InputError
from amp_ray.runtime.files import (
    ExperimentFiles,
    load_experiment,
    load_slice_table,
    load_strategies,
    not_linked,
    read_text,
    read_texts,
    write_text,
)
from amp_ray.runtime.hosts.ssh import read_known_hosts
from amp_ray.runtime.hosts.ssh_config import SshConfig
from amp_ray.runtime.study.folder import check_folder
from amp_ray.runtime.study.journal import Journal
from amp_ray.runtime.study.reading import read_study, study_state
from amp_ray.runtime.threads import in_thread
from amp_ray.runtime.whole_file import read_regular
from support.bounded import LONGEST_S
from support.experiments import SMALL, small_experiment
from support.metis import metis_profile_files


def test_text_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbftp,pp")
    assert read_text(tmp_path / "x.csv") == "tp,pp"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"\xff", "not a text file .byte 0 is not UTF-8.")],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"^{path}: {message}$"):
        read_text(path)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be read: "):
        read_text(tmp_path / name)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are those of POSIX")
def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(InputError, match=r"cannot be read: Not a directory$"):
        read_text(tmp_path / "x" / "y")


def test_names_are_relative_to_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\n", encoding="utf-8")
    assert ExperimentFiles(base=tmp_path).text("hosts") == "a slots=1\n"


def test_absolute_names_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\n", encoding="utf-8")
    assert ExperimentFiles(base=Path("elsewhere")).text(str(tmp_path / "hosts"))


def test_the_home_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^~nobody-of-that-name/x: cannot be found: "):
        ExperimentFiles(base=tmp_path).text("~nobody-of-that-name/x")


def test_a_folder_gives_its_yaml_and_csv_files_only(tmp_path: Path) -> None:
    for name in ("profile.yaml", "T4.csv", "plot.png"):
        (tmp_path / name).write_bytes(b"\xff" if name == "plot.png" else b"x")
    assert ExperimentFiles(base=tmp_path).folder(".") == {"T4.csv": "x", "profile.yaml": "x"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no such folder"),
        ("file", "this is a file; expected a folder"),
        ("a\0b", "cannot be read: "),
        ("a" * 5000, "cannot be read: "),
    ],
)
def test_a_folder_that_is_none_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f": {message}"):
        ExperimentFiles(base=tmp_path).folder(name)


def test_shipped_profiles_are_found_from_anywhere() -> None:
    found = ExperimentFiles(base=Path("elsewhere")).folder("shipped:amp-2022-gpt2")
    assert sorted(found) == ["T4.csv", "V100-16.csv", "profile.yaml"]


@pytest.mark.parametrize("name", ["shipped:none", "shipped:../tables", "shipped:"])
def test_what_is_not_shipped_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(
        InputError, match="no such profile is shipped; there are shipped:amp-2022-g"
    ):
        ExperimentFiles(base=Path("elsewhere")).folder(name)


def test_a_metis_profile_is_read_from_its_json_files_only(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_bytes(b"\xff")
    for name, text in metis_profile_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    experiment = small_experiment(("num_layers: 6", "num_layers: 2"))
    profile = ExperimentFiles(base=tmp_path).foreign_profile(
        "metis", ".", experiment.model, experiment.cluster.device_types
    )
    assert sorted(profile.tables["T4"]) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_an_experiment_and_its_strategies_are_read(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    strategies = tmp_path / "given.csv"
    strategies.write_text("tp,pp,dp,micro_batch_size\n1,2,2,1\n", encoding="utf-8")
    experiment = load_experiment(tmp_path / "small.yaml")
    (given,) = load_strategies(strategies, experiment)
    assert given.candidate is not None
    assert given.candidate.num_micro_batches == 4


def test_a_written_file_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for text in ("old and longer", "new"):
        write_text(path, text)
    assert path.read_text(encoding="utf-8") == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["missing/result.json", "folder", "file/result.json", "", ".."])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        InputError,
        match=r"cannot be written: (No such file or directory|Is a directory|Not a directory)",
    ):
        write_text(tmp_path / name, "text")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_long_text_may_come_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, (f"{number}\n" for number in range(3)))
    assert path.read_text(encoding="utf-8") == "0\n1\n2\n"


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be written: "):
        write_text(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_text(path, "text")
        assert reader.read() == "text"
    assert path.is_fifo()


READERS: dict[str, Callable[[Path], object]] = {
    "experiment": load_experiment,
    "profile folder": lambda path: read_texts(path.parent, (path.suffix,)),
    "slice table": load_slice_table,
    "file of a program": lambda path: read_regular(path, 10),
    "known hosts": lambda path: read_known_hosts([str(path)]),
    "ssh configuration": lambda path: SshConfig(str(path)),
    "journal": Journal.open,
    "journal to show": lambda path: study_state(path.parent),
    "study": lambda path: check_folder(path.parent, resume=True),
    "study to report": lambda path: read_study(path.parent),
    "record of a profile": lambda path: not_linked(str(path), os.O_WRONLY | os.O_APPEND),
}


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("what", READERS)
def test_what_is_no_file_is_refused_and_not_waited_for(
    tmp_path: Path, what: str, kind: str
) -> None:
    for name in ("journal.jsonl", "result.json"):
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
        else:
            try:
                os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
            except PermissionError:
                pytest.skip("making a device needs root")
    message = "expected a file|neither a file nor a folder|no study with a result"
    path = tmp_path / ("journal.jsonl" if "journal" in what else "result.json")
    with pytest.raises((AmpRayError, OSError), match=message):
        in_thread(READERS[what], path).result(LONGEST_S)


def test_a_pipe_of_a_shell_is_read() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as file:
        file.write("text")
        file.close()
        assert read_text(Path(f"/dev/fd/{reader}")) == "text"
    assert read_text(Path(os.devnull)) == ""

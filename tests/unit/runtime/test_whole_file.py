import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_ray.errors import InputError
from amp_ray.runtime.files import write_text
from amp_ray.runtime.whole_file import write_whole

NOBODY = 65534


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def as_root() -> None:
    if os.geteuid():
        pytest.skip("only root can give a file to another user")


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine", encoding="ascii")
    path.symlink_to(victim)
    write_whole(path, [b"a", b"b"])
    assert not path.is_symlink()
    assert path.read_bytes() == b"ab"
    assert victim.read_text("ascii") == "mine"


def test_a_link_at_the_temporary_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _num_bytes: "guessed")
    link = tmp_path / ".amp-ray-guessed.partial"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "file", [b"x"])
    assert list(tmp_path.iterdir()) == [link]


def test_temporary_names_cannot_be_foreseen(tmp_path: Path) -> None:
    names: list[str] = []

    def note() -> Iterator[bytes]:
        names.extend(path.name for path in tmp_path.iterdir() if path.name != "file")
        yield b""

    for _ in range(2):
        write_whole(tmp_path / "file", note())
    assert len(set(names)) == 2


def test_a_write_that_is_interrupted_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, pieces())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_modes_are_the_umasks_or_closer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "open")
    assert mode(path) == 0o644
    path.chmod(0o600)
    write_text(path, "stays closed")
    assert mode(path) == 0o600
    write_text(tmp_path / "secret", "closed", mode=0o600)
    assert mode(tmp_path / "secret") == 0o600
    (tmp_path / "was open").touch(mode=0o644)
    write_text(tmp_path / "was open", "closed now", mode=0o600)
    assert mode(tmp_path / "was open") == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_a_users_own_link_is_followed(tmp_path: Path, *, exists: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if exists:
        target.write_text("old", encoding="ascii")
    link.symlink_to("second")
    (tmp_path / "second").symlink_to("folder/target")
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text("ascii") == "new"


def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    as_root()
    victim, link = tmp_path / "victim", tmp_path / "out.json"
    victim.write_text("mine", encoding="ascii")
    link.symlink_to(victim)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(InputError, match=rf"cannot be written: .*another user \(uid {NOBODY}\)"):
        write_text(link, "new")
    assert victim.read_text("ascii") == "mine"


def test_links_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    with pytest.raises(InputError, match="Too many levels of symbolic links"):
        write_text(link, "text")


def test_an_open_descriptor_gets_the_text_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as file:
        link = Path(f"/dev/fd/{file.fileno()}")
        write_text(link, "text")
        assert link.exists()
    assert path.read_text("ascii") == "text"

import os
from pathlib import Path

import pytest

from amp_ray.owners import why_untrusted

NOBODY = 65534
pytestmark = pytest.mark.skipif(bool(os.geteuid()), reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "inner"
    path.mkdir(parents=True, mode=0o755)
    return path


def test_a_users_own_folder_is_trusted_and_so_is_one_that_is_not_there_yet(folder: Path) -> None:
    assert why_untrusted(folder) is None
    assert why_untrusted(folder / "new" / "er") is None
    assert why_untrusted(folder / ".." / "inner") is None


@pytest.mark.parametrize("place", [".", ".."])
@pytest.mark.parametrize(
    ("mode", "group", "who"),
    [(0o757, 0, "every user"), (0o775, NOBODY, "the group "), (0o775, 12345, "the group 12345")],
)
def test_a_folder_that_others_may_write_to_is_not(
    folder: Path, place: str, mode: int, group: int, who: str
) -> None:
    (folder / place).chmod(mode)
    os.chown(folder / place, 0, group)
    reason = why_untrusted(folder)
    assert reason is not None
    assert reason.startswith(who)
    assert f"may write to {(folder / place).resolve()}: chmod go-w it" in reason


def test_a_group_of_the_owner_alone_is_the_owner(folder: Path) -> None:
    folder.chmod(0o775)
    assert why_untrusted(folder) is None


def test_the_sticky_bit_guards_what_is_in_a_folder_and_not_the_folder(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert why_untrusted(folder) is None
    assert why_untrusted(folder.parent / "new") is None
    assert why_untrusted(folder.parent) is not None


@pytest.mark.parametrize("place", [".", ".."])
def test_root_trusts_no_folder_of_an_ordinary_user(folder: Path, place: str) -> None:
    os.chown(folder / place, 1234, 1234)
    reason = why_untrusted(folder)
    assert reason == f"{(folder / place).resolve()} belongs to another user (uid 1234)"


def test_links_are_followed_and_judged_on_the_way(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("outer")
    assert why_untrusted(link / "inner") is None
    (folder / "absolute").symlink_to(link)
    assert why_untrusted(folder / "absolute" / "inner") is None
    folder.chmod(0o777)
    assert why_untrusted(link / "inner") is not None
    folder.chmod(0o755)
    os.lchown(link, NOBODY, NOBODY)
    assert why_untrusted(link / "inner") is not None
    assert why_untrusted(folder / "absolute" / "inner") is not None


def test_a_link_in_a_circle_ends(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    assert why_untrusted(tmp_path / "link") is None

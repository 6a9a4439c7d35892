"""Checks whether other users could change a folder that this user trusts."""

import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 40  # on the way to a path, as many as the kernel follows


def why_untrusted(path: Path) -> str | None:
    """Say which users other than this one and root could change or replace a folder.

    The check covers every existing folder and link on the way. A folder that others may write to
    lets them replace its entries, unless it has the sticky bit, as ``/tmp`` has.

    Args:
        path: The folder.

    Returns:
        The reason with advice; None if no other user could.
    """
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    for place, status, is_end in _way(path):
        if status.st_uid not in trusted:
            return f"{place} belongs to another user ({_name(status.st_uid)})"
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        if (is_end or not is_sticky) and (reason := _why_open(place, status)) is not None:
            return reason
    return None


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield every folder and link on the way to a path, and whether it is the path's end."""
    current, num_links = Path("/"), 0
    rest = deque(path.absolute().parts[1:])
    yield current, current.stat(), not rest
    while rest and num_links <= _MOST_LINKS:
        part = rest.popleft()
        if part == "..":
            current = current.parent
            continue
        try:
            status = (current / part).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        is_link = stat.S_ISLNK(status.st_mode)
        yield current / part, status, not rest and not is_link
        if is_link:
            num_links += 1
            target = (current / part).readlink()
            rest.extendleft(reversed(target.parts[target.is_absolute() :]))
            current = Path("/") if target.is_absolute() else current
        else:
            current /= part


def _why_open(place: Path, status: os.stat_result) -> str | None:
    """Say that others may write to a folder."""
    if stat.S_ISLNK(status.st_mode):
        return None  # its parent folder decides
    by_all = bool(status.st_mode & stat.S_IWOTH)
    by_group = bool(status.st_mode & stat.S_IWGRP) and not _is_private(status)
    if not by_all and not by_group:
        return None
    who = "every user" if by_all else f"the group {_group(status.st_gid)}"
    return f"{who} may write to {place}: chmod go-w it"


def _is_private(status: os.stat_result) -> bool:
    """Return whether a file's group has only its owner, as on systems with a group per user."""
    if status.st_gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    is_users = (user.pw_gid, user.pw_name) == (group.gr_gid, group.gr_name)
    return is_users and not set(group.gr_mem) - {user.pw_name}


def _name(user: int) -> str:
    try:
        return f"{pwd.getpwuid(user).pw_name}, uid {user}"
    except KeyError:
        return f"uid {user}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)

"""CPU quotas for test hosts, with cgroups of version 1 or 2."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PERIOD_US: Final = 20_000
"""Shorter than the kernel's default, so that short steps see the quota too."""

_DEFAULT_SHARES: Final = {1: 1024, 2: 100}
"""Weight of one task's group in each version; the whole cluster runs about one task per core."""

_MOST_SHARES: Final = {1: 262_144, 2: 10_000}
"""What the kernel accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """A group of groups, one per host."""

    version: int  # of the cgroup file system; 0 where none can be used
    folder: str | None  # the common parent; None where none can be used
    reason: str | None  # why not, or None

    @classmethod
    def create(cls, name: str, weight: int = 1) -> Self:
        """Make the parent group, if this machine lets us.

        ``weight`` counts against one busy program per core.
        """
        root = Path("/sys/fs/cgroup")
        version = 2 if (root / "cgroup.controllers").exists() else 1
        folder = root / name if version == 2 else root / "cpu" / name  # noqa: PLR2004
        try:
            folder.mkdir()
            _prepare(folder, version, weight)
        except OSError as error:
            if folder.is_dir():
                folder.rmdir()
            return cls(version=0, folder=None, reason=f"no CPU controller: {error}")
        return cls(version=version, folder=str(folder), reason=None)

    def add(self, host: str) -> str | None:
        """Make the group of a host; return its folder, or None where there are no quotas."""
        if self.folder is None:
            return None
        group = Path(self.folder) / host
        group.mkdir()
        return str(group)

    def limit(self, host: str, cores: float | None) -> None:
        """Set the quota of a host."""
        if self.folder is None:
            raise RuntimeError(self.reason)
        quota = None if cores is None else int(cores * _PERIOD_US)
        group = Path(self.folder) / host
        if self.version == 1:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US), encoding="ascii")
            text = "-1" if quota is None else str(quota)
            (group / "cpu.cfs_quota_us").write_text(text, encoding="ascii")
        else:
            text = f"{'max' if quota is None else quota} {_PERIOD_US}"
            (group / "cpu.max").write_text(text, encoding="ascii")


def _prepare(folder: Path, version: int, weight: int) -> None:
    """Give the parent its weight and, in version 2, hand the controller down."""
    shares = _DEFAULT_SHARES[version] * (os.cpu_count() or 1) * weight
    text = str(min(shares, _MOST_SHARES[version]))
    if version == 1:
        (folder / "cpu.shares").write_text(text, encoding="ascii")
        return
    for group in (folder.parent, folder):
        (group / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
    (folder / "cpu.weight").write_text(text, encoding="ascii")

"""Measured times of layers, which anchor the cost model; an analytic profile has none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.inputs.published_profile import PublishedProfile
from amp_ray.inputs.slice_table import SlicePoints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Anchor:
    """Measured times of all layers at one (tp, micro-batch size)."""

    forward_s: FloatArray  # shape ``(num_layers,)``. Seconds of one micro-batch's forward pass.
    # Shape ``(num_layers,)``; None where only the forward pass was measured
    backward_s: FloatArray | None = None

    def __post_init__(self) -> None:
        for times in (self.forward_s, self.backward_s):
            if times is None:
                continue
            if not (np.isfinite(times).all() and (times >= 0).all()):
                wrong = times[~(np.isfinite(times) & (times >= 0))]
                message = f"layer times must be finite and not negative, found {wrong.tolist()}"
                raise ValueError(message)
            times.setflags(write=False)


DeviceTable = Mapping[tuple[int, int], Anchor]  # anchors of one device by (tp, micro-batch size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """A source of layer times.

    An analytic profile has no tables: every time is counted work on a data sheet. A measured
    one has a table per device, and the counted work only says how a measured time changes
    with the micro-batch.
    """

    source: str
    # Anchors by device name; empty for an analytic profile
    tables: Mapping[str, DeviceTable] = field(default_factory=dict)
    # How often the measured forward pass of a block was computed within its time
    forward_runs: int = 1
    # Whether tensor-parallel all-reduces are within the measured times
    includes_all_reduces: bool = False
    # What the tables were made from, where another planner published it. Such a
    # profile cannot be completed by measuring, so candidates that need more are dropped.
    published: PublishedProfile | None = None
    # What was measured of token slices of a block, by device name and tp
    slices: Mapping[tuple[str, int], SlicePoints] = field(default_factory=dict)
    # What was measured of single operators, where the profile has them; the tables are then their
    # sums over layers, empty where the model's layers are none of them
    operators: OperatorProfile | None = None

    @property
    def is_measured(self) -> bool:
        """Whether there are measurements to anchor at."""
        return bool(self.tables)

    def anchors(self, device: Device, tp: int) -> dict[int, Anchor]:
        """Return the measured times by micro-batch size; empty for an analytic profile.

        A measured profile without this device or tp raises an ``InputError``, because only the
        search knows which times it needs.
        """
        if not self.tables:
            if self.operators is not None:
                raise InputError(
                    f"{self.source} has times of operators, not of the model's layers; plan with "
                    "search.space operator"
                )
            return {}
        table = self.tables.get(device.name)
        if table is None:
            raise InputError(
                f"{self.source} has no times for device {device.name!r}, only for "
                f"{', '.join(self.tables)}"
            )
        anchors = {size: anchor for (at_tp, size), anchor in table.items() if at_tp == tp}
        if not anchors:
            tps = _tps(table)
            raise InputError(
                f"{self.source} has no times at tp {tp} for device {device.name!r}, only at tp "
                f"{', '.join(map(str, tps))}; measure it, or limit the search with search.max_tp"
            )
        return anchors

    def gap(self, devices: Iterable[Device], tp: int) -> str | None:
        """Name the tp and device that a candidate needs and a published profile lacks.

        None if nothing is missing, and for a profile of our own, which can be measured anew: there
        `anchors` raises.
        """
        if self.published is None and self.operators is None:
            return None
        needed = {1, tp} if self.includes_all_reduces else {tp}
        for device in devices:
            missing = sorted(needed.difference(_tps(self.tables.get(device.name, {}))))
            if missing:
                return f"tp {missing[0]} on {device.name}"
        return None


def _tps(table: DeviceTable) -> list[int]:
    return sorted({tp for tp, _ in table})


ANALYTIC = Profile(source="analytic")  # planning without any measurement

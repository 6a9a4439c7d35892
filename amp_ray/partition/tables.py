"""The costs of stages (`StageTables`) and the possible stages (`OptionTable`)."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.arrays import element, frozen_integers, frozen_times
from amp_ray.partition.rows import distinct_rows

NO_ROW = -1  # in a column of rows: no cost, or no memory limit


def _none_given() -> FloatArray:
    """Return the default of an omitted table."""
    return np.empty(0)


def _no_rows_given() -> IntArray:
    """Return the default of an omitted column of rows."""
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTables:
    """Tables over a chain of ``L`` layers, shared by any number of options.

    Column ``a`` stands for the boundary after ``a`` layers. A stage ``[a, b)`` by an option with
    time row ``t``, cut row ``c``, bottleneck row ``e`` and memory row ``m``

    - takes ``time_prefix_s[t, b] - time_prefix_s[t, a] + overhead_s``;
    - costs ``cut_time_s[c, a]`` once for the cut before it;
    - has a bottleneck time, whose maximum over stages counts: its time plus
      ``bottleneck_start_s[e, a] + bottleneck_end_s[e, b]``, such as blocking transfers;
    - fits into memory if ``a >= earliest_start[m, b]``;
    - holds the layers that every stage needs if ``a <= latest_start[b]``.

    Arrays are copied and read-only. All tables but the first may be left out.

    Raises:
        ValueError: If shapes disagree, a time is negative or not finite, prefix sums decrease, or
            a start lies behind its end.
    """

    time_prefix_s: FloatArray  # shape ``(T, L + 1)``. Prefix sums of the layers' times.
    # Shape ``(K, L + 1)``. Column 0 is never charged.
    cut_time_s: FloatArray = field(default_factory=_none_given)
    # Shape ``(B, L + 1)``. By the boundary at which the stage starts.
    bottleneck_start_s: FloatArray = field(default_factory=_none_given)
    # Shape ``(B, L + 1)``. By the boundary at which it ends.
    bottleneck_end_s: FloatArray = field(default_factory=_none_given)
    # Shape ``(M, L + 1)``. Smallest ``a`` with which a stage that ends at this boundary fits; the
    # boundary itself if none fits.
    earliest_start: IntArray = field(default_factory=_no_rows_given)
    # Shape ``(L + 1,)``. Largest ``a`` at which a stage that ends here may start: below the
    # boundary and not descending, -1 if there is none. It excludes stages that have only layers
    # that cannot form a stage alone.
    latest_start: IntArray = field(default_factory=_no_rows_given)

    def __post_init__(self) -> None:
        """Check and freeze."""
        self._freeze("time_prefix_s", frozen_times("time_prefix_s", self.time_prefix_s, 2))
        if not self.time_prefix_s.shape[0] or not self.num_layers > 0:
            msg = f"time_prefix_s has shape {self.time_prefix_s.shape}, expected (T, layers + 1)"
            raise ValueError(msg)
        _check_prefix_sums(self.time_prefix_s)
        for name in ("cut_time_s", "bottleneck_start_s", "bottleneck_end_s"):
            self._freeze(name, frozen_times(name, self._given(name), 2))
        starts = frozen_integers("earliest_start", self._given("earliest_start"), 2, smallest=0)
        self._freeze("earliest_start", starts)
        before = np.arange(self.num_layers + 1) - 1
        latest = self.latest_start if np.size(self.latest_start) else before
        latest = frozen_integers("latest_start", latest, 1, smallest=-1)
        self._freeze("latest_start", latest)
        self._match_bottlenecks()
        self._check_widths()
        _check_starts(self.earliest_start)
        if latest.shape != before.shape or (latest > before).any() or (np.diff(latest) < 0).any():
            msg = f"latest_start is {latest}, expected not descending and at most {before}"
            raise ValueError(msg)

    @property
    def num_layers(self) -> int:
        """Number of layers, ``L``."""
        return int(self.time_prefix_s.shape[1]) - 1

    def _freeze(self, name: str, array: FloatArray | IntArray) -> None:
        """Set a field of this frozen dataclass during `__post_init__`."""
        object.__setattr__(self, name, array)

    def _given(self, name: str) -> ArrayLike:
        """Return a table, or one without rows if it was omitted."""
        table: ArrayLike = getattr(self, name)
        return table if np.size(table) else np.empty((0, self.num_layers + 1), np.int64)

    def _match_bottlenecks(self) -> None:
        """Fill the table of one end with zeros if only the other one exists."""
        starts, ends = len(self.bottleneck_start_s), len(self.bottleneck_end_s)
        if starts and not ends:
            self._freeze(
                "bottleneck_end_s", frozen_times("", np.zeros_like(self.bottleneck_start_s), 2)
            )
        elif ends and not starts:
            self._freeze(
                "bottleneck_start_s", frozen_times("", np.zeros_like(self.bottleneck_end_s), 2)
            )
        elif starts != ends:
            msg = (
                f"bottleneck_start_s has {starts} rows and bottleneck_end_s {ends}: "
                "give both the same rows"
            )
            raise ValueError(msg)

    def _check_widths(self) -> None:
        """Raise if a table has another number of layers."""
        for name in ("cut_time_s", "bottleneck_start_s", "bottleneck_end_s", "earliest_start"):
            columns = getattr(self, name).shape[1]
            if columns != self.num_layers + 1:
                msg = (
                    f"{name} has {columns} columns, but time_prefix_s has {self.num_layers + 1}: "
                    "one per boundary, both ends included"
                )
                raise ValueError(msg)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptionTable:
    """The edges of a graph of resource states: option ``e`` makes one stage of one or more layers.

    In state 0 nothing is used. The planner defines the other states, such as the number of stages,
    or the number of devices taken of each type. Every stage uses some resource, so options lead
    from lower to higher states. Without states, option ``e`` leads from state ``e`` to ``e + 1``: a
    fixed row of stages.

    Arrays are copied and read-only. Row -1, the default, means none.

    Raises:
        ValueError: If shapes disagree, a state or row is out of range, an option does not lead
            to a higher state, or a time is negative or not finite.
    """

    time_row: IntArray  # shape ``(E,)``. Row of `StageTables.time_prefix_s`.
    from_state: IntArray = field(default_factory=_no_rows_given)  # shape ``(E,)``
    to_state: IntArray = field(default_factory=_no_rows_given)  # shape ``(E,)``
    # Shape ``(E,)``. Row of `StageTables.cut_time_s`.
    cut_row: IntArray = field(default_factory=_no_rows_given)
    # Shape ``(E,)``. Row of `StageTables.bottleneck_start_s` and of ``bottleneck_end_s``.
    bottleneck_row: IntArray = field(default_factory=_no_rows_given)
    # Shape ``(E,)``. Row of `StageTables.earliest_start`.
    memory_row: IntArray = field(default_factory=_no_rows_given)
    # Shape ``(E,)``. Part of the stage's time, whatever its layers.
    overhead_s: FloatArray = field(default_factory=_none_given)
    # Shape ``(E,)``. Charged once per iteration, such as a gradient sync.
    fixed_s: FloatArray = field(default_factory=_none_given)

    def __post_init__(self) -> None:
        """Check and freeze."""
        self._freeze_integers("time_row", smallest=0)
        if not self.num_options:
            msg = "time_row is empty: a partition needs at least one option"
            raise ValueError(msg)
        in_a_row = np.arange(self.num_options)
        self._freeze_integers("from_state", smallest=0, default=in_a_row)
        self._freeze_integers("to_state", smallest=1, default=in_a_row + 1)
        without = np.full(self.num_options, NO_ROW)
        for name in ("cut_row", "bottleneck_row", "memory_row"):
            self._freeze_integers(name, smallest=NO_ROW, default=without)
        for name in ("overhead_s", "fixed_s"):
            values = getattr(self, name)
            values = values if np.size(values) else np.zeros(self.num_options)
            object.__setattr__(self, name, frozen_times(name, values, 1))
        self._check_lengths()
        self._check_states()

    @property
    def num_options(self) -> int:
        """Number of options, ``E``."""
        return self.time_row.size

    @property
    def num_states(self) -> int:
        """Number of states, ``R``: the highest state plus one."""
        return int(self.to_state.max()) + 1

    @cached_property
    def order(self) -> IntArray:
        """Shape ``(E,)``. Canonical order of the options, whatever their order in the table.

        Ascending by target state, then source state, rows and times.
        """
        return np.lexsort(
            (
                self.fixed_s,
                self.overhead_s,
                self.memory_row,
                self.cut_row,
                self.bottleneck_row,
                self.time_row,
                self.from_state,
                self.to_state,
            )
        )

    @cached_property
    def classes(self) -> tuple[IntArray, IntArray]:
        """Classes of options with equal time row, bottleneck row and overhead.

        One option of each class, and the class of every option.
        """
        columns = [self.time_row, self.bottleneck_row]
        if self.overhead_s.any():
            columns.append(np.unique(self.overhead_s, return_inverse=True)[1].reshape(-1))
        return distinct_rows(columns)

    def _freeze_integers(
        self, name: str, *, smallest: int, default: IntArray | None = None
    ) -> None:
        """Freeze and set a column of integers during `__post_init__`."""
        values = getattr(self, name)
        values = default if default is not None and not np.size(values) else values
        object.__setattr__(self, name, frozen_integers(name, values, 1, smallest=smallest))

    def _check_lengths(self) -> None:
        """Raise if a column does not have one value per option."""
        for name in self.__dataclass_fields__:
            length = getattr(self, name).size
            if length != self.num_options:
                msg = f"{name} has {length} values for {self.num_options} options in time_row"
                raise ValueError(msg)

    def _check_states(self) -> None:
        """Raise if an option does not lead to a higher state."""
        backwards = np.flatnonzero(self.from_state >= self.to_state)
        if backwards.size:
            option = int(backwards[0])
            msg = (
                f"option {option} leads from state {self.from_state[option]} to state "
                f"{self.to_state[option]}: number the states so that options lead upwards"
            )
            raise ValueError(msg)


def _check_prefix_sums(time_prefix_s: FloatArray) -> None:
    """Raise if a layer has negative time."""
    decreases = time_prefix_s[:, 1:] < time_prefix_s[:, :-1]
    if decreases.any():
        row, layer = (int(index) for index in np.argwhere(decreases)[0])
        before, after = time_prefix_s[row, layer], time_prefix_s[row, layer + 1]
        msg = (
            f"{element('time_prefix_s', row, layer + 1)} is {after} after {before}: "
            f"layer {layer} would take negative time; give prefix sums, not layer times"
        )
        raise ValueError(msg)


def _check_starts(earliest_start: IntArray) -> None:
    """Raise if a start lies behind its end."""
    behind = earliest_start > np.arange(earliest_start.shape[1])
    if behind.any():
        row, end = (int(index) for index in np.argwhere(behind)[0])
        msg = (
            f"{element('earliest_start', row, end)} is {earliest_start[row, end]}, expected at "
            f"most {end}, which says that no stage ending there fits"
        )
        raise ValueError(msg)

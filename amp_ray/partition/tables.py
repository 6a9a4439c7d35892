"""The costs of stages (`StageTables`) and the possible stages (`OptionTable`)."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.partition.rows import distinct_rows

NO_ROW = -1  # in a column of rows: no cost, or no memory limit

Number = TypeVar("Number", bound=np.generic)


def _no_times() -> FloatArray:
    return np.empty(0)


def _no_integers() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTables:
    """Tables over a chain of ``L`` layers, shared by any number of options.

    Column ``a`` stands for the boundary after ``a`` layers. A stage ``[a, b)`` by an option with
    time row ``t``, cut row ``c``, bottleneck row ``e`` and memory row ``m``

    - takes ``time_prefix_s[t, b] - time_prefix_s[t, a] + overhead_s``;
    - costs ``cut_time_s[c, a]`` once for the cut before it;
    - has a bottleneck time: its time plus ``bottleneck_start_s[e, a] + bottleneck_end_s[e, b]``
      for blocking transfers at its ends; the objective counts the largest bottleneck time;
    - fits into memory if ``a >= earliest_start[m, b]``;
    - holds the layers that every stage needs if ``a <= latest_start[b]``.

    Arrays are copied and read-only. All tables but the first may be left out.

    Raises:
        ValueError: If shapes disagree, a time is negative or not finite, prefix sums decrease, or
            a start lies behind its end.
    """

    time_prefix_s: FloatArray  # shape ``(T, L + 1)``. Prefix sums of the layers' times.
    # Shape ``(K, L + 1)``. Column 0 is never charged.
    cut_time_s: FloatArray = field(default_factory=_no_times)
    # Shape ``(B, L + 1)``. By the boundary at which the stage starts.
    bottleneck_start_s: FloatArray = field(default_factory=_no_times)
    # Shape ``(B, L + 1)``. By the boundary at which it ends.
    bottleneck_end_s: FloatArray = field(default_factory=_no_times)
    # Shape ``(M, L + 1)``. Smallest ``a`` with which a stage that ends at this boundary fits; the
    # boundary itself if none fits.
    earliest_start: IntArray = field(default_factory=_no_integers)
    # Shape ``(L + 1,)``. Largest ``a`` at which a stage that ends here may start: below the
    # boundary and not descending, -1 if there is none. It rules out stages whose layers all cannot
    # form a stage alone.
    latest_start: IntArray = field(default_factory=_no_integers)

    def __post_init__(self) -> None:
        """Check and freeze."""
        prefix_s = frozen_times("time_prefix_s", self.time_prefix_s, 2)
        if not len(prefix_s) or prefix_s.shape[1] < 2:  # noqa: PLR2004 - a layer has two ends
            msg = f"time_prefix_s has shape {prefix_s.shape}, expected (T, layers + 1)"
            raise ValueError(msg)
        _check_prefix_sums(prefix_s)
        nothing = np.empty((0, prefix_s.shape[1]), np.int64)
        ends, starts = np.arange(prefix_s.shape[1]), self.earliest_start
        starts = frozen_integers(
            "earliest_start", starts if np.size(starts) else nothing, 2, smallest=0
        )
        tables = {
            "time_prefix_s": prefix_s,
            **{
                name: frozen_times(name, table if np.size(table) else nothing, 2)
                for name in ("cut_time_s", "bottleneck_start_s", "bottleneck_end_s")
                for table in [getattr(self, name)]
            },
            "earliest_start": starts,
        }
        for name, table in tables.items():
            if table.shape[1] != len(ends):
                msg = (
                    f"{name} has {table.shape[1]} columns, but time_prefix_s has {len(ends)}: "
                    "one per boundary, both ends included"
                )
                raise ValueError(msg)
        num_starts, num_ends = len(tables["bottleneck_start_s"]), len(tables["bottleneck_end_s"])
        if num_starts != num_ends:
            msg = (
                f"bottleneck_start_s has {num_starts} rows and bottleneck_end_s {num_ends}: "
                "give both the same rows"
            )
            raise ValueError(msg)
        _check_starts(starts)
        latest = self.latest_start if np.size(self.latest_start) else ends - 1
        latest = frozen_integers("latest_start", latest, 1, smallest=-1)
        if latest.shape != ends.shape or (latest >= ends).any() or (np.diff(latest) < 0).any():
            msg = f"latest_start is {latest}, expected not descending and at most {ends - 1}"
            raise ValueError(msg)
        for name, table in (tables | {"latest_start": latest}).items():
            object.__setattr__(self, name, table)

    @property
    def num_layers(self) -> int:
        """Number of layers, ``L``."""
        return int(self.time_prefix_s.shape[1]) - 1


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
    from_state: IntArray = field(default_factory=_no_integers)  # shape ``(E,)``
    to_state: IntArray = field(default_factory=_no_integers)  # shape ``(E,)``
    # Shape ``(E,)``. Row of `StageTables.cut_time_s`.
    cut_row: IntArray = field(default_factory=_no_integers)
    # Shape ``(E,)``. Row of `StageTables.bottleneck_start_s` and of ``bottleneck_end_s``.
    bottleneck_row: IntArray = field(default_factory=_no_integers)
    # Shape ``(E,)``. Row of `StageTables.earliest_start`.
    memory_row: IntArray = field(default_factory=_no_integers)
    # Shape ``(E,)``. Part of the stage's time that does not depend on its layers.
    overhead_s: FloatArray = field(default_factory=_no_times)
    # Shape ``(E,)``. Charged once per iteration, such as a gradient sync.
    fixed_s: FloatArray = field(default_factory=_no_times)

    def __post_init__(self) -> None:
        """Check and freeze."""
        number = np.size(self.time_row)
        if not number:
            msg = "time_row is empty: a partition needs at least one option"
            raise ValueError(msg)
        in_a_row, no_rows, no_times = np.arange(number), np.full(number, NO_ROW), np.zeros(number)
        defaults = {"from_state": in_a_row, "to_state": in_a_row + 1}
        smallest = {"time_row": 0, "from_state": 0, "to_state": 1}
        for column in fields(self):
            name, values = column.name, getattr(self, column.name)
            if name in {"overhead_s", "fixed_s"}:
                values = frozen_times(name, values if np.size(values) else no_times, 1)
            else:
                values = values if np.size(values) else defaults.get(name, no_rows)
                values = frozen_integers(name, values, 1, smallest=smallest.get(name, NO_ROW))
            if values.size != number:
                msg = f"{name} has {values.size} values for {number} options in time_row"
                raise ValueError(msg)
            object.__setattr__(self, name, values)
        backwards = np.flatnonzero(self.from_state >= self.to_state)
        if backwards.size:
            option = int(backwards[0])
            msg = (
                f"option {option} leads from state {self.from_state[option]} to state "
                f"{self.to_state[option]}: number the states so that options lead upwards"
            )
            raise ValueError(msg)

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


def frozen_times(name: str, values: ArrayLike, num_dimensions: int) -> FloatArray:
    """Return a read-only, contiguous array of times, copied unless it is one already.

    Raises:
        ValueError: If the dimensions differ, or a time is negative, infinite or not a number.
    """
    array = _frozen(name, values, np.float64, num_dimensions)
    # NaN fails every comparison, so two reductions find every invalid value.
    if not (array.min(initial=0.0) >= 0.0 and array.max(initial=0.0) < np.inf):
        index = np.argwhere(~((array >= 0.0) & (array < np.inf)))[0]
        msg = (
            f"{element(name, *index)} is {array[tuple(index)]}: "
            "times must be finite and not negative"
        )
        raise ValueError(msg)
    return array


def frozen_integers(
    name: str, values: ArrayLike, num_dimensions: int, *, smallest: int
) -> IntArray:
    """Return a read-only, contiguous array of integers, copied unless it is one already.

    Raises:
        ValueError: If the dimensions differ, the type is no integer, or a value is too small.
    """
    raw = np.asarray(values)
    if raw.size and not np.issubdtype(raw.dtype, np.integer):
        msg = f"{name} holds values of type {raw.dtype}, expected integers"
        raise ValueError(msg)
    array = _frozen(name, raw, np.int64, num_dimensions)
    if array.min(initial=smallest) < smallest:
        index = np.argwhere(array < smallest)[0]
        msg = f"{element(name, *index)} is {array[tuple(index)]}, expected at least {smallest}"
        raise ValueError(msg)
    return array


def element(name: str, *index: int) -> str:
    """Format one element of an array, for messages.

    Example:
        >>> element("cut_time_s", 1, 4)
        'cut_time_s[1, 4]'
    """
    return f"{name}[{', '.join(str(position) for position in index)}]"


def _frozen(
    name: str, values: ArrayLike, dtype: type[Number], num_dimensions: int
) -> NDArray[Number]:
    array = np.asarray(values)
    if array.ndim != num_dimensions:
        msg = f"{name} has shape {array.shape}, expected {num_dimensions} dimension(s)"
        raise ValueError(msg)
    if array.dtype == dtype and array.flags.c_contiguous and not array.flags.writeable:
        return array
    frozen = np.array(array, dtype=dtype, order="C")
    frozen.flags.writeable = False
    return frozen


def _check_prefix_sums(time_prefix_s: FloatArray) -> None:
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
    behind = earliest_start > np.arange(earliest_start.shape[1])
    if behind.any():
        row, end = (int(index) for index in np.argwhere(behind)[0])
        msg = (
            f"{element('earliest_start', row, end)} is {earliest_start[row, end]}, expected at "
            f"most {end}, which says that no stage ending there fits"
        )
        raise ValueError(msg)

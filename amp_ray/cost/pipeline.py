"""Stage and cut times of all stages at once, for every replica."""

from dataclasses import dataclass

import numpy as np

from amp_ray.cost.layers import LayerTable
from amp_ray.cost.topology import FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankKinds:
    """The different kinds of tensor-parallel groups of a grid, and where each stands.

    Args:
        tables: One layer table per kind, as prefix sums of shape ``(3, num_layers + 1)``:
            forward, backward, and the all-reduces within both.
        kind: Shape ``(pp, dp)``. Index into ``tables``.
        extrapolated: Whether any table lies outside of what was measured.
    """

    tables: FloatArray
    kind: IntArray
    extrapolated: bool

    def stage_rows(self) -> tuple[FloatArray, IntArray]:
        """Return time rows for the partition and the row of each stage.

        A stage goes at the pace of its slowest replica, layer by layer.

        Returns:
            Prefix sums of shape ``(num_rows, num_layers + 1)`` and rows of shape ``(pp,)``.
        """
        step_s = np.diff(self.tables[:, 0] + self.tables[:, 1], axis=1)
        rows: dict[tuple[int, ...], int] = {}
        of_stage = [
            rows.setdefault(tuple(sorted(set(kinds))), len(rows)) for kinds in self.kind.tolist()
        ]
        slowest = np.array([step_s[list(kinds)].max(axis=0) for kinds in rows])
        prefix = np.zeros((len(rows), self.tables.shape[2]))
        np.cumsum(slowest, axis=1, out=prefix[:, 1:])
        return prefix, np.array(of_stage, dtype=np.int64)

    def stage_times(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return forward, backward and all-reduce seconds, shape ``(3, pp, dp)``."""
        cuts = np.array(bounds)
        first, end = cuts[:-1, None], cuts[1:, None]
        tables = self.tables.transpose(1, 0, 2)
        return tables[:, self.kind, end] - tables[:, self.kind, first]


def prefix_sums(table: LayerTable) -> FloatArray:
    """Return a layer table as prefix sums, shape ``(3, num_layers + 1)``."""
    rows = np.array([table.forward_s, table.backward_s, table.tensor_parallel_s])
    prefix = np.zeros((3, rows.shape[1] + 1))
    np.cumsum(rows, axis=1, out=prefix[:, 1:])
    return prefix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutTimes:
    """Seconds of the two messages across every possible cut.

    Args:
        bytes_forward: Shape ``(num_layers + 1,)``. Activation of a micro-batch at each boundary.
        bytes_backward: Shape ``(num_layers + 1,)``. Its gradient.
        gather_forward_s: Shape ``(num_layers + 1,)``. Putting slices together.
        gather_backward_s: Shape ``(num_layers + 1,)``. The same for gradients.
        start_s: Start of a message.
        step_s: Shape ``(pp - 1, dp)``. Latency of the slowest rank's message.
        s_per_byte: Shape ``(pp - 1, dp)``. Inverse rate of the slowest rank's message.
    """

    bytes_forward: FloatArray
    bytes_backward: FloatArray
    gather_forward_s: FloatArray
    gather_backward_s: FloatArray
    start_s: float
    step_s: FloatArray
    s_per_byte: FloatArray

    def rows(self, *, duplex: bool) -> tuple[FloatArray, IntArray]:
        """Return cut rows for the partition and the row of each cut.

        Args:
            duplex: Whether both messages cross at the same time.

        Returns:
            Seconds of shape ``(num_rows, num_layers + 1)`` and rows of shape ``(pp - 1,)``.
        """
        worst = np.array([self.step_s.max(axis=1), self.s_per_byte.max(axis=1)]).T
        distinct, row = np.unique(worst, axis=0, return_inverse=True)
        step_s, s_per_byte = distinct[:, :1], distinct[:, 1:]
        forward = self._message(self.bytes_forward, self.gather_forward_s, step_s, s_per_byte)
        backward = self._message(self.bytes_backward, self.gather_backward_s, step_s, s_per_byte)
        both = np.maximum(forward, backward) if duplex else forward + backward
        return both, row.reshape(-1).astype(np.int64)

    def sends(self, bounds: tuple[int, ...]) -> FloatArray:
        """Return activation and gradient seconds of given cuts, shape ``(2, pp - 1, dp)``."""
        cuts = np.array(bounds[1:-1], dtype=np.int64)
        return np.array(
            [
                self._message(
                    num_bytes[cuts, None], gather_s[cuts, None], self.step_s, self.s_per_byte
                )
                for num_bytes, gather_s in (
                    (self.bytes_forward, self.gather_forward_s),
                    (self.bytes_backward, self.gather_backward_s),
                )
            ]
        )

    def _message(
        self,
        num_bytes: FloatArray,
        gather_s: FloatArray,
        step_s: FloatArray,
        s_per_byte: FloatArray,
    ) -> FloatArray:
        """Start, latency, transfer, gather."""
        return self.start_s + step_s + num_bytes * s_per_byte + gather_s

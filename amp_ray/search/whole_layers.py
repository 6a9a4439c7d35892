"""How fast the slowest stage can be at best if layers are not divided and nodes have an end."""

from dataclasses import dataclass

import numpy as np

from amp_ray.arrays import FloatArray, IntArray

ROUNDING = 1e-9
"""Share by which a stage may be over its time, the additions of others being in another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeLayers:
    """Equal layers for stages on several kinds of devices.

    A stage has two ends, some of which are cuts between nodes that take time of it.
    """

    each_s: FloatArray  # shape ``(num_kinds,)``. What a layer takes, above 0.
    stages: IntArray  # shape ``(num_kinds,)``. How many stages of each kind there are.
    num_layers: int  # that the stages have to hold, or the room of so many
    num_others: int  # stages that may do without any, as they hold another layer
    across_s: float  # what a cut between nodes takes
    num_ends: int  # ends of stages at such cuts, at least

    def least_s(self) -> float:
        """Return the shortest time in which no stage needs longer."""
        layers = np.arange(1, self.num_layers + 1)
        ends_s = self.across_s * np.arange(3)
        times_s = np.unique(np.add.outer(np.outer(layers, self.each_s), ends_s))
        low, high = 0, len(times_s) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(float(times_s[middle])):
                high = middle
            else:
                low = middle + 1
        return float(times_s[low])

    def _is_enough(self, time_s: float) -> bool:
        """Tell whether stages might hold all layers within a time.

        Ends are where they take least room, each by itself.
        """
        left_s = (time_s - self.across_s * np.arange(3)[:, None]) / self.each_s
        room = np.maximum(np.floor(left_s * (1 + ROUNDING)), 0).astype(np.int64)
        lost = np.repeat(room[:-1] - room[1:], self.stages, axis=1).ravel()
        held = int(room[0] @ self.stages) - int(np.sort(lost)[: self.num_ends].sum())
        empty = room[0] == 0
        num_empty = int(self.stages[empty].sum())
        harmless = ((room[1] > 0).astype(np.int64) + (room[2] > 0)) @ self.stages
        others = max(self.num_ends - int(harmless) - 2 * num_empty, 0)
        return held >= self.num_layers and num_empty + -(-others // 2) <= self.num_others

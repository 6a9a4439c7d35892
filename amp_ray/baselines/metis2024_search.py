"""The best plan by the formulas of Metis (2024), proven: over all that its planner leaves out.

Its own search looks at a part of the plans, and lists some that cannot run. Here stages have any
number of devices, any order of the device types and any layers; every layer is placed, every
device takes samples, and none holds more than its own memory.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from amp_ray.baselines.metis2024_bounds import work_bound_s
from amp_ray.baselines.metis2024_groups import GroupSpace, MetisLimits
from amp_ray.baselines.metis2024_menu import Menu, stage_menu
from amp_ray.baselines.metis2024_plan import MetisSetting
from amp_ray.baselines.metis2024_solve import (
    MetisPruned,
    MetisResult,
    MetisSolution,
    solve_menu,
)
from amp_ray.baselines.metis2024_validity import OUT_OF_MEMORY
from amp_ray.baselines.metis2024_works import Works
from amp_ray.cost.estimate import Reason


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisSearch:
    """Finds the best plans of a cluster.

    Args:
        setting: What is given.
        limits: The published planner's.
    """

    setting: MetisSetting
    limits: MetisLimits = field(default_factory=MetisLimits)

    def solve(self, num_micro_batches: int, *, upper_bound_s: float = math.inf) -> MetisResult:
        """Find the best plan with one number of micro-batches.

        Args:
            num_micro_batches: A divisor of the global batch size.
            upper_bound_s: Only plans that take no longer are of interest.

        Returns:
            The plan; that all take longer; or why there is none.

        Raises:
            ValueError: If the number does not divide the batch.
        """
        if num_micro_batches not in self.numbers:
            message = (
                f"{num_micro_batches} micro-batches do not divide the batch of "
                f"{self.setting.global_batch_size}"
            )
            raise ValueError(message)
        return solve_menu(self._menu(num_micro_batches), upper_bound_s)

    def best(self) -> MetisSolution | Reason:
        """Find the best plan with any number of micro-batches.

        Returns:
            The plan, with a bound for all of them; or why there is none.
        """
        best: MetisSolution | None = None
        least_s = math.inf
        reasons = []
        for bound_s, number in sorted((self._bound_s(number), number) for number in self.numbers):
            limit_s = math.inf if best is None else best.cost.total_s
            found: MetisResult = MetisPruned(lower_bound_s=bound_s)
            if bound_s <= limit_s:
                found = solve_menu(self._menu(number), limit_s)
            if isinstance(found, Reason):
                reasons.append(found)
                continue
            least_s = min(least_s, found.lower_bound_s)
            if isinstance(found, MetisSolution) and found.cost.total_s < limit_s:
                best = found
        if best is None:
            return next((reason for reason in reasons if reason.kind == OUT_OF_MEMORY), reasons[0])
        return replace(best, lower_bound_s=min(least_s, best.cost.total_s))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Micro-batches that divide the batch, ascending."""
        batch = self.setting.global_batch_size
        return tuple(number for number in range(1, batch + 1) if batch % number == 0)

    @cached_property
    def space(self) -> GroupSpace:
        """Every group of devices."""
        return GroupSpace(setting=self.setting, limits=self.limits)

    @cached_property
    def _works(self) -> Works:
        """The profile as tables."""
        return Works(space=self.space)

    @cached_property
    def _menus(self) -> dict[int, Menu]:
        """What groups take and hold, by the number of micro-batches."""
        return {}

    def _menu(self, number: int) -> Menu:
        """Return what groups take and hold."""
        if number not in self._menus:
            self._menus[number] = stage_menu(self.space, self._works, number)
        return self._menus[number]

    def _bound_s(self, number: int) -> float:
        """Bound every plan with one number of micro-batches."""
        return work_bound_s(self._menu(number))

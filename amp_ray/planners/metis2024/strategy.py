"""Plans of Metis (2024) as strategies of ours, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from amp_ray.errors import InputError
from amp_ray.planners.metis2024.plan import MetisPlan, MetisSetting
from amp_ray.strategies.recompute import NO_RECOMPUTE
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy


@dataclass(frozen=True, kw_only=True, eq=False)
class MetisTranslation:
    """Translates between a cluster's plans and strategies."""

    setting: MetisSetting  # what the published planner is given
    groups: Sequence[range]  # layers of our model for each of its own

    def strategy(self, plan: MetisPlan) -> Strategy:
        """Write a plan as a strategy.

        A plan whose stages all share evenly among as many data-parallel indices needs no shares.

        Args:
            plan: One that places every layer and shares out every sample.
        """
        shares = [self._shares(plan, stage) for stage in range(plan.pp)]
        is_even = len({share for each in shares for share in each}) == 1
        is_even = is_even and len({len(each) for each in shares}) == 1
        edges = [*(group.start for group in self.groups), self.groups[-1].stop]
        stages = tuple(
            Stage(
                first_layer=edges[first],
                end_layer=edges[end],
                options=StageOptions(dp=dp, tp=tp),
                shares=None if is_even else each,
            )
            for (first, end), (dp, tp), each in zip(
                pairwise(plan.bounds), plan.degrees, shares, strict=True
            )
        )
        return Strategy(
            stages=stages,
            micro_batch_size=shares[0][0] if is_even else sum(shares[0]),
            num_micro_batches=plan.num_micro_batches,
            placement=self._devices(plan.type_order),
        )

    def plan(self, strategy: Strategy) -> MetisPlan:
        """Write a strategy as a plan.

        Raises:
            InputError: If it is none of the published planner's: it recomputes, leaves devices
                idle, goes back to a device type, cuts within one of its layers or shares samples
                otherwise.
        """
        if strategy.recompute != NO_RECOMPUTE:
            raise InputError("cost model metis-2024 knows no recompute")
        edges = {group.start: layer for layer, group in enumerate(self.groups)}
        edges[self.groups[-1].stop] = len(self.groups)
        inside = [bound for bound in strategy.bounds if bound not in edges]
        if inside:
            raise InputError(f"the published planner cuts at {sorted(edges)}, not at {inside[0]}")
        plan = MetisPlan(
            type_order=self._type_order(strategy),
            group_sizes=tuple(stage.num_ranks for stage in strategy.stages),
            degrees=tuple((stage.options.dp, stage.options.tp) for stage in strategy.stages),
            num_micro_batches=strategy.num_micro_batches,
            bounds=tuple(edges[bound] for bound in strategy.bounds),
        )
        for index, stage in enumerate(strategy.stages):
            shares = stage.shares or (strategy.micro_batch_size,) * stage.options.dp
            if shares != self._shares(plan, index):
                raise InputError(
                    f"stage {index} shares samples as {shares}, the published planner as "
                    f"{self._shares(plan, index)}"
                )
        return plan

    def _shares(self, plan: MetisPlan, stage: int) -> tuple[int, ...]:
        """Return the samples of each data-parallel index."""
        ranks = self.setting.data_ranks(plan, stage)
        if ranks is None:
            _, tp = plan.degrees[stage]
            raise InputError(f"stage {stage}: tp {tp} was not measured at micro-batch size 1")
        return tuple(rank.samples for rank in ranks)

    def _type_order(self, strategy: Strategy) -> tuple[str, ...]:
        """Return the device types in the order of a strategy's ranks."""
        cluster = self.setting.cluster
        kinds = [
            self.setting.node_types[cluster.node_of_device[device]] for device in strategy.placement
        ]
        order = tuple(dict.fromkeys(kinds))
        every = [self._kind(device) for device in self._devices(order)]
        if kinds != every or len(every) != cluster.num_devices:
            raise InputError(
                "the published planner uses every device, all of one type after the other; found "
                f"{len(kinds)} of {cluster.num_devices} devices: {', '.join(kinds)}"
            )
        return order

    def _devices(self, type_order: Sequence[str]) -> tuple[int, ...]:
        """Return all devices, type after type."""
        devices = range(self.setting.cluster.num_devices)
        return tuple(
            device for kind in type_order for device in devices if self._kind(device) == kind
        )

    def _kind(self, device: int) -> str:
        """Return the type of a device."""
        return self.setting.node_types[self.setting.cluster.node_of_device[device]]

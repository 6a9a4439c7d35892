"""The planner published as Aceso (2024) on an experiment of ours: its formulas."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from amp_ray.cost.estimate import Breakdown, Estimate, Infeasible, Reason, Result
from amp_ray.cost.verdict import OUT_OF_MEMORY
from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.operator_profile import OperatorProfile
from amp_ray.planners.aceso2024.cost import NOT_EXPRESSIBLE, AcesoCost, aceso_cost
from amp_ray.planners.aceso2024.plan import AcesoPlan, aceso_plan
from amp_ray.planners.aceso2024.problem import (
    MOST_STAGES,
    STAGE_DEVICES,
    AcesoSetting,
    posed_problems,
)
from amp_ray.planners.operators.cost import WHY_NO_STAGES
from amp_ray.planners.operators.partition import NoStages, SolveEach
from amp_ray.planners.operators.strategy import operator_strategy
from amp_ray.planners.published import PublishedPlanner, free_groups
from amp_ray.search.planner import Candidates
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import MIB, counted


@dataclass(frozen=True, kw_only=True, eq=False)
class Aceso2024Planner(PublishedPlanner):
    """The published formulas on an experiment of ours.

    Raises:
        InputError: If the experiment is not one that the published formulas cover.
    """

    experiment: Experiment

    def __post_init__(self) -> None:
        """Refuse what the published formulas do not cover."""
        given = self.experiment
        slots = {node.num_slots for node in given.cluster.nodes}
        wrong = (
            "profile.source aceso"
            if given.profile.operators is None
            else "nodes with as many devices each"
            if len(slots) > 1
            else "one type of devices"
            if len(given.cluster.device_types) > 1
            else "zero_stage: 0"
            if given.zero_stage
            else None
        )
        if wrong:
            message = f"cost model aceso-2024 needs {wrong}; experiment {given.name!r} differs"
            raise InputError(message)

    @property
    def profile(self) -> OperatorProfile:
        """What was measured."""
        profile = self.experiment.profile.operators
        assert profile is not None, "refused at the start"
        return profile

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best plan with a candidate's micro-batch, with a bound of all of them.

        Args:
            candidate: How the batch is cut; the published planner chooses all else.

        Raises:
            InputError: If tp, dp and pp are chosen already.
        """
        own = free_groups(candidate, "aceso-2024")
        found = self._each.found(own.micro_batch_size)
        if isinstance(found, NoStages):
            reason = Reason(kind=WHY_NO_STAGES[found.kind], detail=found.detail)
            return Infeasible(candidate=candidate, reason=reason)
        strategy = operator_strategy(
            found.stages,
            samples_per_micro_batch=own.micro_batch_size,
            num_micro_batches=own.num_micro_batches,
        )
        result = self.score(strategy)
        if isinstance(result, Infeasible):
            return result
        return replace(result, lower_bound_s=found.lower_bound_s)

    def candidates(self, _num_rows: int | None = None) -> Candidates:
        """Return every size of the micro-batch that the published planner looks at.

        Raises:
            ValueError: If there is none.
        """
        given, setting = self.experiment, self._setting
        batch = given.global_batch_size
        if not setting.micro_batch_sizes:
            sizes = ", ".join(map(str, self.profile.micro_batch_sizes))
            asked = given.limits.micro_batch_sizes
            raise ValueError(
                f"cost model aceso-2024 takes micro-batches of a measured size ({sizes}) that "
                f"divides global_batch_size {batch}"
                + (f" and is one of micro_batch_sizes {list(asked)}" if asked else "")
            )
        return Candidates(
            required=tuple(
                GroupsCandidate(micro_batch_size=size, num_micro_batches=batch // size)
                for size in setting.micro_batch_sizes
            ),
            are_whole_space=True,
        )

    def score(self, strategy: Strategy) -> Result:
        """Estimate a strategy.

        Raises:
            InputError: If its layers are not those of the profile, or it does not use the devices
                in their order.
        """
        cluster = self.experiment.cluster
        if strategy.placement != tuple(range(cluster.num_devices)):
            raise InputError(
                f"cost model aceso-2024 uses all {cluster.num_devices} devices in their order; "
                "found another placement"
            )
        try:
            plan = aceso_plan(strategy, self.profile)
        except ValueError as error:
            raise InputError(str(error)) from None
        cost = aceso_cost(self.profile, plan, devices_per_node=cluster.nodes[0].num_slots)
        if isinstance(cost, Reason):
            return self._infeasible(plan, cost)
        return self._estimate(strategy, plan, cost)

    @cached_property
    def _each(self) -> SolveEach:
        return SolveEach(posed=posed_problems(self._setting))

    @cached_property
    def _setting(self) -> AcesoSetting:
        """What the published planner is given, within the limits of the experiment."""
        given = self.experiment
        return AcesoSetting(
            profile=self.profile,
            num_devices=given.cluster.num_devices,
            devices_per_node=given.cluster.nodes[0].num_slots,
            limit_bytes=float(given.cluster.device_types[0].memory_bytes),
            global_batch_size=given.global_batch_size,
            limits=given.limits,
        )

    def _infeasible(self, plan: AcesoPlan, reason: Reason) -> Infeasible:
        candidate = GroupsCandidate(
            micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches
        )
        return Infeasible(candidate=candidate, reason=reason)

    def _estimate(self, strategy: Strategy, plan: AcesoPlan, cost: AcesoCost) -> Estimate:
        device = self.experiment.cluster.device_types[0]
        return Estimate(
            strategy=strategy,
            iteration_time_s=cost.iteration_s,
            breakdown=_breakdown(cost),
            peak_memory_bytes=tuple(each.total_bytes for each in cost.memory),
            memory_limit_bytes=(float(device.memory_bytes),) * len(cost.memory),
            reasons=(
                *not_expressible(plan, self.experiment.cluster.nodes[0].num_slots),
                *_out_of_memory(cost, float(device.memory_bytes)),
            ),
            warnings=tuple(_warnings(cost)),
            launchable=False,
        )


def _breakdown(cost: AcesoCost) -> Breakdown:
    """Divide the iteration: what the slowest stage computes, and the rest of the pipeline."""
    slowest = max(cost.times, key=lambda time: time.total_s)
    number = cost.num_micro_batches
    return Breakdown(
        compute_s=number * (slowest.forward_s + slowest.backward_s + slowest.recompute_s),
        tensor_parallel_s=number * slowest.resharding_s,
        pipeline_p2p_s=number * slowest.transfer_s,
        bubble_s=sum(time.total_s for time in cost.times) - slowest.total_s,
    )


def not_expressible(plan: AcesoPlan, devices_per_node: int) -> Iterator[Reason]:
    """Tell what of a plan the published planner could not express."""
    if len(plan.stages) > MOST_STAGES:
        detail = f"{len(plan.stages)} stages, at most {MOST_STAGES}"
        yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
    first = 0
    for index, stage in enumerate(plan.stages):
        number = stage.num_devices
        if number not in STAGE_DEVICES:
            detail = f"stage {index} has {number} devices; it knows 1, 2, 4 and 8"
            yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
        elif first % devices_per_node + number > devices_per_node:
            detail = f"stage {index} lies on two nodes"
            yield Reason(kind=NOT_EXPRESSIBLE, detail=detail)
        first += number


def _out_of_memory(cost: AcesoCost, limit_bytes: float) -> Iterator[Reason]:
    """Name the stage that is furthest over the memory of a device, if one is."""
    needs = [each.total_bytes for each in cost.memory]
    worst = max(range(len(needs)), key=needs.__getitem__)
    if needs[worst] > limit_bytes:
        detail = f"stage {worst} needs {needs[worst] / MIB:,.0f} MiB of {limit_bytes / MIB:,.0f}"
        yield Reason(kind=OUT_OF_MEMORY, detail=detail)


def _warnings(cost: AcesoCost) -> Iterator[str]:
    """Tell where the published formulas are known to be wrong for this plan."""
    for index, (time, memory) in enumerate(zip(cost.times, cost.memory, strict=True)):
        if time.num_missing:
            yield (
                f"stage {index}: {counted(time.num_missing, 'exchange')} of a size that was not "
                "measured, at 100 s each"
            )
        if memory.omitted_bytes:
            yield (
                f"stage {index}: the published formula forgets {memory.omitted_bytes / MIB:,.0f} "
                "MiB that are recomputed at its end"
            )

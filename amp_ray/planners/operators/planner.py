"""Our planner for stages cut between operators, and for short chains.

With a profile of operators, `search.space: operator` means stages cut at any operator. Without one,
it means the stages of the heterogeneous space, and every plan is tried if the chain and the cluster
are small (`short_chains`). Strategies of layers are planned and scored by the parent class.

Stages of operators use the devices in order. A stage has one measured tp, dp and algorithm, which
fits its devices. If recompute is ``auto``, it is chosen operator by operator; with any other
setting, no stage begins inside a recomputed run. If operators of a stage may differ, all mixes of a
short chain are tried and a few of a longer one (`partition.mixed`); the lower bound covers all
mixes. All micro-batch sizes are searched together: a time reached with one size bounds the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Final

import numpy as np

from amp_ray.arrays import BoolArray, FloatArray, IntArray
from amp_ray.cost.collective import Path
from amp_ray.cost.estimate import Estimate, Infeasible, Reason, Result
from amp_ray.cost.timeline import Timeline
from amp_ray.errors import InputError
from amp_ray.planners.operators.cost import WHY_NO_STAGES, OperatorCostModel, OperatorFigures
from amp_ray.planners.operators.partition.mixed import alike_rows, with_mixes
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.partition.several import NoStages, PosedProblem, SolveEach
from amp_ray.planners.operators.short_chains import ShortChains
from amp_ray.planners.operators.strategy import operator_strategy, recomputed_operators
from amp_ray.search.amp_ray_planner import (
    AmpRayPlanner,
    CandidatePlanner,
    ChooseZero,
    SpacePlanner,
)
from amp_ray.search.planner import Candidates
from amp_ray.search.ranking import leader_order
from amp_ray.search.space import group_candidates, group_zero_choices
from amp_ray.strategies.candidate import AnyCandidate, GroupsCandidate
from amp_ray.strategies.operator_run import OperatorUse
from amp_ray.strategies.recompute import AUTO, Recompute
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import AUTO_ZERO

MOST_STAGES: Final = 64

Sharers = tuple[int, int]
"""Ranks that share a network interface to receive from the stage before and the one behind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorOption:
    """One way to use a stage at certain places."""

    tp: int
    dp: int
    algorithm: int
    sharers: Sharers  # of its transfers
    rings: tuple[Path, ...]  # paths of its gradient rings
    places: tuple[int, ...]  # numbers of devices in front of it
    figures: OperatorFigures  # figures of all operators of the chain

    @property
    def use(self) -> OperatorUse:
        """The use of an operator in the stage, without recompute."""
        return self.tp, self.dp, self.algorithm, False

    @property
    def num_ranks(self) -> int:
        """Devices of the stage."""
        return self.tp * self.dp


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorSearch:
    """Searches every micro-batch size of one experiment."""

    cost_model: OperatorCostModel  # estimates plans of the experiment

    def plan(self, candidate: GroupsCandidate) -> Result:
        """Return the best plan for a candidate's micro-batch size, with a lower bound."""
        experiment, size = self.cost_model.experiment, candidate.micro_batch_size
        best = self._each.best(size)
        if isinstance(best, NoStages):
            reason = Reason(kind=WHY_NO_STAGES[best.kind], detail=best.detail)
            return Infeasible(candidate=candidate, reason=reason)
        strategy = operator_strategy(
            best.stages,
            samples_per_micro_batch=size,
            num_micro_batches=experiment.global_batch_size // size,
            zero=self.cost_model.zero,
        )
        result = self.cost_model.estimate(strategy)
        assert isinstance(result, Estimate)
        bound_s = best.lower_bound_s + experiment.constants.host_s_per_iteration
        return replace(result, lower_bound_s=min(bound_s, result.iteration_time_s))

    @cached_property
    def _each(self) -> SolveEach:
        experiment = self.cost_model.experiment
        batch, problems = experiment.global_batch_size, {}
        for size in range(1, batch + 1):
            options = self.options(size) if batch % size == 0 else []
            if options:
                problem = self.problem(options, batch // size)
                rows = alike_rows(problem)
                if experiment.limits.per_operator:
                    problem, rows = self._mixed(options, problem)
                problems[size] = PosedProblem(
                    problem=problem,
                    rows=rows,
                    degrees=[option.use[:3] for option in options],
                    runs_again=frozenset(np.flatnonzero(self._patterns[0]).tolist()),
                )
        return SolveEach(posed=problems)

    def _mixed(
        self, options: list[OperatorOption], problem: OperatorProblem
    ) -> tuple[OperatorProblem, IntArray]:
        inputs = _stacked(options, "input_bytes")
        degrees = sorted({(option.tp, option.dp) for option in options})

        def joins_s(row: IntArray) -> FloatArray:
            uses = [options[index].use for index in row.tolist()]
            return self.cost_model.joins_s(0, uses, inputs[row, np.arange(len(row))])

        alike = np.array([degrees.index((option.tp, option.dp)) for option in options])
        return with_mixes(problem, joins_s, alike)

    def options(self, micro_batch_size: int) -> list[OperatorOption]:
        """Return every measured tp, dp and algorithm of a stage that fits the devices.

        The micro-batch size counts samples over all replicas.
        """
        experiment, profile = self.cost_model.experiment, self.cost_model.profile
        limits, everyone = experiment.limits, experiment.cluster.num_devices
        options = []
        for tp, dp in product(profile.tps, range(1, everyone + 1)):
            samples, rest = divmod(micro_batch_size, dp)
            asked = limits.micro_batch_sizes
            fits = not rest and tp * dp <= everyone and (asked is None or samples in asked)
            if not fits or not limits.min_tp <= tp <= (limits.max_tp or tp):
                continue
            if dp > (limits.max_dp or dp):
                continue
            for algorithm in profile.algorithms if tp > 1 else (0,):
                figures = self.cost_model.figures(samples, tp, dp, algorithm)
                if isinstance(figures, OperatorFigures):
                    options += self._placed((tp, dp, algorithm), figures)
        return options

    def _placed(
        self, degrees: tuple[int, int, int], figures: OperatorFigures
    ) -> list[OperatorOption]:
        """Return one option per set of places that have the same links."""
        tp, dp, algorithm = degrees
        model, size = self.cost_model, tp * dp
        everyone = model.experiment.cluster.num_devices
        places: dict[tuple[Sharers, tuple[Path, ...]], list[int]] = {}
        for place in range(everyone - size + 1):
            devices = range(place, place + size)
            rings = model.rings(devices, tp)
            if rings is not None:
                before = model.sharers(devices, place - 1 if place else None)
                behind = model.sharers(devices, place + size if place + size < everyone else None)
                places.setdefault(((before, behind), rings), []).append(place)
        return [
            OperatorOption(
                tp=tp,
                dp=dp,
                algorithm=algorithm,
                sharers=sharers,
                rings=rings,
                places=tuple(indices),
                figures=figures,
            )
            for (sharers, rings), indices in places.items()
        ]

    def problem(self, options: Sequence[OperatorOption], num_micro_batches: int) -> OperatorProblem:
        """Build the problem of one micro-batch size."""
        model, profile = self.cost_model, self.cost_model.profile
        experiment, everyone = model.experiment, model.experiment.cluster.num_devices
        again, saved = self._patterns
        forward_s = _stacked(options, "forward_s")
        time_s = forward_s * (1 + again) + _stacked(options, "backward_s")
        time_s[:, 0] += experiment.constants.host_s_per_micro_batch
        start_s, end_s = self._edges_s(options)
        lines = np.array(
            [model.step_end_line(option.tp, option.dp, option.rings) for option in options]
        )
        most_stages = min(everyone, experiment.limits.max_pp or MOST_STAGES, MOST_STAGES)
        return OperatorProblem(
            time_s=time_s,
            join_s=np.array([self._joins_s(option) for option in options]),
            recompute_s=forward_s,
            state_bytes=_stacked(options, "state_bytes"),
            weight_bytes=_stacked(options, "step_bytes"),
            held_bytes=_stacked(options, "held_bytes"),
            input_bytes=_stacked(options, "input_bytes"),
            forward_reserved_bytes=_stacked(options, "forward_reserved_bytes"),
            backward_reserved_bytes=_stacked(options, "backward_reserved_bytes"),
            start_s=start_s,
            end_s=end_s,
            starts_layer=profile.starts_block | (self.recompute != AUTO),
            free_end=np.zeros(profile.num_operators, dtype=np.bool_),
            counts_last=False,
            devices=np.array([option.num_ranks for option in options]),
            allowed=np.array([np.isin(np.arange(everyone), option.places) for option in options]),
            edge_kind=np.zeros(everyone + 1, np.int64),
            limit_bytes=float(math.floor(max(model.limit_bytes, 0.0))),
            num_micro_batches=num_micro_batches,
            most_stages=most_stages,
            most_in_flight=num_micro_batches,
            reserves_last=True,
            step_end_s=_stacked(options, "parameters") * lines[:, 1:],
            step_start_s=lines[:, 0],
            tied_s=np.array([model.tied_s(option.num_ranks, option.figures) for option in options]),
            runs_again=saved if saved.any() else None,
        )

    @property
    def recompute(self) -> Recompute:
        """The experiment's recompute setting."""
        return self.cost_model.experiment.recompute

    @cached_property
    def _patterns(self) -> tuple[BoolArray, BoolArray]:
        """Masks of operators: recomputed in any stage, and then not kept."""
        profile = self.cost_model.profile
        kind = "none" if self.recompute == AUTO else self.recompute.kind
        again = np.array(recomputed_operators(profile, kind))
        saved = np.append(again[:-1] & again[1:] & ~profile.starts_block[1:], False)
        return again, saved

    def _edges_s(self, options: Sequence[OperatorOption]) -> tuple[FloatArray, FloatArray]:
        """Return the receive times at both ends of a stage; the begin includes host time.

        No stage begins inside a run that is recomputed in every stage.
        """
        model = self.cost_model
        host_s = model.experiment.constants.host_s_per_micro_batch
        start_s, end_s = np.zeros((2, len(options), 1, model.profile.num_operators + 1))
        for index, option in enumerate(options):
            before, behind = option.sharers
            start_s[index, 0, 1:-1] = model.transfers_s(option.figures.input_bytes[1:], before)
            end_s[index, 0, 1:-1] = model.transfers_s(option.figures.output_bytes[:-1], behind)
        start_s[:, :, 1:-1] += host_s
        start_s[:, :, 1:][:, :, self._patterns[1]] = math.inf
        return start_s, end_s

    def _joins_s(self, option: OperatorOption) -> FloatArray:
        uses = [option.use] * self.cost_model.profile.num_operators
        return self.cost_model.joins_s(0, uses, option.figures.input_bytes)


def _stacked(options: Sequence[OperatorOption], name: str) -> FloatArray:
    return np.array([getattr(option.figures, name) for option in options])


_MOST_ZERO_STAGE = 1  # stages of operators can shard optimizer states, or nothing


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPlanner(AmpRayPlanner):
    """Plans and scores stages of operators; leaves stages of layers to its parent class."""

    _searches: dict[int, OperatorSearch] = field(init=False, default_factory=dict)

    @property
    def _cuts_operators(self) -> bool:
        return self.experiment.space == "operator" and self.experiment.profile.operators is not None

    def candidates(self, num_rows: int | None = None) -> Candidates:
        """Return all candidates of the space.

        Raises:
            ValueError: If the limits leave no candidate; the message names the limit.
        """
        if not self._cuts_operators:
            whole = self.experiment.space == "operator"
            return replace(super().candidates(num_rows), are_whole_space=whole)
        if self.experiment.counts_money:
            raise ValueError(
                f"{self.experiment.money_key} is not for stages cut between operators, whose "
                "price is not known"
            )
        if self.experiment.limits.launchable:
            message = "no runtime launches stages cut between operators; they can be exported only"
            raise ValueError(message)
        return Candidates(required=group_candidates(self.experiment), are_whole_space=True)

    def plan(self, candidate: AnyCandidate) -> Result:
        """Cut a candidate between operators; leave candidates of layers to the parent class."""
        if not isinstance(candidate, GroupsCandidate) or not self._cuts_operators:
            return super().plan(candidate)
        return self.within_limits(self._plan_operators(candidate))

    def _plan_operators(self, candidate: GroupsCandidate) -> Result:
        stages = [candidate.options.zero.stage]
        if candidate.options.zero == AUTO_ZERO:
            choices = [zero.stage for zero in group_zero_choices(self.experiment)]
            stages = [stage for stage in choices if stage <= _MOST_ZERO_STAGE]
        results = [self._search(stage).plan(candidate) for stage in stages]
        plans = [result for result in results if isinstance(result, Estimate)]
        if not plans:
            return results[0]
        bounds_s = [plan.lower_bound_s for plan in plans if plan.lower_bound_s is not None]
        return replace(min(plans, key=leader_order), lower_bound_s=min(bounds_s))

    def choosing(self, space: SpacePlanner) -> ChooseZero:
        """Return a planner that tries all plans of a short chain first."""
        chooser = super().choosing(space)
        if self.experiment.space != "operator":
            return chooser
        return replace(chooser, inner=TryAll(inner=chooser.inner, space=space))

    def score(self, strategy: Strategy) -> Result:
        """Estimate a complete strategy of operators or layers.

        Raises:
            InputError: If it gives uses of single operators, and the profile has no operators.
        """
        if not strategy.has_operators:
            return super().score(strategy)
        if self.experiment.profile.operators is None:
            raise InputError(
                "a strategy that tells how single operators are used needs a profile of operators: "
                "profile.source aceso"
            )
        try:
            return self._search(strategy.zero.stage).cost_model.estimate(strategy)
        except ValueError as error:
            raise InputError(str(error)) from None

    def memory_parts(self, strategy: Strategy) -> list[dict[str, float]]:
        """Return the parts of each stage's peak memory, in bytes."""
        if not strategy.has_operators:
            return super().memory_parts(strategy)
        return self._search(strategy.zero.stage).cost_model.memory_parts(strategy)

    def timeline(self, strategy: Strategy) -> Timeline | None:
        """Return the predicted timeline; None for stages of operators."""
        return None if strategy.has_operators else super().timeline(strategy)

    def _search(self, zero_stage: int) -> OperatorSearch:
        if zero_stage not in self._searches:
            experiment = replace(self.experiment, zero_stage=zero_stage)
            try:
                cost_model = OperatorCostModel(experiment=experiment)
            except ValueError as error:
                raise InputError(str(error)) from None
            self._searches[zero_stage] = OperatorSearch(cost_model=cost_model)
        return self._searches[zero_stage]


@dataclass(frozen=True, kw_only=True, eq=False)
class TryAll:
    """Tries every plan of a candidate if they are few, and otherwise uses another planner."""

    inner: CandidatePlanner
    space: SpacePlanner

    def plan(self, candidate: AnyCandidate) -> Result:
        """Return the best of all plans, if they are few and one fits."""
        best = None
        if isinstance(candidate, GroupsCandidate):
            best = ShortChains(device_groups=self.space.device_groups, candidate=candidate).best()
        return best or self.inner.plan(candidate)

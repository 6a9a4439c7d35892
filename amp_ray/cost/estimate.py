"""Predicted time and memory of a strategy. Failures are results, not exceptions."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from amp_ray.strategies.candidate import AnyCandidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.units import MEGA


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why something cannot run.

    Args:
        kind: A short text, equal for all reasons of this kind, so that reasons can be counted.
        detail: The figures of this case.
    """

    kind: str
    detail: str

    def __str__(self) -> str:
        """Render for people."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The time of one iteration, divided into parts that add up to it.

    Args:
        compute_s: Kernels of the slowest stage, all micro-batches.
        tensor_parallel_s: Its tensor-parallel all-reduces.
        bubble_s: Its waiting for other stages, if transfers took no time.
        pipeline_p2p_s: Time that the transfers between stages add.
        gradient_sync_s: Data-parallel and tied-embedding all-reduces after the pipeline.
        other_s: Host work per iteration.
    """

    compute_s: float = 0.0
    tensor_parallel_s: float = 0.0
    bubble_s: float = 0.0
    pipeline_p2p_s: float = 0.0
    gradient_sync_s: float = 0.0
    optimizer_s: float = 0.0
    other_s: float = 0.0

    @classmethod
    def of(cls, parts_s: Iterable[float]) -> Self:
        """Return a breakdown from its parts in the order of the fields."""
        return cls(**{part.name: value for part, value in zip(fields(cls), parts_s, strict=True)})

    @property
    def total_s(self) -> float:
        """Seconds of the iteration."""
        pipeline_s = self.compute_s + self.tensor_parallel_s + self.bubble_s + self.pipeline_p2p_s
        return pipeline_s + self.gradient_sync_s + self.optimizer_s + self.other_s

    def scaled(self, factor: float) -> Self:
        """Return all parts multiplied by a factor."""
        return type(self)(**{part.name: factor * getattr(self, part.name) for part in fields(self)})

    def to_json(self) -> dict[str, float]:
        """Return the ``breakdown_s`` object of the JSON contract."""
        return {part.name.removesuffix("_s"): getattr(self, part.name) for part in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Money for one iteration, in the currency of the cluster's prices."""

    devices: float  # for the time of the devices that the strategy uses
    egress: float  # for bytes that leave a zone for another
    num_tokens: int = 0  # tokens of an iteration; 0 for a model that has none

    @property
    def per_iteration(self) -> float:
        """Cost of devices and egress together."""
        return self.devices + self.egress

    def to_json(self) -> dict[str, Any]:
        """Return the ``cost`` object of a row."""
        per_token = self.per_iteration / self.num_tokens if self.num_tokens else None
        return {
            "per_iteration": self.per_iteration,
            "devices": self.devices,
            "egress": self.egress,
            "per_million_tokens": None if per_token is None else per_token * MEGA,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of recipe by which a strategy fits into memory."""

    change: str  # in words: ``recompute full``, ``ZeRO 3 and gradients in bf16``
    iteration_time_s: float  # with the change


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The prediction for one strategy.

    Args:
        iteration_time_s: Seconds per optimizer step.
        breakdown: Its parts; None for a cost model without a breakdown.
        peak_memory_bytes: Largest need of a rank, per stage; empty for a model without memory.
        memory_limit_bytes: Memory of the smallest device of each stage.
        reasons: Why it cannot run; empty when it can.
        failure_probability: Probability that it does not finish, given the model's error.
        lower_bound_s: Lower bound on the time of every plan of the same candidate; in the space of
            placements, on its closed form. None if no bound was proven.
        interval_s: 95 % interval of the measured time; None if it was not computed.
        warnings: Reasons for less certainty, e.g. extrapolation. This field and those below are
            columns of rows, which planners add to each result (`CostModel.with_columns`).
        launchable: Whether the runtime can launch it as it is.
        cost: Money for an iteration; None if prices are unknown.
        tokens_per_s: Tokens trained per second; None for a model without tokens.
        mfu: Model FLOPs utilisation: the model's operations as a share of the devices' peak rate.
            Causal attention counts by halves, repeated operations once. None for a cost model that
            does not count operations.
        remedies: Changes by which a strategy that does not fit would, the fastest first; empty
            where they were not looked for.
    """

    strategy: Strategy
    iteration_time_s: float
    breakdown: Breakdown | None = None
    peak_memory_bytes: tuple[float, ...] = ()
    memory_limit_bytes: tuple[float, ...] = ()
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[str, ...] = ()
    # Whether such strategies took longer elsewhere than anything that the model knows explains
    unexplained: bool = False
    launchable: bool = True
    failure_probability: float = 0.0
    lower_bound_s: float | None = None
    interval_s: tuple[float, float] | None = None
    cost: Cost | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Tokens per second over the devices that the strategy uses."""
        total = self.tokens_per_s
        return None if total is None else total / len(self.strategy.placement)

    @property
    def remedies_text(self) -> str:
        """Its remedies with what they add to the time; empty without any.

        Text such as ``fits with ZeRO 3 (+2 %), recompute full (+31 %)``.
        """
        percent = 100 / self.iteration_time_s
        texts = (
            f"{remedy.change} ({round(percent * remedy.iteration_time_s) - 100:+} %)"
            for remedy in self.remedies
        )
        return f"fits with {', '.join(texts)}" if self.remedies else ""

    @property
    def feasible(self) -> bool:
        """Whether it is expected to run."""
        return not self.reasons

    @property
    def fullest_bytes(self) -> tuple[float, float] | None:
        """Need and limit of the stage closest to its limit; None for a model without memory."""
        pairs = zip(self.peak_memory_bytes, self.memory_limit_bytes, strict=True)
        return max(pairs, key=lambda pair: pair[0] / pair[1], default=None)

    @property
    def memory_share(self) -> float:
        """Largest share of its device's memory that a stage needs; 0 for a model without memory."""
        peak, limit = self.fullest_bytes or (0.0, 1.0)
        return peak / limit

    def taking(self, seconds: float) -> Self:
        """Return the estimate with another iteration time, such as a measured one.

        All parts keep their shares, since a measurement does not show which part was slower.
        """
        factor = seconds / self.iteration_time_s
        return replace(
            self,
            iteration_time_s=seconds,
            interval_s=None,
            breakdown=self.breakdown and self.breakdown.scaled(factor),
            cost=self.cost and replace(self.cost, devices=factor * self.cost.devices),
            tokens_per_s=self.tokens_per_s and self.tokens_per_s / factor,
            mfu=self.mfu and self.mfu / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """A candidate from which no strategy can be made."""

    candidate: AnyCandidate
    reason: Reason
    feasible: ClassVar[bool] = False
    iteration_time_s: ClassVar[None] = None  # without a strategy there is no time


Result = Estimate | Infeasible

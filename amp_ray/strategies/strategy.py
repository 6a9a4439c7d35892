"""Strategies: stages, micro-batches, and the device of every rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import Self, TypeVar

from amp_ray.models.model import Model
from amp_ray.strategies.candidate import (
    Candidate,
    StageOptions,
    check_stages,
    check_virtual_stages,
)
from amp_ray.strategies.operator_run import OperatorRun, check_runs
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.zero import Zero

__all__ = [
    "Stage",
    "StageOptions",
    "Strategy",
    "TokenSlices",
    "all_bounds",
    "candidate_of",
    "chunk_bounds",
    "named",
    "stage_bounds",
]

_T = TypeVar("_T")

TokenSlices = tuple[tuple[int, tuple[int, ...]], ...]
"""How a micro-batch is cut: batch slices ``(sequences, tokens of each of their token slices)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of layers and the ranks that compute it.

    Args:
        first_layer: Index of its first layer.
        end_layer: Index after its last layer (half-open).
        options: How the layers are divided and computed.
        shares: Samples of one micro-batch per dp index, if a strategy sets them; None means
            ``micro_batch_size`` each.
        operators: Runs of equally divided operators, if the plan sets them. Then ``first_layer``
            and ``end_layer`` count operators, and ``options`` are those of the first operator.
            Empty means that all operators have the stage's options.

    Raises:
        ValueError: If the stage is empty, shares or operators do not fit it, or recompute is still
            to be chosen.
    """

    first_layer: int
    end_layer: int
    options: StageOptions
    shares: tuple[int, ...] | None = None
    operators: tuple[OperatorRun, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(f"a stage needs layers, found [{self.first_layer}, {self.end_layer})")
        dp = self.options.dp
        if self.shares is not None and (len(self.shares) != dp or min(self.shares) < 1):
            message = f"shares need one positive count per dp index ({dp}), found {self.shares}"
            raise ValueError(message)
        if self.operators:
            check_runs(
                self.operators,
                first=self.first_layer,
                end=self.end_layer,
                num_ranks=self.num_ranks,
            )
        key = self.options.open_choice
        if key is not None:
            raise ValueError(f"{key} 'auto' is for a search to choose; a stage has none of it yet")

    @property
    def num_ranks(self) -> int:
        """Ranks that the stage occupies."""
        return self.options.num_ranks


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One complete plan. Ranks count tp fastest, then cp, then dp, then stages.

    Args:
        stages: In pipeline order, covering layers ``0..num_layers`` without gaps.
        micro_batch_size: Samples per micro-batch and data-parallel replica; where stages have
            shares, the samples of one micro-batch over all replicas, which shares add up to.
        num_micro_batches: Micro-batches per optimizer step and replica.
        placement: Device index of every rank; no device twice.
        token_slices: Parts of a micro-batch that stages pass on one at a time, in this order. The
            batch slices have ``micro_batch_size`` sequences in total, and the token slices of each
            add up to the length of a sequence. Empty means whole micro-batches.
        virtual_stages: Chunks per stage. Above 1 the schedule is interleaved, and ``stages`` give
            the number of layers of each stage, not their positions.
        chunk_bounds: Bounds of all chunks, in the model's order: chunk ``c`` of stage ``p`` is
            entry ``c * pp + p``. Empty means that every stage divides its blocks evenly.

    Raises:
        ValueError: If stages leave gaps, take different numbers of samples, differ in ZeRO, the
            placement lacks a rank or uses a device twice, slices do not add up to a micro-batch, or
            chunks do not add up to the stages.
    """

    stages: tuple[Stage, ...]
    micro_batch_size: int
    num_micro_batches: int
    placement: tuple[int, ...]
    token_slices: TokenSlices = ()
    virtual_stages: int = 1
    chunk_bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or self.micro_batch_size < 1 or self.num_micro_batches < 1:
            raise ValueError(
                "a strategy needs stages, micro_batch_size and num_micro_batches, found "
                f"{len(self.stages)}, {self.micro_batch_size} and {self.num_micro_batches}"
            )
        _check_chain(self.stages)
        _check_samples(self.stages, self.micro_batch_size)
        if self.token_slices:
            _check_slices(self.token_slices, self)
        _check_chunks(self)
        shares_evenly = self.is_uniform and not self.is_sliced
        check_stages([stage.options for stage in self.stages], shares_evenly=shares_evenly)
        num_ranks = sum(stage.num_ranks for stage in self.stages)
        distinct = set(self.placement)
        if len(self.placement) != num_ranks or len(distinct) != num_ranks or min(distinct) < 0:
            raise ValueError(
                f"placement must give {num_ranks} ranks a device each, counted from 0, found "
                f"{len(self.placement)} entries and {len(distinct)} different devices"
            )

    @classmethod
    def uniform(
        cls,
        candidate: Candidate,
        bounds: Sequence[int],
        placement: tuple[int, ...] | None = None,
        recompute: Sequence[Recompute] = (),
    ) -> Self:
        """Give a candidate its cuts; without ``placement``, rank ``r`` runs on device ``r``.

        ``bounds`` are those of the stages, or of all their chunks; recompute is the candidate's by
        default.

        Raises:
            ValueError: If ``bounds`` do not make ``candidate.pp`` stages.
        """
        chunk_bounds: tuple[int, ...] = ()
        if candidate.virtual_stages > 1 and len(bounds) == candidate.num_chunks + 1:
            chunk_bounds = tuple(bounds)
            bounds = stage_bounds(chunk_bounds, candidate.pp)
        if len(bounds) != candidate.pp + 1 or bounds[0] != 0:
            message = f"bounds must run from 0 in {candidate.pp} stages, found {tuple(bounds)}"
            raise ValueError(message)
        options = [replace(candidate.options, recompute=chosen) for chosen in recompute]
        stages = tuple(
            Stage(first_layer=first, end_layer=end, options=chosen)
            for (first, end), chosen in zip(
                pairwise(bounds), options or [candidate.options] * candidate.pp, strict=True
            )
        )
        return cls(
            stages=stages,
            micro_batch_size=candidate.micro_batch_size,
            num_micro_batches=candidate.num_micro_batches,
            placement=_first_devices(candidate.num_devices) if placement is None else placement,
            virtual_stages=candidate.virtual_stages,
            chunk_bounds=chunk_bounds,
        )

    @classmethod
    def of_groups(
        cls,
        bounds: Sequence[int],
        groups: Sequence[tuple[StageOptions, tuple[int, ...], Sequence[int]]],
        *,
        num_micro_batches: int,
    ) -> Self:
        """Give stages with devices of their own their cuts.

        Stages with equal dp and even samples have no shares. ``groups`` has per stage its options,
        the samples of one micro-batch by replica, and its devices by rank.
        """
        shares = [row for _, row, _ in groups]
        even = len({len(row) for row in shares}) == len(set(chain(*shares))) == 1
        stages = tuple(
            Stage(first_layer=first, end_layer=end, options=options, shares=None if even else row)
            for (options, row, _), (first, end) in zip(groups, pairwise(bounds), strict=True)
        )
        return cls(
            stages=stages,
            micro_batch_size=shares[0][0] if even else sum(shares[0]),
            num_micro_batches=num_micro_batches,
            placement=tuple(chain.from_iterable(devices for _, _, devices in groups)),
        )

    @property
    def pp(self) -> int:
        """Pipeline parallel degree: the number of stages."""
        return len(self.stages)

    @property
    def tp(self) -> int | None:
        """Tensor parallel degree of all stages; None if they differ."""
        return _common(stage.options.tp for stage in self.stages)

    @property
    def dp(self) -> int | None:
        """Data parallel degree of all stages; None if they differ."""
        return _common(stage.options.dp for stage in self.stages)

    @property
    def recompute(self) -> Recompute | None:
        """Recompute of all stages; None if they differ."""
        return _common(stage.options.recompute for stage in self.stages)

    @property
    def zero(self) -> Zero:
        """ZeRO options of all stages."""
        return self.stages[0].options.zero

    @property
    def sequence_parallel(self) -> bool:
        """Whether some stage divides tokens over its tensor-parallel ranks."""
        return any(stage.options.sequence_parallel for stage in self.stages)

    @property
    def options(self) -> StageOptions | None:
        """Options of all stages; None if they differ."""
        return _common(stage.options for stage in self.stages)

    @property
    def bounds(self) -> tuple[int, ...]:
        """Cuts including both ends: ``(0, ..., num_layers)``."""
        return (0, *(stage.end_layer for stage in self.stages))

    @property
    def given_bounds(self) -> tuple[int, ...]:
        """Bounds as written in a file: of all chunks if these are uneven, else of stages."""
        return self.chunk_bounds or self.bounds

    @property
    def is_sliced(self) -> bool:
        """Whether stages pass on slices of sequences."""
        return bool(self.token_slices)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of a sequence that is cut into slices; None for whole micro-batches."""
        return sum(self.token_slices[0][1]) if self.token_slices else None

    @property
    def is_interleaved(self) -> bool:
        """Whether stages have several chunks each."""
        return self.virtual_stages > 1

    @property
    def is_uniform(self) -> bool:
        """Whether all stages and operators have one tp and dp and share samples evenly."""
        even = all(stage.shares is None and not stage.operators for stage in self.stages)
        return even and self.tp is not None and self.dp is not None

    @property
    def has_operators(self) -> bool:
        """Whether its stages have runs of operators; its bounds then count operators."""
        return any(stage.operators for stage in self.stages)

    @property
    def samples_per_micro_batch(self) -> int:
        """Samples of one micro-batch over all data-parallel replicas."""
        stage = self.stages[0]
        return (
            self.micro_batch_size * stage.options.dp if stage.shares is None else sum(stage.shares)
        )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.samples_per_micro_batch * self.num_micro_batches

    @cached_property
    def first_rank(self) -> tuple[int, ...]:
        """First rank of each stage."""
        ranks = [0]
        for stage in self.stages[:-1]:
            ranks.append(ranks[-1] + stage.num_ranks)
        return tuple(ranks)

    def with_bounds(self, bounds: Sequence[int]) -> Self:
        """Return the same strategy with other cuts."""
        stages = (
            replace(stage, first_layer=first, end_layer=end)
            for stage, (first, end) in zip(self.stages, pairwise(bounds), strict=True)
        )
        return replace(self, stages=tuple(stages))

    def devices(self, stage: int) -> tuple[int, ...]:
        """Device index of every rank of one stage, in rank order."""
        first = self.first_rank[stage]
        return self.placement[first : first + self.stages[stage].num_ranks]


def stage_bounds(chunk_bounds: Sequence[int], pp: int) -> tuple[int, ...]:
    """Return bounds of stages that have as many layers as their chunks together.

    Example:
        >>> stage_bounds((0, 2, 3, 4, 7), 2)
        (0, 3, 7)
    """
    sizes = [end - first for first, end in pairwise(chunk_bounds)]
    return (0, *accumulate(sum(sizes[stage::pp]) for stage in range(pp)))


def chunk_bounds(model: Model, bounds: Sequence[int], virtual_stages: int) -> tuple[int, ...]:
    """Divide the blocks of every stage among its chunks, in the order of an interleaved schedule.

    A stage keeps its number of blocks, but they are no longer adjacent: chunk 0 of all stages comes
    first, then chunk 1. Layers that are no blocks stay at their end of the model. Bounds are equal
    where a stage has fewer blocks than chunks.
    """
    blocks, before = model.indices("block"), model.block_counts
    counts = [before[end] - before[first] for first, end in pairwise(bounds)]
    sizes = [
        (chunk + 1) * count // virtual_stages - chunk * count // virtual_stages
        for chunk in range(virtual_stages)
        for count in counts
    ]
    starts = [(*blocks, model.num_layers)[done] for done in accumulate(sizes[:-1])]
    return (0, *starts, model.num_layers)


def all_bounds(model: Model, strategy: Strategy) -> tuple[int, ...]:
    """Return the bounds of all chunks of a strategy; with one chunk per stage, of its stages.

    Returns:
        ``pp * virtual_stages + 1`` layer indices.
    """
    if not strategy.is_interleaved or strategy.chunk_bounds:
        return strategy.given_bounds
    return chunk_bounds(model, strategy.bounds, strategy.virtual_stages)


def degrees_text(strategy: Strategy) -> str:
    """Return degrees and micro-batch size; ``*`` for a degree that differs between stages."""
    degrees = f"tp {strategy.tp or '*'}, pp {strategy.pp}, dp {strategy.dp or '*'}"
    return f"{degrees}, micro-batch size {strategy.micro_batch_size}"


def named(strategy: Strategy) -> str:
    """Name a strategy in a message by its degrees and bounds."""
    figures = {
        "tp": strategy.tp,
        "pp": strategy.pp,
        "dp": strategy.dp,
        "micro-batch size": strategy.micro_batch_size,
        "chunks per stage": strategy.virtual_stages if strategy.is_interleaved else None,
        "bounds": " ".join(map(str, strategy.given_bounds)),
    }
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value is not None)


def candidate_of(strategy: Strategy) -> Candidate:
    """Return the candidate that a uniform strategy was cut from.

    Raises:
        ValueError: If stages differ in their options, share samples unevenly, or pass on slices.
    """
    if strategy.is_sliced:
        raise ValueError("expected whole micro-batches, found token slices")
    options = strategy.options
    if not strategy.is_uniform or options is None:
        raise ValueError(
            "expected one tp, dp and recompute for all stages, found "
            f"tp {[stage.options.tp for stage in strategy.stages]}, "
            f"dp {[stage.options.dp for stage in strategy.stages]}, "
            f"recompute {[str(stage.options.recompute) for stage in strategy.stages]}"
        )
    return Candidate(
        micro_batch_size=strategy.micro_batch_size,
        options=options,
        pp=strategy.pp,
        num_micro_batches=strategy.num_micro_batches,
        virtual_stages=strategy.virtual_stages,
    )


@lru_cache(maxsize=16)
def _first_devices(number: int) -> tuple[int, ...]:
    """Return the devices in order, one tuple for all strategies of as many."""
    return tuple(range(number))


def _check_chain(stages: Sequence[Stage]) -> None:
    end = 0
    for index, stage in enumerate(stages):
        if stage.first_layer != end:
            raise ValueError(f"stage {index} starts at layer {stage.first_layer}; expected {end}")
        end = stage.end_layer


def _check_samples(stages: Sequence[Stage], micro_batch_size: int) -> None:
    """Refuse stages with different numbers of samples, and shares that are not needed.

    Without shares all stages have one dp; with shares some dp is above 1, and each stage has some.
    """
    dps, shares = [stage.options.dp for stage in stages], [stage.shares for stage in stages]
    if all(share is None for share in shares):
        if len(set(dps)) > 1:
            raise ValueError(f"stages with dp {dps} need shares: which rank takes which samples")
        return
    if max(dps) == 1 or any(share is None or sum(share) != micro_batch_size for share in shares):
        raise ValueError(
            f"shares {shares}: every stage needs some, each adding up to micro_batch_size "
            f"{micro_batch_size}, and none where every dp is 1"
        )


def _check_slices(token_slices: TokenSlices, strategy: Strategy) -> None:
    if any(stage.shares is not None for stage in strategy.stages):
        raise ValueError("token_slices need stages that share samples evenly: leave the shares out")
    sequences = [sequences for sequences, _ in token_slices]
    if min(sequences) < 1 or sum(sequences) != strategy.micro_batch_size:
        raise ValueError(
            f"the sequences of token_slices must add up to micro_batch_size "
            f"{strategy.micro_batch_size}, found {sequences}"
        )
    lengths = {sum(tokens) for _, tokens in token_slices}
    if len(lengths) > 1 or any(min(tokens, default=0) < 1 for _, tokens in token_slices):
        raise ValueError(
            "each entry of token_slices cuts one sequence length into positive numbers of tokens, "
            f"found {[list(tokens) for _, tokens in token_slices]}"
        )


def _check_chunks(strategy: Strategy) -> None:
    """Refuse chunks that contradict the stages or cannot be combined with other dimensions."""
    virtual_stages, chunk_bounds = strategy.virtual_stages, strategy.chunk_bounds
    check_virtual_stages(virtual_stages, strategy.pp)
    if virtual_stages == 1 and not chunk_bounds:
        return
    if strategy.is_sliced or not strategy.is_uniform:
        raise ValueError(
            f"virtual_stages {virtual_stages} need whole micro-batches and stages of one tp and dp"
        )
    if not chunk_bounds:
        return
    is_chain = all(first < end for first, end in pairwise(chunk_bounds))
    if len(chunk_bounds) != strategy.pp * virtual_stages + 1 or not is_chain:
        raise ValueError(
            f"{strategy.pp} stages of {virtual_stages} chunks need "
            f"{strategy.pp * virtual_stages + 1} ascending bounds, found {list(chunk_bounds)}"
        )
    if stage_bounds(chunk_bounds, strategy.pp) != strategy.bounds:
        raise ValueError(f"chunks {list(chunk_bounds)} do not make stages {list(strategy.bounds)}")


def _common(values: Iterable[_T]) -> _T | None:
    first, *rest = values
    return first if all(other is first or other == first for other in rest) else None

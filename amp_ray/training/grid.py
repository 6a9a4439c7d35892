"""The strategy of a job: ranks, stages, samples, slices, chunks, and messages between ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Final, NamedTuple

from amp_ray.strategies.candidate import OTHER_OPTIONS, StageOptions
from amp_ray.strategies.recompute import Recompute

Place = tuple[str, int]
"""Host name and slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Coordinates of a rank in the grid of a strategy."""

    pp: int  # index of its stage
    dp: int  # index of its replica
    tp: int  # index among the ranks that share every layer of the stage
    cp: int = 0  # index among the ranks that divide the sequences of a replica


def rank_map(placement: Sequence[Place], launch_order: Sequence[Place]) -> tuple[int, ...]:
    """Return for each rank of the strategy the ``RANK`` of the process at its place.

    The two numbers differ because some launchers number processes host by host, regardless of the
    placement. ``launch_order`` has the place of every process, in the order of the launcher's
    ``RANK``; both arguments have the same places, each once.

    Example:
        >>> rank_map([("b", 0), ("a", 0)], [("a", 0), ("b", 0)])
        (1, 0)
    """
    process_at = {place: process for process, place in enumerate(launch_order)}
    return tuple(process_at[place] for place in placement)


def shard_range(size: int, index: int, num_shards: int) -> tuple[int, int]:
    """Return the half-open range of one shard; sizes of shards differ by at most one.

    Example:
        >>> [shard_range(10, index, 4) for index in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return index * size // num_shards, (index + 1) * size // num_shards


_OPTIONS: Final = ("tp", "dp", *(option.name for option in OTHER_OPTIONS))
"""Options of a stage that need no conversion."""

TokenSlices = tuple[tuple[int, tuple[int, ...]], ...]
"""For each batch slice, its number of sequences and the lengths of its token slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStage(StageOptions):
    """Options of one stage, and its samples."""

    # Samples of one micro-batch per dp index; None if each has ``micro_batch_size``
    shares: tuple[int, ...] | None = None


class Passage(NamedTuple):
    """One unit of the pipeline: a micro-batch, or a batch slice of one."""

    micro_batch: int  # index in the step
    first: int  # first sequence, as an index into a replica's share of the micro-batch
    size: int | None  # number of sequences of a replica's share; None for all
    tokens: tuple[int, ...]  # length of each token slice; empty if sequences are whole

    @property
    def num_slices(self) -> int:
        """Number of token slices."""
        return max(1, len(self.tokens))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A strategy that this program can run."""

    stages: tuple[GridStage, ...]  # in pipeline order
    micro_batch_size: int  # per replica; in total if stages divide samples differently
    num_micro_batches: int
    # ``(0, ..., num_layers)``, indices into the list of ``layer_kinds``; several chunks per stage
    # are in the order of the model: chunk 0 of every stage, chunk 1 of every stage, ...
    bounds: tuple[int, ...]
    rank_map: tuple[int, ...]  # process of each rank, in the order of strategy ranks
    virtual_stages: int = 1  # chunks per stage
    token_slices: TokenSlices = ()  # slices of a micro-batch; empty if it is not cut
    shard_ranks: int = 0  # ranks per shard group, which holds a full copy; 0 for all ranks
    # With ZeRO stage 3, whether gathered weights are kept until the backward pass
    keeps_weights: bool = False

    @property
    def pp(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def tp(self) -> int:
        """Tensor parallel degree; that of the first stage if stages differ."""
        return self.stages[0].tp

    @property
    def dp(self) -> int:
        """Data parallel degree; that of the first stage if stages differ."""
        return self.stages[0].dp

    @property
    def cp(self) -> int:
        """Context parallel degree, the same in all stages."""
        return self.stages[0].cp

    @property
    def num_ranks(self) -> int:
        """Number of processes that the strategy needs."""
        return sum(stage.num_ranks for stage in self.stages)

    def shares(self, stage: int) -> tuple[int, ...]:
        """Return the number of samples per micro-batch for each dp index of a stage."""
        options = self.stages[stage]
        return (self.micro_batch_size,) * options.dp if options.shares is None else options.shares

    @property
    def samples_per_micro_batch(self) -> int:
        """Number of samples of one micro-batch, over all replicas."""
        return sum(self.shares(0))

    @cached_property
    def first_rank(self) -> tuple[int, ...]:
        """First rank of each stage, and the number of ranks."""
        return tuple(accumulate((stage.num_ranks for stage in self.stages), initial=0))

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank: tp fastest, then cp, then dp, then stages."""
        pp = max(i for i, first in enumerate(self.first_rank[:-1]) if first <= rank)
        replica, tp = divmod(rank - self.first_rank[pp], self.stages[pp].tp)
        dp, cp = divmod(replica, self.cp)
        return Coordinates(pp=pp, dp=dp, tp=tp, cp=cp)

    def process(self, stage: int, dp_index: int, tp_index: int, cp_index: int = 0) -> int:
        """Return the process at some coordinates."""
        replica = dp_index * self.cp + cp_index
        return self.rank_map[self.first_rank[stage] + replica * self.stages[stage].tp + tp_index]

    def replicas(self, place: Coordinates) -> tuple[int, ...]:
        """Return the processes with the same weights as a rank, including itself."""
        stage, first = self.stages[place.pp], self.first_rank[place.pp] + place.tp
        return self.rank_map[first : self.first_rank[place.pp + 1] : stage.tp]

    def expert_processes(self, place: Coordinates) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the processes that together hold all experts, and those with this rank's experts.

        Consecutive ranks of a stage together hold all experts.
        """
        stage, (first, end) = self.stages[place.pp], self.first_rank[place.pp : place.pp + 2]
        index_in_stage = (place.dp * self.cp + place.cp) * stage.tp + place.tp
        index = index_in_stage % stage.expert_ranks
        begin = first + index_in_stage - index
        together = self.rank_map[begin : begin + stage.expert_ranks]
        return together, self.rank_map[first + index : end : stage.expert_ranks]

    def chunks_of(self, stage: int) -> list[tuple[int, int]]:
        """Return first and end layer of every chunk of a stage."""
        ends = list(pairwise(self.bounds))
        return ends[stage :: self.pp]

    def divides_tokens(self, stage: int, other: int) -> bool:
        """Return whether two stages exchange divided tokens: each rank sends only its part."""
        ends = self.stages[stage], self.stages[other]
        return all(end.sequence_parallel for end in ends) and ends[0].tp == ends[1].tp

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """Passages of one step, in the order in which they run."""
        passages = []
        for micro_batch in range(self.num_micro_batches):
            first = 0
            for size, tokens in self.token_slices:
                whole = len(self.token_slices) == 1
                passages.append(Passage(micro_batch, first, None if whole else size, tokens))
                first += size
            if not self.token_slices:
                passages.append(Passage(micro_batch, 0, None, ()))
        return tuple(passages)

    def samples(self, stage: int, passage: Passage) -> tuple[tuple[int, int], ...]:
        """Return the half-open range of the step's samples for each dp index of a stage."""
        start = passage.micro_batch * self.samples_per_micro_batch
        ends = pairwise(accumulate(self.shares(stage), initial=start))
        return tuple(
            (first, end)
            if passage.size is None
            else (first + passage.first, first + passage.first + passage.size)
            for first, end in ends
        )


def read_grid(strategy: Mapping[str, Any], launch_order: Sequence[Sequence[Any]] | None) -> Grid:
    """Read a STRATEGY object; without a launch order, a rank is the process of that number."""
    micro_batch_size = strategy["micro_batch_size"]
    stages = _read_stages(strategy, micro_batch_size)
    placement = strategy.get("placement")
    processes = tuple(range(sum(stage.num_ranks for stage in stages)))
    if launch_order is not None and placement is not None:
        processes = rank_map([*map(tuple, placement)], [*map(tuple, launch_order)])
    return Grid(
        stages=stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=strategy["num_micro_batches"],
        bounds=tuple(strategy["bounds"]),
        rank_map=processes,
        virtual_stages=strategy.get("virtual_stages", 1),
        token_slices=tuple(
            (size, tuple(tokens)) for size, tokens in strategy.get("token_slices", ())
        ),
        shard_ranks=strategy.get("shard_ranks", 0),
        keeps_weights=not strategy.get("reshard_after_forward", True),
    )


def _read_stages(strategy: Mapping[str, Any], micro_batch_size: int) -> tuple[GridStage, ...]:
    """Read ``stages``, or create equal stages; an option that a stage lacks is the strategy's."""
    records = strategy.get("stages") or [{}] * strategy["pp"]
    recompute = strategy.get("recompute", [stage.get("recompute", "none") for stage in records])
    per_stage = recompute if isinstance(recompute, list) else [recompute] * len(records)
    stages = []
    for stage, kind in zip(records, per_stage, strict=True):
        options = {key: value for key, value in {**strategy, **stage}.items() if key in _OPTIONS}
        shares = stage.get("shares")
        if shares is not None and set(shares) != {micro_batch_size}:
            options["shares"] = tuple(shares)
        again = kind if isinstance(kind, Mapping) else {"kind": kind}
        stages.append(GridStage(**options, recompute=Recompute(**again)))
    return tuple(stages)


# Messages between stages, which may differ in tp and dp


class Piece(NamedTuple):
    """The part of an activation or a gradient in one message."""

    process: int  # process at the other end of the message
    first: int  # first sample, as an index into this rank's samples of the passage
    end: int  # index after the last sample
    feature_part: int  # index of the part of the features
    num_feature_parts: int  # number of parts of the features


class RowRange(NamedTuple):
    """Rows of a sharded table held by both this rank and a process of another stage."""

    process: int
    first: int  # first row, as an index into this rank's shard
    end: int


def incoming(grid: Grid, place: Coordinates, source: int, passage: Passage) -> tuple[Piece, ...]:
    """Return the pieces that a rank receives from a stage for one passage.

    Every rank of a stage holds all features of its samples. If the senders' tp is larger, each
    sends a part of the features; if the receivers' tp is larger, a sender has several receivers.
    """
    return tuple(
        Piece(grid.process(source, dp, tp, place.cp), *span, part, num_parts)
        for dp, span in _shared(grid, place, source, passage)
        for tp, part, num_parts in _feature_senders(
            grid.stages[source].tp, grid.stages[place.pp].tp, place.tp
        )
    )


def outgoing(grid: Grid, place: Coordinates, target: int, passage: Passage) -> tuple[Piece, ...]:
    """Return the pieces that a rank sends to a stage for one passage; see `incoming`."""
    own_tp, tp = grid.stages[place.pp].tp, grid.stages[target].tp
    return tuple(
        Piece(grid.process(target, dp, receiver, place.cp), *span, part, num_parts)
        for dp, span in _shared(grid, place, target, passage)
        for receiver in range(tp)
        for sender, part, num_parts in _feature_senders(own_tp, tp, receiver)
        if sender == place.tp
    )


def shared_rows(grid: Grid, place: Coordinates, other: int, num_rows: int) -> tuple[RowRange, ...]:
    """Return the rows of a table, sharded over tp, that a rank shares with ranks of a stage.

    Both stages hold the table; each rank exchanges rows with one replica of the other stage. The
    ranges cover the rows of this rank's shard once.
    """
    dp = place.dp % grid.stages[other].dp
    return tuple(_rows(grid, place, (other, dp), num_rows))


def rows_for_others(
    grid: Grid, place: Coordinates, other: int, num_rows: int
) -> tuple[RowRange, ...]:
    """Return the rows that a rank must send so that the other stage gets its `shared_rows`."""
    replicas = range(place.dp, grid.stages[other].dp, grid.stages[place.pp].dp)
    return tuple(rows for dp in replicas for rows in _rows(grid, place, (other, dp), num_rows))


def _rows(
    grid: Grid, place: Coordinates, replica: tuple[int, int], num_rows: int
) -> Iterator[RowRange]:
    """Yield the rows that a rank shares with each rank of ``replica`` (stage, dp index)."""
    own_first, own_end = shard_range(num_rows, place.tp, grid.stages[place.pp].tp)
    num_shards = grid.stages[replica[0]].tp
    for tp in range(num_shards):
        span = shard_range(num_rows, tp, num_shards)
        first, end = max(span[0], own_first), min(span[1], own_end)
        if first < end:
            process = grid.process(*replica, tp, place.cp)
            yield RowRange(process, first - own_first, end - own_first)


def _shared(
    grid: Grid, place: Coordinates, other: int, passage: Passage
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the dp indices of a stage that share samples with this rank, and the shared range."""
    own_first, own_end = grid.samples(place.pp, passage)[place.dp]
    for dp, span in enumerate(grid.samples(other, passage)):
        first, end = max(span[0], own_first), min(span[1], own_end)
        if first < end:
            yield dp, (first - own_first, end - own_first)


def _feature_senders(tp: int, receiving_tp: int, receiver: int) -> Iterator[tuple[int, int, int]]:
    """Yield each tp index that sends to a receiver, its part of the features, and their number."""
    lanes = lcm(tp, receiving_tp)
    num_parts = lanes // receiving_tp
    for part in range(num_parts):
        yield (receiver * num_parts + part) * tp // lanes, part, num_parts

"""The strategy of a job: its ranks, stages, samples, token slices and chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

from amp_ray.training.fields import Fields

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

    The map is needed because some launchers number processes host by host, regardless of the
    placement. ``launch_order`` has the place of every process, in the order of the launcher's
    ``RANK``; both arguments have the same places, each once.

    Example:
        >>> rank_map([("b", 0), ("a", 0)], [("a", 0), ("b", 0)])
        (1, 0)
    """
    process_at = {place: process for process, place in enumerate(launch_order)}
    if len(process_at) != len(launch_order) or sorted(placement) != sorted(launch_order):
        raise ValueError(
            f"placement {[list(place) for place in placement]} and launch_order "
            f"{[list(place) for place in launch_order]} must name the same places, each once"
        )
    return tuple(process_at[place] for place in placement)


def read_places(value: Any, where: str, num_ranks: int) -> tuple[Place, ...]:  # noqa: ANN401 - JSON
    """Read ``[["host", slot], ...]``; raise ``ValueError`` unless there is one entry per rank."""
    message = f"{where} must be {num_ranks} pairs of host name and slot, found {value!r}"
    if not isinstance(value, list | tuple) or len(value) != num_ranks:
        raise ValueError(message)
    places = []
    for entry in value:
        match entry:
            case [str(host), int(slot)] if slot >= 0:
                places.append((host, slot))
            case _:
                raise ValueError(message)
    return tuple(places)


def shard_range(size: int, index: int, num_shards: int) -> tuple[int, int]:
    """Return the half-open range of one shard; sizes of shards differ by at most one.

    Example:
        >>> [shard_range(10, index, 4) for index in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return index * size // num_shards, (index + 1) * size // num_shards


_DEGREES: Final = {"cp": 1, "ep": 1, "etp": 0}
"""Optional degrees, with their defaults."""

RECOMPUTE: Final = ("none", "selective", "full")

TokenSlices = tuple[tuple[int, tuple[int, ...]], ...]
"""For each batch slice, its number of sequences and the lengths of its token slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStage:
    """Parallel degrees and other options of one stage."""

    tp: int
    dp: int
    # Samples of one micro-batch per dp index; None for ``micro_batch_size`` each
    shares: tuple[int, ...] | None = None
    recompute: str = "none"  # kind of recomputation in the backward pass
    # Number of blocks that recompute, counted from its first; None for all
    recompute_layers: int | None = None
    cp: int = 1  # ranks that divide the tokens of every sequence
    ep: int = 1  # expert parallel degree
    etp: int = 0  # ranks that divide each expert; 0 means tp
    # Whether its tp ranks divide the tokens between tensor-parallel layers
    sequence_parallel: bool = False

    @property
    def expert_tp(self) -> int:
        """Number of ranks that divide each expert."""
        return self.etp or self.tp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that together hold the experts of a layer."""
        return self.ep * self.expert_tp

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are distributed differently from other weights (tp shards, replicas)."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same weights."""
        return self.cp * self.dp

    @property
    def num_ranks(self) -> int:
        """Number of processes of the stage."""
        return self.tp * self.num_replicas


class Passage(NamedTuple):
    """One unit of the pipeline: a micro-batch, or a batch slice of one."""

    micro_batch: int  # index in the step
    first: int  # first sequence of every share
    size: int | None  # number of sequences of every share; None for all
    tokens: tuple[int, ...]  # length of each token slice; empty if sequences are whole

    @property
    def num_slices(self) -> int:
        """Number of token slices."""
        return max(1, len(self.tokens))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A strategy that this program can run."""

    stages: tuple[GridStage, ...]  # in pipeline order
    micro_batch_size: int  # per replica; if stages share samples differently, in total
    num_micro_batches: int
    # ``(0, ..., num_layers)``, indices into the list of ``layer_kinds``; several chunks per stage
    # are in the order of the model: chunk 0 of every stage, chunk 1 of every stage, ...
    bounds: tuple[int, ...]
    rank_map: tuple[int, ...]  # process of each rank, in the order of strategy ranks
    virtual_stages: int = 1  # chunks per stage
    token_slices: TokenSlices = ()  # slices of a micro-batch; empty if it is not cut
    # ZeRO stage; None if the strategy does not set it
    zero_stage: int | None = None
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

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have one tp and dp, even shares, one chunk and whole tokens."""
        whole = not self.token_slices and not any(stage.sequence_parallel for stage in self.stages)
        return self.is_even and self.virtual_stages == 1 and whole

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same degrees and share samples evenly."""
        degrees = {(stage.tp, stage.cp, stage.dp) for stage in self.stages}
        even = all(set(self.shares(i)) == {self.micro_batch_size} for i in range(self.pp))
        return len(degrees) == 1 and even

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
        """Return the processes that together hold all experts, and those with a rank's experts.

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


def read_grid(strategy: Mapping[str, Any], launch_order: Any) -> Grid:  # noqa: ANN401 - JSON
    """Read the strategy of a job."""
    fields = Fields(strategy, "job.strategy")
    micro_batch_size = fields.integer("micro_batch_size")
    bounds = fields.integers("bounds")
    virtual_stages = fields.integer("virtual_stages", default=1)
    stages = _read_stages(fields, bounds, micro_batch_size, virtual_stages)
    num_ranks = sum(stage.num_ranks for stage in stages)
    placement = fields.any("placement", None)
    places = (
        tuple(("", slot) for slot in range(num_ranks))
        if placement is None
        else read_places(placement, "job.strategy.placement", num_ranks)
    )
    grid = Grid(
        stages=stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=fields.integer("num_micro_batches"),
        bounds=bounds,
        rank_map=_read_rank_map(places, launch_order),
        virtual_stages=virtual_stages,
        token_slices=_read_slices(fields.any("token_slices", None), micro_batch_size),
        zero_stage=fields.integer("zero_stage", minimum=0) if "zero_stage" in strategy else None,
        shard_ranks=fields.integer("shard_ranks", minimum=0, default=0),
        keeps_weights=not fields.flag("reshard_after_forward", default=True),
    )
    fields.finish()
    sums = [sum(grid.shares(stage)) for stage in range(grid.pp)]
    if len(set(sums)) > 1:
        message = f"job.strategy.stages take {sums} samples of a micro-batch; expected one number"
        raise ValueError(message)
    return grid


def _read_rank_map(places: tuple[Place, ...], launch_order: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the rank map; ``launch_order`` None means that ranks follow the placement."""
    if launch_order is None:
        return rank_map(places, places)
    return rank_map(places, read_places(launch_order, "job.launch_order", len(places)))


def _read_stages(
    fields: Fields, bounds: tuple[int, ...], micro_batch_size: int, virtual_stages: int
) -> tuple[GridStage, ...]:
    """Read ``stages``, or create equal stages from the strategy's degrees."""
    records = fields.any("stages", None)
    tp, dp, pp = fields.any("tp"), fields.any("dp"), fields.integer("pp")
    own_words = [dict(record).get("recompute", "none") for record in records or ()]
    words = _read_recompute(fields.any("recompute", own_words or "none"), pp)
    options = _read_options(fields, {})
    if records is None:
        degrees: dict[str, Any] = {"tp": fields.integer("tp"), "dp": fields.integer("dp")}
        return tuple(
            GridStage(recompute=kind, recompute_layers=layers, **degrees, **options)
            for kind, layers in words
        )
    if len(records) != pp or (virtual_stages == 1 and len(bounds) != pp + 1):
        message = f"job.strategy has pp {pp}, {len(records)} stages and bounds {list(bounds)}"
        raise ValueError(message)
    stages = []
    for index, (record, (kind, layers)) in enumerate(zip(records, words, strict=True)):
        stage = Fields(record, f"job.strategy.stages[{index}]")
        grid_stage = GridStage(
            tp=stage.integer("tp"),
            dp=stage.integer("dp"),
            shares=_read_shares(stage, micro_batch_size),
            recompute=kind,
            recompute_layers=layers,
            **_read_options(stage, options),
        )
        ends = stage.integers("layers")
        if virtual_stages == 1 and ends != bounds[index : index + 2]:
            raise ValueError(f"{stage.where}.layers is {list(ends)}, bounds say {list(bounds)}")
        for key, wanted in (("tp", tp), ("dp", dp)):
            if wanted not in {None, getattr(grid_stage, key)}:
                number = getattr(grid_stage, key)
                raise ValueError(f"{stage.where}.{key} is {number}, all stages have {wanted}")
        stages.append(grid_stage)
    return tuple(stages)


def _read_options(fields: Fields, otherwise: Mapping[str, Any]) -> dict[str, Any]:
    """Read optional dimensions of a stage; ``otherwise`` has their defaults."""
    return {
        **{
            key: fields.integer(key, minimum=least, default=otherwise.get(key, least))
            for key, least in _DEGREES.items()
        },
        "sequence_parallel": fields.flag(
            "sequence_parallel", default=otherwise.get("sequence_parallel", False)
        ),
    }


def _read_shares(stage: Fields, micro_batch_size: int) -> tuple[int, ...] | None:
    """Read the number of samples per dp index; None for ``micro_batch_size`` each."""
    dp = stage.integer("dp")
    if stage.any("shares", None) is None:
        return None
    shares = stage.integers("shares")
    if len(shares) != dp or min(shares) < 1:
        raise ValueError(f"{stage.where}.shares needs {dp} positive counts, found {list(shares)}")
    return None if set(shares) == {micro_batch_size} else shares


def _read_recompute(value: Any, pp: int) -> tuple[tuple[str, int | None], ...]:  # noqa: ANN401
    """Read one value for all stages or a list with one per stage."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,) * pp
    words = []
    for item in values:
        kind, layers = item, None
        if isinstance(item, Mapping):
            fields = Fields(item, "job.strategy.recompute")
            kind, layers = fields.text("kind"), fields.integer("layers")
            fields.finish()
        words.append((kind, layers))
    if len(words) != pp or any(kind not in RECOMPUTE for kind, _ in words):
        raise ValueError(
            f"job.strategy.recompute must be one of {', '.join(RECOMPUTE)}, or "
            "{'kind': ..., 'layers': n}, or a list of them for each of the "
            f"{pp} stages, found {value!r}"
        )
    return tuple(words)


def _read_slices(value: Any, micro_batch_size: int) -> TokenSlices:  # noqa: ANN401 - JSON
    """Read ``[[sequences, [tokens, ...]], ...]``."""
    if value is None:
        return ()
    slices = []
    for entry in value if isinstance(value, list | tuple) else (None,):
        match entry:
            case [int(size), [*tokens]] if (
                size > 0
                and tokens
                and all(isinstance(number, int) and number > 0 for number in tokens)
            ):
                slices.append((size, tuple(tokens)))
            case _:
                raise ValueError(
                    "job.strategy.token_slices must be [[sequences, [tokens, ...]], ...], found "
                    f"{value!r}"
                )
    if sum(size for size, _ in slices) != micro_batch_size:
        raise ValueError(
            f"job.strategy.token_slices {value!r} must have the {micro_batch_size} sequences of a "
            "micro-batch"
        )
    return tuple(slices)

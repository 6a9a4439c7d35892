"""Options of stages, and candidates: strategies before they are cut or placed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE, Recompute
from amp_ray.strategies.zero import AUTO_STAGE, MOST_ZERO_STAGE, NO_ZERO, Zero


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StageOptions:
    """How a stage is trained, independent of its layers and devices.

    Every dimension that a stage may choose is a field here, with a default that means "off".

    Raises:
        ValueError: If a degree is below 1, shard groups do not divide dp, experts cannot be spread
            over the ranks evenly, or sequence parallelism has one rank.
    """

    tp: int  # tensor parallel degree
    dp: int  # data parallel degree
    recompute: Recompute = NO_RECOMPUTE  # what the backward pass recomputes
    # States that its data-parallel ranks shard; the same for all stages of a strategy
    zero: Zero = NO_ZERO
    ep: int = 1  # expert parallel degree: ranks of the stage that divide a layer's experts
    etp: int = 0  # ranks that divide each expert (expert tensor parallel degree); 0 means tp
    # Whether tensor-parallel ranks divide the tokens where they do not divide the width: norms,
    # dropout, residual stream (Korthikanti et al., arXiv:2205.05198)
    sequence_parallel: bool = False
    # Context parallel degree: ranks that divide the tokens of every sequence, and exchange keys and
    # values (Liu et al., Ring Attention, arXiv:2310.01889)
    cp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1:
            raise ValueError(f"tp and dp start at 1, found tp {self.tp} and dp {self.dp}")
        if self.cp < 1:
            raise ValueError(f"cp starts at 1, found {self.cp}")
        if self.zero.shard_ranks and self.dp * self.cp % self.zero.shard_ranks:
            raise ValueError(
                f"shard_ranks {self.zero.shard_ranks} do not divide dp {self.dp}; choose a divisor "
                "of it, or leave shard_ranks out to shard over all data-parallel ranks"
            )
        if self.sequence_parallel and self.tp == 1:
            message = "sequence_parallel divides tokens over tp ranks, so it needs tp 2 or more"
            raise ValueError(message)
        if self.etp < 0 or self.tp % self.expert_tp:
            raise ValueError(f"etp divides tp {self.tp}, found {self.etp}")
        if self.ep < 1 or self.num_ranks % (self.ep * self.expert_tp):
            raise ValueError(
                f"ep x etp divides the ranks of a stage, found ep {self.ep} x etp "
                f"{self.expert_tp} for {self.num_ranks} ranks (tp {self.tp}, dp {self.dp})"
            )

    def __hash__(self) -> int:
        """Hash the fields that usually differ: a search looks options up 100,000 times."""
        recompute = self.recompute
        return hash((self.tp, self.dp, recompute.kind, recompute.layers, self.zero.stage, self.ep))

    @property
    def expert_tp(self) -> int:
        """Ranks that divide each expert."""
        return self.etp or self.tp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of a layer together."""
        return self.ep * self.expert_tp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.num_ranks // self.expert_ranks

    @property
    def of_experts(self) -> "StageOptions":
        """Return tp, dp and ZeRO options as they apply to the experts' weights.

        There are as many shard groups as for other weights, each of fewer ranks (Megatron-LM,
        ``parallel_state.py``; torchtitan, ``efsdp``); if that does not divide the ranks, all ranks
        form one group.
        """
        copies = self.dp // self.zero.shard_ranks if self.zero.shard_ranks else 1
        ranks = 0 if copies == 1 or self.expert_dp % copies else self.expert_dp // copies
        zero = replace(self.zero, shard_ranks=ranks)
        return StageOptions(tp=self.expert_ranks, dp=self.expert_dp, zero=zero)

    @property
    def spreads_experts(self) -> bool:
        """Whether experts are spread over ranks in another way than the other weights."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def others(self) -> dict[str, Any]:
        """Return the dimensions that are on, by name, except tp, dp, recompute and zero."""
        values = {option.name: getattr(self, option.name) for option in OTHER_OPTIONS}
        defaults = {option.name: option.default for option in OTHER_OPTIONS}
        return {name: value for name, value in values.items() if value != defaults[name]}

    @property
    def degrees(self) -> dict[str, int]:
        """Return the degrees whose product is the ranks of a stage, by name, tp first, dp last."""
        return {"tp": self.tp, **({"cp": self.cp} if self.cp > 1 else {}), "dp": self.dp}

    @property
    def num_ranks(self) -> int:
        """Ranks that a stage occupies."""
        return self.tp * self.cp * self.dp

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks divide the weights too."""
        return self.zero.stage == MOST_ZERO_STAGE

    @property
    def token_ranks(self) -> int:
        """Ranks over which sequence parallelism divides the tokens of a sequence."""
        return self.tp * self.cp

    @property
    def open_choice(self) -> str | None:
        """Key of a dimension that a search still has to choose; None if there is none."""
        if self.recompute == AUTO:
            return "recompute"
        return "zero_stage" if self.zero.stage == AUTO_STAGE else None

    def undivided(
        self, num_tokens: int, divides_tokens: Callable[[int], bool]
    ) -> Iterator[tuple[str, str]]:
        """Yield the dimensions that do not divide the tokens of a sequence, each with the reason.

        Args:
            num_tokens: Tokens of a sequence.
            divides_tokens: Returns whether this number of ranks can divide the tokens of every
                sequence.
        """
        if self.cp > 1 and not divides_tokens(2 * self.cp):
            reason = (
                f"found {self.cp}; 2 x cp must divide the tokens of a sequence, {num_tokens}: "
                "every rank has a piece from the front and one from the end"
            )
            yield "cp", reason
        if self.sequence_parallel and not divides_tokens(self.token_ranks):
            ranks = f"tp {self.tp}" + (f" x cp {self.cp}" if self.cp > 1 else "")
            reason = f"found true; {ranks} must divide the tokens of a sequence, {num_tokens}"
            yield "sequence_parallel", reason

    @property
    def num_shards(self) -> int:
        """Data-parallel ranks that divide at least optimizer states between them; 1 for none."""
        return self.zero.shards(self.dp)


OTHER_OPTIONS: Final = fields(StageOptions)[4:]
"""Dimensions except tp, dp, recompute and zero: off by default, with a key and a column each."""

ONE_RANK: Final = StageOptions(tp=1, dp=1)
"""Every dimension is off."""


def check_stages(per_stage: Sequence[StageOptions], *, shares_evenly: bool) -> None:
    """Refuse stages of one strategy whose options cannot be combined.

    ``shares_evenly``: all stages have one tp and dp, even shares and whole micro-batches.
    """
    if len({options.zero for options in per_stage}) > 1:
        words = ", ".join(str(options.zero) for options in per_stage)
        raise ValueError(f"all stages have one zero_stage, found {words}")
    cps = [options.cp for options in per_stage]
    if max(cps) > 1 and (len(set(cps)) > 1 or not shares_evenly):
        raise ValueError(
            f"cp {cps} needs one cp, tp and dp for all stages, even shares and no token slices"
        )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One point of the uniform space: everything but the cuts and the placement.

    Candidates compare by value, so that ties in a ranking never depend on the
    order in which they were made.
    """

    micro_batch_size: int  # samples per micro-batch and replica
    options: StageOptions  # of every stage
    pp: int  # pipeline parallel degree
    num_micro_batches: int  # micro-batches per optimizer step and replica
    virtual_stages: int = 1  # chunks per stage; above 1 the schedule is interleaved

    def __post_init__(self) -> None:
        degrees = (self.micro_batch_size, self.pp, self.num_micro_batches)
        if min(degrees) < 1:
            message = "micro_batch_size, pp and num_micro_batches start at 1, found " + ", ".join(
                map(str, degrees)
            )
            raise ValueError(message)
        check_virtual_stages(self.virtual_stages, self.pp)

    @property
    def num_chunks(self) -> int:
        """Chunks of all stages."""
        return self.pp * self.virtual_stages

    @property
    def num_devices(self) -> int:
        """Devices that the candidate occupies."""
        return self.options.num_ranks * self.pp

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.options.dp * self.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupsCandidate:
    """One point of the heterogeneous space: every stage has its own device group, tp and dp."""

    micro_batch_size: int  # samples of one micro-batch over all data-parallel ranks of a stage
    num_micro_batches: int  # micro-batches per optimizer step
    options: StageOptions = ONE_RANK  # of every stage, except tp and dp, which are 1 here

    def __post_init__(self) -> None:
        if min(self.micro_batch_size, self.num_micro_batches) < 1:
            raise ValueError(
                "micro_batch_size and num_micro_batches start at 1, found "
                f"{self.micro_batch_size} and {self.num_micro_batches}"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.num_micro_batches


def check_virtual_stages(virtual_stages: int, pp: int) -> None:
    """Refuse invalid numbers of chunks per stage.

    Raises:
        ValueError: If it is below 1, or one stage has several chunks.
    """
    if virtual_stages < 1 or (virtual_stages > 1 and pp == 1):
        message = f"virtual_stages {virtual_stages} need several stages, found pp {pp}; use 1"
        raise ValueError(message)


AnyCandidate = Candidate | GroupsCandidate
C = TypeVar("C", bound=AnyCandidate)


def with_kind(candidate: C, recompute: Recompute) -> C:
    """Return the candidate with the same recompute in all stages."""
    if candidate.options.recompute == recompute:
        return candidate
    return replace(candidate, options=replace(candidate.options, recompute=recompute))


def with_zero(candidate: C, zero: Zero) -> C:
    """Return the candidate with the same ZeRO options in all stages."""
    return replace(candidate, options=replace(candidate.options, zero=zero))

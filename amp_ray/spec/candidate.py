"""What a search looks at: strategies before they are cut, placed or divided."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

Recompute = Literal["none", "full"]

RECOMPUTE: Final[tuple[Recompute, ...]] = get_args(Recompute)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One point of the uniform space: everything but the cuts and the placement.

    Candidates compare by value, so that ties in a ranking never depend on the
    order in which they were made.

    Args:
        micro_batch_size: Samples per micro-batch and replica.
        tp: Tensor parallel degree.
        dp: Data parallel degree.
        pp: Pipeline parallel degree.
        num_micro_batches: Micro-batches per optimizer step and replica.
        recompute: What every stage computes again in the backward pass.
    """

    micro_batch_size: int
    tp: int
    dp: int
    pp: int
    num_micro_batches: int
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        """Refuse degrees below one."""
        degrees = (self.micro_batch_size, self.tp, self.dp, self.pp, self.num_micro_batches)
        if min(degrees) < 1:
            message = (
                "micro_batch_size, tp, dp, pp and num_micro_batches start at 1, found "
                + ", ".join(map(str, degrees))
            )
            raise ValueError(message)

    @property
    def num_devices(self) -> int:
        """Devices that the candidate occupies."""
        return self.tp * self.dp * self.pp

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.dp * self.num_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GroupsCandidate:
    """One point of the heterogeneous space: every stage has its own device group, tp and dp.

    Args:
        micro_batch_size: Samples of one micro-batch over all data-parallel ranks of a stage.
        num_micro_batches: Micro-batches per optimizer step.
        recompute: What every stage computes again in the backward pass.
    """

    micro_batch_size: int
    num_micro_batches: int
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        if min(self.micro_batch_size, self.num_micro_batches) < 1:
            message = (
                "micro_batch_size and num_micro_batches start at 1, found "
                f"{self.micro_batch_size} and {self.num_micro_batches}"
            )
            raise ValueError(message)

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.num_micro_batches


AnyCandidate = Candidate | GroupsCandidate

"""How the operators of a stage are divided and computed, if they differ from each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OperatorRun:
    """Consecutive operators with the same degrees, algorithm and recompute.

    Raises:
        ValueError: If the run is empty, a degree is below 1, or the algorithm is unknown.
    """

    first_operator: int  # index of the first one in the model's chain of operators
    end_operator: int  # index after the last one (half-open)
    tp: int  # tensor parallel degree
    dp: int  # data parallel degree
    # How their matrices are divided over ``tp`` ranks: 0 as Megatron-LM does it, 1 rows for columns
    algorithm: int = 0
    recompute: bool = False  # whether the backward pass recomputes their forward pass

    def __post_init__(self) -> None:
        if not 0 <= self.first_operator < self.end_operator:
            message = f"a run needs operators, found [{self.first_operator}, {self.end_operator})"
            raise ValueError(message)
        if self.tp < 1 or self.dp < 1 or self.algorithm not in {0, 1}:
            raise ValueError(
                "tp and dp of operators start at 1 and algorithm is 0 or 1, found "
                f"tp {self.tp}, dp {self.dp} and algorithm {self.algorithm}"
            )

    @property
    def num_operators(self) -> int:
        """Number of operators in the run."""
        return self.end_operator - self.first_operator


OperatorUse = tuple[int, int, int, bool]
"""``tp``, ``dp``, ``algorithm`` and ``recompute`` of one operator."""


def operator_runs(first_operator: int, uses: Sequence[OperatorUse]) -> tuple[OperatorRun, ...]:
    """Return the longest runs of operators with equal uses, from ``first_operator`` on.

    Example:
        >>> [
        ...     run.num_operators
        ...     for run in operator_runs(3, [(1, 2, 0, False)] * 2 + [(2, 1, 0, True)])
        ... ]
        [2, 1]
    """
    runs = []
    start = first_operator
    for (tp, dp, algorithm, recompute), group in groupby(uses):
        end = start + sum(1 for _ in group)
        runs.append(
            OperatorRun(
                first_operator=start,
                end_operator=end,
                tp=tp,
                dp=dp,
                algorithm=algorithm,
                recompute=bool(recompute),
            )
        )
        start = end
    return tuple(runs)


def check_runs(runs: Sequence[OperatorRun], *, first: int, end: int, num_ranks: int) -> None:
    """Refuse runs that leave gaps in a stage or do not use all of its ranks.

    Raises:
        ValueError: If a run does not fit; the message names it.
    """
    edges = [first, *(run.end_operator for run in runs)]
    starts = [run.first_operator for run in runs]
    if starts != edges[:-1] or edges[-1] != end:
        ranges = ", ".join(f"[{run.first_operator}, {run.end_operator})" for run in runs[:4])
        message = f"operators of a stage must cover [{first}, {end}) without gaps, found {ranges}"
        raise ValueError(message)
    for run in runs:
        if run.tp * run.dp != num_ranks:
            raise ValueError(
                f"operators [{run.first_operator}, {run.end_operator}) have tp {run.tp} x dp "
                f"{run.dp}; the stage has {num_ranks} ranks"
            )

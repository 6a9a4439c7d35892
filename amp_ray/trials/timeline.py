"""Timeline of all ranks in one step, parsed from an untrusted file of rank 0's host."""

from typing import Annotated, Final

from pydantic import AfterValidator, ConfigDict, Field

from amp_ray.errors import InputError, printable
from amp_ray.inputs.section import Index, Section, validate
from amp_ray.inputs.yaml_text import Document
from amp_ray.trials.launch import TIMELINE_FILE
from amp_ray.trials.result import check_trial, parse_object
from amp_ray.trials.steps import LONGEST_STEP_S

_SCHEMA: Final = 1
_KEYS: Final = "trial_id (text), ranks (list of objects)"
_MOST_BYTES: Final = 16 * 2**20  # half a million instructions
_MOST_VALUES: Final = 2**21  # values per file; each takes some hundred bytes of memory
_MOST_NAME: Final = 255  # characters of a host's name
_INSTRUCTION: Final = r"^[0-9]{1,9}[A-Z][A-Z_]{0,19}[0-9]{0,9}(?:\.[0-9]{1,9})?$"


def _on_one_line(host: str) -> str:
    return printable(host).replace("\n", " ")


def _in_order(span: tuple[str, float, float]) -> tuple[str, float, float]:
    if span[1] > span[2]:
        raise ValueError("an end after the begin")
    return span


_Instruction = Annotated[str, Field(pattern=_INSTRUCTION, strict=True)]
_Seconds = Annotated[float, Field(ge=0, le=LONGEST_STEP_S, strict=True)]

Span = Annotated[tuple[_Instruction, _Seconds, _Seconds], AfterValidator(_in_order)]
"""An instruction such as ``2F0.1``, its begin and end in seconds since the first instruction."""


class RankTimeline(Section):
    """The instructions that one rank executed in a step."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    rank: Index
    # Host name as the rank reports it
    host: Annotated[str, Field(max_length=_MOST_NAME, strict=True), AfterValidator(_on_one_line)]
    stage: Index
    dp_rank: Index = 0
    cp_rank: Index = 0
    tp_rank: Index = 0
    spans: tuple[Span, ...] = Field(alias="instructions")

    @property
    def is_first(self) -> bool:
        """Whether the rank is the first of its stage."""
        return not (self.dp_rank or self.cp_rank or self.tp_rank)


class _Timeline(Section, extra="ignore"):
    ranks: tuple[RankTimeline, ...]


def read_timeline(
    data: bytes, *, num_ranks: int, trial_id: str | None = None
) -> tuple[RankTimeline, ...]:
    """Parse and validate ``timeline.json``; a ``ValueError`` names the first error in the file.

    ``num_ranks`` is the maximum number of ranks; ``trial_id`` is None if it was checked before.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"{TIMELINE_FILE} has more than {_MOST_VALUES} values")
    record = parse_object(TIMELINE_FILE, data, _KEYS, max_bytes=_MOST_BYTES)
    if trial_id is not None:
        check_trial(TIMELINE_FILE, record, trial_id)
    if record.get("schema", _SCHEMA) != _SCHEMA:
        raise ValueError(f"{TIMELINE_FILE} has another schema than {_SCHEMA}")
    try:
        ranks = validate(_Timeline, Document(file=TIMELINE_FILE, values=dict(record))).ranks
    except InputError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    indices = [
        index
        for rank in ranks
        for index in (rank.rank, rank.stage, rank.dp_rank, rank.cp_rank, rank.tp_rank)
    ]
    if max(indices, default=0) >= num_ranks:
        raise ValueError(f"{TIMELINE_FILE} has an index {max(indices)} of {num_ranks} ranks")
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise ValueError(f"{TIMELINE_FILE} has a rank twice")
    return ranks

"""The timeline of an iteration as a Chrome trace, for Perfetto (ui.perfetto.dev)."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from amp_ray.cost.instructions import SENDS, Timed, other_end
from amp_ray.cost.timeline import Timeline
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.trials.timeline import RankTimeline

_PREDICTED: Final = 1  # process number in the trace
_MEASURED: Final = 2  # process number in the trace

_US_PER_S: Final = 1e6

_CATEGORIES: Final = {
    "F": "forward",
    "B": "backward",
    "SEND_F": "communication",
    "RECV_F": "communication",
    "SEND_B": "communication",
    "RECV_B": "communication",
    "REDUCE_GRAD": "gradient sync",
    "STEP": "optimizer",
}


def trace(chosen: Chosen, timeline: Timeline, measured: Sequence[RankTimeline]) -> Export:
    """Return a trace with a slice per instruction, and an arrow per message.

    Args:
        chosen: The strategy; its title names the trace.
        timeline: The prediction, with a thread per stage.
        measured: Timelines of ranks in a trial of the strategy, with a thread per rank; may be
            empty.
    """
    events = [*_process(_PREDICTED, f"predicted: {chosen.title}"), *_predicted(timeline)]
    if measured:
        events += [*_process(_MEASURED, "measured"), *_ranks(measured)]
    record = {"traceEvents": events, "displayTimeUnit": "ms"}
    notes = () if measured else ("predicted only: no trial of it left a timeline",)
    return Export(files={"trace.json": json.dumps(record) + "\n"}, notes=notes)


def _process(pid: int, name: str) -> list[dict[str, Any]]:
    """Name a process, and set its position."""
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]


def _thread(pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _predicted(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the instructions of every stage, and the messages between them."""
    received = {
        timed.instruction: (stage, timed) for stage, order in enumerate(timeline) for timed in order
    }
    number = 0
    for stage, order in enumerate(timeline):
        yield _thread(_PREDICTED, stage, f"stage {stage}")
        for timed in order:
            one = timed.instruction
            yield _slice(_PREDICTED, stage, str(one), one.kind, timed.begin_s, timed.end_s)
            if one.kind in SENDS:
                number += 1
                yield from _arrow(number, stage, timed, *received[other_end(one)])


def _arrow(
    number: int, stage: int, sent: Timed, peer: int, received: Timed
) -> Iterator[dict[str, Any]]:
    flow = {"cat": "message", "name": str(sent.instruction), "id": number, "pid": _PREDICTED}
    yield {**flow, "ph": "s", "tid": stage, "ts": sent.begin_s * _US_PER_S}
    yield {**flow, "ph": "f", "bp": "e", "tid": peer, "ts": received.end_s * _US_PER_S}


def _ranks(measured: Sequence[RankTimeline]) -> Iterator[dict[str, Any]]:
    for rank in measured:
        yield _thread(_MEASURED, rank.rank, f"rank {rank.rank}: stage {rank.stage} on {rank.host}")
        for text, begin_s, end_s in rank.spans:
            kind = text.lstrip("0123456789").rstrip("0123456789.")
            yield _slice(_MEASURED, rank.rank, text, kind, begin_s, end_s)


def _slice(
    pid: int, tid: int, name: str, kind: str, begin_s: float, end_s: float
) -> dict[str, Any]:
    category = _CATEGORIES.get(kind, kind)
    times = {"ts": begin_s * _US_PER_S, "dur": (end_s - begin_s) * _US_PER_S}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, **times}

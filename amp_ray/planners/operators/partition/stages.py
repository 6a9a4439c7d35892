"""Exact time and recompute choice of single stages of a chain of operators."""

from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.planners.operators.partition.kernels import excess_of, plain_s
from amp_ray.planners.operators.partition.layout import LayerKinds
from amp_ray.planners.operators.partition.problem import OperatorProblem
from amp_ray.planners.operators.partition.programme import OperatorProgramme
from amp_ray.planners.operators.recompute.kernels import cheapest_recompute, pattern_front

MOST_PATTERNS = 1024
MOST_STATES = 2048
MOST_EDGES = 3
STAGE_SHARE = 0.5  # share of a search's gap that the recompute of its stages may take

# A part of a layer: index of its first operator among those of all kinds of layers, number of
# operators, whether the stage ends with it.
Part = tuple[int, int, bool]
Front = tuple[FloatArray, IntArray, bool]


class _Shape(NamedTuple):
    """A part of a layer, and the conditions at its two edges."""

    part: Part
    counts: bool  # whether a run at the end of the part counts its last operator in its peak
    rests: bool  # whether its first operator must not be recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The operators that a stage recomputes, and their time."""

    seconds: float  # recompute time; infinite if the stage cannot fit
    lower_s: float  # lower bound on the recompute time of any choice
    masks: tuple[int, ...]  # recomputed operators of each part, one bit each


@dataclass(slots=True, kw_only=True)
class StagePrices:
    """Prices stages exactly, and caches the answers."""

    problem: OperatorProblem
    programme: OperatorProgramme
    kinds: LayerKinds
    # Patterns of recompute, by option, part and the addition to the peak of a run that ends it
    fronts: dict[tuple[int, _Shape, float], Front] = field(default_factory=dict)
    # Recompute choices, by everything that decides them
    answers: dict[tuple[object, ...], Recompute] = field(default_factory=dict)

    def stage(
        self, option: int, place: int, behind: int, start: int, end: int, known_s: float
    ) -> tuple[float, float]:
        """Return the least time of a stage and its lower bound; stop if it is above ``known_s``."""
        seconds = float(plain_s(option, place, start, end, self.programme.views))
        if seconds >= known_s:
            return np.inf, seconds
        recompute = self.recompute(option, behind, start, end)
        return seconds + recompute.seconds, seconds + recompute.lower_s

    def recompute(self, option: int, behind: int, start: int, end: int) -> Recompute:
        """Choose the operators that a stage recomputes."""
        problem = self.problem
        reserved = sum(
            float(table[option, start : end - self.programme.spared].max(initial=0.0))
            for table in (problem.forward_reserved_bytes, problem.backward_reserved_bytes)
        )
        excess = float(excess_of(option, behind, start, end, reserved, self.programme.views))
        excess += float(self.programme.again_bytes[option, start:end].max())
        parts = self.parts(start, end)
        if excess <= 0:
            return Recompute(seconds=0.0, lower_s=0.0, masks=(0,) * len(parts))
        key = (option, behind, excess, parts, bool(problem.free_end[end - 1]))
        if key not in self.answers:
            prefix_s = self.programme.time_prefix_s[option]
            self.answers[key] = self._solved(
                option,
                min(behind + 1, problem.most_in_flight),
                excess,
                parts,
                gap_s=STAGE_SHARE * problem.gap * float(prefix_s[end] - prefix_s[start]),
                free=bool(problem.free_end[end - 1]),
            )
        return self.answers[key]

    def parts(self, start: int, end: int) -> tuple[Part, ...]:
        """Divide a stage at the starts of layers."""
        begin, place = self.problem.layer_begin, self.kinds.place
        first, last = int(self.kinds.layer_of[start]), int(self.kinds.layer_of[end - 1])
        starts = [start, *begin[first + 1 : last + 1].tolist()]
        ends = [*starts[1:], end]
        return tuple(
            (int(place[low]), high - low, high == end)
            for low, high in zip(starts, ends, strict=True)
        )

    def recomputed(self, option: int, behind: int, start: int, end: int) -> tuple[int, ...]:
        """List the operators that a stage recomputes."""
        recompute = self.recompute(option, behind, start, end)
        operators: list[int] = []
        low = start
        for (_, size, _), mask in zip(self.parts(start, end), recompute.masks, strict=True):
            operators.extend(low + bit for bit in range(size) if mask >> bit & 1)
            low += size
        return tuple(operators)

    def _solved(
        self,
        option: int,
        in_flight: int,
        excess: float,
        parts: tuple[Part, ...],
        *,
        gap_s: float,
        free: bool,
    ) -> Recompute:
        """Choose patterns, with peaks that leave out a layer's last operator if that suffices.

        Otherwise every combination of edges is tried: at an edge between layers, either the peak
        counts the operator before it, or the operator behind it is not recomputed.
        """
        edges = len(parts) - 1
        neither = tuple(_Shape(part, counts=False, rests=False) for part in parts)
        relaxed = self._combined(option, in_flight, excess, neither, gap_s=gap_s, free=free)
        if not self.problem.counts_last or not np.isfinite(relaxed.seconds):
            return relaxed
        if self._fits(option, in_flight, excess, parts, relaxed.masks, free=free):
            return relaxed
        few = edges <= MOST_EDGES
        ways = product((False, True), repeat=edges) if few else ((False,) * edges, (True,) * edges)
        best = None
        for rests in ways:
            shapes = tuple(
                _Shape(part, counts=not last and not rests[index], rests=first and rests[index - 1])
                for index, part in enumerate(parts)
                for first, last in ((index > 0, index == edges),)
            )
            other = self._combined(option, in_flight, excess, shapes, gap_s=gap_s, free=free)
            if best is None or other.seconds < best.seconds:
                best = other
        assert best is not None
        lower_s = best.seconds if few else relaxed.lower_s
        return Recompute(seconds=best.seconds, lower_s=lower_s, masks=best.masks)

    def _combined(
        self,
        option: int,
        in_flight: int,
        excess: float,
        shapes: tuple[_Shape, ...],
        *,
        gap_s: float,
        free: bool,
    ) -> Recompute:
        distinct = sorted(set(shapes))
        number = {shape: index for index, shape in enumerate(distinct)}
        fronts = [self._front(option, shape, free=free) for shape in distinct]
        begin = np.cumsum([0, *(len(points) for points, _, _ in fronts)])
        which = np.array([number[shape] for shape in shapes])
        points = np.concatenate([points for points, _, _ in fronts])
        seconds, cut_s, chosen = cheapest_recompute(
            which,
            begin,
            points,
            np.unique(points[:, 2]),
            excess,
            float(in_flight),
            MOST_STATES,
            gap_s,
        )
        complete = all(complete for _, _, complete in fronts)
        masks = tuple(
            int(fronts[kind][1][pick])
            for kind, pick in zip(which.tolist(), chosen.tolist(), strict=True)
        )
        lower_s = min(seconds, cut_s) if complete else 0.0
        return Recompute(seconds=float(seconds), lower_s=float(lower_s), masks=masks)

    def _front(self, option: int, shape: _Shape, *, free: bool) -> Front:
        """List the recompute patterns of a part that are worth trying."""
        first, size, last = shape.part
        members = self.kinds.member[first : first + size]
        held = self.problem.held_bytes[option, members]
        extra = 0.0
        if last and free:
            extra = -np.inf
        elif shape.counts:
            extra = float(held[-1])
        key = (option, shape, extra)
        if key not in self.fronts:
            cost_s, skipped = self.problem.recompute_s[option, members], int(shape.rests)
            points, masks, complete = pattern_front(
                cost_s[skipped:], held[skipped:], extra, MOST_PATTERNS
            )
            self.fronts[key] = points, masks << skipped, complete
        return self.fronts[key]

    def _fits(
        self,
        option: int,
        in_flight: int,
        excess: float,
        parts: tuple[Part, ...],
        masks: tuple[int, ...],
        *,
        free: bool,
    ) -> bool:
        """Return whether patterns fit if runs that continue in the next layer count in full."""
        saved_bytes, peak = 0.0, 0.0
        for index, ((first, size, last), mask) in enumerate(zip(parts, masks, strict=True)):
            held = self.problem.held_bytes[option, self.kinds.member[first : first + size]]
            goes_on = not last and bool(masks[index + 1] & 1)
            run = 0.0
            for bit in range(size):
                both = bool(mask >> bit & mask >> (bit + 1) & 1)
                if both:
                    run, saved_bytes = run + held[bit], saved_bytes + held[bit]
                elif bit == size - 1 and mask >> bit & 1 and goes_on:
                    run += held[bit]
                if not both or bit == size - 1:
                    ends_stage = last and bit == size - 1
                    peak = peak if ends_stage and free else max(peak, run)
                    run = 0.0
        return bool(excess + peak - in_flight * saved_bytes <= 0)

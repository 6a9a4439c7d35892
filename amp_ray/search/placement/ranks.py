"""From the steps of every class to devices: which rank runs where."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from amp_ray.arrays import IntArray
from amp_ray.search.placement.node_picks import NodeState, Pick
from amp_ray.search.placement.nodes import ClassMoves, cleared
from amp_ray.search.placement.prices import Prices


@dataclass(slots=True, kw_only=True)
class Walk:
    """Nodes of the cluster while stages take their units one after another."""

    moves: tuple[ClassMoves, ...]
    prices: Prices  # of the cuts, which tell who sends to whom
    _states: list[list[NodeState]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with nodes that have given nothing."""
        self._states = [list(moves.states[0]) for moves in self.moves]

    def placement(self, steps: IntArray, cut_rows: Sequence[int]) -> tuple[int, ...]:
        """Return the device of every rank.

        Args:
            steps: Shape ``(pp, num_classes)``. Steps of every class.
            cut_rows: Length ``pp - 1``. Price of the cut before each stage but the first.
        """
        stage_nodes: list[list[int]] = []
        for stage, row in enumerate(steps.tolist()):
            pairs = self._pairs(
                [moves.steps[i].picks for moves, i in zip(self.moves, row, strict=True)]
            )
            if not stage:
                stage_nodes.append(
                    [node for node, (_, units) in sorted(pairs) for _ in range(units)]
                )
                continue
            stage_nodes.append(self._matched(stage_nodes[-1], pairs, cut_rows[stage - 1]))
        return self._devices(stage_nodes)

    def _pairs(
        self, picks_of_class: Sequence[tuple[Pick, ...]]
    ) -> list[tuple[int, tuple[int, int]]]:
        """Take units, and return those before and after of every node that has any.

        They stand in the order of the relation between both stages.
        """
        pairs: list[tuple[int, tuple[int, int]]] = []
        for c, (moves, picks) in enumerate(zip(self.moves, picks_of_class, strict=True)):
            before = self._states[c]
            after = [cleared(state, moves.num_units) for state in before]
            taken: set[int] = set()
            for pick in picks:
                index = next(
                    index
                    for index, state in enumerate(before)
                    if state == pick.before and index not in taken
                )
                taken.add(index)
                after[index] = pick.after
            own = [
                (node, (state.last, after[index].last if index in taken else 0))
                for index, (node, state) in enumerate(
                    zip(self.prices.classes[c].nodes, before, strict=True)
                )
                if state.last or index in taken
            ]
            pairs += sorted(own, key=lambda entry: (*(-units for units in entry[1]), entry[0]))
            self._states[c] = after
        return pairs

    def _matched(
        self, left: Sequence[int], pairs: list[tuple[int, tuple[int, int]]], row: int
    ) -> list[int]:
        """Return the node of each replica in the next stage."""
        groups: list[tuple[tuple[int, int], ...]] = []
        for node_class in self.prices.classes:
            members = set(node_class.nodes)
            groups.append(tuple(units for node, units in pairs if node in members))
        (prices,) = self.prices.cut_rows([tuple(groups)])
        matching = next(price.matching for price in prices if price.row == row)
        waiting: dict[int, list[int]] = {}
        for i, j, units in matching:
            waiting.setdefault(pairs[i][0], []).extend([pairs[j][0]] * units)
        return [waiting[node].pop(0) for node in left]

    def _devices(self, stage_nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Give each replica of each stage the next free devices of its node."""
        tp = self.prices.candidate.options.tp
        slots = [node.num_slots for node in self.prices.cost_model.experiment.cluster.nodes]
        free = np.concatenate(([0], np.cumsum(slots)[:-1])).tolist()
        placement: list[int] = []
        for node in (node for stage in stage_nodes for node in stage):
            placement += range(free[node], free[node] + tp)
            free[node] += tp
        return tuple(placement)

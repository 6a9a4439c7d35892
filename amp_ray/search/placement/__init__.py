"""The space of placements: assign devices to the stages of a uniform candidate.

The order of nodes over stages, the cuts and the memory limits are solved together. The modules, in
reading order: `node_moves` groups equal nodes into classes, and lists the ways in which a class can
give units to the next stage. `placement_graph` builds one graph of all orders of all classes.
`placement_prices` computes the costs of stages and cuts. `placement_problem` turns graph and prices
into a partition problem; a cap on the step end becomes a limit on where stages may start.
`best_placements` solves this problem exactly and simulates the best placements. `local_search`
supplies simple placements to start from; at the end it moves cuts, replicas and stages as long as
the simulated time falls.

**Four devices by hand.** Node 0 has two quick devices, which take 1 s per layer, node 1 two slow
ones, which take 2 s. Six equal layers become four stages of one device each. A micro-batch crosses
a cut in 0.1 s within a node and in 1 s between nodes, and there are four micro-batches.

Equal devices are interchangeable, so there are ``4! / (2! 2!) = 6`` orders: QQSS, QSQS, QSSQ, SQQS,
SQSQ and SSQQ. In each of them the best cuts give quick devices two layers and slow ones one, so
every stage takes 2 s. The first micro-batch takes ``4 * 2`` s and its three cuts, the other three
2 s each. QQSS and SSQQ cross between nodes once, ``8 + (0.1 + 1 + 0.1) + 3 * 2 = 15.2`` s; QSQS
three times, ``8 + 3 + 6 = 17`` s. The modules compute the same:

    >>> import numpy as np
    >>> from amp_ray.partition.exact import solve
    >>> from amp_ray.partition.problem import PartitionProblem
    >>> from amp_ray.partition.tables import OptionTable, StageTables
    >>> from amp_ray.search.placement.node_moves import NodeClass, Scope, class_moves
    >>> from amp_ray.search.placement.placement_graph import FlatGraph, Grower
    >>> from amp_ray.search.placement.placement_prices import CutRow
    >>> scope = Scope(max_options=1_000)
    >>> quick, slow = (
    ...     class_moves(NodeClass(nodes=(node,), num_units=2), 1, scope, 1_000) for node in (0, 1)
    ... )
    >>> def cut_rows(relations):  # row 0 within a node, row 1 between nodes
    ...     inside = [any(pair == (1, 1) for pairs in cut for pair in pairs) for cut in relations]
    ...     return [(CutRow(row=0 if stays else 1, matching=()),) for stays in inside]
    >>> grower = Grower(moves=(quick, slow), dp=1, cut_rows=cut_rows, scope=scope)
    >>> graph = FlatGraph(levels=grower.levels(4))
    >>> [len(level.states) for level in graph.levels]
    [2, 4, 6, 4]

A vertex holds the devices taken so far, the class of the next stage, and the cost of the cut before
it. So there are four vertices before the second stage: QQ and SS, with a cut inside a node, and QS
and SQ, with a cut between nodes. Each step of the graph becomes an option of the problem:

    >>> states = np.concatenate([level.states for level in graph.levels])[graph.vertex]
    >>> on_slow = np.array([quick.states[state][0].last == 0 for state in states[:, 0].tolist()])
    >>> from_state, to_state = graph.ends
    >>> problem = PartitionProblem(
    ...     tables=StageTables(
    ...         time_prefix_s=np.outer([1.0, 2.0], np.arange(7)),
    ...         cut_time_s=np.repeat([[0.1], [1.0]], 7, axis=1),
    ...     ),
    ...     options=OptionTable(
    ...         time_row=on_slow.astype(np.int64),
    ...         from_state=from_state,
    ...         to_state=to_state,
    ...         cut_row=graph.cut_rows[0],
    ...     ),
    ...     num_micro_batches=4,
    ... )
    >>> solution = solve(problem)
    >>> round(solution.value_s, 9), solution.slowest_s, solution.bounds
    (15.2, 2.0, (0, 1, 2, 4, 6))
    >>> "".join("QS"[slow] for slow in on_slow[list(solution.options)].astype(int).tolist())
    'SSQQ'
"""

from amp_ray.search.placement.best_placements import (
    PlacementSolution,
    plan_listed,
    plan_placements,
    simple_plans,
    solve_placement,
)
from amp_ray.search.placement.local_search import objective_s, reorder

__all__ = [
    "PlacementSolution",
    "objective_s",
    "plan_listed",
    "plan_placements",
    "reorder",
    "simple_plans",
    "solve_placement",
]

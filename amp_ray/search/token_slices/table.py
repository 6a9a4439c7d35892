"""The best slices for a table of latencies."""

from typing import Any

from amp_ray.partition.problem import InfeasiblePartition
from amp_ray.partition.slices import SliceSolution, solve_slices, solve_unequal
from amp_ray.search.token_slices.latency import Granules, slice_tables
from amp_ray.spec.slice_table import SliceTable


def best_slices(table: SliceTable) -> SliceSolution | InfeasiblePartition:
    """Find the slices with which all stages have run the batch forward and backward soonest."""
    tables = slice_tables(table)
    factors = table.factors or (1.0,) * table.num_stages
    if len(set(factors)) == 1:
        return solve_slices(tables, (factors[0], factors[0] * (len(factors) - 1)))
    return solve_unequal(tables, factors)


def slices_to_json(solution: SliceSolution, table: SliceTable) -> dict[str, Any]:
    """Return the result of ``slices --json``."""
    granules = Granules(tokens=table.tokens, granularity=table.granularity)
    return {
        "slices": [
            {"batch": sequences, "tokens": list(tokens)}
            for sequences, tokens in granules.in_tokens(solution.slices)
        ],
        "time_s": solution.value_s,
        "lower_bound_s": solution.lower_bound_s,
    }

"""Compare the slice solver with brute force on seeded random tables.

Run ``python tests/benchmarks/check_slices.py [CASES]``. Tables are smooth, noisy or in steps, with
equal or unequal stages, with or without slices that are out of memory; up to 3 sequences of up to 8
granules. Every cut in every order is tried. Prints misses, and what was not proven.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "lib")]

from amp_ray.partition.slices import SliceSolution, solve_slices, solve_unequal  # noqa: E402
from support.slice_oracle import KINDS, least_s, random_tables, without_memory  # noqa: E402

CASES = 720
MOST_STAGES = 6


def main() -> None:
    """Print a line per kind of table and stages, then the total."""
    num_cases = int(sys.argv[1]) if len(sys.argv) > 1 else CASES
    groups = list(product(KINDS, (False, True), (False, True)))
    total = 0
    for kind, capped, uneven in groups:
        cases = [
            _case(seed, kind, capped=capped, uneven=uneven)
            for seed in range(num_cases // len(groups))
        ]
        missed, unproven = sum(a for a, _ in cases), sum(b for _, b in cases)
        total += missed
        print(
            f"{kind:>9}, capped {capped!s:>5}, uneven {uneven!s:>5}: {len(cases)} cases, "
            f"{missed} missed, {unproven} not proven",
            flush=True,
        )
    print(f"{total} missed")


def _case(seed: int, kind: str, *, capped: bool, uneven: bool) -> tuple[bool, bool]:
    """Solve one case; tell whether it was missed, and whether it was not proven."""
    rng = np.random.default_rng([seed, KINDS.index(kind), capped, uneven])
    tables = random_tables(rng, kind, int(rng.integers(1, 4)), int(rng.integers(1, 9)))
    if capped:
        tables = without_memory(rng, tables)
    num_stages = int(rng.integers(2, MOST_STAGES + 1))
    factors = [1.0] * num_stages
    if uneven:
        factors = rng.uniform(1.0, 1.0 + rng.choice([0.1, 1.0, 3.0]), num_stages).tolist()
        solution = solve_unequal(tables, factors)
    else:
        solution = solve_slices(tables, (1.0, num_stages - 1.0))
    best_s = least_s(tables, factors)
    if not isinstance(solution, SliceSolution):
        return best_s < np.inf, False
    proven = solution.lower_bound_s == solution.value_s
    return bool(abs(solution.value_s - best_s) > 1e-12 * best_s), not proven


if __name__ == "__main__":
    main()

import numpy as np

from amp_ray.partition.problem import PartitionProblem, chain_problem
from amp_ray.partition.tables import OptionTable, StageTables
from support.brute_force import all_chains, best_chain, cheapest_chain

TABLES = StageTables(
    time_prefix_s=np.array([[0.0, 3.0, 4.0, 6.0, 11.0]]),
    earliest_start=np.array([[0, 0, 1, 2, 3]]),
)
TWO_STAGES = chain_problem(TABLES, 5, time_row=np.array([0, 0]))


def test_all_partitions_of_a_row_of_stages_are_walked_once() -> None:
    chains = {chain.stages for chain in all_chains(TWO_STAGES)}
    assert chains == {((0, 0), (cut, 1)) for cut in (1, 2, 3)}


def test_options_multiply_partitions_and_stages_may_be_skipped() -> None:
    options = OptionTable(
        time_row=np.zeros(4, int),
        from_state=np.array([0, 0, 1, 0]),
        to_state=np.array([1, 1, 2, 2]),
    )
    problem = PartitionProblem(tables=TABLES, options=options, num_micro_batches=1)
    assert len(list(all_chains(problem))) == 2 * 3 + 1


def test_what_does_not_fit_is_left_out() -> None:
    problem = chain_problem(TABLES, 1, time_row=np.array([0, 0]), memory_row=np.array([-1, 0]))
    assert [chain.stages for chain in all_chains(problem)] == [((0, 0), (3, 1))]


def test_best_chain_balances() -> None:
    best = best_chain(TWO_STAGES)
    assert best is not None
    assert best.stages == ((0, 0), (3, 1))
    assert (best.sum_s, best.slowest_s) == (11.0, 6.0)


def test_no_chain_where_nothing_fits() -> None:
    problem = chain_problem(TABLES, 1, time_row=np.array([0]), memory_row=np.array([0]))
    assert best_chain(problem) is None
    assert cheapest_chain(problem, 100.0) is None


def test_cheapest_chain_stays_below_the_cap() -> None:
    chain = cheapest_chain(TWO_STAGES, 7.0)
    assert chain is not None
    assert chain.stages == ((0, 0), (2, 1))
    assert cheapest_chain(TWO_STAGES, 5.0) is None

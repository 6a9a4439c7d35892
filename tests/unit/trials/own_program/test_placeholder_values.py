from dataclasses import replace

from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.trials.launch import FOLDER, MASTER_ADDRESS, MASTER_PORT, rank_commands
from amp_ray.trials.own_program.placeholders import PLACEHOLDERS, SEVERAL
from amp_ray.trials.own_program.program import command_values, strategy_values
from support.experiments import small_experiment

PLACES = [("b", 1), ("b", 0), ("a", 0)]


def strategy() -> Strategy:
    candidate = Candidate(
        options=StageOptions(tp=1, dp=2, recompute=FULL),
        pp=2,
        micro_batch_size=2,
        num_micro_batches=2,
    )
    return Strategy.uniform(candidate, (0, 4, 9))


def mixed(options: StageOptions) -> Strategy:
    """Make a strategy whose second stage has other options than the first."""
    first = Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=1))
    other = Stage(first_layer=4, end_layer=9, options=options)
    num_ranks = first.num_ranks + other.num_ranks
    return Strategy(
        stages=(first, other),
        micro_batch_size=2,
        num_micro_batches=4,
        placement=tuple(range(num_ranks)),
    )


def test_a_strategy_gives_its_values() -> None:
    assert strategy_values(small_experiment(), strategy()).texts == {
        "tp": "1",
        "pp": "2",
        "dp": "2",
        "micro_batch_size": "2",
        "num_micro_batches": "2",
        "global_batch_size": "8",
        "num_blocks": "6",
        "recompute": "full",
        "hidden_size": "256",
        "num_heads": "8",
        "sequence_length": "128",
        "vocab_size": "1024",
        "total_steps": "25",
        "ds_config": f"{FOLDER}/ds_config.json",
        "strategy": f"{FOLDER}/strategy.json",
        "trial_dir": FOLDER,
        "master_addr": MASTER_ADDRESS,
        "master_port": MASTER_PORT,
    }


def test_every_placeholder_has_a_value_somewhere() -> None:
    texts = strategy_values(small_experiment(), strategy()).texts
    commands = rank_commands((), PLACES)
    variables = {**commands[0].environment, "NODE_RANK": "0", "NNODES": "2"}
    own = command_values(replace(commands[0], environment=variables)).texts
    assert {*texts, *own, *SEVERAL, "python"} == set(PLACEHOLDERS)


def test_what_stages_differ_in_has_no_value() -> None:
    values = strategy_values(small_experiment(), mixed(StageOptions(tp=1, dp=1, recompute=FULL)))
    assert "recompute" not in values.texts
    assert "the stages of this strategy differ" in values.missing["recompute"]
    assert values.texts["tp"] == "1"


def test_stages_of_different_tp_have_one_dp() -> None:
    values = strategy_values(small_experiment(), mixed(StageOptions(tp=2, dp=1)))
    assert values.missing.keys() == {"tp", "megatron_flags"}
    assert values.texts["dp"] == "1"


def test_shares_of_samples_are_no_micro_batch_size() -> None:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=1, dp=1), shares=(2,)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
    )
    shared = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2))
    missing = strategy_values(small_experiment(), shared).missing
    assert missing.keys() == {"dp", "micro_batch_size", "megatron_flags"}


def test_shares_of_stages_with_one_dp_are_no_micro_batch_size_either() -> None:
    stages = tuple(
        Stage(first_layer=first, end_layer=end, options=StageOptions(tp=1, dp=2), shares=(1, 3))
        for first, end in ((0, 4), (4, 9))
    )
    shared = Strategy(
        stages=stages, micro_batch_size=4, num_micro_batches=2, placement=(0, 1, 2, 3)
    )
    missing = strategy_values(small_experiment(), shared).missing
    assert missing.keys() == {"micro_batch_size", "megatron_flags"}


def test_what_megatron_cannot_do_has_a_reason() -> None:
    candidate = Candidate(
        options=StageOptions(tp=1, dp=1), pp=4, micro_batch_size=2, num_micro_batches=4
    )
    uneven = Strategy.uniform(candidate, (0, 2, 3, 5, 9))
    given = replace(small_experiment(), traits=RUNTIMES["megatron"])
    values = strategy_values(given, uneven)
    assert "1, 1, 2, 2 blocks" in values.missing["megatron_flags"]
    assert not values.several


def test_a_missing_configuration_has_a_reason() -> None:
    values = strategy_values(small_experiment(), strategy(), no_ds_config="because")
    assert values.missing == {"ds_config": "because"}

"""``trials`` of an experiment file, and hosts in groups."""

import pytest

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment, OwnProgram, Pattern, SshSettings
from support.experiments import SMALL, experiment_from

FOUR = """\
  nodes:
    - {count: 4, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}
"""
TWO = FOUR.replace("count: 4", "count: 2")


def with_trials(text: str, cluster: str = TWO) -> Experiment:
    return experiment_from(SMALL.replace(TWO, cluster) + f"trials: {text}\n")


def names(experiment: Experiment) -> list[str]:
    return [node.name for node in experiment.cluster.nodes]


def test_without_a_word_trials_run_over_ssh_by_warm_agents() -> None:
    experiment = experiment_from(SMALL)
    trials = experiment.trials
    assert (trials.backend, trials.launcher, trials.warm) == ("ssh", "agent", True)
    assert (trials.ssh, trials.python, trials.program) == (SshSettings(), None, None)
    assert experiment.host_groups == (("node0", "node1"),)


def test_settings_of_ssh_are_taken() -> None:
    ssh = with_trials(
        "{ssh: {user: u, identities: [a, b], known_hosts: k, config: null, use_agent: true, "
        "connect_timeout_s: 3, python: /py}}"
    ).trials.ssh
    assert ssh == SshSettings(
        user="u",
        identities=("a", "b"),
        known_hosts="k",
        config=None,
        use_agent=True,
        connect_timeout_s=3.0,
        python="/py",
    )


def test_launcher_warmth_interpreter_and_variables_are_taken() -> None:
    trials = with_trials(
        "{launcher: deepspeed, warm: false, python: /py, environment: {NCCL_DEBUG: WARN}}"
    ).trials
    assert (trials.launcher, trials.warm, trials.python) == ("deepspeed", False, "/py")
    assert dict(trials.environment) == {"NCCL_DEBUG": "WARN"}


def test_a_program_is_taken() -> None:
    program = with_trials(
        "{program: {argv: [python3, train.py], per: node, metric: megatron, files: [train.py], "
        "cwd: /work, collect: ['*.csv']}}"
    ).trials.program
    assert program == OwnProgram(
        argv=("python3", "train.py"),
        per="node",
        metric="megatron",
        files=("train.py",),
        cwd="/work",
        collect=("*.csv",),
    )


def test_a_pattern_is_taken_with_its_unit() -> None:
    program = with_trials(
        "{program: {argv: [run], metric: {pattern: 'took ([0-9.]+)', unit: ms}}}"
    ).trials.program
    assert program is not None
    assert program.metric == Pattern(pattern="took ([0-9.]+)", unit="ms")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{launcher: pdsh}", r"trials\.launcher: found 'pdsh'"),
        ("{ssh: {identity: a}}", r"trials\.ssh\.identity: unknown key 'identity'"),
        ("{ssh: {identities: a}}", r"trials\.ssh\.identities: found 'a'"),
        ("{warm: 1}", r"trials\.warm: found 1"),
        ("{environment: {A: 1}}", r"trials\.environment\.A: found 1"),
        ("{program: {argv: []}}", r"trials\.program\.argv: found \[\]"),
        ("{program: {argv: [run], metric: tensorboard}}", r"trials\.program\.metric.*tensorboard"),
        (
            "{program: {argv: [run], metric: {pattern: '(['}}}",
            r"trials\.program\.metric\.pattern: found '\(\[', which is no regular expression",
        ),
        (
            "{program: {argv: [run], metric: {pattern: 'took'}}}",
            r"trials\.program\.metric\.pattern: found 'took' with 0 groups; expected one",
        ),
        (
            "{program: {argv: [run], metric: {pattern: '(a)(b)'}}}",
            r"found '\(a\)\(b\)' with 2 groups; expected one",
        ),
    ],
)
def test_what_does_not_fit_is_led_to_its_key(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_trials(text)


def test_the_first_group_is_what_is_planned_for() -> None:
    experiment = with_trials("{host_groups: 2}", FOUR)
    assert names(experiment) == ["node0", "node1"]
    assert experiment.host_groups == (("node0", "node1"), ("node2", "node3"))


def test_links_between_groups_are_forgotten() -> None:
    links = """\
  links:
    - {between: [node0, node1], gbit_per_s: 7}
    - {between: [node1, node2], gbit_per_s: 3}
"""
    experiment = with_trials("{host_groups: 2}", FOUR + links)
    assert [*experiment.cluster.pair_links] == [(0, 1)]


@pytest.mark.parametrize("number", [3, 5])
def test_groups_of_unequal_size_are_refused(number: int) -> None:
    message = rf"trials\.host_groups: found {number}; it must divide the number of nodes, 4"
    with pytest.raises(InputError, match=message):
        with_trials(f"{{host_groups: {number}}}", FOUR)


def test_groups_of_other_devices_are_refused() -> None:
    other = FOUR.replace("count: 4", "count: 2") + (
        "    - {count: 2, device: L4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
    )
    message = r"group 1 \(node2, node3\) has other devices, .* than group 0 \(node0, node1\)"
    with pytest.raises(InputError, match=message):
        with_trials("{host_groups: 2}", other)

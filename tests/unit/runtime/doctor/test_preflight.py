from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.runtime.doctor.preflight import check_hosts
from amp_ray.runtime.hosts.make_hosts import MakeHost
from amp_ray.spec.experiment import Experiment
from amp_ray.trials.doctor.findings import Finding
from support.experiments import small_experiment

DEAD = Finding(
    level="error",
    host="b",
    check="ssh",
    found="Connection refused",
    expected="a login",
    command="ssh ada@b",
    advice="is it up?",
)
FULL = Finding(level="error", host="c", check="disk", found="1 GB free", expected="5 GB free")

Doctor = Callable[..., None]


def local() -> Experiment:
    found = small_experiment()
    return replace(found, trials=replace(found.trials, backend="local"))


@pytest.fixture
def finds(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Have the doctor find something."""

    def set_findings(*findings: Finding) -> None:
        def report(_experiment: Experiment, _make_host: MakeHost) -> Sequence[Finding]:
            return list(findings)

        monkeypatch.setattr("amp_ray.runtime.doctor.preflight.preflight", report)

    return set_findings


def test_hosts_that_are_fit_are_not_worth_a_word(finds: Doctor) -> None:
    finds()
    check_hosts(local())


def test_everything_that_is_wrong_is_told_at_once_with_what_mends_it(finds: Doctor) -> None:
    finds(DEAD, FULL)
    with pytest.raises(HostError) as error:
        check_hosts(local())
    assert str(error.value).splitlines() == [
        "hosts are not fit for trials (amp-ray doctor tells more):",
        "  b: ssh: Connection refused; expected a login; is it up?; run: ssh ada@b",
        "  c: disk: 1 GB free; expected 5 GB free",
    ]


def test_trials_over_ssh_need_to_know_the_hosts() -> None:
    with pytest.raises(InputError, match=r"cluster\.hostfile: .*--trials local"):
        check_hosts(small_experiment())

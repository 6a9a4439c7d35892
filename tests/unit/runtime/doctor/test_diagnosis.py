import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime import doctor
from amp_ray.runtime.doctor import (
    LOCAL_NAME,
    Diagnosis,
    diagnose,
    gpus_of_hosts,
    list_host_specs,
    require_ready_hosts,
)
from amp_ray.runtime.hosts.host import Host, LocalHost, MakeHost
from amp_ray.trials.doctor.findings import Finding
from support.experiments import experiment_from, small_experiment
from support.host_reports import healthy_report

TEXT = """\
name: small
model: {family: gpt2, num_layers: 6, hidden_size: 256, num_heads: 8, sequence_length: 128,
        vocab_size: 1024}
cluster:
  hostfile: hostfile
  nodes:
    - {count: 4, device: cpu, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10,
       memory_gib: 0.01}
precision: fp32
global_batch_size: 8
trials: {host_groups: 2, ssh: {user: ada}}
"""
HOSTFILE = "".join(f"{name} slots=2\n" for name in "abcd")


def experiment(backend: str = "ssh") -> Experiment:
    found = experiment_from(TEXT, {"hostfile": HOSTFILE})
    assert backend in {"ssh", "local"}
    return replace(found, trials=replace(found.trials, backend=backend))  # type: ignore[arg-type]


def refuse(name: str) -> Host:
    """Make a host that does not exist."""
    message = f"ada@{name}: Connection refused"
    raise HostError(message)


def test_every_host_of_every_group_is_a_site() -> None:
    specs = list_host_specs(experiment())
    assert [(spec.name, spec.group, spec.num_slots) for spec in specs] == [
        ("a", 0, 2),
        ("b", 0, 2),
        ("c", 1, 2),
        ("d", 1, 2),
    ]
    assert specs[3].login == ("ssh", "ada@d")


def test_local_trials_are_one_site_with_all_slots() -> None:
    (spec,) = list_host_specs(experiment("local"))
    assert (spec.name, spec.num_slots, spec.login) == (LOCAL_NAME, 8, ())


def test_without_a_hostfile_nobody_knows_which_hosts() -> None:
    text = TEXT.replace("  hostfile: hostfile\n", "")
    with pytest.raises(InputError, match=r"test.yaml:4: cluster.hostfile: .*--trials local"):
        list_host_specs(experiment_from(text))


def test_this_machine_is_looked_at_once() -> None:
    found = diagnose(experiment("local"), LocalHost)
    assert found.hosts == (LOCAL_NAME,)
    checks = [finding.check for finding in found.findings]
    assert len(checks) == len(set(checks))
    assert {"login", "agent Python", "disk", "address", "port"} <= set(checks)
    assert found.elapsed_s > 0


@pytest.mark.parametrize(
    "part",
    [
        *("none", ["x"], {}, {"gpus": 7}, {"gpus": ["x"]}, {"gpus": [{"index": "x"}]}),
        {"gpus": [{"index": 0, "name": "T4", "memory_bytes": [1]}]},
        {"gpus": [{"index": 0, "name": "T4"}], "visible": 7},
    ],
)
def test_gpus_that_no_host_has_are_refused_with_its_name(
    part: Any,  # noqa: ANN401 - any JSON value
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {"kind": "facts", "version": "3.11", "executable": "python", "gpus": part}
    report = replace(healthy_report("a"), answer=answer)
    monkeypatch.setattr(doctor, "_probe_all", lambda *_arguments: [report])
    if part == {}:
        assert gpus_of_hosts(experiment(), refuse) == {"a": []}
        return
    with pytest.raises(HostError, match=r"^a: what it says of its GPUs cannot be used"):
        gpus_of_hosts(experiment(), refuse)


def test_hosts_that_are_lost_are_told_one_by_one() -> None:
    found = diagnose(experiment(), refuse)
    assert [(finding.host, finding.check) for finding in found.findings] == [
        (name, "reach") for name in "abcd"
    ]
    assert found.errors == list(found.findings)


def test_a_study_gets_errors_only() -> None:
    errors = diagnose(experiment(), refuse).errors
    assert [finding.level for finding in errors] == ["error"] * 4


def test_json_counts_levels_by_host_and_keeps_every_finding() -> None:
    findings = (
        Finding(level="ok", host="a", check="cores", found="8 cores"),
        Finding(level="warning", host="a", check="clock", found="9 s", expected="within 1 s"),
        Finding(level="error", host="b", check="reach", found="no answer", command="ssh b"),
    )
    found = Diagnosis(experiment="x", hosts=("a", "b"), findings=findings, elapsed_s=1.5)
    record = json.loads(json.dumps(found.to_json()))
    assert (record["schema"], record["experiment"], record["ok"]) == (1, "x", False)
    assert record["hosts"] == [
        {"name": "a", "ok": 1, "warning": 1, "error": 0},
        {"name": "b", "ok": 0, "warning": 0, "error": 1},
    ]
    assert [Finding(**entry) for entry in record["findings"]] == [*findings]
    assert replace(found, findings=findings[:2]).to_json()["ok"]


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
        def report(_experiment: Experiment, _make_host: MakeHost) -> Diagnosis:
            return Diagnosis(experiment="x", hosts=(), findings=findings, elapsed_s=0.0)

        monkeypatch.setattr("amp_ray.runtime.doctor.diagnose", report)

    return set_findings


def test_hosts_that_are_fit_are_not_worth_a_word(finds: Doctor) -> None:
    finds()
    require_ready_hosts(local())


def test_everything_that_is_wrong_is_told_at_once_with_what_mends_it(finds: Doctor) -> None:
    finds(DEAD, FULL)
    with pytest.raises(HostError) as error:
        require_ready_hosts(local())
    assert str(error.value).splitlines() == [
        "hosts are not fit for trials (amp-ray doctor tells more):",
        "  b: ssh: Connection refused; expected a login; is it up?; run: ssh ada@b",
        "  c: disk: 1 GB free; expected 5 GB free",
    ]


def test_trials_over_ssh_need_to_know_the_hosts() -> None:
    with pytest.raises(InputError, match=r"cluster\.hostfile: .*--trials local"):
        require_ready_hosts(small_experiment())

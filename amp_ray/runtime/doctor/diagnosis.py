"""Looks at every host of an experiment, all at the same time, before anything is launched."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.runtime.doctor.host_probe import REACH_S, HostProbe, Question, at_once
from amp_ray.runtime.hosts.login import ssh_words
from amp_ray.runtime.hosts.make_hosts import (
    MakeHost,
    experiment_folder,
    host_groups,
    host_maker,
    located,
)
from amp_ray.trials.doctor.checks import check_hosts
from amp_ray.trials.doctor.devices import Gpu, visible_gpus
from amp_ray.trials.doctor.findings import LEVELS, Finding, only
from amp_ray.trials.doctor.host_facts import HostReport, HostSpec
from amp_ray.trials.doctor.software import Wanted
from amp_ray.trials.runtime_strategy import PLAIN_TORCH

SCHEMA: Final = 1
LOCAL_NAME: Final = "localhost"
_END_S: Final = 10.0  # for leaving: whoever is late is left to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What came of looking at all hosts."""

    experiment: str
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def errors(self) -> list[Finding]:
        """Return what keeps trials from running."""
        return only(self.findings, "error")

    def to_json(self) -> dict[str, Any]:
        """Return the result of ``amp-ray doctor --json``."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "ok": not self.errors,
            "elapsed_s": self.elapsed_s,
            "hosts": [
                {
                    "name": host,
                    **{
                        level: sum(finding.host == host for finding in only(self.findings, level))
                        for level in LEVELS
                    },
                }
                for host in self.hosts
            ],
            "findings": [finding.to_json() for finding in self.findings],
        }


def diagnose(experiment: Experiment, make_host: MakeHost, *, deep: bool = False) -> Diagnosis:
    """Look at every host and judge what is there; with ``deep``, packages are really imported."""
    start = time.monotonic()
    specs = list_host_specs(experiment)
    reports = _probe_all(experiment, specs, make_host, deep=deep)
    findings = check_hosts(reports, _wanted(experiment))
    return Diagnosis(
        experiment=experiment.name,
        hosts=tuple(spec.name for spec in specs),
        findings=findings,
        elapsed_s=time.monotonic() - start,
    )


def gpus_of_hosts(experiment: Experiment, make_host: MakeHost) -> dict[str, list[Gpu]]:
    """Return the GPUs that slots would count, by host; none on a host without any."""
    found = {}
    for report in _probe_all(experiment, list_host_specs(experiment), make_host, deep=False):
        if report.facts is None:
            raise HostError(str(report.failure or f"{report.spec.name}: it did not answer"))
        try:
            found[report.spec.name] = [_known(gpu) for gpu in visible_gpus(report.part("gpus"))]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{report.spec.name}: what it says of its GPUs cannot be used: {error!r}"
            raise HostError(message) from None
    return found


def _known(gpu: Gpu) -> Gpu:
    """Return a GPU with a name and a size, whatever its host says of them."""
    name, size = str(gpu["name"]), gpu["memory_bytes"]
    return {**gpu, "name": name, "memory_bytes": None if size is None else float(size)}


def list_host_specs(experiment: Experiment) -> tuple[HostSpec, ...]:
    """Return what the experiment expects of each host of each group."""
    nodes, trials = experiment.cluster.nodes, experiment.trials
    groups = host_groups(experiment)
    if trials.backend == "local":
        num_slots = sum(node.num_slots for node in nodes) * len(groups)
        return (HostSpec(name=LOCAL_NAME, device=nodes[0].device, num_slots=num_slots),)
    if not experiment.names_hosts:
        message = (
            "not there, so that nobody knows which hosts to look at; name a file with lines such "
            "as 'host1 slots=4', or use --trials local for this machine"
        )
        raise InputError(message, where=experiment.where("cluster", "hostfile"))
    settings = _settings(experiment)
    return tuple(
        HostSpec(
            name=name,
            device=node.device,
            num_slots=node.num_slots,
            group=group,
            login=ssh_words(name, settings),
        )
        for group, names in enumerate(groups)
        for name, node in zip(names, nodes, strict=True)
    )


def _probe_all(
    experiment: Experiment, specs: Sequence[HostSpec], make_host: MakeHost, *, deep: bool
) -> list[HostReport]:
    """Probe every host on its own, then the connections between them."""
    question = Question(
        trials=experiment.trials, settings=_settings(experiment), deep=deep, num_peers=len(specs)
    )
    host_probes = [HostProbe(spec, make_host, question) for spec in specs]
    try:
        at_once([host_probe.ask for host_probe in host_probes], question.limit_s)
        # A host that answers from now on is too late for its peers as well.
        known = [host_probe for host_probe in host_probes if host_probe.listens_at is not None]
        at_once([partial(host_probe.reach, known) for host_probe in known], 2 * REACH_S)
        return [host_probe.report() for host_probe in host_probes]
    finally:
        at_once([host_probe.close for host_probe in host_probes], _END_S)


def _wanted(experiment: Experiment) -> Wanted:
    trials = experiment.trials
    program = trials.program
    agent = sys.executable if trials.backend == "local" else trials.ssh.python
    return Wanted(
        python=trials.python or agent,
        python_key="trials.python" if trials.python is not None else "trials.ssh.python",
        program=None if program is None else program.argv[0],
        cwd=None if program is None else program.cwd,
        deepspeed=program is not None or experiment.traits.name != PLAIN_TORCH,
    )


def _settings(experiment: Experiment) -> SshSettings:
    """Return how hosts are reached, relative paths led to the experiment file."""
    return located(experiment.trials.ssh, experiment_folder(experiment))


def require_ready_hosts(experiment: Experiment) -> None:
    """Refuse to begin on hosts where trials cannot run."""
    findings = diagnose(experiment, host_maker(experiment)).errors
    if findings:
        told = "\n".join(f"  {finding}" for finding in findings)
        raise HostError(f"hosts are not fit for trials (amp-ray doctor tells more):\n{told}")

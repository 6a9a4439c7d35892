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
from amp_ray.trials.doctor.findings import LEVELS, Finding, HostReport, HostSpec, only
from amp_ray.trials.doctor.software import Needs
from amp_ray.trials.runtime_strategy import PLAIN_TORCH

SCHEMA: Final = 1
LOCAL_NAME: Final = "localhost"
_END_S: Final = 10.0  # for leaving; a host that is later ends its probe by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings about all hosts."""

    experiment: str
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that keep trials from running."""
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


def diagnose(experiment: Experiment, make_host: MakeHost) -> Diagnosis:
    """Look at every host and judge what is there."""
    start = time.monotonic()
    specs = list_host_specs(experiment)
    findings = check_hosts(_probe_all(experiment, specs, make_host), _needs(experiment))
    return Diagnosis(
        experiment=experiment.name,
        hosts=tuple(spec.name for spec in specs),
        findings=findings,
        elapsed_s=time.monotonic() - start,
    )


def gpus_of_hosts(experiment: Experiment, make_host: MakeHost) -> dict[str, list[Gpu]]:
    """Return the GPUs that slots would count, by host; none on a host without any."""
    gpus = {}
    for report in _probe_all(experiment, list_host_specs(experiment), make_host):
        name = report.spec.name
        if report.answer is None:
            raise HostError(str(report.failure or f"{name}: it did not answer"))
        try:
            gpus[name] = [_plain_gpu(gpu) for gpu in visible_gpus(report.part("gpus"))]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"{name}: what it says of its GPUs cannot be used: {error!r}"
            raise HostError(message) from None
    return gpus


def _plain_gpu(gpu: Gpu) -> Gpu:
    """Return a GPU whose name is a text and whose size a number, whatever its host says."""
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
    experiment: Experiment, specs: Sequence[HostSpec], make_host: MakeHost
) -> list[HostReport]:
    """Probe every host on its own, then the connections between them."""
    question = Question(
        trials=experiment.trials, settings=_settings(experiment), num_peers=len(specs)
    )
    host_probes = [HostProbe(spec, make_host, question) for spec in specs]
    try:
        at_once([host_probe.ask for host_probe in host_probes], question.limit_s)
        # A host that answers from now on is too late for its peers as well.
        peers = [host_probe for host_probe in host_probes if host_probe.listens_at is not None]
        at_once([partial(host_probe.reach, peers) for host_probe in peers], 2 * REACH_S)
        return [host_probe.report() for host_probe in host_probes]
    finally:
        at_once([host_probe.close for host_probe in host_probes], _END_S)


def _needs(experiment: Experiment) -> Needs:
    trials = experiment.trials
    agent = sys.executable if trials.backend == "local" else trials.ssh.python
    return Needs(
        python=trials.python or agent,
        python_key="trials.python" if trials.python is not None else "trials.ssh.python",
        own_program=trials.program is not None,
        deepspeed=trials.program is not None or experiment.traits.name != PLAIN_TORCH,
    )


def _settings(experiment: Experiment) -> SshSettings:
    """Return how hosts are reached; relative paths start at the experiment file."""
    return located(experiment.trials.ssh, experiment_folder(experiment))


def require_ready_hosts(experiment: Experiment) -> None:
    """Refuse to begin on hosts where trials cannot run."""
    errors = diagnose(experiment, host_maker(experiment)).errors
    if errors:
        lines = "\n".join(f"  {finding}" for finding in errors)
        raise HostError(f"hosts are not fit for trials (amp-ray doctor tells more):\n{lines}")

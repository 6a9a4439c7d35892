"""``amp-ray doctor``: checks all hosts of an experiment in parallel, before any launch."""

import contextlib
import ipaddress
import json
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import HostError, InputError
from amp_ray.inputs.experiment import Experiment, SshSettings, TrialSettings
from amp_ray.runtime.hosts import agent
from amp_ray.runtime.hosts.agent.wire import BOOTSTRAP, PROBE_MODULES
from amp_ray.runtime.hosts.host import (
    Host,
    MakeHost,
    experiment_folder,
    host_groups,
    host_maker,
    located,
)
from amp_ray.runtime.hosts.link import AgentLink, AgentSettings, Message
from amp_ray.runtime.hosts.login import login_failure, ssh_words
from amp_ray.runtime.threads import at_once, in_thread
from amp_ray.trials.doctor.checks import Gpu, check_hosts, visible_gpus
from amp_ray.trials.doctor.findings import LEVELS, Facts, Finding, HostReport, HostSpec, only
from amp_ray.trials.doctor.software import Needs, list_pythons
from amp_ray.trials.runtime_strategy import PLAIN_TORCH

SCHEMA: Final = 1
LOCAL_NAME: Final = "localhost"
_END_S: Final = 10.0  # limit for closing all probes; a slower host ends its probe by itself

AGENT_PYTHON: Final = (3, 8)  # oldest Python for agent and probe

_END_TIMEOUT_S: Final = 2.0
_REMARK_S: Final = 5.0  # interval of the lines about hosts that have not answered yet
_MOST_NAMED: Final = 5
_LOGGER: Final = logging.getLogger(__name__)

REACH_S: Final = 5.0  # time limit for a connection between two hosts
_FACTS_S: Final = 30.0  # an idle GPU driver takes seconds per GPU to start; all else, one second
_MAX_PORT: Final = 65535
_MARGIN_S: Final = 5.0  # time for the transfer of an answer
_CONNECT_STEPS: Final = 3  # TCP, the server's greeting, the login; each may take connect_timeout_s
# Exceptions of a probe that gives no answer or an invalid one
_WRONG: Final = (HostError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
_PLACEHOLDER_MARKS: Final = ("{", "@AMP_RAY_")  # a variable with one of these has a placeholder

# Uses only syntax that any Python can parse: an old one cannot parse the program that follows
_GUARD: Final = """
import json, sys
if sys.version_info < %r:
    version = "%%d.%%d.%%d" %% tuple(sys.version_info[:3])
    print(json.dumps({"kind": "old", "executable": sys.executable, "version": version}))
    sys.exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The hosts of an experiment and the findings about all of them."""

    experiment: str
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    elapsed_s: float

    @property
    def errors(self) -> list[Finding]:
        """Return the findings that prevent trials."""
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
    """Probe every host and return the findings."""
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
    """Return the GPUs that slots refer to, by host; an empty list for a host without any."""
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
    """Return a GPU with its name as text and its memory as a number: hosts are not trusted."""
    name, size = str(gpu["name"]), gpu["memory_bytes"]
    return {**gpu, "name": name, "memory_bytes": None if size is None else float(size)}


def list_host_specs(experiment: Experiment) -> tuple[HostSpec, ...]:
    """Return the experiment's expectations of each host of each group."""
    trials = experiment.trials
    boards = [
        tuple(node.device for node in nodes for _ in range(node.num_slots))
        for nodes in experiment.cluster.machines
    ]
    groups = host_groups(experiment)
    if trials.backend == "local":
        return (HostSpec(name=LOCAL_NAME, devices=sum(boards, ()) * len(groups)),)
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
            devices=devices,
            group=group,
            login=ssh_words(name, settings),
        )
        for group, names in enumerate(groups)
        for name, devices in zip(names, boards, strict=True)
    )


def _probe_all(
    experiment: Experiment, specs: Sequence[HostSpec], make_host: MakeHost
) -> list[HostReport]:
    """Probe all hosts in parallel, then the connections between them."""
    question = Question(
        trials=experiment.trials, settings=_settings(experiment), num_peers=len(specs)
    )
    host_probes = [HostProbe(spec, make_host, question) for spec in specs]
    try:
        _ask_all(host_probes, question.limit_s)
        # Choose the peers once: hosts that answer later are not connected to
        peers = [host_probe for host_probe in host_probes if host_probe.listens_at is not None]
        at_once([partial(host_probe.reach, peers) for host_probe in peers], 2 * REACH_S)
        return [host_probe.report() for host_probe in host_probes]
    finally:
        at_once([host_probe.close for host_probe in host_probes], _END_S)


def _ask_all(host_probes: Sequence["HostProbe"], limit_s: float) -> None:
    """Ask all hosts in parallel, and say on stderr which ones have not answered for a while."""
    calls = {in_thread(host_probe.ask): host_probe.spec.name for host_probe in host_probes}
    start, waiting = time.monotonic(), set(calls)
    while waiting and (passed_s := time.monotonic() - start) < limit_s:
        done, waiting = futures.wait(waiting, min(_REMARK_S, limit_s - passed_s))
        for call in done:
            call.result()
        if waiting:
            names = sorted(calls[call] for call in waiting)
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            _LOGGER.warning(
                "waiting for %s%s, for %.0f s at most",
                ", ".join(names[:_MOST_NAMED]),
                more,
                max(0.0, limit_s - (time.monotonic() - start)),
            )


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
    """Return the SSH settings, with paths relative to the experiment file resolved."""
    return located(experiment.trials.ssh, experiment_folder(experiment))


def require_ready_hosts(experiment: Experiment) -> None:
    """Raise `HostError` if the doctor finds an error on any host."""
    errors = diagnose(experiment, host_maker(experiment)).errors
    if errors:
        lines = "\n".join(f"  {finding}" for finding in errors)
        raise HostError(f"hosts are not fit for trials (amp-ray doctor tells more):\n{lines}")


def guarded(source: str) -> str:
    """Return a program that only prints a JSON object of kind ``old`` if Python is too old."""
    # As a string, since Python parses a whole program before it runs any line
    return _GUARD % (AGENT_PYTHON,) + f"exec(compile({source!r}, 'amp_ray_probe', 'exec'))\n"


def software_script() -> str:
    """Return the program that lists the packages of the trial's Python."""
    source = (Path(agent.__file__).parent / "software.py").read_text(encoding="utf-8")
    return guarded(source)


def probe_link(host: Host, *, limit_s: float) -> AgentLink:
    """Start the probe on a host; it ends with the link, or after the limit."""
    return AgentLink(
        host,
        AgentSettings(),
        queue.SimpleQueue(),
        bootstrap=guarded(BOOTSTRAP),
        modules=PROBE_MODULES,
        limit_s=math.ceil(limit_s),
    )


def _old_python(lines: Sequence[str]) -> Message | None:
    """Return what the guard of an old Python has printed; None if there is nothing of it."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            match json.loads(line):
                case {"kind": "old", "version": str(), "executable": str() | None} as message:
                    return dict(message)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Settings and time limits of the question to every host."""

    trials: TrialSettings
    settings: SshSettings
    num_peers: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every rank, without those with placeholders."""
        return {
            name: text
            for name, text in self.trials.environment.items()
            if not any(mark in text for mark in _PLACEHOLDER_MARKS)
        }

    @property
    def answer_s(self) -> float:
        """Time limit for the start of Python on the host and for the facts."""
        return AgentSettings().start_timeout_s + _FACTS_S + _MARGIN_S

    @property
    def limit_s(self) -> float:
        """Time limit for login and facts together."""
        return _CONNECT_STEPS * self.settings.connect_timeout_s + self.answer_s + _MARGIN_S


class HostProbe:
    """Probes one host; any error becomes the failure in its ``report``."""

    def __init__(
        self, spec: HostSpec, make_host: Callable[[str], Host], question: Question
    ) -> None:
        self.spec = spec
        self._question = question
        self._host: Host | None = None
        self._link: AgentLink | None = None
        self._failure: Finding | None = None
        self._answer: Facts | None = None
        self._unreached: tuple[tuple[HostSpec, str], ...] = ()
        self._num_peers = 0
        self._closed = threading.Event()
        try:
            self._host = make_host(spec.name)
        except HostError as error:
            self._failure = login_failure(spec.name, error, question.settings)

    def ask(self) -> None:
        """Log in, start the probe and get the facts."""
        if self._host is None:
            return
        try:
            self._host.connect()
        except HostError as error:
            self._failure = login_failure(self.spec.name, error, self._question.settings)
            return
        if self._closed.is_set():  # too late: the report is done
            self._host.close()
            return
        try:
            self._link = probe_link(self._host, limit_s=self._question.limit_s)
            self._answer = self._ask_facts(self._link, self._host)
        except _WRONG as error:
            self._failure = Finding(
                level="error",
                host=self.spec.name,
                check="agent Python",
                found=str(error),
                expected=f"{self._host.python} to run a short program",
                command=list_pythons(self.spec),
                advice="name another interpreter as trials.ssh.python; this lists what is there",
            )

    @property
    def listens_at(self) -> tuple[str, int] | None:
        """Address and port where the probe listens for peers; None if it does not."""
        try:
            part = (self._answer or {})["address"]
            address, port = str(ipaddress.ip_address(part["address"])), part["port"]
        except (LookupError, TypeError, ValueError):
            return None
        is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port <= _MAX_PORT
        return (address, port) if is_port else None

    def reach(self, host_probes: Sequence["HostProbe"]) -> None:
        """Let the host connect to every other listening host of its group."""
        peers = {
            host_probe.spec.name: host_probe
            for host_probe in host_probes
            if host_probe is not self
            and host_probe.spec.group == self.spec.group
            and host_probe.listens_at
        }
        if self._link is None or self.listens_at is None or not peers:
            return
        named = [
            {"name": name, "address": address[0], "port": address[1]}
            for name, host_probe in peers.items()
            if (address := host_probe.listens_at) is not None
        ]
        try:
            question = {"kind": "reach", "peers": named, "limit_s": REACH_S}
            answer = self._link.ask(question, "reach", REACH_S + _MARGIN_S)
            self._unreached = tuple(
                (peers[peer["name"]].spec, str(peer["problem"]))
                for peer in answer["peers"]
                if peer["problem"] is not None
            )
        except _WRONG as error:
            self._unreached = tuple((host_probe.spec, str(error)) for host_probe in peers.values())
        self._num_peers = len(peers)

    def report(self) -> HostReport:
        """Return the report so far; a host without an answer counts as unreachable."""
        failure = self._failure
        if self._answer is None and failure is None:
            text = f"{self.spec.name}: no answer within {self._question.limit_s:g} s"
            failure = login_failure(self.spec.name, HostError(text), self._question.settings)
        return HostReport(
            spec=self.spec,
            failure=failure,
            answer=self._answer if failure is None else None,
            unreached=self._unreached,
            num_peers=self._num_peers,
        )

    def close(self) -> None:
        """End the probe and its processes, within `_END_TIMEOUT_S`, and disconnect."""
        self._closed.set()
        if self._link is not None:
            self._link.close()
            self._link.wait(_END_TIMEOUT_S)
        if self._host is not None:
            self._host.close()

    def _ask_facts(self, link: AgentLink, host: Host) -> Message:
        """Ask for the facts; the answer's kind is ``old`` if Python is too old."""
        question = {
            "kind": "facts",
            "limit_s": _FACTS_S,
            "addresses": list(host.addresses),
            "base": None,
            "python": self._question.trials.python or host.python,
            "environment": self._question.environment,
            "script": software_script(),
            "num_peers": self._question.num_peers,
        }
        try:
            return link.ask(question, "facts", self._question.answer_s)
        except HostError:
            old = _old_python(link.noise)
            if old is None:
                raise
            return old

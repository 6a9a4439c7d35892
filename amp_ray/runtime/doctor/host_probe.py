"""Probe one host: log in, ask for its facts, try to reach its peers, log out."""

import ipaddress
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.errors import HostError
from amp_ray.runtime.doctor.host_facts import Message, Probe, software_script
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.hosts.login import login_failure
from amp_ray.runtime.hosts.ssh_target import parse_target
from amp_ray.spec.access import SshSettings
from amp_ray.spec.experiment import TrialSettings
from amp_ray.trials.doctor.findings import Finding
from amp_ray.trials.doctor.host_facts import Clock, HostFacts, HostReport, HostSpec, read_facts
from amp_ray.trials.doctor.software import list_pythons

REACH_S: Final = 5.0
"""For a connection between two hosts of one network."""

_FACTS_S: Final = 30.0
"""A GPU driver that wakes up takes seconds per GPU; everything else is there in one."""

_DEEP_FACTS_S: Final = 180.0
"""The first import of torch and DeepSpeed from a network file system takes minutes."""

_MAX_PORT: Final = 65535

_MARGIN_S: Final = 5.0
"""For an answer to travel, on top of what finding it may take."""

_CONNECT_STEPS: Final = 3
"""Each has the connection's own limit: TCP, the server's greeting, the login."""

_WRONG: Final = (HostError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""No answer, or one that no probe gives."""

_KNOWN_LATER: Final = ("{", "@AMP_RAY_")
"""In a variable that only a trial can fill in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What every host is asked."""

    settings: SshSettings
    python: str | None  # interpreter that trains; None for the one that runs the agent
    environment: Mapping[str, str]  # of every rank, as far as it is known before a trial
    program: str | None  # first word of the user's own program; None without one
    cwd: str | None  # where that starts; None for the trial's folder
    deep: bool
    num_peers: int

    @property
    def facts_s(self) -> float:
        """How long a host may look for an answer."""
        return _DEEP_FACTS_S if self.deep else _FACTS_S

    @property
    def start_s(self) -> float:
        """How long a shell and Python may take to start, as agents may."""
        return AgentSettings().start_timeout_s

    @property
    def limit_s(self) -> float:
        """How long logging in and asking may take in all."""
        connect_s = _CONNECT_STEPS * self.settings.connect_timeout_s
        return connect_s + self.start_s + self.facts_s + 2 * _MARGIN_S


def make_question(
    trials: TrialSettings, settings: SshSettings, *, deep: bool, num_peers: int
) -> Question:
    """Return what the settings of trials make us ask."""
    program = trials.program
    return Question(
        settings=settings,
        python=trials.python,
        environment={
            name: text
            for name, text in trials.environment.items()
            if not any(mark in text for mark in _KNOWN_LATER)
        },
        program=None if program is None else program.argv[0],
        cwd=None if program is None else program.cwd,
        deep=deep,
        num_peers=num_peers,
    )


class HostProbe:
    """What happens on one host; whatever goes wrong there becomes its ``report``'s failure."""

    def __init__(
        self, spec: HostSpec, make_host: Callable[[str], Host], question: Question
    ) -> None:
        self.spec = spec
        self._question = question
        self._host: Host | None = None
        self._probe: Probe | None = None
        self._failure: Finding | None = None
        self._facts: HostFacts | None = None
        self._clock: Clock | None = None
        self._unreached: tuple[tuple[HostSpec, str], ...] = ()
        self._num_peers = 0
        self._closed = threading.Event()
        try:
            self._host = make_host(spec.name)
        except HostError as error:
            self._failure = login_failure(spec.name, error, question.settings)

    def ask(self) -> None:
        """Log in and ask."""
        if self._host is None:
            return
        try:
            self._host.connect()
        except HostError as error:
            self._failure = login_failure(self.spec.name, error, self._question.settings)
            return
        if self._closed.is_set():  # nobody waits any more
            self._host.close()
            return
        try:
            self._probe = Probe(self._host, limit_s=self._question.limit_s)
            self._clock = self._probe.clock(self._question.start_s)
            self._facts = read_facts(self._ask_facts(self._host, self._probe))
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
        """Where peers can connect to, if anywhere."""
        part = {} if self._facts is None else self._facts.part("address")
        try:
            address, port = str(ipaddress.ip_address(part["address"])), part["port"]
        except (LookupError, TypeError, ValueError):
            return None
        is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port <= _MAX_PORT
        return (address, port) if is_port else None

    def reach(self, host_probes: Sequence["HostProbe"]) -> None:
        """Connect to every other host of the group that listens."""
        peers = {
            host_probe.spec.name: host_probe
            for host_probe in host_probes
            if host_probe is not self
            and host_probe.spec.group == self.spec.group
            and host_probe.listens_at
        }
        if self._probe is None or self.listens_at is None or not peers:
            return
        named = [
            {"name": name, "address": address[0], "port": address[1]}
            for name, host_probe in peers.items()
            if (address := host_probe.listens_at) is not None
        ]
        try:
            answer = self._probe.ask("reach", REACH_S + _MARGIN_S, peers=named, limit_s=REACH_S)
            self._unreached = tuple(
                (peers[peer["name"]].spec, str(peer["problem"]))
                for peer in answer["peers"]
                if peer["problem"] is not None
            )
        except _WRONG as error:
            self._unreached = tuple((host_probe.spec, str(error)) for host_probe in peers.values())
        self._num_peers = len(peers)

    def report(self) -> HostReport:
        """Return what is known by now; a host that has not answered counts as one that does not."""
        failure, facts = self._failure, self._facts
        if facts is None and failure is None:
            text = f"{self.spec.name}: no answer within {self._question.limit_s:g} s"
            failure = login_failure(self.spec.name, HostError(text), self._question.settings)
        return HostReport(
            spec=self.spec,
            failure=failure,
            facts=facts if failure is None else None,
            clock=self._clock,
            start_s=None if self._probe is None else self._probe.start_s,
            unreached=self._unreached,
            num_peers=self._num_peers,
        )

    def close(self) -> None:
        """Leave; nothing stays there."""
        self._closed.set()
        if self._probe is not None:
            self._probe.close()
        if self._host is not None:
            self._host.close()

    def _ask_facts(self, host: Host, probe: Probe) -> Message:
        question = self._question
        return probe.ask(
            "facts",
            question.facts_s + _MARGIN_S,
            limit_s=question.facts_s,
            name=parse_target(host.name).host,
            addresses=list(host.addresses),
            base=None,
            python=question.python or host.python,
            environment=dict(question.environment),
            script=software_script(),
            deep=question.deep,
            program=question.program,
            cwd=question.cwd,
            num_peers=question.num_peers,
        )


def at_once(tasks: Sequence[Callable[[], None]], limit_s: float) -> None:
    """Do several things at the same time, and wait for all of them, but not for ever.

    Raises `Exception`: what one of them raised.
    """
    done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # noqa: BLE001 - it is raised where somebody waits for it
            done.put(error)
        else:
            done.put(None)

    for task in tasks:
        threading.Thread(target=run, args=(task,), daemon=True).start()
    deadline = time.monotonic() + limit_s
    for _ in tasks:
        try:
            error = done.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return
        if error is not None:
            raise error

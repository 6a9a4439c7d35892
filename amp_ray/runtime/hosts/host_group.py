"""A group of hosts and their agents, which start on demand and stay between trials."""

import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import FIRST_EXCEPTION
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

from amp_ray.errors import HostError, InterruptedTrialError
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.link import POLL_S, AgentLink, AgentSettings, Inbox, Message, Patience
from amp_ray.runtime.threads import in_thread
from amp_ray.trials.launch import WarmUp

_HASTE_S: Final = 2.0  # limit for the end of agents, and for sweeps, after an interruption
_ENDING_S: Final = 5.0  # time that an agent without a lease takes to end ranks and free slots
_SWEEP_TIMEOUT_S: Final = 15.0  # longer than the agent's `KILL_LIMIT_S`
_AT_ONCE: Final = 32  # maximum number of parallel logins, which take CPU time on this machine
_CLAIM_PAUSE_MS: Final = 1000
_MS_PER_S: Final = 1000
_OWNER_BYTES: Final = 4

_T = TypeVar("_T")


class HostGroup:
    """One agent per host, and the sweeps that must clean up after lost agents."""

    def __init__(
        self, hosts: Iterable[Host], settings: AgentSettings, warm_up: WarmUp | None
    ) -> None:
        self.settings = settings
        self.links: dict[str, AgentLink] = {}
        self.inbox: Inbox = queue.SimpleQueue()
        self.interrupted = threading.Event()  # ends the running trial
        self._hosts = {host.name: host for host in hosts}
        self._warm_up = warm_up
        # Requests of due sweeps, by host
        self._due: dict[str, list[Message]] = {name: [] for name in self._hosts}
        self._is_closed = False
        self._owner = secrets.token_hex(_OWNER_BYTES)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all hosts."""
        return tuple(self._hosts)

    def check_interrupted(self) -> None:
        """Raise `InterruptedTrialError` if ``interrupted`` is set."""
        if self.interrupted.is_set():
            raise InterruptedTrialError("the trial was interrupted")

    # ------------------------------------------------------------------ begin

    def open(self, slots: Mapping[str, Collection[int]], *, study: str = "") -> dict[str, str]:
        """Start an agent on each host, unless one runs, and claim ``slots``, in parallel.

        Other users' agents cannot claim these slots then; they report ``study`` as the holder.
        Returns error messages by host. Raises `InterruptedTrialError` on an interruption; agents
        that are still starting then are closed as soon as they run.
        """
        incomplete = [
            name for name in slots if not self._is_ready(name) or self._unclaimed(name, slots[name])
        ]
        results = in_parallel(
            lambda name: self._open_one(name, slots[name], study),
            incomplete,
            meanwhile=self.check_interrupted,
        )
        return {name: text for name, text in results.items() if text}

    def warm(self, names: Sequence[str]) -> dict[str, Message]:
        """Wait until each agent's warm process is ready or has failed.

        Returns the ``warm`` messages by host, with ``problem`` (empty if ready) and ``import_s``;
        an empty mapping if the launcher uses no warm processes.
        """
        if self._warm_up is None:
            return {}
        limit_s = 2 * self.settings.import_timeout_s + self.settings.lease_s  # it is restarted once
        deadline, patience = time.monotonic() + limit_s, Patience()
        while True:
            self.check_interrupted()
            answers: dict[str, Message] = {}
            silence_counts, is_late = patience.is_over(), time.monotonic() > deadline
            for name in names:
                link = self.links[name]
                problem = link.last_words
                if is_late:
                    problem = f"no word of the warm process within {limit_s:g} s"
                elif silence_counts and link.silent_s > self.settings.lease_s:
                    problem = f"no sign of life for {self.settings.lease_s} s"
                answer = link.answer("warm") or {"problem": problem}
                if "kind" in answer or problem:
                    answers[name] = answer
            if len(answers) == len(names):
                return answers
            time.sleep(POLL_S)

    def _is_ready(self, name: str) -> bool:
        """Return whether a host has a live agent and no sweep is due."""
        link = self.links.get(name)
        return link is not None and link.is_alive and not self._due[name]

    def _open_one(self, name: str, slots: Collection[int], study: str) -> str:
        """Start an agent unless one runs, and claim slots; return an error message or ``""``."""
        is_new = not self._is_ready(name)
        try:
            if is_new:
                self._start(name)
            self._claim(name, self._unclaimed(name, slots), study)
        except HostError as error:
            if is_new and name in self.links:
                self.links.pop(name).close()
            return str(error)
        if is_new and self._warm_up is not None:
            request: dict[str, Any] = asdict(self._warm_up)
            limit_s = self.settings.import_timeout_s
            self.links[name].send(kind="warm", limit_s=limit_s, **request)
        return ""

    def _start(self, name: str) -> None:
        host = self._hosts[name]
        if name in self.links:  # a lost agent: its connection may be dead, too
            self.links[name].close()
            host.close()
        stubborn = self._sweep_due(name)
        if stubborn:
            raise HostError(f"{name}: an earlier trial left {', '.join(stubborn)}")
        host.connect()
        link = AgentLink(host, self.settings, self.inbox)
        self.links[name] = link
        link.wait_for_start(self.settings.start_timeout_s)
        if self._is_closed:
            link.close()

    def _unclaimed(self, name: str, slots: Collection[int]) -> list[int]:
        claimed = self.links[name].slots if name in self.links else ()
        return [slot for slot in slots if slot not in claimed and self._hosts[name].shares_slots]

    def _claim(self, name: str, slots: Collection[int], study: str) -> None:
        """Claim slots; retry while another study holds them, for a lease and `_ENDING_S`."""
        link = self.links[name]
        # An agent whose controller has died frees its slots within this time
        deadline = time.monotonic() + self.settings.lease_s + _ENDING_S
        question = {"kind": "claim", "slots": [*slots], "owner": self._owner, "study": study}
        while slots:
            problem = link.ask(question, "claimed", self.settings.start_timeout_s)["problem"]
            if not problem:
                link.slots |= {*slots}
                return
            if time.monotonic() > deadline or self._is_closed:
                raise HostError(f"{name}: {problem}")
            # Random: two agents that claim at the same moment both step back
            time.sleep(POLL_S + secrets.randbelow(_CLAIM_PAUSE_MS) / _MS_PER_S)

    # ------------------------------------------------------------------ end

    def give_up(self, folders: Mapping[str, str]) -> None:
        """Drop agents that are lost or could not clean up; queue a sweep for their hosts."""
        for name, folder in folders.items():
            link = self.links.pop(name)
            link.close()
            self._due[name].append(_sweep_after(link, folder))

    def abandon(self, folders: Mapping[str, str]) -> None:
        """End agents during a trial; queue a sweep for those that do not end in `_HASTE_S`."""
        links = {name: self.links.pop(name) for name in folders}
        for name in self._end(links, _HASTE_S):
            self._due[name].append(_sweep_after(links[name], folders[name]))

    def sweep(self, *, in_haste: bool = False) -> dict[str, list[str]]:
        """Run all due sweeps: end processes and remove files of lost agents.

        With ``in_haste``, wait `_HASTE_S` at most. Returns, per host with a due sweep, the
        remaining processes; for a host that cannot be reached, one line with the reason.
        """

        def pay(name: str) -> list[str]:
            try:
                return self._sweep_due(name)
            except HostError as error:
                return [str(error)]

        names = [name for name, requests in self._due.items() if requests]
        results = in_parallel(pay, names, limit_s=_HASTE_S if in_haste else None)
        late = "it does not answer; its agent ends when its lease runs out"
        return {name: results.get(name, [f"{name}: {late}"]) for name in names}

    def sweep_trials(self, trial_ids: Sequence[str]) -> list[str]:
        """End the processes and remove the folders of some trials, on all hosts.

        Used after a controller has died and its agents' tags are lost: the trials' ids identify
        folders, and the folders' names identify processes. Nothing else is touched. Returns a line
        per remaining process and per host without answer; an empty list means that all is clean.
        """
        request = {"tag": None, "trials": [*trial_ids]}

        def sweep(name: str) -> list[str]:
            try:
                stubborn = sweep_host(self._hosts[name], self.settings, [request])
            except HostError as error:
                return [str(error)]
            return [f"{name}: {process}" for process in stubborn]

        return [line for lines in in_parallel(sweep, self.names).values() for line in lines]

    def close(self) -> None:
        """End all agents, run due sweeps, disconnect.

        After an interruption this takes a few seconds at most, since it does not wait for hosts
        that do not answer; agents there end with their lease.
        """
        self._is_closed, in_haste = True, self.interrupted.is_set()
        limit_s = _HASTE_S if in_haste else self.settings.grace_s + self.settings.lease_s
        self._end({**self.links}, limit_s)  # a copy: a starting agent may fail and be removed now
        self.links.clear()
        self.sweep(in_haste=in_haste)
        in_parallel(lambda name: self._hosts[name].close(), self.names, limit_s=_HASTE_S)

    def _end(self, links: Mapping[str, AgentLink], limit_s: float) -> list[str]:
        """End agents in parallel; return the hosts whose agents have not ended in ``limit_s``."""
        for link in links.values():
            link.close()
        deadline = time.monotonic() + limit_s
        return [
            name
            for name, link in links.items()
            if not link.wait(max(0.0, deadline - time.monotonic()))
        ]

    def _sweep_due(self, name: str) -> list[str]:
        """Run the due sweeps of a host; return the processes that could not be ended."""
        if not self._due[name]:
            return []
        self._hosts[name].close()  # agents were lost with this connection
        stubborn = sweep_host(self._hosts[name], self.settings, self._due[name])
        if not stubborn:
            self._due[name].clear()
        return stubborn


def _sweep_after(link: AgentLink, folder: str) -> Message:
    """Return the sweep request for an agent, its trial's folder and its warm process's folder."""
    return {"tag": link.tag, "names": [folder, f"{link.tag}-warm"]}


def sweep_host(host: Host, settings: AgentSettings, requests: Iterable[Message]) -> list[str]:
    """Sweep a host with a temporary agent; return the processes that could not be ended."""
    host.connect()
    # Without isolation: lost processes are not visible from inside a PID namespace
    link = AgentLink(host, replace(settings, isolate=False), queue.SimpleQueue())
    try:
        link.wait_for_start(min(settings.start_timeout_s, 2 * _SWEEP_TIMEOUT_S))
        questions = [{"kind": "sweep", **request} for request in requests]
        answers = [link.ask(question, "swept", _SWEEP_TIMEOUT_S) for question in questions]
    finally:
        link.close()
    link.wait(settings.grace_s + settings.lease_s)
    return [process for answer in answers for process in answer["left"]]


def in_parallel(
    work: Callable[[str], _T],
    names: Sequence[str],
    *,
    limit_s: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, _T]:
    """Call ``work`` for several hosts in daemon threads, `_AT_ONCE` at a time.

    ``meanwhile`` is called while waiting and may raise. Returns the results by host; a host that is
    not done after ``limit_s`` has none. The first exception of ``work`` is raised.
    """
    waiting, results = deque(names), dict[str, _T]()

    def run() -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            results[name] = work(name)

    calls = {in_thread(run) for _ in names[:_AT_ONCE]}
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    try:
        while calls and time.monotonic() < deadline:
            meanwhile()
            done, calls = futures.wait(calls, POLL_S, FIRST_EXCEPTION)
            for call in done:
                call.result()
    finally:
        waiting.clear()  # drop the hosts that still wait for a thread
    return {name: results[name] for name in names if name in results}

"""The agents of some hosts: started when they are needed, kept between trials, swept after."""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from amp_ray.errors import HostError, InputError, printable
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.link import POLL_S, AgentLink, AgentSettings, Patience
from amp_ray.runtime.hosts.messages import Inbox, Message
from amp_ray.runtime.study.pool import InterruptedTrialError
from amp_ray.trials.launch import WarmUp

Listener = Callable[[Mapping[str, Any]], None]
"""Takes an event of a rank as it comes, on the thread that runs the trial.

It raises ``ValueError`` for one that no rank of ours sends; the host is given up then."""


def _ignore(_event: Mapping[str, Any]) -> None:
    """Listen to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What a launcher looks at while a trial runs."""

    listener: Listener = _ignore
    interrupted: threading.Event = field(default_factory=threading.Event)  # somebody wants an end

    def check(self) -> None:
        """Raise `InterruptedTrialError` if somebody wants an end."""
        if self.interrupted.is_set():
            raise InterruptedTrialError("the trial was interrupted")


_LOGGER = logging.getLogger(__name__)

_HASTE_S: Final = 2.0  # for agents to end, then for the sweep of others, after an interruption
_ENDING_S: Final = 5.0  # for an agent without a lease to end its ranks and give slots back
_AT_ONCE: Final = 32  # logins at the same time, which take this machine's CPU, too
_CLAIM_PAUSE_MS: Final = 1000
_MS_PER_S: Final = 1000
_OWNER_BYTES: Final = 4

_T = TypeVar("_T")


_SWEEP_TIMEOUT_S: Final = 15.0  # more than an agent waits for a process that hangs in the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a lost agent may have left on a host."""

    tag: str
    folder: str

    @property
    def folders(self) -> list[str]:
        """Names of the trial's folder and of the warm process's."""
        return [self.folder, f"{self.tag}-warm"]


def sweep_host(host: Host, settings: AgentSettings, leftovers: Iterable[Leftover]) -> list[str]:
    """Sweep a host with an agent of its own; return what would not go."""
    with _Sweeper.on(host, settings) as sweeper:
        return [
            process
            for leftover in leftovers
            for process in sweeper.ask(tag=leftover.tag, base=settings.base, names=leftover.folders)
        ]


def sweep_trials(host: Host, settings: AgentSettings, trial_ids: Sequence[str]) -> list[str]:
    """Sweep a host of all attempts at some trials, whichever controller made them.

    Their agents are known by no tag any more; folders carry the trials' names, and processes the
    folders'. No other process and no other folder is touched. Returns the processes that would not
    go, each described; empty after a verified sweep.
    """
    with _Sweeper.on(host, settings) as sweeper:
        return sweeper.ask(tag=None, base=settings.base, trials=[*trial_ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweeper:
    """An agent that only sweeps."""

    link: AgentLink
    inbox: queue.SimpleQueue[Message]

    @classmethod
    @contextlib.contextmanager
    def on(cls, host: Host, settings: AgentSettings) -> "Iterator[_Sweeper]":
        """Start it on a host, and end it."""
        host.connect()
        inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Without isolation: from inside a PID namespace the lost processes cannot be seen.
        outside = replace(settings, isolate=False)
        link = AgentLink(host, outside, lambda _tag, message: inbox.put(message))
        problem = link.why_not_started(min(settings.start_timeout_s, 2 * _SWEEP_TIMEOUT_S))
        if problem:
            link.close()
            raise HostError(f"{host.name}: {problem}")
        try:
            yield cls(link=link, inbox=inbox)
        except BaseException:
            link.close()  # who does not answer need not be waited for
            raise
        link.close()
        link.wait(settings.grace_s + settings.lease_s)

    def ask(self, **what: Any) -> list[str]:  # noqa: ANN401 - JSON
        """Have it sweep, and wait for what is left."""
        self.link.send(kind="sweep", **what)
        deadline = time.monotonic() + _SWEEP_TIMEOUT_S
        message: Message = {"kind": "none"}
        while message["kind"] != "swept":
            with contextlib.suppress(queue.Empty):
                message = self.inbox.get(timeout=POLL_S)
            if time.monotonic() > deadline or not self.link.is_reading:
                message = {"kind": "lost", "text": "no answer to a sweep"}
            if message["kind"] == "lost":
                raise HostError(f"{self.link.host.name}: {message['text']}")
        left: list[str] = message["left"]
        return left


class Agents:
    """One agent per host, started in parallel, and what lost ones may have left behind."""

    def __init__(
        self, hosts: Iterable[Host], settings: AgentSettings, warm_up: WarmUp | None
    ) -> None:
        self.settings = settings
        self.links: dict[str, AgentLink] = {}
        self.inbox = Inbox()
        self._hosts = {host.name: host for host in hosts}
        self._warm_up = warm_up
        self._leftovers: dict[str, list[Leftover]] = {name: [] for name in self._hosts}
        self._answers: dict[str, Message] = {}
        self._answered = threading.Condition()
        self._is_closed = False
        self._owner = secrets.token_hex(_OWNER_BYTES)
        self._claims: dict[str, str] = {}
        self._slots: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def names(self) -> tuple[str, ...]:
        """All hosts."""
        return tuple(self._hosts)

    def check(self, names: Sequence[str], who: str) -> None:
        """Refuse hosts that are not there."""
        unknown = [name for name in names if name not in self._hosts]
        if unknown:
            raise InputError(f"{who} needs {unknown}, but the hosts are {[*self._hosts]}")

    def open(
        self, slots: Mapping[str, Collection[int]], watch: Watch, *, study: str = ""
    ) -> dict[str, str]:
        """Make sure of an agent with some slots on each host, in parallel.

        No other agent may use ``slots`` from now on; ``study`` is what others that want them are
        shown. Returns what failed, by host. Raises `InterruptedTrialError` if somebody wants no
        more of it; what is still being opened is closed as soon as it is open.
        """
        missing = [
            name for name in slots if not self._is_ready(name) or self._unclaimed(name, slots[name])
        ]
        results = in_parallel(
            lambda name: self._open_one(name, slots[name], study), missing, meanwhile=watch.check
        )
        return {name: text for name, text in results.items() if text}

    def warm(self, names: Sequence[str], watch: Watch) -> dict[str, Message]:
        """Wait until the warm processes of open agents are ready, or have said why they are not.

        An answer has ``problem``, empty if there is none, and ``import_s``; nothing where no
        warm processes are wanted.
        """
        if self._warm_up is None:
            return {}
        tags = {name: self.links[name].tag for name in names}
        limit_s = 2 * self.settings.import_timeout_s + self.settings.lease_s  # it may start twice
        deadline, patience = time.monotonic() + limit_s, Patience()
        while True:
            watch.check()
            is_over = patience.is_over()
            for name, tag in tags.items():
                if time.monotonic() > deadline:
                    text = f"no word of the warm process within {limit_s:g} s"
                    self._answers.setdefault(tag, {"kind": "lost", "problem": text})
                if is_over and self.links[name].silent_s > self.settings.lease_s:
                    text = f"no sign of life for {self.settings.lease_s} s"
                    self._answers.setdefault(tag, {"kind": "lost", "problem": text})
            with self._answered:
                if all(tag in self._answers for tag in tags.values()):
                    return {name: self._answers[tag] for name, tag in tags.items()}
                self._answered.wait(POLL_S)

    def give_up(self, folders: Mapping[str, str]) -> None:
        """Leave agents that are lost, or could not clean up; their hosts have to be swept."""
        for name, folder in folders.items():
            link = self.links.pop(name)
            self._leave(link)
            self._leftovers[name].append(Leftover(tag=link.tag, folder=folder))

    def abandon(self, folders: Mapping[str, str]) -> None:
        """End agents in the middle of a trial, and wait a moment until they have cleaned up."""
        links = {name: self.links.pop(name) for name in folders}
        for name in self._end(links, _HASTE_S):
            self._leftovers[name].append(Leftover(tag=links[name].tag, folder=folders[name]))

    def sweep(self, *, in_haste: bool = False) -> dict[str, list[str]]:
        """End and remove whatever lost agents have left on hosts that can be reached again.

        With ``in_haste`` it waits only a moment for hosts that do not answer. Returns what is left,
        per host with leftovers; a host that cannot be reached has one line.
        """

        def pay(name: str) -> list[str]:
            try:
                return self._pay(name)
            except HostError as error:
                return [str(error)]

        names = [name for name, leftovers in self._leftovers.items() if leftovers]
        limit_s = _HASTE_S if in_haste else None
        left = in_parallel(pay, names, limit_s=limit_s)
        late = "it does not answer; its agent ends when its lease runs out"
        return {name: left.get(name, [f"{name}: {late}"]) for name in names}

    def sweep_trials(self, trial_ids: Sequence[str]) -> list[str]:
        """Sweep all hosts after a controller that died; say what stays, who does not answer."""

        def sweep(name: str) -> list[str]:
            try:
                left = sweep_trials(self._hosts[name], self.settings, trial_ids)
            except HostError as error:
                return [str(error)]
            return [f"{name}: {process}" for process in left]

        return [line for lines in in_parallel(sweep, self.names).values() for line in lines]

    def close(self, *, in_haste: bool) -> None:
        """End and sweep all, then disconnect; ``in_haste``, hosts that do not answer are left."""
        self._is_closed = True
        limit_s = _HASTE_S if in_haste else self.settings.grace_s + self.settings.lease_s
        self._end({**self.links}, limit_s)  # a copy: one that is still being opened may fail now
        self.links.clear()
        self.sweep(in_haste=in_haste)
        in_parallel(lambda name: self._hosts[name].close(), self.names, limit_s=_HASTE_S)

    def _end(self, links: Mapping[str, AgentLink], limit_s: float) -> list[str]:
        """End agents, all at the same time; return the hosts whose agents have not gone in time."""
        for link in links.values():
            self._leave(link)
        deadline = time.monotonic() + limit_s
        return [
            name
            for name, link in links.items()
            if not link.wait(max(0.0, deadline - time.monotonic()))
        ]

    def _leave(self, link: AgentLink) -> None:
        """Close a link, and let its last messages go unread."""
        link.close()
        self.inbox.forget(link.tag)

    def _is_ready(self, name: str) -> bool:
        """Tell whether a host has an agent at work and no leftovers."""
        link = self.links.get(name)
        return link is not None and link.is_alive and not self._leftovers[name]

    def _open_one(self, name: str, slots: Collection[int], study: str) -> str:
        """Start an agent where there is none, and claim slots; return what prevents it."""
        is_new = not self._is_ready(name)
        try:
            if is_new:
                self._start(name)
            self._claim(name, self._unclaimed(name, slots), study)
        except HostError as error:
            if is_new and name in self.links:
                self._leave(self.links.pop(name))
            return str(error)
        if is_new and self._warm_up is not None:
            request: dict[str, Any] = asdict(self._warm_up)
            limit_s = self.settings.import_timeout_s
            self.links[name].send(kind="warm", base=self.settings.base, limit_s=limit_s, **request)
        return ""

    def _start(self, name: str) -> None:
        if name in self.links:  # and lost: the connection may be as dead, and not know it yet
            self._leave(self.links[name])
            self._hosts[name].close()
        left = self._pay(name)
        if left:
            raise HostError(f"{name}: an earlier trial left {', '.join(left)}")
        self._hosts[name].connect()
        link = AgentLink(self._hosts[name], self.settings, partial(self._take, name))
        self.links[name] = link
        problem = link.why_not_started(self.settings.start_timeout_s)
        if problem:
            raise HostError(f"{name}: {problem}")
        if self._is_closed:
            self._leave(link)

    def _unclaimed(self, name: str, slots: Collection[int]) -> list[int]:
        """Return those of some slots that the host's agent does not have yet."""
        claimed = self._slots.get(self.links[name].tag, set()) if name in self.links else set()
        return [slot for slot in slots if slot not in claimed and self._hosts[name].shares_slots]

    def _claim(self, name: str, slots: Collection[int], study: str) -> None:
        """Have an agent claim slots; wait a moment for another study that is about to end."""
        link = self.links[name]
        limit_s = self.settings.lease_s + _ENDING_S  # one whose controller is gone has to end
        deadline = time.monotonic() + limit_s
        while slots:
            with self._answered:
                self._claims.pop(link.tag, None)
                link.send(kind="claim", slots=[*slots], owner=self._owner, study=study)
                self._answered.wait_for(lambda: link.tag in self._claims, limit_s)
                problem = self._claims.get(link.tag, f"no answer within {limit_s:g} s")
            if not problem:
                self._slots[link.tag] |= {*slots}
                return
            if time.monotonic() > deadline or self._is_closed or not link.is_alive:
                raise HostError(f"{name}: {problem}")
            # By chance, since two agents that claim at the same moment both step back.
            time.sleep(POLL_S + secrets.randbelow(_CLAIM_PAUSE_MS) / _MS_PER_S)

    def _take(self, name: str, tag: str, message: Message) -> None:
        """Queue what an agent says; remember what it says of its warm process."""
        with self._answered:
            if message["kind"] == "claimed":
                self._claims[tag] = message["problem"]
                self._answered.notify_all()
                return
            if message["kind"] == "warm-died":  # it is started once more
                self._answers.pop(tag, None)
                _LOGGER.warning(printable(f"{name}: {message['text']}; it is started once more"))
            elif message["kind"] in {"warm", "lost"}:
                self._answers[tag] = {"problem": message.get("text"), **message}
                self._answered.notify_all()
        self.inbox.put(tag, message)

    def _pay(self, name: str) -> list[str]:
        """Sweep a host; return what is left there."""
        if not self._leftovers[name]:
            return []
        self._hosts[name].close()  # agents were lost with it
        left = sweep_host(self._hosts[name], self.settings, self._leftovers[name])
        if not left:
            self._leftovers[name].clear()
        return left


def in_parallel(
    work: Callable[[str], _T],
    names: Sequence[str],
    *,
    limit_s: float | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, _T]:
    """Do something for several hosts, some at once, in threads that keep nobody from ending.

    ``meanwhile`` is called while waiting and may raise; after ``limit_s`` the rest is left alone.
    The result has, by host, what came of it, where that is known.
    """
    done: queue.SimpleQueue[tuple[str, _T | None, BaseException | None]] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def run() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                name = waiting.get_nowait()
                try:
                    done.put((name, work(name), None))
                except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                    done.put((name, None, error))

    for name in names[:_AT_ONCE]:
        threading.Thread(target=run, name=f"host {name}", daemon=True).start()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    found: dict[str, Any] = {}
    try:
        while len(found) < len(names) and (deadline is None or time.monotonic() < deadline):
            meanwhile()
            with contextlib.suppress(queue.Empty):
                name, result, error = done.get(timeout=POLL_S)
                if error is not None:
                    raise error
                found[name] = result
    finally:
        with contextlib.suppress(queue.Empty):
            while True:  # nobody waits for the others any more
                waiting.get_nowait()
    return {name: found[name] for name in names if name in found}

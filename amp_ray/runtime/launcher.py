"""From commands and hosts to an outcome: bounded in time, and nothing left behind."""

import queue
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from amp_ray.errors import HostError, InputError
from amp_ray.runtime.attempt import Attempt
from amp_ray.runtime.host import Host
from amp_ray.runtime.link import AgentLink, AgentSettings, Message
from amp_ray.runtime.sweep import Debt, sweep_host
from amp_ray.runtime.trial_folder import TrialFolder
from amp_ray.trials.causes import Sign, failure, first_cause
from amp_ray.trials.launch import Launch
from amp_ray.trials.outcome import Outcome, Unreachable
from amp_ray.trials.result import Reader, measured, read_result
from amp_ray.trials.signs import keep_last

_NUM_ATTEMPTS: Final = 2
"""A port can be taken between asking for it and using it: one more try."""

_TOKEN_BYTES: Final = 4

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """What a warm process imports on every host.

    Args:
        python: The interpreter, the same text as the first argument of the trials' commands.
        modules: ``module``, or ``module:function`` to call a function of it too.
        environment: In which they are imported.
    """

    python: str
    modules: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Launcher:
    """Runs one trial after the other on some hosts, whose connections and agents stay open.

    Trials at the same time take a launcher each; they may share hosts, not slots.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        settings: AgentSettings | None = None,
        *,
        warm_up: WarmUp | None = None,
    ) -> None:
        """Take the hosts; nothing is opened yet.

        Args:
            hosts: By their names trials refer to them.
            settings: How agents behave.
            warm_up: What warm processes import; None to start every rank afresh.
        """
        self._hosts = {host.name: host for host in hosts}
        self._settings = settings or AgentSettings()
        self._warm_up = warm_up
        self._links: dict[str, AgentLink] = {}
        self._debts: dict[str, list[Debt]] = {name: [] for name in self._hosts}
        self._inbox: queue.SimpleQueue[tuple[str, Message]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        """Return the launcher."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all agents and connections."""
        self.close()

    def run(self, launch: Launch, folder: Path, *, reader: Reader = read_result) -> Outcome:
        """Run a trial to its end.

        Args:
            launch: What to start.
            folder: Of this trial, made here; everything about it is written there.
            reader: Finds the measurement in what came back.

        Returns:
            The outcome. Whatever goes wrong on hosts is one, not an exception.

        Raises:
            InputError: If the launch names a host that this launcher does not have.
            FileExistsError: If there is such a folder.
        """
        unknown = [name for name in launch.hosts if name not in self._hosts]
        if unknown:
            message = f"trial {launch.trial_id} needs {unknown}, but the hosts are {[*self._hosts]}"
            raise InputError(message)
        start = time.monotonic()
        record = TrialFolder(folder)
        record.write_launch(launch)
        outcome = self._outcome(launch, record, reader, start)
        record.write_outcome(outcome)
        return outcome

    def warm(self, names: Sequence[str] | None = None) -> dict[str, Message]:
        """Start agents and wait until their warm processes are ready.

        Args:
            names: Hosts; None for all.

        Returns:
            Per host ``problem`` (empty if none) and ``import_s``.

        Raises:
            HostError: If a host cannot be reached.
        """
        chosen = [*self._hosts] if names is None else [*names]
        errors = self._open(chosen)
        if errors:
            raise HostError("; ".join(errors.values()))
        pending = {self._links[name].tag: name for name in chosen if self._warm_up is not None}
        answers: dict[str, Message] = {}
        while pending:
            tag, message = self._next(pending)
            if tag in pending and message["kind"] in {"warm", "lost"}:
                answers[pending.pop(tag)] = {"problem": message.get("text"), **message}
        return answers

    def sweep(self) -> dict[str, list[str]]:
        """End and remove whatever lost agents have left on hosts that can be reached again.

        Returns:
            Per host with a debt, what is still there; a host that cannot be reached has one line.
        """
        names = [name for name, debts in self._debts.items() if debts]
        return dict(zip(names, _in_parallel(self._pay, names), strict=True))

    def close(self) -> None:
        """End all agents, wait until they have cleaned up, sweep once more, disconnect."""
        links = [*self._links.values()]
        for link in links:
            link.close()
        for link in links:
            link.wait(self._settings.grace_s + self._settings.lease_s)
        self._links.clear()
        self.sweep()
        for host in self._hosts.values():
            host.close()

    # ------------------------------------------------------------------ trials

    def _outcome(
        self, launch: Launch, record: TrialFolder, reader: Reader, start: float
    ) -> Outcome:
        """Try once, and once more if only the port was taken."""
        attempt: Attempt | None = None
        for _ in range(_NUM_ATTEMPTS):
            errors = self._open(launch.hosts)
            if errors:
                host, text = next(iter(errors.items()))
                return Unreachable(reason=text, host=host, wall_s=time.monotonic() - start)
            attempt = self._attempt(launch, record)
            cause = first_cause(attempt.signs)
            if cause is None or cause.kind != "port":
                break
        assert attempt is not None
        return self._judge(launch, attempt, reader, start)

    def _attempt(self, launch: Launch, record: TrialFolder) -> Attempt:
        """Run one attempt and write it down, also when it is interrupted."""
        name = f"amp-ray-{launch.trial_id}-{secrets.token_hex(_TOKEN_BYTES)}"
        attempt = Attempt(launch, name, self._links, self._inbox, self._settings)
        try:
            attempt.run()
        except BaseException:
            self._abandon(launch.hosts)
            raise
        finally:
            record.write_events(attempt.events)
            record.write_files(attempt.files)
            if len(attempt.prepared) == len(launch.hosts):
                ranks = [attempt.describe(command) for command in launch.commands]
                record.write_rerun(launch, ranks)
        for host in attempt.lost | set(attempt.left):
            link = self._links.pop(host)
            link.close()
            self._debts[host].append(Debt(tag=link.tag, folder=name))
        return attempt

    def _abandon(self, names: Sequence[str]) -> None:
        """After an interrupt: end the agents and wait until they have cleaned up."""
        links = [self._links.pop(name) for name in names]
        for link in links:
            link.close()
        for link in links:
            link.wait(self._settings.grace_s + self._settings.lease_s)

    def _judge(self, launch: Launch, attempt: Attempt, reader: Reader, start: float) -> Outcome:
        """Turn what an attempt saw into the outcome."""
        wall_s = time.monotonic() - start
        signs = list(attempt.signs)
        codes = attempt.exit_codes
        complete = all(codes.get(command.rank) == 0 for command in launch.commands)
        if complete and not attempt.lost:
            try:
                measurement = reader(attempt.files[launch.hosts[0]], launch.trial_id)
                return measured(measurement, wall_s=wall_s)
            except ValueError as error:
                signs.append(_no_result(launch, attempt, str(error)))
        return failure(signs, timeout_s=launch.timeout_s, wall_s=wall_s)

    # ------------------------------------------------------------------ hosts

    def _open(self, names: Sequence[str]) -> dict[str, str]:
        """Make sure of an agent on each host, in parallel; return what failed, by host."""
        missing = [name for name in names if not self._is_ready(name)]
        results = _in_parallel(self._open_one, missing)
        return {name: text for name, text in zip(missing, results, strict=True) if text}

    def _is_ready(self, name: str) -> bool:
        """Tell whether a host has an agent at work and no debts."""
        link = self._links.get(name)
        return link is not None and link.is_alive and not self._debts[name]

    def _open_one(self, name: str) -> str:
        """Start an agent; return what prevents it, or nothing."""
        try:
            left = self._pay(name)
            if left:
                return f"{name}: an earlier trial left {', '.join(left)}"
            self._hosts[name].connect()
            self._links[name] = AgentLink(self._hosts[name], self._settings, self._take)
        except HostError as error:
            return str(error)
        if self._warm_up is not None:
            request: dict[str, Any] = asdict(self._warm_up)
            self._links[name].send(kind="warm", **request)
        return ""

    def _next(self, pending: Mapping[str, str]) -> tuple[str, Message]:
        """Wait for a message, or for an agent to fall silent."""
        while True:
            try:
                return self._inbox.get(timeout=self._settings.heartbeat_s)
            except queue.Empty:
                for tag, name in pending.items():
                    if self._links[name].silent_s > self._settings.lease_s:
                        text = f"no sign of life for {self._settings.lease_s} s"
                        return tag, {"kind": "lost", "text": text}

    def _take(self, tag: str, message: Message) -> None:
        """Queue what an agent says."""
        self._inbox.put((tag, message))

    def _pay(self, name: str) -> list[str]:
        """Sweep a host; return what is left there."""
        if not self._debts[name]:
            return []
        try:
            left = sweep_host(self._hosts[name], self._settings, self._debts[name])
        except HostError as error:
            return [str(error)]
        if not left:
            self._debts[name].clear()
        return left


def _no_result(launch: Launch, attempt: Attempt, text: str) -> Sign:
    """Say that every rank ended well and nothing was measured."""
    tails = [event["tail"] for event in attempt.events if event["kind"] == "exit"]
    lines = keep_last(tails[0]) if tails else ()
    return Sign(kind="no-result", host=launch.hosts[0], rank=0, time_s=0.0, text=text, lines=lines)


def _in_parallel(work: Callable[[str], _T], names: Sequence[str]) -> list[_T]:
    """Do something for several hosts at once; a thread per host, which waits most of the time."""
    if len(names) <= 1:
        return [work(name) for name in names]
    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        return list(pool.map(work, names))

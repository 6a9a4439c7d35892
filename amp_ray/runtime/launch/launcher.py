"""Launches the ranks of a trial on hosts, follows them to an outcome and cleans up."""

import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from amp_ray.errors import InputError, printable
from amp_ray.runtime.hosts.agent.wire import pieces
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.host_group import HostGroup
from amp_ray.runtime.hosts.link import POLL_S, AgentSettings, Message, Patience
from amp_ray.runtime.launch.trial_folder import (
    COLLECT_BYTES,
    COLLECT_BYTES_IN_ALL,
    HostFiles,
    TrialFolder,
)
from amp_ray.trials.causes import (
    Sign,
    failure,
    first_cause,
    keep_last,
    sign_of_deadline,
    sign_of_event,
    sign_of_exit,
    sign_of_trouble,
)
from amp_ray.trials.launch import (
    FOLDER,
    MASTER_ADDRESS,
    MASTER_PORT,
    Launch,
    RankCommand,
    WarmUp,
    fill_in,
    slots_by_host,
)
from amp_ray.trials.outcome import Outcome, Unreachable, without_secrets_in
from amp_ray.trials.result import AllFiles, MissingRankError, Reader, measured, read_result

_LOGGER = logging.getLogger(__name__)
# A free port can be taken before a rank uses it: try once more. A warm process can die: after the
# second death, ranks start without one.
_NUM_ATTEMPTS: Final[dict[str, int]] = {"port": 2, "warm": 3}
_TOKEN_BYTES: Final = 4
_DIGEST_BYTES: Final = 32

INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")

_PREPARE_TIMEOUT_S: Final = 30.0
TRANSFER_TIMEOUT_S: Final = 600.0  # for all files to or from a host; not part of a trial's timeout
_STALL_TIMEOUT_S: Final = 30.0  # maximum pause between two pieces of files to or from a host
_MARGIN_S: Final = 10.0  # if an agent is later than this, the controller ends the trial


Listener = Callable[[Mapping[str, Any]], None]
"""Callback for each event of a rank, called on the thread that runs the trial.

It raises ``ValueError`` for an event that our programs never send; the host is then given up."""


class Contents:
    """The files that all hosts of a trial get, cut into pieces; cached between trials."""

    def __init__(self) -> None:
        self.digests: Mapping[str, str] = {}  # digest of the content by file name
        self._pieces: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def take(self, files: Mapping[str, bytes]) -> None:
        """Take the files of the next trial; drop contents that it does not need."""
        self.digests = {
            name: hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
            for name, data in files.items()
        }
        kept = self._pieces
        self._pieces = {
            digest: kept[digest] if digest in kept else tuple(pieces(files[name]))
            for name, digest in self.digests.items()
        }

    def messages(self, digest: str) -> Iterator[dict[str, Any]]:
        """Return the ``put`` messages that send a content to an agent."""
        return ({"kind": "put", "digest": digest, **piece} for piece in self._pieces[digest])


class Attempt:
    """One attempt to run a trial; call ``run`` once."""

    def __init__(
        self,
        launch: Launch,
        folders: Mapping[str, str],
        group: HostGroup,
        listener: Listener,
        contents: Contents,
        files: Mapping[str, HostFiles],
    ) -> None:
        self.signs: list[Sign] = []
        self.events: list[dict[str, Any]] = []
        self.lost: set[str] = set()
        self.prepared: dict[str, Message] = {}
        self.broken_logs: dict[int, str] = {}
        self._launch, self._folders, self._listener = launch, folders, listener
        self._group, self._settings, self._links = group, group.settings, group.links
        self._contents, self.files = contents, files
        self._hosts = {self._links[host].tag: host for host in launch.hosts}
        self._pending = set(launch.hosts)
        self._ranks = {(command.host, command.rank) for command in launch.commands}
        self._running = set(self._ranks)
        self._missing: dict[str, set[str]] = {}  # digests of contents that a host lacks
        self._collecting: dict[str, tuple[float, float]] = {}
        self._exits: list[tuple[str, Message, float]] = []
        self._oom_kills: dict[str, int] = {}
        self._stop_at: float | None = None
        self._late: list[tuple[str, float]] = []
        self._start, self._patience = time.monotonic(), Patience()

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """Exit code of every rank that ended by itself."""
        return {exit_["rank"]: exit_["code"] for _, exit_, _ in self._exits if not exit_["ended"]}

    @property
    def surviving(self) -> dict[str, list[str]]:
        """Processes that an agent could not end, by host."""
        done = [event for event in self.events if event["kind"] == "done"]
        return {event["host"]: event["left"] for event in done if not event["clean"]}

    def run(self) -> None:
        """Run all phases; if `InterruptedTrialError` is raised, the agents are still running."""
        self._prepare()
        self._deliver()
        if not self.signs:
            self._begin()
            self._follow(self._launch.timeout_s + self._settings.grace_s + _MARGIN_S)
        else:
            self._stop()
        self._follow_up()

    # ------------------------------------------------------------------ phases

    def _prepare(self) -> None:
        for number, host in enumerate(self._launch.hosts):
            link = self._links[host]
            link.send(
                kind="prepare",
                name=self._folders[host],
                addresses=list(link.host.addresses),
                port=number == 0,
            )
        deadline = time.monotonic() + _PREPARE_TIMEOUT_S
        while self._pending - set(self.prepared) and not self.signs:
            self._turn()
            if time.monotonic() > deadline:
                for host in sorted(self._pending - set(self.prepared)):
                    self._lose(host, f"the agent did not answer within {_PREPARE_TIMEOUT_S} s")

    def _deliver(self) -> None:
        """Send every host the contents that it lacks, before any rank starts.

        The time of the transfer does not count towards the trial's timeout.
        """
        if self.signs:
            return
        for host in self._launch.hosts:
            link = self._links[host]
            self._missing[host] = {*self._contents.digests.values()} - link.stored
            for digest in sorted(self._missing[host]):
                for message in self._contents.messages(digest):
                    link.send(**message)
        start = time.monotonic()
        moved = dict.fromkeys(self._pending, start)
        while not self.signs:
            waiting = [host for host in sorted(self._pending) if self._missing[host]]
            if not waiting:
                return
            self._turn()
            now = time.monotonic()
            for host in waiting:
                if self._links[host].has_output:
                    moved[host] = now
                elif now > min(moved[host] + _STALL_TIMEOUT_S, start + TRANSFER_TIMEOUT_S):
                    self._lose(host, "the agent did not take the trial's files in time")

    def _begin(self) -> None:
        for host in self._launch.hosts:
            ranks = [command for command in self._launch.commands if command.host == host]
            self._links[host].send(
                kind="job",
                files=dict(self._contents.digests),
                cwd=self._launch.cwd,
                events=self._launch.sends_events,
                slots=[slot for command in ranks for slot in command.all_slots],
                ranks=[self.describe(command) for command in ranks],
                deadline_s=self._launch.timeout_s,
                settle_s=self._settings.settle_s,
                collect=list(self._launch.collect),
                words=list(self._launch.words),
                collect_bytes=COLLECT_BYTES,
                collect_bytes_in_all=COLLECT_BYTES_IN_ALL,
            )

    def describe(self, command: RankCommand, *, folder: str | None = None) -> dict[str, Any]:
        """Describe a command as JSON, filling in placeholders from the ``prepared`` messages."""
        prepared = self.prepared[command.host]
        first = self.prepared[self._launch.hosts[0]]
        values = {
            FOLDER: folder or prepared["folder"],
            MASTER_ADDRESS: first["address"],
            MASTER_PORT: str(first["port"]),
        }
        environment: dict[str, str] = {
            **dict.fromkeys(INTERFACE_VARIABLES, str(prepared["interface"])),
            **self._launch.environment,
            **command.environment,
        }
        return {
            "rank": command.rank,
            "argv": [fill_in(word, values) for word in command.argv],
            "environment": {key: fill_in(text, values) for key, text in environment.items()},
        }

    def _follow(self, limit_s: float) -> None:
        """Handle messages until every agent is done or lost; file transfer has a separate limit."""
        deadline = time.monotonic() + limit_s
        while self._pending:
            self._turn()
            now = time.monotonic()
            if self._stop_at is not None and now > self._stop_at:
                self._stop()
                deadline = min(deadline, now + self._settings.grace_s + self._settings.lease_s)
                self._stop_at = None
            for host in sorted(self._pending):
                if now > min(self._collecting.get(host, (deadline,))):
                    what = "send its files" if host in self._collecting else "end the trial"
                    self._lose(host, f"the agent did not {what} in time")

    def _stop(self) -> None:
        for host in self._pending:
            self._links[host].send(kind="stop", reason="stopped")

    def _follow_up(self) -> None:
        """Wait for agents that were stopped before their ranks started; turn exits into signs."""
        if self._pending:
            self._follow(self._settings.grace_s + _MARGIN_S)
        ended = [(host, exit_) for host, exit_, _ in self._exits if exit_["ended"]]
        for host, time_s in self._late[:1]:
            limit_s = self._launch.timeout_s
            self.signs.append(sign_of_deadline(host, ended, time_s, timeout_s=limit_s))
        for host, exit_, time_s in self._exits:
            num_oom_kills = self._oom_kills.get(host, 0)
            sign = sign_of_exit(host, exit_, time_s, num_oom_kills=num_oom_kills)
            if sign is not None:
                self.signs.append(sign)

    # ------------------------------------------------------------------ messages

    def _turn(self) -> None:
        """Handle one message; check for silent hosts and for an interruption."""
        self._group.check_interrupted()
        try:
            link, message = self._group.inbox.get(timeout=POLL_S)
        except queue.Empty:
            pass
        else:
            link.make_room()
            host = self._hosts.get(link.tag)
            if host is not None and host not in self.lost:
                self._handle(host, message)
        for host in sorted(self._pending) if self._patience.is_over() else ():
            link = self._links[host]
            if link.silent_s > self._settings.lease_s:
                self._lose(host, f"no sign of life for {self._settings.lease_s} s")
            elif not link.is_reading:
                self._lose(host, f"it has read nothing for {self._settings.lease_s} s")

    def _handle(self, host: str, message: Message) -> None:
        time_s = time.monotonic() - self._start
        kind = message["kind"]
        if kind == "file":
            self._on_file(host, message)
            return
        if kind == "stored":
            self._on_stored(host, message["digest"])
            return
        rank = message.get("rank") if kind in {"started", "said", "trouble"} else None
        if rank is not None and (host, rank) not in self._ranks:
            self._lose(host, f"it speaks of rank {rank}, which it does not run")
            return
        self.events.append({"time_s": round(time_s, 4), **message, "host": host})
        react: dict[str, Callable[[str, Message, float], None]] = {
            "prepared": self._on_prepared,
            "said": self._on_said,
            "trouble": self._on_trouble,
            "exit": self._on_exit,
            "collecting": self._on_collecting,
            "done": self._on_done,
            "lost": self._on_lost,
        }
        if kind in react:
            react[kind](host, message, time_s)

    def _on_prepared(self, host: str, message: Message, _time_s: float) -> None:
        self.prepared[host] = message

    def _on_stored(self, host: str, digest: str) -> None:
        """Note that an agent has stored a content, which it keeps for later trials."""
        if digest in self._missing.get(host, ()):
            self._missing[host].discard(digest)
            self._links[host].stored.add(digest)

    def _on_file(self, host: str, message: Message) -> None:
        """Store a piece of a file; give up a host that sends an unrequested file."""
        if host in self._collecting:
            limit = self._collecting[host][0]
            self._collecting[host] = limit, time.monotonic() + _STALL_TIMEOUT_S
        try:
            self.files[host].add(message)
        except ValueError as error:
            self._lose(host, f"it sent what was not asked for: {error}")

    def _on_said(self, host: str, message: Message, time_s: float) -> None:
        """Pass a rank's event to the listener; if it reports a failure, keep it as a sign."""
        try:
            self._listener(message["data"])
        except InputError:
            raise
        except ValueError as error:
            self._lose(host, f"rank {message['rank']} says what cannot be used: {error}")
            return
        sign = sign_of_event(host, message, time_s)
        if sign is not None:
            self._add(sign)

    def _on_trouble(self, host: str, message: Message, time_s: float) -> None:
        """Handle a host's problem; stop the trial, unless the problem is only with a log."""
        sign = sign_of_trouble(host, message, time_s)
        if sign.rank is not None and sign.kind == "disk":
            self.broken_logs[sign.rank] = f"rank {sign.rank} on {host}: {sign.text}"
            self.signs.append(sign)
            return
        self._add(sign)
        if host not in self.prepared:
            self._pending.discard(host)

    def _on_exit(self, host: str, message: Message, time_s: float) -> None:
        """Record a rank's exit; accept one per rank, and only from its host."""
        if (host, message["rank"]) not in self._running:
            self._lose(host, f"it says that rank {message['rank']} ended, which it does not run")
            return
        self._running.discard((host, message["rank"]))
        self._exits.append((host, message, time_s))
        if message["code"] != 0 and not message["ended"]:
            self._stop_soon()

    def _on_collecting(self, host: str, _message: Message, _time_s: float) -> None:
        """Note that an agent has ended its ranks and begins to send files."""
        now = time.monotonic()
        self._collecting.setdefault(host, (now + TRANSFER_TIMEOUT_S, now + _STALL_TIMEOUT_S))

    def _on_done(self, host: str, message: Message, time_s: float) -> None:
        """Note that an agent is done: all its ranks have ended, and its folder is removed."""
        if host not in self.prepared:
            self._lose(host, "its agent is done before it has begun")
            return
        self._pending.discard(host)
        self._oom_kills[host] = message["num_oom_kills"]
        if message["reason"] == "lease":
            lease = f"no sign of life from here for {self._settings.lease_s} s"
            self._lose(host, f"its agent ended the trial: {lease}, or it was told to end there")
        if message["reason"] == "deadline":
            self._late.append((host, time_s))
            self._stop_soon()

    def _on_lost(self, host: str, message: Message, _time_s: float) -> None:
        if host in self._pending:
            self._lose(host, message["text"])

    # ------------------------------------------------------------------ signs

    def _lose(self, host: str, text: str) -> None:
        """Give up a host: end its agent's lease, and note that it needs a sweep."""
        self._pending.discard(host)
        self.lost.add(host)
        self._links[host].close()
        time_s = time.monotonic() - self._start
        self._add(Sign(kind="lost", host=host, rank=None, time_s=time_s, text=text))

    def _add(self, sign: Sign) -> None:
        self.signs.append(sign)
        self._stop_soon()

    def _stop_soon(self) -> None:
        """Stop the trial after a short delay, in which other ranks can report their errors."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._settings.settle_s


class Launcher:
    """Runs trials one after the other on some hosts; connections and agents stay open.

    For parallel trials use several launchers; they may share hosts, but not slots.
    """

    def __init__(
        self,
        hosts: Iterable[Host],
        settings: AgentSettings | None = None,
        *,
        warm_up: WarmUp | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Store the hosts, without connecting; ``listener`` is called for all events of ranks."""
        self.group = HostGroup(hosts, settings or AgentSettings(), warm_up)
        self._listener = listener or (lambda _event: None)
        self._lock = threading.Lock()
        self._is_running = False
        self._told: set[str] = set()
        self._contents = Contents()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """End all agents and connections; quickly after an interruption."""
        if kind is not None and not issubclass(kind, Exception):
            self.group.interrupted.set()
        self.close()

    def run(self, launch: Launch, folder: Path, *, reader: Reader = read_result) -> Outcome:
        """Run a trial to its end.

        ``folder`` is created, and everything about the trial is written there. Errors on hosts are
        outcomes, not exceptions. Raises `FileExistsError` if ``folder`` exists. Raises
        `InterruptedTrialError` if ``interrupt`` was called, after all processes have ended.
        """
        unknown = [name for name in launch.hosts if name not in self.group.names]
        if unknown:
            hosts = [*self.group.names]
            raise InputError(f"trial {launch.trial_id} needs {unknown}, but the hosts are {hosts}")
        start = time.monotonic()
        record = TrialFolder(folder)
        record.write_launch(launch)
        with self._lock:
            self._is_running = True
            self.group.interrupted.clear()
        try:
            outcome = self._outcome(launch, record, reader, start)
            outcome = without_secrets_in(outcome, launch.secrets)
        finally:
            self._is_running = False
            record.redact_files(launch.secrets)
        record.write_outcome(outcome)
        return outcome

    def interrupt(self) -> None:
        """End the running trial, if any; may be called from any thread.

        Returns at once; ``run`` raises `InterruptedTrialError` when the hosts are clean.
        """
        with self._lock:
            if self._is_running:
                self.group.interrupted.set()

    def close(self) -> None:
        """End all agents, wait until they have cleaned up, disconnect; see `HostGroup.close`."""
        self.group.close()

    def _outcome(
        self, launch: Launch, record: TrialFolder, reader: Reader, start: float
    ) -> Outcome:
        """Run an attempt; repeat it if the cause of a failure is a port or a warm process."""
        self._contents.take(launch.files)
        slots = slots_by_host(
            [(command.host, slot) for command in launch.commands for slot in command.all_slots]
        )
        number = 0
        while True:
            number += 1
            self.group.check_interrupted()
            errors = self.group.open(slots, study=launch.trial_id)
            if errors:
                host, text = next(iter(errors.items()))
                return Unreachable(
                    reason=printable(text), host=host, wall_s=time.monotonic() - start
                )
            self._warm_up(launch.hosts)
            attempt = self._attempt(launch, record)
            cause = first_cause(attempt.signs)
            if cause is None or number >= _NUM_ATTEMPTS.get(cause.kind, 1):
                return self._judge(launch, attempt, reader, start)

    def _warm_up(self, names: Sequence[str]) -> None:
        """Wait for warm processes; warn about hosts where ranks start without one."""
        for name, answer in self.group.warm(names).items():
            problem = printable(f"{name}: ranks start afresh: {answer['problem']}")
            if answer["problem"] and problem not in self._told:
                self._told.add(problem)
                _LOGGER.warning(problem)

    def _attempt(self, launch: Launch, record: TrialFolder) -> Attempt:
        """Run one attempt; write its events even if it is interrupted."""
        token = secrets.token_hex(_TOKEN_BYTES)
        # A folder name per host: several hosts may be the same machine
        folders = {
            host: f"amp-ray-{launch.trial_id}-{token}{number:02x}"
            for number, host in enumerate(launch.hosts)
        }
        files = record.make_files(launch)
        attempt = Attempt(launch, folders, self.group, self._listener, self._contents, files)
        try:
            attempt.run()
        except BaseException:
            self.group.abandon(folders)
            raise
        finally:
            record.write_events(attempt.events, launch.secrets)
            if len(attempt.prepared) == len(launch.hosts):
                ranks = [attempt.describe(command, folder=FOLDER) for command in launch.commands]
                record.write_rerun(launch, ranks)
        given_up = attempt.lost | set(attempt.surviving)
        self.group.give_up({host: folders[host] for host in given_up})
        return attempt

    def _judge(self, launch: Launch, attempt: Attempt, reader: Reader, start: float) -> Outcome:
        wall_s = time.monotonic() - start
        signs = list(attempt.signs)
        codes = attempt.exit_codes
        complete = all(codes.get(command.rank) == 0 for command in launch.commands)
        if complete and not attempt.lost:
            try:
                logs = attempt.broken_logs.items()
                broken = {f"rank-{rank}.log": (rank, why) for rank, why in logs}
                measurement = reader(AllFiles(attempt.files, broken), launch.trial_id)
                return measured(measurement, wall_s=wall_s)
            except (ValueError, ArithmeticError, RecursionError) as error:
                signs.append(_no_result(launch, attempt, error))
        if not signs:
            signs.append(_no_end(launch, codes))
        prepared = attempt.prepared.items()
        folders = {host: launch.cwd or str(message["folder"]) for host, message in prepared}
        return failure(signs, timeout_s=launch.timeout_s, wall_s=wall_s, folders=folders)


def _no_end(launch: Launch, codes: Mapping[int, int | None]) -> Sign:
    """Return the sign for an agent that is done but has not reported the exit of a rank."""
    command = next(command for command in launch.commands if codes.get(command.rank) != 0)
    text = f"its agent is done and does not say how rank {command.rank} ended"
    return Sign(kind="lost", host=command.host, rank=None, time_s=0.0, text=text)


def _no_result(launch: Launch, attempt: Attempt, error: Exception) -> Sign:
    """Return the sign for a trial whose ranks all succeeded, but left no measurement.

    Its host is the one that sent the wrong file, if the error names a file.
    """
    rank, file = (error.rank, error.file) if isinstance(error, MissingRankError) else (0, None)
    before = [command for command in launch.commands if command.rank <= rank]
    running = max(before, key=lambda command: command.rank).host
    senders = [host for host, contents in attempt.files.items() if file in contents]
    host, text = (senders or [running])[-1], str(error)
    if host != running:
        text += f" ({host} sent it, and rank {rank} runs on {running})"
    exits = {event["rank"]: event["tail"] for event in attempt.events if event["kind"] == "exit"}
    tails = [exits.get(rank), *(exits[rank_of_exit] for rank_of_exit in sorted(exits))]
    lines = keep_last(next(filter(None, tails), ()))
    return Sign(kind="no-result", host=host, rank=rank, time_s=0.0, text=text, lines=lines)

"""From commands and hosts to an outcome: bounded in time, and nothing left behind."""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from amp_ray.errors import printable
from amp_ray.runtime.hosts.agents import Agents, Listener, Watch
from amp_ray.runtime.hosts.host import Host
from amp_ray.runtime.hosts.host_files import Contents
from amp_ray.runtime.hosts.link import AgentSettings
from amp_ray.runtime.launch.attempt import Attempt
from amp_ray.runtime.launch.trial_folder import TrialFolder
from amp_ray.trials.causes import Sign, failure, first_cause, keep_last
from amp_ray.trials.launch import FOLDER, Launch, WarmUp, slots_by_host
from amp_ray.trials.outcome import Outcome, Unreachable, without_secrets_in
from amp_ray.trials.result import AllFiles, MissingRankError, Reader, measured, read_result

_LOGGER = logging.getLogger(__name__)
# A port can be taken between asking for it and using it: one more try. A warm process can die; the
# second time ranks start afresh.
_NUM_ATTEMPTS: Final[dict[str, int]] = {"port": 2, "warm": 3}
_TOKEN_BYTES: Final = 4


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
        listener: Listener | None = None,
    ) -> None:
        """Take the hosts; nothing is opened yet. The listener gets every event of every rank."""
        self._settings = settings or AgentSettings()
        self.agents = Agents(hosts, self._settings, warm_up)
        self._watch = Watch() if listener is None else Watch(listener=listener)
        self._lock = threading.Lock()
        self._is_running = False
        self._told: set[str] = set()
        self._contents = Contents()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """End all agents and connections; quickly, if somebody wants to get away."""
        if kind is not None and not issubclass(kind, Exception):
            self._watch.interrupted.set()
        self.close()

    def run(self, launch: Launch, folder: Path, *, reader: Reader = read_result) -> Outcome:
        """Run a trial to its end.

        ``folder`` is made here; everything about the trial is written there. Returns the outcome.
        Whatever goes wrong on hosts is one, not an exception. Raises `FileExistsError` if there is
        such a folder. Raises `InterruptedTrialError` if ``interrupt`` was called; nothing runs any
        more then.
        """
        self.agents.check(launch.hosts, f"trial {launch.trial_id}")
        start = time.monotonic()
        record = TrialFolder(folder)
        record.write_launch(launch)
        with self._lock:
            self._is_running = True
            self._watch.interrupted.clear()
        try:
            outcome = self._outcome(launch, record, reader, start)
            outcome = without_secrets_in(outcome, launch.secrets)
        finally:
            self._is_running = False
            record.redact_files(launch.secrets)
        record.write_outcome(outcome)
        return outcome

    def interrupt(self) -> None:
        """End the trial that runs, cleanly on all hosts; from any thread.

        Returns at once; ``run`` raises when the hosts are clean. Does nothing where no trial runs.
        """
        with self._lock:
            if self._is_running:
                self._watch.interrupted.set()

    def close(self) -> None:
        """End all agents, wait until they have cleaned up, sweep once more, disconnect.

        After an interruption that is over within a few seconds, whatever hosts do: an agent that
        does not answer ends by its lease.
        """
        self.agents.close(in_haste=self._watch.interrupted.is_set())

    def _outcome(
        self, launch: Launch, record: TrialFolder, reader: Reader, start: float
    ) -> Outcome:
        """Try once, and again if it was not the trial that failed."""
        self._contents.take(launch.files)
        slots = slots_by_host(
            [(command.host, slot) for command in launch.commands for slot in command.all_slots]
        )
        number = 0
        while True:
            number += 1
            self._watch.check()
            errors = self.agents.open(slots, self._watch, study=launch.trial_id)
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
        """Wait for warm processes; where there can be none, ranks start afresh, and we say so."""
        for name, answer in self.agents.warm(names, self._watch).items():
            problem = printable(f"{name}: ranks start afresh: {answer['problem']}")
            if answer["problem"] and problem not in self._told:
                self._told.add(problem)
                _LOGGER.warning(problem)

    def _attempt(self, launch: Launch, record: TrialFolder) -> Attempt:
        """Run one attempt and write it down, also when it is interrupted."""
        token = secrets.token_hex(_TOKEN_BYTES)
        # A name for each host: several of them may be the same machine.
        folders = {
            host: f"amp-ray-{launch.trial_id}-{token}{number:02x}"
            for number, host in enumerate(launch.hosts)
        }
        agents = self.agents.links, self.agents.inbox
        files = self._contents, record.make_files(launch)
        attempt = Attempt(launch, folders, agents, self._settings, self._watch, files)
        try:
            attempt.run()
        except BaseException:
            self.agents.abandon(folders)
            raise
        finally:
            for host_files in attempt.files.values():
                host_files.close()
            record.write_events(attempt.events, launch.secrets)
            if len(attempt.prepared) == len(launch.hosts):
                ranks = [attempt.describe(command, folder=FOLDER) for command in launch.commands]
                record.write_rerun(launch, ranks)
        given_up = attempt.lost | set(attempt.surviving)
        self.agents.give_up({host: folders[host] for host in given_up})
        return attempt

    def _judge(self, launch: Launch, attempt: Attempt, reader: Reader, start: float) -> Outcome:
        """Turn what an attempt saw into the outcome."""
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
    """Say that an agent was done and did not tell how a rank has ended."""
    command = next(command for command in launch.commands if codes.get(command.rank) != 0)
    text = f"its agent is done and does not say how rank {command.rank} ended"
    return Sign(kind="lost", host=command.host, rank=None, time_s=0.0, text=text)


def _no_result(launch: Launch, attempt: Attempt, error: Exception) -> Sign:
    """Say that every rank ended well and nothing was measured, with the last lines there are."""
    rank = error.rank if isinstance(error, MissingRankError) else 0
    hosts = [command.host for command in launch.commands if command.rank <= rank]
    exits = {event["rank"]: event["tail"] for event in attempt.events if event["kind"] == "exit"}
    tails = [exits.get(rank), *(exits[rank_of_exit] for rank_of_exit in sorted(exits))]
    lines = keep_last(next(filter(None, tails), ()))
    return Sign(
        kind="no-result", host=hosts[-1], rank=rank, time_s=0.0, text=str(error), lines=lines
    )

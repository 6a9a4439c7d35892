"""One folder per trial, with everything to read it and to run it again by hand."""

import json
import shlex
import shutil
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from amp_ray.errors import printable
from amp_ray.runtime.hosts.agent.job import FOLDER_VARIABLE
from amp_ray.runtime.hosts.host_files import HostFiles
from amp_ray.trials.launch import FOLDER, Launch, RankCommand, is_secret, without_secrets
from amp_ray.trials.outcome import Outcome, outcome_to_json

_RERUN_HEAD: Final = """#!/bin/sh
# Trial {trial_id} by hand: copy files/ to every host, set FOLDER to where it is there, and start
# each command below on its host, all at the same time. Address and port are those of the last run.
"""


class TrialFolder:
    """The folder of one trial on this machine.

    ========================  =======================================================
    ``launch.json``           commands, environment, limits, as asked for
    ``files/``                the files that every host got
    ``rerun.sh``              each rank's command, ready to copy
    ``events.jsonl``          what the agents said, in order
    ``hosts/NAME/``           the files that came back, logs of the ranks among them
    ``outcome.json``          what came of it; written last
    ========================  =======================================================
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)

    def write_launch(self, launch: Launch) -> None:
        """Write what is about to be started."""
        record = {
            "trial_id": launch.trial_id,
            "timeout_s": launch.timeout_s,
            "cwd": launch.cwd,
            "collect": list(launch.collect),
            "environment": without_secrets(launch.environment),
            "commands": [
                {
                    "rank": command.rank,
                    "host": command.host,
                    "slots": list(command.all_slots),
                    "argv": list(command.argv),
                    "environment": without_secrets(command.environment),
                }
                for command in launch.commands
            ],
        }
        self._write_json("launch.json", record)
        for name, data in launch.files.items():
            path = self.path / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def write_rerun(self, launch: Launch, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Write the commands as they were really started.

        ``ranks`` has ``argv`` and ``environment`` per rank, filled in but for the folder,
        which is gone by then.
        """
        lines = [_RERUN_HEAD.format(trial_id=launch.trial_id)]
        where = _word(FOLDER if launch.cwd is None else launch.cwd)
        for command, rank in zip(launch.commands, ranks, strict=True):
            environment = {**rank["environment"], FOLDER_VARIABLE: FOLDER}
            variables = [_variable(key, text) for key, text in sorted(environment.items())]
            words = " ".join(["env", *variables, *map(_word, rank["argv"])])
            lines.append(f"# {_ranks(command)} on {printable(command.host)}, {_slots(command)}")
            lines.append(f"cd {where} && {words}\n")
        (self.path / "rerun.sh").write_text("\n".join(lines), encoding="utf-8")

    def write_events(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Append what the agents of one attempt said."""
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def make_files(self, launch: Launch) -> dict[str, HostFiles]:
        """Make a folder per host for what comes back; a retry's files replace those before."""
        folder = self.path / "hosts"
        if folder.exists():
            shutil.rmtree(folder)
        return {
            host: HostFiles(
                folder / _folder_name(host),
                launch.collect,
                [command.rank for command in launch.commands if command.host == host],
            )
            for host in launch.hosts
        }

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the end; afterwards the folder changes no more."""
        self._write_json("outcome.json", outcome_to_json(outcome))

    def _write_json(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a file whole or not at all."""
        partial = self.path / f"{name}.part"
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path / name)


def _variable(name: str, text: str) -> str:
    """Return what sets a variable; a secret one has to be set before, and the shell says so."""
    if is_secret(name):
        return f'{name}="${{{name}:?set it before: its value was not kept}}"'
    return _word(f"{name}={text}")


def _folder_name(host: str) -> str:
    """Return a host's name as that of a folder: no two hosts share one, none leads elsewhere."""
    name = urllib.parse.quote(host, safe="@:[]")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def _word(text: str) -> str:
    """Quote a word for a shell, all but the place of the trial's folder."""
    parts = [shlex.quote(part) if part else "" for part in text.split(FOLDER)]
    return '"$FOLDER"'.join(parts) or "''"


def _ranks(command: RankCommand) -> str:
    last = command.rank + len(command.all_slots) - 1
    return f"rank {command.rank}" if last == command.rank else f"ranks {command.rank} to {last}"


def _slots(command: RankCommand) -> str:
    word = "slot" if len(command.all_slots) == 1 else "slots"
    return f"{word} {', '.join(map(str, command.all_slots))}"

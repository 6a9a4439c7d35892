#!/usr/bin/env python
"""Run one command on every host of a hostfile over SSH, all at the same time.

The command is everything after the options; no shell touches its words, here or there:

    python cluster/on_every_node.py --hostfile hostfile nvidia-smi -L

Every line of output comes with its host in front, and the end says how each host fared. The exit
code is 0 if the command ended with 0 everywhere, 2 for bad input, else 1.
"""

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from amp_ray.cli.exits import SUCCESS, run_command
from amp_ray.errors import HostError
from amp_ray.inputs.experiment import SshSettings
from amp_ray.inputs.hostfile import parse_hostfile
from amp_ray.runtime.files import read_text
from amp_ray.runtime.hosts.ssh import SshHost

_FAILURE: Final = 1
DEFAULT_TIMEOUT_S: Final = 600.0
KILL_AFTER_S: Final = 5
"""From the polite signal to the other one."""
GRACE_S: Final = 15.0
"""What the connection may take beyond the command's own time limit."""
TIMED_OUT: Final = 124
"""Exit code of coreutils' timeout for a command that it had to end."""
MAX_PARALLEL: Final = 64
"""Connections at the same time; every one is a thread here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of the command on one host.

    Args:
        host: As the hostfile calls it.
        exit_code: None where it could not be learnt.
        output: Standard output and error, as they came.
        reason: Why there is no exit code.
    """

    host: str
    exit_code: int | None
    output: str = ""
    reason: str = ""


def bounded(argv: Sequence[str], timeout_s: float) -> list[str]:
    """Wrap a command so that it ends in time over there, with one stream of output."""
    limit = ["timeout", f"--kill-after={KILL_AFTER_S}", f"{timeout_s:g}"]
    return [*limit, "sh", "-c", 'exec "$@" 2>&1', "sh", *argv]


def ask(host: SshHost, argv: Sequence[str], timeout_s: float) -> Answer:
    """Run the command on one host."""
    try:
        done = host.run(bounded(argv, timeout_s), timeout_s=timeout_s + KILL_AFTER_S + GRACE_S)
    except HostError as error:
        return Answer(host=host.name, exit_code=None, reason=str(error))
    finally:
        host.close()
    return Answer(host=host.name, exit_code=done.returncode, output=done.stdout + done.stderr)


def verdict(answer: Answer, timeout_s: float) -> str:
    """Say in a few words how a host fared."""
    match answer.exit_code:
        case None:
            return f"no exit code: {answer.reason}"
        case code if code == TIMED_OUT:
            return f"exit code {TIMED_OUT}, as after the time limit of {timeout_s:g} s"
        case code:
            return f"exit code {code}"


def show(answer: Answer) -> None:
    """Print a host's output, every line with the host in front."""
    for line in answer.output.splitlines():
        click.echo(f"{answer.host}: {line}")


@click.command(help=__doc__.partition("\n")[0], context_settings={"allow_interspersed_args": False})
@click.option(
    "--hostfile", type=click.Path(path_type=Path), default=Path("hostfile"), show_default=True
)
@click.option("--identity", "identities", multiple=True, help="Private key file; may be repeated.")
@click.option("--user", help="For hosts that the hostfile names without one.")
@click.option("--known-hosts", default=SshSettings().known_hosts, show_default=True)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="After which the command is ended, on every host by itself.",
)
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def on_every_node(
    *,
    hostfile: Path,
    identities: tuple[str, ...],
    user: str | None,
    known_hosts: str,
    timeout_s: float,
    argv: tuple[str, ...],
) -> int:
    """Run the command everywhere and return the exit code of it all."""
    entries = parse_hostfile(read_text(hostfile), file=str(hostfile))
    given = {"known_hosts": known_hosts, "identities": identities, "user": user}
    settings = SshSettings().model_copy(update=given)
    hosts = [SshHost(entry.host, settings) for entry in entries]
    with concurrent.futures.ThreadPoolExecutor(min(len(hosts), MAX_PARALLEL)) as pool:
        running = [pool.submit(ask, host, argv, timeout_s) for host in hosts]
        for future in concurrent.futures.as_completed(running):
            show(future.result())
    answers = [future.result() for future in running]
    for answer in answers:
        click.echo(f"{answer.host}: {verdict(answer, timeout_s)}", err=True)
    return SUCCESS if all(answer.exit_code == 0 for answer in answers) else _FAILURE


if __name__ == "__main__":
    run_command(on_every_node)

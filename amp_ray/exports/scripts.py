"""Shell scripts. All quoting is done here, so that no input becomes shell code."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from amp_ray.clusters.device import is_cpu
from amp_ray.errors import printable
from amp_ray.exports.chosen import Chosen, Program
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.hostfile import parse_target
from amp_ray.redaction import NOT_KEPT, without_secrets
from amp_ray.trials.launch import Place, placement, slots_by_host

END: Final = " \\\n  "  # between two lines of a command
MORE: Final = '"$@"'  # further flags from the user
PORT: Final = 29500  # torch's own default

_LOOPBACK: Final = "127.0.0.1"

_ADDRESS: Final = """\
MASTER_ADDR="${MASTER_ADDR:-${HOSTS[0]}}"
if command -v getent >/dev/null && ! getent ahosts "$MASTER_ADDR" >/dev/null; then
  echo "no host is known here as $MASTER_ADDR: set MASTER_ADDR to the first host's address, or" >&2
  echo "export again with --hostfile FILE, which names your hosts" >&2
  exit 2
fi
"""
"""Checks the first host's name, since launchers report a wrong one only at their time limits."""


def comment(text: str) -> str:
    """Return a text as comment lines; control characters become visible."""
    return "".join(f"# {line}\n" for line in printable(text).replace("\r", " ").split("\n"))


def python_comment(text: str) -> str:
    """Return the first lines of a Python file: a fixed encoding, then ``text`` as comments."""
    return f"# -*- coding: utf-8 -*-\n{comment(text)}"


def command(words: Iterable[str], *, tail: str = "") -> str:
    r"""Return a quoted command, with each flag and its value on one line.

    ``tail`` is appended unquoted.

    Example:
        >>> print(command(["run", "it", "--size", "2", "--name", "a b"]))
        run it \
          --size 2 \
          --name 'a b'
    """
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(shlex.quote(word))
    texts = [" ".join(line) for line in lines if line] + ([tail] if tail else [])
    return END.join(texts)


def exports(chosen: Chosen, variables: Mapping[str, str]) -> str:
    """Return a line that sets variables, and the order of devices where it matters.

    The names of variables were checked when the file was read.
    """
    every = {**device_order(chosen), **variables}
    words = [f"{name}={shlex.quote(value)}" for name, value in every.items()]
    return f"export {' '.join(words)}\n" if words else ""


def without_secret_variables(
    variables: Mapping[str, str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return variables without likely secrets, and a note that names those left out."""
    kept = without_secrets(variables)
    secret = [name for name, text in kept.items() if NOT_KEPT in text]
    note = (f"not written, since it looks secret: {', '.join(secret)}",) if secret else ()
    return {name: variables[name] for name in variables if name not in secret}, note


def array(name: str, words: Iterable[str]) -> str:
    """Return a line that sets an array variable."""
    return f"{name}=({' '.join(map(shlex.quote, words))})\n"


def master_address(hosts: Iterable[str]) -> str:
    """Return lines that set MASTER_ADDR to the first host; the script ends if that fails."""
    return array("HOSTS", hosts) + _ADDRESS


def words_by_line(words: Iterable[str]) -> str:
    """Return quoted words, one per line, then the user's arguments."""
    return END.join((*map(shlex.quote, words), MORE))


def reached(experiment: Experiment, *, by_scheduler: bool = False) -> tuple[Experiment, list[str]]:
    """Return the experiment for launches on its nodes, and the address of every node.

    If trials run on this machine and no hostfile names other hosts, all addresses are this
    machine's, unless a scheduler chooses the hosts.

    Raises:
        ValueError: If two nodes have the same address.
    """
    names, trials = experiment.cluster.host_names, experiment.trials
    if trials.backend == "local" and not experiment.names_hosts and not by_scheduler:
        return experiment, [_LOOPBACK] * len(names)
    hosts = [parse_target(name).host for name in names]
    if len(set(hosts)) < len(hosts):
        message = f"two nodes have one address ({', '.join(hosts)}): name each host of its own"
        raise ValueError(message)
    return replace(experiment, trials=replace(trials, backend="ssh")), hosts


def places_of(chosen: Chosen, *, by_scheduler: bool = False) -> tuple[Place, ...]:
    """Return address and slot of every rank."""
    experiment, hosts = reached(chosen.experiment, by_scheduler=by_scheduler)
    return placement(experiment, chosen.strategy, hosts)


def device_order(chosen: Chosen) -> dict[str, str]:
    """Return the variable by which CUDA numbers boards of several kinds in a host as slots are.

    By default CUDA begins with the fastest boards.
    """
    is_mixed = any(len(nodes) > 1 for nodes in chosen.experiment.cluster.machines)
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if is_mixed else {}


def runs_on_cpu(chosen: Chosen) -> bool:
    """Return whether all devices of the experiment are CPUs."""
    return all(is_cpu(kind.name) for kind in chosen.experiment.cluster.device_types)


def check_host_by_host(places: Sequence[Place], launcher: str) -> None:
    """Refuse a placement in which the ranks of a host are not consecutive.

    Raises:
        ValueError: If ranks of a host are not consecutive; the message names the host.
    """
    expected = [host for host, slots in slots_by_host(places).items() for _ in slots]
    for rank, ((host, _), usual) in enumerate(zip(places, expected, strict=True)):
        if host != usual:
            raise ValueError(
                f"{launcher} numbers ranks host by host; rank {rank} here is on {host}, "
                f"between ranks of {usual}: choose a strategy of search.space uniform"
            )


def check_ascending(
    hosts: Mapping[str, Sequence[int]], launcher: str, *, from_zero: bool = False
) -> None:
    """Refuse slots of a host in an order that the launcher would not keep."""
    for host, slots in hosts.items():
        expected = list(range(len(slots))) if from_zero else sorted(slots)
        if list(slots) != expected:
            message = f"{launcher} takes slots {expected} of {host} in turn, not {list(slots)}"
            raise ValueError(message)


def host_notes(chosen: Chosen, program: str) -> tuple[str, ...]:
    """Describe the order of hosts and slots, for a program without such a setting.

    Returns:
        Notes; empty if ranks use the devices in listed order.

    Raises:
        ValueError: If ranks of a host are not consecutive.
    """
    places = places_of(chosen)
    check_host_by_host(places, program)
    notes = [f"set {name}={value} on every host" for name, value in device_order(chosen).items()]
    if chosen.strategy.placement != tuple(range(chosen.experiment.cluster.num_devices)):
        hosts = slots_by_host(places).items()
        order = ", ".join(f"{host} (slots {', '.join(map(str, slots))})" for host, slots in hosts)
        notes.append(f"start hosts in this order, on these slots: {order}")
    return tuple(notes)


def header(chosen: Chosen, *lines: str) -> str:
    """Return the head of a script: a comment on its origin, and a stop at the first error."""
    text = "\n".join((chosen.title, *lines))
    return f"#!/usr/bin/env bash\n{comment(text)}set -euo pipefail\n"


def torchrun_script(chosen: Chosen, program: Program, name: str, *lines: str) -> str:
    """Return a script that starts a program with ``torchrun``: once per node, with NODE_RANK.

    Args:
        chosen: The strategy, with its hosts.
        program: The program, in the folder where the script is started.
        name: Usual name of the script.
        lines: Comments for the head of the script.

    Raises:
        ValueError: If ranks of a host are not consecutive.
    """
    places = places_of(chosen)
    check_host_by_host(places, "torchrun")
    hosts = slots_by_host(places)
    sizes = array("RANKS", (str(len(slots)) for slots in hosts.values()))
    devices = array("DEVICES", (",".join(map(str, slots)) for slots in hosts.values()))
    visible = "" if runs_on_cpu(chosen) else 'export CUDA_VISIBLE_DEVICES="${DEVICES[$node]}"\n'
    return (
        header(chosen, *lines, f"On host i: NODE_RANK=i bash {chosen.file_word(name)} [more flags]")
        + exports(chosen, program.variables)
        + f"{master_address(hosts)}{sizes}{devices}node=${{NODE_RANK:-0}}\n"
        + visible
        + 'exec torchrun --nnodes "${#HOSTS[@]}" --node-rank "$node" \\\n'
        '  --nproc-per-node "${RANKS[$node]}" \\\n'
        '  --master-addr "$MASTER_ADDR" '
        f'--master-port "${{MASTER_PORT:-{PORT}}}" \\\n'
        + f"  {command(program.words, tail=MORE)}\n"
    )

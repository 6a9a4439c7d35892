"""Launch of a trial: the commands that run its ranks, and the files that it needs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from amp_ray.errors import InputError
from amp_ray.inputs.experiment import Experiment
from amp_ray.redaction import secrets_of
from amp_ray.strategies.strategy import Strategy

# Placeholders in arguments and variables; the agent on each host fills them in
FOLDER: Final = "@AMP_RAY_FOLDER@"
MASTER_ADDRESS: Final = "@AMP_RAY_MASTER_ADDRESS@"
MASTER_PORT: Final = "@AMP_RAY_MASTER_PORT@"

RESULT_FILE: Final = "result.json"  # written on rank 0's host; required for a measurement


TIMELINE_FILE: Final = "timeline.json"  # all ranks' instructions in the last step


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCommand:
    """One process to start: a single rank, or a launcher of several ranks of its host."""

    rank: int  # global rank; for several (consecutive) ranks, the lowest
    host: str  # name of the host that it runs on
    slot: int
    argv: tuple[str, ...]  # program and arguments, not passed through a shell
    environment: Mapping[str, str]
    slots: tuple[int, ...] = ()  # devices of its ranks, in rank order; empty for a single rank

    @property
    def all_slots(self) -> tuple[int, ...]:
        """Device index of each rank that the command starts, in rank order."""
        return self.slots or (self.slot,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One trial, ready to start."""

    trial_id: str  # unique; names the trial's folder and must appear in its result
    commands: tuple[RankCommand, ...]  # in the order of their ranks, rank 0 first
    files: Mapping[str, bytes]  # content by path in the trial's folder, on every host
    environment: Mapping[str, str]
    cwd: str | None = None  # working directory on every host; None for the trial's folder
    timeout_s: float = 600.0
    # Patterns of file names; files that match one are fetched from every host
    collect: tuple[str, ...] = (RESULT_FILE, "rank-*.log")
    words: tuple[str, ...] = ()  # log lines that contain one of these are always fetched
    # Whether output lines may be events: JSON objects with ``event`` first and the tag from the
    # environment. Only our own programs send them
    sends_events: bool = True

    def __post_init__(self) -> None:
        _check_id(self.trial_id)
        _check_commands(self.commands)
        for name in self.files:
            parts = name.split("/")
            if not all(parts) or ".." in parts:
                message = f"a file's name must be relative and stay in the folder, found {name!r}"
                raise ValueError(message)
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, found {self.timeout_s}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts in the order of their lowest ranks."""
        return tuple(dict.fromkeys(command.host for command in self.commands))

    @property
    def secrets(self) -> frozenset[str]:
        """Secret values of its variables and arguments."""
        secrets = secrets_of(self.environment, ())
        return secrets.union(
            *(secrets_of(command.environment, command.argv) for command in self.commands)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The warm process of each host, which imports modules once and forks the ranks."""

    python: str  # interpreter; must equal the first argument of the trials' commands
    modules: tuple[str, ...]  # ``module``, or ``module:function`` to also call the function
    # Environment of the imports; ``FOLDER`` in it stands for a folder of this process
    environment: Mapping[str, str] = field(default_factory=dict)


def _check_id(trial_id: str) -> None:
    plain = trial_id.replace("-", "").replace("_", "").replace(".", "")
    if not (plain.isascii() and plain.isalnum()) or trial_id.startswith((".", "-")):
        raise ValueError(f"trial_id may have letters, digits, '-', '_' and '.', found {trial_id!r}")


def _check_commands(commands: Sequence[RankCommand]) -> None:
    """Refuse commands that skip a rank, or that put two ranks on one device."""
    firsts = [command.rank for command in commands]
    expected, in_order = 0, bool(firsts)
    for command in commands:
        in_order = in_order and command.rank == expected and command.slot == command.all_slots[0]
        expected += len(command.all_slots)
    if not in_order:
        message = f"commands must be those of rank 0, 1, 2, ..., found ranks {firsts}"
        if any(command.slots for command in commands):
            message += f" for slots {[list(command.all_slots) for command in commands]}"
        raise ValueError(message)
    places = Counter((command.host, slot) for command in commands for slot in command.all_slots)
    twice = [place for place, number in places.items() if number > 1]
    if twice:
        raise ValueError(f"each slot can take one rank, found {twice} used twice")


def slots_by_host(placement: Sequence[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    """Return each host's slots; hosts and slots are in the order of the ranks.

    Example:
        >>> slots_by_host([("b", 1), ("a", 0), ("b", 0)])
        {'b': (1, 0), 'a': (0,)}
    """
    slots_of: dict[str, list[int]] = {}
    for host, slot in placement:
        slots_of.setdefault(host, []).append(slot)
    return {host: tuple(slots) for host, slots in slots_of.items()}


def node_commands(
    argv_of_node: Callable[[int], Sequence[str]], placement: Sequence[tuple[str, int]]
) -> tuple[RankCommand, ...]:
    """Return one command per host, which starts all ranks of the host.

    Such a command numbers ranks host by host, regardless of the placement's order; hosts come in
    the order of their lowest ranks. The environment has two numbers of ranks: of the host, and of
    the trial.

    Example:
        >>> [c.rank for c in node_commands(lambda _: ["true"], [("a", 0), ("b", 0), ("a", 1)])]
        [0, 2]
    """
    hosts = slots_by_host(placement)
    commands: list[RankCommand] = []
    rank = 0
    for node, (host, slots) in enumerate(hosts.items()):
        place = {"NODE_RANK": str(node), "NUM_NODES": str(len(hosts))}
        command = RankCommand(
            rank=rank,
            host=host,
            slot=slots[0],
            argv=tuple(argv_of_node(node)),
            environment=place | _variables(len(placement), len(slots)),
            slots=slots,
        )
        commands.append(command)
        rank += len(slots)
    return tuple(commands)


def rank_commands(
    argv: Sequence[str], placement: Sequence[tuple[str, int]]
) -> tuple[RankCommand, ...]:
    """Return one command per rank, with torch's environment variables for ranks.

    ``LOCAL_RANK`` numbers a host's ranks in rank order.

    Example:
        >>> [c.environment["LOCAL_RANK"] for c in rank_commands(["true"], [("a", 1), ("a", 0)])]
        ['0', '1']
    """
    local_sizes = Counter(host for host, _ in placement)
    counters = {host: count() for host in local_sizes}
    return tuple(
        RankCommand(
            rank=rank,
            host=host,
            slot=slot,
            argv=tuple(argv),
            environment={"RANK": str(rank), "LOCAL_RANK": str(next(counters[host]))}
            | _variables(len(placement), local_sizes[host]),
        )
        for rank, (host, slot) in enumerate(placement)
    )


def _variables(world_size: int, local_size: int) -> dict[str, str]:
    """Return the variables that the launchers of torch and DeepSpeed set for all processes."""
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": MASTER_ADDRESS,
        "MASTER_PORT": MASTER_PORT,
    }


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders of this module by their values.

    Example:
        >>> fill_in("@AMP_RAY_FOLDER@/job.json", {FOLDER: "/run/x"})
        '/run/x/job.json'
    """
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


Place = tuple[str, int]  # host and slot


def placement(
    experiment: Experiment, strategy: Strategy, hosts: Sequence[str]
) -> tuple[Place, ...]:
    """Return each rank's host and slot; if all groups are this machine, their slots differ."""
    cluster, groups = experiment.cluster, experiment.host_groups
    if len(hosts) != len(cluster.host_names):
        raise InputError(
            f"the cluster has {len(cluster.host_names)} hosts, found {len(hosts)} to play them: "
            f"{', '.join(hosts)}"
        )
    group = groups.index(tuple(hosts)) if tuple(hosts) in groups else 0
    is_local = experiment.trials.backend == "local"
    return tuple(
        (
            hosts[cluster.host_of_device[device]],
            group * cluster.num_devices + device if is_local else cluster.places[device][1],
        )
        for device in strategy.placement
    )


def hostfile_text(places: Sequence[Place]) -> str:
    r"""Return the text of a hostfile: each host with its number of ranks.

    Example:
        >>> hostfile_text([("b", 1), ("a", 0), ("b", 0)])
        'b slots=2\na slots=1\n'
    """
    return "".join(f"{host} slots={len(slots)}\n" for host, slots in slots_by_host(places).items())

"""DeepSpeed's own launcher, once per host: it starts all ranks of its host."""

import base64
import json
from collections.abc import Sequence
from typing import Final

from amp_ray.trials.launch import (
    MASTER_ADDRESS,
    MASTER_PORT,
    RankCommand,
    node_commands,
    slots_by_host,
)
from amp_ray.trials.placement import Place

LAUNCHER_MODULE: Final = "deepspeed.launcher.launch"


def deepspeed_commands(
    program: Sequence[str], placement: Sequence[Place]
) -> tuple[RankCommand, ...]:
    """Start a module with DeepSpeed's launcher, once per host.

    Returns:
        One command per host. Ranks are numbered as ``launch_order`` says, not as the placement.
    """
    python, *rest = program
    world = {host: list(slots) for host, slots in slots_by_host(placement).items()}
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()

    def argv(node: int) -> list[str]:
        return [
            *(python, "-u", "-m", LAUNCHER_MODULE, "--quiet", "--module", "--no_local_rank"),
            *(f"--world_info={info}", f"--node_rank={node}"),
            *(f"--master_addr={MASTER_ADDRESS}", f"--master_port={MASTER_PORT}"),
            *rest,
        ]

    return node_commands(argv, placement)


def launch_order(placement: Sequence[Place]) -> tuple[Place, ...]:
    """Return the place of every process in the order of DeepSpeed's ``RANK``.

    Hosts come in the order of the placement, and processes of a host after each other. Of a
    host's ``n`` devices the process of rank ``r`` takes number ``r mod n``.

    Example:
        >>> launch_order([("b", 0), ("a", 0), ("a", 1)])
        (('b', 0), ('a', 1), ('a', 0))
    """
    order: list[Place] = []
    for host, slots in slots_by_host(placement).items():
        first = len(order)
        order += [(host, slots[rank % len(slots)]) for rank in range(first, first + len(slots))]
    return tuple(order)

"""Reports of healthy hosts, and changes to them, for tests of the doctor's checks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from amp_ray.clusters.device import find_device
from amp_ray.trials.doctor.findings import HostReport, HostSpec
from amp_ray.units import GIB

ADDRESS: Final = "192.0.2.7"
"""An address that is reserved for documentation (RFC 5737)."""


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return an idle T4 as a probe describes it."""
    figures = {"memory_bytes": 15 * GIB, "used_bytes": 0, "power_limit_w": 70.0}
    return {"index": index, "uuid": f"GPU-{index}", "name": "Tesla T4", **figures, **changes}


def healthy_parts(num_gpus: int = 0) -> dict[str, dict[str, Any]]:
    """Return the parts of a probe's answer on a healthy host."""
    return {
        "identity": {"uid": 1000, "user": "ada"},
        "disk": {"path": "/scratch", "free_bytes": 9 * GIB, "problem": None},
        "shared_memory": {"free_bytes": 8 * GIB},
        "gpus": {
            "gpus": [gpu(index) for index in range(num_gpus)],
            "processes": [],
            "visible": None,
            "problem": None if num_gpus else "nvidia-smi is not there",
        },
        "address": {"address": ADDRESS, "interface": "eth0", "port": 20001, "problem": None},
        "software": {
            "kind": "software",
            "executable": "/usr/bin/python3",
            "version": "3.11.7",
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "cuda": "12.6" if num_gpus else None,
            "nccl": "2.27.3" if num_gpus else None,
            "problem": None,
        },
    }


def healthy_report(
    name: str = "a",
    *,
    device: str = "cpu",
    num_slots: int = 2,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,  # noqa: ANN401 - fields of HostReport
) -> HostReport:
    """Return the report of a healthy host, with some changes.

    Args:
        name: Name of the host.
        device: Device in every slot.
        num_slots: Number of slots.
        changes: New values by part and name; a part with only ``problem`` is replaced as a whole.
        more: Further fields of the report.
    """
    parts = healthy_parts(0 if device == "cpu" else num_slots)
    for entry in parts["gpus"]["gpus"]:
        entry["uuid"] = f"GPU-{name}-{entry['index']}"
    for part, values in (changes or {}).items():
        only_problem = values.keys() == {"problem"} and part != "disk"
        parts[part] = dict(values) if only_problem else {**parts[part], **values}
    devices = (find_device(device),) * num_slots
    spec = HostSpec(name=name, devices=devices, login=("ssh", f"ada@{name}"))
    answer = {"kind": "facts", "version": "3.11.7", "executable": "/usr/bin/python3", **parts}
    report = HostReport(spec=spec, answer=answer, num_peers=1)
    return replace(report, **more)

"""Checks of GPUs: one per slot, of the planned device type, and not in use."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from amp_ray.clusters.device import CATALOGUE
from amp_ray.trials.doctor.findings import Finding, HostReport, Level
from amp_ray.units import GIB, MIB

CONTEXT_BYTES: Final = 64 * MIB  # smaller than any CUDA context; a display server uses less
USED_FRACTION: Final = 0.05  # share of a GPU's memory; drivers reserve less
Gpu = Mapping[str, Any]


def check_devices(report: HostReport) -> Iterator[Finding]:
    """Check the GPUs of a host for which the experiment expects GPUs."""
    if not report.spec.has_gpu:
        return
    facts, spec = report.part("gpus"), report.spec
    expected = f"{spec.num_slots} x {spec.device.name}"
    if facts["problem"] is not None:
        yield report.error(
            "devices",
            facts["problem"],
            expected=expected,
            command=report.command(["nvidia-smi"]),
            advice="install or restart the driver there until nvidia-smi lists the GPUs, or plan "
            "for device cpu",
        )
        return
    gpus = visible_gpus(facts)
    yield _check_count(report, len(gpus), expected)
    used = gpus[: spec.num_slots]
    if used:
        yield _check_kind(report, used)
        yield _check_memory(report, used)
        yield _check_use(report, used)


def visible_gpus(facts: Mapping[str, Any]) -> list[Gpu]:
    """Return the GPUs in the order of the slots; a login may have access to only a few of them."""
    gpus: list[Gpu] = sorted(facts.get("gpus", ()), key=lambda gpu: int(gpu["index"]))
    names = [name.strip() for name in (facts.get("visible") or "").split(",") if name.strip()]
    if not names:
        return gpus
    named = (next((gpu for gpu in gpus if _is_named(gpu, name)), None) for name in names)
    return [gpu for gpu in named if gpu is not None]


def resembles(planned: str, driver_name: str) -> bool:
    """Return whether a driver's name for a GPU means the catalogue's device ``planned``.

    Example:
        >>> resembles("A100-40", "NVIDIA A100-SXM4-40GB"), resembles("A10", "NVIDIA A100-SXM4-40GB")
        (True, False)
        >>> resembles("RTX3090", "NVIDIA GeForce RTX 3090"), resembles("H200", "NVIDIA GH200 480GB")
        (True, False)
    """
    series = planned.partition("-")[0]
    parts = re.findall(r"[A-Za-z]+|\d+", series)
    shape = r"[\s-]?".join(map(re.escape, parts))
    return (
        re.search(rf"(?<![A-Za-z0-9]){shape}(?![A-Za-z0-9])", driver_name, re.IGNORECASE)
        is not None
    )


def _is_named(gpu: Gpu, name: str) -> bool:
    return name == str(gpu["index"]) or (name.startswith("GPU-") and gpu["uuid"].startswith(name))


def _check_count(report: HostReport, count: int, expected: str) -> Finding:
    num_slots = report.spec.num_slots
    if count == num_slots:
        return report.ok("devices", f"{count} GPUs")
    level: Level = "error" if count < num_slots else "warning"
    advice = f"write slots={count} in the hostfile and in cluster.nodes"
    if level == "warning":
        advice = f"trials use the first {num_slots}; to use all, {advice}"
    return report.finding(
        level,
        "devices",
        f"{count} GPUs",
        expected=expected,
        command=report.command(["nvidia-smi", "-L"]),
        advice=advice,
    )


def _check_kind(report: HostReport, gpus: Sequence[Gpu]) -> Finding:
    """Compare the driver's names with the planned device; one outside the catalogue fits all."""
    spec = report.spec
    names = sorted({str(gpu["name"]) for gpu in gpus})
    any_name = spec.device.name not in CATALOGUE
    if len(names) == 1 and (any_name or resembles(spec.device.name, names[0])):
        return report.ok("device type", names[0])
    return report.warning(
        "device type",
        ", ".join(names),
        expected=f"{spec.device.name} in every slot",
        advice="name the device that is there in cluster.nodes: predictions are for that one",
    )


def _check_memory(report: HostReport, gpus: Sequence[Gpu]) -> Finding:
    """Compare the smallest GPU's memory with the memory that the plan assumes."""
    planned = report.spec.device.memory_bytes
    sizes = [gpu["memory_bytes"] for gpu in gpus if gpu["memory_bytes"] is not None]
    if not sizes:
        return report.ok("device memory", "the driver does not tell")
    smallest = min(sizes)
    if smallest >= planned:
        return report.ok("device memory", f"{smallest / GIB:.1f} GiB")
    return report.error(
        "device memory",
        f"{smallest / GIB:.1f} GiB",
        expected=f"{planned / GIB:.1f} GiB",
        advice=f"set memory_gib: {smallest / GIB:.2f} or less in cluster.nodes; trials would run "
        "out of memory",
    )


def _check_use(report: HostReport, gpus: Sequence[Gpu]) -> Finding:
    """Check that the GPUs run no process and have no memory in use."""
    uuids = {gpu["uuid"] for gpu in gpus}
    processes = [entry for entry in report.part("gpus")["processes"] if entry["uuid"] in uuids]
    if processes:
        return _busy(report, processes)
    full = [
        gpu
        for gpu in gpus
        if gpu["memory_bytes"]
        and gpu["used_bytes"]
        and gpu["used_bytes"] > USED_FRACTION * gpu["memory_bytes"]
    ]
    if not full:
        return report.ok("device use", "nothing runs")
    used = ", ".join(f"GPU {gpu['index']}: {gpu['used_bytes'] / GIB:.1f} GiB" for gpu in full)
    return report.warning(
        "device use",
        f"{used} in use, by no process that is listed",
        expected="free GPUs",
        command=report.command(["nvidia-smi"]),
        advice="a process of another container or user may hold it",
    )


def _busy(report: HostReport, processes: Sequence[Mapping[str, Any]]) -> Finding:
    sizes = [entry["memory_bytes"] for entry in processes]
    harmless = all(size is not None and size < CONTEXT_BYTES for size in sizes)
    names = ", ".join(
        f"{entry['name']} (pid {entry['pid']}"
        + (f", {entry['memory_bytes'] / GIB:.1f} GiB)" if entry["memory_bytes"] else ")")
        for entry in processes
    )
    pids = sorted({str(entry["pid"]) for entry in processes if entry["pid"]}, key=int)
    return report.finding(
        "warning" if harmless else "error",
        "device use",
        names,
        expected="nothing else on the GPUs of trials",
        command=report.command(["kill", *pids]) if pids else None,
        advice="wait for it; or end it, if it is yours",
    )

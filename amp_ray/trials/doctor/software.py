"""Checks of interpreters and packages: installed, recent enough, equal on all hosts."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.trials.doctor.findings import Finding, HostReport, HostSpec, Level, shell_command

TRAINING_PYTHON: Final = (3, 11)  # minimum for the training program, as for the whole package
MIN_TORCH: Final = (2, 6)  # oldest version that the training program supports
TESTED_DEEPSPEED: Final = "0.19.8"  # the training program is written for its pipeline engine

_PYTHONS: Final = (
    "ls -d /usr/bin/python3* /usr/local/bin/python3* /opt/*/bin/python3 ~/*/bin/python3 "
    "2>/dev/null; true"
)
"""Usual paths of Python interpreters, as shell patterns."""

_AGREE: Final = ("Python", "torch", "CUDA", "NCCL", "deepspeed")
Versions = Mapping[str, str]
"""Versions of installed packages, by name in ``_AGREE``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Software that trials need on every host."""

    python: str
    python_key: str = "trials.ssh.python"  # key of the experiment file that sets the interpreter
    own_program: bool = False  # whether trials run the user's program, not the package's
    deepspeed: bool = True  # whether trials use DeepSpeed

    @property
    def level(self) -> Level:
        """Level of a missing package: a warning for a user's program, which may not need it."""
        return "warning" if self.own_program else "error"


def list_pythons(spec: HostSpec) -> str:
    """Return the command that lists the interpreters of a host."""
    return shell_command(spec.login, ["sh", "-c", _PYTHONS])


def check_old_python(report: HostReport) -> Finding:
    """Return an error about a Python that is too old to run the agent."""
    assert report.answer is not None
    return report.error(
        "agent Python",
        f"{report.answer['executable'] or ''} is Python {report.answer['version']}",
        expected="Python 3.8 or newer",
        command=list_pythons(report.spec),
        advice="name a newer interpreter as trials.ssh.python; this lists what is there",
    )


def check_software(report: HostReport, needs: Needs) -> Iterator[Finding]:
    """Check the agent's Python, the Python of the trials, and the packages of the latter."""
    agent, facts = report.answer, report.part("software")
    assert agent is not None
    yield report.ok("agent Python", f"Python {agent['version']} ({agent['executable'] or ''})")
    if facts["problem"] is not None:
        yield report.error(
            "Python",
            f"{needs.python}: {facts['problem']}",
            expected="an interpreter that trains",
            command=list_pythons(report.spec),
            advice=f"name another interpreter as {needs.python_key}; this lists what is there",
        )
        return
    name = f"Python {facts['version']} ({facts['executable']})"
    if needs.own_program or _numbers(facts["version"]) >= TRAINING_PYTHON:
        yield report.ok("Python", name)
    else:
        yield report.error(
            "Python",
            name,
            expected=f"Python {'.'.join(map(str, TRAINING_PYTHON))} or newer",
            command=list_pythons(report.spec),
            advice=f"name a newer one as {needs.python_key}; this lists what is there",
        )
    if facts["kind"] == "software":
        yield _check_torch(report, needs)
        if needs.deepspeed:
            yield _check_deepspeed(report, needs)


def versions_of(report: HostReport) -> Versions:
    """Return the versions that must agree between hosts."""
    if report.is_old or report.part("software")["problem"] is not None:
        return {}
    facts = report.part("software")
    keys = ["torch", "CUDA", "deepspeed", *(["NCCL"] if report.spec.has_gpu else [])]
    versions = {key: facts.get(key.lower()) for key in keys}
    versions["Python"] = ".".join(facts["version"].split(".")[:2])
    return {key: str(text) for key, text in versions.items() if text is not None}


def check_agreement(
    reports: Sequence[HostReport], versions: Sequence[Versions], needs: Needs
) -> list[list[Finding]]:
    """Compare each host's versions with the most common ones; return findings by host."""
    findings: list[list[Finding]] = [[] for _ in reports]
    num_compared = sum(map(bool, versions))
    for key in _AGREE:
        counts = Counter(version[key] for version in versions if key in version)
        if len(counts) <= 1:
            continue
        usual, num_usual = counts.most_common(1)[0]
        cuda = Counter(version["CUDA"].split(".")[0] for version in versions if "CUDA" in version)
        package = {
            "torch": f"torch=={usual}",
            "deepspeed": f"deepspeed=={usual}",
            "NCCL": f"nvidia-nccl-cu{max(cuda, key=cuda.__getitem__, default='')}=={usual}",
        }.get(key)
        advice = "ranks of different versions may not understand each other"
        advice += "; a build with '+' comes from torch's own --index-url" if "+" in usual else ""
        for report, version, differing in zip(reports, versions, findings, strict=True):
            if version.get(key, usual) == usual:
                continue
            differing.append(
                report.finding(
                    "warning" if key == "Python" else needs.level,
                    f"{key} alike",
                    f"{key} {version[key]}",
                    expected=f"{usual}, as on {num_usual} of {num_compared} hosts",
                    command=None if package is None else _pip(report, package),
                    advice="name the same interpreter on every host" if key == "Python" else advice,
                )
            )
    return findings


def _check_torch(report: HostReport, needs: Needs) -> Finding:
    """Check that torch is installed, recent enough, and built for the devices."""
    facts = report.part("software")
    torch, cuda = facts["torch"], facts["cuda"]
    expected, advice = "", ""
    if torch is None:
        expected = "torch, which every rank imports"
    elif _numbers(torch) < MIN_TORCH:
        expected = f"torch {'.'.join(map(str, MIN_TORCH))} or newer"
    elif report.spec.has_gpu and cuda is None:
        names = dict.fromkeys(device.name for device in report.spec.devices)
        expected = f"torch built with CUDA, for {' and '.join(names)}"
        advice = "this build has none; the command installs torch's default build"
    version = "no torch" if torch is None else f"torch {torch}" + (f", CUDA {cuda}" if cuda else "")
    if not expected:
        return report.ok("torch", version)
    words = [*(["--force-reinstall"] if advice else []), f"torch>={'.'.join(map(str, MIN_TORCH))}"]
    return report.finding(
        needs.level,
        "torch",
        version,
        expected=expected,
        command=_pip(report, *words),
        advice=advice,
    )


def _check_deepspeed(report: HostReport, needs: Needs) -> Finding:
    """Check that DeepSpeed is installed, in the tested version."""
    version = report.part("software")["deepspeed"]
    if version == TESTED_DEEPSPEED or (needs.own_program and version is not None):
        return report.ok("deepspeed", f"deepspeed {version}")
    return report.finding(
        needs.level if version is None else "warning",
        "deepspeed",
        "no deepspeed" if version is None else f"deepspeed {version}",
        expected=f"deepspeed {TESTED_DEEPSPEED}",
        command=_pip(report, f"deepspeed=={TESTED_DEEPSPEED}"),
    )


def _pip(report: HostReport, *words: str) -> str:
    return report.command(
        [str(report.part("software")["executable"]), "-m", "pip", "install", *words]
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version.

    Example:
        >>> _numbers("2.13.0+cpu")
        (2, 13)
    """
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])

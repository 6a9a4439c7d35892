"""Checks of interpreters and packages: there, new enough, and the same on every host."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.trials.doctor.findings import Finding, Level, shell_command
from amp_ray.trials.doctor.host_facts import HostReport, HostSpec

TRAINING_PYTHON: Final = (3, 11)
"""Oldest Python that runs the package's own training program; the package needs the same."""

MIN_TORCH: Final = (2, 6)
"""Oldest torch that the training program is written for."""

TESTED_DEEPSPEED: Final = "0.19.8"
"""The version whose pipeline engine the training program knows."""

_PYTHONS: Final = (
    "ls -d /usr/bin/python3* /usr/local/bin/python3* /opt/*/bin/python3 ~/*/bin/python3 "
    "2>/dev/null; true"
)
"""Where interpreters usually are."""

USUAL_START_S: Final = 3.0
"""A shell and Python are there in a tenth of that."""

_AGREE: Final = ("Python", "torch", "CUDA", "NCCL", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What trials need on every host."""

    python: str
    python_key: str = "trials.ssh.python"  # key of the experiment file that names it
    # The user's own program as it is started; None for the package's own
    program: str | None = None
    cwd: str | None = None  # where that program starts; None for the trial's folder
    deepspeed: bool = True  # whether trials run by DeepSpeed

    @property
    def level(self) -> Level:
        """How bad a missing package is: an own program may not need it."""
        return "error" if self.program is None else "warning"


def check_old_python(report: HostReport) -> Finding:
    """Refuse a Python that cannot run the agent."""
    assert report.facts is not None
    return Finding(
        level="error",
        host=report.spec.name,
        check="agent Python",
        found=f"{report.facts.executable} is Python {report.facts.version}",
        expected="Python 3.8 or newer",
        command=list_pythons(report.spec),
        advice="name a newer interpreter as trials.ssh.python; this lists what is there",
    )


def check_software(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    """Check the Python of the agent, that of the trials, and its packages."""
    host, facts = report.spec.name, report.facts
    assert facts is not None
    found = f"Python {facts.version} ({facts.executable})"
    yield Finding(level="ok", host=host, check="agent Python", found=found)
    if report.start_s is not None:
        yield _check_start(report, report.start_s)
    software = facts.part("software")
    if software["problem"] is not None:
        yield Finding(
            level="error",
            host=host,
            check="Python",
            found=f"{wanted.python}: {software['problem']}",
            expected="an interpreter that trains",
            command=list_pythons(report.spec),
            advice=f"name another interpreter as {wanted.python_key}; this lists what is there",
        )
        return
    version, name = software["version"], f"Python {software['version']} ({software['executable']})"
    if wanted.program is None and _numbers(version) < TRAINING_PYTHON:
        yield Finding(
            level="error",
            host=host,
            check="Python",
            found=name,
            expected=f"Python {'.'.join(map(str, TRAINING_PYTHON))} or newer",
            command=list_pythons(report.spec),
            advice=f"name a newer one as {wanted.python_key}; this lists what is there",
        )
    else:
        yield Finding(level="ok", host=host, check="Python", found=name)
    if software["kind"] == "software":
        yield _check_torch(report, wanted)
        if wanted.deepspeed:
            yield _check_deepspeed(report, wanted)
        yield from _check_import(report, wanted)
    yield from _check_program(report, wanted)


def check_agreement(reports: Sequence[HostReport], wanted: Wanted) -> Iterator[Finding]:
    """Compare versions: every host should have what most of them have."""
    versions = {report.spec.name: _versions(report) for report in reports}
    for key in _AGREE:
        counts = Counter(found[key] for found in versions.values() if key in found)
        if len(counts) <= 1:
            continue
        usual, num_usual = counts.most_common(1)[0]
        for report in reports:
            own = versions[report.spec.name].get(key, usual)
            if own == usual:
                continue
            advice = "name the same interpreter on every host"
            if key != "Python":
                advice = "ranks of different versions may not understand each other" + _index(usual)
            yield Finding(
                level="warning" if key == "Python" else wanted.level,
                host=report.spec.name,
                check=f"{key} alike",
                found=f"{key} {own}",
                expected=f"{usual}, as on {num_usual} of {len(reports)} hosts",
                command=_install_usual(report, key, usual, _cuda(versions.values())),
                advice=advice,
            )


def list_pythons(spec: HostSpec) -> str:
    """Return the command that lists the interpreters of a host."""
    return shell_command(spec.login, ["sh", "-c", _PYTHONS])


def _check_start(report: HostReport, start_s: float) -> Finding:
    """Check how long a login takes until its Python runs."""
    host, found = report.spec.name, f"{start_s:.1f} s until Python runs"
    if start_s <= USUAL_START_S:
        return Finding(level="ok", host=host, check="start", found=found)
    return Finding(
        level="warning",
        host=host,
        check="start",
        found=found,
        expected=f"less than {USUAL_START_S:g} s",
        command=shell_command(report.spec.login, ["python3", "-X", "importtime", "-c", "pass"]),
        advice="agents wait for it, and ranks that start afresh take as long; look at ~/.bashrc "
        "there, and at the file system that Python is on; this shows what Python itself takes",
    )


def _check_torch(report: HostReport, wanted: Wanted) -> Finding:
    """Check that torch is there, new enough, and built for the devices."""
    assert report.facts is not None
    software = report.facts.part("software")
    host, torch, cuda = report.spec.name, software["torch"], software["cuda"]
    level, expected, advice = wanted.level, "", ""
    if torch is None:
        expected = "torch, which every rank imports"
    elif _numbers(torch) < MIN_TORCH:
        expected = f"torch {'.'.join(map(str, MIN_TORCH))} or newer"
    elif report.spec.has_gpu and cuda is None:
        expected = f"torch built with CUDA, for {report.spec.device.name}"
        advice = "this build has none; the command installs torch's default build"
    found = "no torch" if torch is None else f"torch {torch}" + (f", CUDA {cuda}" if cuda else "")
    if not expected:
        return Finding(level="ok", host=host, check="torch", found=found)
    lowest = f"torch>={'.'.join(map(str, MIN_TORCH))}"
    words = ["--force-reinstall", lowest] if advice else [lowest]
    return Finding(
        level=level,
        host=host,
        check="torch",
        found=found,
        expected=expected,
        command=_pip(report, *words),
        advice=advice,
    )


def _check_deepspeed(report: HostReport, wanted: Wanted) -> Finding:
    """Check that DeepSpeed is there, in the version that is known to work."""
    assert report.facts is not None
    version = report.facts.part("software")["deepspeed"]
    host, own = report.spec.name, wanted.program is not None
    if version == TESTED_DEEPSPEED or (own and version is not None):
        return Finding(level="ok", host=host, check="deepspeed", found=f"deepspeed {version}")
    return Finding(
        level=wanted.level if version is None else "warning",
        host=host,
        check="deepspeed",
        found="no deepspeed" if version is None else f"deepspeed {version}",
        expected=f"deepspeed {TESTED_DEEPSPEED}",
        command=_pip(report, f"deepspeed=={TESTED_DEEPSPEED}"),
    )


def _check_import(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    """Check that packages could really be imported, and that torch then sees the GPUs."""
    assert report.facts is not None
    software = report.facts.part("software")
    if "import_problem" not in software:
        return
    host, num_seen = report.spec.name, software["num_cuda_devices"]
    problem = software["import_problem"]
    needed = "torch and deepspeed" if wanted.deepspeed else "torch"
    if problem is not None and (wanted.deepspeed or not problem.startswith("import deepspeed")):
        yield Finding(
            level=wanted.level,
            host=host,
            check="import",
            found=problem,
            expected=f"{needed} to import",
            command=shell_command(
                report.spec.login,
                [wanted.python, "-c", f"import {needed.replace(' and', ',')}"],
            ),
            advice="the command shows the whole error",
        )
    elif report.spec.has_gpu and num_seen < report.spec.num_slots:
        yield Finding(
            level=wanted.level,
            host=host,
            check="import",
            found=f"torch sees {num_seen} GPUs",
            expected=f"{report.spec.num_slots}",
            command=shell_command(
                report.spec.login, [wanted.python, "-c", "import torch; torch.cuda.init()"]
            ),
            advice="the command shows why; often the driver is too old for torch's CUDA",
        )
    else:
        yield Finding(level="ok", host=host, check="import", found=f"{needed} import")


def _check_program(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    assert report.facts is not None
    if wanted.program is None:
        return
    facts, host = report.facts.part("program"), report.spec.name
    # A name with a placeholder is known only when a trial starts.
    if "{" not in wanted.program and facts.get("program") is None:
        yield Finding(
            level="error",
            host=host,
            check="program",
            found=f"no program {wanted.program!r}",
            expected="the first word of trials.program.argv, in the PATH of a rank",
            advice="give its absolute path: a command over SSH sees another PATH than a terminal",
        )
    if wanted.cwd is not None and not facts.get("has_cwd"):
        yield Finding(
            level="error",
            host=host,
            check="program",
            found=f"no folder {wanted.cwd}",
            expected="trials.program.cwd",
            command=shell_command(report.spec.login, ["mkdir", "-p", "--", wanted.cwd]),
        )


def _versions(report: HostReport) -> dict[str, str]:
    """Return what must agree, as far as it is there."""
    assert report.facts is not None
    software = report.facts.part("software")
    if software["problem"] is not None:
        return {}
    keys = ["torch", "CUDA", "deepspeed", *(["NCCL"] if report.spec.has_gpu else [])]
    found = {key: software.get(key.lower()) for key in keys}
    found["Python"] = ".".join(software["version"].split(".")[:2])
    return {key: str(text) for key, text in found.items() if text is not None}


def _cuda(versions: Iterable[Mapping[str, str]]) -> str:
    """Return the major version of CUDA that most hosts have."""
    counts = Counter(found["CUDA"].split(".")[0] for found in versions if "CUDA" in found)
    return counts.most_common(1)[0][0] if counts else ""


def _install_usual(report: HostReport, key: str, usual: str, cuda: str) -> str | None:
    """Return the command that installs what most hosts have."""
    match key:
        case "torch" | "deepspeed":
            return _pip(report, f"{key}=={usual}")
        case "NCCL":
            return _pip(report, f"nvidia-nccl-cu{cuda}=={usual}")
        case _:
            return None


def _index(version: str) -> str:
    """Say where a build such as ``2.13.0+cpu`` comes from."""
    return "" if "+" not in version else "; a build with '+' comes from torch's own --index-url"


def _pip(report: HostReport, *words: str) -> str:
    """Return the command that installs into the Python that trains."""
    assert report.facts is not None
    python = report.facts.part("software")["executable"]
    return shell_command(report.spec.login, [python, "-m", "pip", "install", *words])


def _numbers(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version.

    Example:
        >>> _numbers("2.13.0+cpu")
        (2, 13)
    """
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])

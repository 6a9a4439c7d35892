"""Checks of interpreters and packages: there, new enough, and the same on every host."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amp_ray.trials.doctor.findings import Finding, Level, shell_command
from amp_ray.trials.doctor.host_facts import HostReport, HostSpec

TRAINING_PYTHON: Final = (3, 11)  # that runs our training program; the package needs the same
MIN_TORCH: Final = (2, 6)  # oldest torch that the training program is written for
TESTED_DEEPSPEED: Final = "0.19.8"  # the version whose pipeline engine the training program knows

_PYTHONS: Final = (
    "ls -d /usr/bin/python3* /usr/local/bin/python3* /opt/*/bin/python3 ~/*/bin/python3 "
    "2>/dev/null; true"
)
"""Where interpreters usually are."""

USUAL_START_S: Final = 3.0  # a shell and Python are there in a tenth of that
_AGREE: Final = ("Python", "torch", "CUDA", "NCCL", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What trials need on every host."""

    python: str
    python_key: str = "trials.ssh.python"  # key of the experiment file that names it
    program: str | None = None  # the user's own, as it is started; None for the package's own
    cwd: str | None = None  # where that program starts; None for the trial's folder
    deepspeed: bool = True  # whether trials run by DeepSpeed

    @property
    def level(self) -> Level:
        """How bad a missing package is: an own program may not need it."""
        return "error" if self.program is None else "warning"


def check_old_python(report: HostReport) -> Finding:
    """Refuse a Python that cannot run the agent."""
    assert report.facts is not None
    return report.error(
        "agent Python",
        f"{report.facts.executable} is Python {report.facts.version}",
        expected="Python 3.8 or newer",
        command=list_pythons(report.spec),
        advice="name a newer interpreter as trials.ssh.python; this lists what is there",
    )


def check_software(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    """Check the Python of the agent, that of the trials, and its packages."""
    facts = report.facts
    assert facts is not None
    yield report.ok("agent Python", f"Python {facts.version} ({facts.executable})")
    if report.start_s is not None:
        yield _check_start(report, report.start_s)
    software = facts.part("software")
    if software["problem"] is not None:
        yield report.error(
            "Python",
            f"{wanted.python}: {software['problem']}",
            expected="an interpreter that trains",
            command=list_pythons(report.spec),
            advice=f"name another interpreter as {wanted.python_key}; this lists what is there",
        )
        return
    version, name = software["version"], f"Python {software['version']} ({software['executable']})"
    if wanted.program is None and _numbers(version) < TRAINING_PYTHON:
        yield report.error(
            "Python",
            name,
            expected=f"Python {'.'.join(map(str, TRAINING_PYTHON))} or newer",
            command=list_pythons(report.spec),
            advice=f"name a newer one as {wanted.python_key}; this lists what is there",
        )
    else:
        yield report.ok("Python", name)
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
                advice = "ranks of different versions may not understand each other"
                if "+" in usual:
                    advice += "; a build with '+' comes from torch's own --index-url"
            yield report.finding(
                "warning" if key == "Python" else wanted.level,
                f"{key} alike",
                f"{key} {own}",
                expected=f"{usual}, as on {num_usual} of {len(reports)} hosts",
                command=_install_usual(report, key, usual, _cuda(versions.values())),
                advice=advice,
            )


def list_pythons(spec: HostSpec) -> str:
    """Return the command that lists the interpreters of a host."""
    return shell_command(spec.login, ["sh", "-c", _PYTHONS])


def _check_start(report: HostReport, start_s: float) -> Finding:
    found = f"{start_s:.1f} s until Python runs"
    if start_s <= USUAL_START_S:
        return report.ok("start", found)
    return report.warning(
        "start",
        found,
        expected=f"less than {USUAL_START_S:g} s",
        command=report.command(["python3", "-X", "importtime", "-c", "pass"]),
        advice="agents wait for it, and ranks that start afresh take as long; look at ~/.bashrc "
        "there, and at the file system that Python is on; this shows what Python itself takes",
    )


def _check_torch(report: HostReport, wanted: Wanted) -> Finding:
    """Check that torch is there, new enough, and built for the devices."""
    software = report.part("software")
    torch, cuda = software["torch"], software["cuda"]
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
        return report.ok("torch", found)
    lowest = f"torch>={'.'.join(map(str, MIN_TORCH))}"
    words = ["--force-reinstall", lowest] if advice else [lowest]
    return report.finding(
        level, "torch", found, expected=expected, command=_pip(report, *words), advice=advice
    )


def _check_deepspeed(report: HostReport, wanted: Wanted) -> Finding:
    """Check that DeepSpeed is there, in the version that is known to work."""
    version = report.part("software")["deepspeed"]
    own = wanted.program is not None
    if version == TESTED_DEEPSPEED or (own and version is not None):
        return report.ok("deepspeed", f"deepspeed {version}")
    return report.finding(
        wanted.level if version is None else "warning",
        "deepspeed",
        "no deepspeed" if version is None else f"deepspeed {version}",
        expected=f"deepspeed {TESTED_DEEPSPEED}",
        command=_pip(report, f"deepspeed=={TESTED_DEEPSPEED}"),
    )


def _check_import(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    """Check that packages could really be imported, and that torch then sees the GPUs."""
    software = report.part("software")
    if "import_problem" not in software:
        return
    problem, num_seen = software["import_problem"], software["num_cuda_devices"]
    needed = "torch and deepspeed" if wanted.deepspeed else "torch"
    if problem is not None and (wanted.deepspeed or not problem.startswith("import deepspeed")):
        yield report.finding(
            wanted.level,
            "import",
            problem,
            expected=f"{needed} to import",
            command=report.command([wanted.python, "-c", f"import {needed.replace(' and', ',')}"]),
            advice="the command shows the whole error",
        )
    elif report.spec.has_gpu and num_seen < report.spec.num_slots:
        yield report.finding(
            wanted.level,
            "import",
            f"torch sees {num_seen} GPUs",
            expected=f"{report.spec.num_slots}",
            command=report.command([wanted.python, "-c", "import torch; torch.cuda.init()"]),
            advice="the command shows why; often the driver is too old for torch's CUDA",
        )
    else:
        yield report.ok("import", f"{needed} import")


def _check_program(report: HostReport, wanted: Wanted) -> Iterator[Finding]:
    if wanted.program is None:
        return
    facts = report.part("program")
    # A name with a placeholder is known only when a trial starts.
    if "{" not in wanted.program and facts.get("program") is None:
        yield report.error(
            "program",
            f"no program {wanted.program!r}",
            expected="the first word of trials.program.argv, in the PATH of a rank",
            advice="give its absolute path: a command over SSH sees another PATH than a terminal",
        )
    if wanted.cwd is not None and not facts.get("has_cwd"):
        yield report.error(
            "program",
            f"no folder {wanted.cwd}",
            expected="trials.program.cwd",
            command=report.command(["mkdir", "-p", "--", wanted.cwd]),
        )


def _versions(report: HostReport) -> dict[str, str]:
    """Return what must agree, as far as it is there."""
    software = report.part("software")
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


def _pip(report: HostReport, *words: str) -> str:
    python = report.part("software")["executable"]
    return report.command([python, "-m", "pip", "install", *words])


def _numbers(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version.

    Example:
        >>> _numbers("2.13.0+cpu")
        (2, 13)
    """
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])

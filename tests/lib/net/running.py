"""Run the commands of a case in this process, and collect their answers."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from net.table import FILES, Case, Words

CLOCK: Final = ("at", "crc", "last_event_at", "search_s", "seconds", "started_at", "trial_id")
"""Keys whose values depend on the time of day or on the speed of this machine."""

_SEARCHED: Final = re.compile(r"(?<=candidates in )[0-9.]+(?= s)")
"""Duration of a search in the headline of a table."""

MACHINE: Final = ("environment",)
"""Keys of a report that name versions of packages and the system."""

_DRAWN: Final = re.compile("[0-9a-f]{8}")  # random id of a study
_DIGITS: Final = 14  # number of significant digits to record
_SHORT: Final = 150  # characters up to which a repeated part is recorded each time
_ROWS: Final = 6  # rows to record at either end of a long list in standard output
_ROWS_OF_FILES: Final = 3  # rows to record at either end of a long list in a file
_DATA: Final = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)
_UNSEEN: Final = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command; an unexpected exception has no code, and its traceback as ``err``."""

    code: int | None
    out: str
    err: str


def run(words: Words) -> Ended:
    """Run ``amp-ray`` with these words, by its entry point."""
    (program,) = entry_points(group="console_scripts", name="amp-ray")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    code: int | None = None
    with (
        patch.object(sys, "argv", ["amp-ray", *words]),
        patch.object(sys, "stdin", io.StringIO()),
        patch.dict(os.environ, {"COLUMNS": ""}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            program.load()()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Exception as error:  # noqa: BLE001 - it is what the case answers
            err.write(f"{type(error).__name__}: {error}")
    return Ended(code=code, out=_written(out), err=_written(err))


def answer(case: Case) -> Any:  # noqa: ANN401 - a JSON value
    """Run the commands of a case in a new folder, and return their answers as JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve() / "net"
        shutil.copytree(FILES, folder)
        with contextlib.chdir(folder):
            return once(list(_steps(case, folder)), "", {})


def once(value: Any, place: str, seen: dict[str, str]) -> Any:  # noqa: ANN401 - a JSON value
    """Return a value in which a long part that has occurred before is replaced by its place."""
    if not isinstance(value, dict | list):
        return value
    text = json.dumps(value)
    if len(text) > _SHORT and seen.setdefault(text, place) != place:
        return f"as at {seen[text]}"
    if isinstance(value, list):
        return [once(part, f"{place}[{number}]", seen) for number, part in enumerate(value)]
    return {key: once(part, f"{place}.{key}", seen) for key, part in value.items()}


def _steps(case: Case, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the commands one after the other, and yield their answers."""
    before = _contents(folder)
    for words in case.steps:
        ended = run(words)
        after = _contents(folder)
        step: dict[str, Any] = {"run": " ".join(words), "code": ended.code}
        for key, text in (("out", ended.out), ("err", ended.err)):
            if text:
                step[key] = _recorded(_value(text.replace(str(folder), "."), ""), _ROWS)
        changed = {path: text for path, text in after.items() if text != before.get(path)}
        if changed:
            step["files"] = {
                path: _recorded(
                    _value(text.replace(str(folder), "."), Path(path).suffix), _ROWS_OF_FILES
                )
                for path, text in sorted(changed.items())
            }
        yield step
        before = after


def _written(stream: io.TextIOWrapper) -> str:
    """Return the text that was written into a stream."""
    stream.seek(0)
    return stream.read()


def _contents(folder: Path) -> dict[str, str]:
    """Return the text of every file in a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def _value(text: str, suffix: str) -> Any:  # noqa: ANN401 - a JSON value
    """Parse text by its kind: JSON, lines of JSON, a report (data and frame), or plain lines."""
    if suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    if suffix == ".html":
        data = [json.loads(part) for part in _DATA.findall(text)]
        return {"data": data, "page": _UNSEEN.sub("", text).splitlines()}
    if text.startswith(("{", "[")):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return _SEARCHED.sub("some", text).splitlines()


def _recorded(value: Any, rows: int) -> Any:  # noqa: ANN401 - a JSON value
    """Return a value to record: without times and versions, floats rounded, long lists cut."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if key not in {*CLOCK, *MACHINE}}
        return {key: _recorded(part, rows) for key, part in kept.items()}
    if isinstance(value, list):
        if len(value) > 2 * rows and isinstance(value[0], dict | list):
            value = [*value[:rows], f"and {len(value) - 2 * rows} more", *value[-rows:]]
        return [_recorded(part, rows) for part in value]
    if isinstance(value, str) and _DRAWN.fullmatch(value):
        return "drawn"
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amp_ray.runtime.hosts.agent import log as module
from amp_ray.runtime.hosts.agent.log import Log

HEAD, HALF, KEPT = 400, 300, 500
LIMIT = 100_000

Write = Callable[..., list[str]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write lines in pieces of any size to a log of small parts; return the lines that it keeps."""
    for name, value in (("HEAD_BYTES", HEAD), ("HALF_BYTES", HALF), ("KEPT_BYTES", KEPT)):
        monkeypatch.setattr(module, name, value)
    made: list[Log] = []

    def write_(
        lines: list[str], words: tuple[str, ...] = ("took ",), limit: int = LIMIT, seed: int = 0
    ) -> list[str]:
        made.append(Log(str(tmp_path), words))
        data = "".join(f"{line}\n" for line in lines).encode()
        draw = random.Random(seed)
        while data:
            size = draw.randint(1, 200)
            made[-1].write(data[:size])
            data = data[size:]
        return made[-1].content(limit).decode().splitlines()

    yield write_
    for log in made:
        log.close()


def chatter(number: int, every: int) -> list[str]:
    """Make lines of which some tell a step."""
    return [
        f"step {index} took 1.5 s" if index % every == 0 else f"{index} {'x' * (index % 23)}"
        for index in range(number)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 20, 60, 75, 100, 200])
def test_steps_are_kept_in_order_wherever_they_stand(write: Write, number: int, seed: int) -> None:
    lines = chatter(number, every=9)
    kept = write(lines, seed=seed)
    told = [line for line in lines if "took " in line]
    assert [line for line in kept if re.match(r"step \d+ took", line)] == told


def test_a_short_log_is_whole(write: Write) -> None:
    lines = chatter(60, every=9)
    assert write(lines) == lines


def test_of_a_long_log_both_ends_are_whole_and_the_gap_is_told(write: Write) -> None:
    lines = chatter(3000, every=10_000)
    kept = write(lines, ())
    [gap] = [index for index, line in enumerate(kept) if "bytes of this log were not kept" in line]
    head, last = kept[:gap], kept[gap + 1 :]
    assert head == lines[: len(head)]
    assert last[1:] == lines[-len(last) + 1 :]  # without words, the first may be cut
    assert len("\n".join(head)) > HEAD - 50
    assert len("\n".join(last)) > HALF - 50


def test_kept_lines_are_bounded_too(write: Write) -> None:
    kept = write(chatter(50_000, every=1))
    assert len("\n".join(kept)) < HEAD + KEPT + 2 * HALF + 200


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_cuts_the_middle_and_not_the_steps(write: Write, seed: int) -> None:
    lines = chatter(90, every=9)
    kept = write(lines, limit=800, seed=seed)
    assert len("\n".join(kept)) < 1000
    told = [line for line in lines if "took " in line]
    assert [line for line in kept if re.match(r"step \d+ took", line)] == told
    assert (kept[0], kept[-1]) == (lines[0], lines[-1])


def test_a_log_leaves_no_file(write: Write, tmp_path: Path) -> None:
    write(chatter(100, every=9))
    assert [*tmp_path.iterdir()] == []

"""Golden strategies: `python -m goldens price`, `draw`, `count`; see tests/golden/README.md."""

import argparse
import random
import time
from collections.abc import Iterator
from typing import Final

from goldens.counting import table
from goldens.documents import experiment_of
from goldens.drawn_experiments import NUM_PLAIN, THEMES, drawn_experiment
from goldens.drawn_strategies import Drawing
from goldens.records import Group, differences, group_of, priced, read_groups, write_groups
from goldens.search_plans import recorded_plans, searches

NUM_DRAWN: Final = NUM_PLAIN + 8 * len(THEMES)
"""Experiments that are drawn: 18 for each release of a runtime, 8 for each theme."""
PER_EXPERIMENT: Final = 4


def drawn_groups() -> Iterator[Group]:
    """Draw experiments and strategies of each."""
    for seed in range(NUM_DRAWN):
        document, experiment = drawn_experiment(seed)
        drawing = Drawing(experiment=experiment, rng=random.Random(seed))
        strategies = drawing.strategies(PER_EXPERIMENT)
        yield group_of(document, experiment, dict.fromkeys(strategies, "drawn"))


def search_groups() -> Iterator[Group]:
    """Search experiments; take the plans of `compare_plans.py` as they are recorded."""
    for document, experiment, plans in recorded_plans():
        if plans:
            yield group_of(document, experiment, plans)
    for name, document, plans in searches():
        print(name, len(plans), f"{time.process_time():.0f} s", flush=True)
        if plans:
            yield group_of(document, experiment_of(document), plans)


def price() -> None:
    """Write the figures of today for the strategies of the file; print how many differ."""
    old = read_groups()
    new = [priced(group) for group in old]
    lines = [line for pair in zip(old, new, strict=True) for line in differences(*pair)]
    print(*lines[:3], f"{len(lines)} figures differ", sep="\n")
    write_groups(new)


def draw() -> None:
    """Draw the strategies anew, and take plans of searches anew."""
    write_groups([*drawn_groups(), *search_groups()])


def redraw() -> None:
    """Draw random strategies anew, and keep the plans of searches that the file has."""
    kept = [group for group in read_groups() if set(group.sources) == {"search"}]
    write_groups([*drawn_groups(), *map(priced, kept)])


def count() -> None:
    """Print how many strategies exercise each runtime and dimension."""
    for line in table(read_groups()):
        print(line)


if __name__ == "__main__":
    COMMANDS: Final = {"price": price, "draw": draw, "redraw": redraw, "count": count}
    PARSER = argparse.ArgumentParser(prog="goldens", description=__doc__)
    PARSER.add_argument("command", choices=COMMANDS)
    COMMANDS[PARSER.parse_args().command]()

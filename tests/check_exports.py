"""Run every export through the parsers of installed programs: ``make check-exports``.

Each preset is exported with each runtime and option (`support.export_cases`); ``--python`` names
the interpreter of the environment in which the programs are installed, by default this one.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from amp_ray.exports.chosen import Chosen, Program
from amp_ray.exports.megatron import megatron_program
from amp_ray.exports.torchtitan import titan_program
from support.export_cases import KEYS, PRESETS, chosen_cases

_PROGRAMS: Final[Mapping[str, tuple[str, Callable[[Chosen], Program]]]] = {
    "megatron-lm": ("megatron-core", megatron_program),
    "torchtitan": ("fsdp2", titan_program),
}


_EVERY: Final = {"megatron-lm": 1, "torchtitan": 5}  # whose parser takes a second for each
_WITH_KEYS: Final = ("llama-3-8b", "deepseek-v3")  # presets with which all keys are tried


def cases(presets: list[str], not_exported: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the cases of `real_parsers`; count those that are refused before."""
    for program, (runtime, make) in _PROGRAMS.items():
        for name in presets:
            for keys in KEYS[runtime] if name in _WITH_KEYS else KEYS[runtime][:1]:
                for chosen in islice(chosen_cases(name, runtime, keys), 0, None, _EVERY[program]):
                    try:
                        made = make(chosen)
                    except ValueError as error:
                        not_exported[f"{program}, {name}: {error}"] += 1
                        continue
                    yield {
                        "program": program,
                        "name": chosen.title,
                        "words": made.words[1:],
                        "variables": dict(made.variables),
                        "files": dict(made.files),
                        "world_size": len(chosen.strategy.placement),
                    }


def main() -> int:
    """Print what was refused; return 1 if anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--preset", action="append", choices=list(PRESETS))
    options = parser.parse_args()
    not_exported: Counter[str] = Counter()
    presets = options.preset or list(PRESETS)
    lines = "".join(json.dumps(case) + "\n" for case in cases(presets, not_exported))
    for reason, number in not_exported.items():
        print(f"{number} not exported to {reason}")
    script = Path(__file__).with_name("real_parsers.py")
    done = subprocess.run(
        [options.python, str(script)], input=lines, stdout=subprocess.PIPE, text=True, check=True
    )
    result = json.loads(done.stdout)
    for program, told in result.items():
        if told["release"] is None:
            print(f"{program}: not installed, nothing checked {told.get('error', '')}".rstrip())
            continue
        refused = sum(map(len, told["refused"].values()))
        print(f"{program} {told['release']}: {told['cases']} exports, {refused} refused")
        for message, names in told["refused"].items():
            print(f"  {len(names)}, such as {names[0]}:\n    {message}")
    return int(any(told["refused"] for told in result.values()))


if __name__ == "__main__":
    sys.exit(main())

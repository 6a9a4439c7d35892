"""`make paired OLD=PATH`: the CPU time of commands in an older checkout and in this one, in turns.

Both run on one core with what each checkout has as ``.venv`` (else with this interpreter), as
``python -m amp_ray``, and with the kernels that are compiled there. Fails where the median of the
ratios is above 1.1.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NEW: Final = Path(__file__).resolve().parents[2]
EXPERIMENTS: Final = NEW / "experiments"
FILES: Final = NEW / "tests" / "net" / "files"
MOST: Final = 1.1  # of the new CPU time over the old

RATES: Final = {
    "A100-40": (2400, 200),
    "V100-16": (1200, 100),
    "P100-16": (400, 80),
    "T4": (100, 50),
}
GPT: Final = "{family: gpt2, num_layers: 24, hidden_size: 2048, num_heads: 16, sequence_length: 1024, vocab_size: 51200}"  # noqa: E501
GPT_175B: Final = "{family: gpt2, num_layers: 96, hidden_size: 12288, num_heads: 96, sequence_length: 2048, vocab_size: 51200}"  # noqa: E501
LONG: Final = "{family: llama, num_layers: 48, hidden_size: 8192, num_heads: 64, sequence_length: 16384, vocab_size: 32000}"  # noqa: E501

GENERATED: Final = {
    "all-dimensions": f"""\
model: {GPT_175B}
cluster: {{nodes: [{{count: 64, device: H100, slots: 8, inter_gbit_per_s: 3200}}]}}
precision: bf16
recompute: auto
zero_stage: auto
runtime: megatron-core
global_batch_size: 1024
search: {{virtual_stages: [1, 2, 4], max_cp: 8}}
""",
    "token-slices": f"""\
model: {LONG}
cluster: {{nodes: [{{count: 4, device: A100-80, slots: 8, inter_gbit_per_s: 200}}]}}
runtime: torch
recompute: full
global_batch_size: 96
search: {{token_slices: true, max_tp: 4}}
""",
}
"""Experiments of `make bench` that have no file, some of them smaller."""

OPERATORS: Final = ("model.num_layers=48", "cluster.nodes.0.slots=4", "global_batch_size=64")

COMMANDS: Final = {
    "start": ("--help",),
    "homogeneous": ("plan", str(EXPERIMENTS / "homogeneous.yaml")),
    "het_placement": ("plan", str(EXPERIMENTS / "het_placement.yaml")),
    "het_gpus": ("plan", str(EXPERIMENTS / "het_gpus.yaml")),
    "16 of 2 kinds": ("plan", "mixed-2.yaml"),
    "32 of 4 kinds": ("plan", "mixed-4.yaml"),
    "all dimensions of 512": ("plan", "all-dimensions.yaml"),
    "token slices": ("plan", "token-slices.yaml"),
    "operators": ("plan", str(FILES / "aceso.yaml"), *(f"--set={key}" for key in OPERATORS)),
    "operators, aceso-2024": (
        *("plan", str(FILES / "aceso.yaml"), "--cost-model", "aceso-2024"),
        *(f"--set={key}" for key in OPERATORS),
    ),
    "tune, replayed": (
        *("tune", str(FILES / "cpu.yaml"), "--trials", f"replay:{FILES}/measured/cpu.csv"),
        *("--budget", "9", "--study", "study-{turn}"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """One of the two trees."""

    name: str
    tree: Path

    def cpu_s(self, words: tuple[str, ...]) -> float:
        """Run a command; return its CPU seconds, user and system."""
        python = self.tree / ".venv" / "bin" / "python"
        argv = [str(python if python.exists() else sys.executable), "-m", "amp_ray", *words]
        silent = os.open(os.devnull, os.O_WRONLY)
        redirected = [(os.POSIX_SPAWN_DUP2, silent, 1)]
        settings = {**os.environ, "PYTHONPATH": str(self.tree)}
        child = os.posix_spawn(argv[0], argv, settings, file_actions=redirected)
        _, status, usage = os.wait4(child, 0)
        os.close(silent)
        if status:
            sys.exit(f"{self.tree}: amp-ray {' '.join(words)} failed")
        return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print a line per command; fail where one takes longer."""
    options = _options()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # with one core no search asks for Ray
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        _write_experiments()
        trees = {"old": options.old.resolve(), "new": NEW}
        pair = [Checkout(name=side, tree=tree) for side, tree in trees.items()]
        slower = [command for command, ratio in _ratios(pair, options) if ratio > MOST]
    if slower:
        sys.exit(f"more than {MOST} times the CPU time: {', '.join(slower)}")
    print(f"no command takes more than {MOST} times the CPU time")


def _options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path, help="checkout to compare with")
    parser.add_argument(
        "--pairs", type=int, default=5, help="runs of each command in each checkout"
    )
    parser.add_argument("--only", default="", help="commands whose name has this in it")
    return parser.parse_args()


def _ratios(pair: list[Checkout], options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Run the commands in turns; yield and print the median ratio of each."""
    print(f"{'command':26}{'old, s':>9}{'new, s':>9}{'new / old':>11}")
    for command, words in COMMANDS.items():
        if options.only not in command:
            continue
        runs = []
        for turn in range(options.pairs + 1):  # the first fills caches
            filled = tuple(word.replace("{turn}", f"{turn}-{{}}") for word in words)
            order = pair if turn % 2 else pair[::-1]
            seconds = {
                checkout.name: checkout.cpu_s(
                    tuple(word.replace("{}", checkout.name) for word in filled)
                )
                for checkout in order
            }
            runs.append([seconds["old"], seconds["new"]])
        yield _line(command, runs[1:])


def _line(command: str, runs: list[list[float]]) -> tuple[str, float]:
    """Print the medians of a command; return its name and the median ratio."""
    old_s, new_s = (statistics.median(seconds) for seconds in zip(*runs, strict=True))
    ratio = statistics.median(new / old for old, new in runs)
    print(f"{command:26}{old_s:9.2f}{new_s:9.2f}{ratio:11.3f}", flush=True)
    return command, ratio


def _write_experiments() -> None:
    """Write the experiments that have no file into the working folder."""
    texts = dict(GENERATED)
    for kinds in (2, 4):
        nodes = "\n".join(
            f"    - {{count: 1, device: {kind}, slots: 8, intra_gbit_per_s: {intra}, "
            f"inter_gbit_per_s: {inter}}}"
            for kind, (intra, inter) in list(RATES.items())[:kinds]
        )
        texts[f"mixed-{kinds}"] = (
            f"model: {GPT}\ncluster:\n  nodes:\n{nodes}\n"
            f"global_batch_size: {32 * kinds}\nsearch: {{space: heterogeneous}}\n"
        )
    for name, text in texts.items():
        Path(f"{name}.yaml").write_text(f"name: {name}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()

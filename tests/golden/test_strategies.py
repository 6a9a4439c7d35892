"""Every golden strategy has the recorded time, memory and verdict; `make goldens` records anew."""

import random
from dataclasses import fields, replace
from typing import Final

import pytest

from amp_ray.runtimes.traits import RUNTIMES
from amp_ray.strategies.candidate import StageOptions
from goldens.counting import counted
from goldens.documents import experiment_of, strategy_of
from goldens.drawn_experiments import PROGRAMS, THEMES, drawn_experiment
from goldens.drawn_strategies import Drawing
from goldens.records import Group, differences, priced, read_groups

GROUPS: Final = read_groups()
DEFAULT: Final = "deepspeed"  # runtime of an experiment file that names none
SHOWN: Final = 5
DIMENSIONS: Final = (
    *(
        "ZeRO 0",
        "ZeRO 1",
        "ZeRO 2",
        "ZeRO 3",
        "ZeRO 3 kept",
        "shard groups",
        "tp",
        "pp",
        "dp",
        "ep",
    ),
    *("etp", "cp ring", "cp all-gather", "cp all-to-all", "cp both", "sequence parallelism"),
    *("chunks, even", "chunks, uneven", "token slices", "slices measured", "offloaded blocks"),
    *("recompute none", "recompute selective", "recompute full", "recompute per-operator"),
    *("recompute of some blocks", "recompute differs by stage", "recomputed module mlp"),
    *("stages of different tp or dp", "uneven shares", "idle devices", "devices out of order"),
    *(
        "tp across nodes",
        "tied embedding in a pipeline",
        "racks",
        "rates by size",
        "links of zones",
    ),
    *("boards of two kinds in a host", "power limits", "profile table", "sliced messages"),
    *(
        "graphs",
        "fused experts",
        "latent attention",
        "loss in parts",
        "launch limit",
        "unexplained",
    ),
    *("precision fp32", "precision fp16", "precision bf16", "precision fp8", "precision nvfp4"),
    *("optimizer adam", "optimizer adamw", "optimizer sgd", "money counted", "risky", "feasible"),
    *("reason: out of memory", "reason: over the launcher's time limit"),
    *("reason: stage without parameters", "reason: fewer blocks than chunks"),
)
"""What some golden strategy must have."""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_figures_are_the_recorded_ones(runtime: str) -> None:
    found = [
        line
        for group in GROUPS
        if group.document.get("runtime", DEFAULT) == runtime
        for line in differences(group, priced(group))
    ]
    assert not found, "\n".join([f"{len(found)} figures differ, such as", *found[:SHOWN]])


def test_every_runtime_and_dimension_has_strategies() -> None:
    counts = counted(GROUPS)
    assert [name for name in DIMENSIONS if not counts[name]] == []
    for runtime, release in PROGRAMS:
        traits = experiment_of(_document(runtime, release)).traits
        assert counts[f"runtime {traits.full_name}"], traits.full_name


def _document(runtime: str, release: str | None) -> dict[str, object]:
    """Return the first document of a runtime and release."""
    documents = (dict(group.document) for group in GROUPS)
    return next(
        each
        for each in documents
        if each.get("runtime", DEFAULT) == runtime and each.get("release") == release
    )


def test_every_option_of_a_stage_is_used() -> None:
    defaults = StageOptions(tp=1, dp=1)
    unused = {option.name for option in fields(StageOptions)}
    for group in GROUPS:
        experiment = experiment_of(group.document)
        for record in group.strategies:
            for stage in strategy_of(record, experiment).stages:
                unused -= {
                    name
                    for name in unused
                    if getattr(stage.options, name) != getattr(defaults, name)
                }
        if not unused:
            return
    assert not unused


def test_a_strategy_with_another_figure_is_named() -> None:
    group = _first(GROUPS[0])
    [figures] = group.figures
    for name in ("iteration_time_s", "failure_probability"):
        changed = replace(group, figures=[{**figures, name: figures[name] * (1 + 1e-11) + 1e-300}])
        lines = list(differences(changed, group))
        assert len(lines) == 1
        assert lines[0].startswith(f"{name}: ")
    parts = {**figures["breakdown_s"], "optimizer": figures["breakdown_s"]["optimizer"] * 1.001}
    lines = list(differences(replace(group, figures=[{**figures, "breakdown_s": parts}]), group))
    assert [line.partition(":")[0] for line in lines] == ["breakdown_s.optimizer"]


def _first(group: Group) -> Group:
    """Return a group of the first strategy alone."""
    return replace(
        group,
        sources=group.sources[:1],
        strategies=group.strategies[:1],
        figures=group.figures[:1],
    )


@pytest.mark.parametrize("seed", [0, len(PROGRAMS) + 3, 10_000 * len(THEMES)])
def test_draws_depend_on_the_seed_alone(seed: int) -> None:
    (document, experiment), (again, _) = drawn_experiment(seed), drawn_experiment(seed)
    assert document == again
    one, other = (
        list(Drawing(experiment=experiment, rng=random.Random(seed)).strategies(2))
        for _ in range(2)
    )
    assert one == other
    assert one

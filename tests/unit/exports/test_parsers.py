"""Exports are what programs take, restated as tables, and switch on what is predicted."""

import ast
import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from amp_ray.exports.assumed import Assumed
from amp_ray.exports.chosen import Chosen
from amp_ray.exports.configs import nanotron_config
from amp_ray.exports.megatron import bridge_overrides, megatron_program, megatron_script
from amp_ray.exports.megatron_keys import notes_of
from amp_ray.exports.shell import words_of
from amp_ray.exports.starts import start_of
from amp_ray.exports.torchtitan import titan_config
from amp_ray.models.model import Model
from amp_ray.runtimes.cut_rules import weighed_bounds
from amp_ray.runtimes.traits import RuntimeTraits
from support.experiments import experiment_from
from support.export_cases import KEYS, PRESETS, RUNTIMES, chosen_cases

FLAGS = Assumed.shipped().flags
PARSER = yaml.safe_load(Path(__file__).with_name("megatron_parser.yaml").read_text("utf-8"))
NUMBERS = {"int": r"\d+", "float": r"\d+(\.\d+)?(e-?\d+)?"}
KINDS: Mapping[str, str] = {
    **dict.fromkeys(PARSER["switch"].split(), ""),
    **{flag: form for kind, form in NUMBERS.items() for flag in PARSER[kind].split()},
    **PARSER["pattern"],
    **{flag: "|".join(map(re.escape, words)) for flag, words in PARSER["choice"].items()},
}
KEYS_OF_PRESETS = [
    (name, keys)
    for name in PRESETS
    for keys in (KEYS["megatron-core"] if name == "deepseek-v3" else KEYS["megatron-core"][:1])
]


def pairs(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield flags with their values, as often as they occur."""
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    for first, end in zip(starts, [*starts[1:], len(words)], strict=True):
        yield words[first].removeprefix("--"), words[first + 1 : end]


def listed(flags: str | list[str]) -> list[str]:
    """Return flags of a table."""
    return flags.split() if isinstance(flags, str) else flags


def mistakes(words: list[str], variables: Mapping[str, str], num_ranks: int) -> Iterator[str]:
    """Yield what Megatron-LM's parser and validation refuse."""
    written = list(pairs(words))
    values = {flag: " ".join(texts) for flag, texts in written}
    if len(values) < len(written):
        yield f"a flag stands twice: {words}"
    for flag, texts in written:
        if flag not in KINDS:
            yield f"no flag: {flag}"
        elif not all(re.fullmatch(KINDS[flag], text) for text in texts or [""]):
            yield f"--{flag} {texts}"
    has = {*values, *(f"{flag} {value}" for flag, value in values.items())}
    yield from combined(has)
    yield from degrees(has, values, variables, num_ranks)


def combined(has: set[str]) -> Iterator[str]:
    """Yield flags that need or exclude others."""
    for flag, needed in PARSER["needs"].items():
        if flag in has and not {*listed(needed)} <= has:
            yield f"{flag} needs {needed}"
    for flag, others in PARSER["excludes"].items():
        if flag in has and {*listed(others)} & has:
            yield f"{flag} excludes {others}"


def degrees(
    has: set[str], values: Mapping[str, str], variables: Mapping[str, str], num_ranks: int
) -> Iterator[str]:
    """Yield what degrees, ranks and environment contradict."""
    number = {flag: int(value) for flag, value in values.items() if re.fullmatch(r"\d+", value)}
    tp, cp = number["tensor-model-parallel-size"], number.get("context-parallel-size", 1)
    pp, layers = number["pipeline-model-parallel-size"], number["num-layers"]
    if num_ranks % (tp * pp * cp):
        yield "the degrees do not divide the ranks"
    is_ordered = variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if is_ordered if "use-megatron-fsdp" in has else tp * cp > 1 and not is_ordered:
        yield "CUDA_DEVICE_MAX_CONNECTIONS"
    uneven = ("pipeline-model-parallel-layout", "decoder-first-pipeline-num-layers")
    if layers % pp and not {*uneven, "decoder-last-pipeline-num-layers"} & has:
        yield f"{layers} layers in {pp} stages"
    if "moe-token-dispatcher-type flex" in has and number.get("expert-model-parallel-size", 1) == 1:
        yield "flex needs ranks with experts of their own"


@pytest.mark.parametrize(("name", "keys"), KEYS_OF_PRESETS)
def test_megatrons_parser_takes_every_export(name: str, keys: str) -> None:
    for chosen in chosen_cases(name, "megatron-core", keys):
        program = megatron_program(chosen)
        ranks = len(chosen.strategy.placement)
        assert not list(mistakes(list(program.words[1:]), program.variables, ranks))


def test_megatrons_parser_takes_what_blackwell_runs() -> None:
    """One kernel for all experts in MXFP8 and a graph of the whole step: flags and a variable."""
    told = 0
    for chosen in chosen_cases("qwen3-30b-a3b", "megatron-core", KEYS["megatron-core"][2], "B200"):
        program = megatron_program(chosen)
        assert not list(
            mistakes(list(program.words[1:]), program.variables, len(chosen.strategy.placement))
        )
        assert program.variables["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] == "1"
        assert {
            ("--use-transformer-engine-op-fuser", ""),
            ("--fp8-format", "e4m3"),
            ("--fp8-recipe", "mxfp8"),
            ("--cuda-graph-scope", "full_iteration"),
        } <= set(pairs_of_program(chosen))
        [text] = bridge_overrides(chosen).files.values()
        assert "export NVTE_CUTEDSL_FUSED_GROUPED_MLP=1\n" in text
        assert "mixed_precision=bf16_with_mxfp8_mixed" in words_of(text)
        assert "fp8_attention: fp8_dot_product_attention=True" in text
        assert "fp8_attention: fp8_dot_product_attention=True" in program.head
        told += 1
    assert told > 5


@pytest.mark.parametrize("keys", KEYS["megatron-core"])
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "gpt-oss-120b"])
def test_no_override_of_bridge_stands_twice(name: str, keys: str) -> None:
    for chosen in chosen_cases(name, "megatron-core", keys):
        [text] = bridge_overrides(chosen).files.values()
        names = [
            word.partition("=")[0] for word in words_of(text) if re.match(r"[a-z]+\.\w+=", word)
        ]
        assert len(names) == len(set(names)) > 10


@pytest.mark.parametrize("planned", ["bf16", "fp8"])
def test_attention_in_8_bit_floats_is_read(planned: str) -> None:
    """A flag, or a key of Megatron-Bridge, leads to the trait unless it has that value."""
    keys = f"precision: fp8\ntraits: {{attention_format: {planned}}}\n"
    chosen = next(iter(chosen_cases("llama-3-8b", "megatron-core", keys)))
    flags = {"fp8-format": "hybrid", "fp8-dot-product-attention": ""}
    told = " ".join(str(note) for note in notes_of(flags, chosen.experiment, "run.sh"))
    hint = "plan it with --set traits.attention_format=fp8"
    assert (hint in told) is (planned == "bf16")


def test_the_parser_refuses_what_was_exported_before() -> None:
    """ZeRO-3 without its checkpoint format, and a flag that stands twice."""
    words = ["--use-megatron-fsdp", "--context-parallel-size", "2", "--context-parallel-size", "2"]
    sizes = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
    told = list(mistakes([*words, *sizes, "--num-layers", "8"], {}, 8))
    assert any("stands twice" in line for line in told)
    assert "use-megatron-fsdp needs ['ckpt-format fsdp_dtensor']" in told


DENSE = ("llama-3-8b", "mistral-7b")
TRAINED = {**dict.fromkeys(RUNTIMES, DENSE), **dict.fromkeys(("megatron-core", "fsdp2"), PRESETS)}
"""Presets of `test_what_a_runtime_runs_its_program_is_told` that its program trains, by runtime."""


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", [*DENSE, "deepseek-v3", "gpt-oss-120b"])
def test_what_a_runtime_runs_its_program_is_told(name: str, runtime: str) -> None:
    """Every strategy that the runtime launches starts, if its program trains the model at all."""
    cases, refused = list(chosen_cases(name, runtime)), []
    for chosen in cases:
        try:
            start_of(chosen)
        except ValueError as error:
            refused.append(str(error))
    assert len(cases) > 5
    assert refused == [] if name in TRAINED[runtime] else len(refused) == len(cases)


# ------------------------------------------------------------------------------- traits


def test_every_trait_has_a_row() -> None:
    """A new trait needs a flag in the programs that decide it, or the reason why none does."""
    names = {trait.name for trait in fields(RuntimeTraits)}
    written = {trait for rows in FLAGS.values() for trait in rows}
    without_flag = {trait for traits in Assumed.shipped().reasons.values() for trait in traits}
    assert written <= names
    assert without_flag <= names
    assert written | without_flag == names


TOGGLED: Mapping[str, Any] = {
    "bucket_elements": 1e6,
    "waiting_elements": 5e8,
    "loss_fraction": 0.5,
    "vocabulary_multiple": 64,
    "exchange_multiprocessors": 10,
    "context_parallel": "all-gather",
    "dispatcher": "alltoall",
    "fp8_recipe": "delayed",
    "cuda_graphs": "attention",
    "recompute_modules": ("layernorm",),
}
"""Values that differ from megatron-core's, of traits that are not switches."""

TOGETHER: Mapping[str, Any] = {"overlaps_shared_experts": {"dispatcher": "alltoall"}}
"""Other traits that a trait needs."""


@pytest.mark.parametrize("trait", [*FLAGS["megatron-lm"]])
def test_a_trait_that_a_flag_decides_changes_its_flag(trait: str) -> None:
    if trait in {"expert_streams", "formats", "offloaded_blocks"}:
        return  # written with experts, and with the keys `precision` and `offloaded_blocks`
    seen = set()
    for name in ("gpt2-1.5b", "llama-3-8b", "deepseek-v3"):
        for keys in KEYS["megatron-core"][:3]:
            for chosen in list(chosen_cases(name, "megatron-core", keys))[::3]:
                seen |= changed(chosen, trait)
    assert seen & {*FLAGS["megatron-lm"][trait]}, seen


def changed(chosen: Chosen, trait: str) -> set[str]:
    """Return the flags that differ if a trait has another value."""
    experiment = chosen.experiment
    value = TOGGLED[trait] if trait in TOGGLED else not getattr(experiment.traits, trait)
    changes: dict[str, Any] = {trait: value, **TOGETHER.get(trait, {})}
    traits = replace(experiment.traits, **changes)
    other = replace(chosen, experiment=replace(experiment, traits=traits))
    try:
        texts = [set(pairs_of_program(case)) for case in (chosen, other)]
    except ValueError:
        return set()
    return {flag for flag, _ in texts[0] ^ texts[1]}


def pairs_of_program(chosen: Chosen) -> Iterator[tuple[str, str]]:
    """Yield the flags of Megatron's program."""
    for flag, values in pairs(list(megatron_program(chosen).words)):
        yield f"--{flag}", " ".join(values)


def test_an_export_lists_what_its_number_assumes() -> None:
    [sharded, *_] = [
        chosen
        for chosen in chosen_cases("llama-3-8b", "megatron-core")
        if chosen.strategy.zero.stage == 1
    ]
    [text] = megatron_script(sharded).files.values()
    for line in (
        "overlaps_gradient_sync on: --overlap-grad-reduce",
        "overlaps_weight_gather on: --overlap-param-gather",
        "fused_attention on: --attention-backend",
        "has_pat: NCCL 2.23 or newer",
    ):
        assert f"#   {line}\n" in text


# ------------------------------------------------------------------------- other programs


def test_deepseek_v3_gets_its_blocks_router_and_module_of_further_tokens() -> None:
    chosen = next(
        chosen
        for chosen in chosen_cases("deepseek-v3", "megatron-core")
        if chosen.strategy.pp == 4 and chosen.strategy.stages[0].options.ep > 1
    )
    written = dict(pairs_of_program(chosen))
    assert {
        "--num-layers": "61",
        "--mtp-num-layers": "1",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--moe-token-dispatcher-type": "flex",
        "--moe-router-score-function": "sigmoid",
        "--kv-lora-rank": "512",
    }.items() <= written.items()
    assert re.fullmatch(r"E[t*\d|]*\|t\*\d+mL", written["--pipeline-model-parallel-layout"])


def test_torchtitan_gets_the_flavor_of_a_model() -> None:
    for name, module, flavor in (
        ("llama-3-8b", "llama3", "8B"),
        ("qwen3-30b-a3b", "qwen3", "30B-A3B"),
        ("deepseek-v3", "deepseek_v3", "671B"),
        ("gpt-oss-120b", "gpt_oss", "120b"),
    ):
        chosen = next(iter(chosen_cases(name, "fsdp2")))
        [text] = titan_config(chosen).files.values()
        assert f"from torchtitan.models.{module} import" in text
        [model] = re.findall(r"^MODEL = (.*)$", text, re.MULTILINE)
        assert ast.literal_eval(model)["flavor"] == flavor
        assert "'disable_cuda_graphs': True" in text  # torchtitan refuses them with pipelines


def test_bridge_names_the_recipe_of_every_preset_that_it_has() -> None:
    named = {}
    for name in PRESETS:
        chosen = next(iter(chosen_cases(name, "megatron-core")))
        [text] = bridge_overrides(chosen).files.values()
        [recipe] = re.findall(r'--recipe "\$\{RECIPE:[-?](.*)\}"', text)
        named[name] = recipe
    without = {name for name, recipe in named.items() if "the name of" in recipe}
    assert without == {
        "gpt2-1.5b",
        "llama-2-13b",
        "llama-2-70b",
        "mistral-7b",
        "mixtral-8x7b",
        "gpt2-7m",
    }
    assert named["deepseek-v3"] == "deepseek_v3_pretrain_config"
    assert named["llama-3-405b"] == "llama31_405b_pretrain_config"


BASE: dict[str, Any] = {
    "name": "playbook",
    "model": {"family": "llama", "sequence_length": 4096, "num_heads": 32, "vocab_size": 131072},
    "cluster": {"nodes": [{"device": "H100", "slots": 8, "inter_gbit_per_s": 3200}]},
    "global_batch_size": 1,
}


@cache
def models(text: str) -> Model:
    """Return the model of an experiment."""
    return experiment_from(text).model


def test_nanotron_cuts_as_it_did_in_published_runs() -> None:
    """Rows whose last stage has no more than the loss are told otherwise in the table."""
    table = Path("experiments/published/playbook.csv")
    [*rows] = csv.DictReader(table.read_text("utf-8").splitlines())
    seen = 0
    for row in rows:
        figures = {key.removeprefix("model."): row[key] for key in row if key.startswith("model.")}
        text = yaml.safe_dump(
            {
                **BASE,
                "model": {**BASE["model"], **{k: yaml.safe_load(v) for k, v in figures.items()}},
            }
        )
        bounds = weighed_bounds(models(text), int(row["pp"]))
        if bounds is not None and row["bounds"]:
            assert row["bounds"] == " ".join(map(str, bounds))
            seen += 1
    assert seen > 500


def test_nanotron_gets_its_own_cuts_only() -> None:
    pairs = [c for c in chosen_cases("llama-3-8b", "nanotron") if c.strategy.pp == 2]
    assert {chosen.strategy.bounds for chosen in pairs} == {(0, 19, 35)}  # the head is 2.2 blocks
    stages = pairs[0].strategy.stages
    moved = [replace(stages[0], end_layer=17), replace(stages[1], first_layer=17)]
    even = replace(pairs[0], strategy=replace(pairs[0].strategy, stages=tuple(moved)))
    with pytest.raises(ValueError, match="at 0 19 35; this strategy cuts at 0 17 35"):
        nanotron_config(even)

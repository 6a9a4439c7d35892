import re
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import CATALOGUE
from amp_ray.errors import InputError
from amp_ray.inputs import profile, strategies
from amp_ray.inputs.cluster_section import NodeSection
from amp_ray.inputs.experiment import (
    DIMENSIONS,
    OwnProgram,
    Pattern,
    SshSettings,
    without_hosts,
)
from amp_ray.inputs.experiment_file import ExperimentFile, build_experiment
from amp_ray.inputs.hostfile import parse_hostfile
from amp_ray.inputs.profile import ANALYTIC
from amp_ray.inputs.section import Section, validate
from amp_ray.inputs.yaml_text import parse_yaml
from amp_ray.runtimes.traits import RUNTIMES, USUAL, RuntimeTraits
from amp_ray.strategies.recompute import AUTO, NO_RECOMPUTE
from amp_ray.strategies.zero import AUTO_STAGE
from support.experiments import LONG, SMALL, MemoryFiles, experiment_from, small_experiment

# ------------------------------------------------------------------------------- documents


def keys() -> Iterator[tuple[type[Section], str]]:
    for module in (profile, strategies):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Section) and kind is not Section:
                yield from ((kind, key) for key in kind.model_fields)


@pytest.fixture(scope="module")
def formats(repository: Path) -> str:
    return (repository / "docs" / "formats.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def documented(formats: str) -> set[str]:
    """The words in backquotes of the tables' first columns."""
    rows = [line.split("|")[1] for line in formats.splitlines() if line.startswith("| `")]
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


ON_T4 = {
    name: replace(RUNTIMES[name], fused_attention=False)
    for name in ("megatron-core", "llm-foundry")
}
"""Runtimes whose one kernel for attention does not run on SMALL's boards."""

IN_FP16 = {"automodel": replace(RUNTIMES["automodel"], formats=USUAL)}
"""Runtimes that keep other formats when they train in bf16."""


def on_t4(traits: RuntimeTraits) -> RuntimeTraits:
    """Return traits as SMALL's boards and its model decide."""
    return traits.on_boards([CATALOGUE["T4"]], "fp16", 0)


@pytest.mark.parametrize(("section", "key"), list(keys()))
def test_every_key_is_documented(section: type[BaseModel], key: str, documented: set[str]) -> None:
    assert key in documented, f"docs/formats.md lacks {key} of {section.__name__}"


def blocks(documentation: str, language: str) -> list[str]:
    fences = documentation.split("```")[1::2]
    return [
        text for first, _, text in (block.partition("\n") for block in fences) if first == language
    ]


def test_documented_files_are_valid(repository: Path, formats: str) -> None:
    # The tables of this page are made from the code; tests/integration/docs builds it
    page = (repository / "docs" / "experiment-file.md").read_text(encoding="utf-8")
    first, *others = blocks(page, "yaml")
    assert validate(ExperimentFile, parse_yaml(first, file="example.yaml")).name == "example"
    (device,) = (block for block in others if block.startswith("device:"))
    rest = {"slots": 1, "intra_gbit_per_s": 1, "inter_gbit_per_s": 1}
    assert NodeSection.model_validate(yaml.safe_load(device) | rest).count == 1
    (hosts,) = (block for block in blocks(formats, "") if "worker-1 slots=8" in block)
    assert [entry.num_slots for entry in parse_hostfile(hosts)] == [8, 8, 4]


# ------------------------------------------------------------------- values and mistakes

CAN = "traits: {sequence_parallel: true}\n"
SSH = (
    "{user: u, identities: [a, b], known_hosts: k, config: null, use_agent: true, "
    "connect_timeout_s: 3, python: /py}"
)
PROGRAM = "{argv: [run, x.py], per: node, metric: megatron, files: [x.py], cwd: /w, collect: ['*']}"


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("", "profile", ANALYTIC),
        ("", "precision", "fp16"),
        ("", "optimizer", "adam"),
        ("", "zero_stage", 0),
        ("", "recompute.kind", "none"),
        ("", "traits.name", "deepspeed"),
        ("", "constants", Constants(host_s_per_iteration=0.002)),  # of its runtime
        ("", "limits.micro_batch_sizes", None),
        ("", "host_groups", (("node0", "node1"),)),
        *(
            ("", f"trials.{name}", value)
            for name, value in {
                "backend": "ssh",
                "launcher": "agent",
                "warm": True,
                "ssh": SshSettings(),
                "python": None,
                "program": None,
                "num_steps": 20,
                "num_warmup_steps": 5,
            }.items()
        ),
        *(
            (f"runtime: {name}", "traits", on_t4((ON_T4 | IN_FP16).get(name, traits)))
            for name, traits in RUNTIMES.items()
            if not traits.needs_flash_attention
        ),
        ("runtime: amp-2022", "model.num_layers", 12),
        ("search: {min_tp: 2}", "limits.min_tp", 2),
        ("search: {micro_batch_sizes: [4, 1, 4]}", "limits.micro_batch_sizes", (1, 4)),
        ("runtime: megatron-core\nrelease: '25.09'", "traits.release", "25.09"),
        ("runtime: megatron-core\nrelease: 26.06", "traits.release", "26.06"),
        ("runtime: fsdp2\nrelease: 2024", "traits.release", "2024"),
        ("runtime: fsdp2\nrelease: 0.3", "traits.release", "0.3"),
        ("runtime: megatron-core\ntraits: {fp8_recipe: delayed}", "traits.fp8_recipe", "delayed"),
        ("traits: {shards_heads: false}", "traits.shards_heads", False),
        ("traits: {virtual_stages: 2}", "traits.virtual_stages", 2),
        ("traits: {context_bytes: 7}", "traits.context_bytes", 7.0),
        (
            "traits: {launch_limit_s: 60, launch_iterations: 10}",
            "traits.launch_limit_s",
            60.0,
        ),
        ("constants: {gemm_scale: 0.5}", "constants.gemm_scale", 0.5),
        # A common factor slows everything down
        ("constants: {program_scale: 2, gemm_scale: 0.5}", "constants.gemm_scale", 0.25),
        ("constants: {program_scale: 2}", "constants.program_scale", 2.0),
        ("constants: {program_scale: 2}", "constants.kernel_gap_s", 2 * Constants().kernel_gap_s),
        ("", "sequence_parallel", False),
        (CAN, "sequence_parallel", "auto"),
        (f"{CAN}sequence_parallel: auto", "sequence_parallel", "auto"),
        (f"{CAN}sequence_parallel: true", "sequence_parallel", True),
        (f"{CAN}sequence_parallel: false", "sequence_parallel", False),
        (f"{CAN}search: {{space: heterogeneous}}", "sequence_parallel", "auto"),
        (f"{CAN}search: {{space: operator}}", "sequence_parallel", False),
        ("trials: {backend: local}", "trials.backend", "local"),
        ("trials: {timeout_s: 60}", "trials.timeout_s", 60.0),
        ("trials: {launcher: deepspeed}", "trials.launcher", "deepspeed"),
        ("trials: {warm: false, python: /py}", "trials.python", "/py"),
        ("trials: {environment: {NCCL_DEBUG: WARN}}", "trials.environment", {"NCCL_DEBUG": "WARN"}),
        (
            f"trials: {{ssh: {SSH}}}",
            "trials.ssh",
            SshSettings(
                user="u",
                identities=("a", "b"),
                known_hosts="k",
                config=None,
                use_agent=True,
                connect_timeout_s=3.0,
                python="/py",
            ),
        ),
        (
            f"trials: {{program: {PROGRAM}}}",
            "trials.program",
            OwnProgram(
                argv=("run", "x.py"),
                per="node",
                metric="megatron",
                files=("x.py",),
                cwd="/w",
                collect=("*",),
            ),
        ),
        (
            "trials: {program: {argv: [run], metric: {pattern: 'took ([0-9.]+)', unit: ms}}}",
            "trials.program.metric",
            Pattern(pattern="took ([0-9.]+)", unit="ms"),
        ),
    ],
)
def test_a_key_sets_its_value(text: str, attribute: str, value: object) -> None:
    assert attrgetter(attribute)(experiment_from(f"{SMALL}{text}\n")) == value


def test_boards_without_flash_attention_compute_attention_otherwise() -> None:
    def names(runtime: str, device: str, added: str = "") -> set[str]:
        text = SMALL.replace("device: T4", f"device: {device}")
        block = experiment_from(f"{text}runtime: {runtime}\n{added}").model.layers[1]
        return {operator.name for operator in block.operators}

    assert "attention" in names("megatron-core", "A100-40")
    assert "attention" not in names("megatron-core", "V100-16")
    assert "attention" in names("megatron-core", "V100-16", "traits: {fused_attention: true}\n")
    assert "attention" in names("torch", "V100-16")


def test_mistakes_of_the_cluster_hide_none_of_the_model() -> None:
    text = SMALL.replace("device: T4", "device: NOPE").replace("num_heads: 8", "num_heads: 7")
    with pytest.raises(InputError) as caught:
        experiment_from(f"{text}runtime: megatron-core\n")
    assert "NOPE" in str(caught.value)
    assert "num_heads 7" in str(caught.value)


def test_ranks_divide_tokens_where_tp_does() -> None:
    experiment = experiment_from(SMALL + CAN)
    options = [experiment.stage_options(tp, 1) for tp in (1, 2, 3)]  # 128 tokens
    assert [stage.sequence_parallel for stage in options] == [False, True, False]


TRANSGAN = "family: transgan, depth: [2, 2], hidden_size: 64, num_heads: 4, bottom_width: 2"
GPT2 = SMALL[SMALL.index("family") : SMALL.index("}\ncluster")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runtime: megatron-lm", r"found 'megatron-lm'; .*did you mean 'megatron-lm-2022'"),
        (
            "traits: {virtual_stages: true}",
            "traits.virtual_stages: found true; expected an integer from",
        ),
        ("traits: {virtual_stages: 0}", "traits: virtual_stages must be at least 1"),
        ("runtime: torch\nrelease: '1.0'", "release: found '1.0'; torch has no releases"),
        (
            "runtime: megatron-core\nrelease: '1.0'",
            "release: found '1.0'; expected one of 26.08, 26.08-nvfp4-experts, 26.08-lib",
        ),
        (
            "runtime: megatron-core\ntraits: {dispatcher: mpi}",
            "traits.dispatcher: found 'mpi'; expected one of auto, nccl, alltoall, deepep",
        ),
        (
            "runtime: megatron-core\ntraits: {fused_experts: true}",
            "traits.fused_experts: found true; kernels of fused experts need a model with experts",
        ),
        *(
            (
                f"traits: {{context_bytes: {value}}}",
                f"traits.context_bytes: found {shown}; expected a number from 0 to",
            )
            for value, shown in (("-1", "-1"), (".inf", "inf"), ("big", "'big'"))
        ),
        (
            "traits: {launch_limit_s: 60}",
            "traits: launch_limit_s 60.0 needs launch_iterations of at leas",
        ),
        (
            "traits: {max_zero_stage: 4}",
            "traits: max_zero_stage is 4; expected 0, which is min_zero_stage, to 3",
        ),
        (
            "traits: {max_pipeline_zero_stage: 2}",
            "traits: max_pipeline_zero_stage is 2; in a pipeline the cost mode",
        ),
        (
            "sequence_parallel: true",
            "sequence_parallel: found true; runtime 'deepspeed' has no sequence parallelism, exp",
        ),
        (
            f"{CAN}search: {{space: heterogeneous}}\nsequence_parallel: true",
            "sequence_parallel: found true; it is planned in spaces",
        ),
        (
            "runtime: nanotron\nzero_stage: 2",
            "zero_stage: found 2; runtime 'nanotron' works with zero_stage up to 1",
        ),
        ("shard_ranks: 2", "shard_ranks: shard_ranks 2 need zero_stage 1 to 3, found 0"),
        ("zero_stage: 1\nshard_ranks: 2", "shard_ranks: .*'deepspeed' shards over all data-para"),
        ("reshard_after_forward: false", "reshard_after_forward is for zero_stage 3"),
        (
            "zero_stage: 3\nreshard_after_forward: false\ntraits: {keeps_weights: false}",
            "reshard_after_forward: runtime 'deepspeed' gathers weights again: set reshard_after_",
        ),
        (
            "zero_stage: 2\nsearch: {space: heterogeneous}",
            "zero_stage: found 2; stages with device groups of their own share out optimizer",
        ),
        ("trials: {launcher: pdsh}", r"trials\.launcher: found 'pdsh'"),
        ("trials: {ssh: {identity: a}}", r"trials\.ssh\.identity: unknown key 'identity'"),
        ("trials: {ssh: {identities: a}}", r"trials\.ssh\.identities: found 'a'"),
        ("trials: {warm: 1}", r"trials\.warm: found 1"),
        ("trials: {environment: {A: 1}}", r"trials\.environment\.A: found 1"),
        ("trials: {program: {argv: []}}", r"trials\.program\.argv: found \[\]"),
        (
            "trials: {program: {argv: [run], metric: tensorboard}}",
            r"trials\.program\.metric.*tensorboard",
        ),
        *(
            (f"trials: {{program: {{argv: [run], metric: {{pattern: '{pattern}'}}}}}}", message)
            for pattern, message in (
                ("([", r"metric\.pattern: found '\(\[', which is no regular expression"),
                ("took", r"metric\.pattern: found 'took' with 0 groups; expected one"),
                ("(a)(b)", r"found '\(a\)\(b\)' with 2 groups; expected one"),
            )
        ),
    ],
)
def test_a_mistake_is_led_to_its_key(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment_from(f"{SMALL}{text}\n")


def test_pictures_have_no_tokens_to_divide() -> None:
    text = f"{SMALL.replace(GPT2, TRANSGAN)}{CAN}sequence_parallel: true\n"
    with pytest.raises(InputError, match="found true; family 'transgan' has no tokens to divide"):
        experiment_from(text)


def test_an_experiment_keeps_the_places_of_its_keys() -> None:
    experiment = experiment_from(SMALL + "search: {max_tp: 2}\n")
    line = SMALL.count("\n") + 1
    assert str(experiment.where("search")) == f"test.yaml:{line}: search"


# -------------------------------------------------------------------------- model, profile


def test_a_configuration_gives_the_figures_of_the_model() -> None:
    text = SMALL.replace(GPT2, "config: c.json, sequence_length: 64")
    config = '{"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, '
    model = experiment_from(text, {"c.json": config + '"vocab_size": 99}'}).model
    assert (model.shape.hidden_size, model.shape.sequence_length, model.num_layers) == (64, 64, 5)


def test_a_model_may_set_which_layers_are_listed() -> None:
    listed = ("family: gpt2", "family: gpt2, layer_list: amp-2022")
    assert small_experiment(listed).model.num_layers == 12


def test_the_vocabulary_is_padded_as_the_runtime_pads_it() -> None:
    text = SMALL.replace("vocab_size: 1024", "vocab_size: 1000")
    plain, padded = experiment_from(text), experiment_from(text + "runtime: megatron\n")
    assert padded.model.num_parameters - plain.model.num_parameters == 24 * 256


@pytest.mark.parametrize(("runtime", "fuses"), [("deepspeed", True), ("megatron", False)])
def test_the_runtime_decides_whether_attention_is_fused(runtime: str, *, fuses: bool) -> None:
    block = experiment_from(f"{SMALL}runtime: {runtime}\n").model.layers[1]
    assert any(op.name == "attention" for op in block.operators) is fuses
    assert any("dropout" in op.name for op in block.operators) is not fuses


def test_a_measured_profile_is_read_from_its_folder() -> None:
    text = SMALL + "profile: {source: table, path: measured}\n"
    table = "layer,tp,micro_batch_size,forward_s\n" + "".join(f"{i},1,1,1e-3\n" for i in range(9))
    files = {
        "measured/profile.yaml": "num_layers: 9\nmodel: m\nprecision: fp16\nhardware: h\n"
        "versions: v\n",
        "measured/T4.csv": table,
    }
    assert list(experiment_from(text, files).profile.tables) == ["T4"]
    # A mistake in another file keeps its line
    with pytest.raises(InputError, match=r"^measured/T4\.csv:11: forward_s: found 'x'"):
        experiment_from(text, files | {"measured/T4.csv": table + "0,1,2,x\n"})


# -------------------------------------------------------------------------- groups of hosts

TWO = "    - {count: 2, device: T4, slots: 2, intra_gbit_per_s: 50, inter_gbit_per_s: 10}\n"
FOUR = TWO.replace("count: 2", "count: 4")
LINKS = """\
  links:
    - {between: [node0, node1], gbit_per_s: 7}
    - {between: [node1, node2], gbit_per_s: 3}
"""


def test_the_first_group_of_hosts_is_planned_for() -> None:
    text = SMALL.replace(TWO, FOUR + LINKS) + "trials: {host_groups: 2}\n"
    experiment = experiment_from(text)
    assert [node.name for node in experiment.cluster.nodes] == ["node0", "node1"]
    assert experiment.host_groups == (("node0", "node1"), ("node2", "node3"))
    assert [*experiment.cluster.pair_links] == [(0, 1)]


def test_a_group_of_hosts_may_be_a_rack_or_a_part_of_one() -> None:
    for size, expected in ((2, ("node0", "node1")), (4, ("node0", "node1"))):
        nodes = FOUR.replace("slots: 2", f"slots: 2, rack: {{nodes: {size}}}")
        experiment = experiment_from(f"{SMALL.replace(TWO, nodes)}trials: {{host_groups: 2}}\n")
        assert [node.host_names for node in experiment.cluster.nodes] == [expected]
        assert experiment.host_groups == (("node0", "node1"), ("node2", "node3"))


def test_a_rack_goes_on_without_a_host() -> None:
    nodes = FOUR.replace("slots: 2", "slots: 2, rack: {nodes: 3}")
    experiment = experiment_from(SMALL.replace(TWO, nodes))
    kept = without_hosts(experiment, ["node1"]).cluster
    assert [node.host_names for node in kept.nodes] == [("node0", "node2"), ("node3",)]
    with pytest.raises(InputError, match="the hosts are node0, node1, node2, node3"):
        without_hosts(experiment, ["node4"])


@pytest.mark.parametrize(
    ("nodes", "number", "message"),
    [
        (FOUR, 3, "found 3; it must divide the number of nodes, 4"),
        (FOUR, 5, "found 5; it must divide the number of nodes, 4"),
        (
            TWO + TWO.replace("T4", "L4"),
            2,
            r".*group 1 \(node2, node3\) has other devices, .* than group 0 \(node0, node1\)",
        ),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(nodes: str, number: int, message: str) -> None:
    text = f"{SMALL.replace(TWO, nodes)}trials: {{host_groups: {number}}}\n"
    with pytest.raises(InputError, match=rf"trials\.host_groups: {message}"):
        experiment_from(text)


def test_by_default_the_search_chooses_what_the_runtime_can_combine() -> None:
    text = f"{LONG}global_batch_size: 8\n"
    experiment = build_experiment(parse_yaml(text, file="long.yaml"), MemoryFiles())
    assert (experiment.zero_stage, experiment.recompute) == (AUTO_STAGE, AUTO)
    assert (experiment.max_cp, experiment.virtual_stages(6)) == (2, (1, 2, 3, 4, 6))
    other = replace(experiment, traits=RUNTIMES["deepspeed"])
    assert (other.max_cp, other.virtual_stages(6)) == (1, (1,))


def test_a_search_of_some_dimensions_keeps_what_the_file_fixes() -> None:
    text = f"{LONG}global_batch_size: 8\nzero_stage: 1\nsearch: {{virtual_stages: [2]}}\n"
    experiment = build_experiment(parse_yaml(text, file="long.yaml"), MemoryFiles())
    only = experiment.only(["pp", "cp"])
    assert (only.zero_stage, only.recompute, only.virtual_stages(4)) == (1, NO_RECOMPUTE, (2,))
    assert (only.limits.max_tp, only.limits.max_pp, only.max_cp) == (1, None, 2)
    assert experiment.only(DIMENSIONS).limits == experiment.limits

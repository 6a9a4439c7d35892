"""What other programs are told of a strategy, and what they say of one."""

import csv
import io
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from amp_ray.errors import InputError
from amp_ray.exports.chosen import Chosen, Export
from amp_ray.exports.configs import accelerate_config, nanotron_config
from amp_ray.exports.megatron import bridge_overrides, megatron_script, pairs_of
from amp_ray.exports.reading import read_program
from amp_ray.exports.rows import csv_table, optuna_script
from amp_ray.exports.shell import words_of
from amp_ray.exports.torchtitan import titan_config
from amp_ray.inputs.experiment import Experiment
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.recompute import FULL, NO_RECOMPUTE, PER_OPERATOR, SELECTIVE, Recompute
from amp_ray.strategies.strategy import Stage, StageOptions, Strategy
from amp_ray.strategies.zero import Zero
from support.experiments import small_experiment

LLAMA = ("family: gpt2", "family: llama")
BF16 = "runtime: megatron-core\nprecision: bf16\n"
Write = Callable[[Chosen], Export]


def experiment(*replaced: tuple[str, str], keys: str = BF16) -> Experiment:
    """Build llama on 2 nodes of 2 A100; its list has embedding, 6 blocks, norm and head."""
    step = ("global_batch_size: 8\n", f"global_batch_size: 8\n{keys}")
    return small_experiment(("device: T4", "device: A100-40"), LLAMA, step, *replaced)


def strategy(
    bounds: tuple[int, ...],
    recompute: Recompute = NO_RECOMPUTE,
    placement: tuple[int, ...] | None = None,
    **options: Any,  # noqa: ANN401 - fields of StageOptions
) -> Strategy:
    """Make a strategy on 4 devices."""
    pp = len(bounds) - 1
    degrees: dict[str, Any] = {"tp": 1, "dp": 4 // pp // options.get("tp", 1), **options}
    candidate = Candidate(
        options=StageOptions(recompute=recompute, **degrees),
        pp=pp,
        micro_batch_size=1,
        num_micro_batches=8 // degrees["dp"],
    )
    return Strategy.uniform(candidate, bounds, placement)


def chosen(plan: Strategy, base: Experiment | None = None) -> Chosen:
    """Choose a strategy."""
    return Chosen(experiment=base or experiment(), strategy=plan, predicted_s=1.5)


def text_of(export: Export) -> str:
    """Return the only file."""
    [text] = export.files.values()
    return text


KEPT = Zero(stage=3, keeps_weights=True)
UNEVEN = strategy((0, 3, 9))
MIDDLE = strategy((0, 4, 5, 7, 9))


def flags(plan: Strategy) -> dict[str, str]:
    """Return the flags of Megatron's script."""
    return pairs_of(words_of(text_of(megatron_script(chosen(plan)))))


def test_a_script_is_bash_and_starts_every_host() -> None:
    text = text_of(megatron_script(chosen(strategy((0, 4, 9)))))
    program = text.replace("exec torchrun", "echo")
    address = {"MASTER_ADDR": "127.0.0.1"}
    for node, rest in (("0", "--node-rank 0"), ("1", "--node-rank 1")):
        done = subprocess.run(
            ["/bin/bash", "-c", program, "it", "--lr", "a b"],
            env={"PATH": "/usr/bin:/bin", "NODE_RANK": node, **address},
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"--nnodes 2 {rest} --nproc-per-node 2 --master-addr 127.0.0.1" in done.stdout
        assert done.stdout.endswith("--lr a b\n")


def test_a_norm_that_moves_is_told() -> None:
    notes = megatron_script(chosen(strategy((0, 1, 4, 8, 9)))).notes
    assert any("final norm goes with the head" in note for note in notes)
    assert not any("norm" in note for note in megatron_script(chosen(MIDDLE)).notes)


@pytest.mark.parametrize(
    "write", [megatron_script, bridge_overrides, titan_config, nanotron_config, accelerate_config]
)
def test_stages_that_differ_and_slices_are_refused(write: Write) -> None:
    stages = (
        Stage(first_layer=0, end_layer=4, options=StageOptions(tp=2, dp=1), shares=(2,)),
        Stage(first_layer=4, end_layer=9, options=StageOptions(tp=1, dp=2), shares=(1, 1)),
    )
    mixed = Strategy(stages=stages, micro_batch_size=2, num_micro_batches=4, placement=(0, 1, 2, 3))
    with pytest.raises(ValueError, match="those here differ"):
        write(chosen(mixed))


@pytest.mark.parametrize(
    ("write", "plan", "message"),
    [
        (titan_config, strategy((0, 9), zero=Zero(stage=1)), "zero_stage 3 or 0, not 1"),
        (
            megatron_script,
            strategy((0, 9), zero=Zero(stage=3, keeps_weights=True)),
            "keeps_weights",
        ),
        (titan_config, strategy((0, 9), Recompute(kind="full", layers=2)), "in all blocks alike"),
        (titan_config, strategy((0, 9), SELECTIVE), "by operator or wholly"),
        (megatron_script, strategy((0, 9), PER_OPERATOR), "no single operators"),
        (nanotron_config, strategy((0, 9), FULL), "cannot be told recompute full"),
        (accelerate_config, strategy((0, 4, 9), FULL), "cannot be told recompute full"),
        (megatron_script, strategy((0, 9), Recompute(kind="selective", layers=1)), "selectively"),
        (megatron_script, strategy((0, 4, 9), placement=(0, 2, 1, 3)), "host by host"),
        (nanotron_config, strategy((0, 9), tp=2, ep=2), "cannot be told ep 2"),
    ],
)
def test_what_a_program_cannot_be_told_is_refused(
    write: Write, plan: Strategy, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(chosen(plan))


FSDP2 = "runtime: fsdp2\nprecision: bf16\n"
MIXTRAL = "num_layers: 6, num_experts: 4, experts_per_token: 2, expert_feed_forward_size: 128"
EXPERTS = {"replaced": ("num_layers: 6", MIXTRAL)}
SHARDED = Zero(stage=3)


@pytest.mark.parametrize(
    ("write", "plan", "base", "message"),
    [
        (titan_config, UNEVEN, {"replaced": LLAMA[::-1]}, "not model family 'gpt2'"),
        (titan_config, UNEVEN, {"keys": "precision: fp16\n"}, "trains in bf16 or fp32, not fp16"),
        (titan_config, strategy((0, 9)), EXPERTS, "is not told num_experts, experts_per_token"),
        (nanotron_config, strategy((0, 9)), EXPERTS, "is not told num_experts, experts_per_token"),
        (
            accelerate_config,
            strategy((0, 4, 9), zero=SHARDED),
            {"keys": FSDP2},
            "has no pipeline",
        ),
        (
            accelerate_config,
            strategy((0, 9), SELECTIVE, zero=SHARDED),
            {"keys": FSDP2},
            "all blocks or none, not selective",
        ),
        (
            accelerate_config,
            strategy((0, 9), tp=4, zero=SHARDED),
            {"keys": FSDP2},
            "at least 2 ranks; here dp is 1",
        ),
        (
            accelerate_config,
            strategy((0, 9), tp=2, cp=2, zero=SHARDED),
            {"keys": FSDP2},
            "cannot be told cp 2",
        ),
    ],
)
def test_what_a_program_cannot_be_told_of_an_experiment_is_refused(
    write: Write, plan: Strategy, base: dict[str, Any], message: str
) -> None:
    replaced = [base["replaced"]] if "replaced" in base else []
    with pytest.raises(ValueError, match=message):
        write(chosen(plan, experiment(*replaced, keys=base.get("keys", BF16))))


def test_hosts_in_another_order_are_told() -> None:
    moved = chosen(strategy((0, 5, 9), placement=(2, 3, 0, 1)), experiment())
    for write in (bridge_overrides, titan_config, nanotron_config):
        notes = write(moved).notes
        assert any(
            "this order, on these slots: node1 (slots 0, 1), node0" in note for note in notes
        )


def test_biases_of_experts_are_told() -> None:
    for more, has_flag in (("", True), (", expert_bias: true, extra_parameters: 9", False)):
        model = experiment(("num_layers: 6", f"{MIXTRAL}{more}"))
        text = text_of(megatron_script(chosen(strategy((0, 9), ep=2), model)))
        assert ("--disable-bias-linear" in text) == has_flag


def test_another_program_at_the_same_cost_is_refused() -> None:
    """Of a configuration such as OLMo 2's."""
    base = experiment()
    shape = replace(base.model.shape, differs=("norms after both parts",))
    other = replace(base, model=replace(base.model, shape=shape))
    with pytest.raises(ValueError, match="Megatron-LM is not told norms after both parts"):
        megatron_script(chosen(strategy((0, 9)), other))


# ------------------------------------------------------------------------------- reading


def strategy_of(text: str, base: Experiment | None = None) -> dict[str, Any]:
    """Return what a text says."""
    record = read_program(text, file="run.sh", experiment=base or experiment())
    assert record is not None
    return record


SCRIPT = """#!/bin/bash
# --tensor-model-parallel-size 8 stands in a comment
TP=2
PP=${PP:-2}
MODEL_ARGS="--num-layers 6 --hidden-size 256"
GPT_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size=2
    --micro-batch-size "1"   # small
    --global-batch-size 8
)
torchrun --nproc_per_node 4 pretrain_gpt.py ${GPT_ARGS[@]} $MODEL_ARGS \\
    --recompute-granularity selective
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("$TP", "$(nproc)", r"tensor-model-parallel-size: found '\$\(nproc\)'"),
        ("TP=2", "TP=3", "tp 3 x pp 2 do not divide the 4 devices"),
        ("size 8", "size 16", "global_batch_size is 16; the experiment has 8: add --set"),
        ("=2\n    --micro", "=4\n    --micro", "blocks are not divided evenly among 4 stages"),
        ("selective", "some", "--recompute-granularity: found 'some'"),
        ('"1"', '"1" --micro-batch-size 2', "--micro-batch-size is '1' and '2': keep one"),
        ('"1"', '"3"', "does not divide global_batch_size 8"),
        ('"1"', '"1', "cannot be read as a script"),
    ],
)
def test_what_a_script_cannot_mean_is_told(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        strategy_of(SCRIPT.replace(old, new))
    assert re.match(r"run\.sh(:\d+)?: ", str(error.value))


LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SCRIPT.replace("$TP", "x"), "run.sh:7: --tensor-model-parallel-size: found 'x'"),
        (SCRIPT.replace("TP=2", "TP='2"), "run.sh:3: cannot be read as a script: No closing quot"),
        (
            SCRIPT.replace("l-size=2\n", "l-size=" + "9" * 5000 + "\n"),
            "run.sh:8: --pipeline-model-parallel-size",
        ),
        (
            SCRIPT.replace("l-size=2\n", "l-size=999999999\n"),
            "run.sh:8: --pipeline-model-parallel-size: found",
        ),
        (
            "A0="
            + "x" * 9
            + "\n"
            + "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 40))
            + SCRIPT,
            "run.sh:14: 'A13=$A12$A12' is more than 65536 characters when it is written out",
        ),
        (
            f"A={'x' * 60_000}\nB=$A\n" + "\\\n\n" + "C=$A\n" * 40 + SCRIPT,
            "run.sh:20: with its variables the script has more than 1048576 characters",
        ),
        (
            SCRIPT + f"{LAYOUT} 'E({'t*9999' * 40})*9999|({'t*9999' * 40})*9999L'\n",
            f"run.sh:14: {LAYOUT}: found",
        ),
        (SCRIPT + f"{LAYOUT} '{'(t)*9999' * 9}'\n", f"run.sh:14: {LAYOUT}: found"),
        (SCRIPT + "HOSTS=(node0 node1)\nDEVICES=(0,x 1)\n", "DEVICES: found '0,x'; expected slots"),
        (SCRIPT + "HOSTS=(node0 'node1)\nDEVICES=(0 1)\n", "run.sh:14: cannot be read as a script"),
        (SCRIPT + "#" * 2**18, "run.sh: longer than 262,144 characters"),
    ],
)
def test_what_stands_for_much_is_refused_with_its_line(text: str, message: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=re.escape(message)) as error:
        strategy_of(text)
    assert len(str(error.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


TOML = """
[training]
local_batch_size = 8
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
TITAN_FLAGS = "torchrun -m torchtitan.train --training.local_batch_size="
DEEP = "(" * 100_000
TITAN = 'PARALLELISM = {"tensor_parallel_degree": 2}\nTRAINING = {"local_batch_size": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TITAN + "x = (\n", "run.sh:3: cannot be read as Python"),
        (TITAN + "\0", "cannot be read as Python"),
        (TITAN + DEEP, "run.sh:3: cannot be read as Python: too many nested parentheses"),
        (TITAN + "-" * 100_000 + "1\n", "cannot be read as Python: nested too deeply"),
        (TITAN + f"x = {'9' * 20_000}\n", "run.sh:3: cannot be read as Python: Exceeds the limit"),
        (TITAN.replace("2}", "{[]: 1}}"), "run.sh:1: PARALLELISM: expected plain numbers"),
        (TITAN.replace("2}", "f(2)}"), "run.sh:1: PARALLELISM: expected plain numbers"),
        (TITAN.replace("2}", "True}"), "run.sh:1: tensor_parallel_degree: found true"),
        (TITAN.replace("2}", "1e400}"), "run.sh:1: tensor_parallel_degree: found inf"),
        (
            TITAN.replace("2}", f"0x{'f' * 20_000}}}"),
            "run.sh:1: tensor_parallel_degree: found a num",
        ),
        (TITAN.replace('{"local_batch_size": 1}', "[1]"), "training: found [1]; expected keys"),
        (TITAN + "RECOMPUTE = [1]\n", "recompute: found [1], which is not planned"),
        (f"{TOML}x = \n", "run.sh:11: cannot be read as TOML: Invalid value"),
        (f"{TOML}x = {'[' * 100_000}", "cannot be read as TOML"),
        (f"{TOML}x = {'9' * 20_000}\n", "cannot be read as TOML: Exceeds the limit"),
        (f"{TOML}x = 2026-99-99\n", "cannot be read as TOML"),
        (
            TOML.replace("[training]\nlocal_batch_size = 8", "training = 7"),
            "run.sh:2: training: foun",
        ),
        (
            TOML.replace("local_batch_size = 8", "local_batch_size = -1"),
            "run.sh:3: local_batch_size:",
        ),
        (TOML.replace('mode = "full"', "mode = 7"), "run.sh:10: mode: found 7, which is not"),
        (
            TOML.replace("[act", "module_fqns_per_model_part = [7]\n[act"),
            "run.sh:9: module_fqns_per_model_part: found [7]; expected a list of lists",
        ),
        (
            TOML.replace("[act", "module_fqns_per_model_part = [[{}], [7]]\n[act"),
            "run.sh:9: module_fqns_per_model_part: found {}; the modules are",
        ),
        (TITAN_FLAGS + DEEP, "cannot be read as a script: nested too deeply"),
        (TITAN_FLAGS + "-" * 9999 + "1", "run.sh:1: local_batch_size: found"),
        ('{"train_batch_size": ' + "[" * 100_000, "levels deep"),
        ('{\n"train_batch_size": 8,\n"train_batch_size": 8}', "stands there twice"),
        ('{\n"train_batch_size": 8,\n', "run.sh:3: not valid JSON"),
        ('{"x": 1,\n"train_micro_batch_size_per_gpu": 0}', "run.sh:2: train_micro_batch_size_per"),
        ('{"train_batch_size": true}', "run.sh:1: train_batch_size: found true; expected a count"),
        ('{"train_batch_size": 1e400}', "expected a finite number"),
    ],
)
def test_a_configuration_that_is_none_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        strategy_of(text)
    assert str(error.value).startswith("run.sh:")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ("", [0, 4, 9]),  # 6 blocks, and one each for embedding and head: 4 + 4
        ("pipeline_parallel_degree = 3", [0, 3, 6, 9]),  # 3 + 3 + 2
        ("pipeline_parallel_first_stage_less_layers = 0", [0, 5, 9]),  # 4 + 3
        ("pipeline_parallel_last_stage_less_layers = 2", [0, 5, 9]),  # 5 + 4
        ('pipeline_parallel_schedule = "Interleaved1F1B"', [0, 2, 4, 6, 9]),  # 4 chunks: 2 each
    ],
)
def test_without_a_list_of_modules_torchtitan_cuts_by_its_own_rule(
    keys: str, bounds: list[int]
) -> None:
    text = TOML.replace("pipeline_parallel_degree = 2\n", "") if "degree" in keys else TOML
    text = text.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 1")
    text = text.replace("[act", f"{keys}\n[act").replace("shard_degree = 1", "shard_degree = -1")
    base = experiment(("slots: 2", "slots: 3")) if "3" in keys else experiment()
    assert strategy_of(text, base).get("bounds") == bounds


def test_more_stages_than_torchtitan_can_fill_are_refused() -> None:
    text = TOML.replace("pipeline_parallel_degree = 2", "pipeline_parallel_degree = 4")
    with pytest.raises(InputError, match="pipeline_parallel_degree: 4 stages for 3 blocks"):
        strategy_of(text, experiment(("num_layers: 6", "num_layers: 3")))


@pytest.mark.parametrize("layout", ["Et*3|t*3", "t|t", "Et*9L", "Ex|tL", "E(t|*2L"])
def test_a_layout_that_is_none_is_told(layout: str) -> None:
    with pytest.raises(InputError, match="layout"):
        strategy_of(
            SCRIPT.replace("--recompute", f"--pipeline-model-parallel-layout '{layout}' --re")
        )


def test_fp8_is_told_and_read_or_refused() -> None:
    base = experiment(("A100-40", "H100"), keys="runtime: megatron-core\nprecision: fp8\n")
    plan = chosen(strategy((0, 4, 9)), base)
    text = text_of(megatron_script(plan))
    assert pairs_of(words_of(text))["fp8-format"] == "hybrid"
    assert strategy_of(text, base)["pp"] == 2
    with pytest.raises(InputError, match="precision is fp8; the experiment has bf16: add --set"):
        strategy_of(text)
    text = text_of(bridge_overrides(plan))
    assert "mixed_precision=bf16_with_fp8_current_scaling_mixed" in words_of(text)
    for write in (titan_config, nanotron_config):
        with pytest.raises(ValueError, match="fp8"):
            write(plan)


@pytest.mark.parametrize(
    ("kind", "flag", "sizes"),
    [
        ("ring", "p2p", None),
        ("all-gather", "all_gather", None),
        ("all-to-all", "a2a", None),
        ("both", "a2a+p2p", ("2", "1")),
    ],
)
def test_exchanges_of_a_sequence_are_told_and_read(
    kind: str, flag: str, sizes: tuple[str, str] | None
) -> None:
    base = experiment(keys=f"runtime: megatron-core\ntraits: {{context_parallel: {kind}}}\n")
    usual = experiment(keys="runtime: megatron-core\n")
    plan = chosen(strategy((0, 4, 9), cp=2, dp=1), base)
    text = text_of(megatron_script(plan))
    bridge = text_of(bridge_overrides(plan))
    assert f"--cp-comm-type {flag}" in text
    assert f"model.cp_comm_type={flag}" in bridge
    if sizes is not None:
        assert f"--hierarchical-context-parallel-sizes {' '.join(sizes)}" in text
        assert f"model.hierarchical_context_parallel_sizes=[{','.join(sizes)}]" in bridge
        other = text.replace(" ".join(sizes), "1 2")
        names = [name for note in strategy_of(other, base)["not_read"] for name in note.names]
        assert "--hierarchical-context-parallel-sizes 1 2" in names
    for written in (text, bridge):
        read = strategy_of(written, base)
        assert read["cp"] == 2
        assert "context" not in str(read.get("not_read"))
        hint = f"--set traits.context_parallel={kind}"
        assert (hint in str(strategy_of(written, usual))) == (kind != "ring")


def test_heads_that_cannot_be_divided_have_no_flags() -> None:
    keys = "runtime: megatron-core\ntraits: {context_parallel: all-to-all}\n"
    base = experiment(("num_heads: 8", "num_heads: 8, num_key_value_heads: 1"), keys=keys)
    for write in (megatron_script, bridge_overrides):
        with pytest.raises(ValueError, match="tp 1 x cp 2 must divide the 1 heads of keys"):
            write(chosen(strategy((0, 4, 9), cp=2, dp=1), base))


def test_nvfp4_is_told_and_read_or_refused() -> None:
    keys = "runtime: megatron-core\nprecision: {}\n"
    base = experiment(("A100-40", "B200"), keys=keys.format("nvfp4"))
    usual = experiment(("A100-40", "B200"), keys=keys.format("bf16"))
    plan = chosen(strategy((0, 4, 9)), base)
    text = text_of(megatron_script(plan))
    flags = pairs_of(words_of(text))
    assert (flags["fp4-format"], flags["fp4-recipe"]) == ("e2m1", "nvfp4")
    assert {"bf16", "fp8-format", "fp8-recipe"} & flags.keys() == {"bf16"}
    bridge = text_of(bridge_overrides(plan))
    assert "mixed_precision=bf16_with_nvfp4_mixed" in bridge
    for written in (text, bridge):
        assert strategy_of(written, base)["pp"] == 2
        with pytest.raises(InputError, match="precision is nvfp4; the experiment has bf16: add"):
            strategy_of(written, usual)
    other = text.replace("--fp4-recipe nvfp4", "--fp4-recipe custom")
    assert "--fp4-recipe custom" in str(strategy_of(other, base)["not_read"])
    for write in (titan_config, nanotron_config, accelerate_config):
        with pytest.raises(ValueError, match="nvfp4"):
            write(plan)


def test_kept_formats_are_told_and_read_or_refused() -> None:
    mapping = "{compute: fp8, gradients: bf16, primary: fp8, moments: bf16}"
    keys = "runtime: megatron-core\nprecision: {}\nzero_stage: 1\n"
    base = experiment(("A100-40", "H100"), keys=keys.format(mapping))
    usual = experiment(("A100-40", "H100"), keys=keys.format("fp8"))
    sharded = strategy((0, 4, 9), zero=Zero(stage=1))
    text = text_of(megatron_script(chosen(sharded, base)))
    flags = pairs_of(words_of(text))
    assert {name: flags[name] for name in flags if "dtype" in name} == {
        "exp-avg-dtype": "bf16",
        "exp-avg-sq-dtype": "bf16",
        "main-grads-dtype": "bf16",
    }
    switches = {"grad-reduce-in-bf16", "fp8-param-gather", "use-precision-aware-optimizer"}
    assert switches <= flags.keys()
    assert strategy_of(text, base)["pp"] == 2
    with pytest.raises(InputError, match="gradients in bf16; the experiment has the usual: set"):
        strategy_of(text, usual)
    narrow = experiment(keys="runtime: nanotron\nprecision: {gradients: bf16}\n")
    text = text_of(nanotron_config(chosen(strategy((0, 5, 9)), narrow)))
    assert "accumulate_grad_in_fp32: false" in text
    with pytest.raises(ValueError, match="cannot be told gradients bf16"):
        titan_config(chosen(strategy((0, 4, 9)), narrow))
    notes = bridge_overrides(
        chosen(sharded, experiment(keys=keys.format("{gradients: bf16, moments: bf16}")))
    ).notes
    assert any("grad_reduce_in_fp32=False" in note for note in notes)


def test_offloaded_blocks_are_told_and_read_or_refused() -> None:
    base = experiment(keys=BF16 + "traits: {offloaded_blocks: 2}\n")
    plan = strategy((0, 9))
    text = text_of(megatron_script(chosen(plan, base)))
    assert pairs_of(words_of(text))["cpu-offloading-num-layers"] == "2"
    assert strategy_of(text, base)["pp"] == 1
    with pytest.raises(InputError, match=r"add --set traits\.offloaded_blocks=2"):
        strategy_of(text)
    without = text.replace("--cpu-offloading-num-layers 2", "--cpu-offloading-num-layers 0")
    assert strategy_of(without)["pp"] == 1
    with pytest.raises(InputError, match="layers 0; the experiment has 2"):
        strategy_of(without, base)
    overrides = text_of(bridge_overrides(chosen(plan, base)))
    assert "model.cpu_offloading=true" in overrides
    assert "model.cpu_offloading_num_layers=2" in overrides
    for write in (nanotron_config, accelerate_config, titan_config):
        with pytest.raises(ValueError, match="cannot be told offloaded_blocks 2"):
            write(chosen(plan, base))
    most = experiment(keys=BF16 + "traits: {offloaded_blocks: 6}\n")
    with pytest.raises(ValueError, match="offloads fewer than its 6 blocks, found 6"):
        megatron_script(chosen(plan, most))


def test_what_is_no_program_is_left_to_others() -> None:
    for text in ("tp,pp,dp,micro_batch_size\n1,1,4,1\n", "[]", '{"ranking": []}', "ls -l"):
        assert read_program(text, file="x", experiment=experiment()) is None


def test_a_ds_config_has_to_tell_tp_or_pp() -> None:
    config: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    config["gradient_accumulation_steps"] = 4
    with pytest.raises(InputError, match="whether the other 2 are tp or pp"):
        strategy_of(json.dumps(config))
    assert strategy_of(json.dumps({**config, "pipeline": {"stages": 2}}))["pp"] == 2


def test_mics_is_refused_by_its_own_name_where_it_is_not_planned() -> None:
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
    text = json.dumps({**config, "zero_optimization": {"stage": 3, "mics_shard_size": 2}})
    with pytest.raises(InputError, match=r"run\.sh:1: mics_shard_size: found 2; runtime deepspeed"):
        strategy_of(text, experiment(keys="runtime: deepspeed\n"))
    assert strategy_of(text, experiment(keys="runtime: torch\n"))["shard_ranks"] == 2


NANOTRON = """\
parallelism: {dp: 2, pp: 1, tp: 1}
tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 2}
"""


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: MULTI_GPU\nnum_processes: 2\n# per_device_train_batch_size: 2\n",
        NANOTRON,
        "torchrun --nproc_per_node 2 pretrain_gpt.py --micro-batch-size 2",
    ],
)
def test_fewer_processes_than_devices_leave_the_last_ones_idle(text: str) -> None:
    four = experiment()
    record = read_program(text, file="job", experiment=four)
    assert record is not None
    assert (record["dp"], record["num_micro_batches"]) == (2, 2)
    assert record["placement"] == [*map(list, four.cluster.places[:2])]


# ------------------------------------------------------------------------------ all rows


def test_a_table_has_the_columns_of_all_rows() -> None:
    text = text_of(csv_table([{"a": [1, 2.5]}, {"a": 2, "b": "x,y"}]))
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"a": "1 2.5", "b": ""},
        {"a": "2", "b": "x,y"},
    ]


def test_optuna_gets_finished_failed_and_waiting_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1, "recompute": "none", "bounds": [0, 9]}
    rows = [
        {**row, "predicted_s": 1.0, "outcome": "measured", "measured_s": 1.5},
        {**row, "predicted_s": 1.0, "outcome": "oom", "measured_s": None},
        {**row, "tp": None, "iteration_time_s": 2.0},
    ]
    fake = SimpleNamespace(
        distributions=SimpleNamespace(CategoricalDistribution=list),
        trial=SimpleNamespace(
            TrialState=SimpleNamespace(COMPLETE="complete", FAIL="fail"),
            create_trial=lambda **trial: trial,
        ),
    )
    monkeypatch.setitem(sys.modules, "optuna", fake)
    program: dict[str, Any] = {"__name__": "exported"}
    exec(text_of(optuna_script("it's", rows)), program)  # noqa: S102 - what we wrote
    added: list[Any] = []
    study = SimpleNamespace(
        add_trial=lambda trial: added.append((trial["state"], trial["value"])),
        enqueue_trial=lambda params, user_attrs: added.append((params["tp"], user_attrs)),
    )
    program["fill"](study)
    assert program["choices"]["bounds"] == ["0 9"]
    assert added == [("complete", 1.5), ("fail", None), ("*", {"predicted_s": 2.0})]


# ----------------------------------------------------------- FSDP2, recipes, names of files


def test_accelerate_gets_its_fsdp_plugin_for_plans_of_fsdp2() -> None:
    base = experiment(keys=FSDP2)
    kept = yaml.safe_load(text_of(accelerate_config(chosen(strategy((0, 9), zero=KEPT), base))))
    assert kept["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "parallelism_config" not in kept
    both = accelerate_config(chosen(strategy((0, 9), tp=2, zero=SHARDED), base))
    assert any("tp_plan='auto'" in note for note in both.notes)
    plan = strategy((0, 9), tp=2, sequence_parallel=True, zero=SHARDED)
    divided = accelerate_config(chosen(plan, base))
    assert yaml.safe_load(text_of(divided)) == yaml.safe_load(text_of(both))
    assert any("give norms the style 'sequence_parallel'" in note for note in divided.notes)


LLAMA_3_8B = (
    "num_layers: 6, hidden_size: 256, num_heads: 8",
    (
        "num_layers: 32, hidden_size: 4096, num_heads: 32, num_key_value_heads: 8, "
        "feed_forward_size: 14336"
    ),
)


def test_bridge_names_the_recipe_of_a_model_that_it_has() -> None:
    base = experiment(LLAMA_3_8B, ("vocab_size: 1024", "vocab_size: 128256"))
    export = bridge_overrides(chosen(strategy((0, 35), tp=4), base))
    assert "the recipe llama3_8b_pretrain_config" in export.notes[0]
    assert "set RECIPE to yours" in bridge_overrides(chosen(MIDDLE)).notes[-1]


def test_overrides_switch_off_what_a_recipe_sets() -> None:
    """Llama-3-8B's recipe has cp 2, and 70B's has chunks."""
    text = text_of(bridge_overrides(chosen(strategy((0, 9), tp=2, zero=Zero(stage=1)))))
    words = {
        "model.context_parallel_size=1",
        "model.sequence_parallel=false",
        "model.virtual_pipeline_model_parallel_size=null",
        "ddp.use_distributed_optimizer=true",
    }
    assert words <= set(words_of(text))
    assert "ddp.overlap_param_gather=false" not in text


@pytest.mark.parametrize(
    ("write", "usual", "plan"),
    [
        (megatron_script, "megatron.sh", UNEVEN),
        (bridge_overrides, "megatron-bridge.sh", UNEVEN),
        (titan_config, "amp_ray_titan.py", UNEVEN),
        (nanotron_config, "nanotron.yaml", strategy((0, 5, 9))),
        (accelerate_config, "accelerate.yaml", strategy((0, 4, 9))),
    ],
)
def test_a_file_speaks_of_itself_by_its_name(write: Write, usual: str, plan: Strategy) -> None:
    assert usual in text_of(write(chosen(plan)))
    name = "plan_7.py" if write is titan_config else "my plan $(x).sh"
    text = text_of(write(replace(chosen(plan), file=name)))
    assert ("--module plan_7 " if write is titan_config else "'my plan $(x).sh'") in text
    assert usual not in text


def test_torchtitan_imports_only_a_file_with_the_name_of_a_module() -> None:
    text = text_of(titan_config(replace(chosen(UNEVEN), file="plan.v2.py")))
    assert "as amp_ray_titan.py in the current folder" in text


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.sh", "ls -l\n", "x.sh: no flags of Megatron-LM or torchtitan found"),
        ("job.sbatch", "srun true\n", "job.sbatch: no flags of Megatron-LM or torchtitan found"),
        ("x", "#!/bin/bash\nls\n", "x: no flags of Megatron-LM"),
        ("x.py", "a = 1\n", "x.py: no PARALLELISM = {...} found"),
        ("x.toml", "[training]\n", "x.toml: no [parallelism] found"),
        ("x.json", '{"zero_optimization": {}}', "x.json: no train_batch_size or train_micro"),
        ("x.yaml", "tp: 1\n", "x.yaml: no strategy is read from this YAML"),
    ],
)
def test_a_file_without_a_strategy_is_refused_by_its_kind(
    file: str, text: str, message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read_program(text, file=file, experiment=experiment())

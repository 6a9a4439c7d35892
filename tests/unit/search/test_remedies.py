"""Changes of a recipe that make a strategy fit into memory."""

from dataclasses import replace

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.search.cuts import best_bounds
from amp_ray.search.remedies import Remedies
from amp_ray.search.rows import row
from amp_ray.search.run import NUM_REMEDIES, with_remedies
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import Zero
from support.experiments import experiment_from

TEXT = """
name: tight
model: {family: llama, num_layers: 16, hidden_size: 4096, num_heads: 32, feed_forward_size: 14336,
        vocab_size: 32000, sequence_length: 4096}
cluster:
  nodes: [{count: 2, device: H100, slots: 8, inter_gbit_per_s: 3200, memory_gib: MEMORY}]
precision: bf16
runtime: megatron-core
recompute: none
zero_stage: 1
global_batch_size: 32
"""


def experiment(memory_gib: float, text: str = TEXT) -> Experiment:
    return experiment_from(text.replace("MEMORY", str(memory_gib)))


def estimate(given: Experiment, zero_stage: int = 1) -> Estimate:
    options = replace(given.stage_options(2, 8), zero=Zero(stage=zero_stage))
    candidate = Candidate(micro_batch_size=2, options=options, pp=1, num_micro_batches=2)
    return CostModel(experiment=given).estimate(
        Strategy.uniform(candidate, (0, given.model.num_layers))
    )


def names(given: Estimate) -> list[str]:
    return [remedy.change for remedy in given.remedies]


def test_each_change_is_the_models_own_estimate_and_the_fastest_is_first() -> None:
    needed = estimate(experiment(80)).peak_memory_bytes[0] / 2**30
    tight = experiment(needed - 2)
    added = Remedies(experiment=tight).add(estimate(tight))
    times_s = [remedy.iteration_time_s for remedy in added.remedies]
    assert times_s == sorted(times_s)
    assert {"gradients in bf16", "ZeRO 2"} <= set(names(added))
    sharded = estimate(tight, zero_stage=2)
    assert sharded.iteration_time_s in times_s
    assert sharded.feasible
    assert added.remedies_text.startswith(f"fits with {names(added)[0]} (")


def test_changes_are_added_up_if_one_is_not_enough() -> None:
    tight = experiment(14)
    added = Remedies(experiment=tight).add(estimate(tight))
    # Twice the tp is not enough: it is doubled again, and named once, or recompute is added
    assert names(added) == ["tp 8, dp 2", "recompute full and tp 4, dp 4"]


def test_nothing_is_offered_where_nothing_helps_or_is_needed() -> None:
    hopeless = experiment(5)
    assert Remedies(experiment=hopeless).add(estimate(hopeless)).remedies == ()
    roomy = experiment(80)
    assert Remedies(experiment=roomy).add(estimate(roomy)).remedies == ()
    assert estimate(roomy).remedies_text == ""


@pytest.mark.parametrize("runtime", ["deepspeed", "torch", "megatron", "llm-foundry", "nanotron"])
def test_only_what_the_runtime_can_is_offered(runtime: str) -> None:
    stage = {"llm-foundry": 2}.get(runtime, 1)
    text = TEXT.replace("megatron-core", runtime).replace("zero_stage: 1", f"zero_stage: {stage}")
    tight = experiment(14, text)
    options = tight.stage_options(1 if runtime == "llm-foundry" else 2, 8)
    options = replace(options, zero=tight.zero(pp=1))
    candidate = Candidate(micro_batch_size=2, options=options, pp=1, num_micro_batches=2)
    strategy = Strategy.uniform(candidate, (0, tight.model.num_layers))
    added = Remedies(experiment=tight).add(CostModel(experiment=tight).estimate(strategy))
    changes = {change for name in names(added) for change in name.split(" and ")}
    assert not any("moments" in change for change in changes)
    if not tight.traits.pipeline_parallel:
        assert not any(change.startswith(("pp", "tp", "cp")) for change in changes)


def test_activations_may_wait_in_the_hosts_memory_where_the_runtime_can() -> None:
    needed = estimate(experiment(80)).peak_memory_bytes[0] / 2**30
    tight = experiment(needed - 3)
    added = Remedies(experiment=tight).add(estimate(tight))
    assert "offloaded_blocks 7" in names(added)
    again = experiment(needed - 3, TEXT.replace("recompute: none", "recompute: selective"))
    assert not any(
        "offload" in name for name in names(Remedies(experiment=again).add(estimate(again)))
    )


def test_modules_that_the_model_has_may_be_recomputed() -> None:
    """Megatron-core can make feed-forward parts again; no layer has latents or experts."""
    needed = estimate(experiment(80)).peak_memory_bytes[0] / 2**30
    tight = experiment(needed - 0.5)
    changes = names(Remedies(experiment=tight).add(estimate(tight)))
    assert "recompute of layernorm" in changes
    modules = TEXT.replace("recompute: none", "recompute: {modules: [layernorm]}")
    again = experiment(needed - 0.5, modules)
    assert CostModel(experiment=again).estimate(estimate(again).strategy).feasible
    assert "recompute of layernorm" not in names(Remedies(experiment=again).add(estimate(again)))
    assert not any("mla" in change or "moe" in change for change in changes)


H100 = "{count: COUNT, device: H100, slots: 8, inter_gbit_per_s: 3200}"
GB200 = "{count: COUNT, device: GB200, slots: 4, inter_gbit_per_s: 1600}"
LARGE = """
name: public layouts
model:
  {family: llama, num_layers: 126, hidden_size: 16384, num_heads: 128, num_key_value_heads: 8,
   feed_forward_size: 53248, vocab_size: 128256, sequence_length: 8192}
cluster: {nodes: [NODES]}
precision: fp8
runtime: megatron-core
zero_stage: 1
global_batch_size: 1536
"""


@pytest.mark.parametrize(
    ("node", "count", "degrees", "chunks", "remedy"),
    [
        (H100, 128, {"tp": 8, "pp": 8, "cp": 2}, 8, "gradients in bf16"),
        (GB200, 64, {"tp": 4, "pp": 16, "cp": 1}, 4, "recompute of mlp"),
    ],
)
def test_public_layouts_of_405b_fit_with_one_change(
    node: str, count: int, degrees: dict[str, int], chunks: int, remedy: str
) -> None:
    """Layouts of NVIDIA's recipes for Llama 3.1 405B, whose formats and modules are not stated."""
    given = experiment_from(LARGE.replace("NODES", node.replace("COUNT", str(count))))
    tp, pp, cp = (degrees[name] for name in ("tp", "pp", "cp"))
    dp = given.cluster.num_devices // (tp * pp * cp)
    options = replace(given.stage_options(tp, dp, cp=cp), zero=given.zero(pp))
    candidate = Candidate(
        micro_batch_size=1,
        options=replace(options, sequence_parallel=True),
        pp=pp,
        num_micro_batches=1536 // dp,
        virtual_stages=chunks,
    )
    model = CostModel(experiment=given)
    bounds = best_bounds(given, model.costs(candidate))
    found = model.estimate(Strategy.uniform(candidate, bounds))
    assert not found.feasible
    assert remedy in names(Remedies(experiment=given).add(found))


def test_another_setting_of_the_program_is_offered() -> None:
    """A program, nanotron, may keep inputs that its products gather, or gather them again."""
    text = TEXT.replace("megatron-core", "nanotron") + "sequence_parallel: true\n"
    needed = estimate(experiment(80, text)).peak_memory_bytes[0] / 2**30
    tight = experiment(needed - 1, text)
    added = Remedies(experiment=tight).add(estimate(tight))
    assert "traits.keeps_gathered_inputs=false" in names(added)


def test_only_the_first_rows_have_remedies() -> None:
    tight = experiment(20)
    results = with_remedies(tight, [estimate(tight)] * (NUM_REMEDIES + 1))
    added = [isinstance(result, Estimate) and bool(result.remedies) for result in results]
    assert added == [True] * NUM_REMEDIES + [False]
    record = row(results[0], None, tight)
    assert set(record["remedies"][0]) == {"change", "iteration_time_s"}
    assert "remedies" not in row(results[-1], None, tight)


def test_a_plan_without_a_strategy_names_what_would_make_the_closest_one_fit() -> None:
    tight = experiment(7, TEXT.replace("recompute: none", "recompute: full"))
    planner = AmpRayPlanner(experiment=tight)
    (candidate, *_) = planner.candidates().required or planner.candidates().optional.candidates
    text = planner.why_none([planner.plan(candidate)])
    assert "closest: " in text
    assert "; fits with " in text

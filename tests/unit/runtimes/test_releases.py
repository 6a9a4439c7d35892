"""Releases set traits; boards, precision and model decide the rest."""

from dataclasses import replace

import pytest

from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Rank, cast_operands, device_phases
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.operator import Elementwise, Experts, Gemm
from amp_ray.runtimes.releases import RELEASES, CudaGraphs, DispatcherName
from amp_ray.runtimes.traits import GRAPH_GAP_S, RUNTIMES, find_release
from amp_ray.strategies.candidate import StageOptions
from support.experiments import experiment_from

MOE = """\
name: moe
model:
  {family: llama, num_layers: 4, hidden_size: 512, num_heads: 8, feed_forward_size: 1024,
   vocab_size: 2048, sequence_length: 512, num_experts: 8, experts_per_token: 2,
   expert_feed_forward_size: 512, shared_feed_forward_size: 512}
cluster: {nodes: [{device: DEVICE, slots: 8, count: 1}]}
runtime: megatron-core
global_batch_size: 64
"""


def moe(device: str = "B200", keys: str = "precision: fp8\n") -> Experiment:
    """Return an experiment of a model with experts, whose host is never late."""
    quick = "" if "constants" in keys else "constants: {host_s_per_kernel: 1.0e-9}\n"
    return experiment_from(MOE.replace("DEVICE", device) + keys + quick)


@pytest.mark.parametrize("runtime", RELEASES)
def test_the_newest_release_is_the_default(runtime: str) -> None:
    releases = RELEASES[runtime]
    dates = [release.date for release in releases.values()]
    assert dates == sorted(dates, reverse=True)
    assert all(release.source for release in releases.values())
    assert RUNTIMES[runtime] == find_release(runtime, next(iter(releases)))


@pytest.mark.parametrize("runtime", RELEASES)
def test_a_release_sets_the_traits_that_it_states(runtime: str) -> None:
    for name, release in RELEASES[runtime].items():
        traits = find_release(runtime, name)
        assert traits.release == name
        stated = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in release.traits.items()
        }
        assert {key: getattr(traits, key) for key in stated} == stated


@pytest.mark.parametrize(
    ("device", "precision", "recipe", "fused", "graphs"),
    [
        ("B200", "fp8", "mxfp8", True, "step"),
        ("GB300", "fp8", "mxfp8", True, "step"),
        ("H100", "fp8", "tensorwise", False, "none"),
        ("B200", "bf16", "mxfp8", False, "none"),
        ("GB200", "bf16", "mxfp8", False, "attention"),
    ],
)
def test_boards_and_precision_decide_what_is_automatic(
    device: str, precision: str, recipe: str, *, fused: bool, graphs: str
) -> None:
    traits = moe(device, f"precision: {precision}\n").traits
    assert traits.fp8_recipe == recipe
    assert traits.fused_experts is fused
    assert traits.cuda_graphs == graphs


def test_a_model_without_experts_has_no_graphs_unless_told() -> None:
    dense = MOE.partition(", num_experts")[0] + "}\n" + MOE.partition("}\n")[2]
    text = dense.replace("DEVICE", "B200")
    assert experiment_from(text).traits.cuda_graphs == "none"
    keys = "traits: {cuda_graphs: step}\n"
    assert experiment_from(text + keys).traits.cuda_graphs == "step"


def test_one_copy_of_a_weight_is_enough_where_any_layout_is_multiplied() -> None:
    keys = "precision: fp8\ntraits: {fp8_recipe: tensorwise}\n"
    assert moe("B200", keys).traits.fp8_bytes_per_parameter == 1
    assert moe("H100", keys).traits.fp8_bytes_per_parameter == 2
    assert moe("B200").traits.fp8_bytes_per_parameter == 2


def test_a_router_that_is_not_fused_has_more_kernels() -> None:
    fused, others = (
        moe("H100", f"precision: bf16\ntraits: {{fused_router: {name}}}\n")
        for name in ("true", "false")
    )
    counts = [experiment.model.layers[2].num_kernels for experiment in (fused, others)]
    assert counts[1] - counts[0] == 16


def test_racks_have_no_deepep() -> None:
    keys = "precision: bf16\nrelease: '25.09'\n"
    assert moe("H100", keys).traits.dispatcher == "deepep"
    assert moe("GB200", keys).traits.dispatcher == "hybridep"
    library = keys.replace("25.09", "26.08-library")
    assert moe("H100", library).traits.dispatcher == "deepep"
    assert moe("GB200", library).traits.dispatcher == "alltoall"


def pass_s(experiment: Experiment) -> tuple[float, float]:
    """Return the seconds of both passes of a block with experts on eight ranks."""
    model = CostModel(experiment=experiment)
    options = StageOptions(tp=1, dp=8, ep=8)
    table, _ = model.time_tables.table((0,), model.topology.ring((0,), 1, {}), options, 2)
    forward_s, backward_s = (table[row, 3] - table[row, 2] for row in (0, 1))
    return float(forward_s), float(backward_s)


@pytest.mark.parametrize("device", ["B200", "GB300"])
def test_fused_experts_are_faster_and_cast_and_activate_in_their_products(device: str) -> None:
    fused, others = (
        moe(device, f"precision: fp8\ntraits: {{fused_experts: {name}, cuda_graphs: none}}\n")
        for name in ("true", "false")
    )
    for one, other in zip(pass_s(fused), pass_s(others), strict=True):
        assert one < other
    for experiment, kernels in ((fused, 0), (others, 1)):
        block = next(layer for layer in experiment.model.layers if layer.experts is not None)
        [activation] = [op for op in block.operators if op.name == "experts-activation"]
        assert isinstance(activation, Elementwise)
        assert activation.num_kernels == kernels


def test_fused_experts_in_nvfp4_need_the_release_that_has_them() -> None:
    """They are faster there, though their results are cast afterwards."""
    keys = "precision: nvfp4\ntraits: {cuda_graphs: none}\nrelease: '26.08'\n"
    plain, fused = (
        moe("B200", keys.replace("26.08", name)) for name in ("26.08", "26.08-nvfp4-experts")
    )
    assert not plain.traits.fused_experts
    assert fused.traits.fused_experts
    for one, other in zip(pass_s(fused), pass_s(plain), strict=True):
        assert one < other


def test_kernels_of_fused_experts_write_8_bit_floats_but_not_nvfp4() -> None:
    gemm = Gemm(
        name="experts-out",
        rows=64,
        columns=64,
        inner=64,
        is_expert=True,
        has_cast_input=True,
        has_cast_gradient=True,
    )
    rank = Rank(device=CATALOGUE["B200"], tp=1, micro_batch_size=1, precision="fp8")
    assert cast_operands(gemm, rank) == (0, 0)
    assert cast_operands(gemm, replace(rank, precision="nvfp4")) == (1, 1)


@pytest.mark.parametrize(
    ("device", "keys", "expected"),
    [
        ("B200", "precision: fp8\n", "fp8"),
        ("H100", "precision: fp8\n", "bf16"),
        ("B200", "precision: bf16\n", "bf16"),
        ("B200", "precision: nvfp4\n", "bf16"),
        ("B200", "precision: fp8\nrelease: '26.06'\n", "bf16"),
        ("H100", "precision: fp8\ntraits: {attention_format: fp8}\n", "fp8"),
    ],
)
def test_attention_runs_in_8_bit_floats_as_recipes_with_scales_by_block_say(
    device: str, keys: str, expected: str
) -> None:
    assert moe(device, keys).traits.attention_format == expected


def test_attention_in_8_bit_floats_casts_its_inputs_and_is_faster() -> None:
    """Its products take 740 / 1200 of the time where sequences are long; casts take the rest."""
    long = MOE.replace("sequence_length: 512", "sequence_length: 65536")
    seconds, moved = [], []
    for name in ("bf16", "fp8"):
        keys = f"precision: fp8\ntraits: {{attention_format: {name}}}\n"
        experiment = experiment_from(long.replace("DEVICE", "H100") + keys)
        [op] = [op for op in experiment.model.layers[2].operators if op.name == "attention"]
        assert isinstance(op, Elementwise)
        rank = Rank(device=CATALOGUE["H100"], tp=1, micro_batch_size=1, precision="fp8")
        seconds.append(device_phases([op], rank, experiment.constants))
        moved.append((op.forward_elements, op.backward_elements, op.num_kernels))
    stream = 65536 * 512
    assert [b - a for a, b in zip(*moved, strict=True)] == [6 * stream, 2 * stream, 3]
    for one, other in (
        (seconds[1].forward_s, seconds[0].forward_s),
        (seconds[1].backward_s, seconds[0].backward_s),
    ):
        assert 740 / 1200 < one / other < 0.65


def test_a_graph_shortens_gaps_and_frees_the_host() -> None:
    """Where the host is slow, a graph of the step leaves the work of the device alone."""
    times = {}
    kinds: tuple[CudaGraphs, ...] = ("none", "attention", "step")
    for graphs in kinds:
        keys = f"precision: fp8\ntraits: {{cuda_graphs: {graphs}}}\nconstants: "
        slow, quick = (
            pass_s(moe(keys=f"{keys}{{host_s_per_kernel: {launch_s}}}\n"))
            for launch_s in (1e-3, 1e-9)
        )
        times[graphs] = slow[0], quick[0]
    assert times["none"][0] > times["attention"][0] > 10 * times["step"][0]
    assert times["step"][0] == times["step"][1]
    assert times["none"][1] > times["attention"][1] > times["step"][1]
    step = moe(keys="precision: fp8\ntraits: {cuda_graphs: step}\n").constants
    assert step.kernel_gap_s == GRAPH_GAP_S


def test_exchanges_hide_behind_shared_experts() -> None:
    """At most as much as these compute, in each pass."""
    names: tuple[DispatcherName, ...] = ("alltoall", "hybridep")
    for name in names:
        experiment = moe("H100", f"precision: bf16\ntraits: {{dispatcher: {name}}}\n")
        beside = replace(experiment.traits, overlaps_shared_experts=True)
        for one, other in zip(
            exchanged_s(replace(experiment, traits=beside)), exchanged_s(experiment), strict=True
        ):
            assert one < other


def exchanged_s(experiment: Experiment) -> tuple[float, float]:
    """Return the seconds of both passes with all-to-alls on eight ranks."""
    model = CostModel(experiment=experiment)
    options = StageOptions(tp=1, dp=8, ep=8)
    path = model.topology.exchange([list(range(8))])
    table, _ = model.time_tables.table((0,), model.topology.ring((0,), 1, {}), options, 8, path)
    return float(table[0, 3] - table[0, 2]), float(table[1, 3] - table[1, 2])


def test_tokens_that_are_sent_once_are_not_copied_before() -> None:
    """On as many ranks as experts, a rank receives as many tokens as it has copies."""
    experts = Experts(
        tokens=64, hidden=8, feed_forward=16, num_experts=8, per_token=2, activations=()
    )
    moves = {}
    for ep in (1, 4, 8):
        for once in (False, True):
            spread = replace(experts, is_sent_once=once).spread(tp=1, ep=ep, etp=1, load=1.0)
            [dispatch] = [op for op in spread if op.name == "dispatch"]
            assert isinstance(dispatch, Elementwise)
            moves[ep, once] = dispatch.forward_elements / (64 * 8)
    assert moves[1, False] == moves[1, True]  # no other rank
    assert moves[4, False] == 1 + 2 + 2 * 2
    assert moves[4, True] == 4 * (1 - (3 / 4) ** 2) + 2
    assert moves[4, True] < moves[8, True] < 2 * 2


def test_devices_that_scale_blocks_are_of_blackwell() -> None:
    named = {name for name, device in CATALOGUE.items() if device.scales_blocks}
    assert named == {"B200", "B300", "GB200", "GB300"}

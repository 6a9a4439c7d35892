"""What a training program does that a plan of it has to know: data, one record per runtime.

Traits are properties of the program that runs a strategy, not of the cluster or the model.
They are input to the cost model, which never asks for a runtime by name.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from amp_ray.units import GIB

LayerList = Literal["amp-2022", "runtime"]
PartitionRule = Literal["exact", "even-blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits:
    """How one runtime executes a strategy.

    Args:
        name: Name in the experiment file's ``runtime``.
        description: One sentence for people.
        layer_list: Which list of layers the runtime trains, and so what ``bounds`` count.
        partition: ``exact`` takes any cuts; ``even-blocks`` only equal shares of the blocks.
        vocabulary_multiple: The vocabulary is padded to a multiple of this times tp.
        shards_heads: Whether tensor parallelism divides the attention heads.
        forward_runs: How often a block's forward pass is computed per micro-batch.
        launches_per_kernel: Host launches per counted kernel; above 1 where nothing is fused.
        blocking_transfers: Whether a pipeline transfer stops both of its stages.
        synchronisation_s: Device synchronisation around every message and blocking all-reduce.
        restart_launches: Kernel launches until the device is busy again after a blocking
            tensor-parallel all-reduce has emptied its queue.
        duplex_transfers: Whether an activation and a gradient cross a cut at the same time.
        sliced_activations: Whether with tp > 1 each rank sends a 1/tp slice that is gathered.
        sliced_gradients: The same for gradients.
        mask_bytes: Bytes of an attention mask that each forward message carries.
        overlaps_backward_all_reduce: Whether a backward all-reduce runs beside the weight gradient.
        virtual_stages: Model chunks per stage (interleaved schedule); divides fill and drain.
        accumulation_bytes_per_parameter: Memory traffic of adding a micro-batch's gradients.
        gradient_bytes_per_parameter: Width of a gradient in the data-parallel all-reduce.
        tied_bytes_per_parameter: Width of the tied embedding's gradient in its all-reduce.
        bucket_traffic_bytes_per_parameter: Memory traffic of filling and emptying flat buckets.
        optimizer_traffic_bytes_per_parameter: Memory traffic of norm, unscale, Adam and casts.
        kept_bytes_per_parameter: Weights and gradients in half precision, on every rank.
        kept_bytes_per_parameter_fp32: The same in single precision.
        sharded_bytes_per_parameter: Master weights, moments and temporary gradients of the
            step, which ZeRO-1 shards over dp; in single precision without master weights.
        bucket_elements: Largest flat bucket of the gradient all-reduce.
        bucket_bytes_per_element: Its temporary copies.
        step_bytes_per_parameter: Temporary copies within the optimizer step.
        logit_bytes: Live bytes per logit at the end of the last stage's forward pass.
        allocator_factor: Reserved over live memory of tensors that come and go.
        context_bytes: Device context, communicators, workspaces and the framework itself.
        fails_without_parameters: Whether a stage without parameters cannot start.
        launch_limit_s: Wall time after which the launcher gives a trial up; None = no limit.
        launch_setup_s: Part of it that passes before the first iteration.
        launch_iterations: Iterations that a trial runs.
        max_zero_stage: Highest ZeRO stage that works with pipeline parallelism.
    """

    name: str
    description: str
    layer_list: LayerList = "runtime"
    partition: PartitionRule = "exact"
    vocabulary_multiple: int = 1
    shards_heads: bool = True
    forward_runs: int = 1
    launches_per_kernel: float = 1.0
    blocking_transfers: bool = True
    synchronisation_s: float = 0.0
    restart_launches: float = 0.0
    duplex_transfers: bool = False
    sliced_activations: bool = False
    sliced_gradients: bool = False
    mask_bytes: float = 0.0
    overlaps_backward_all_reduce: bool = False
    virtual_stages: int = 1
    accumulation_bytes_per_parameter: float = 6.0
    gradient_bytes_per_parameter: float = 2.0
    tied_bytes_per_parameter: float = 2.0
    bucket_traffic_bytes_per_parameter: float = 0.0
    optimizer_traffic_bytes_per_parameter: float = 60.0
    kept_bytes_per_parameter: float = 4.0
    kept_bytes_per_parameter_fp32: float = 8.0
    sharded_bytes_per_parameter: float = 16.0
    bucket_elements: float = 5e8
    bucket_bytes_per_element: float = 2.0
    step_bytes_per_parameter: float = 0.0
    logit_bytes: float = 14.0
    allocator_factor: float = 1.06
    context_bytes: float = 2.5 * GIB
    fails_without_parameters: bool = True
    launch_limit_s: float | None = None
    launch_setup_s: float = 0.0
    launch_iterations: int = 0
    max_zero_stage: int = 1


DEEPSPEED: Final = RuntimeTraits(
    name="deepspeed",
    description="This project's training program on DeepSpeed 0.19: PipelineModule, any cuts.",
    bucket_traffic_bytes_per_parameter=8.0,
)

MEGATRON: Final = RuntimeTraits(
    name="megatron",
    description="Megatron-DeepSpeed, 2021-2023: fused kernels, equal shares of the blocks.",
    partition="even-blocks",
    vocabulary_multiple=128,
    sliced_activations=True,
    sliced_gradients=True,
    bucket_bytes_per_element=4.0,
    allocator_factor=1.10,
    context_bytes=4.0 * GIB,
)

MEGATRON_LM: Final = RuntimeTraits(
    name="megatron-lm",
    description="Megatron-LM since 2022: overlapped backward all-reduces, batched p2p.",
    partition="even-blocks",
    vocabulary_multiple=128,
    duplex_transfers=True,
    sliced_activations=True,
    sliced_gradients=True,
    overlaps_backward_all_reduce=True,
    gradient_bytes_per_parameter=4.0,
    tied_bytes_per_parameter=4.0,
    kept_bytes_per_parameter=6.0,
    allocator_factor=1.10,
    context_bytes=4.0 * GIB,
)

AMP_2022: Final = RuntimeTraits(
    name="amp-2022",
    description="The published trials of AMP: DeepSpeed of 2022, Megatron-LM v1.1.5 3D example.",
    layer_list="amp-2022",
    forward_runs=2,
    launches_per_kernel=2.0,
    synchronisation_s=63e-6,
    restart_launches=5.5,
    sliced_activations=True,
    mask_bytes=2.0 * 1024 * 1024,
    gradient_bytes_per_parameter=4.0,
    bucket_traffic_bytes_per_parameter=28.0,
    optimizer_traffic_bytes_per_parameter=66.0,
    sharded_bytes_per_parameter=12.0,
    bucket_bytes_per_element=6.0,
    step_bytes_per_parameter=8.0,
    logit_bytes=12.0,
    allocator_factor=1.04,
    context_bytes=1.3e9,
    launch_limit_s=209.0,
    launch_setup_s=17.5,
    launch_iterations=41,
)

AMP_2022_TRANSGAN: Final = replace(
    AMP_2022,
    name="amp-2022-transgan",
    description="The published TransGAN trials: as amp-2022, one forward pass, unfused torch Adam.",
    shards_heads=False,
    forward_runs=1,
    mask_bytes=0.0,
    optimizer_traffic_bytes_per_parameter=110.0,
    launch_setup_s=44.8,
)

RUNTIMES: Final = MappingProxyType(
    {
        traits.name: traits
        for traits in (DEEPSPEED, MEGATRON, MEGATRON_LM, AMP_2022, AMP_2022_TRANSGAN)
    }
)

"""Traits of training programs that a plan depends on; their records are data (``runtimes.yaml``).

Traits are properties of the program that runs a strategy, not of the cluster or the model.
They are input to the cost model, which never asks for a runtime by name.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import ConfigDict, TypeAdapter
from pydantic import dataclasses as checked

from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.errors import shown
from amp_ray.models.blocks import FLASH_ATTENTION_2_RATE, Kernels
from amp_ray.models.model import LayerList
from amp_ray.runtimes.releases import (
    DISPATCHERS,
    FP8_RECIPES,
    RELEASES,
    AttentionFormat,
    ContextExchange,
    CudaGraphs,
    Dispatcher,
    DispatcherName,
    Fp8RecipeName,
    fp8_recipe_on,
)
from amp_ray.shipped import read_shipped, with_inherited
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE, Recompute, RecomputeModule
from amp_ray.strategies.strategy import Strategy
from amp_ray.strategies.zero import MOST_ZERO_STAGE, SHARDED_GRADIENTS, Zero
from amp_ray.units import BYTES_PER_ELEMENT, BYTES_PER_FP32, GIB, NARROW, Precision

PartitionRule = Literal["exact", "even-blocks", "weighed-blocks"]
RecomputePattern = Literal[
    "none", "selective", "selective:n", "per-operator", "full", "full:n", "modules"
]
GradientFormat = Literal["fp32", "bf16"]
MomentFormat = Literal["fp32", "bf16", "fp8", "int8"]
KeptFormat = Literal[
    "gradients bf16", "moments bf16", "moments fp8", "moments int8", "primary fp8", "master none"
]

GRAPH_GAP_S: Final = 1e-6
"""Start and tail of a kernel in a CUDA graph (NVIDIA, "Constant time launch for straight-line CUDA
graphs": 1.3 us and less for each kernel)."""

NO_SLICES: Final = "this runtime passes on whole micro-batches, not token slices"
NO_RUNTIME: Final = "stages of different tp or dp, which only runtime torch runs"
"""Warnings about strategies that cannot be launched."""


@checked.dataclass(
    frozen=True,
    slots=True,
    kw_only=True,
    config=ConfigDict(extra="forbid", hide_input_in_errors=True),
)
class Formats:
    """``precision`` as a mapping: the formats of what a rank computes with and keeps."""

    compute: Precision = "bf16"
    """Precision of weights and activations, as `precision` alone."""
    gradients: GradientFormat | None = None
    """Format in which gradients of micro-batches are added up and exchanged (Megatron-LM:
    `--grad-reduce-in-bf16`). Default: the runtime's, mostly fp32."""
    moments: MomentFormat | None = None
    """Format of the optimizer's running averages (Megatron-LM: `--use-precision-aware-optimizer`
    with `--exp-avg-dtype`); bf16 weights then need only the lower half of their single-precision
    copies beside them. Default: fp32."""
    primary: Literal["bf16", "fp8"] | None = None
    """Format of the weights that products read: with `fp8` no bf16 weights exist beside those of
    blocks, and updated weights are gathered in 8 bits (Megatron-LM: `--fp8-param-gather`). Default:
    bf16."""
    master: Literal["fp32", "none"] | None = None
    """Whether single-precision copies of the weights are kept. Default: fp32."""

    @property
    def kept(self) -> Mapping[str, str]:
        """Its formats that are narrower than usual, by key."""
        usual = {"gradients": "fp32", "moments": "fp32", "primary": "bf16", "master": "fp32"}
        chosen = {key: getattr(self, key) for key in usual}
        return {key: name for key, name in chosen.items() if name not in {None, usual[key]}}

    @property
    def moment_bytes(self) -> int:
        """Bytes of a running average."""
        return {"fp32": BYTES_PER_FP32, "bf16": HALF_BYTES}.get(self.moments or "fp32", 1)


USUAL: Final = Formats()
"""Formats of a training whose file does not set any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeTraits:
    """How one runtime executes a strategy."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    name: str  # the value of ``runtime`` in an experiment file
    description: str  # which program it is, in a sentence
    release: str = ""  # the value of ``release``; empty for a program that has no releases here
    # Whether it is a program of today, or of past years, kept for published measurements
    status: Literal["current", "historic"] = "current"
    # List of layers that the runtime trains; ``bounds`` count its entries
    layer_list: LayerList = "runtime"
    # ``exact`` takes any cuts; ``even-blocks`` only equal shares of the blocks; ``weighed-blocks``
    # fills each stage until it exceeds its share of the parameters of blocks and head (nanotron)
    partition: PartitionRule = "exact"
    vocabulary_multiple: int = 1  # the vocabulary is padded to a multiple of this
    shards_heads: bool = True  # whether tensor parallelism divides the attention heads
    forward_runs: int = 1  # how often a block's forward pass is computed per micro-batch
    # Whether attention is one kernel, which writes and keeps no scores
    fused_attention: bool = False
    # Whether attention is one kernel also on boards without FlashAttention-2; else it is separate
    # kernels there
    fuses_older_attention: bool = False
    # Whether it has no attention but FlashAttention-2: it then runs on no board without it
    needs_flash_attention: bool = False
    # Its rate relative to matrix products, .7 for FlashAttention-2; where a board's attention was
    # measured, only the ratio to FlashAttention-2 counts
    attention_rate: float = FLASH_ATTENTION_2_RATE
    # Whether it uses the board's own instructions (cuDNN, FlashAttention-3), not those of Ampere
    native_attention: bool = False
    # Whether Triton compiles it for the board (torch's FlexAttention)
    compiled_attention: bool = False
    # Whether the loss can be computed part by part, and into how many parts: the experiment's
    # `loss_chunks`, 0 for as many as make logits no larger than the stream
    chunks_loss: bool = False
    loss_chunks: int = 1
    # Parts of blocks that every backward pass runs again, those of the experiment's `recompute`
    # (Megatron-LM: `--recompute-modules`)
    recompute_modules: tuple[RecomputeModule, ...] = ()
    # Whether its cuBLAS has kernels of tensor cores for heads and vocabularies that are no multiple
    # of 8; else products of heads run off them (libraries of 2022, CUDA 10 and 11)
    has_unaligned_kernels: bool = True
    # Memory traffic of the loss, relative to separate kernels in single precision
    loss_fraction: float = 1.0
    # Whether gated activations and backward passes of norms are one kernel each, and heads are read
    # where the projection wrote them
    fused_pointwise: bool = False
    # Whether rotary embeddings are products of complex numbers in single precision, with casts
    rotates_complex: bool = False
    # Whether RMS norms are separate kernels in single precision (PyTorch on CUDA without
    # `aten::_fused_rms_norm`)
    separate_norms: bool = False
    # Whether attention copies queries, keys and values apart and together again
    packs_heads: bool = False
    dropout: bool = True  # whether language models that were published with dropout train with it
    # Host launches per counted kernel; above 1 if no kernels are fused
    launches_per_kernel: float = 1.0
    # Whether the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1), so that device and host take
    # turns instead of working side by side
    blocking_launches: bool = False
    blocking_transfers: bool = True  # whether a pipeline transfer stops both of its stages
    # Device synchronisation around every message and blocking all-reduce
    synchronisation_s: float = 0.0
    # Host seconds that a tensor-parallel collective takes for each of its ranks, in addition to its
    # launch, in a pipeline over several nodes
    piped_collective_s: float = 0.0
    # Whether pipelines without ZeRO over several nodes took longer than anything in the program
    # explains, where a step has several micro-batches
    unexplained_pipelines: bool = False
    # Kernel launches until the device is busy again after a blocking tensor-parallel all-reduce has
    # emptied its queue
    restart_launches: float = 0.0
    # Whether an activation and a gradient cross a cut at the same time
    duplex_transfers: bool = False
    # Whether with tp > 1 each rank sends a 1/tp slice that is gathered
    sliced_activations: bool = False
    sliced_gradients: bool = False  # the same for gradients
    # Whether activations are freed once they are sent to the next stage
    frees_outputs: bool = False
    mask_bytes: float = 0.0  # bytes of an attention mask that each forward message carries
    # Whether gathers and scatters of sequence parallelism overlap with their products, piece by
    # piece (``--tp-comm-overlap``)
    overlaps_gathers: bool = False
    has_pat: bool = (
        False  # whether its NCCL has the algorithm PAT for gathers (2.23, of October 2024)
    )
    # Whether a backward all-reduce overlaps with the weight gradient
    overlaps_backward_all_reduce: bool = False
    virtual_stages: int = 1  # chunks per stage if neither the search nor a strategy sets them
    interleaves: bool = False  # whether it can run several chunks per stage (interleaved schedule)
    fp8: bool = False  # whether linear layers of blocks can run in 8-bit floats, the rest in bf16
    nvfp4: bool = False  # whether they can run in NVFP4, the rest in bf16 (Transformer Engine 2.8)
    # How 8-bit operands are scaled (`FP8_RECIPES`); ``auto``: by blocks where all boards can, else
    # by tensor
    fp8_recipe: Fp8RecipeName = "delayed"
    # Format of the products of attention where those of weights are in fp8 (Transformer Engine,
    # `fp8_dpa`); ``auto``: fp8 with scales by blocks
    attention_format: AttentionFormat = "bf16"
    # Weights of blocks that are kept in fp8, as they are and transposed; boards that multiply any
    # layout need only the former (Transformer Engine: compute capability 10.0, scaling by tensor)
    fp8_bytes_per_parameter: float = 2.0
    # Formats beside its own that it can keep, as keys of ``precision`` with their value
    keeps: tuple[KeptFormat, ...] = ()
    formats: Formats = USUAL  # those of the experiment's ``precision``
    # Single-precision copies of bf16 weights if moments are narrower; None if they stay as they are
    remainder_bytes_per_parameter: float | None = None
    # How ranks that divide a sequence attend to all of it: keys and values go from neighbour to
    # neighbour during attention (``ring``) or to all before it (``all-gather``), or ranks divide
    # its heads instead of tokens (``all-to-all``), those of a node before a ring (``both``)
    context_parallel: ContextExchange = "none"
    # Whether the gradients of a step's micro-batches are added up in single precision when training
    # in fp16
    accumulates_fp16_in_fp32: bool = False
    accumulates_bf16_in_fp32: bool = True  # the same for bf16
    # Whether the product that computes a weight's gradient also adds it to the sum
    fused_accumulation: bool = False
    # Whether autograd then gets an unused gradient, one of each shape of weights, which stays
    # (Transformer Engine newer than 2.2, `get_dummy_wgrad`; Megatron-core also for heads)
    unused_gradients: bool = False
    # Whether each micro-batch's gradient is freed once it is added to the wider sum
    frees_gradients: bool = False
    # Whether the optimizer is wrapped as by DeepSpeed (`bytes_with_zero`)
    wraps_optimizer: bool = False
    # Whether the shards of ZeRO-3 are single-precision weights, which are rounded when gathered, so
    # that no shards of narrower weights exist beside them
    rounds_gathered: bool = False
    # Memory traffic of adding a micro-batch's gradients; None if it follows from the precision
    accumulation_bytes_per_parameter: float | None = None
    # Memory of weights and gradients on every rank; None if it follows from the precision
    kept_bytes_per_parameter: float | None = None
    # Width of a gradient in the data-parallel all-reduce in half precision; None for the width in
    # which gradients are added up
    gradient_bytes_per_parameter: float | None = None
    tied_bytes_per_parameter: float | None = None  # the same for the tied embedding's all-reduce
    # Memory traffic of filling and emptying flat buckets in half precision; in single precision
    # twice as much
    bucket_traffic_bytes_per_parameter: float = 0.0
    # Memory traffic of the step in half precision, without the optimizer's update: overflow check,
    # norm, unscale, casts
    step_traffic_bytes_per_parameter: float = 32.0
    # Single-precision weights and temporary gradients of the step in half precision, which ZeRO-1
    # shards over dp with the optimizer's moments
    master_bytes_per_parameter: float = 8.0
    # Whether gradients go through buckets even with a single replica
    buckets_alone: bool = False
    bucket_elements: float = 5e8  # largest flat bucket of the gradient all-reduce
    # Temporary copies of a bucket in half precision; twice as much in single precision
    bucket_bytes_per_element: float = 2.0
    # Temporary copies within the optimizer step in half precision
    step_bytes_per_parameter: float = 0.0
    logit_bytes: float = 14.0  # live bytes per logit at the end of the last stage's forward pass
    allocator_factor: float = 1.06  # reserved over live memory of temporary tensors
    # Device context, communicators, workspaces and the framework itself
    context_bytes: float = 2.5 * GIB
    # Host work per optimizer step; None for the constant of this name
    host_s_per_iteration: float | None = None
    fails_without_parameters: bool = True  # whether a stage without parameters cannot start
    # Wall time after which the launcher stops a trial; None = no limit
    launch_limit_s: float | None = None
    launch_setup_s: float = 0.0  # part of that time before the first iteration
    launch_iterations: int = 0
    tensor_parallel: bool = True  # whether it divides layers over ranks
    pipeline_parallel: bool = True  # whether it runs several stages
    # Lowest ZeRO stage that it supports, and the default of an experiment
    min_zero_stage: int = 0
    max_zero_stage: int = 1  # highest ZeRO stage that it supports
    max_pipeline_zero_stage: int = 1  # highest stage that works in a pipeline
    keeps_weights: bool = False  # whether stage 3 can keep gathered weights until the backward pass
    # Whether states can be sharded within groups of data-parallel ranks, with a copy in each group
    hybrid_shards: bool = False
    # Whether stage 2 frees its weights after the backward pass and gathers them for every
    # micro-batch (torch's SHARD_GRAD_OP), instead of once after the step
    gathers_every_pass: bool = False
    # Whether gradients from stage 2 on are reduced once per step without a pipeline, too, beside
    # the last backward pass. Until then they are kept whole, in the format of their reduction
    defers_gradient_sync: bool = False
    # Gradients that may wait to be reduced from stage 2 on without a pipeline, if those of a layer
    # are fewer; with stage 3 half as many weights are gathered ahead of the running layer
    waiting_elements: float = 0.0
    # Whether ZeRO-1 reduces gradients only to the rank that updates them
    scatters_gradients: bool = False
    # Whether gradients are reduced during the last backward pass
    overlaps_gradient_sync: bool = False
    # Whether with ZeRO-1 they are reduced all at once after it instead, in no buckets
    reduces_sharded_at_once: bool = False
    # Whether updated weights are gathered during the next forward pass
    overlaps_weight_gather: bool = False
    # Host seconds for each weight and rank of a shard group, if ZeRO-1 copies gathered weights
    # slice by slice
    gather_slice_s: float = 0.0
    # Kinds of recompute that it supports; ``full:n`` recomputes only some blocks of a stage,
    # ``modules`` parts of blocks
    recompute: tuple[RecomputePattern, ...] = ("none", "full")
    recompute_per_stage: bool = False  # whether stages may differ in it
    # Whether activations of blocks can wait in the host's memory for the backward pass, without a
    # pipeline and recompute; transfers run beside computation
    offloads_activations: bool = False
    # Blocks whose activations do (Megatron-LM: `--cpu-offloading-num-layers`)
    offloaded_blocks: int = 0
    # Whether stages may differ in tp and dp and share samples unevenly
    unequal_stages: bool = False
    token_slices: bool = False  # whether stages can pass on slices of sequences
    # Whether tensor-parallel ranks can divide tokens where they do not divide the width
    sequence_parallel: bool = False
    # Whether a product's gathered input is kept, so that the backward pass need not gather it again
    keeps_gathered_inputs: bool = False
    # Traits that a setting of the program switches, and that published runs had either way
    switched: tuple[Literal["keeps_gathered_inputs"], ...] = ()
    expert_parallel: bool = False  # whether ranks can divide a layer's experts between them
    # Whether tensor-parallel ranks can divide experts that have biases
    divides_biased_experts: bool = True
    # Streams in which products and casts of experts run, a kernel for each expert; 0 if one kernel
    # computes all of them
    expert_streams: int = 0
    # Whether one kernel computes a product of all experts, their activation and in fp8 the casts of
    # its result, on boards that scale by blocks; elsewhere it means nothing
    fused_experts: bool = False
    # Formats for which it has such kernels
    fused_formats: tuple[Literal["fp8", "nvfp4"], ...] = ("fp8",)
    # Whether a router's scores, choice and auxiliary loss are one kernel each
    fused_router: bool = True
    # Whether an activation of experts is multiplied by the router's weight: in its fused kernel,
    # whose backward pass then reads all once more, or in a kernel of its own, which keeps it again
    weighs_activations: bool = False
    # What sends tokens to experts (`DISPATCHERS`); ``auto``: HybridEP in racks, else DeepEP
    dispatcher: DispatcherName = "nccl"
    # Whether all-to-alls of one micro-batch run beside the computation of another: forward passes
    # beside backward passes of the same layers
    overlaps_exchanges: bool = False
    # Whether all-to-alls run beside the experts that all tokens go through
    overlaps_shared_experts: bool = False
    # Multiprocessors that all-to-alls take while they run beside computation; 0 for those of the
    # dispatcher
    exchange_multiprocessors: int = 0
    # Work that is recorded once and then started as a whole: nothing, all before the experts of a
    # block (``attention``), or both passes of all micro-batches (``step``); ``auto``: ``step`` with
    # fused experts, ``attention`` with others in racks, else nothing
    cuda_graphs: CudaGraphs = "none"

    @property
    def full_name(self) -> str:
        """Its name, with the release if it has releases."""
        return f"{self.name} {self.release}".rstrip()

    @property
    def constants(self) -> Constants:
        """The constants of the cost model for this program.

        Kernels of a graph start without the host, and follow each other sooner.
        """
        changed: dict[str, float] = {}
        if self.host_s_per_iteration is not None:
            changed["host_s_per_iteration"] = self.host_s_per_iteration
        if self.cuda_graphs == "step":
            start_s = Constants().collective_start_s - 2 * Constants().kernel_gap_s
            changed["kernel_gap_s"] = GRAPH_GAP_S
            changed["collective_start_s"] = start_s + 2 * GRAPH_GAP_S
            changed["host_s_per_micro_batch"] = 0.0
        return Constants(**changed)

    @property
    def fp8_attention(self) -> bool:
        """Whether the products of attention run in 8-bit floats."""
        return self.attention_format == "fp8"

    @property
    def dispatch(self) -> "Dispatcher":
        """What sends tokens to experts."""
        return DISPATCHERS[self.dispatcher]

    @property
    def sends_tokens_once(self) -> bool:
        """Whether a token is sent once to each node and to each rank that has experts for it."""
        return self.dispatch.sends_tokens_once

    @property
    def taken_multiprocessors(self) -> int:
        """Multiprocessors that all-to-alls take while they run beside computation."""
        return self.exchange_multiprocessors or self.dispatch.multiprocessors

    @property
    def reads_for_scales(self) -> bool:
        """Whether 8-bit operands are read once more for their scale, before they are cast."""
        return FP8_RECIPES[self.fp8_recipe].reads_for_scales

    @property
    def recomputed_operators(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of operators that backward passes run again, and of those that keep nothing then.

        See `RECOMPUTED`.
        """
        return _recomputed(self.recompute_modules)

    def __post_init__(self) -> None:
        """Raise if the cost model cannot price a trait, or the launch limit leaves no time."""
        if not self.min_zero_stage <= self.max_zero_stage <= MOST_ZERO_STAGE:
            raise ValueError(
                f"max_zero_stage is {self.max_zero_stage}; expected {self.min_zero_stage}, which "
                f"is min_zero_stage, to {MOST_ZERO_STAGE}"
            )
        if self.max_pipeline_zero_stage not in PIPELINE_ZERO_STAGES:
            raise ValueError(
                f"max_pipeline_zero_stage is {self.max_pipeline_zero_stage}; in a pipeline the "
                f"cost model prices {', '.join(map(str, PIPELINE_ZERO_STAGES))}, where 3 keeps the "
                "weights that it gathers"
            )
        if self.offloaded_blocks and not self.offloads_activations:
            able = ", ".join(
                name for name, traits in RUNTIMES.items() if traits.offloads_activations
            )
            raise ValueError(
                f"runtime {self.name!r} keeps activations on the device, found offloaded_blocks "
                f"{self.offloaded_blocks}; runtimes that offload: {able}"
            )
        counts = ("vocabulary_multiple", "forward_runs", "virtual_stages")
        wrong = [name for name in counts if getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} must be at least 1")
        limit_s = self.launch_limit_s
        if limit_s is not None and (self.launch_iterations < 1 or limit_s <= self.launch_setup_s):
            raise ValueError(
                f"launch_limit_s {limit_s} needs launch_iterations of at least 1 and a smaller "
                f"launch_setup_s, found {self.launch_iterations} and {self.launch_setup_s}"
            )

    def why_not(self, options: Sequence[StageOptions]) -> str | None:
        """Name an option of the stages that the runtime cannot run; None if it runs all."""
        return next(filter(None, self._refused_options(options)), None)

    def why_not_launched(self, strategy: Strategy) -> list[str]:
        """Return every reason why the runtime cannot launch a strategy."""
        options = [stage.options for stage in strategy.stages]
        tokens, context, *rest = self._refused_options(options)
        reasons = (
            None if strategy.is_uniform or self.unequal_stages else NO_RUNTIME,
            NO_SLICES if strategy.is_sliced and not self.token_slices else None,
            next(filter(None, (tokens, *rest)), None),
            self.why_no_zero(strategy.zero, strategy.pp),
            self.why_no_grid(max(stage.tp for stage in options), strategy.pp),
            self.why_no_chunks(strategy.virtual_stages),
            context,
        )
        return [reason for reason in reasons if reason is not None]

    def _refused_options(self, options: Sequence[StageOptions]) -> tuple[str | None, ...]:
        """Return, per kind of option, why the runtime cannot run it; None if it can."""
        divides = any(stage.sequence_parallel for stage in options)
        return (
            f"runtime {self.name!r} has no sequence parallelism"
            if divides and not self.sequence_parallel
            else None,
            self.why_no_context(max(stage.cp for stage in options)),
            next(filter(None, map(self.why_no_experts, options)), None),
            self.why_no_recompute([stage.recompute for stage in options]),
        )

    def why_no_recompute(self, per_stage: Sequence[Recompute]) -> str | None:
        """Say why the runtime cannot recompute in this way; None if it can."""
        if self.offloaded_blocks and set(per_stage) != {NO_RECOMPUTE}:
            return f"offloaded_blocks work without recompute, found {per_stage[0]}"
        for recompute in per_stage:
            pattern = recompute.kind if recompute.layers is None else f"{recompute.kind}:n"
            if pattern not in self.recompute:
                patterns = ", ".join(self.recompute)
                return f"runtime {self.name!r} cannot recompute {recompute}; it knows {patterns}"
        if len(set(per_stage)) > 1 and not self.recompute_per_stage:
            words = ", ".join(map(str, per_stage))
            return f"runtime {self.name!r} recomputes alike in all stages, found {words}"
        return None

    def why_no_grid(self, tp: int, pp: int) -> str | None:
        """Say that the runtime does not support these degrees; None if it does."""
        if tp > 1 and not self.tensor_parallel:
            return f"runtime {self.name!r} has no tensor parallelism, found tp {tp}"
        if pp > 1 and not self.pipeline_parallel:
            return f"runtime {self.name!r} has no pipeline, found pp {pp}"
        if pp > 1 and self.offloaded_blocks:
            return f"offloaded_blocks work without a pipeline, found pp {pp}: set max_pp: 1"
        return None

    def why_no_zero(self, zero: Zero, pp: int) -> str | None:
        """Say why the runtime cannot use these ZeRO options in ``pp`` stages; None if it can."""
        head, stage = f"runtime {self.name!r}", zero.stage
        if not self.min_zero_stage <= stage <= self.max_zero_stage:
            return f"{head} works with zero_stage {self.zero_stages}, found {stage}"
        if pp > 1 and stage not in self.pipeline_zero_stages:
            stages = " or ".join(map(str, self.pipeline_zero_stages)) or "none"
            return f"{head} pipelines with zero_stage {stages}, found {stage}: set pp 1 (max_pp: 1)"
        if stage == MOST_ZERO_STAGE and pp > 1 and not zero.keeps_weights:
            return "in a pipeline zero_stage 3 keeps its weights: set reshard_after_forward: false"
        if zero.keeps_weights and not self.keeps_weights:
            return f"{head} gathers weights again: set reshard_after_forward: true"
        if zero.shard_ranks and not self.hybrid_shards:
            return f"{head} shards over all data-parallel ranks: leave shard_ranks out"
        return None

    @property
    def zero_stages(self) -> str:
        """Its ZeRO stages, in words."""
        low, high = self.min_zero_stage, self.max_zero_stage
        return f"up to {high}" if not low else f"{low}" if low == high else f"{low} to {high}"

    @property
    def pipeline_zero_stages(self) -> tuple[int, ...]:
        """ZeRO stages that work with a pipeline."""
        most = min(self.max_zero_stage, self.max_pipeline_zero_stage)
        return tuple(
            stage for stage in PIPELINE_ZERO_STAGES if self.min_zero_stage <= stage <= most
        )

    def why_no_chunks(self, virtual_stages: int) -> str | None:
        """Say why the runtime cannot run so many chunks per stage; None if it can."""
        if virtual_stages == 1 or self.interleaves or self.virtual_stages > 1:
            return None
        able = ", ".join(name for name, traits in RUNTIMES.items() if traits.interleaves)
        return (
            f"runtime {self.name!r} does not interleave chunks, found virtual_stages "
            f"{virtual_stages}; runtimes that do: {able}"
        )

    def why_no_precision(self, precision: Precision) -> str | None:
        """Say that the runtime cannot train in a precision; None if it can."""
        if precision not in NARROW or getattr(self, precision):
            return None
        able = ", ".join(name for name, traits in RUNTIMES.items() if getattr(traits, precision))
        return f"runtime {self.name!r} does not train in {precision}; runtimes that do: {able}"

    def why_no_formats(self, formats: Formats) -> str | None:
        """Say why the runtime cannot keep what a training keeps; None if it can."""
        kept = formats.kept
        for key, name in kept.items():
            if f"{key} {name}" not in self.keeps:
                able = [
                    runtime
                    for runtime, traits in RUNTIMES.items()
                    if f"{key} {name}" in traits.keeps
                ]
                return (
                    f"runtime {self.name!r} cannot keep {key} in {name}; runtimes that can: "
                    f"{', '.join(able) or 'none'}"
                )
        fitting = ("bf16", *(name for name in NARROW if getattr(self, name)))
        if kept and formats.compute not in fitting:
            names = " or ".join(fitting)
            return f"{', '.join(kept)} with compute {formats.compute}: set compute {names}"
        if "primary" in kept and formats.compute != "fp8":
            return f"primary weights in fp8 with compute {formats.compute}: set compute fp8"
        return None

    def with_formats(self, formats: Formats) -> Self:
        """Return the traits of a training that keeps these formats.

        Those that it leaves open are the runtime's if both compute in the same precision.
        Narrow moments and fp8 weights need optimizer states in shards (Megatron-LM,
        ``--use-distributed-optimizer``).
        """
        named = {each.name: getattr(formats, each.name) for each in fields(formats)}
        usual = self.formats if formats.compute == self.formats.compute else USUAL
        formats = replace(usual, **{key: value for key, value in named.items() if value})
        if not formats.kept:
            return replace(self, formats=USUAL)
        sharded = formats.kept.keys() & {"moments", "primary"}
        least = max(1, self.min_zero_stage) if sharded else self.min_zero_stage
        return replace(self, formats=formats, min_zero_stage=least)

    def on_boards(self, devices: Sequence[Device], compute: Precision, num_experts: int) -> Self:
        """Return the traits with choices that the boards, the precision or the model decide.

        DeepEP does not run on racks with one NVLink domain, and is then replaced by all-to-alls
        (flex_dispatcher_backend.py of Megatron-Bridge 0.3.1). The kernels of fused experts scale by
        blocks (Transformer Engine, ops/fused). Scaling by tensor needs one copy of a weight where a
        board multiplies any layout.
        """
        blocks = all(device.scales_blocks for device in devices)
        recipe = fp8_recipe_on(self.fp8_recipe, devices)
        single = recipe != "mxfp8" and blocks
        in_racks = any(device.rack_devices for device in devices)
        can_fuse = num_experts > 0 and blocks and compute in self.fused_formats
        fused = self.fused_experts and can_fuse and (compute != "fp8" or recipe == "mxfp8")
        dispatcher = self.dispatcher
        if dispatcher in {"auto", "deepep"}:
            instead: DispatcherName = "hybridep" if dispatcher == "auto" else "alltoall"
            dispatcher = instead if in_racks else "deepep"
        attention = self.attention_format
        if attention == "auto":
            attention = "fp8" if recipe == "mxfp8" else "bf16"
        graphs = self.cuda_graphs
        if graphs == "auto":
            graphs = "step" if fused else "attention" if num_experts and in_racks else "none"
        elif graphs == "step" and num_experts and not fused:
            graphs = "attention"
        return replace(
            self,
            fp8_recipe=recipe,
            fp8_bytes_per_parameter=min(self.fp8_bytes_per_parameter, 1.0)
            if single
            else self.fp8_bytes_per_parameter,
            attention_format=attention if compute == "fp8" else "bf16",
            dispatcher=dispatcher,
            exchange_multiprocessors=self.exchange_multiprocessors
            or DISPATCHERS[dispatcher].multiprocessors,
            fused_experts=fused,
            cuda_graphs=graphs,
        )

    def with_modules(self, modules: Sequence[RecomputeModule]) -> Self:
        """Return the traits of a training that recomputes parts of blocks; sorted by name.

        Raises:
            ValueError: If the runtime cannot.
        """
        if modules and "modules" not in self.recompute:
            able = ", ".join(name for name in RUNTIMES if "modules" in RUNTIMES[name].recompute)
            raise ValueError(
                f"runtime {self.name!r} recomputes no {modules[0]} alone; runtimes that do: {able}"
            )
        return replace(self, recompute_modules=tuple(sorted(set(modules))))

    def with_loss_chunks(self, chunks: int | Literal["auto"]) -> Self:
        """Return the traits of a training with a loss in so many parts.

        Raises:
            ValueError: If the runtime computes the loss as a whole.
        """
        if chunks != 1 and not self.chunks_loss:
            able = ", ".join(name for name, traits in RUNTIMES.items() if traits.chunks_loss)
            raise ValueError(
                f"runtime {self.name!r} computes the loss as a whole, found {chunks}; runtimes "
                f"that divide it: {able}"
            )
        return replace(self, loss_chunks=0 if chunks == "auto" else chunks)

    def with_offloaded(self, num_blocks: int) -> Self:
        """Return the traits of a training that offloads the activations of so many blocks.

        It then recomputes nothing and captures no graphs (``TransformerConfig`` of megatron-core
        0.16 refuses both).
        """
        return replace(self, offloaded_blocks=num_blocks, recompute=("none",), cuda_graphs="none")

    def other_settings(self) -> Iterator[tuple[str, Self]]:
        """Yield changes of the experiment file that switch one trait, and the traits with it."""
        for name in self.switched:
            value = not getattr(self, name)
            change: dict[str, Any] = {name: value}
            yield f"traits.{name}={str(value).lower()}", replace(self, **change)

    def is_unexplained(self, strategy: Strategy, num_nodes: int) -> bool:
        """Return whether a strategy took longer elsewhere than anything in the program explains."""
        is_piped = strategy.pp > 1 and strategy.num_micro_batches > 1 and num_nodes > 1
        replicated = not strategy.zero.stage and any(
            each.options.dp > 1 for each in strategy.stages
        )
        return self.unexplained_pipelines and is_piped and replicated

    def optimizer(self, name: str) -> "Optimizer":
        """Return an optimizer with the moments and gradients of the formats."""
        kept = self.formats.kept
        narrow = "gradients" in kept and "moments" in kept
        return replace(
            find_optimizer(name),
            bytes_per_moment=self.formats.moment_bytes,
            gradient_bytes=HALF_BYTES if narrow else BYTES_PER_FP32,
        )

    def why_no_context(self, cp: int) -> str | None:
        """Say why the runtime cannot divide sequences over so many ranks; None if it can."""
        if cp == 1:
            return None
        if self.context_parallel == "none":
            able = [name for name, traits in RUNTIMES.items() if traits.context_parallel != "none"]
            return (
                f"runtime {self.name!r} has no context parallelism, found cp {cp}; runtimes that "
                f"have: {', '.join(able) or 'none'}"
            )
        if not self.fused_attention:
            return f"cp {cp} needs attention as one kernel; set traits.fused_attention to true"
        return None

    def why_no_experts(self, options: StageOptions) -> str | None:
        """Say that the runtime cannot spread experts over ranks; None if it can, or need not."""
        if self.expert_parallel or not options.spreads_experts:
            return None
        degrees = (
            f"ep {options.ep}" if options.ep > 1 else f"etp {options.etp} with tp {options.tp}"
        )
        return f"runtime {self.name!r} has no expert parallelism, found {degrees}"

    @property
    def waits_for_all_reduces(self) -> bool:
        """Whether the host waits at every all-reduce until the device has finished it."""
        return self.synchronisation_s > 0

    def bytes_per_parameter(self, precision: Precision) -> "ParameterBytes":
        """Return the bytes of a parameter and its gradient when training in a precision.

        A micro-batch's gradient is computed in the weights' precision. If the sum over
        micro-batches is wider, it has separate memory, unless the product that computes the
        gradient adds to the sum directly. Adding reads the gradient and reads and writes the sum; a
        fused product reads and writes the sum instead of writing the gradient.
        """
        width, total = BYTES_PER_ELEMENT[precision], self._sum_bytes(precision)
        kept_formats, gathered = self.formats.kept, FP8_RECIPES[self.fp8_recipe].gathered_bytes
        if self.fused_accumulation:
            kept, accumulation = width + total, 2 * total - width
        else:
            alone = self.frees_gradients and total > width
            kept = width + (0 if alone else width) + (total if total > width else 0)
            accumulation = width + 2 * total
        counts_anew = "gradients" in kept_formats
        return ParameterBytes(
            kept=kept if counts_anew else _set_or(self.kept_bytes_per_parameter, kept),
            weight=width,
            gathered=gathered if "primary" in kept_formats else width,
            total=total,
            accumulation=_set_or(self.accumulation_bytes_per_parameter, accumulation),
            gradient=max(width, _set_or(self.gradient_bytes_per_parameter, total)),
            tied=max(width, _set_or(self.tied_bytes_per_parameter, total)),
            bucket=self.bucket_bytes_per_element * width / HALF_BYTES,
            bucket_traffic=self.bucket_traffic_bytes_per_parameter * width / HALF_BYTES,
            master=self._master_bytes(precision),
            step=self.step_bytes_per_parameter if width == HALF_BYTES else 0.0,
            step_traffic=self.step_traffic_bytes_per_parameter + self._narrow_traffic_bytes
            if width == HALF_BYTES
            else NORM_TRAFFIC_BYTES,
        )

    def shards_without_zero(self, precision: Precision) -> bool:
        """Return whether replicas divide the optimizer's states even without ZeRO.

        References:
            DeepSpeed 0.19.8, runtime/bf16_optimizer.py, ``fp32_groups_flat_partition``.
        """
        return self.wraps_optimizer and precision == "bf16"

    def bytes_with_zero(self, precision: Precision, zero_stage: int) -> "ParameterBytes":
        """Return `bytes_per_parameter` as far as memory depends on the ZeRO stage.

        DeepSpeed has an optimizer of its own around the program's. In bf16 without ZeRO it adds
        gradients to one flat buffer, also in bf16, which is reduced as it is, in no buckets; with
        ZeRO-1 they are added up where they are computed; sharded ones in single precision. In
        single precision every ZeRO stage copies the weights of a shard.

        References:
            DeepSpeed 0.19.8, runtime/bf16_optimizer.py and runtime/zero/stage_1_and_2.py
            (``single_partition_of_fp32_groups``); counted in its engines by a test.
        """
        per = self.bytes_per_parameter(precision)
        if not self.wraps_optimizer:
            return per
        if precision == "fp32":
            return replace(per, master=BYTES_PER_FP32) if zero_stage else per
        if precision == "fp16" and not zero_stage:
            return replace(per, step=2 * per.step)  # once as they are, once in one flat tensor
        if precision == "bf16" and zero_stage < SHARDED_GRADIENTS:
            kept = per.weight * (2 if zero_stage else 3)
            return replace(per, kept=kept, bucket=per.bucket if zero_stage else 0.0)
        return per

    def _master_bytes(self, precision: Precision) -> float:
        """Return the memory of single-precision copies, which ZeRO-1 shards.

        An optimizer with narrow moments updates bf16 weights in place and keeps the 16 bits that
        they lack (Megatron-core, ``store_param_remainders``); of fp8 weights it keeps all 32.
        """
        if BYTES_PER_ELEMENT[precision] != HALF_BYTES or self.formats.master == "none":
            return 0.0
        narrow = "moments" in self.formats.kept and precision != "fp8"
        rest = self.remainder_bytes_per_parameter if narrow else None
        return _set_or(rest, self.master_bytes_per_parameter)

    @property
    def _narrow_traffic_bytes(self) -> float:
        """Traffic of the step that gradients in bf16 add: they are cleared, and cast before it.

        If moments are narrow, too, norm and clipping read and write them as they are, uncast.
        """
        kept = self.formats.kept
        if "gradients" not in kept:
            return 0.0
        cleared = HALF_BYTES - BYTES_PER_FP32
        return cleared + (3 * cleared if "moments" in kept else HALF_BYTES + BYTES_PER_FP32)

    def accumulates_alone(self, precision: Precision) -> bool:
        """Return whether the program itself adds each gradient to a wider sum of micro-batches."""
        return (
            not self.fused_accumulation
            and self._sum_bytes(precision) > BYTES_PER_ELEMENT[precision]
        )

    def _sum_bytes(self, precision: Precision) -> int:
        """Return the width in which the gradients of micro-batches are added up."""
        if "gradients" in self.formats.kept:
            return HALF_BYTES
        wide = {
            "fp16": self.accumulates_fp16_in_fp32,
            "bf16": self.accumulates_bf16_in_fp32,
            **dict.fromkeys(NARROW, self.accumulates_bf16_in_fp32),
            "fp32": True,
        }
        return BYTES_PER_FP32 if wide[precision] else BYTES_PER_ELEMENT[precision]


PIPELINE_ZERO_STAGES: Final = (0, 1, 3)
"""No runtime shards gradients or gathers weights for every micro-batch in a pipeline: that would
cost more than the pipeline gains."""

HALF_BYTES: Final = BYTES_PER_ELEMENT["fp16"]

NORM_TRAFFIC_BYTES: Final = 4.0
"""In single precision nothing is scaled or cast: the norm reads every gradient once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes of one parameter in one precision, in memory or memory traffic."""

    kept: float  # memory of the weight and its gradients between passes
    weight: float  # width of a weight that kernels read
    gathered: float  # message of the gather of a block's updated weights
    total: float  # width of the sum of micro-batches' gradients
    accumulation: float  # traffic of adding one micro-batch's gradient
    gradient: float  # message of the data-parallel all-reduce
    tied: float  # message of the tied embedding's all-reduce
    bucket: float  # temporary memory of a flat bucket, per element
    bucket_traffic: float  # traffic of filling and emptying it
    master: float  # memory of single-precision copies, which ZeRO-1 shards
    step: float  # temporary memory of the optimizer step
    step_traffic: float  # traffic of the step without the optimizer's update


RECOMPUTED: Final[Mapping[RecomputeModule, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "mlp": (
        ("feed-forward-in", "gated-silu", "gelu", "feed-forward-out"),
        ("gated-silu", "gelu", "feed-forward-out"),
    ),
    "layernorm": (
        ("norm-1", "norm-2"),
        (
            *("qkv", "query-latent", "key-value-latent"),
            *("feed-forward-in", "shared-feed-forward-in", "router"),
        ),
    ),
    "moe_act": (
        ("experts-clamps", "experts-activation"),
        ("experts-clamps", "experts-out"),
    ),
    "mla_up_proj": (
        ("query-norm", "query", "key-value-norm", "key-value", "rotary", "keys"),
        ("query", "key-value", "attention"),
    ),
}
"""Operators of a block that run again with each module, and operators that keep no input because it
is made again. Modules have Megatron-LM's names: feed-forward parts without experts, norms,
activations of experts, products that make queries, keys and values from latents. Attention still
keeps the sums of its softmax, and its result as the input of the next product."""


@cache
def _recomputed(
    modules: tuple[RecomputeModule, ...],
) -> tuple[frozenset[str], frozenset[str]]:
    parts = [RECOMPUTED[module] for module in modules]
    again, free = (frozenset(name for part in parts for name in part[i]) for i in (0, 1))
    return again, free


def _set_or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _read_table() -> Mapping[tuple[str, str], RuntimeTraits]:
    """Return the traits of every runtime and release; ``""`` stands for no release."""
    checker = TypeAdapter(RuntimeTraits)  # it converts 63e-6, which is text in YAML
    table = with_inherited(read_shipped("runtimes/runtimes.yaml"))
    records = {
        (name, release): {**record, **traits, "name": name, "release": release}
        for name, record in table.items()
        for release, traits in _release_traits(name)
    }
    return MappingProxyType(
        {key: checker.validate_python(record) for key, record in records.items()}
    )


def _release_traits(name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the releases of a runtime, the newest first, each with the traits that it sets."""
    releases = RELEASES.get(name, {})
    return [(key, record.traits) for key, record in releases.items()] or [("", {})]


_BY_RELEASE: Final = _read_table()


def find_release(runtime: str, release: str) -> RuntimeTraits:
    """Return the traits of a runtime's release; a ``ValueError`` lists those that are known."""
    traits = _BY_RELEASE.get((runtime, release))
    if traits is None:
        names = [name for of, name in _BY_RELEASE if of == runtime and name]
        choice = f"expected one of {', '.join(names)}" if names else f"{runtime} has no releases"
        raise ValueError(f"found {shown(release)}; {choice}")
    return traits


RUNTIMES: Final = MappingProxyType(
    {name: find_release(name, _release_traits(name)[0][0]) for name, _ in _BY_RELEASE}
)
"""Runtimes by name, each in its newest release."""


def kernels_of(traits: RuntimeTraits, context: int = 0) -> Kernels:
    """Return the kernels for layers that families share, after ``context`` earlier tokens."""
    shared = {part.name for part in fields(Kernels) if hasattr(traits, part.name)}
    return Kernels(**{name: getattr(traits, name) for name in shared}, context=context)


# -------------------------------------------------------------------------- optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Memory and traffic of an optimizer per parameter, weights in single precision."""

    name: str
    num_moments: int  # running averages per parameter
    bytes_per_moment: int = BYTES_PER_FP32
    gradient_bytes: int = BYTES_PER_FP32  # of the gradient that the update reads

    @property
    def moment_bytes(self) -> int:
        """Memory of the moments; ZeRO-1 shards it over dp."""
        return self.bytes_per_moment * self.num_moments

    @property
    def update_traffic_bytes(self) -> int:
        """Traffic of the update: reads the gradient, reads and writes weight and moments."""
        return self.gradient_bytes + 2 * (BYTES_PER_FP32 + self.moment_bytes)


OPTIMIZERS: Final = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (
            Optimizer(name="adam", num_moments=2),
            Optimizer(name="adamw", num_moments=2),
            Optimizer(name="sgd", num_moments=0),
        )
    }
)
"""Plain SGD: without momentum."""


def find_optimizer(name: str) -> Optimizer:
    """Look an optimizer up by its name; raise ``ValueError`` if it is not known."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not known; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]

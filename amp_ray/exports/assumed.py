"""What a predicted time assumes of a program: its traits, and the flag that decides each.

A trait has a row here: either the flag, key or setting that decides it in each program's export, or
the reason why none does. Exports list those of their strategy in a comment at the top.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Final

from amp_ray.exports.chosen import Chosen
from amp_ray.runtimes.traits import Formats, RuntimeTraits
from amp_ray.units import figure_text

_MEGATRON: Final = {
    "overlaps_gradient_sync": ("--overlap-grad-reduce",),
    "overlaps_weight_gather": ("--overlap-param-gather",),
    "bucket_elements": ("--ddp-bucket-size",),
    "waiting_elements": ("--suggested-communication-unit-size",),
    "fused_attention": ("--attention-backend",),
    "native_attention": ("--attention-backend",),
    "fused_pointwise": ("--no-bias-swiglu-fusion", "--no-bias-gelu-fusion", "--no-rope-fusion"),
    "loss_fraction": ("--cross-entropy-loss-fusion",),
    "dropout": ("--attention-dropout", "--hidden-dropout"),
    "recomputes_norms": ("--recompute-modules",),
    "recomputes_expert_activations": ("--recompute-modules",),
    "recomputes_latent_projections": ("--recompute-modules",),
    "overlaps_gathers": ("--tp-comm-overlap",),
    "reads_for_scales": ("--fp8-recipe",),
    "accumulates_fp16_in_fp32": ("--accumulate-allreduce-grads-in-fp32",),
    "accumulates_bf16_in_fp32": ("--grad-reduce-in-bf16",),
    "fused_accumulation": ("--no-gradient-accumulation-fusion",),
    "vocabulary_multiple": ("--make-vocab-size-divisible-by",),
    "context_parallel": ("--cp-comm-type",),
    "expert_streams": ("--moe-grouped-gemm",),
    "routing_launches": ("--moe-permute-fusion", "--moe-router-fusion"),
    "sends_tokens_once": ("--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"),
    "exchange_multiprocessors": ("--moe-deepep-num-sms",),
    "overlaps_exchanges": ("--overlap-moe-expert-parallel-comm",),
    "offloaded_blocks": ("--cpu-offloading-num-layers",),
    "formats": ("--grad-reduce-in-bf16", "--use-precision-aware-optimizer", "--fp8-param-gather"),
}
_BRIDGE: Final = {
    "overlaps_gradient_sync": ("ddp.overlap_grad_reduce",),
    "overlaps_weight_gather": ("ddp.overlap_param_gather",),
    "bucket_elements": ("ddp.bucket_size",),
    "waiting_elements": ("ddp.suggested_communication_unit_size",),
    "loss_fraction": ("model.cross_entropy_loss_fusion",),
    "recomputes_norms": ("model.recompute_modules",),
    "recomputes_expert_activations": ("model.recompute_modules",),
    "recomputes_latent_projections": ("model.recompute_modules",),
    "overlaps_gathers": ("comm_overlap.tp_comm_overlap",),
    "fused_accumulation": ("model.gradient_accumulation_fusion",),
    "vocabulary_multiple": ("model.make_vocab_size_divisible_by",),
    "context_parallel": ("model.cp_comm_type",),
    "expert_streams": ("model.moe_grouped_gemm",),
    "routing_launches": ("model.moe_permute_fusion", "model.moe_router_fusion"),
    "sends_tokens_once": ("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"),
    "exchange_multiprocessors": ("model.moe_deepep_num_sms",),
    "overlaps_exchanges": ("comm_overlap.overlap_moe_expert_parallel_comm",),
    "offloaded_blocks": ("model.cpu_offloading_num_layers",),
}
_TITAN: Final = {
    "overlaps_gathers": ("COMPILE",),
    "fused_pointwise": ("COMPILE",),
    "launches_per_kernel": ("disable_cuda_graphs",),
    "gradient_bytes_per_parameter": ("mixed_precision_reduce",),
    "sends_tokens_once": ("moe_comm_backend",),
}
_NANOTRON: Final = {
    "keeps_gathered_inputs": ("tp_linear_async_communication",),
    "accumulates_bf16_in_fp32": ("accumulate_grad_in_fp32",),
    "formats": ("accumulate_grad_in_fp32",),
}
_DEEPSPEED: Final = {
    "sliced_activations": ("pipe_partitioned",),
    "sliced_gradients": ("grad_partitioned",),
    "gradient_bytes_per_parameter": ("communication_data_type",),
    "waiting_elements": ("stage3_max_live_parameters",),
}

FLAGS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "megatron-lm": _MEGATRON,
    "megatron-bridge": _BRIDGE,
    "torchtitan": _TITAN,
    "nanotron": _NANOTRON,
    "deepspeed": _DEEPSPEED,
    "accelerate": {},
}
"""What decides a trait in a program's export, by format of ``export`` and trait."""

_RUNTIMES: Final = {
    **dict.fromkeys(("megatron-lm", "megatron-bridge"), "megatron-core"),
    "torchtitan": "fsdp2",
    "nanotron": "nanotron",
}
"""The runtime whose traits a format of ``export`` switches on."""

_REASONS: Final[Mapping[str, tuple[str, ...]]] = {
    "it says what a program is, not how it runs": (
        *("name", "description", "status", "layer_list", "partition", "shards_heads"),
        *("needs_flash_attention", "fails_without_parameters", "launch_limit_s"),
        *("launch_setup_s", "launch_iterations"),
    ),
    "it says what a program can run; the strategy's own flags choose among it": (
        *("interleaves", "fp8", "keeps", "tensor_parallel", "pipeline_parallel"),
        *("min_zero_stage", "max_zero_stage", "max_pipeline_zero_stage", "keeps_weights"),
        *("hybrid_shards", "recompute", "recompute_per_stage", "offloads_activations"),
        *("unequal_stages", "token_slices", "sequence_parallel", "expert_parallel"),
        *("virtual_stages", "divides_biased_experts"),
    ),
    "a figure that was counted in a program or measured": (
        *("attention_rate", "launches_per_kernel", "synchronisation_s", "piped_collective_s"),
        *("restart_launches", "mask_bytes", "fp8_bytes_per_parameter"),
        *("fp8_gather_bytes_per_parameter", "remainder_bytes_per_parameter"),
        *("accumulation_bytes_per_parameter", "kept_bytes_per_parameter"),
        *("tied_bytes_per_parameter", "bucket_traffic_bytes_per_parameter"),
        *("step_traffic_bytes_per_parameter", "master_bytes_per_parameter"),
        *("bucket_bytes_per_element", "step_bytes_per_parameter", "logit_bytes"),
        *("allocator_factor", "context_bytes", "host_s_per_iteration", "gather_slice_s"),
        *("routing_launches", "waiting_launches", "exchange_multiprocessors", "expert_streams"),
        *("gradient_bytes_per_parameter", "bucket_elements", "waiting_elements", "loss_fraction"),
    ),
    "a program's code always does so": (
        *("forward_runs", "packs_heads", "blocking_transfers", "duplex_transfers"),
        *("sliced_activations", "sliced_gradients", "frees_outputs", "fused_accumulation"),
        *("overlaps_backward_all_reduce", "unused_gradients", "frees_gradients"),
        *("wraps_optimizer", "rounds_gathered", "buckets_alone", "gathers_every_pass"),
        *("scatters_gradients", "reduces_sharded_at_once", "keeps_gathered_inputs"),
        *("weighs_activations", "waits_for_tokens", "overlaps_gradient_sync"),
        *("overlaps_weight_gather", "fused_attention", "fused_pointwise", "dropout"),
        *("recomputes_norms", "recomputes_expert_activations", "recomputes_latent_projections"),
        *("overlaps_gathers", "reads_for_scales", "accumulates_fp16_in_fp32"),
        *("accumulates_bf16_in_fp32", "context_parallel", "sends_tokens_once"),
        *("overlaps_exchanges", "offloaded_blocks", "formats", "vocabulary_multiple"),
    ),
    "the board, its libraries or the environment decide": (
        *("has_pat", "fuses_older_attention", "native_attention", "blocking_launches"),
    ),
}

NO_FLAG: Final = {trait: reason for reason, traits in _REASONS.items() for trait in traits}
"""Why no flag decides a trait, in programs for which `FLAGS` has none, by trait."""

_ENVIRONMENT: Final = {
    "has_pat": "NCCL 2.23 or newer",
    "native_attention": "cuDNN's or FlashAttention-3's kernels where the board has them",
    "frees_outputs": "outputs freed once they are sent",
}
"""What a number assumes and no export can set, by trait."""


def assumptions(chosen: Chosen, program: str, words: Collection[str]) -> tuple[str, ...]:
    """Return lines that tell which traits a predicted time assumes, for the head of an export.

    Args:
        chosen: The strategy, with its runtime.
        program: The format of ``export``.
        words: Flags and keys that the export has; others are off.
    """
    traits, decides = chosen.experiment.traits, FLAGS[program]
    if traits.name != _RUNTIMES[program]:
        return (f"the prediction is of runtime {traits.name}, which is another program",)
    names = {word.partition("=")[0] for word in words}
    lines = [
        f"  {trait.name} {_value(getattr(traits, trait.name))}: {' '.join(flags)}"
        for trait in fields(RuntimeTraits)
        if (flags := [flag for flag in decides.get(trait.name, ()) if flag in names])
    ]
    lines += [
        f"  {trait}: {text}" for trait, text in _ENVIRONMENT.items() if getattr(traits, trait)
    ]
    head = f"the prediction assumes these traits of runtime {traits.name} (docs/runtimes.md):"
    return (head, *lines) if lines else ()


def _value(value: object) -> str:
    if isinstance(value, Formats):
        return ", ".join(f"{key} {name}" for key, name in value.kept.items()) or "usual"
    if isinstance(value, bool):
        return "on" if value else "off"
    return figure_text(value) if isinstance(value, float) else str(value)

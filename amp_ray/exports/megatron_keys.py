"""The flags of Megatron-LM: read, compared with the experiment, without effect, or not read.

The list is that of megatron/training/arguments.py with megatron-core 0.16, with the names that
Megatron-Bridge, NeMo, ms-swift and verl give to the same settings. A flag in none of the tables is
named as not read, and so are new ones.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from amp_ray.errors import shown
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead, not_read, patterns
from amp_ray.models.model import ModelShape
from amp_ray.runtimes.traits import OPTIMIZERS

ALIASES: Final = {
    "num-layers-in-first-pipeline-stage": "decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "decoder-last-pipeline-num-layers",
    "virtual-pipeline-model-parallel-size": "num-virtual-stages-per-pipeline-rank",
    "tensor-parallel-degree": "tensor-model-parallel-size",
    "ppo-micro-batch-size-per-gpu": "micro-batch-size",
    "max-length": "seq-length",
    "use-custom-fsdp": "use-megatron-fsdp",
    "checkpoint-activations": "recompute-activations",
    "num-moe-experts": "num-experts",
    "bucket-size": "ddp-bucket-size",
}
"""Other names of flags: fields of Megatron's classes, and old ones."""

READ: Final = frozenset(
    patterns("""
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size micro-batch-size global-batch-size
    sequence-parallel pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage
    num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers
    decoder-last-pipeline-num-layers account-for-embedding-in-pipeline-split
    account-for-loss-in-pipeline-split bf16 fp16 fp8-format grad-reduce-in-bf16 fp8-param-gather
    use-precision-aware-optimizer exp-avg-dtype exp-avg-sq-dtype main-grads-dtype cpu-offloading
    cpu-offloading-num-layers recompute-granularity recompute-method recompute-num-layers
    recompute-activations use-distributed-optimizer num-distributed-optimizer-instances
    use-megatron-fsdp data-parallel-sharding-strategy use-torch-fsdp2
    torch-fsdp2-no-reshard-after-forward zero-stage
    """)
)
"""Flags of the strategy and its formats, which `amp_ray.exports.megatron.read_flags` reads."""

_SIZES: Final = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "feed_forward_size",
    "num-attention-heads": "num_heads",
    "num-query-groups": "num_key_value_heads",
    "seq-length": "sequence_length",
    "vocab-size": "vocab_size",
    "padded-vocab-size": "vocab_size",
    "num-experts": "num_experts",
    "moe-router-topk": "experts_per_token",
    "moe-ffn-hidden-size": "expert_feed_forward_size",
    "moe-shared-expert-intermediate-size": "shared_feed_forward_size",
    "kv-channels": "head_size",
    "qk-head-dim": "head_size",
    "kv-lora-rank": "key_value_rank",
    "q-lora-rank": "query_rank",
    "qk-pos-emb-head-dim": "rotary_head_size",
    "v-head-dim": "value_head_size",
    "mtp-num-layers": "mtp_layers",
    "untie-embeddings-and-output-weights": "tied_embedding",
    "add-qkv-bias": "attention_bias",
    "qk-layernorm": "query_key_norm",
    "multi-latent-attention": "key_value_rank",
    "moe-layer-freq": "first_dense_layers",
}
"""Flags of the architecture, by figure of the model."""

_LATENT: Final = ("qk-head-dim", "kv-lora-rank", "q-lora-rank", "qk-pos-emb-head-dim", "v-head-dim")
"""Flags that mean nothing without latent attention, and `kv-channels`, which means nothing with."""

_MOST_PADDING: Final = 2**12  # rows of a vocabulary: more than 128 x tp 16, and special tokens

_ON: Final = ""
_TRAITS: Final[Mapping[str, Mapping[str, tuple[str, object]]]] = {
    "attention-backend": {
        **dict.fromkeys(("flash", "fused", "auto"), ("fused_attention", True)),
        **dict.fromkeys(("unfused", "local"), ("fused_attention", False)),
    },
    "use-flash-attn": {_ON: ("fused_attention", True)},
    "tp-comm-overlap": {_ON: ("overlaps_gathers", True)},
    "overlap-grad-reduce": {_ON: ("overlaps_gradient_sync", True)},
    "overlap-param-gather": {_ON: ("overlaps_weight_gather", True)},
    "no-bias-swiglu-fusion": {_ON: ("fused_pointwise", False)},
    "no-bias-gelu-fusion": {_ON: ("fused_pointwise", False)},
    "no-rope-fusion": {_ON: ("fused_pointwise", False)},
    "no-gradient-accumulation-fusion": {_ON: ("fused_accumulation", False)},
    "overlap-moe-expert-parallel-comm": {_ON: ("overlaps_exchanges", True)},
    "moe-enable-deepep": {_ON: ("sends_tokens_once", True)},
    "moe-token-dispatcher-type": {
        "flex": ("sends_tokens_once", True),
        "alltoall": ("sends_tokens_once", False),
    },
    "cp-comm-type": {
        "p2p": ("context_parallel", "ring"),
        "all_gather": ("context_parallel", "all-gather"),
    },
    "fp8-recipe": {
        "tensorwise": ("reads_for_scales", True),
        "delayed": ("reads_for_scales", False),
    },
    "recompute-modules": {
        "layernorm": ("recomputes_norms", True),
        "moe_act": ("recomputes_expert_activations", True),
        "mla_up_proj": ("recomputes_latent_projections", True),
    },
}
"""Traits of a runtime that a flag with a value decides."""

_COUNTS: Final = {
    "ddp-bucket-size": "bucket_elements",
    "suggested-communication-unit-size": "waiting_elements",
    "moe-deepep-num-sms": "exchange_multiprocessors",
}
"""Traits that are numbers, by flag."""

_OF_MODELS: Final = {
    "quick-geglu": "clamped_activation",
    "glu-linear-offset": "clamped_activation",
    "activation-func-clamp-value": "clamped_activation",
    "window-size": "attention_windows",
    "window-attn-skip-freq": "attention_windows",
}
"""Flags of rare parts of a model, by the figure of models that have it."""

_NEEDS: Final = {
    "moe-token-dispatcher-type": "expert-model-parallel-size",
    "tp-comm-overlap": "tensor-model-parallel-size",
    "cp-comm-type": "context-parallel-size",
    "fp8-recipe": "fp8-format",
}
"""Flags without effect where another one is missing, or 1."""

_AS_ASSUMED: Final = {
    "transformer-impl": ("transformer_engine",),
    "attention-dropout": ("0", "0.0"),
    "hidden-dropout": ("0", "0.0"),
    "moe-flex-dispatcher-backend": ("deepep",),
    "recompute-modules": ("core_attn",),
    "outer-dp-sharding-strategy": ("no_shard",),
    "recompute-num-layers": ("1",),
    "optimizer": ("adam",),
}
"""Values that the cost model assumes; others are named."""

_WITHOUT_EFFECT: Final = patterns(
    """
    data-path *-data-path data-args-path no-mmap-bin-files per-split-data-args-path
    data-cache-path data-impl split
    mock-data num-workers dataloader-* *create-attention-mask-in-dataloader eod-mask-loss
    num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus dataset
    tokenizer-* vocab-file vocab-extra-ids merge-file special-tokens *tiktoken*
    make-vocab-size-divisible-by trust-remote-code legacy-tokenizer

    train-iters train-samples exit-* seed data-parallel-random-init init-method* weight-decay*
    *-weight-decay* clip-grad adam-* sgd-momentum lr lr-* min-lr warmup decoupled-*lr
    *opt_param-scheduler *opt-param-scheduler loss-scale *-loss-scale loss-scale-window hysteresis
    max-epochs num-train-epochs

    load save load-* save-* no-load-* no-save-* ckpt-* *dist-ckpt* async-save finetune
    use-checkpoint-args use-mp-args-from-checkpoint-args pretrained-checkpoint non-persistent-*
    exit-on-missing-checkpoint auto-detect-ckpt-format use-persistent-ckpt-worker dist-ckpt-*
    *-safetensors rerun-* replication* model output-dir verify-integrity

    log-* tensorboard-* wandb-* timing-* profile* use-pytorch-profiler record-memory-history
    memory-snapshot-path *barrier-with-level-1-timing enable-one-logger one-logger-* app-tag-*
    logging-* eval-* full-validation multiple-validation-sets skip-train *-interval swanlab-*

    distributed-backend distributed-timeout-minutes lazy-mpu-init local-rank local_rank master-*
    node-rank use-cpu-initialization init-model-with-meta-device manual-gc*
    check-for-* no-check-for-*
    check-weight-hash-* *gloo* ddp-average-in-collective accumulate-allreduce-grads-in-fp32
    inprocess-* *ft-package calc-ft-timeouts run-workload-inspector-server adlr-autoresume* *-msc
    distributed-executor-backend nccl-socket-ifname enable-experimental

    position-embedding-type max-position-embeddings use-rotary-position-embeddings rotary-* rope-*
    use-rope-scaling no-position-embedding no-rope-freq norm-epsilon layernorm-epsilon
    apply-layernorm-1p normalization attention-softmax-in-fp32 *query-key-layer-scaling qk-clip*
    softmax-scale
    group-query-attention swiglu *bias-linear embedding-init-method* apply-rope-fusion
    calculate-per-token-loss moe-router-* moe-aux-loss-coeff moe-z-loss-coeff
    moe-input-jitter-eps moe-per-layer-logging
    moe-grouped-gemm moe-permute-fusion mtp-loss-scaling-factor softmax-type mscale*
    moe-apply-probs-on-input
    use-mcore-models fp8-margin fp8-interval fp8-amax-* no-fp8-wgrad te-rng-tracker
    inference-* max-tokens-to-oom

    nnodes nproc-per-node nproc-per_node num-nodes num-gpus nodes ntasks* gpus* rdzv-* standalone
    max-restarts tee log-dir role module no-python no-ssh hostfile include exclude master-addr
    master-port
    """
)
"""Patterns of flags that no plan depends on, or whose effect the cost model counts as it is."""

COMPARED: Final = frozenset((*_SIZES, *_TRAITS, *_COUNTS, *_AS_ASSUMED))
"""Flags whose value is compared with the experiment."""


def is_without_effect(flag: str) -> bool:
    """Return whether no plan depends on a flag."""
    return flag not in COMPARED and not not_read([flag], "", known=_WITHOUT_EFFECT)


def check_model(flags: Mapping[str, str], shape: ModelShape) -> None:
    """Refuse flags of another model than the experiment's.

    Raises:
        ValueError: If a size or a switch of the architecture is not that of the model.
    """
    for flag, figure in _SIZES.items():
        value = flags.get(flag)
        is_other = (flag in _LATENT) != bool(shape.key_value_rank)
        if value is None or (is_other and flag in {*_LATENT, "kv-channels"}):
            continue
        if flag == "qk-layernorm" and shape.key_value_rank:  # norms of latents, which it has
            continue
        expected, actual = _expected(figure, shape), _actual(flag, value)
        if flag == "multi-latent-attention":
            expected = bool(expected)
        if figure == "vocab_size" and isinstance(actual, int):
            is_padding = abs(actual - shape.vocab_size) < _MOST_PADDING
            actual = expected if is_padding else actual
        if actual is not None and actual != expected:
            advice = (
                f"add --set model.sequence_length={actual}"
                if figure == "sequence_length"
                else "compare it with an experiment of its own model"
            )
            message = f"--{flag} {value}".rstrip()
            raise ValueError(f"{message}: the experiment's model has {figure} {expected}; {advice}")


def _expected(figure: str, shape: ModelShape) -> object:
    usual = {
        "num_key_value_heads": shape.num_heads,
        "head_size": shape.hidden_size // (shape.num_heads or 1),
        "expert_feed_forward_size": shape.feed_forward_size,
    }
    return getattr(shape, figure) or usual.get(figure, getattr(shape, figure))


def _actual(flag: str, value: str) -> object:
    """Return the figure that a flag sets; None if it depends on the environment."""
    if flag == "moe-layer-freq":
        pattern = re.fullmatch(r"\(?\[0\]\*([0-9]{1,5})\+\[1\]\*[0-9]{1,5}\)?", value)
        return 0 if value in {"1", "[1]"} else int(pattern[1]) if pattern else value
    if flag == "untie-embeddings-and-output-weights":
        return False
    if flag in {"add-qkv-bias", "qk-layernorm", "multi-latent-attention"}:
        return True
    if re.search(r"[$`]", value):
        return None
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else shown(value)


def notes_of(
    flags: Mapping[str, str], experiment: Experiment, file: str, form: str = "--{}"
) -> tuple[NotRead, ...]:
    """Return what to say about flags that are not read, with values where these decide."""
    shape, traits = experiment.model.shape, experiment.traits
    known = {*READ, *COMPARED}
    known |= {flag for flag, figure in _OF_MODELS.items() if getattr(shape, figure)}
    known |= {"cross-entropy-loss-fusion"} if traits.loss_fraction < 1 else set()
    unknown = [flag for flag in flags if flag not in known and not is_without_effect(flag)]
    unread = [*unknown, *_unlike(flags, experiment)]
    notes = not_read(unread, file, known=(), shown_as=form)
    hints: dict[str, list[str]] = {}
    for flag, (trait, value) in _decided(flags):
        if getattr(traits, trait) != value:
            text = str(value).lower()
            hints.setdefault(f"traits.{trait}={text}", []).append(flag)
    for hint, names in hints.items():
        why = f"plan it with --set {hint}"
        notes += not_read(names, file, known=(), shown_as=form, why=why)
    environment = [flag for flag in _SIZES if re.search(r"[$`]", flags.get(flag, ""))]
    why = "it depends on the shell's environment"
    return notes + not_read(environment, file, known=(), shown_as=form, why=why)


def _decided(flags: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, object]]]:
    """Yield flags with their values, and the trait that they decide."""
    for flag, trait in _COUNTS.items():
        if re.fullmatch("[0-9]{1,12}", flags.get(flag, "")):
            yield f"{flag} {flags[flag]}", (trait, int(flags[flag]))
    for flag, traits in _TRAITS.items():
        if flags.get(_NEEDS.get(flag, flag), "1") == "1":
            continue
        for word in flags.get(flag, "").split() if flag in flags and _ON not in traits else [_ON]:
            if flag in flags and word in traits:
                yield f"{flag} {word}".strip(), traits[word]


def _unlike(flags: Mapping[str, str], experiment: Experiment) -> Iterator[str]:
    """Yield flags with values that the cost model does not assume and no trait decides."""
    for flag in {**_AS_ASSUMED, **_TRAITS}:
        if flag not in flags or _ON in _TRAITS.get(flag, {}):
            continue
        usual = {*_AS_ASSUMED.get(flag, ()), *_TRAITS.get(flag, {})}
        if flag == "recompute-num-layers" and flags.get("recompute-method") == "block":
            continue
        if flag == "optimizer":
            usual.add(experiment.optimizer)
        yield from (f"{flag} {word}" for word in flags[flag].split() if word not in usual)


def check_optimizer(flags: Mapping[str, str], experiment: Experiment) -> None:
    """Refuse another optimizer of those that can be planned."""
    name, planned = flags.get("optimizer", ""), experiment.optimizer
    if name in OPTIMIZERS and name.removesuffix("w") != planned.removesuffix("w"):
        message = f"--optimizer {name}; the experiment has {planned}: add --set optimizer={name}"
        raise ValueError(message)

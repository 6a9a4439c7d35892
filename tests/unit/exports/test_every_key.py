"""Every reader of a training program's file reads a key, refuses it, or names it as not read."""

from dataclasses import dataclass

import pytest

from amp_ray.errors import InputError
from amp_ray.exports import reading
from amp_ray.exports.reading import read_program
from amp_ray.inputs.experiment import Experiment
from support.experiments import small_experiment


def experiment() -> Experiment:
    """Build llama with 6 blocks on 2 nodes of 2 A100."""
    return small_experiment(
        ("device: T4", "device: A100-40"),
        ("family: gpt2", "family: llama"),
        (
            "global_batch_size: 8\n",
            "global_batch_size: 8\nruntime: megatron-core\nprecision: bf16\n",
        ),
    )


@dataclass(frozen=True)
class Reader:
    """A file that one reader reads, and keys of its program."""

    file: str
    text: str  # {} stands for more keys
    read: tuple[tuple[str, str, object], ...]  # key, name in the STRATEGY object, value there
    refused: tuple[tuple[str, str], ...]  # key of another job, part of the message
    named: tuple[tuple[str, str], ...]  # key, its name in the message
    silent: tuple[str, ...]


INTERLEAVED = "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'"
EVERY_OTHER = "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'"

READERS = {
    "_from_megatron": Reader(
        file="run.sh",
        text="torchrun pretrain_gpt.py --micro-batch-size 1 --pipeline-model-parallel-size 2 {}\n",
        read=(
            ("--tensor_model_parallel_size 2", "tp", 2),
            ("model.tensor_model_parallel_size=2", "tp", 2),
            ("model.activations_checkpoint_granularity=full", "recompute", "full"),
            ("--num-virtual-stages-per-pipeline-rank 3", "virtual_stages", 3),
            ("--num-layers-per-virtual-pipeline-stage 1", "virtual_stages", 3),
            ("--pipeline-model-parallel-layout 'Et*2|t*4L'", "bounds", [0, 3, 9]),
            (
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
                "bounds",
                [0, 4, 9],
            ),
            ("--use-torch-fsdp2", "zero_stage", 3),
            ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero_stage", 2),
            ("--recompute-granularity selective", "recompute", "selective"),
            ("--recompute-granularity selective --recompute-modules mlp", "recompute", "none"),
            ("--sequence-parallel false --tensor-model-parallel-size 2", "sequence_parallel", None),
        ),
        refused=(
            ("--num-layers 80", "num_layers 6"),
            ("--hidden-size 8192", "hidden_size 256"),
            ("--seq-length 8192", "add --set model.sequence_length=8192"),
            ("--num-experts 8", "num_experts 0"),
            ("--multi-latent-attention", "key_value_rank False"),
            ("--vocab-size 128256", "vocab_size"),
            ("--nnodes 4 --nproc-per-node 8", "32 processes; the experiment has 4 devices"),
            ("--optimizer sgd", "add --set optimizer=sgd"),
            ("--bf16 --fp16", "run.sh:1: --bf16 and --fp16: keep one"),
            ("--recipe llama3_8b_pretrain_config", "trains another model"),
            ("model.encoder_seq_length=8192", "run.sh:1: model.encoder_seq_length 8192: the exp"),
            ("trainer.devices=8", "run.sh:1: trainer.devices 8 = 8 processes"),
            ("trainer.precision=16-mixed", "precision is fp16"),
            ("model.fp8=True", "precision is fp8"),
            ("--data-parallel-sharding-strategy most --use-megatron-fsdp", "found 'most'"),
        ),
        named=(
            ("--optimizer-cpu-offload", "--optimizer-cpu-offload"),
            ("--recipe my_recipe", "--recipe"),
            ("--use-checkpoint-args --load x", "--use-checkpoint-args"),
            ("model.megatron_amp_O2=True", "not read: model.megatron_amp_O2 ("),
            ("--a_flag_of_next_year 1", "--a_flag_of_next_year"),
            ("--optimizer muon", "--optimizer muon"),
            ("--attention-backend unfused", "set traits.fused_attention=false"),
            ("--transformer-impl local", "--transformer-impl local"),
            (
                "--recompute-granularity selective --recompute-modules mlp",
                "plan it with --set 'recompute={modules: [mlp]}'",
            ),
            ("--no-rope-fusion", "traits.fused_pointwise=false"),
            ("--rampup-batch-size 16 16 1000", "--rampup-batch-size"),
            ("--ddp-bucket-size 7", "set traits.bucket_elements=7"),
            ("--window-size 127,0", "--window-size"),
            ("--cuda-graph-impl local", "traits.cuda_graphs=step"),
            (
                "--num-layers $LAYERS",
                "--num-layers (run.sh: it depends on the shell's environment)",
            ),
            (
                "actor.ref.megatron.tensor_model_parallel_size=4",
                "actor.ref.megatron.tensor_model_parallel_size",
            ),
            ("--a-flag-of-next-year 1", "--a-flag-of-next-year"),
        ),
        silent=(
            *("--num-workers 1 --num-workers 2", "--special-tokens x", "--tokenizer-model /a"),
            *("--data-path /data", "--save /x --save-interval 9", "--lr 1e-4", "--wandb-project p"),
            *("trainer.precision=bf16", "exp_manager.name=x", "trainer.devices=4"),
            *("--train-iters 10", "--swiglu", "--num-layers 6", "--attention-backend flash"),
            *("--optimizer adam", "--transformer-impl transformer_engine", "--optimizer-x false"),
            "--fp8-dot-product-attention",  # bf16 has no use for it
        ),
    ),
    "_from_titan": Reader(
        file="job.toml",
        text="[parallelism]\ntensor_parallel_degree = 2\n{}\n[training]\nlocal_batch_size = 2\n",
        read=(
            ("enable_sequence_parallel = false", "sequence_parallel", None),
            ("[activation_checkpoint]\nmode = 'full'", "recompute", "full"),
            (EVERY_OTHER, "recompute", {"kind": "full", "layers": 3}),
            (INTERLEAVED, "virtual_stages", 2),
            (
                f"{INTERLEAVED}\n{EVERY_OTHER}",
                "bounds",
                [0, 2, 4, 6, 9],
            ),
            ("context_parallel_degree = 2", "cp", 2),
            (
                "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'",
                "recompute",
                "per-operator",
            ),
            ("[experimental]\npipeline_parallel_degree = 2", "pp", 2),
        ),
        refused=(
            ("[model]\nconverters = ['float8']", "mean precision fp8, add --set precision=fp8"),
            ("[model]\nname = 'llama3'\nflavor = '405B'", "126 layers of width 16384"),
            (
                "[activation_checkpoint]\nmode = 'memory_budget'",
                "job.toml:4: mode: found 'memory_budget', which is not planned; expected none,",
            ),
            ("[model]\nconverters = ['quantize.linear.mx']", "precision fp8"),
            ("[float8]\nenable_float8_linear = true", "precision fp8"),
        ),
        named=(
            ("enable_async_tensor_parallel = true", "parallelism.enable_async_tensor_parallel"),
            ("[compile]\nenable = true", "compile.enable"),
            (
                "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'ZBVZeroBubble'",
                "parallelism.pipeline_parallel_schedule",
            ),
            ("[a_section]\nof_next_year = 1", "a_section.of_next_year"),
        ),
        silent=(
            *(
                "[checkpoint]\ninterval = 500",
                "[metrics]\nlog_freq = 1",
                "[job]\ndump_folder = 'x'",
            ),
            *("enable_async_tensor_parallel = false", "[compile]\nenable = false"),
        ),
    ),
    "_from_ds_config": Reader(
        file="ds.json",
        text='{{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,\n{}\n"seed": 1}}',
        read=(
            ('"zero_optimization": {"stage": 3},', "zero_stage", 3),
            ('"zero_optimization": {"stage": 3, "mics_shard_size": 2},', "shard_ranks", 2),
            ("// a comment, and a comma at the end\n", "num_micro_batches", 2),
            ('"gradient_accumulation_steps": "auto",', "num_micro_batches", 2),
            ('"tensor_parallel": {"autotp_size": 2}, # tp', "num_micro_batches", 4),
        ),
        refused=(
            ('"fp16": {"enabled": true},', "precision is fp16; the experiment has bf16"),
            (
                '"fp16": {"enabled": true}, "bf16": {"enabled": true},',
                "fp16.enabled and bf16.enabled are both true: keep one",
            ),
            ('"optimizer": {"type": "SGD"},', "add --set optimizer=sgd"),
            ('"gradient_accumulation_steps": 3,', "is not train_micro_batch_size_per_gpu"),
        ),
        named=(
            (
                '"zero_optimization": {"offload_optimizer": {"device": "cpu"}},',
                "zero_optimization.offload_optimizer",
            ),
            (
                '"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8},',
                "zero_optimization.zero_hpz_partition_size",
            ),
            (
                '"zero_optimization": {"zero_quantized_weights": true},',
                "zero_optimization.zero_quantized_weights",
            ),
            ('"zero_optimization": {"zenflow": {"topk_ratio": 0.1}},', "zero_optimization.zenflow"),
            ('"sparse_attention": {"mode": "fixed"},', "sparse_attention"),
            (
                '"zero_optimization": {"stage": 2, "overlap_comm": false},',
                "zero_optimization.overlap_comm false",
            ),
            (
                '"zero_optimization": {"reduce_scatter": false, "reduce_bucket_size": 1000},',
                "zero_optimization.reduce_scatter false, zero_optimization.reduce_bucket_size 1000",
            ),
            (
                '"zero_optimization": {"stage3_prefetch_bucket_size": 0, "sub_group_size": 1000},',
                "zero_optimization.stage3_prefetch_bucket_size 0, zero_optimization.sub_group_size",
            ),
            (
                '"zero_optimization": {"stage3_max_live_parameters": 0},',
                "zero_optimization.stage3_max_live_parameters 0",
            ),
            (
                '"zero_optimization": {"stage3_param_persistence_threshold": 1e9},',
                "zero_optimization.stage3_param_persistence_threshold 1e+09",
            ),
            ('"data_types": {"grad_accum_dtype": "fp32"},', "data_types.grad_accum_dtype fp32"),
            (
                '"zero_optimization": {"stage": 3}, "data_types": {"grad_accum_dtype": "bf16"},',
                "data_types.grad_accum_dtype bf16",
            ),
            (
                '"bf16": {"enabled": true, "bf16_optimizer_states": true},',
                "bf16.bf16_optimizer_states",
            ),
            (
                '"bf16": {"enabled": true, "bf16_master_weights_and_grads": true},',
                "bf16.bf16_master_weights_and_grads",
            ),
            ('"optimizer": {"type": "OneBitAdam"},', "optimizer.type OneBitAdam"),
            (
                '"activation_checkpointing": {"cpu_checkpointing": true},',
                "activation_checkpointing.cpu_checkpointing",
            ),
            ('"curriculum_learning": {"enabled": true},', "curriculum_learning"),
            ('"a_key_of_next_year": 1,', "a_key_of_next_year"),
        ),
        silent=(
            *(
                '"gradient_clipping": 1.0,',
                '"wall_clock_breakdown": true,',
                '"steps_per_print": 9,',
            ),
            '"zero_optimization": {"offload_optimizer": {"device": "none"}},',
            '"zero_optimization": {"stage": 3, "mics_shard_size": -1},',
            '"zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8},',
            '"zero_optimization": {"sub_group_size": "auto", "zero_hpz_partition_size": 1},',
            '"curriculum_learning": {"enabled": false, "min_difficulty": 8},',
            '"optimizer": {"type": "AdamW", "params": {"lr": "auto"}},',
        ),
    ),
    "_from_yaml": Reader(
        file="acc.yaml",
        text="distributed_type: FSDP\n# per_device_train_batch_size: 2\n{}\n",
        read=(
            ("fsdp_config: {fsdp_reshard_after_forward: false}", "reshard_after_forward", False),
            ("fsdp_config: {fsdp_activation_checkpointing: true}", "recompute", "full"),
            ("parallelism_config: {parallelism_config_tp_size: 2}", "tp", 2),
            ("parallelism_config: {parallelism_config_dp_replicate_size: 2}", "shard_ranks", 2),
        ),
        refused=(
            ("num_processes: 8", "num_processes 8; the experiment has 4 devices"),
            ("mixed_precision: fp16", "precision is fp16"),
            (
                "deepspeed_config: {deepspeed_config_file: ds.json}",
                "acc.yaml:3: deepspeed_config_file: 'ds.json' has the strategy: score that file",
            ),
        ),
        named=(
            ("fsdp_config: {fsdp_offload_params: true}", "fsdp_config.fsdp_offload_params"),
            ("dynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_config.dynamo_backend"),
            ("a_key_of_next_year: 1", "a_key_of_next_year"),
        ),
        silent=("machine_rank: 0", "same_network: true", "debug: false"),
    ),
    "_from_yaml of nanotron": Reader(
        file="nn.yaml",
        text="parallelism: {{dp: 4, pp: 1, tp: 1}}\ntokens: {{micro_batch_size: 1, "
        "batch_accumulation_per_replica: 2}}\n{}\n",
        read=(("optimizer: {zero_stage: 1}", "zero_stage", 1),),
        refused=(
            ("optimizer: {optimizer_factory: {name: sgd}}", "add --set optimizer=sgd"),
            ("optimizer: {accumulate_grad_in_fp32: false}", "gradients in bf16; the experiment"),
            ("model: {model_config: {hidden_size: 8}}", "nn.yaml:3: hidden_size 8: the exp"),
        ),
        named=(
            (
                "model: {model_config: {_attn_implementation: eager}}",
                "model.model_config._attn_implementation eager",
            ),
            ("optimizer: {of_next_year: 1}", "optimizer.of_next_year"),
        ),
        silent=(
            "model: {model_config: {_attn_implementation: flash_attention_2, rope_theta: 1}}",
            "optimizer: {accumulate_grad_in_fp32: true, optimizer_factory: {name: adamW}}",
        ),
    ),
}
"""By the function that reads; a new reader needs a row."""


def test_every_reader_has_a_row() -> None:
    readers = {name for name in vars(reading) if name.startswith("_from_")}
    assert readers == {name.split()[0] for name in READERS}


def rows(kind: str) -> list[object]:
    """Return the entries of a kind, each with its reader."""
    return [
        pytest.param(reader, entry, id=f"{reader.file} {entry}"[:70])
        for reader in READERS.values()
        for entry in getattr(reader, kind)
    ]


def notes(reader: Reader, keys: str) -> tuple[dict[str, object], str]:
    """Return what a file with more keys says, and what is not read of it."""
    record = read_program(reader.text.format(keys), file=reader.file, experiment=experiment())
    assert record is not None
    return record, "; ".join(map(str, record.get("not_read", ())))


@pytest.mark.parametrize(("reader", "entry"), rows("read"))
def test_a_key_that_is_known_is_read(reader: Reader, entry: tuple[str, str, object]) -> None:
    keys, name, value = entry
    assert notes(reader, keys)[0].get(name) == value


@pytest.mark.parametrize(("reader", "entry"), rows("refused"))
def test_a_key_of_another_job_is_refused(reader: Reader, entry: tuple[str, str]) -> None:
    with pytest.raises(InputError) as error:
        notes(reader, entry[0])
    assert str(error.value).startswith(reader.file)
    assert entry[1] in str(error.value)


@pytest.mark.parametrize(("reader", "entry"), rows("named"))
def test_a_key_that_is_not_modelled_is_named(reader: Reader, entry: tuple[str, str]) -> None:
    text = notes(reader, entry[0])[1]
    assert text.startswith("not read: ")
    assert entry[1] in text


@pytest.mark.parametrize(("reader", "entry"), rows("silent"))
def test_a_key_that_no_plan_depends_on_is_silent(reader: Reader, entry: str) -> None:
    assert notes(reader, entry)[1] == ""

"""Bytes per parameter that DeepSpeed's engines keep, counted, beside those that are predicted."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

import gpu_measurements  # noqa: E402
from amp_ray.cost.model import CostModel  # noqa: E402
from amp_ray.training.loop import timed_step  # noqa: E402
from gpu_measurements import Bench, Setting, job_of, strategy_of, train  # noqa: E402
from support.cpu_machine import CpuMachine  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is deprecated. Please use:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

NUM_BLOCKS = 4
BLOCKS = {
    "family": "llama",
    # ZeRO-3 does not divide weights below 100,000 elements
    "hidden_size": 320,
    "num_heads": 2,
    "feed_forward_size": 320,
    "sequence_length": 8,
    "vocab_size": 8,
}


def live_bytes() -> dict[int, int]:
    """Return the bytes of all tensors and gradients by address."""
    tensors = gpu_measurements._tensors()  # noqa: SLF001 - as it frees them
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in (*tensors, *gradients)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("zero_stage", "dp"), [(0, 1), (1, 1), (0, 4), (1, 4), (2, 4), (3, 4)])
def test_states_between_micro_batches_are_those_that_a_rank_keeps(
    precision: str, zero_stage: int, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(
        model="blocks",
        figures=BLOCKS,
        num_layers=NUM_BLOCKS,
        runtime="deepspeed",
        precision=precision,
        zero_stage=zero_stage,
        dp=dp,
    )
    bench = Bench(machine=CpuMachine(), board="cpu")
    experiment = bench.experiment(setting)
    strategy = strategy_of(experiment, setting)
    before, counted = live_bytes(), list[int]()

    def count(*_: object) -> None:
        counted.append(sum(size for at, size in live_bytes().items() if at not in before))

    def step(job: Any, engine: Any, *others: Any) -> None:  # noqa: ANN401
        module = engine.engine.module
        first = module if zero_stage > 1 else module.forward_funcs[0]
        hook = first.register_forward_pre_hook(count, prepend=True)  # before weights are gathered
        timed_step(job, engine, *others)
        hook.remove()

    monkeypatch.setattr(gpu_measurements, "timed_step", step)
    monkeypatch.setattr(gpu_measurements, "STEPS", 1)
    train(bench, job_of(experiment, strategy))
    parts = CostModel(experiment=experiment).memory_parts(strategy)[0]
    number = experiment.model.num_parameters
    states = (parts["weights"] + parts["gradients"] + parts["optimizer"]) / number
    # A bucket has all gradients in a pipeline with ZeRO-1, with ZeRO-3 those of a layer.
    width = 4 if precision == "fp32" else 2
    bucket = {1: width, 3: width / NUM_BLOCKS}.get(zero_stage, 0.0)
    # Only a backward pass has the shards that ZeRO-2 adds to a sum of the same width.
    shards = 4 / dp if (precision, zero_stage) == ("fp32", 2) else 0.0
    # The first micro-batch has no gradients before it.
    assert counted[-1] / number == pytest.approx(states + bucket - shards, rel=0.01)

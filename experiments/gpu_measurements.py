"""Measurements of layers, attention and training steps on one device, with their predictions.

Layers are timed as by ``amp-ray profile``, with all-reduces switched off: the device does the work
of one tensor-parallel rank. Training steps are those of this project's runtimes. Their other ranks
are torch's fake process group: this rank has its shards and its buffers, and nothing is sent.
"""

import gc
import importlib
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import median
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from amp_ray.clusters.device import CATALOGUE
from amp_ray.cost.layers import LayerAnchors, LayerWork
from amp_ray.cost.model import CostModel
from amp_ray.cost.roofline import Phases, Rank
from amp_ray.inputs.experiment import Experiment
from amp_ray.models.model import Layer
from amp_ray.runtime.files import load_experiment, load_strategies
from amp_ray.strategies.strategy import Strategy
from amp_ray.training.clock import HostClock, Spans
from amp_ray.training.connect import use_cuda
from amp_ray.training.events import cause_of
from amp_ray.training.executor.engine import TorchEngine
from amp_ray.training.executor.parameters import FlatParameters
from amp_ray.training.job import Job, UnfitError, read_job
from amp_ray.training.loop import ENGINES, Record, timed_step
from amp_ray.training.profiling.passes import (
    Subject,
    SwitchedParallel,
    make_subject,
    repeats_for,
    time_launch,
    time_passes,
    warm_up,
)
from amp_ray.training.program import ZERO_MODULE
from amp_ray.training.shapes import head_width
from amp_ray.training.workload import DTYPES
from amp_ray.trials.command import job_record
from amp_ray.trials.profile.points import LayerPoint

Figures = Mapping[str, Any]

WARMUP_STEPS: Final = 1
STEPS: Final = 5
NUM_MICRO_BATCHES: Final = 2  # so that gradients are added up, as in training

LAYERS: Final = ("embedding", "block", "norm", "head", "loss")
"""The layers of a language model of one block, and its loss, by position."""


class Machine(Protocol):
    """The device that is measured, with its clock and its count of memory."""

    @property
    def device(self) -> Any:  # noqa: ANN401 - torch's
        """The device as torch names it."""

    def clock(self) -> HostClock:
        """Return a clock of the device."""

    def begin_peak(self) -> None:
        """Give memory back that no tensor uses, and begin to record the peak."""

    def peak(self) -> dict[str, int]:
        """Return bytes ``reserved`` and ``allocated`` at the peak, and now ``outside`` tensors."""

    def facts(self) -> dict[str, str | None]:
        """Return its name, and what its speed depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A training step of a model with few blocks."""

    model: str  # its name
    figures: Figures  # keys of ``model`` in an experiment file
    num_layers: int
    micro_batch_size: int = 1
    recompute: str = "none"
    zero_stage: int = 0
    dp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    runtime: str = "torch"  # of `ENGINES`
    precision: str = ""  # empty for bf16, or fp16 on a board without it

    def __str__(self) -> str:
        """Return what differs from plain training."""
        words = [f"{self.model}, {self.num_layers} blocks, {self.micro_batch_size} samples"]
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += [f"ZeRO-{self.zero_stage} over {self.dp}"] * (self.dp > 1)
        words += [f"tp {self.tp}"] * (self.tp > 1) + ["sp"] * self.sequence_parallel
        words += [self.runtime] * (self.runtime != "torch")
        return ", ".join([*words, *([self.precision] if self.precision else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer of a model; its rank does the work of one of several tensor-parallel ranks."""

    model: str  # its name
    figures: Figures  # keys of ``model`` in an experiment file
    tokens: int = 0  # length of a sequence; 0 for that in ``figures``
    micro_batch_size: int = 1
    layer: Literal["embedding", "block", "head", "loss"] = "block"

    def __str__(self) -> str:
        """Return model, layer, and the samples and tokens of a micro-batch."""
        tokens = self.tokens or self.figures["sequence_length"]
        return f"{self.model} {self.layer}, {self.micro_batch_size} x {tokens}"

    @property
    def setting(self) -> Setting:
        """Training of the model with this sequence length, and with one block."""
        tokens = self.tokens or self.figures["sequence_length"]
        figures = {**self.figures, "sequence_length": tokens}
        return Setting(model=self.model, figures=figures, num_layers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A machine, and the data sheet from which its times are predicted."""

    machine: Machine
    board: str | Figures  # of the catalogue, or as the key ``device`` of an experiment file

    @property
    def cuda(self) -> bool:
        """Whether the machine is a GPU."""
        return bool(self.machine.device.type == "cuda")

    def computes_in(self, precision: str) -> bool:
        """Return whether the board's data sheet has a rate of a precision."""
        if isinstance(self.board, str):
            return getattr(CATALOGUE[self.board], f"{precision}_flops") is not None
        return f"{precision}_tflops" in self.board

    def experiment(self, setting: Setting) -> Experiment:
        """Return the experiment of a setting; all its ranks are on one node."""
        # No time of a link is compared, so that any rate will do.
        rates = {"intra_gbit_per_s": 100, "inter_gbit_per_s": 100}
        node = {"device": self.board, "slots": setting.dp * setting.tp, **rates}
        half = "bf16" if self.computes_in("bf16") else "fp16"
        return load_experiment(
            {
                "name": "one-gpu",
                "model": {**setting.figures, "num_layers": setting.num_layers},
                "cluster": {"nodes": [node]},
                "precision": setting.precision or half,
                "optimizer": "adam",
                "runtime": setting.runtime,
                "zero_stage": setting.zero_stage,
                "global_batch_size": NUM_MICRO_BATCHES * setting.micro_batch_size * setting.dp,
            }
        )


def strategy_of(experiment: Experiment, setting: Setting) -> Strategy:
    """Return the strategy of a setting, which has one stage."""
    record = {
        "tp": setting.tp,
        "pp": 1,
        "dp": setting.dp,
        "micro_batch_size": setting.micro_batch_size,
        "num_micro_batches": NUM_MICRO_BATCHES,
        "bounds": [0, experiment.model.num_layers],
        "recompute": setting.recompute,
        "zero_stage": setting.zero_stage,
        "sequence_parallel": setting.sequence_parallel,
    }
    strategy = load_strategies([record], experiment)[0].strategy
    assert strategy is not None
    return strategy


def job_of(experiment: Experiment, strategy: Strategy) -> Job:
    """Return the job that a trial of the strategy would get; all its steps count as measured."""
    places = [("node0", slot) for slot in range(experiment.cluster.num_devices)]
    return replace(read_job(job_record(experiment, strategy, "one-gpu", places)), warmup_steps=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity, measured and predicted, in seconds; in bytes if the part is ``memory``."""

    part: str
    what: str
    measured: float | None  # None if memory ran out, or the measurement failed
    predicted: float | None  # None if the board's data sheet does not have the precision
    outcome: str = "measured"  # else why there is no measurement
    detail: Figures = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None without a measurement."""
        if not self.measured or self.predicted is None:
            return None
        return self.predicted / self.measured - 1


# ----------------------------------------------------------------------------------- layers


def measure_layer(bench: Bench, shape: Shape, tp: int) -> Iterator[Row]:
    """Measure both passes of a layer's shard, and their launch."""
    experiment = bench.experiment(shape.setting)
    job = job_of(experiment, strategy_of(experiment, shape.setting))
    point = _point(shape, tp)
    spans = Spans(clock=bench.machine.clock())
    parallel = SwitchedParallel(size=tp, spans=spans, silent=True)
    times, outcome = _attempt(
        lambda: _passes(
            bench, lambda: make_subject(job, point, parallel, bench.machine.device), spans
        )
    )
    is_loss = shape.layer == "loss"
    layer = experiment.model.layers[LAYERS.index("head" if is_loss else shape.layer)]
    work = _work(experiment, replace(layer, operators=layer.added if is_loss else layer.measurable))
    name = f"{shape}, tp {tp}"
    yield from _pass_rows("layer", name, work.compute(_rank(experiment, point)), times, outcome)
    if not is_loss:  # whose launches the cost model does not count
        launch_s = None if times is None else times["forward_launch_s"] + times["backward_launch_s"]
        predicted_s = work.host_s * (1 + experiment.constants.host_backward_ratio)
        yield Row(
            part="launch", what=name, measured=launch_s, predicted=predicted_s, outcome=outcome
        )


def measure_attention(bench: Bench, shape: Shape, tp: int) -> Iterator[Row]:
    """Measure both passes of the attention core of a block's shard."""
    experiment = bench.experiment(shape.setting)
    block, point = experiment.model.layers[LAYERS.index("block")], _point(shape, tp)
    spans = Spans(clock=bench.machine.clock())
    times, outcome = _attempt(
        lambda: _passes(bench, lambda: attention_core(experiment, point), spans)
    )
    work = _work(experiment, replace(block, operators=block.core))
    phases = work.compute(_rank(experiment, point))
    yield from _pass_rows("attention", f"{shape}, tp {tp}", phases, times, outcome)


def attention_core(experiment: Experiment, point: LayerPoint) -> Subject:
    """Return the attention core of a rank, called as in a block, on torch's default device."""
    shape, dtype = experiment.model.shape, DTYPES[experiment.precision]
    query, gradient, key, value = (
        torch.randn(
            (point.micro_batch_size, heads // point.tp, shape.sequence_length, head_width(shape)),
            dtype=dtype,
        )
        for heads in (*[shape.num_heads] * 2, *[shape.num_key_value_heads] * 2)
    )
    module = nn.ParameterList([key, value])

    def attend(queries: Tensor) -> Tensor:
        grouped = shape.num_heads > shape.num_key_value_heads
        keys, values = module
        output: Tensor = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=grouped
        )
        return output

    return Subject(run=attend, source=query.requires_grad_(), module=module, gradient=gradient)


def _point(shape: Shape, tp: int) -> LayerPoint:
    position = LAYERS.index(shape.layer)
    return LayerPoint(micro_batch_size=shape.micro_batch_size, tp=tp, layer=position)


def _rank(experiment: Experiment, point: LayerPoint) -> Rank:
    return Rank(
        device=experiment.cluster.device_types[0],
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        precision=experiment.precision,
    )


def _work(experiment: Experiment, layer: Layer) -> LayerWork:
    """Return the cost model of a layer whose gradients are not added up, as in `time_passes`."""
    traits = replace(
        experiment.traits, accumulates_bf16_in_fp32=False, accumulates_fp16_in_fp32=False
    )
    constants = experiment.constants
    return LayerWork(layer=layer, anchors=LayerAnchors(), traits=traits, constants=constants)


def _passes(bench: Bench, make: Callable[[], Subject], spans: Spans) -> dict[str, Any]:
    """Time a layer as ``amp-ray profile`` does: seconds, the number of repeats, and its kernels."""
    with bench.machine.device:  # weights are made there
        subject = make()
    repeats = repeats_for(warm_up(subject, cuda=bench.cuda))
    launch = time_launch(subject, cuda=bench.cuda)
    times = time_passes(subject, spans, repeats, cuda=bench.cuda)
    kernels = {"kernels_us": longest_kernels(subject)} if bench.cuda else {}
    return {**launch, **times, "repeats": repeats, **kernels}


LEAST_SHARE: Final = 0.02
"""Share of a pass of the kernels that are listed."""


def longest_kernels(subject: Subject) -> dict[str, dict[str, float]]:
    """Return the microseconds of a pass by kernel, of both passes, as torch's profiler has them."""
    subject.forget_gradients()
    torch.cuda.synchronize()
    with _profiled() as forward:
        output = subject.forward()
        torch.cuda.synchronize()
    with _profiled() as backward:
        subject.backward(output)
        torch.cuda.synchronize()
    return {"forward": _longest(forward), "backward": _longest(backward)}


def _profiled() -> Any:  # noqa: ANN401 - torch's
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def _longest(profile: Any) -> dict[str, float]:  # noqa: ANN401 - torch's
    times = {event.key: event.self_device_time_total for event in profile.key_averages()}
    kernels = sorted(times.items(), key=itemgetter(1), reverse=True)
    least = LEAST_SHARE * sum(times.values())
    return {key[:NAME_LENGTH]: round(us, 1) for key, us in kernels if us > least}


NAME_LENGTH: Final = 100
"""Characters of a kernel's name that are kept; template arguments follow."""


def _pass_rows(
    part: str, name: str, predicted: Phases, times: Figures | None, outcome: str
) -> Iterator[Row]:
    for direction in ("forward", "backward"):
        yield Row(
            part=part,
            what=f"{name}, {direction}",
            measured=None if times is None else times[f"{direction}_s"],
            predicted=getattr(predicted, f"{direction}_s"),
            outcome=outcome,
            detail=times or {},
        )


# ------------------------------------------------------------------------------------ steps


def measure_step(bench: Bench, setting: Setting) -> Iterator[Row]:
    """Measure training steps: peak memory and, of one rank alone, the step and its optimizer."""
    what = str(setting)
    if setting.precision and not bench.computes_in(setting.precision):
        outcome = f"no {setting.precision} in the board's data sheet"
        yield Row(part="memory", what=what, measured=None, predicted=None, outcome=outcome)
        return
    experiment = bench.experiment(setting)
    strategy = strategy_of(experiment, setting)
    measured, outcome = _attempt(lambda: train(bench, job_of(experiment, strategy)))
    values: Figures = measured or defaultdict(lambda: None)
    model = CostModel(experiment=experiment)
    estimate, parts = model.estimate(strategy), model.memory_parts(strategy)[0]
    peak_bytes, limit_bytes = estimate.peak_memory_bytes[0], estimate.memory_limit_bytes[0]
    detail = {
        "predicted_to_fit": peak_bytes <= limit_bytes,
        "predicted_parts": parts,
        "counted": values["counted"],
        "allocated": values["allocated"],
        "reserved": values["reserved"],
        "outside": values["outside"],
    }
    # What PyTorch's allocator reserves beyond tensors, it gives back before memory runs out.
    rows = [("memory", "allocated", peak_bytes - parts["context"])]
    if setting.dp == setting.tp == 1:
        assert estimate.breakdown is not None
        rows.append(("step", "step_s", estimate.iteration_time_s))
        rows.append(("optimizer", "optimizer_s", estimate.breakdown.optimizer_s))
    for part, key, predicted in rows:
        yield Row(
            part=part,
            what=what,
            measured=values[key],
            predicted=predicted,
            outcome=outcome,
            detail=detail if part == "memory" else {},
        )


def train(bench: Bench, job: Job) -> dict[str, Any]:
    """Train a few steps as the first of the job's ranks; the others do nothing.

    Returns:
        Medians ``step_s`` and ``optimizer_s``, the bytes of `Machine.peak`, and ``counted`` bytes
        of `state_bytes`, which are those of runtime ``torch`` alone.

    Raises:
        UnfitError: If the job's precision does not run on the device.
    """
    use_cuda(job)
    os.environ.setdefault("LOCAL_RANK", "0")
    runtime: Any = importlib.import_module(ENGINES[job.runtime])
    if job.runtime == "deepspeed":
        importlib.import_module(ZERO_MODULE)  # not while weights are made on the device
    before = _tensors()
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=job.grid.num_ranks
    )
    try:
        spans, place = Spans(clock=bench.machine.clock()), job.grid.coordinates(0)
        with ExitStack() as on_device:  # weights are made there
            on_device.enter_context(bench.machine.device)
            engine = runtime.start_engine(job, place, spans, on_device.close, cuda=bench.cuda)
        gc.collect()
        bench.machine.begin_peak()
        records = [Record() for _ in range(WARMUP_STEPS + STEPS)]
        for record in records:
            timed_step(job, engine, record, spans)
        return {
            **bench.machine.peak(),
            "step_s": median(record.step_s[0] for record in records[WARMUP_STEPS:]),
            "optimizer_s": median(record.spans_s["optimizer"] for record in records[WARMUP_STEPS:]),
            "counted": state_bytes(engine) if isinstance(engine, TorchEngine) else None,
        }
    finally:
        _leave(job, before)


def _leave(job: Job, before: Iterable[Tensor]) -> None:
    """End the process group, and free what DeepSpeed leaves behind.

    DeepSpeed has groups that must not outlive the process group. Its engines are never collected,
    as their hooks form cycles through autograd: so their tensors lose their memory.

    Args:
        job: The job that ends.
        before: Tensors that existed before it.
    """
    library: Any = torch.distributed
    if job.runtime == "deepspeed":
        comm: Any = importlib.import_module("deepspeed.comm")
        library = comm if comm.is_initialized() else library
        places = {id(tensor) for tensor in before}
        for tensor in _tensors():
            if id(tensor) not in places:
                gradient = tensor.grad if tensor.is_leaf else None
                for part in (tensor, *([] if gradient is None else [gradient])):
                    if part.untyped_storage().resizable():
                        part.untyped_storage().resize_(0)
    library.destroy_process_group()


def _tensors() -> list[Tensor]:
    return [value for value in gc.get_objects() if issubclass(type(value), Tensor)]


def state_bytes(engine: TorchEngine) -> dict[str, int]:
    """Count the bytes of the tensors that a rank keeps between steps; shared memory counts once.

    Sharded gradients exist only within a step, so they are not counted.
    """
    tensors: dict[str, list[Tensor]] = {"weights": [], "gradients": [], "optimizer": []}
    for part in engine.update.all:
        if isinstance(part, FlatParameters):
            tensors["weights"].append(part.weights)
            tensors["gradients"].append(part.gradients)
            tensors["optimizer"] += part.masters
        else:
            tensors["weights"] += part.masters
    for state in engine.update.optimizer.state.values():
        # A tensor without dimensions counts the steps.
        tensors["optimizer"] += [value for value in state.values() if value.dim()]
    counted, places = dict.fromkeys(tensors, 0), set[int]()
    for name, parts in tensors.items():
        for storage in (tensor.untyped_storage() for tensor in parts):
            if storage.data_ptr() not in places:
                places.add(storage.data_ptr())
                counted[name] += storage.nbytes()
    return counted


def _attempt(work: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """Return what a measurement returns and its outcome; no failure ends the run.

    What programs print meanwhile, as DeepSpeed does, goes to stderr.
    """
    result, outcome = None, "measured"
    try:
        with redirect_stdout(sys.stderr):
            result = work()
    except UnfitError as error:
        outcome = f"does not run: {error}"
    except Exception as error:  # noqa: BLE001 - what fails here may succeed with other sizes
        outcome = "out of memory"
        if cause_of(error) != "out_of_memory":
            traceback.print_exc()
            outcome = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    gc.collect()
    return result, outcome

"""One rank of runtime ``torch``: builds its part of the model and executes its instructions."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from amp_ray.cost.instructions import RECEIVES, Instruction, Schedule, Unit
from amp_ray.training.clock import Spans
from amp_ray.training.data import samples
from amp_ray.training.executor.chunks import Chunks
from amp_ray.training.executor.layout import incoming, outgoing
from amp_ray.training.executor.messages import Incoming, MessageKind
from amp_ray.training.executor.model import StageModel
from amp_ray.training.executor.update import Update
from amp_ray.training.grid import Coordinates, Passage
from amp_ray.training.job import Job
from amp_ray.training.shapes import input_extent

SPAN_NAMES: Final = {
    "F": "forward",
    "B": "backward",
    "SEND_F": "send",
    "SEND_B": "send",
    "RECV_F": "receive",
    "RECV_B": "receive",
    "REDUCE_GRAD": "gradient_sync",
    "STEP": "optimizer",
}
"""Kind of work of each instruction; receiving includes waiting."""

NUM_AHEAD: Final = 2
"""Receives that are begun before their turn: the next activation and the next gradient arrive
while a pass runs."""

Batches = dict[int, tuple[Tensor, Tensor]]
"""Inputs and targets by passage; of the first and the last stage."""


class TorchEngine:
    """Executes the instruction list of its stage.

    Args:
        place: Of this rank.
        model: Its layers.
        update: What makes new weights of gradients.
    """

    def __init__(
        self, job: Job, place: Coordinates, model: StageModel, update: Update, spans: Spans
    ) -> None:
        """Make the instruction list."""
        self.job, self.place, self.spans = job, place, spans
        self.model, self.update = model, update
        self.num_parameters: int = model.num_parameters
        self.grid, self.device = job.grid, model.device
        num_slices = tuple(passage.num_slices for passage in self.grid.passages)
        self.schedule = Schedule(
            pp=self.grid.pp, num_slices=num_slices, virtual_stages=self.grid.virtual_stages
        )
        self.order = self.schedule.instructions(place.pp)
        self.last = {*{item.stage: item for item in self.order if item.kind == "B"}.values()}
        self.receives = [item for item in self.order if item.kind in RECEIVES]
        self.messages = model.messages
        self.chunks = Chunks([chunk.run for chunk in model.chunks], model.window)
        self.arriving: dict[Instruction, Incoming] = {}
        self.values: dict[tuple[str, Unit], Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.batches: Batches = {}
        self.num_begun = 0

    def load(self, step: int) -> Batches:
        """Make the data of a step: inputs on the first stage, targets on the last."""
        if self.place.pp not in {0, self.grid.pp - 1}:
            return {}
        start = step * self.job.global_batch_size
        batches = {}
        for index, passage in enumerate(self.grid.passages):
            first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
            batch = samples(self.job, start + first, start + end)
            inputs, targets = map(self.model.window.own_tokens, batch)
            batches[index] = inputs.to(self.device), targets.to(self.device)
        return batches

    def train(self, batches: Batches) -> float:
        """Train one step and return its loss, the same on all ranks."""
        self.batches = batches
        self.loss.zero_()
        self.num_begun = 0
        self._begin_receives(NUM_AHEAD)
        for instruction in self.order:
            with self.spans.span(SPAN_NAMES[instruction.kind], str(instruction)):
                self._execute(instruction)
        self.messages.finish()
        self.chunks.forget()
        torch.distributed.all_reduce(self.loss)
        return float(self.loss)

    def _execute(self, instruction: Instruction) -> None:
        if instruction.kind == "STEP":
            self.update.step()
        elif instruction.kind == "REDUCE_GRAD":
            self.update.reduce(instruction.stage // self.grid.pp)
        else:
            passage, unit = self._passage(instruction), self._unit(instruction)
            match instruction.kind:
                case "F":
                    self._forward(instruction, unit, passage)
                case "B":
                    gradient = self.values.pop(("RECV_B", unit), None)
                    self.model.begin_backward(unit.chunk, last=instruction in self.last)
                    self._keep("SEND_B", unit, self.chunks.backward(unit, gradient, passage.tokens))
                case "SEND_F" | "SEND_B" as kind:
                    self._send(instruction, self.values.pop((kind, unit)), passage)
                case "RECV_F" | "RECV_B" as kind:
                    value = self.arriving.pop(instruction).wait()
                    self.values[kind, unit] = value.requires_grad_(kind == "RECV_F")
                    self._begin_receives(1)

    def _forward(self, instruction: Instruction, unit: Unit, passage: Passage) -> None:
        """Run a forward pass; at the end of the model, the loss."""
        assert instruction.micro_batch is not None
        source = self.values.pop(("RECV_F", unit), None)
        if source is None:
            source = self._tokens(self.batches[instruction.micro_batch][0], unit, passage)
        loss: Callable[[Tensor], Tensor] | None = None
        if instruction.stage == self.schedule.num_stages - 1:
            targets = self._tokens(self.batches[instruction.micro_batch][1], unit, passage)
            weight = self._weight(unit, passage)
            loss = partial(self._weighted_loss, targets, weight * self.update.scale.value)
        output = self.chunks.forward(unit, source, passage.tokens, loss)
        if loss is None:
            self.values["SEND_F", unit] = output
        elif self.place.tp == 0:
            self.loss += output.double() / self.update.scale.value

    def _weighted_loss(self, targets: Tensor, weight: float, output: Tensor) -> Tensor:
        """Return the loss of a unit as its part of the step's mean."""
        return self.model.loss(output, targets) * weight

    def _weight(self, unit: Unit, passage: Passage) -> float:
        """Return the part of the step's tokens that a unit has."""
        first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
        tokens = passage.tokens
        part = tokens[unit.token_slice] / sum(tokens) if tokens else 1.0
        return (end - first) / self.job.global_batch_size * part / self.grid.cp

    def _tokens(self, value: Tensor, unit: Unit, passage: Passage) -> Tensor:
        """Return a unit's tokens of inputs or targets."""
        if not passage.tokens:
            return value
        first = sum(passage.tokens[: unit.token_slice])
        return value[:, first : first + passage.tokens[unit.token_slice]]

    def _unit(self, instruction: Instruction) -> Unit:
        assert instruction.micro_batch is not None
        chunk = instruction.stage // self.grid.pp
        return Unit(chunk, instruction.micro_batch, instruction.token_slice or 0)

    def _passage(self, instruction: Instruction) -> Passage:
        """Return the micro-batch, or the batch slice, of an instruction."""
        assert instruction.micro_batch is not None
        return self.grid.passages[instruction.micro_batch]

    # --------------------------------------------------------------------------- messages

    def _keep(self, kind: str, unit: Unit, value: Tensor | None) -> None:
        """Keep an output for its message; the first stage's data has no gradient."""
        if value is not None:
            self.values[kind, unit] = value

    def _send(self, instruction: Instruction, value: Tensor, passage: Passage) -> None:
        assert instruction.peer is not None
        pieces = outgoing(self.grid, self.place, instruction.peer % self.grid.pp, passage)
        self.messages.send(value, pieces, _kind_of(instruction))
        self.messages.forget_delivered()

    def _begin_receives(self, number: int) -> None:
        """Begin the next receives in the order of the list."""
        begun = self.num_begun
        for instruction in self.receives[begun : begun + number]:
            assert instruction.peer is not None
            passage, unit = self._passage(instruction), self._unit(instruction)
            pieces = incoming(self.grid, self.place, instruction.peer % self.grid.pp, passage)
            extent = self._extent(instruction, unit, passage)
            buffer = torch.empty(extent, dtype=self.model.dtype, device=self.device)
            self.arriving[instruction] = self.messages.receive(
                buffer, pieces, _kind_of(instruction)
            )
        self.num_begun = begun + number

    def _extent(self, instruction: Instruction, unit: Unit, passage: Passage) -> tuple[int, ...]:
        """Return the sizes of a received tensor: an activation, or a gradient from behind."""
        first, end = self.grid.samples(self.place.pp, passage)[self.place.dp]
        behind = instruction.kind == "RECV_B"
        layer = self.grid.bounds[instruction.stage + behind]
        tokens, *features = input_extent(self.job.model, layer)
        tokens //= self.grid.cp
        if passage.tokens:
            tokens = passage.tokens[unit.token_slice]
        assert instruction.peer is not None
        if self.grid.divides_tokens(self.place.pp, instruction.peer % self.grid.pp):
            tokens //= self.grid.stages[self.place.pp].tp
        return (end - first, tokens, *features)


def _kind_of(instruction: Instruction) -> MessageKind:
    return "activation" if instruction.kind.endswith("F") else "gradient"


def join(job: Job, *, cuda: bool) -> None:
    """Plain torch needs no more than the process group."""


def start_engine(
    job: Job, place: Coordinates, spans: Spans, built: Callable[[], None], *, cuda: bool
) -> TorchEngine:
    """Build this rank's part of the model; ``built`` is called once its weights exist."""
    model = StageModel(job, place, spans, cuda=cuda)
    built()
    return TorchEngine(job, place, model, Update(job, place, model), spans)

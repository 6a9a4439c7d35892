"""Peak memory of a rank, by stage and position in the schedule."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import Protocol, Self

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.kernels.stages import (
    LikeBlocks,
    PartRows,
    earliest_starts,
    most_like_blocks,
    part_starts,
    peak_with,
)
from amp_ray.cost.layers import PASSES
from amp_ray.cost.messages import sample_bytes
from amp_ray.cost.roofline import Rank
from amp_ray.cost.stages import PlacedStages, split_after
from amp_ray.cost.timer import chunks_in_flight, in_flight
from amp_ray.cost.weights import Weights
from amp_ray.memo import memoised
from amp_ray.models.model import Layer, Model
from amp_ray.models.per_operator import per_operator
from amp_ray.runtimes.traits import Optimizer, ParameterBytes, RuntimeTraits
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import RecomputeKind
from amp_ray.strategies.zero import MOST_ZERO_STAGE, SHARDED_GRADIENTS
from amp_ray.units import BYTES_PER_FP8

CHECKPOINT_BUFFERS = 2
"""With full recompute, or where outputs are freed, what is kept includes a stage's input; at
each end of the stage there is one buffer for a received tensor and one for a sent tensor."""

CHECKPOINTS = ("per-operator", "full")
"""Kinds of recompute that keep the input of a block."""

PARTS = ("weights", "gradients", "optimizer", "temporary", "context", "activations")
"""Parts of a peak; activations, with message buffers, are the rest after all other parts."""

GATHERED_COPIES = 2
"""Under sequence parallelism a product reads its whole input; in the backward pass, the whole
gradient of that input also exists until it is scattered."""

NOT_TIED = np.array([-1.0, -1.0, 0.0])
"""Placeholder for the two layers that share a weight, if there are none."""

LIVE_TEMPORARIES = 3
"""Tensors of an operator's largest saved size that live while it runs: one that it reads, one
that it writes, one gradient."""


class SavedBytes(Protocol):
    """Bytes per sample and rank of a layer."""

    def __call__(self, *, tp: int, bytes_per_element: int) -> float:
        """Return the saved bytes for a tensor parallel degree."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerMemory:
    """Bytes that layers need on one rank, in any stage.

    ``again`` names the part of a block that the backward pass recomputes.
    """

    model: Model  # the chain of layers
    rank: Rank  # tp, micro-batch size, precision; the device does not matter
    traits: RuntimeTraits  # traits of the runtime

    def per_of(self, zero_stage: int) -> ParameterBytes:
        """Return the bytes of a parameter; weights of blocks may be in fp8 alone, others are not.

        The mean over the model counts for all of its stages.
        """
        per = self.traits.bytes_with_zero(self.rank.precision, zero_stage)
        if "primary" not in self.traits.formats.kept:
            return per
        less = _block_share(self.model) * (per.weight - BYTES_PER_FP8)
        return replace(per, kept=per.kept - less, weight=per.weight - less)

    @memoised
    def rows(self, weights: Weights, again: RecomputeKind, later: float = 0.0) -> FloatArray:
        """Return the rows of `peak_with`, shape ``(4, num_layers + 1)``.

        Prefix sums of parameters and kept bytes, temporary bytes of each layer, and bytes that
        cross each boundary. ``later`` is as in `temporary_bytes`.
        """
        layers, positions = self.model.distinct_layers
        pairs = [
            (self.kept_bytes(layer, again), self.temporary_bytes(layer, again, later))
            for layer in layers
        ]
        kept, temporary = np.array(pairs)[list(positions)].T
        rows = np.zeros((4, self.model.num_layers + 1))
        rows[0] = weights.prefix
        np.cumsum(kept, out=rows[1, 1:])
        rows[2, :-1] = temporary
        rows[3] = self.rank.micro_batch_size * sample_bytes(
            self.model,
            self.rank.tp,
            self.rank.precision,
            sequence_parallel=self.rank.sequence_parallel,
        )
        rows[3, 1:-1] += self.traits.mask_bytes
        return rows

    def kept_bytes(self, layer: Layer, again: RecomputeKind) -> float:
        """Bytes that one micro-batch in flight keeps.

        Without recompute these are all saved tensors. Selective recompute drops the tensors made
        within the attention core; full recompute keeps only a block's input, recompute by operator
        also some results. Products in narrow formats keep their inputs in these.
        """
        size, width = self.rank.micro_batch_size, self.rank.bytes_per_element
        if _runs_again(layer, again):
            kept = width * layer.output_elements / self._divides_tokens  # as its input
            if again == "per-operator":
                divides = self.rank.sequence_parallel
                results = per_operator(layer)
                kept += results.kept_bytes(self.rank.tp, width, sequence_parallel=divides)
            return size * kept * self._kept_share(layer)
        if layer.kind == "block":
            layer = self._without_recomputed(layer)
        kept = self._each(layer.saved_bytes) + self._gathered_bytes(layer)
        if again == "selective":
            kept -= self._each(layer.core_saved_bytes)
        narrow = self.rank.narrow
        if narrow and layer.kind == "block":
            kept -= (width - narrow.num_bytes) / width * self._each(layer.cast_saved_bytes)
        return size * kept * self._kept_share(layer)

    def _kept_share(self, layer: Layer) -> float:
        """Return the share of blocks whose activations are in the device's memory.

        While those of a block are on their way to the host or back, they are still there.
        """
        blocks = self.model.block_counts[-1]
        if layer.kind != "block" or not self.traits.offloaded_blocks:
            return 1.0
        return max(1.0, blocks - self.traits.offloaded_blocks + 1.0) / blocks

    def temporary_bytes(self, layer: Layer, again: RecomputeKind, later: float = 0.0) -> float:
        """Bytes that live while the layer runs: its working set, or logits and their copies.

        ``later`` are the bytes of gradients that live beside any layer's working set, but not yet
        beside logits, whose loss begins the backward pass.

        Recomputed tensors live for one micro-batch: all saved tensors of a block, or only those of
        its attention core. Under sequence parallelism products run on whole tensors.
        """
        logits = layer.logits * self.traits.logit_bytes / self.rank.tp
        if _runs_again(layer, again):
            working = self._each(layer.saved_bytes)
        else:
            working = LIVE_TEMPORARIES * self._each(layer.largest_saved_bytes)
        if again == "selective":
            working = max(working, self._each(layer.core_saved_bytes))
        if self.rank.sequence_parallel:
            whole = max(map(max, filter(None, map(layer.all_reduce_elements, PASSES))), default=0.0)
            working += GATHERED_COPIES * whole * self.rank.bytes_per_element
        working += layer.buffer_elements * self.rank.bytes_per_element / self.rank.tp
        size = self.rank.micro_batch_size
        return max(size * logits - later, size * working)

    @cached_property
    def unused_gradients_bytes(self) -> tuple[float, float]:
        """Bytes of an unused gradient of each shape of weights: of all blocks, and of the head.

        Experts with weights of one shape share it. A router has none.
        """
        if not (self.traits.unused_gradients and self.traits.fused_accumulation):
            return 0.0, 0.0
        shapes = {
            (layer.kind == "head", gemm.columns, gemm.inner, gemm.shard)
            for layer in self.model.distinct_layers[0]
            for gemm in layer.gemms
            if gemm.has_weight and not gemm.keeps_precision
        }
        num_bytes = [0.0, 0.0]
        for is_head, columns, inner, shard in shapes:
            ranks = 1 if shard == "none" else self.rank.tp
            num_bytes[is_head] += columns * inner / ranks * self.rank.bytes_per_element
        return num_bytes[0], num_bytes[1]

    def _without_recomputed(self, layer: Layer) -> Layer:
        """Return a block that keeps no inputs which the runtime always makes again."""
        _, free = self.traits.recomputed_operators
        if not free:
            return layer
        operators = (
            replace(op, saved_elements=0.0) if op.name in free else op for op in layer.operators
        )
        return replace(layer, operators=tuple(operators))

    def _gathered_bytes(self, layer: Layer) -> float:
        """Return the bytes of inputs that are kept whole although tokens are divided.

        Experts that tp divides get all tokens before they are sorted, which no pass does again.
        """
        if not self.rank.sequence_parallel:
            return 0.0
        elements = sum(
            op.saved_elements
            for op in layer.gemms
            if (op.is_expert and not op.saved_sharded)
            or (op.all_reduce == "backward" and self.traits.keeps_gathered_inputs)
        )
        return elements * self.rank.bytes_per_element * (1 - 1 / self.rank.tp)

    def _each(self, saved_bytes: SavedBytes) -> float:
        """Return the bytes of one rank; where tokens are divided too, all bytes are divided."""
        width, divides = self.rank.bytes_per_element, self._divides_tokens
        return saved_bytes(tp=self.rank.tp // divides, bytes_per_element=width) / divides

    @property
    def _divides_tokens(self) -> int:
        """Return the number of ranks that divide the tokens outside tensor-parallel parts."""
        return self.rank.tp if self.rank.sequence_parallel else 1


def _runs_again(layer: Layer, again: RecomputeKind) -> bool:
    return again in CHECKPOINTS and layer.kind == "block"


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """Peak bytes of the stages of a candidate."""

    # Shape ``(4, num_layers + 1)``. Rows of `LayerMemory` for the candidate's recompute.
    layers: FloatArray
    # The same without recompute, for the blocks after the recomputed ones
    plain: FloatArray
    block_counts: IntArray  # shape ``(num_layers + 1,)``. As `Model.block_counts`.
    weights: Weights  # parameters of a rank
    candidate: Candidate
    rank: Rank  # only its precision and its device's context matter
    optimizer: Optimizer
    traits: RuntimeTraits  # traits of the runtime
    per: ParameterBytes  # bytes of a parameter
    constants: Constants  # context and allocator
    # Unused gradients of all blocks, and of the head, as of `LayerMemory`
    unused_bytes: tuple[float, float] = (0.0, 0.0)
    slice_share: float = 1.0  # as in `in_flight`
    part: str = ""  # the only one of `PARTS` that counts; empty for all of them

    @classmethod
    def of(
        cls,
        candidate: Candidate,
        layers: LayerMemory,
        weights: Weights,
        optimizer: Optimizer,
        constants: Constants,
    ) -> Self:
        """Return the memory of a candidate's stages from that of its layers."""
        per, zero = layers.per_of(candidate.options.zero.stage), candidate.options.zero
        alone = zero.stage >= SHARDED_GRADIENTS and candidate.pp == 1
        later = _largest_pair(weights) / 2 * (per.weight + per.gradient) if alone else 0.0
        return cls(
            layers=layers.rows(weights, candidate.options.recompute.kind, later),
            plain=layers.rows(weights, "none", later),
            block_counts=np.array(layers.model.block_counts),
            weights=weights,
            candidate=candidate,
            rank=layers.rank,
            optimizer=optimizer,
            traits=layers.traits,
            per=per,
            constants=constants,
            unused_bytes=layers.unused_gradients_bytes,
        ).weighed()

    def only(self, part: str) -> Self:
        """Return the memory of a single one of `PARTS`; activations are not supported."""
        if part != "temporary":
            return replace(self, part=part).weighed()
        kept = np.array([1.0, 0.0, 1.0, 0.0])[:, None]  # neither activations nor messages
        return replace(self, part=part, layers=self.layers * kept, plain=self.plain * kept)

    def sliced(self, share: float) -> Self:
        """Return the memory model for micro-batches that are cut into token slices.

        Temporary tensors of a running layer belong to one slice. The gradients of all keys and
        values of a micro-batch are kept beside its activations until its first slice has run
        backward. ``share`` is the size of the largest slice as a share of the micro-batch.
        """
        shape, rank = self.weights.model.shape, self.rank
        heads = shape.num_key_value_heads / shape.num_heads
        key_values = 2 * shape.sequence_length * shape.hidden_size * heads / rank.tp
        block_bytes = rank.micro_batch_size * rank.bytes_per_element * key_values
        added = np.zeros((4, len(self.block_counts)))
        added[1] = block_bytes * self.block_counts
        scale = np.array([1.0, 1.0, share, share])[:, None]
        layers, plain = (rows * scale + added for rows in (self.layers, self.plain))
        return replace(self, layers=layers, plain=plain, slice_share=share)

    def weighed(self) -> Self:
        """Return the memory model with the experts' states scaled to their smaller shard groups.

        Ranks with the same experts form smaller groups than ranks with the same other weights.
        """
        options = self.candidate.options
        if not options.spreads_experts:
            return self
        of_experts, of_others = (
            self._state_parts(options_of) for options_of in (options.of_experts, options)
        )
        if self.part in of_experts:
            ratio = of_experts[self.part] / of_others[self.part] if of_others[self.part] else 1.0
        else:
            ratio = sum(of_experts.values()) / sum(of_others.values())
        layers, plain = self.layers.copy(), self.plain.copy()
        for rows in (layers, plain):
            rows[0] = self.weights.prefix + (ratio - 1.0) * self.weights.expert_prefix
        return replace(self, layers=layers, plain=plain)

    def peak_of(self, stage: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the peak of a stage, given first layer of each chunk and layer after it."""
        if len(chunks) == 1:
            return self.peak(stage, *chunks[0])
        return self.peak_of_chunks(stage, chunks)

    def peak(self, stage: int, start: int, end: int) -> float:
        """Return the peak of a stage with the layers ``[start, end)``."""
        split, columns = end, self.columns
        if self.candidate.options.recompute.layers is not None:
            recompute = self.candidate.options.recompute
            split = int(split_after(self.block_counts, start, end, recompute))
            columns = columns if split == end else self._part_stages
        again, after = self.layers[:, start : split + 1], self.plain[:, split : end + 1]
        kept_each = float(again[1, -1] - again[1, 0] + after[1, -1] - after[1, 0])
        temporary = float(max(again[2, :-1].max(initial=0.0), after[2, :-1].max(initial=0.0)))
        layers = self.layers if split == end else self.plain
        ends = start, end
        return float(peak_with(layers, columns, stage, self.tied, ends, kept_each, temporary))

    def peak_of_chunks(self, stage: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Return the peak of one stage of an interleaved schedule, with these chunks."""
        recompute, columns = self.candidate.options.recompute, self.columns[[stage]]
        starts, ends = np.array(chunks).T
        blocks = self.block_counts[ends] - self.block_counts[starts]
        before = np.cumsum(blocks) - blocks
        splits = split_after(self.block_counts, starts, ends, recompute, before)
        again, plain = self.layers, self.plain
        kept = again[1, splits] - again[1, starts] + plain[1, ends] - plain[1, splits]
        temporary = max(
            max(again[2, start:split].max(initial=0.0), plain[2, split:end].max(initial=0.0))
            for start, split, end in zip(starts, splits, ends, strict=True)
        )
        entering, leaving = self.layers[3, starts], self.layers[3, ends]
        if not self.keeps_ends_once:
            kept = kept + entering + leaving
            columns[:, 2:4] = 1.0, 0.0
        states = chunks_in_flight(
            stage,
            self.candidate.pp,
            self.candidate.num_micro_batches,
            self.candidate.virtual_stages,
        )
        columns[:, 1] = 1.0
        held = self.layers[0, ends] - self.layers[0, starts]
        first, last, shared = self.tied
        has = [((starts <= layer) & (layer < ends)).any() for layer in (first, last)]
        parameters = held.sum() - (shared if all(has) else 0.0)
        whole = np.array([[0.0, parameters], [0, 0], [0, 0], [entering.max(), leaving.max()]])
        most = float((states @ kept).max())
        return float(peak_with(whole, columns, 0, NOT_TIED, (0, 1), most, float(temporary)))

    def earliest_starts(
        self,
        limits_bytes: FloatArray,
        num_again: int | None = None,
        *,
        from_first: bool = True,
    ) -> IntArray:
        """Return per stage and end the smallest start from which a stage fits.

        Args:
            limits_bytes: Shape ``(pp,)``. Memory of the smallest device of each stage.
            num_again: Recomputed blocks of each stage; None for the candidate's number.
            from_first: Whether the first stage starts with the first layer, and nowhere else.

        Returns:
            Shape ``(pp, num_layers + 1)``; the end itself where nothing fits.
        """
        num_again = num_again or self.candidate.options.recompute.layers
        ends = self.tied, limits_bytes
        if num_again is None:
            return earliest_starts(self.layers, self.columns, *ends, from_first=from_first)
        rows = num_again, self._part_rows, self.columns, self._part_stages
        return part_starts(*rows, *ends, from_first=from_first)

    @memoised
    def starts_within(self, limit_bytes: float, num_again: int | None) -> IntArray:
        """Return `earliest_starts` for devices that all have this memory."""
        return self.earliest_starts(np.full(self.candidate.pp, limit_bytes), num_again)

    def most_blocks(
        self, limit_bytes: float, places: tuple[int, ...], num_again: int, *, by_chunk: bool = True
    ) -> IntArray:
        """Return an upper bound on the equal blocks of each stage, whatever its other layers.

        Args:
            limit_bytes: Memory limit of a rank.
            places: Positions of these blocks in the chain.
            num_again: Most recomputed blocks of each stage.
            by_chunk: Whether memory is that of `peak_of_chunks`, or as in `earliest_starts`.

        Returns:
            Shape ``(pp,)``; -1 where nothing fits.
        """
        candidate = self.candidate
        chunks = candidate.virtual_stages if by_chunk else 1
        numbers = len(places), num_again, chunks, candidate.num_micro_batches
        like = self._like_blocks(places)
        return most_like_blocks(self.columns, like, limit_bytes, numbers)

    @memoised
    def _like_blocks(self, positions: tuple[int, ...]) -> LikeBlocks:
        """Return the least memory of each of several equal blocks."""
        places = np.array(positions)
        after, counts = places + 1, self.block_counts
        again, plain = (
            float((rows[1, after] - rows[1, places]).min()) for rows in (self.layers, self.plain)
        )
        are_blocks = bool((counts[after] > counts[places]).all())
        num_others = int(counts[-1]) - len(places) if are_blocks else len(counts)
        recomputed = float(self.layers[2, places].min())
        temporary = min(recomputed, float(self.plain[2, places].min()))
        return LikeBlocks(
            kept_again=again,
            kept=plain,
            parameters=float((self.layers[0, after] - self.layers[0, places]).min()),
            temporary=temporary,
            temporary_again=temporary if num_others else recomputed,
            crossing=float(self.layers[3, 1:-1].min()) if self.candidate.pp > 1 else 0.0,
            num_others=num_others,
            keeps_ends_once=self.keeps_ends_once,
        )

    @cached_property
    def spares_by_block(self) -> bool:
        """Whether recomputing one block less never reduces the memory of a stage.

        That holds if, with one micro-batch in flight, the block keeps at least as many additional
        bytes as it saves in temporary bytes and in the buffer of a stage that recomputes its last
        block.
        """
        blocks = np.flatnonzero(np.diff(self.block_counts))
        kept, temporary = (
            (np.diff(self.plain[1]) - np.diff(self.layers[1]))[blocks],
            (self.plain[2] - self.layers[2])[blocks],
        )
        buffers = float((self.columns[:, 3] - self._part_stages[:, 3]).max()) * self.layers[3].max()
        return bool((kept + np.minimum(temporary, 0.0) >= max(buffers, 0.0)).all())

    @cached_property
    def _part_rows(self) -> PartRows:
        """Memory of layers in a stage that recomputes its first blocks."""
        counts = self.block_counts
        return PartRows(
            layers=self.layers,
            plain=self.plain,
            layers_most=_largest_of(self.layers[2, :-1].tobytes()),
            plain_most=_largest_of(self.plain[2, :-1].tobytes()),
            block_counts=counts,
            first_with=np.searchsorted(counts, np.arange(counts[-1] + 1)),
        )

    @cached_property
    def _part_stages(self) -> FloatArray:
        """Columns of `peak_with` for stages that do not recompute their last block."""
        columns = self.columns.copy()
        if not self.traits.frees_outputs:
            columns[:, 3] = columns[:, 1]
        return columns

    @property
    def keeps_ends_once(self) -> bool:
        """Whether micro-batches in flight keep no boundaries beside what their layers keep.

        Checkpoints include a stage's input. Without recompute its first norm saves the received
        tensor itself, and the runtime may free what it has sent.
        """
        kind = self.candidate.options.recompute.kind
        return self.traits.frees_outputs or kind in CHECKPOINTS

    @cached_property
    def columns(self) -> FloatArray:
        """Columns of `peak_with`, one row per stage."""
        traits, candidate, per = self.traits, self.candidate, self.per
        once = self.keeps_ends_once
        # From ZeRO-2 on a bucket has a layer's gradients, which `_whole_layers_bytes` counts.
        fills = candidate.options.zero.stage < SHARDED_GRADIENTS and (
            candidate.options.dp > 1 or traits.buckets_alone
        )
        bucket = per.bucket if fills else 0.0
        context = self._context_bytes * self.constants.context_scale
        context += self._whole_layers_bytes(per) * traits.allocator_factor
        columns = np.empty((candidate.pp, 9))
        columns[:, 0] = self._state_bytes(per, candidate.options)
        columns[:, 1] = flying = in_flight(
            candidate.pp, candidate.num_micro_batches, candidate.virtual_stages, self.slice_share
        )
        columns[:, 2] = CHECKPOINT_BUFFERS if once else flying + 1
        columns[:, 3] = CHECKPOINT_BUFFERS if once else flying
        columns[:, 4:6] = bucket, traits.bucket_elements
        columns[:, 6] = per.step / self._shards(candidate.options)
        columns[:, 7] = context
        if candidate.options.zero.stage < SHARDED_GRADIENTS:
            of_blocks, of_head = self.unused_bytes
            columns[:, 7] += of_blocks
            columns[-1, 7] += of_head
        columns[:, 8] = traits.allocator_factor * self.constants.allocator_scale
        return self._of_part(columns) if self.part else columns

    def _of_part(self, columns: FloatArray) -> FloatArray:
        """Return columns of `peak_with` that count a single part."""
        states = self._state_parts(self.candidate.options)
        context = np.full(len(columns), self._context_bytes * self.constants.context_scale)
        constant = {"context": context, "temporary": columns[:, 7] - context}
        alone, nothing = columns.copy(), np.zeros(len(columns))
        alone[:, 0] = states.get(self.part, 0.0)
        alone[:, 7] = constant.get(self.part, nothing)
        if self.part != "temporary":
            alone[:, 8] = 0.0
        alone[:, 6] = 0.0  # copies in the optimizer step live beside no temporary tensors
        return alone

    def _state_parts(self, options: StageOptions) -> dict[str, float]:
        """Return the bytes of a parameter's weights, gradients and optimizer states.

        The options are those of the ranks that hold the same parameters.
        """
        per, zero = self.per, options.zero
        shards, width = self._shards(options), min(per.weight, per.kept)
        optimizer = (per.master + self.optimizer.moment_bytes) / shards
        frees = zero.stage == SHARDED_GRADIENTS and self.traits.gathers_every_pass
        weights = width / shards if zero.stage == MOST_ZERO_STAGE or frees else width
        if self._rounds_shards(options):
            weights, optimizer = per.master / shards, self.optimizer.moment_bytes / shards
        if zero.stage == MOST_ZERO_STAGE and self.candidate.pp > 1:
            weights += width
        gradients = self._kept_bytes(per, options) - weights - optimizer
        weights += self._copy_bytes(options)
        return {"weights": weights, "gradients": gradients, "optimizer": optimizer}

    def _state_bytes(self, per: ParameterBytes, options: StageOptions) -> float:
        """Return a rank's bytes of a parameter between micro-batches, narrow copies included."""
        return self._copy_bytes(options) + self._kept_bytes(per, options)

    def _copy_bytes(self, options: StageOptions) -> float:
        """Return a rank's bytes of a parameter's narrow copies, beside the weight itself.

        Beside weights in fp8 these are transposed copies, which are made anew of gathered weights
        (Megatron-core, ``keep_fp8_transpose_cache``).
        """
        narrow = self.rank.narrow
        if narrow is None:
            return 0.0
        zero, copies = options.zero, narrow.copy_bytes
        if zero.stage == MOST_ZERO_STAGE and self.candidate.pp == 1 and not zero.keeps_weights:
            return 0.0  # only a gathered layer has copies
        if copies is None:
            copies = self.traits.fp8_bytes_per_parameter
        if "primary" in self.traits.formats.kept:
            copies = copies - BYTES_PER_FP8 if zero.stage < MOST_ZERO_STAGE else 0.0
        return copies * _block_share(self.weights.model)

    def _kept_bytes(self, per: ParameterBytes, options: StageOptions) -> float:
        """Return a rank's bytes of a parameter between micro-batches.

        In a pipeline a stage gathers its weights once, and reduces gradients when all micro-batches
        have added to them.

        The options are those of the ranks that hold the same parameters.
        """
        zero = options.zero
        shards = self._shards(options)
        weights, kept = min(per.weight, per.kept), per.kept
        if zero.stage >= SHARDED_GRADIENTS:
            kept = weights + self._sharded_gradient_bytes(per, zero.stage)
        whole = (kept, kept, weights, 0.0)[zero.stage]
        if zero.stage == SHARDED_GRADIENTS and self.traits.gathers_every_pass:
            whole = 0.0
        shared = kept - whole + per.master + self.optimizer.moment_bytes
        if self._rounds_shards(options):
            shared -= weights
        if zero.stage == MOST_ZERO_STAGE and self.candidate.pp > 1:
            whole = per.weight + per.gradient
        elif self._defers_gradients(options):
            whole += per.gradient
        return whole + shared / shards

    def _defers_gradients(self, options: StageOptions) -> bool:
        """Return whether the sum of whole gradients is kept until the last micro-batch."""
        return (
            self.traits.defers_gradient_sync
            and self.candidate.pp == 1
            and self.candidate.num_micro_batches > 1
            and options.zero.stage >= SHARDED_GRADIENTS
            and self._shards(options) > 1
        )

    def _shards(self, options: StageOptions) -> int:
        if options.zero.stage == 0 and self.traits.shards_without_zero(self.rank.precision):
            return options.dp
        return options.zero.shards(options.dp)

    def _sharded_gradient_bytes(self, per: ParameterBytes, stage: int) -> float:
        """Return the bytes of a parameter's sharded gradients, before they are divided.

        From ZeRO-2 on the gradients of a micro-batch are reduced layer by layer, so that only their
        sum is kept. DeepSpeed's ZeRO-2 adds to a sum of the same width only after a backward pass,
        so that it also keeps the shards to add.
        """
        gradients = per.kept - min(per.weight, per.kept)
        if gradients > per.total:  # the micro-batch's, which are narrower than the sum
            return per.total
        adds_at_once = self.traits.frees_gradients or self.traits.fused_accumulation
        holds = stage == SHARDED_GRADIENTS and not adds_at_once
        return gradients * (2 if holds and self.candidate.num_micro_batches > 1 else 1)

    def _rounds_shards(self, options: StageOptions) -> bool:
        """Return whether a rank keeps its weights only as single-precision shards."""
        stage, traits = options.zero.stage, self.traits
        whole = stage < SHARDED_GRADIENTS or (
            stage == SHARDED_GRADIENTS and not traits.gathers_every_pass
        )
        # A program that can also run without shards does so if there is one rank
        divides = options.zero.shards(options.dp) > 1 or traits.min_zero_stage == MOST_ZERO_STAGE
        return traits.rounds_gathered and divides and not whole and self.per.master > 0

    def _whole_layers_bytes(self, per: ParameterBytes) -> float:
        """Return the bytes of unsharded weights and gradients that live while layers run.

        Two layers are gathered at a time, the running one and the next one, or as many as the
        runtime gathers ahead; or all layers, if weights stay until the backward pass. The gradients
        of one layer are computed while those of another, or of as many as may wait, are reduced.
        The running layer has copies in fp8.
        """
        zero = self.candidate.options.zero
        if zero.stage < SHARDED_GRADIENTS:
            return 0.0
        held = np.diff(self.weights.prefix)
        largest = _largest_pair(self.weights)
        copies = self.traits.fp8_bytes_per_parameter if self.rank.precision == "fp8" else 0.0
        gradients = largest / 2 * (per.weight + per.gradient + copies)
        if self.candidate.pp > 1:
            return gradients
        waiting = min(self.traits.waiting_elements, float(held.sum()))
        gradients += max(0.0, waiting - largest / 2) * per.gradient
        largest = max(largest, largest / 2 + waiting / 2)
        frees = self.traits.gathers_every_pass and zero.stage == SHARDED_GRADIENTS
        if zero.keeps_weights or frees:
            return gradients + float(held.sum()) * per.weight
        return gradients + (largest * per.weight if zero.stage == MOST_ZERO_STAGE else 0.0)

    @property
    def _context_bytes(self) -> float:
        """Memory of a process before it allocates tensors.

        Any device gives this value: DeepSpeed runs on one kind of accelerator, so CPUs and GPUs
        never mix.
        """
        of_device = self.rank.device.context_bytes
        return self.traits.context_bytes if of_device is None else of_device

    @cached_property
    def tied(self) -> FloatArray:
        """Positions of the two layers that share a weight, and its parameters on this rank."""
        tied = self.weights.tied
        columns = (-1, -1, 0) if tied is None else (tied.first, tied.last, tied.parameters)
        return np.array(columns, dtype=np.float64)


def _largest_pair(weights: Weights) -> float:
    """Return the most parameters of two neighbouring layers, which live at a time."""
    held = np.diff(weights.prefix)
    return float((held[1:] + held[:-1]).max()) if len(held) > 1 else float(held[0])


def _block_share(model: Model) -> float:
    return model.block_parameters / model.num_parameters


@lru_cache(maxsize=256)
def _largest_of(values: bytes) -> FloatArray:
    """Return `_largest_within` of values that many candidates share."""
    return _largest_within(np.frombuffer(values))


def _largest_within(values: FloatArray) -> FloatArray:
    """Return the largest value between each two boundaries; 0 if no value lies between them."""
    size = len(values)
    largest = np.zeros((size + 1, size + 1))
    for first in range(size):
        np.maximum.accumulate(values[first:], out=largest[first, first + 1 :])
    return largest


RankMemory = tuple[tuple[MemoryModel, Device], ...]
"""Memory of the different ranks of a stage, each with the smallest device of such ranks."""

Groups = frozenset[tuple[int, frozenset[int]]]
"""Samples and device types of different tensor-parallel groups."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageMemory:
    """Peak bytes of stages in a row."""

    needs: tuple[RankMemory, ...]  # memory of the ranks of each stage

    @property
    def models(self) -> Iterable[MemoryModel]:
        """Distinct memory models of ranks."""
        return dict.fromkeys(memory for memory, _ in chain.from_iterable(self.needs))

    def sliced(self, share: float) -> Self:
        """Return the memory of stages whose micro-batches are cut; see `MemoryModel.sliced`."""
        cut = {memory: memory.sliced(share) for memory in self.models}
        needs = (tuple((cut[memory], device) for memory, device in needs) for needs in self.needs)
        return replace(self, needs=tuple(needs))

    def peaks(self, bounds: tuple[int, ...]) -> list[tuple[float, Device]]:
        """Return, per stage, peak and device of the rank that comes closest to its limit.

        ``bounds`` are those of all chunks.
        """
        fullest = (self._fullest(stage, bounds) for stage in range(len(self.needs)))
        return [(peak_bytes, device) for peak_bytes, _, device in fullest]

    def parts(self, bounds: tuple[int, ...]) -> list[dict[str, float]]:
        """Return the parts of each stage's peak, by name of `PARTS`; they add up to it."""
        rows = []
        for stage in range(len(self.needs)):
            peak_bytes, memory, _ = self._fullest(stage, bounds)
            chunks = self._chunks(stage, bounds)
            row = {part: memory.only(part).peak_of(stage, chunks) for part in PARTS[:-1]}
            rows.append({**row, PARTS[-1]: max(0.0, peak_bytes - sum(row.values()))})
        return rows

    def _fullest(self, stage: int, bounds: tuple[int, ...]) -> tuple[float, MemoryModel, Device]:
        """Return peak, memory and device of the stage's rank that comes closest to its limit."""
        chunks = self._chunks(stage, bounds)
        peaks = (
            (memory.peak_of(stage, chunks), memory, device) for memory, device in self.needs[stage]
        )
        return max(peaks, key=lambda need: (need[0] / need[2].memory_bytes, need[0]))

    def _chunks(self, stage: int, bounds: tuple[int, ...]) -> Sequence[tuple[int, int]]:
        return list(pairwise(bounds))[stage :: len(self.needs)]

    def most_blocks(self, places: tuple[int, ...], num_again: int, scale: float = 1.0) -> int:
        """Return an upper bound on the equal blocks of all stages that `earliest_starts` allows.

        Arguments as of `MemoryModel.most_blocks`; ``scale`` multiplies every device's memory.
        """
        most: dict[tuple[MemoryModel, float], IntArray] = {}
        number = 0
        for stage, needs in enumerate(self.needs):
            rooms = []
            for memory, device in needs:
                key = memory, scale * device.memory_bytes
                if key not in most:
                    most[key] = memory.most_blocks(key[1], places, num_again, by_chunk=False)
                rooms.append(int(most[key][stage]))
            number += min(rooms)
        return number

    def earliest_starts(self, scale: float = 1.0, num_again: int | None = None) -> IntArray:
        """Return per stage and end the smallest start from which all ranks of a stage fit.

        Every device's memory is multiplied by ``scale``; ``num_again`` is by default the number in
        the stages' options. The result has shape ``(pp, num_layers + 1)``; the end itself where
        nothing fits.
        """
        first, smallest = self.needs[0][0]
        if all(len(needs) == 1 and needs[0] == (first, smallest) for needs in self.needs):
            limits = np.full(len(self.needs), scale * smallest.memory_bytes)
            return first.earliest_starts(limits, num_again)
        # On mixed devices many stages share a row, and many plans share a table
        rows = [
            [
                memory.starts_within(scale * device.memory_bytes, num_again)[stage]
                for memory, device in needs
            ]
            for stage, needs in enumerate(self.needs)
        ]
        return np.array([row[0] if len(row) == 1 else np.max(row, axis=0) for row in rows])


def stage_memory(
    stages: PlacedStages, cluster: Cluster, memory_of: Callable[[Candidate], MemoryModel]
) -> StageMemory:
    """Return the memory of stages; equal options, shares and devices are computed once.

    ``memory_of`` returns the memory of a candidate whose stages are all equal.
    """
    distinct, of_stage = stages.distinct_options
    shares = {samples for share in set(stages.shares) for samples in share}
    if len(cluster.device_types) == len(shares) == 1:
        groups_of = [frozenset({(shares.pop(), frozenset((0,)))})] * stages.pp
    else:
        groups = list(zip(stages.samples.tolist(), stages.types(cluster), strict=True))
        groups_of = [frozenset(groups[first:end]) for first, end in pairwise(stages.first_group)]
    memory: dict[tuple[int, Groups], RankMemory] = {}
    needs = []
    for key in zip(of_stage, groups_of, strict=True):
        if key not in memory:
            memory[key] = tuple(_rank_memory(stages, distinct[key[0]], key[1], cluster, memory_of))
        needs.append(memory[key])
    return StageMemory(needs=tuple(needs))


def _rank_memory(
    stages: PlacedStages,
    options: StageOptions,
    groups: Groups,
    cluster: Cluster,
    memory_of: Callable[[Candidate], MemoryModel],
) -> Iterator[tuple[MemoryModel, Device]]:
    """Return, per share of samples, the memory of a rank and the smallest device."""
    for samples in sorted({samples for samples, _ in groups}):
        candidate = Candidate(
            micro_batch_size=samples,
            options=options,
            pp=stages.pp,
            num_micro_batches=stages.num_micro_batches,
            virtual_stages=stages.virtual_stages,
        )
        types = sorted({kind for share, kinds in groups if share == samples for kind in kinds})
        devices = (cluster.device_types[kind] for kind in types)
        yield memory_of(candidate), min(devices, key=lambda device: device.memory_bytes)

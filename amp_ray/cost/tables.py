"""Tables of the evaluator: all physics of an experiment, by number, filled when it is needed."""

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from amp_ray.arrays import FloatArray, IntArray
from amp_ray.cost.collective import NO_RING, start_s, taken_share
from amp_ray.cost.kernels.evaluator import Costs, Devices, Layout, Paths
from amp_ray.cost.kernels.rings import RingTable
from amp_ray.cost.nccl import SIZES
from amp_ray.cost.samples import largest_share
from amp_ray.cost.stages import GroupKind, PlacedStages
from amp_ray.cost.timer import chunks_in_flight, pipeline_s
from amp_ray.cost.topology import Topology
from amp_ray.inputs.experiment import Experiment
from amp_ray.memo import memoised
from amp_ray.strategies.candidate import OTHER_OPTIONS, Candidate, StageOptions
from amp_ray.strategies.recompute import NO_RECOMPUTE
from amp_ray.strategies.strategy import TokenSlices

if TYPE_CHECKING:
    from amp_ray.cost.memory import MemoryModel
    from amp_ray.cost.model import SampleCosts


class Column:
    """A growing array; rows are added one by one."""

    def __init__(self, *shape: int, dtype: type = np.int64, size: int = 16) -> None:
        self.array: Any = np.zeros((size, *shape), dtype)  # with room for more rows
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, row: object) -> int:
        """Add a row, and return its number."""
        if self._size == len(self.array):
            self.array = np.concatenate([self.array, np.zeros_like(self.array)])
        self.array[self._size] = row
        self._size += 1
        return self._size - 1


class Numbers:
    """Numbers of values, counted as they are first met."""

    def __init__(self, *values: Hashable) -> None:
        self._number = {value: number for number, value in enumerate(values)}
        self.values: list[Any] = list(values)

    def of(self, value: Hashable, instead: object = None) -> int:
        """Return the number of a value; ``values`` keep it, or another object in its place."""
        number = self._number.setdefault(value, len(self._number))
        if number == len(self.values):
            self.values.append(value if instead is None else instead)
        return number


def _columns(count: int, dtype: type) -> list[Column]:
    return [Column(dtype=dtype) for _ in range(count)]


class Tables:
    """Tables of one kind of samples; the evaluator of the same samples reads them.

    Rows of options, layer times and memory count from 0 in the order in which they are asked for.
    """

    def __init__(self, samples: "SampleCosts", *, starts_on_host: bool = True) -> None:
        experiment = samples.experiment
        cluster, model = experiment.cluster, experiment.model
        self._samples, self._experiment = samples, experiment
        self.num_grown = 0
        self.cp = samples.cp
        self.num_devices, self.num_nodes = cluster.num_devices, len(cluster.nodes)
        self.num_types = len(cluster.device_types)
        self.by_size = cluster.has_rates_by_size
        self.may_host = starts_on_host and bool(experiment.traits.piped_collective_s)
        self.rings = RingTable(samples.topology)
        self._types = Numbers()
        self._special, self._shares = Numbers(NO_RING), Numbers(None)
        self._num_layers = model.num_layers
        tied = samples.weights(1).tied
        self.tied = (-1, -1, 0.0) if tied is None else (tied.first, tied.last, tied.parameters)
        self._make_options()
        self._make_layers()
        self._make_memory()
        self.costs = self._costs()
        self.devices = devices_of(samples.topology, experiment)
        self._rings = [self.rings]  # by number of links
        self._special_paths: dict[object, IntArray] = {}

    # ------------------------------------------------------------------------------- constants

    def _costs(self) -> Costs:
        samples, experiment = self._samples, self._experiment
        traits, constants = experiment.traits, experiment.constants
        per = samples.step_end.per_parameter
        numbers = (
            start_s(constants, traits),
            constants.host_s_per_iteration,
            constants.host_s_per_micro_batch,
            traits.mask_bytes,
            per.gradient,
            per.gathered,
            per.tied,
            per.bucket_traffic,
            per.step_traffic + samples.step_end.optimizer.update_traffic_bytes,
            traits.bucket_elements,
            traits.gather_slice_s * constants.host_scale,
            float(SIZES[-1]),
        )
        switches = (
            traits.blocking_transfers,
            traits.duplex_transfers,
            traits.sliced_activations,
            traits.sliced_gradients,
            traits.overlaps_gradient_sync,
            traits.overlaps_weight_gather,
            traits.scatters_gradients,
            traits.reduces_sharded_at_once,
            traits.gathers_every_pass,
            traits.buckets_alone,
            traits.defers_gradient_sync,
        )
        return Costs(numbers, switches)

    # ---------------------------------------------------------------------------------- options

    def _make_options(self) -> None:
        self._options = Numbers()
        self._time_options, self._memory_options = Numbers(), Numbers()
        self._weights_of, self._option_columns = Numbers(), _columns(16, np.int64)
        self._weights = Column(self._num_layers + 1, dtype=np.float64)
        self._experts = Column(self._num_layers + 1, dtype=np.float64)
        self._message_row = np.full((self.num_devices + 1, 2), -1, np.int64)
        self._message_bytes = Column(self._num_layers + 1, dtype=np.float64)

    @property
    def option_columns(self) -> list[IntArray]:
        """Columns of `evaluator.Options`."""
        return [column.array for column in self._option_columns]

    def option(self, options: StageOptions) -> int:
        """Return the number of a stage's options, which count cp in dp."""
        number = self._options.of(options)
        if number == len(self._option_columns[0]):
            self._add_option(options)
        return number

    def _add_option(self, options: StageOptions) -> None:
        again, of_experts = options.recompute, options.of_experts
        dimensions = (getattr(options, option.name) for option in OTHER_OPTIONS)
        times = options.tp, *dimensions, again.kind, again.layers is not None
        row = (
            options.tp,
            options.dp,
            options.zero.stage,
            options.zero.shards(options.dp),
            options.zero.keeps_weights,
            options.ep,
            options.expert_ranks,
            of_experts.dp,
            of_experts.zero.shards(of_experts.dp),
            options.spreads_experts,
            options.sequence_parallel,
            -1 if again.layers is None else again.layers,
            self._time_options.of(times, options),
            self._memory_options.of(replace(options, recompute=again.whole)),
            self._weights_row(options.tp, options.tp),
            self._weights_row(options.tp, options.expert_ranks),
        )
        for column, value in zip(self._option_columns, row, strict=True):
            column.add(value)
        self._add_messages(options.tp)
        self.num_grown += 1

    def _weights_row(self, tp: int, expert_ranks: int) -> int:
        number = self._weights_of.of((tp, expert_ranks))
        if number == len(self._weights):
            weights = self._samples.weights(tp, expert_ranks)
            self._weights.add(weights.prefix)
            self._experts.add(weights.expert_prefix)
        return number

    def _add_messages(self, tp: int) -> None:
        """Add the bytes of messages of such stages, with and without sequence parallelism."""
        messages = self._samples.messages
        for is_divided in (False, True):
            if self._message_row[tp, int(is_divided)] < 0:
                row = self._message_bytes.add(messages.sample_bytes(tp, divided=is_divided))
                self._message_row[tp, int(is_divided)] = row

    # ----------------------------------------------------------------------------------- layers

    def _make_layers(self) -> None:
        size = self._num_layers + 1
        self._times_s = Column(3, size, dtype=np.float64)
        self._plain_s = Column(3, size, dtype=np.float64, size=1)
        self._plain, self._extrapolates = Column(), Column()
        self._memory_bytes = Column(4, size, dtype=np.float64)
        weights, model = self._samples.weights(1), self._experiment.model
        counts = np.array(model.block_counts)
        self._fixed = (
            weights.replicated_prefix[None],
            weights.tensor_prefix[None].astype(np.float64),
            counts,
            np.searchsorted(counts, np.arange(counts[-1] + 1)),
        )
        self._trained = np.cumsum([0, *(layer.num_parameters > 0 for layer in model.layers)])

    @property
    def layer_columns(self) -> tuple[Any, ...]:
        """Columns of `evaluator.Layers`."""
        return (
            self._times_s.array,
            self._plain_s.array,
            self._plain.array,
            self._extrapolates.array,
            self._memory_bytes.array,
            self._weights.array,
            self._experts.array,
            *self._fixed,
            self._message_row,
            self._message_bytes.array,
            self._trained,
        )

    def add_types(self, key: IntArray) -> None:
        """Number a set of device types."""
        words = np.asarray(key).tolist()
        self._types.of(
            tuple(kind for kind in range(self.num_types) if words[kind // 62] >> (kind % 62) & 1)
        )

    def add_times(self, key: IntArray) -> None:
        """Add the layer times of a kind of group; the key is that of `evaluator.Times`."""
        times, kind, path, hosted, exchange, context, heads, samples, links = np.asarray(
            key
        ).tolist()
        options = self._time_options.values[times]
        types = (kind,) if kind < self.num_types else self._types.values[kind - self.num_types]
        ring = self._rings[links].path(path)
        if hosted:
            ring = replace(ring, host_s=self._experiment.traits.piped_collective_s)
        group = GroupKind(
            types=types,
            ring=ring,
            exchange=self._special.values[exchange],
            context=self._special.values[context],
            heads=self._special.values[heads],
            options=0,
            samples=samples,
        )
        tables = self._samples.time_tables
        table, extrapolates = tables.of_kind(group, options)
        self._times_s.add(table)
        self._extrapolates.add(extrapolates)
        plain = -1
        if options.recompute.layers is not None:
            table, _ = tables.of_kind(group, replace(options, recompute=NO_RECOMPUTE))
            plain = self._plain_s.add(table)
        self._plain.add(plain)
        self.num_grown += 1

    # ----------------------------------------------------------------------------------- memory

    def _make_memory(self) -> None:
        self._memory_columns = [
            *_columns(7, np.float64),
            *_columns(4, np.int64),
            *_columns(2, np.float64),
        ]
        self._memory_models: list[MemoryModel] = []
        self._row_of: dict[int, int] = {}

    @property
    def memory_columns(self) -> list[Any]:
        """Columns of `evaluator.MemoryKinds`."""
        return [column.array for column in self._memory_columns]

    def add_memory(self, key: IntArray) -> None:
        """Add a kind of memory; the key is that of `evaluator.Memory`."""
        number, samples, pp, num_micro_batches, share = np.asarray(key).tolist()
        options = self._memory_options.values[number]
        candidate = Candidate(
            micro_batch_size=samples,
            options=options,
            pp=pp,
            num_micro_batches=num_micro_batches,
        )
        model = self._samples.memory(candidate)
        if share:
            model = model.sliced(self._shares.values[share])
        first, last = model.columns[0], model.columns[-1]
        row = (
            first[0],
            first[4],
            first[5],
            first[6],
            first[7],
            last[7] - first[7],
            first[8],
            model.keeps_ends_once,
            model.traits.frees_outputs,
            self._memory_row(model.layers),
            self._memory_row(model.plain),
            model.tied[2],
            model.slice_share,
        )
        for column, value in zip(self._memory_columns, row, strict=True):
            column.add(value)
        self._memory_models.append(model)
        self.num_grown += 1

    def _memory_row(self, rows: FloatArray) -> int:
        if id(rows) not in self._row_of:  # `_memory_models` keeps the array
            self._row_of[id(rows)] = self._memory_bytes.add(rows)
        return self._row_of[id(rows)]

    def share(self, slices: TokenSlices) -> int:
        """Return the number of the largest token slice's share of a micro-batch; 0 for none."""
        return self._shares.of(largest_share(slices)) if slices else 0

    @memoised
    def states(
        self, pp: int, num_micro_batches: int, virtual_stages: int
    ) -> tuple[IntArray, FloatArray]:
        """Return the micro-batches in flight of each chunk, and where each stage's states begin."""
        states = [
            chunks_in_flight(stage, pp, num_micro_batches, virtual_stages) for stage in range(pp)
        ]
        first = np.cumsum([0, *map(len, states)])
        return first, np.concatenate(states)

    # ------------------------------------------------------------------------------------ links

    @memoised
    def links_at(self, num_samples: int) -> tuple[int, Paths, Devices]:
        """Return the links at the size of the messages of so many samples, and their number."""
        topology, _ = self._samples.network(num_samples)
        self._rings.append(RingTable(topology))
        paths = Paths(self._rings[-1], self.costs)
        return len(self._rings) - 1, paths, devices_of(topology, self._experiment)

    def hosts(self, layout: Layout) -> bool:
        """Return whether a pipeline's host starts collectives as between nodes."""
        stages = placed_stages(self, layout)
        return stages.pp > 1 and stages.leaves_nodes(self._samples.topology)

    def special_paths(self, layout: Layout) -> IntArray:
        """Return each group's paths of exchanges of experts and between ranks of a sequence.

        Returns:
            Shape ``(3, num_groups)``, numbers of paths.
        """
        stages = placed_stages(self, layout)
        key = stages.devices.tobytes(), tuple(stages.options)
        if key not in self._special_paths:
            self._special_paths[key] = self._find_special(stages)
        return self._special_paths[key]

    def _find_special(self, stages: PlacedStages) -> IntArray:
        topology, heads = self._samples.topology, self._samples.head_ranks
        of_stage = stages.stage_of_group.tolist()
        exchanges = stages.exchanges(topology, self._samples.time_tables.copies)
        divided = stages.head_exchanges(topology, heads)
        context = stages.context_rings(topology, heads).of_groups
        return np.array(
            [
                [self._special.of(exchanges[stage]) for stage in of_stage],
                [self._special.of(path) for path in context],
                [self._special.of(divided[stage]) for stage in of_stage],
            ]
        )

    def time_chunks(
        self, passes_s: FloatArray, sends_s: FloatArray, pp: int, num_micro_batches: int
    ) -> float:
        """Time an interleaved schedule; arguments as of `timer.pipeline_s`."""
        return pipeline_s(passes_s, sends_s, pp, num_micro_batches, self._experiment.traits)

    # ---------------------------------------------------------------------------------- layouts

    def layout_of(self, stages: PlacedStages) -> Layout:
        """Return placed stages as numbers, not yet cut."""
        layout = Layout(
            np.array([self.option(options) for options in stages.options]),
            np.array(stages.devices, np.int64),
            np.array(stages.samples, np.int64),
            np.zeros(stages.pp * stages.virtual_stages + 1, np.int64),
        )
        layout.schedule(stages.pp, stages.num_micro_batches, stages.virtual_stages)
        return layout

    @property
    def options(self) -> list[StageOptions]:
        """Options by number."""
        return self._options.values


def placed_stages(tables: Tables, layout: Layout) -> PlacedStages:
    """Return the placed stages of a layout."""
    pp, num_micro_batches, virtual_stages, numbers, devices, samples = layout.numbers()
    options = [tables.options[number] for number in numbers[:pp]]
    shares, first = [], 0
    for each in options:
        shares.append(tuple(samples[first : first + each.dp].tolist()))
        first += each.dp
    return PlacedStages(
        options=options,
        devices=devices[: sum(each.num_ranks for each in options)],
        shares=shares,
        num_micro_batches=num_micro_batches,
        virtual_stages=virtual_stages,
        cp=tables.cp,
    )


def devices_of(topology: Topology, experiment: Experiment) -> Devices:
    """Return devices and links of messages as the evaluator reads them."""
    types, constants, links = topology.cluster.device_types, experiment.constants, topology.links
    order = sorted(
        range(len(types)),
        key=lambda kind: (types[kind].memory_bytes_per_s, types[kind].num_multiprocessors),
    )
    slowness = np.zeros(len(types), np.int64)
    slowness[order] = np.arange(len(types))
    return Devices(
        (
            topology.type_of_device,
            topology.node_of_device,
            np.array([float(device.memory_bytes) for device in types]),
            np.array([device.memory_bytes_per_s * constants.memory_efficiency for device in types]),
            np.array([taken_share(device) for device in types]),
            slowness,
            links.kind_of_node,
            links.host_of_node,
            links.num_hosts,
            links.intra_bytes_per_s,
            links.intra_step_s,
            links.inter_bytes_per_s,
            links.inter_step_s,
        )
    )

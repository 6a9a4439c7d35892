"""What layers take and hold, for one kind of sample: whole, part of a sequence, or token slice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from amp_ray.arrays import FloatArray
from amp_ray.cost.collective import Path
from amp_ray.cost.layers import LayerCosts
from amp_ray.cost.memory import LayerMemory, MemoryModel
from amp_ray.cost.messages import MessageModel, Messages
from amp_ray.cost.roofline import Rank
from amp_ray.cost.samples import exchange_rings, exposed_s
from amp_ray.cost.stages import PlacedStages, StageTimes, TimeTables
from amp_ray.cost.step_end import StepEndModel
from amp_ray.cost.topology import Rings, Topology
from amp_ray.cost.weights import Weights
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtimes.traits import find_optimizer
from amp_ray.strategies.candidate import Candidate, StageOptions
from amp_ray.strategies.recompute import RecomputeKind


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """Cache of tables that many candidates share; it belongs to one process."""

    experiment: Experiment  # its model is that of these samples
    cp: int = 1  # ranks that divide every sequence, of which the samples are parts
    _memory: dict[Candidate, MemoryModel] = field(init=False, default_factory=dict)
    _weights: dict[tuple[int, int], Weights] = field(init=False, default_factory=dict)
    _networks: dict[int, tuple[Topology, MessageModel]] = field(init=False, default_factory=dict)
    _exchanges: dict[tuple[Path, int, int], tuple[FloatArray, FloatArray]] = field(
        init=False, default_factory=dict
    )
    _layer_memory: dict[tuple[Rank, int, int, RecomputeKind], FloatArray] = field(
        init=False, default_factory=dict
    )

    @property
    def are_whole(self) -> bool:
        """Whether ranks have whole sequences."""
        return self.cp == 1

    @property
    def why_not_launched(self) -> str | None:
        """Why the runtime cannot divide samples so; None if it can."""
        return self.experiment.traits.why_no_context(self.cp)

    @cached_property
    def topology(self) -> Topology:
        """The cluster's links."""
        return Topology(cluster=self.experiment.cluster, constants=self.experiment.constants)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Times of layers on devices."""
        experiment = self.experiment
        return LayerCosts(
            model=experiment.model,
            profile=experiment.profile,
            traits=experiment.traits,
            constants=experiment.constants,
        )

    @cached_property
    def time_tables(self) -> TimeTables:
        """Layer times of tensor-parallel groups."""
        return TimeTables(
            layer_costs=self.layer_costs,
            topology=self.topology,
            precision=self.experiment.precision,
        )

    @cached_property
    def messages(self) -> MessageModel:
        """Messages between stages."""
        experiment = self.experiment
        return MessageModel(
            model=experiment.model,
            topology=self.topology,
            traits=experiment.traits,
            constants=experiment.constants,
            precision=experiment.precision,
        )

    @cached_property
    def step_end(self) -> StepEndModel:
        """The end of an iteration."""
        experiment = self.experiment
        return StepEndModel(
            topology=self.topology,
            traits=experiment.traits,
            constants=experiment.constants,
            precision=experiment.precision,
            optimizer=find_optimizer(experiment.optimizer),
        )

    def network(self, num_samples: int) -> tuple[Topology, MessageModel]:
        """Return the links at the message size of so many samples, and messages over them.

        These are the cluster's links unless the rate of some depends on the size of a message.
        """
        if not self.experiment.cluster.has_rates_by_size:
            return self.topology, self.messages
        if num_samples not in self._networks:
            num_bytes = num_samples * float(self.messages.sample_bytes(1).max())
            cluster = self.experiment.cluster.at(num_bytes)
            topology = replace(self.topology, cluster=cluster)
            self._networks[num_samples] = topology, replace(self.messages, topology=topology)
        return self._networks[num_samples]

    def times(
        self, stages: PlacedStages, types: Sequence[frozenset[int]], rings: Rings
    ) -> StageTimes:
        """Return layer times, with the exchange of keys and values where ranks divide sequences.

        Arguments as of `TimeTables.times`.
        """
        times = self.time_tables.times(stages, types, rings)
        if self.cp == 1:
            return times
        rings = exchange_rings(stages, self.cp, self.topology)
        return times.with_exchange(rings, self.exchange_s)

    def times_and_messages(self, stages: PlacedStages) -> tuple[StageTimes, Messages]:
        """Price passes and messages of stages, before they are cut and without the host."""
        topology, messages = self.network(max(map(max, stages.shares)))
        rings = topology.rings(stages.tensor_groups)
        types = stages.types(self.experiment.cluster)
        return self.times(stages, types, rings), messages.between(stages, rings)

    def exchange_s(self, path: Path, tp: int, samples: int) -> tuple[FloatArray, FloatArray]:
        """Return the time that keys and values add to both passes of every layer."""
        key = path, tp, samples
        if key not in self._exchanges:
            experiment = self.experiment
            layers, positions = experiment.model.distinct_layers
            rows = []
            for device in experiment.cluster.device_types:
                rank = Rank(
                    device=device, tp=tp, micro_batch_size=samples, precision=experiment.precision
                )
                rows.append(
                    [
                        exposed_s(
                            layer, rank, self.cp, path, experiment.traits, experiment.constants
                        )
                        for layer in layers
                    ]
                )
            forward_s, backward_s = np.max(rows, axis=0)[list(positions)].T
            self._exchanges[key] = forward_s, backward_s
        return self._exchanges[key]

    def weights(self, tp: int, expert_ranks: int = 0) -> Weights:
        """Return the weights of a rank in a tensor-parallel group.

        Args:
            tp: Its size.
            expert_ranks: Ranks that hold the experts of a layer together; by default the group.
        """
        key = tp, expert_ranks or tp
        if key not in self._weights:
            model = self.experiment.model
            self._weights[key] = Weights(model=model, tp=tp, expert_ranks=key[1])
        return self._weights[key]

    def memory(self, candidate: Candidate) -> MemoryModel:
        """Return the memory of a candidate's stages, whose cp is part of its dp."""
        if candidate not in self._memory:
            self._memory[candidate] = self._new_memory(candidate)
        return self._memory[candidate]

    def _new_memory(self, candidate: Candidate) -> MemoryModel:
        experiment, options = self.experiment, candidate.options
        device, size = experiment.cluster.device_types[0], candidate.micro_batch_size
        rank = Rank.of(device, options, size, experiment.precision)
        return MemoryModel(
            layers=self._memory_rows(rank, options, options.recompute.kind),
            plain=self._memory_rows(rank, options, "none"),
            block_counts=np.array(experiment.model.block_counts),
            weights=self.weights(options.tp, options.expert_ranks),
            candidate=candidate,
            rank=rank,
            optimizer=self.step_end.optimizer,
            traits=experiment.traits,
            per=self.step_end.per_parameter,
            constants=experiment.constants,
        ).weighed()

    def _memory_rows(
        self, rank: Rank, options: StageOptions, recompute: RecomputeKind
    ) -> FloatArray:
        spread = options.ep, options.expert_tp
        key = rank, *spread, recompute
        if key not in self._layer_memory:
            layers = LayerMemory(
                model=self.time_tables.layouts.of(options),
                rank=rank,
                recompute=recompute,
                traits=self.experiment.traits,
            )
            self._layer_memory[key] = layers.rows(self.weights(options.tp, options.expert_ranks))
        return self._layer_memory[key]

"""The clusters behind the published measurements, as far as their authors state them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from amp_ray.spec.candidate import Candidate
from amp_ray.spec.catalogue import find_device
from amp_ray.spec.cluster import Cluster, Link, Node
from amp_ray.spec.constants import Constants
from amp_ray.spec.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.spec.families import build_model
from amp_ray.spec.model import ModelShape
from amp_ray.spec.profile import ANALYTIC
from amp_ray.spec.strategy import StageOptions, Strategy
from amp_ray.spec.traits import RuntimeTraits
from amp_ray.units import Precision, gbit_per_s_to_bytes_per_s, microseconds_to_s

SLOTS: Final = 8
"""All of these clusters are made of nodes with eight A100 on NVSwitch."""

INTRA_GBIT_PER_S: Final = 1200.0
"""Collective rate within a node: vTrain's configurations state about 150 GB/s; the other authors
state none, and their nodes are built in the same way."""

INTRA_STEP_S: Final = microseconds_to_s(2.4)
"""One step of a ring within a node of A100, measured with NCCL (arXiv:2312.12391)."""

INTER_STEP_S: Final = microseconds_to_s(10)
"""One step between nodes: an InfiniBand or Omni-Path hop and its proxy thread."""

INTER_GBIT_PER_S: Final[Mapping[str, float]] = {
    "vtrain": 800.0,  # stated in its configurations
    "jean-zay": 400.0,  # four Omni-Path links of 100 Gbit/s per node, stated in the chronicles
    "selene": 1600.0,  # eight HDR InfiniBand links of 200 Gbit/s: NVIDIA's description of Selene
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One published training job, in the figures that all tables have.

    Args:
        hidden_size: Width of a block.
        num_heads: Attention heads.
        num_layers: Transformer blocks.
        sequence_length: Tokens per sample.
        vocab_size: Before padding.
        num_gpus: Devices.
        global_batch_size: Samples per optimizer step.
        tp: Tensor parallel degree.
        dp: Data parallel degree.
        pp: Pipeline parallel degree.
        micro_batch_size: Samples per micro-batch.
        traits: What the runtime does.
        precision: Of activations and weights.
        zero_stage: What is sharded.
    """

    hidden_size: int
    num_heads: int
    num_layers: int
    sequence_length: int
    vocab_size: int
    num_gpus: int
    global_batch_size: int
    tp: int
    dp: int
    pp: int
    micro_batch_size: int
    traits: RuntimeTraits
    precision: Precision = "fp16"
    zero_stage: int = 0

    def experiment(self, site: str) -> Experiment:
        """Return what was given: GPT with full recompute on as many nodes as the job had."""
        shape = ModelShape(
            family="gpt2",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            sequence_length=self.sequence_length,
            vocab_size=self.vocab_size,
            num_key_value_heads=self.num_heads,
            feed_forward_size=4 * self.hidden_size,
            tied_embedding=True,
        )
        return Experiment(
            name=site,
            model=build_model(
                shape,
                layer_list="runtime",
                vocabulary_multiple=self.traits.vocabulary_multiple,
            ),
            cluster=_cluster(site, self.num_gpus),
            profile=ANALYTIC,
            constants=Constants(),
            traits=self.traits,
            precision=self.precision,
            optimizer="adam",
            zero_stage=self.zero_stage,
            recompute="full",
            global_batch_size=self.global_batch_size,
            limits=SearchLimits(),
            trials=_NO_TRIALS,
        )

    def strategy(self, bounds: tuple[int, ...]) -> Strategy:
        """Return what ran, with given cuts."""
        samples = self.dp * self.micro_batch_size
        candidate = Candidate(
            micro_batch_size=self.micro_batch_size,
            options=StageOptions(tp=self.tp, dp=self.dp, recompute="full"),
            pp=self.pp,
            num_micro_batches=max(1, round(self.global_batch_size / samples)),
        )
        return Strategy.uniform(candidate, bounds)


_NO_TRIALS: Final = TrialSettings(
    backend="local", budget=0, num_steps=1, num_warmup_steps=0, timeout_s=1.0
)


def _cluster(site: str, num_gpus: int) -> Cluster:
    """Return the nodes of a job."""
    intra = Link(
        bandwidth_bytes_per_s=gbit_per_s_to_bytes_per_s(INTRA_GBIT_PER_S), latency_s=INTRA_STEP_S
    )
    inter = Link(
        bandwidth_bytes_per_s=gbit_per_s_to_bytes_per_s(INTER_GBIT_PER_S[site]),
        latency_s=INTER_STEP_S,
    )
    device = find_device("A100-80")
    return Cluster(
        nodes=tuple(
            Node(name=f"node{index}", device=device, num_slots=SLOTS, intra=intra, inter=inter)
            for index in range(num_gpus // SLOTS)
        )
    )

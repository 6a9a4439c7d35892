"""Hardware and a model whose times can be worked out in one's head."""

import pytest

from amp_ray.clusters.cluster import Cluster, Link, Node
from amp_ray.clusters.constants import Constants
from amp_ray.clusters.device import Device
from amp_ray.cost.roofline import Rank
from amp_ray.cost.topology import Topology
from amp_ray.inputs.experiment import Experiment, SearchLimits, TrialSettings
from amp_ray.inputs.profile import ANALYTIC
from amp_ray.models.model import Layer, Model, ModelShape
from amp_ray.models.operator import Elementwise
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.recompute import NO_RECOMPUTE

KILO = 1000


@pytest.fixture
def device() -> Device:
    """Streams 1 kB/s; multiplies as if for free; holds 10 kB."""
    return Device(
        name="toy",
        memory_bytes=10 * KILO,
        memory_bytes_per_s=KILO,
        num_multiprocessors=1,
        fp32_flops=1e30,
        fp16_flops=1e30,
        bf16_flops=1e30,
        gemm_fraction=1.0,
        source="made up",
    )


@pytest.fixture
def constants() -> Constants:
    """Everything runs at its stated rate, and nothing costs but what is counted."""
    return Constants(
        memory_efficiency=1.0,
        kernel_gap_s=0.0,
        host_s_per_kernel=0.0,
        host_s_per_micro_batch=0.0,
        host_s_per_iteration=0.0,
        nic_efficiency=1.0,
        collective_start_s=0.0,
        loss_bytes_per_logit=0.0,
    )


@pytest.fixture
def traits() -> RuntimeTraits:
    """A runtime that keeps and moves nothing but weights and gradients."""
    return RuntimeTraits(
        name="plain",
        description="Nothing extra.",
        step_traffic_bytes_per_parameter=0.0,
        master_bytes_per_parameter=0.0,
        bucket_bytes_per_element=0.0,
        context_bytes=0.0,
        allocator_factor=1.0,
        accumulation_bytes_per_parameter=0.0,
    )


@pytest.fixture
def rank(device: Device) -> Rank:
    """One sample per micro-batch, no tensor parallelism, half precision."""
    return Rank(device=device, tp=1, micro_batch_size=1, precision="fp16")


@pytest.fixture
def block() -> Layer:
    """1 s forward, 2 s backward per sample; 100 parameters; 50 elements kept and passed on."""
    operator = Elementwise(
        name="work",
        forward_elements=500,
        backward_elements=1000,
        sharded_parameters=100,
        saved_elements=50,
    )
    return Layer(name="block", kind="block", operators=(operator,), output_elements=50)


@pytest.fixture
def model(block: Layer) -> Model:
    """Four equal blocks."""
    shape = ModelShape(
        family="toy",
        num_layers=4,
        hidden_size=50,
        num_heads=1,
        sequence_length=1,
        vocab_size=0,
        num_key_value_heads=1,
        feed_forward_size=50,
        tied_embedding=False,
    )
    return Model(name="toy", shape=shape, layers=(block,) * 4)


@pytest.fixture
def cluster(device: Device) -> Cluster:
    """Two nodes of two devices; 1 kB/s within a node, 100 B/s between nodes, no latency."""
    nodes = tuple(
        Node(
            name=name,
            device=device,
            num_slots=2,
            intra=Link(bandwidth_bytes_per_s=KILO, latency_s=0.0),
            inter=Link(bandwidth_bytes_per_s=100, latency_s=0.0),
        )
        for name in ("a", "b")
    )
    return Cluster(nodes=nodes)


@pytest.fixture
def topology(device: Device, constants: Constants) -> Topology:
    """Nodes 0, 1: 900 B/s inside, 120 B/s outside; node 2: 80 and 40. 1 s inside, 2 s outside.

    Each node has four devices.
    """
    nodes = [
        Node(
            name=str(i),
            device=device,
            num_slots=4,
            intra=Link(bandwidth_bytes_per_s=80 if i == 2 else 900, latency_s=1.0),
            inter=Link(bandwidth_bytes_per_s=40 if i == 2 else 120, latency_s=2.0),
        )
        for i in range(3)
    ]
    return Topology(cluster=Cluster(nodes=tuple(nodes)), constants=constants)


@pytest.fixture
def experiment(
    model: Model, cluster: Cluster, constants: Constants, traits: RuntimeTraits
) -> Experiment:
    """Train the four blocks with plain SGD, eight samples per step."""
    return Experiment(
        name="toy",
        model=model,
        cluster=cluster,
        profile=ANALYTIC,
        constants=constants,
        traits=traits,
        precision="fp16",
        optimizer="sgd",
        zero_stage=0,
        recompute=NO_RECOMPUTE,
        global_batch_size=8,
        limits=SearchLimits(),
        trials=TrialSettings(backend="local", budget=0, steps=1, warmup_steps=0, timeout_s=1.0),
    )

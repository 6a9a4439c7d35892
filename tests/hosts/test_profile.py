"""A profile over SSH: one host measures layers and slices, two hosts the link between them."""

from pathlib import Path

import pytest

from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.profile.links import link_reports
from amp_ray.runtime.profile.parts import profile_parts
from amp_ray.runtime.profile.profiling import ProfileFolder, Settings, measure
from amp_ray.trials.profile.tables import slice_files
from amp_ray.units import BITS_PER_BYTE, GIGA
from support.experiments import experiment_from

from .conftest import NEEDS_TRAINING, Bench, MakeCluster

pytestmark = [pytest.mark.hosts, NEEDS_TRAINING]

LINK_BITS_PER_S = 500_000_000
EXPERIMENT = """\
name: tiny
model: {family: llama, num_layers: 2, hidden_size: 128, num_heads: 2, sequence_length: 8,
        vocab_size: 32}
cluster:
  hostfile: hostfile
  nodes:
    - {count: 2, device: cpu, slots: 2, intra_gbit_per_s: 20, inter_gbit_per_s: 20}
precision: fp32
global_batch_size: 4
search: {micro_batch_sizes: [1], slice_granularity: 4}
"""


def test_links_between_hosts_are_found_as_they_are(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    bench = Bench(make_cluster(link_bits_per_s=LINK_BITS_PER_S), tmp_path)
    hostfile = "".join(f"{host.address} slots=2\n" for host in bench.cluster.hosts)
    experiment = experiment_from(EXPERIMENT, {"hostfile": hostfile})
    folder = ProfileFolder(tmp_path / "profile", experiment.model, experiment.precision)
    settings = Settings(
        seconds=300.0, make_host=lambda name: SshHost(name, bench.ssh), say=lambda _line: None
    )
    parts = profile_parts(experiment, is_local=False, token_slices=True)
    within, between = measure(experiment, parts, folder, settings)
    assert (within.problem, between.problem) == (None, None)
    assert within.num_missing == 0
    files = slice_files(folder.records, experiment, 4, {"cpu": parts[0].layers})
    assert sorted(files) == ["cpu.tp1.slices.json", "cpu.tp2.slices.json"]
    assert "cpu.csv" in folder.write(files)
    sizes = {
        point.num_bytes: point.num_bytes * BITS_PER_BYTE / seconds
        for (place, point), seconds in folder.records.links.items()
        if place.scope == "inter" and point.what == "all_reduce"
    }
    assert sizes[max(sizes)] == pytest.approx(LINK_BITS_PER_S, rel=0.35)
    intra, inter = link_reports(folder.records, experiment)
    # The token bucket of one direction fills up while the other direction sends, so messages of up
    # to a megabyte go back and forth at twice the rate. The fitted rate of all messages lies
    # between. On a busy machine the fit may be bad; then the largest messages' rate is reported.
    assert 0.65 * LINK_BITS_PER_S < inter.gbit_per_s * GIGA < 2.5 * LINK_BITS_PER_S
    assert intra.gbit_per_s > 2 * inter.gbit_per_s
    bench.check_clean()

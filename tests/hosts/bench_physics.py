"""Real training on test hosts shows the cost of links and slow hosts; the cost model agrees.

``make physics`` runs it: a machine with other work, or with slower cores, measures other ratios.
Trials that are compared alternate, so that other work on the machine affects all of them alike, and
medians over trials are compared. ``pytest -rP`` shows the measurements.
"""

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from amp_ray.cost.estimate import Estimate
from amp_ray.cost.model import CostModel
from amp_ray.inputs.experiment import Experiment
from amp_ray.runtime.files import load_experiment
from amp_ray.runtime.hosts.ssh import SshHost
from amp_ray.runtime.launch.launcher import Launcher
from amp_ray.runtime.launch.program_files import program_files
from amp_ray.runtime.planning import plan_experiment
from amp_ray.runtime.profile.parts import load_unprofiled, profile_parts
from amp_ray.runtime.profile.profiling import ProfileFolder, Settings, measure
from amp_ray.search.amp_ray_planner import AmpRayPlanner
from amp_ray.strategies.candidate import Candidate
from amp_ray.strategies.strategy import StageOptions, Strategy, candidate_of
from amp_ray.trials.command import trial_launch, trial_warm_up
from amp_ray.trials.outcome import Measured
from amp_ray.trials.profile.tables import slice_files
from support.experiments import experiment_from
from support.host_cluster import HostCluster, why_unavailable

from .conftest import NEEDS_TRAINING, Bench, require

pytestmark = [pytest.mark.hosts, NEEDS_TRAINING]

SHAPED_BITS_PER_S = 200_000_000
SHAPED_GBIT_PER_S = 0.2
FREE_GBIT_PER_S = 7.0
"""Approximate rate of test hosts' links without a limit; the processor limits it."""

CORES = 0.8
SLOW_CORES = 0.4
"""The two hosts use less than two cores, which every machine has, so that other work does not slow
down one host more than the other."""

WEIGHT = 20
"""CPU weight of the hosts, so large that other programs do not take a part of their quotas."""

BATCH_SIZE = 8
NUM_ROUNDS = 3
MOST_APART = 1.15
"""Maximum ratio of two trials' times; a larger one means that other work disturbed a trial."""

TEXT = """\
name: physics
model: {family: gpt2, num_layers: BLOCKS, hidden_size: 256, num_heads: 4, sequence_length: 80,
        vocab_size: 61}
cluster:
  hostfile: hostfile
  nodes:
    - {device: cpu, slots: SLOTS, intra_gbit_per_s: 20, inter_gbit_per_s: GBIT}
    - {device: SECOND, slots: SLOTS, intra_gbit_per_s: 20, inter_gbit_per_s: GBIT}
precision: fp32
optimizer: sgd
global_batch_size: BATCH
runtime: RUNTIME
search: {space: SPACE}
trials: {backend: ssh, steps: 2, warmup_steps: 1, timeout_s: 120}
"""
LONG_GRANULARITY = 256
LONG_TEXT = f"""\
name: long
model: {{family: gpt2, num_layers: 4, hidden_size: 256, num_heads: 4, sequence_length: 1024,
        vocab_size: 61}}
cluster:
  hostfile: hostfile
  nodes: [{{count: 2, device: cpu, slots: 1, intra_gbit_per_s: 20, inter_gbit_per_s: 7}}]
profile: {{source: table, path: profile}}
precision: fp32
optimizer: sgd
runtime: torch
global_batch_size: 1
search: {{token_slices: true, slice_granularity: {LONG_GRANULARITY}}}
trials: {{backend: ssh, steps: 3, warmup_steps: 1, timeout_s: 300}}
"""
SLOW_DEVICE = "{name: cpu, memory_gib: 4, memory_gbyte_per_s: 5, fp32_tflops: 0.025}"
"""A device with half of the rates of the catalogue's ``cpu``."""

MOST_OFF = 0.35
"""Maximum relative error of a predicted ratio; below 20 % on a machine without other work."""

Times = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The real limits of hosts, and the experiment that describes the hosts."""

    experiment: Experiment
    bits_per_s: int | None  # rate of both links; None for no limit
    second_cores: float = CORES  # share of the processor that the second host gets


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Measured (median) and predicted times of strategies in one setting, by name."""

    measured_s: Times
    predicted_s: Times

    def ratio(self, slow: str, fast: str) -> float:
        """Return the ratio of two measured times."""
        return self.measured_s[slow] / self.measured_s[fast]

    def predicted_ratio(self, slow: str, fast: str) -> float:
        """Return the ratio of two predicted times."""
        return self.predicted_s[slow] / self.predicted_s[fast]

    def __str__(self) -> str:
        """List measured and predicted times."""
        return ", ".join(
            f"{name} {self.measured_s[name]:.3f} s (predicted {self.predicted_s[name]:.3f} s)"
            for name in self.measured_s
        )


@dataclass(kw_only=True)
class Bed:
    """Two hosts whose warm agents stay between trials, and an experiment on them."""

    bench: Bench
    launcher: Launcher
    sliced: Experiment  # experiment with the profile of token slices on the hosts
    num_trials: int = 0

    def compare(
        self, strategies: Mapping[str, Strategy], *settings: Setting
    ) -> tuple[Comparison, ...]:
        """Predict and measure strategies in every setting; settings alternate, too.

        If trials of one strategy disagree, all trials are repeated.
        """
        trials: list[dict[str, list[float]]] = [{name: [] for name in strategies} for _ in settings]
        self._take_turns(strategies, settings, trials)
        if not all(is_settled(times) for found in trials for times in found.values()):
            self._take_turns(strategies, settings, trials)
        return tuple(
            Comparison(
                measured_s={name: statistics.median(times) for name, times in found.items()},
                predicted_s=predicted_s(setting.experiment, strategies),
            )
            for setting, found in zip(settings, trials, strict=True)
        )

    def _take_turns(
        self,
        strategies: Mapping[str, Strategy],
        settings: Sequence[Setting],
        trials: Sequence[Mapping[str, list[float]]],
    ) -> None:
        """Train once with every strategy in every setting, and add the times to ``trials``."""
        for _ in range(NUM_ROUNDS):
            for setting, found in zip(settings, trials, strict=True):
                self._set(setting)
                for name, chosen in strategies.items():
                    found[name].append(self._trial_s(setting.experiment, chosen))
        for found in trials:
            rounded = {name: [round(time_s, 3) for time_s in found[name]] for name in found}
            sys.stdout.write(f"trials, in seconds per step: {rounded}\n")

    def _set(self, setting: Setting) -> None:
        """Set the rate of both links, and both hosts' share of the processor."""
        cluster = self.bench.cluster
        for host, cores in zip(cluster.hosts, (CORES, setting.second_cores), strict=True):
            cluster.shape(host, setting.bits_per_s)
            cluster.limit_cpu(host, cores)

    def _trial_s(self, experiment: Experiment, chosen: Strategy) -> float:
        """Train with a strategy; return the time of a step."""
        self.num_trials += 1
        launch = trial_launch(
            experiment,
            chosen,
            trial_id=f"physics-{self.num_trials}",
            hosts=[node.name for node in experiment.cluster.nodes],
            files=program_files(experiment, self.bench.folder),
            python=sys.executable,
        )
        outcome = self.launcher.run(launch, self.bench.folder / launch.trial_id)
        assert isinstance(outcome, Measured), outcome
        return outcome.measured_s


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Two hosts for all tests here, since imports of torch and DeepSpeed take long."""
    require(why_unavailable())
    with HostCluster(num_hosts=2, weight=WEIGHT) as cluster, cluster.inside():
        require(cluster.why_no_quota)
        require(why_not_shaped(cluster))
        bench = Bench(cluster, tmp_path_factory.mktemp("physics"))
        # Before any trial: the launcher keeps the slots that it has used.
        sliced = sliced_experiment(bench, tmp_path_factory.mktemp("slices"))
        warm_up = trial_warm_up(experiment_on(cluster), sys.executable)
        with bench.launcher(warm_up=warm_up) as launcher:
            yield Bed(bench=bench, launcher=launcher, sliced=sliced)
        bench.check_clean()


def show(name: str, value: object) -> None:
    """Print a finding, which pytest keeps with the test's result."""
    sys.stdout.write(f"{name}: {value}\n")


def why_not_shaped(cluster: HostCluster) -> str | None:
    """Return why this kernel cannot limit the rate of links; None if it can."""
    try:
        cluster.shape(cluster.hosts[0], SHAPED_BITS_PER_S)
    except RuntimeError as error:
        return str(error)
    return None


def experiment_on(
    cluster: HostCluster,
    *,
    num_blocks: int = 8,
    num_slots: int = 1,
    gbit_per_s: float = FREE_GBIT_PER_S,
    second: str = "cpu",
    **others: object,
) -> Experiment:
    """Return an experiment that describes the hosts and the model to train."""
    text = TEXT
    values = {"BLOCKS": num_blocks, "SLOTS": num_slots, "GBIT": gbit_per_s, "SECOND": second}
    values |= {"BATCH": BATCH_SIZE, "RUNTIME": "deepspeed", "SPACE": "placement", **others}
    for word, value in values.items():
        text = text.replace(word, str(value))
    hostfile = "".join(f"{host.address} slots={num_slots}\n" for host in cluster.hosts)
    return experiment_from(text, {"hostfile": hostfile})


def sliced_experiment(bench: Bench, folder: Path) -> Experiment:
    """Profile slices on the hosts over SSH; return an experiment that plans with them."""
    cluster = bench.cluster
    for host in cluster.hosts:
        cluster.shape(host, None)
        cluster.limit_cpu(host, CORES)
    hostfile = "".join(f"{host.address} slots=1\n" for host in cluster.hosts)
    (folder / "hostfile").write_text(hostfile, encoding="utf-8")
    path = folder / "e.yaml"
    path.write_text(LONG_TEXT, encoding="utf-8")
    experiment = load_unprofiled(path)
    profile = ProfileFolder(folder / "profile", experiment.model, experiment.precision)
    settings = Settings(
        seconds=300.0,
        make_host=lambda name: SshHost(name, bench.ssh),
        say=lambda _line: None,
    )
    parts = profile_parts(experiment, is_local=False, token_slices=True)
    reports = measure(experiment, parts, profile, settings)
    assert [(report.num_missing, report.problem) for report in reports] == [(0, None)] * 2
    profile.write(
        slice_files(profile.records, experiment, LONG_GRANULARITY, {"cpu": parts[0].layers})
    )
    return load_experiment(path)


def strategy(
    bounds: tuple[int, ...], placement: tuple[int, ...], *, dp: int = 1, size: int
) -> Strategy:
    candidate = Candidate(
        options=StageOptions(tp=1, dp=dp),
        pp=len(bounds) - 1,
        micro_batch_size=size,
        num_micro_batches=BATCH_SIZE // (dp * size),
    )
    return Strategy.uniform(candidate, bounds, placement)


def is_settled(times: Sequence[float]) -> bool:
    """Return whether two of three trials agree; one of these two is the median then."""
    return any(high <= MOST_APART * low for low, high in pairwise(sorted(times)))


def predicted_s(experiment: Experiment, strategies: Mapping[str, Strategy]) -> Times:
    model = CostModel(experiment=experiment)
    return {name: model.estimate(chosen).iteration_time_s for name, chosen in strategies.items()}


def planned(experiment: Experiment, like: Strategy) -> Strategy:
    """Return the planner's cuts and placement for the degrees of a strategy."""
    found = AmpRayPlanner(experiment=experiment).plan(candidate_of(like))
    assert isinstance(found, Estimate)
    return found.strategy


def test_data_parallel_suits_fast_links_and_the_pipeline_slow_ones(bed: Bed) -> None:
    # Both train micro-batches of four samples on one rank per host.
    strategies = {
        "data parallel": strategy((0, 11), (0, 1), dp=2, size=4),
        "pipeline": strategy((0, 5, 11), (0, 1), size=4),
    }
    hosts = bed.bench.cluster
    free = Setting(experiment=experiment_on(hosts), bits_per_s=None)
    shaped = Setting(
        experiment=experiment_on(hosts, gbit_per_s=SHAPED_GBIT_PER_S),
        bits_per_s=SHAPED_BITS_PER_S,
    )
    fast, slow = bed.compare(strategies, free, shaped)
    show("links as fast as they are", fast)
    show("links of 200 Mbit/s", slow)
    ratios = [links.ratio("data parallel", "pipeline") for links in (fast, slow)]
    show("data parallel against pipeline, on both", ratios)
    # The model's choice is right in both settings, although links without a limit are only as fast
    # as this machine's cores.
    assert fast.predicted_ratio("pipeline", "data parallel") > 1
    assert ratios[0] < 1.25
    assert slow.predicted_ratio("data parallel", "pipeline") > 1
    assert ratios[1] > 2
    assert ratios[1] > 2 * ratios[0]


def test_over_slow_links_pipelines_and_not_replicas_belong(bed: Bed) -> None:
    experiment = experiment_on(bed.bench.cluster, num_slots=2, gbit_per_s=SHAPED_GBIT_PER_S)
    # Devices 0 and 1 belong to the first host. The ranks of the first stage's replicas come first,
    # then those of the second stage.
    replicas = strategy((0, 5, 11), (0, 2, 1, 3), dp=2, size=2)
    pipelines = strategy((0, 5, 11), (0, 1, 2, 3), dp=2, size=2)
    (found,) = bed.compare(
        {"replicas": replicas, "pipelines": pipelines},
        Setting(experiment=experiment, bits_per_s=SHAPED_BITS_PER_S),
    )
    show("across hosts", found)
    show("replicas against pipelines", found.ratio("replicas", "pipelines"))
    assert found.ratio("replicas", "pipelines") > 2
    assert found.predicted_ratio("replicas", "pipelines") > 1
    node_of_rank = [device // 2 for device in planned(experiment, replicas).placement]
    assert node_of_rank in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_slow_host_is_best_given_fewer_layers(bed: Bed) -> None:
    experiment = experiment_on(bed.bench.cluster, num_blocks=10, second=SLOW_DEVICE)
    # The first stage has the embedding, the last stage the norm and the head.
    even = strategy((0, 6, 13), (0, 1), size=1)
    uneven = strategy((0, 8, 13), (0, 1), size=1)
    plan = planned(experiment, even)
    strategies = {"5:5": even, "7:3": uneven}
    if plan not in strategies.values():
        strategies["plan"] = plan
    names = {chosen: name for name, chosen in strategies.items()}
    setting = Setting(experiment=experiment, bits_per_s=None, second_cores=SLOW_CORES)
    (found,) = bed.compare(strategies, setting)
    show("second host at half speed", found)
    show("5:5 against 7:3", found.ratio("5:5", "7:3"))
    show("plan", f"bounds {plan.bounds}, devices {plan.placement}, which is {names[plan]}")
    assert found.ratio("5:5", "7:3") > 1.1
    assert found.predicted_ratio("5:5", "7:3") > 1
    layers = dict(zip(plan.placement, (plan.bounds[1], 13 - plan.bounds[1]), strict=True))
    assert layers[1] < layers[0]
    assert found.ratio("5:5", names[plan]) > 1.1
    assert found.predicted_ratio("5:5", names[plan]) > 1


def test_uneven_shares_beat_the_best_grid_on_hosts_of_unequal_speed(bed: Bed) -> None:
    # Cuts between two blocks cannot give a host twice the work of the other; samples can.
    experiments = {
        space: experiment_on(
            bed.bench.cluster,
            num_blocks=2,
            second=SLOW_DEVICE,
            SPACE=space,
            BATCH=24,
            RUNTIME="torch",
        )
        for space in ("placement", "heterogeneous")
    }
    plans = {
        space: plan_experiment(given, progress=lambda *_: None).ranking.best
        for space, given in experiments.items()
    }
    strategies = {space: plan.strategy for space, plan in plans.items() if plan is not None}
    assert strategies["placement"].is_uniform
    (stage,) = strategies["heterogeneous"].stages
    assert stage.shares
    assert stage.shares[0] > stage.shares[1]
    # Both experiments describe the same hosts, and runtime torch launches both plans.
    setting = Setting(
        experiment=experiments["heterogeneous"], bits_per_s=None, second_cores=SLOW_CORES
    )
    (found,) = bed.compare(strategies, setting)
    measured = found.ratio("placement", "heterogeneous")
    predicted = found.predicted_ratio("placement", "heterogeneous")
    show("best grid and uneven shares", found)
    show("shares", stage.shares)
    show("grid against shares, measured and predicted", (measured, predicted))
    assert predicted > 1.2
    assert measured > 1
    assert measured == pytest.approx(predicted, rel=MOST_OFF)


def test_planned_slices_of_long_sequences_beat_whole_ones(bed: Bed) -> None:
    # One sequence per step: if it is not sliced, only one host works at a time.
    sliced = bed.sliced
    whole = replace(sliced, limits=replace(sliced.limits, token_slices=False))
    plans = {
        name: plan_experiment(given, progress=lambda *_: None).ranking.best
        for name, given in (("sliced", sliced), ("whole", whole))
    }
    strategies = {name: plan.strategy for name, plan in plans.items() if plan is not None}
    (found,) = bed.compare(strategies, Setting(experiment=sliced, bits_per_s=None))
    show("one long sequence per step", found)
    show("slices", strategies["sliced"].token_slices)
    show("whole against sliced", found.ratio("whole", "sliced"))
    assert not strategies["whole"].token_slices
    assert len(strategies["sliced"].token_slices[0][1]) > 1
    assert found.predicted_ratio("whole", "sliced") > 1
    assert found.ratio("whole", "sliced") > 1

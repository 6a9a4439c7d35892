"""An experiment: everything that is given, as values."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from amp_ray.clusters.cluster import Cluster
from amp_ray.clusters.constants import Constants, Uncertainty
from amp_ray.errors import Where
from amp_ray.inputs.own_program import OwnProgram
from amp_ray.inputs.profile import Profile
from amp_ray.inputs.ssh_settings import SshSettings
from amp_ray.inputs.yaml_text import SourceLines
from amp_ray.models.model import Model
from amp_ray.runtimes.traits import RuntimeTraits
from amp_ray.strategies.candidate import StageOptions
from amp_ray.strategies.recompute import Recompute
from amp_ray.strategies.zero import AUTO_STAGE, AUTO_ZERO, MOST_ZERO_STAGE, Zero
from amp_ray.units import Precision

Space = Literal["uniform", "placement", "heterogeneous", "operator"]
"""Which strategies are looked at: one grid on devices in order, the grid on any devices, stages
that each have their own device group, tp and dp, or such stages cut between operators."""


Objective = Literal["time", "cost", "time-cost"]
"""What is best: the least time, the least money, or whatever no other strategy beats in both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What the user excludes from the search: the keys of `SearchSection`, but for the space."""

    min_tp: int = 1
    max_tp: int | None = None
    max_pp: int | None = None
    max_dp: int | None = None
    max_ep: int | None = None
    micro_batch_sizes: tuple[int, ...] | None = None
    tp_across_nodes: bool = False
    launchable: bool = False
    idle_devices: bool | None = None
    max_cost_per_iteration: float | None = None
    min_tokens_per_s: float | None = None
    batch_tolerance: float = 0.0
    token_slices: bool = False
    slice_granularity: int | None = None
    per_operator: bool = False
    virtual_stages: tuple[int, ...] = (1,)
    max_cp: int = 1
    first_node_counts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSettings:
    """How strategies are measured: the keys of `TrialsSection`.

    ``host_groups`` has the names of the hosts of every group; the first group is the cluster that
    is planned for.
    """

    backend: Literal["ssh", "local"]
    budget: int
    num_steps: int
    num_warmup_steps: int
    timeout_s: float
    ssh: SshSettings = field(default_factory=SshSettings)
    launcher: Literal["agent", "deepspeed"] = "agent"
    warm: bool = True
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    host_groups: tuple[tuple[str, ...], ...] = ()
    program: OwnProgram | None = None


NO_SOURCE: Final = SourceLines(file="experiment")
"""Of an experiment that was built from values."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experiment:
    """What is to be planned: a model on a cluster under a runtime.

    Args:
        global_batch_size: Samples per optimizer step.
        sequence_parallel: Whether tensor-parallel ranks divide tokens too, where they can.
        planner: By whose predictions commands go that name no other.
        tokens: To train on in all, where the file tells it.
        uncertainty: Of the constants, where trials have told some of them; None for the priors.
        names_hosts: Whether a hostfile names the nodes.
        zero_stage: 0 to 3, or `AUTO_STAGE` for the search to choose.
        shard_ranks: Data-parallel ranks that share; 0 where that is left out, which means all of
            them, or what the search chooses.
        reshard_after_forward: Whether weights are gathered again for the backward pass; None where
            that is left out: without a pipeline they are.
        source: Where all this stands in its file, for mistakes found later.
    """

    name: str
    model: Model
    cluster: Cluster
    profile: Profile
    constants: Constants
    traits: RuntimeTraits
    precision: Precision
    optimizer: str
    zero_stage: int
    recompute: Recompute
    global_batch_size: int
    limits: SearchLimits
    trials: TrialSettings
    sequence_parallel: bool = False
    space: Space = "uniform"
    planner: str = "amp-ray"
    objective: Objective = "time"
    tokens: float | None = None
    uncertainty: Uncertainty | None = None
    names_hosts: bool = True
    shard_ranks: int = 0
    reshard_after_forward: bool | None = None
    source: SourceLines = NO_SOURCE

    @property
    def may_idle(self) -> bool:
        """Whether strategies may leave devices idle; no groups then span nodes, no slices."""
        chosen = self.limits.idle_devices
        allowed = self.space != "uniform" if chosen is None else chosen
        return allowed and not (self.limits.tp_across_nodes or self.limits.token_slices)

    def stage_options(self, tp: int, dp: int, cp: int = 1) -> StageOptions:
        """Return the options of stages of such degrees, with all that the experiment says."""
        divides = tp > 1 and self.model.shape.divides_tokens(tp * cp)
        return StageOptions(
            tp=tp,
            dp=dp,
            recompute=self.recompute,
            sequence_parallel=self.sequence_parallel and divides,
            cp=cp,
        )

    @property
    def counts_money(self) -> bool:
        """Whether what a strategy costs matters."""
        return self.objective != "time" or self.limits.max_cost_per_iteration is not None

    @property
    def is_trained(self) -> bool:
        """Whether a training program is known for the model: ours, or one of the user's."""
        return self.model.shape.is_trained or self.trials.program is not None

    def zero(self, pp: int) -> Zero:
        """Return what data-parallel ranks share out in so many stages, or that it is to be chosen.

        A pipeline would gather weights for every micro-batch anew, so there they stay by default.
        """
        if self.zero_stage == AUTO_STAGE:
            return AUTO_ZERO
        keeps = pp > 1 if self.reshard_after_forward is None else not self.reshard_after_forward
        return Zero(
            stage=self.zero_stage,
            shard_ranks=self.shard_ranks,
            keeps_weights=keeps and self.zero_stage == MOST_ZERO_STAGE,
        )

    def where(self, *path: str | int) -> Where:
        """Return the place of a key in the file that the experiment was built from."""
        return self.source.where(*path)


def launchable_only(experiment: Experiment) -> Experiment:
    """Return an experiment whose search leaves out what the runtime cannot launch."""
    return replace(experiment, limits=replace(experiment.limits, launchable=True))

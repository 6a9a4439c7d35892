"""Limits of a search: each trades search time for better plans or tighter bounds."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """Limits of a search; larger ones examine more plans and take longer.

    With any limits, the result is the best of the examined plans, and lower bounds hold.
    """

    # Which candidates are planned
    max_uniform_candidates: int = 300
    """Uniform spaces up to this many candidates are planned whole; else bounds exclude some."""
    max_optional_devices: int = 1_000
    """Sum of the devices of all optional candidates; beyond it, only candidates with a low expected
    time are planned, which is not proven."""
    max_grid_devices: int = 256
    """The same limit for grids in a space with stage groups."""
    max_expected: int = 200
    """Grids whose expected time is computed, lowest bounds first."""
    expected_fraction: float = 0.75
    """Expected time of a candidate's best placement, divided by that of its best simple placement.
    Measured with 145 candidates on six clusters of 8 to 32 devices: at least 0.77 for candidates
    within 1.3 times the fastest, at least 0.53 for all. Tiny and very uneven clusters have less."""
    num_early: int = 40
    """Plans until which the time of the last wanted row falls fast, by 20 % on 1,024 devices."""
    max_improved: int = 4
    """Plans whose stages are reordered at the end: so many grids, and as many other pipelines."""

    # Variants of the experiment
    max_other_batches: int = 3
    """Other batches within ``batch_tolerance`` to plan for; each needs a separate search."""
    max_sub_clusters: int = 64
    """Parts of the cluster to plan for when cost is minimised; beyond, powers of two of nodes."""
    max_levelled_devices: int = 32
    """Largest cluster, in devices, for which plans are also made with its nodes made equal."""
    max_levelled_plans: int = 4
    """Plans for such a cluster that are scored on the real one, fastest first."""
    near_fraction: float = 0.1
    """For such a cluster, keep numbers of micro-batches whose best time is within this fraction of
    the overall best."""

    # Plans improved by simulation
    max_climbed_stages: int = 4_000
    """Stages simulated while the cuts of one plan are moved; one takes up to 20 us."""
    max_orders: int = 200
    """Orders of stages simulated for one plan: at most a tenth of a second on 32 devices."""
    max_climbed_orders: int = 3
    """Orders per round whose cuts are moved, fastest first."""
    max_swaps: int = 200
    """Swaps of replicas that are tried for one plan: at most a fifth of a second."""

    # Placement
    max_node_orders: int = 24
    """Orders of whole nodes that are tried first: all of up to four classes of equal nodes."""
    max_class_steps: int = 6_000
    """Ways to take units from one class of nodes, explored in about a tenth of a second."""
    max_distinct_cuts: int = 1_000
    """Different cuts after one stage; each is priced with all its matchings."""
    max_device_sets: int = 3_000
    """Different sets of devices of a stage; pricing them takes half a second."""
    max_matched_units: int = 4
    """Units of a stage up to which every matching with the next stage is priced (at most 24).
    Larger stages keep as much traffic as possible within nodes, which is best unless links differ
    by pair of nodes."""
    max_matchings: int = 8
    """Matchings to price for the traffic of larger stages between nodes."""
    max_options: int = 300_000
    """Options of one problem; building more takes about as long as solving them."""
    max_options_with_ends: int = 60_000
    """The same if states also include the nodes that both ends share, which multiplies states."""
    max_work_per_cap: int = 12_000_000
    """Options times possible ends of a stage: about 0.15 s per cap on the bottleneck."""
    max_placement_work: int = 60_000_000
    """The same summed over all caps of a candidate: half a second."""
    min_placement_caps: int = 3
    """Least number of caps on the bottleneck to try for the first cap on the step end."""
    max_leaders: int = 6
    """Placements that are simulated, best by the objective first."""

    # Stage groups
    max_groups_in_any_order: int = 600
    """Device groups up to which kinds may come in any order along the pipeline."""
    max_mixed_groups: int = 6_000
    """Device groups up to which a stage may mix kinds."""
    max_groups: int = 16_000
    """Device groups up to which a stage may take any number of devices of one kind; beyond, only
    multiples of a half, quarter or eighth of a node, or an equal part of one."""
    max_kinds: int = 6
    """Kinds of nodes to distinguish; each one doubles the number of orders."""
    max_splits: int = 16
    """Splits of a micro-batch between the pieces of a stage that small clusters offer."""
    max_counted_choices: int = 2_000
    """Choices above which a problem that counts stages is first solved with a few of them."""
    spare_fraction: float = 0.05
    """Then keep plans whose objective exceeds that of the first plan that fits by at most this
    fraction, because a simulated time may be that far below the objective."""
    few_neighbours: int = 10_000
    """Pairs of neighbouring groups to solve first, for a good early plan."""
    max_neighbours: int = 30_000
    """Largest number of pairs to solve; a joined problem has about as many options."""
    max_relaxed_boxes: int = 8
    """Ranges of step ends that are solved for the first bound."""
    max_boxes: int = 40
    """Ranges of step ends to solve; after these, the bound is the best proven so far."""
    max_met_plans: int = 100
    """Further plans of a joined problem to simulate beside the best one."""
    max_price_rounds: int = 3
    """Rounds of the search after simulations have raised prices."""
    max_climbed_plans: int = 2
    """Plans whose cuts are moved in the end, fastest first."""
    max_climbed_stages_of_groups: int = 1_000
    """Stages simulated for each of these plans."""
    max_moved_devices: int = 8_000
    """Devices of all plans that a local search simulates, half a second or more."""
    devices_of_plan: int = 16
    """Devices for which simulating takes as long as all that does not depend on them."""
    max_moved_starts: int = 8
    """Fastest plans from which this search begins."""
    max_moved_kinds: int = 8
    """Starts that take nodes in another order or have another number of stages, first moved by
    themselves."""
    max_kind_devices: int = 4_000
    """Devices of the plans simulated for all of them, then again for the better half, and so on."""
    near_moved_fraction: float = 0.1
    """Plans that are slower than the best one by at most this fraction are moved too."""
    near_climbed_fraction: float = 0.05
    """The same for the plans whose cuts are moved, which was seen to make one up to 6 % faster."""
    max_climbed_stages_of_moves: int = 100
    """Stages simulated while the cuts of a moved plan are moved."""

    # Token slices
    slice_granules: int = 32
    """Granules of a sequence, if the user sets no granule length."""
    slice_contexts: int = 9
    """Lengths of slices at which the price of a token of context is computed."""
    slice_rounds: int = 2
    """Rounds of choosing cuts for the slices, then slices for the cuts."""
    max_slice_steps: int = 40_000_000
    """Slices tried times stages, for unequal stages, before the search stops: a few seconds."""
    max_slice_cells: int = 1_000_000
    """Sequences squared times granules above which unequal stages do not try all slices."""


EFFORT: Final = SearchEffort()
"""The default limits."""

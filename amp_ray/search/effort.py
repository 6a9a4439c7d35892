"""How far a search looks: every limit that trades time for better plans or tighter bounds."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """What a search may spend: with larger limits it looks at more, and takes longer.

    Whatever the limits are, a plan is the best of what was looked at, and a bound holds.
    """

    # Which candidates are planned
    max_uniform_candidates: int = 300
    """Candidates of the uniform space that are all planned; of more, bounds leave out the slow."""
    max_optional_devices: int = 1_000
    """Devices of all optional candidates together, beyond which only candidates are planned that
    are expected to be fast, proven or not."""
    max_grid_devices: int = 256
    """The same for grids beside plans whose stages have device groups of their own."""
    max_expected: int = 200
    """Grids whose expected time is computed, those with the lowest bounds."""
    expected_fraction: float = 0.75
    """Expected time of the best placement, as a share of the best of a few simple ones. Of 145
    candidates on six clusters of 8 to 32 devices, those within 1.3 of the fastest took 0.77 and
    more, all 0.53 and more; tiny and very uneven clusters go below."""
    max_improved: int = 4
    """Fastest grids, and fastest other pipelines, whose stages are reordered in the end."""
    max_caps_of_infeasible: int = 4
    """Caps on the bottleneck of a candidate that cannot run: its cuts need not be proven best."""

    # Variants of the experiment
    max_other_batches: int = 3
    """Batches within ``batch_tolerance`` that are planned for; each is a search of its own."""
    max_sub_clusters: int = 64
    """Parts of the cluster that are planned for where money counts; of more, powers of two."""
    max_levelled_devices: int = 32
    """Devices up to which plans are also made for clusters with nodes made alike."""
    max_levelled_plans: int = 4
    """Plans for such a cluster that are scored on the real one, the fastest first."""
    near_fraction: float = 0.1
    """Numbers of micro-batches are tried on such clusters whose best plan is this near the best."""

    # Plans improved by simulation
    max_climbed_stages: int = 4_000
    """Stages simulated while the cuts of one plan are moved; one takes up to 20 us."""
    max_orders: int = 200
    """Orders of stages simulated for one plan: at most a tenth of a second on 32 devices."""
    max_climbed_orders: int = 3
    """Orders of each round whose cuts are moved, the fastest."""
    max_swaps: int = 200
    """Swaps of replicas that are tried for one plan: at most a fifth of a second."""

    # Placement
    max_node_orders: int = 24
    """Orders of whole nodes that are tried first: all of up to four classes of equal nodes."""
    max_class_steps: int = 6_000
    """Ways in which one class of nodes gives units, explored in about a tenth of a second."""
    max_distinct_cuts: int = 1_000
    """Different cuts after one stage, each of which is priced with all its matchings."""
    max_device_sets: int = 3_000
    """Different sets of devices of a stage: to price them takes half a second."""
    max_matched_units: int = 4
    """Units of a stage up to which every matching with the next stage is priced (at most 24);
    larger stages keep all they can within nodes, which is best unless pairs of nodes have links of
    their own."""
    max_matchings: int = 8
    """Ways to match what larger stages send between nodes."""
    max_options: int = 300_000
    """Options of one problem: to build more takes about as long as to solve them."""
    max_options_with_ends: int = 60_000
    """Options where states also tell which nodes both ends share, which takes many more."""
    max_work_per_cap: int = 12_000_000
    """Options times layers that a stage can end at: about 0.15 s per cap on the bottleneck."""
    max_placement_work: int = 60_000_000
    """The same summed over all caps of a candidate: half a second."""
    min_placement_caps: int = 3
    """Caps on the bottleneck for the first cap on the step end, whatever they cost."""
    max_leaders: int = 6
    """Placements that are simulated, the best by the objective first."""

    # Stage groups
    max_groups_in_any_order: int = 600
    """Device groups up to which kinds may alternate along the pipeline in any way."""
    max_mixed_groups: int = 6_000
    """Device groups up to which a stage may mix kinds."""
    max_groups: int = 16_000
    """Device groups up to which a stage may take any number of devices of one kind; beyond them it
    takes halves, quarters and eighths of a node at least, or an equal part of one."""
    max_kinds: int = 6
    """Kinds of nodes to distinguish: the number of their orders doubles with each."""
    max_splits: int = 16
    """Splits of a micro-batch between pieces of a stage that are all offered in small clusters."""
    max_counted_choices: int = 2_000
    """Choices from which a problem whose states count stages is first solved with few of them."""
    spare_fraction: float = 0.05
    """Share by which plans may then cost more than the first one that fits: a simulation may be as
    much below the objective."""
    few_neighbours: int = 10_000
    """Pairs of neighbouring groups that are solved first, to have a good plan."""
    max_neighbours: int = 30_000
    """Pairs that are solved at all; a joined problem has about as many options."""
    max_relaxed_boxes: int = 8
    """Ranges of step ends that are solved for the first bound."""
    max_boxes: int = 40
    """Ranges of step ends that are solved at once; then the bound is what is proven so far."""
    max_met_plans: int = 100
    """Plans beside the best one that a joined problem offers for simulation."""
    max_price_rounds: int = 3
    """Times that the search goes on after simulations have raised prices."""
    max_climbed_plans: int = 2
    """Plans whose cuts are moved in the end, the fastest first."""
    max_climbed_stages_of_groups: int = 1_000
    """Stages simulated for one of them."""

    # Bound on the time of stage groups
    exact_samples: int = 32
    """Samples of a rank up to which every number is timed."""
    samples_step: float = 1.05
    """Factor between the numbers of samples that are timed beyond."""
    exact_sizes: int = 16
    """Capacities of stages that count one by one."""
    sizes_step: float = 1.1
    """Factor between the larger ones, which are put together."""
    total_capacity: int = 64
    """Capacity of all devices together at least; more tells kinds better apart."""
    max_stages_behind: int = 4
    """Stages behind a stage that are counted; beyond them there may be as many as there can be."""
    max_bound_boxes: int = 4
    """Ranges of step ends that are solved for the bound."""

    # Token slices
    slice_granules: int = 32
    """Granules of a sequence where the user does not say how long one is."""
    slice_contexts: int = 9
    """Lengths of slices at which the price of a token of context is computed."""
    slice_rounds: int = 2
    """Choices of cuts for slices, and of slices for cuts."""
    max_slice_steps: int = 40_000_000
    """Slices tried times stages for unequal stages, before the bound has to do: a few seconds."""
    max_slice_cells: int = 1_000_000
    """Sequences twice times granules above which not all slices of unequal stages are tried."""


EFFORT: Final = SearchEffort()
"""The default."""

"""What would help a plan most: planned again with the change, instead of guessed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from amp_ray.runtime.variants import Variant, Variants
from amp_ray.spec.experiment import Experiment
from amp_ray.units import GIB

_RECOMPUTES: Final = ("none", "selective", "full", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change, and what a plan with it would bring."""

    what: str  # in words
    variant: Variant
    # Samples per second over those of today's best plan; None where one of both is not
    speedup: float | None

    def to_json(self) -> dict[str, Any]:
        """Return one entry of ``advice`` of ``explain --json``."""
        point = self.variant.to_json()
        return {
            "what": self.what,
            "set": point["set"],
            "speedup": self.speedup,
            "row": point["row"],
            "reason": point["reason"],
        }


def advise(
    variants: Variants,
    today: Variant,
    values: Mapping[str, Any],
    progress: Callable[[int, int], None],
) -> list[Advice]:
    """Plan again with each change that people consider; what helps most comes first.

    Args:
        variants: Plans the experiment with changes.
        today: What came of it as it is; some plan was looked for.
        values: The keys of the experiment.
        progress: Gets (changes planned, all changes).
    """
    assert today.planned is not None
    asked = list(_changes(values, today.planned.experiment))
    found = []
    for number, (what, changes) in enumerate(asked):
        progress(number, len(asked))
        variant = variants.plan(changes)
        rate, before = variant.samples_per_s, today.samples_per_s
        speedup = None if rate is None or before is None else rate / before
        found.append(Advice(what=what, variant=variant, speedup=speedup))
    return sorted(
        found,
        key=lambda each: (-(each.speedup or 0.0), -(each.variant.samples_per_s or 0.0), each.what),
    )


def _changes(
    values: Mapping[str, Any], experiment: Experiment
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Give changes of the file with their names."""
    nodes = values["cluster"]["nodes"]
    if len(experiment.cluster.nodes) > 1:
        yield from _faster(nodes, "inter", "between nodes")
    if max(node["slots"] for node in nodes) > 1:
        yield from _faster(nodes, "intra", "within nodes")
    ends = accumulate((node.get("count", 1) for node in nodes), initial=0)
    known = [experiment.cluster.nodes[first].device.memory_bytes for first, _ in pairwise(ends)]
    yield (
        "half more memory on every device",
        tuple(
            f"cluster.nodes.{index}.memory_gib={1.5 * memory_bytes / GIB:.6g}"
            for index, memory_bytes in enumerate(known)
        ),
    )
    hosts = ("cluster.hostfile=",) if values["cluster"].get("hostfile") else ()
    for index, node in enumerate(nodes):
        count = node.get("count", 1)
        name = node["device"] if isinstance(node["device"], str) else node["device"]["name"]
        more = f"cluster.nodes.{index}.count={count + 1}"
        yield f"one more node of {node['slots']} x {name}", (*hosts, more)
    batch = experiment.global_batch_size
    yield "twice the batch", (f"global_batch_size={2 * batch}",)
    for kind in _RECOMPUTES:
        if kind != experiment.recompute.kind:
            yield f"recompute {kind}", (f"recompute={kind}",)
    if experiment.zero_stage == 0:
        yield "optimizer sharded over replicas (ZeRO-1)", ("zero_stage=1",)


def _faster(
    nodes: Sequence[Mapping[str, Any]], key: str, where: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Double a rate of all nodes; nothing where one is a table or left out."""
    changes = []
    for index, node in enumerate(nodes):
        names = [name for name in (f"{key}_gbit_per_s", f"{key}_gbyte_per_s") if name in node]
        if not names or not isinstance(node[names[0]], int | float):
            return
        changes.append(f"cluster.nodes.{index}.{names[0]}={2 * node[names[0]]:.6g}")
    yield f"twice the rate {where}", tuple(changes)

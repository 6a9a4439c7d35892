"""Experiments as plain values, strategies as short STRATEGY records: what golden files keep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.experiment_file import build_experiment
from amp_ray.inputs.strategies import strategies_of, strategy_to_json
from amp_ray.inputs.yaml_text import Document, parse_yaml
from amp_ray.runtime.files import ExperimentFiles
from amp_ray.strategies.strategy import Strategy

REPOSITORY: Final = Path(__file__).resolve().parents[3]
FILES: Final = REPOSITORY / "tests" / "net" / "files"
"""Folder to which paths in a document are relative."""

Values = Mapping[str, Any]


def values_of(text: str, **changes: object) -> dict[str, Any]:
    """Return the keys of an experiment file, some of them changed."""
    return {**parse_yaml(text, file="golden").values, **changes}


def experiment_of(values: Values) -> Experiment:
    """Build the experiment of a document."""
    document = Document(file="golden", values=values)
    return build_experiment(document, ExperimentFiles(base=FILES))


def short_record(strategy: Strategy, experiment: Experiment) -> dict[str, Any]:
    """Return a STRATEGY object without what its reader adds.

    Ranks on the devices in order need no placement; the devices of a stage follow from its degrees.
    """
    record = strategy_to_json(strategy, experiment.cluster)
    if strategy.placement == tuple(range(experiment.cluster.num_devices)):
        del record["placement"]
    for stage in record.get("stages", ()):
        del stage["devices"]
    return record


def strategy_of(record: Values, experiment: Experiment) -> Strategy:
    """Read a short record; raise an error if it does not fit the experiment."""
    [entry] = strategies_of([record], file="golden", experiment=experiment)
    assert entry.strategy is not None
    return entry.strategy

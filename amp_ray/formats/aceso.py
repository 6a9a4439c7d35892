"""Aceso's profiles as profiles of ours: its operators, and their sums over the model's layers."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from amp_ray.formats.aceso_profile import parse_aceso_profile
from amp_ray.spec.device import Device
from amp_ray.spec.model import Model
from amp_ray.spec.operator_profile import FloatArray, OperatorProfile
from amp_ray.spec.profile import Anchor, DeviceTable, Profile


def read_aceso_profile(
    files: Mapping[str, str], *, folder: str, profiled: str, model: Model, devices: Iterable[Device]
) -> Profile:
    """Read a folder of Aceso's profile files, given as text by name, for an experiment.

    Args:
        files: All CSV files of the folder.
        folder: Its name in messages.
        profiled: Name of the model in it, such as ``gpt_1_3B``.
        model: The experiment's; its number of blocks is that of the chain of operators.
        devices: All taken to be the one type that was measured.

    Raises:
        InputError: If the folder lacks the model or a needed file, or a file is wrong.
    """
    operators = parse_aceso_profile(
        files, folder=folder, model=profiled, num_layers=model.shape.num_layers
    )
    return aceso_profile(operators, model=model, devices=devices)


def aceso_profile(
    operators: OperatorProfile, *, model: Model, devices: Iterable[Device]
) -> Profile:
    """Return measured operators with a table of layers per device.

    Times include tensor-parallel all-reduces. Where the model's layers are not those of the chain
    of operators, or an operator of a table failed, there is no such table.
    """
    fits = len(operators.layer_bounds) == model.num_layers + 1
    table: DeviceTable = {
        (key.tp, key.micro_batch_size): Anchor(
            forward_s=_layers(found.forward_s, operators),
            backward_s=_layers(found.backward_s, operators),
        )
        for key, found in sorted(operators.tables.items())
        if fits and key.algorithm == 0 and found.measured.all()
    }
    return Profile(
        source=operators.source,
        tables={device.name: table for device in devices} if table else {},
        includes_all_reduces=True,
        operators=operators,
    )


def _layers(values: FloatArray, operators: OperatorProfile) -> FloatArray:
    """Add up the operators of each layer."""
    return np.array([values[first:end].sum() for first, end in pairwise(operators.layer_bounds)])

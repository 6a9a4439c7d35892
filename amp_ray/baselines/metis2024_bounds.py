"""What no plan of Metis (2024) with one number of micro-batches can undercut: work over rate."""

import math

import numpy as np

from amp_ray.baselines.metis2024_menu import Menu
from amp_ray.partition.arrays import FloatArray


def work_bound_s(menu: Menu) -> float:
    """Bound every plan of a menu from below.

    Devices have weights that add up to one. A stage of weight ``U`` that takes ``t`` brings
    ``sum(t) + (B - 1) max(t)`` at least ``t + (B - 1) U t``, because the weights of all stages add
    up to one, too. So a layer costs at least what it does in the group where that is least.

    Args:
        menu: The groups that can run a micro-batch.

    Returns:
        Seconds; infinite where no group can be the last.
    """
    space = menu.space
    is_last = space.graph.from_state[space.variants.edge[menu.variant]] == 0
    if not is_last.any():
        return math.inf
    weight = space.devices[menu.variant] @ _weights(menu)
    charged_s = (1 + (menu.num_micro_batches - 1) * weight)[:, None] * menu.layer_s
    return float(charged_s.min(axis=0).sum() + menu.rest_s[is_last].min()) + outside_s(menu)


def outside_s(menu: Menu) -> float:
    """Return what every plan takes outside of stages: making micro-batches."""
    return menu.space.setting.whole.batch_generator_s * menu.num_micro_batches


def _weights(menu: Menu) -> FloatArray:
    """Return the share of one device of each type in the speed of all, at its best.

    Any weights bound; these are good ones.
    """
    devices = menu.space.devices[menu.variant]
    size, total_s = devices.sum(axis=1), menu.layer_s.sum(axis=1)
    rate = 1 / np.maximum(size * total_s, np.finfo(np.float64).tiny)
    alone = devices == size[:, None]
    speed = np.where(alone, rate[:, None], 0.0).max(axis=0)
    speed = np.where(speed > 0, speed, max(speed.max(), 1.0))
    weights: FloatArray = speed / (speed @ menu.space.counts)
    return weights

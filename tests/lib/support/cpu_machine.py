"""A CPU as the machine that experiments/gpu_measurements.py measures; its peaks are made up."""

from typing import Any

import torch

from amp_ray.training.clock import HostClock


class CpuMachine:
    """This machine's CPU, without counts of memory."""

    @property
    def device(self) -> Any:  # noqa: ANN401 - torch's
        return torch.device("cpu")

    def clock(self) -> HostClock:
        return HostClock()

    def begin_peak(self) -> None:
        pass

    def peak(self) -> dict[str, int]:
        return {"reserved": 1 << 20, "allocated": 1 << 19, "outside": 1 << 10}

    def facts(self) -> dict[str, str | None]:
        return {"name": "a CPU [x]"}

"""Set-up of a rank's device and of the trial's process group with time limits."""

import ctypes
import datetime as dt
import os
from typing import Final

import torch
from torch.distributed import distributed_c10d

from amp_ray.strategies.zero import SHARDED_GRADIENTS
from amp_ray.training.job import Job, UnfitError

FP8_CAPABILITY: Final = (8, 9)
"""Compute capability of the first GPUs with fp8 products."""

_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 1 << 20
"""mallopt(3) option: freed allocations of at least this size are returned to the system."""

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def use_cuda(job: Job) -> bool:
    """Return whether the trial runs on GPUs; refuse CUDA without one, and fp16 on a CPU."""
    available = bool(torch.cuda.is_available())
    if job.device == "cuda" and not available:
        raise UnfitError("job.device is cuda, but torch finds no GPU here; use cpu or auto")
    cuda = available and job.device != "cpu"
    if job.precision == "fp16" and not cuda:
        raise UnfitError("precision fp16 needs a GPU with this runtime; use bf16 or fp32 on a CPU")
    if job.precision == "fp8" and not (cuda and _has_fp8()):
        device = torch.cuda.get_device_name() if cuda else "a CPU"
        raise UnfitError(
            "precision fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, Hopper), "
            f"found {device}; use bf16"
        )
    return cuda


def _has_fp8() -> bool:
    """Return whether this rank's GPU supports fp8 matrix products in NVIDIA's formats."""
    capability = torch.cuda.get_device_capability(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.version.hip is None and capability >= FP8_CAPABILITY


def connect(job: Job, *, cuda: bool) -> None:
    """Join the trial's process group, described by `LAUNCHER_VARIABLES`; every rank calls it."""
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        message = f"the environment lacks {', '.join(missing)}; a launcher sets them for every rank"
        raise UnfitError(message)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != job.grid.num_ranks:
        grid = job.grid
        raise UnfitError(
            f"tp {grid.tp} x cp {grid.cp} x pp {grid.pp} x dp {grid.dp} = {grid.num_ranks} ranks, "
            f"but WORLD_SIZE is {world_size}"
        )
    _prepare_device(job, cuda=cuda)
    limit = dt.timedelta(seconds=job.communication_timeout_s)
    # DeepSpeed creates some groups without a time limit; these two defaults limit them.
    distributed_c10d.default_pg_timeout = limit
    distributed_c10d.default_pg_nccl_timeout = limit
    backend = "nccl" if cuda else "gloo"
    arrival = dt.timedelta(seconds=job.init_timeout_s)
    store, _, _ = next(torch.distributed.rendezvous("env://", rank, world_size, timeout=arrival))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None
    torch.distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device
    )


def _prepare_device(job: Job, *, cuda: bool) -> None:
    """Select this rank's GPU, or set its number of CPU threads."""
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(job.num_threads)
        if job.zero_stage >= SHARDED_GRADIENTS:
            _return_freed_memory()


def _return_freed_memory() -> None:
    """Make the C library return large freed tensors to the system, if it supports that.

    By default, the library keeps them for later allocations, and gathered weights would accumulate.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)

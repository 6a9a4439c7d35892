"""Run exports through the parsers of the programs that are installed beside this interpreter.

It needs only the standard library and the programs, so that it runs in their own environment:
``python tests/real_parsers.py < CASES``, one JSON object with ``program``, ``name``, ``words``,
``variables``, ``files`` and ``world_size`` a line. CUDA, Triton and Transformer Engine are stubbed.
It prints one JSON object: releases, programs that are not installed, and refusals by program.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]
PACKAGES = {
    "megatron-lm": "megatron-core",
    "megatron-bridge": "megatron-bridge",
    "torchtitan": "torchtitan",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "nanotron": "nanotron",
}
FUSED = ("fused_permute", "fused_unpermute", "fused_sort_chunks_by_index")
DEVICE = types.SimpleNamespace(
    major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30, name="H100"
)


def stub_devices() -> None:
    """Let programs see one H100 per process, as far as their parsers ask."""
    torch = import_module("torch")
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 8
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)
    torch.cuda.get_device_properties = lambda *_, **__: DEVICE


def megatron_checker() -> Callable[[Case], None]:
    """Return Megatron-LM's parser, its validation, and the configuration of its transformer."""
    arguments = import_module("megatron.training.arguments")
    for name in ("megatron.training.arguments", "megatron.core.transformer.transformer_config"):
        vars(import_module(name))["is_te_min_version"] = lambda *_, **__: True
    rope = vars(import_module("megatron.core.models.common.embeddings.rope_utils"))
    rope["fused_apply_rotary_pos_emb"] = rope["fused_apply_rotary_pos_emb_thd"] = object()
    moe = vars(import_module("megatron.core.transformer.moe.moe_utils"))
    moe |= {f"{name}{suffix}": object() for name in FUSED for suffix in ("", "_with_probs")}
    config_of = import_module("megatron.training.argument_utils").core_transformer_config_from_args

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    arguments.add_megatron_arguments(parser)

    def check(case: Case) -> None:
        environment = {"RANK": "0", "WORLD_SIZE": str(case["world_size"]), **case["variables"]}
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(environment)
        options = parser.parse_args([*case["words"], "--mock-data"])
        for name, value in (("rank", "0"), ("world_size", environment["WORLD_SIZE"])):
            setattr(options, name, int(value))
        arguments.validate_args(options)
        config_of(options)

    return check


def titan_checker() -> Callable[[Case], None]:
    """Return torchtitan's loader of a configuration, with its mesh of ranks."""
    manager = import_module("torchtitan.config.manager").ConfigManager
    dims = import_module("torchtitan.distributed.parallel_dims").ParallelDims

    def check(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            [(name, text)] = case["files"].items()
            Path(folder, name).write_text(text, encoding="utf-8")
            module = name.removesuffix(".py")
            sys.path.insert(0, folder)
            sys.modules.pop(module, None)
            try:
                config = manager().parse_args(["--module", module, "--config", "planned"])
            finally:
                sys.path.remove(folder)
        parallel = config.parallelism
        dims(
            dp_replicate=parallel.data_parallel_replicate_degree,
            dp_shard=parallel.data_parallel_shard_degree,
            cp=parallel.context_parallel_degree,
            tp=parallel.tensor_parallel_degree,
            pp=parallel.pipeline_parallel_degree,
            ep=parallel.expert_parallel_degree,
            world_size=case["world_size"],
        )

    return check


CHECKERS: Mapping[str, Callable[[], Callable[[Case], None]]] = {
    "megatron-lm": megatron_checker,
    "torchtitan": titan_checker,
}


def release(program: str) -> str | None:
    """Return the installed release of a program; None if it is not installed."""
    try:
        return metadata.version(PACKAGES[program])
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Check every case of the standard input."""
    cases: dict[str, list[Case]] = {}
    for line in sys.stdin:
        case = json.loads(line)
        cases.setdefault(case["program"], []).append(case)
    result: dict[str, Any] = {}
    for program, of_program in cases.items():
        installed = release(program)
        result[program] = {"release": installed, "cases": len(of_program), "refused": {}}
        if installed is None:
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stub_devices()
            try:
                check = CHECKERS[program]()
            except Exception as error:  # noqa: BLE001 - a program that cannot be imported is told
                result[program]["release"] = None
                result[program]["error"] = f"{type(error).__name__}: {error}"
                continue
            for case in of_program:
                try:
                    check(case)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - their refusals
                    refused = result[program]["refused"]
                    message = f"{type(error).__name__}: {error}"[:400]
                    refused.setdefault(message, []).append(case["name"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()

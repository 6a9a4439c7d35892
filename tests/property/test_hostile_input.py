"""Every reader of a user's files refuses hostile bytes with a place, soon, and in little memory.

A case is a correct file that was cut or mixed with pieces that are difficult to read, or any bytes.
"""

import ast
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_ray
from amp_ray.api.differences import _load as load_compared
from amp_ray.calibration.fingerprint import fingerprint
from amp_ray.errors import HostError, InputError
from amp_ray.inputs.hostfile import SshTarget
from amp_ray.inputs.profiles.nccl_tests import parse_nccl_tests
from amp_ray.inputs.profiles.torch_trace import MOST_CHARACTERS, read_trace
from amp_ray.planners.aceso2024.plan_file import aceso_plan_text
from amp_ray.planners.metis2024.inputs import metis_cluster, parse_metis_clusterfile
from amp_ray.planners.metis2024.profile import parse_metis_profile
from amp_ray.planners.operators.strategy import operator_strategy
from amp_ray.report.page import study_record
from amp_ray.runtime.files import (
    load_experiment,
    load_observations,
    load_slice_table,
    load_strategies,
    read_text,
    read_texts,
    with_calibration,
)
from amp_ray.runtime.first_file import hosts_of
from amp_ray.runtime.hosts.ssh_config import SshConfig
from amp_ray.runtime.launch.trial_folder import timeline_file
from amp_ray.runtime.planning import _load_strategy as load_plan
from amp_ray.runtime.profile.links import links_of_tests, links_yaml
from amp_ray.runtime.profile.profiling import ProfileFolder
from amp_ray.runtime.study.reading import read_study
from amp_ray.trials.profile.records import heading
from support.aceso import aceso_experiment, aceso_files
from support.bounded import bounded
from support.experiments import SMALL, small_experiment
from support.nccl_log import nccl_log

NUM_CASES: Final = max(500, settings().max_examples)
"""Number of cases of all readers: 500 by default, 10,000 in ``make fuzz``."""


EXPERIMENT: Final = small_experiment()

BOMB: Final = b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 9)
)

PIECES: Final = (
    b"",
    b"\0",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\r",
    b"\t",
    b"\x1b[2J",
    "\u2028".encode(),
    b"[" * 5000,
    b"{" * 5000,
    b'{"a":' * 5000,
    b"- " * 5000,
    b"? " * 5000,
    b"&a [*a]",
    b"*a",
    b"!!python/object:os.system x",
    BOMB,
    b"<<: *a",
    b'"',
    b"'",
    b"#",
    b",",
    b":",
    b"=",
    b"-",
    b"NaN",
    b".nan",
    b"1e999",
    b"-1",
    b"0",
    b"1e-320",
    b"9" * 400,
    b"9" * 5000,
    b"999999999",
    b"null",
    b"true",
    b"../../etc/passwd",
    b"a" * 200_000,
    b"\n" * 20_000,
    b"," * 20_000,
    b"x 1\n" * 5000,
    b"True",
    b"0x" + b"f" * 5000,
    b"1.5",
    b"A=xx\n" + b"A=$A$A\n" * 40,
    b"(t*9999)*9999",
    b"${A:-" * 5000,
    b"--global-batch-size",
    b"[[1]]",
    b"{}",
    "\U0001f600".encode() * 5000,
)

CONFIG: Final = json.dumps(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 32,
        "vocab_size": 128,
    }
).encode()
WITH_CONFIG: Final = re.sub(r"model: [^}]*}", "model: {config: config.json}", SMALL)
DESCRIPTION: Final = b"num_layers: 9\nmodel: m\nprecision: fp16\nhardware: h\nversions: v\n"
TABLE: Final = b"layer,tp,micro_batch_size,forward_s\n" + b"".join(
    f"{layer},1,1,0.001\n".encode() for layer in range(9)
)
STRATEGIES: Final = (
    b"tp,pp,dp,micro_batch_size,bounds,measured_s,peak_memory_bytes\n1,1,4,1,0 9,.1,\n"
)
STRATEGY_OBJECTS: Final = json.dumps(
    [{"tp": 1, "pp": 1, "dp": 4, "micro_batch_size": 1, "num_micro_batches": 2, "bounds": [0, 9]}]
).encode()
CLUSTERFILE: Final = json.dumps(
    {"a": {"instance_type": "T4", "inter_bandwidth": 1, "intra_bandwidth": 1, "memory": 15}}
).encode()
METIS_PROFILE: Final = json.dumps(
    {
        "model": {"num_layers": 3, "parameters": {"parameters_per_layer_bytes": [1, 2, 3]}},
        "execution_time": {
            "forward_backward_time_ms": 9,
            "batch_generator_time_ms": 0.1,
            "optimizer_time_ms": 1,
            "layer_compute_total_ms": [1, 2, 1],
        },
        "execution_memory": {"layer_memory_total_mb": [1, 2, 3]},
    }
).encode()
CALIBRATION: Final = json.dumps(
    {
        "schema": 1,
        "kind": "calibration",
        "experiment": "x",
        "fingerprint": fingerprint(EXPERIMENT),
        "constants": [{"name": "gemm_scale", "prior": 1, "value": 1, "prior_sigma": 1, "sigma": 1}],
        "refused": [{"name": "host_scale", "reason": "no trial tells it"}],
        "time_error": 0.1,
        "memory_error": 0.1,
        "trials": [],
        "time_constants": ["gemm_scale"],
        "covariance": [[1]],
    }
).encode()


SCRIPT: Final = b"""TP=2
ARGS=(--tensor-model-parallel-size $TP --pipeline-model-parallel-size 2 --micro-batch-size 1)
torchrun pretrain_gpt.py ${ARGS[@]} --global-batch-size 8 --recompute-granularity selective \\
  --pipeline-model-parallel-layout "Et*3|(t)*3L" --use-distributed-optimizer
HOSTS=(node0 node1)
DEVICES=(0,1 0,1)
"""
TITAN_TOML: Final = b"""[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
data_parallel_shard_degree = 1
module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm"]]
[training]
local_batch_size = 1
[activation_checkpoint]
mode = "full"
"""
TITAN_PYTHON: Final = b"""
PARALLELISM = {"tensor_parallel_degree": 2, "fsdp_reshard_after_forward": "never"}
TRAINING = {"local_batch_size": 1, "global_batch_size": 8}
RECOMPUTE = "none"
"""
TITAN_FLAGS: Final = (
    b"torchrun -m torchtitan.train --parallelism.tensor-parallel-degree 2 "
    b"--training.local_batch_size=1"
)
DS_CONFIG: Final = json.dumps(
    {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 1e9},
    }
).encode()
SLICES: Final = json.dumps(
    {
        "batch": 2,
        "tokens": 8,
        "granularity": 4,
        "stages": 2,
        "layers": 1,
        "context": "fitted",
        "points": {
            "1_4_0": {"forward_mean": 1.0, "backward_mean": 2.0, "memory_mb": 1.0},
            "1_4_4": {"forward_mean": 1.5, "backward_mean": 2.0, "memory_mb": 1.0},
            "1_8_0": {"forward_mean": 2.0, "backward_mean": 2.0, "memory_mb": 1.0},
        },
        "communication": {"tokens": [4, 8], "seconds": [0.1, 0.2]},
    }
).encode()
RECORDS: Final = b"".join(
    json.dumps(record).encode() + b"\n"
    for record in (
        heading(EXPERIMENT.model, EXPERIMENT.precision),
        {
            "record": "layer",
            "devices": "T4",
            **dict.fromkeys(("tp", "micro_batch_size"), 1),
            **dict.fromkeys(("layer", "tokens", "context"), 0),
            **dict.fromkeys(("forward_s", "backward_s", "forward_launch_s"), 0.5),
            **dict.fromkeys(("backward_launch_s", "all_reduce_s", "spread_s"), 0.5),
            **dict.fromkeys(("repeats", "kept_bytes", "temporary_bytes"), 1),
        },
        {
            "record": "link",
            "devices": "T4",
            "scope": "intra",
            "what": "p2p",
            "num_ranks": 2,
            "bytes": 1024,
            "seconds": 0.5,
        },
        {"record": "hardware", "devices": "T4", "hardware": "h", "versions": "v", "date": "d"},
    )
)
ACESO: Final = aceso_experiment()
ACESO_FILES: Final = aceso_files()
ACESO_PLAN: Final = aceso_plan_text(
    operator_strategy(
        [[(2, 1, 0, False)] * 12, [(1, 2, 0, True)] * 17],
        samples_per_micro_batch=2,
        num_micro_batches=8,
    ),
    ACESO,
).encode()
STUDY_STRATEGY: Final = json.loads(STRATEGY_OBJECTS)[0]
STUDY_RESULT: Final = json.dumps(
    {
        "schema": 1,
        "experiment_file": "experiment.yaml",
        "ending_text": "it is over",
        "trials": [{"number": 0, "strategy": STUDY_STRATEGY, "outcome": "measured"}],
        "ranking": [{"feasible": True, "strategy": STUDY_STRATEGY, "iteration_time_s": 1.0}],
        "recommendation": {
            "strategy": STUDY_STRATEGY,
            "predicted_s": 1.0,
            "measured_s": 1.0,
            "reason": "best",
            "ties": [{"strategy": STUDY_STRATEGY, "time_s": 1.0, "measured": True}],
        },
        "certificate": {"text": "nothing is faster"},
        "calibration": {
            "trials": [
                {"strategy": STUDY_STRATEGY, "measured_s": measured_s, "before_s": 1, "after_s": 1}
                for measured_s in (1.0, None)
            ],
            "constants": [{"name": "gemm_scale", "prior": 1.0, "value": 1.1, "sigma": 0.1}],
        },
    }
).encode()


class Reader(NamedTuple):
    """A correct file, its name, and the function that reads it from a folder."""

    content: bytes
    name: str
    read: Callable[[Path], object]


def with_experiment(text: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "experiment.yaml").write_text(text, encoding="utf-8")
        return load_experiment(folder / "experiment.yaml")

    return read


def with_hostfile(folder: Path) -> object:
    (folder / "experiment.yaml").write_text(SMALL, encoding="utf-8")
    return load_experiment(folder / "experiment.yaml", folder / "hosts")


def with_profile(folder: Path) -> object:
    for name, content in (("profile.yaml", DESCRIPTION), ("T4.csv", TABLE)):
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
    text = SMALL + "profile: {source: table, path: .}\n"
    try:
        return with_experiment(text)(folder)
    finally:  # the experiment would be read as a YAML file of the profile, too
        (folder / "experiment.yaml").unlink()


def strategies(folder: Path) -> object:
    return load_strategies(folder / "strategies", EXPERIMENT)


def calibration(folder: Path) -> object:
    return [
        with_calibration(EXPERIMENT, folder / "calibration.json", transfer=transfer)
        for transfer in (False, True)
    ]


def metis_files(folder: Path) -> object:
    (folder / "hosts").touch()
    described = parse_metis_clusterfile(read_text(folder / "clusterfile.json"))
    return metis_cluster("a 4\n", described)


def metis_hostfile(folder: Path) -> object:
    described = parse_metis_clusterfile(CLUSTERFILE.decode())
    return metis_cluster(read_text(folder / "hosts"), described)


def slices(folder: Path) -> object:
    return load_slice_table(folder / "slices.json")


def first_hosts(folder: Path) -> object:
    return hosts_of(folder / "hosts")


def plan_before(folder: Path) -> object:
    return load_plan(folder / "plan.json", EXPERIMENT.cluster)


def compared(folder: Path) -> object:
    return load_compared(folder / "plan.json")


def observations(folder: Path) -> object:
    return load_observations(folder / "strategies", EXPERIMENT)


def records(folder: Path) -> object:
    name = "details/records.jsonl"
    (folder / "details").mkdir(exist_ok=True)
    (folder / "records.jsonl").rename(folder / name)
    return ProfileFolder(folder, EXPERIMENT.model, EXPERIMENT.precision).records


def aceso_plan(folder: Path) -> object:
    return load_strategies(folder / "strategies", ACESO)


def aceso_profile(folder: Path) -> object:
    files = {**ACESO_FILES, **read_texts(folder, (".csv",))}
    return aceso_experiment(files=files)


def study(folder: Path) -> object:
    (folder / "experiment.yaml").write_text(SMALL, encoding="utf-8")
    ended = read_study(folder)
    ended.strategy(None)
    return study_record(ended, source="study")


def studys_experiment(folder: Path) -> object:
    (folder / "result.json").write_bytes(STUDY_RESULT)
    return read_study(folder).strategy(1)


def ssh_config(folder: Path) -> object:
    config = SshConfig(str(folder / "config"))
    with suppress(HostError):  # an option that is not supported
        return config.lookup(SshTarget(host="a"))
    return None


def trace(folder: Path) -> object:
    text = read_text(folder / "trace.json", MOST_CHARACTERS)
    return read_trace(text, file="trace.json", num_layers=2)


def nccl_test(folder: Path) -> object:
    tests = parse_nccl_tests(read_text(folder / "nccl.log"), file="nccl.log", collective=None)
    return links_yaml(links_of_tests(tests, EXPERIMENT.constants))


def metis_profile(folder: Path) -> object:
    return parse_metis_profile(read_texts(folder, (".json",)), folder="metis")


THREAD: Final = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}

TRACE: Final = json.dumps(
    {
        "traceEvents": [
            *({"name": f"layer {layer}", "ts": 20 * layer, "dur": 10} | THREAD for layer in (0, 1)),
            THREAD | {"name": "aten::mm", "cat": "cpu_op", "ts": 2, "dur": 5},
        ]
    }
).encode()

NCCL_LOG: Final = nccl_log("all_reduce", ["a"] * 4, ((1024, 16.0), (2**20, 40.5))).encode()

READERS: Final = {
    "experiment": Reader(
        SMALL.encode(),
        "experiment.yaml",
        lambda folder: load_experiment(folder / "experiment.yaml"),
    ),
    "hostfile": Reader(b"a slots=2\nb slots=2  # old\n", "hosts", with_hostfile),
    "configuration": Reader(CONFIG, "config.json", with_experiment(WITH_CONFIG)),
    "profile": Reader(DESCRIPTION, "profile.yaml", with_profile),
    "table": Reader(TABLE, "T4.csv", with_profile),
    "strategies as CSV": Reader(STRATEGIES, "strategies", strategies),
    "strategies as JSON": Reader(STRATEGY_OBJECTS, "strategies", strategies),
    "calibration": Reader(CALIBRATION, "calibration.json", calibration),
    "Metis's cluster file": Reader(CLUSTERFILE, "clusterfile.json", metis_files),
    "Metis's hostfile": Reader(b"a 4\na slots=4\n", "hosts", metis_hostfile),
    "Metis's profile": Reader(METIS_PROFILE, "DeviceType.T4_tp1_bs1.json", metis_profile),
    "Megatron's script": Reader(SCRIPT, "strategies", strategies),
    "torchtitan's TOML": Reader(TITAN_TOML, "strategies", strategies),
    "torchtitan's Python": Reader(TITAN_PYTHON, "strategies", strategies),
    "torchtitan's flags": Reader(TITAN_FLAGS, "strategies", strategies),
    "DeepSpeed's configuration": Reader(DS_CONFIG, "strategies", strategies),
    "measured strategies": Reader(STRATEGIES, "strategies", observations),
    "slices": Reader(SLICES, "slices.json", slices),
    "ssh's configuration": Reader(b"Host a\n  Port 2222\n", "config", ssh_config),
    "a first file's hosts": Reader(b"a slots=2\nb slots=2\n", "hosts", first_hosts),
    "a plan before a loss": Reader(STUDY_RESULT, "plan.json", plan_before),
    "a compared plan": Reader(STUDY_RESULT, "plan.json", compared),
    "records of a profile": Reader(RECORDS, "records.jsonl", records),
    "a study's result": Reader(STUDY_RESULT, "result.json", study),
    "a study's experiment": Reader(SMALL.encode(), "experiment.yaml", studys_experiment),
    "a trace of PyTorch's profiler": Reader(TRACE, "trace.json", trace),
    "a log of nccl-tests": Reader(NCCL_LOG, "nccl.log", nccl_test),
    "Aceso's plan": Reader(ACESO_PLAN, "strategies", aceso_plan),
    **{
        f"Aceso's {name}": Reader(ACESO_FILES[name].encode(), name, aceso_profile)
        for name in (
            "gpt_tiny_mbs1_tp2_algo0.csv",
            "prim_gpt_tiny_all_reduce_2gpus.csv",
            "p2p_intra_node.csv",
        )
    },
}

READ_IN: Final = {
    "runtime.files.ExperimentFiles.text": ("hostfile", "configuration"),
    "runtime.files.ExperimentFiles.folder": ("profile", "table"),
    "runtime.files.ExperimentFiles.foreign_profile": (
        "Metis's profile",
        "Aceso's p2p_intra_node.csv",
    ),
    "runtime.files.document_of": ("experiment",),
    "runtime.files._strategies_of_file": (
        "strategies as CSV",
        "strategies as JSON",
        "Aceso's plan",
    ),
    "runtime.files.load_slice_table": ("slices",),
    "runtime.files.read_texts": ("profile",),
    "runtime.files.with_calibration": ("calibration",),
    "runtime.first_file.hosts_of": ("a first file's hosts",),
    "runtime.first_file._entries": ("a first file's hosts",),
    "runtime.first_file.longest_sequence": ("configuration",),
    "runtime.profile.profiling.ProfileFolder.__init__": ("records of a profile",),
    "runtime.hosts.ssh_config.SshConfig.__init__": ("ssh's configuration",),
    "runtime.launch.trial_folder.timeline_file": (),  # below: without a timeline it says None
    "runtime.planning._load_strategy": ("a plan before a loss",),
    "runtime.study.reading.read_study": ("a study's result", "a study's experiment"),
    "runtime.study.tuning.study_header": ("measured strategies",),  # for a digest
    "runtime.study.tuning.copy_experiment": ("experiment",),
    "api.differences._load": ("a compared plan", "experiment"),
    "cli.hosts._refuse_ray_cluster": ("experiment",),
    "cli.exchange.import_trace": ("a trace of PyTorch's profiler",),
    "cli.exchange.nccl_tests": ("a log of nccl-tests",),
    "cli.exchange.metis": ("Metis's cluster file", "Metis's hostfile", "Metis's profile"),
    "cli.planning.score": ("Megatron's script", "torchtitan's TOML", "DeepSpeed's configuration"),
}
"""Functions that read a user's file, each with some of the readers above that test it."""


def places_of_reading() -> set[str]:
    """Return the functions of the package that call ``read_text`` or ``read_texts``."""
    found, root = set[str](), Path(amp_ray.__file__).parent

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}"
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                found.update({name} if child.func.id in {"read_text", "read_texts"} else ())
            visit(child, inner)

    for path in root.rglob("*.py"):
        module = path.relative_to(root).with_suffix("")
        visit(ast.parse(path.read_text("utf-8")), ".".join(module.parts))
    return found


def test_no_place_that_reads_files_is_forgotten() -> None:
    assert places_of_reading() == set(READ_IN)
    assert {name for names in READ_IN.values() for name in names} <= set(READERS)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_file_of_100_megabytes_is_refused_before_it_is_read_whole(
    reader: Reader, tmp_path: Path
) -> None:
    path = tmp_path / reader.name
    path.write_bytes(reader.content)
    with path.open("ab") as file:
        file.truncate(100 * 2**20)
    may_be_long = reader.read in {slices, trace}
    expected = "not valid JSON" if may_be_long else r"longer than [\d,]+ characters: is th"
    with bounded(), pytest.raises(InputError, match=expected):
        reader.read(tmp_path)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_file_that_hostile_ones_are_made_of_is_read(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / reader.name).write_bytes(reader.content)
    reader.read(tmp_path)


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file in which words or any bytes are replaced, up to four times."""
    for _ in range(draw(st.integers(1, 4))):
        words = [match.span() for match in re.finditer(rb"[\w.+-]+", content[:5000])]
        anywhere = st.tuples(st.integers(0, len(content)), st.integers(0, 20)).map(
            lambda pair: (pair[0], sum(pair))
        )
        first, end = draw(st.sampled_from(words) | anywhere if words else anywhere)
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=20) | st.just(content[:500]))
        content = content[:first] + piece + content[end:]
    return content


@st.composite
def cases(draw: st.DrawFn) -> tuple[Reader, bytes]:
    """Draw a reader and the bytes of its file."""
    reader = draw(st.sampled_from(list(READERS.values())))
    content = draw(
        st.binary(max_size=300)
        | st.sampled_from(PIECES)
        | st.integers(0, len(reader.content)).map(lambda end: reader.content[:end])
        | spoilt(reader.content)
        | spoilt(reader.content)
    )
    return reader, content


@settings(max_examples=NUM_CASES)
@given(case=cases())
def test_hostile_bytes_are_refused_with_their_place(
    case: tuple[Reader, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader, content = case
    folder = tmp_path_factory.getbasetemp() / "hostile"
    folder.mkdir(exist_ok=True)
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / reader.name).write_bytes(content)
    with bounded(), suppress(InputError):
        reader.read(folder)


LAUNCH: Final = b'{"commands": [{"host": "a", "rank": 0}]}'


@settings(max_examples=NUM_CASES)
@given(content=spoilt(LAUNCH) | st.sampled_from([b"[" * 10**5, LAUNCH.replace(b'"a"', b"5")]))
def test_a_spoilt_launch_file_has_no_timeline(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path_factory.getbasetemp() / "launch.json").write_bytes(content)
    assert timeline_file(tmp_path_factory.getbasetemp()) is None

"""Every reader of a user's files on hostile bytes: refused with a place, soon, in little memory.

A case is a right file that was cut, joined with pieces that readers trip over, or bytes alone.
"""

import json
import re
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ray.calibration.fingerprint import fingerprint
from amp_ray.errors import InputError
from amp_ray.formats.metis_cluster import metis_cluster, parse_metis_clusterfile
from amp_ray.formats.metis_profile import parse_metis_profile
from amp_ray.runtime.calibrating import with_calibration
from amp_ray.runtime.files import load_experiment, load_strategies, read_text, read_texts
from amp_ray.trials.ray_cluster_file import explain_old_keys
from support.experiments import SMALL, small_experiment

NUM_CASES: Final = max(500, settings().max_examples)
"""Over all readers: 500 with the usual settings, 10,000 by ``make fuzz``."""

LONGEST_S: Final = 60.0
"""More is a hang, on a machine of any speed."""

MOST_BYTES: Final = 500 * 2**20

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


class Reader(NamedTuple):
    """A file that is right, its name, and what reads it below a folder."""

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
    finally:  # also the experiment is a YAML file in the profile's folder
        (folder / "experiment.yaml").unlink()


def strategies(folder: Path) -> object:
    return load_strategies(folder / "strategies", EXPERIMENT)


def calibration(folder: Path) -> object:
    return [
        with_calibration(EXPERIMENT, folder / "calibration.json", transfer=transfer)
        for transfer in (False, True)
    ]


def ray_cluster(folder: Path) -> object:
    return explain_old_keys(read_text(folder / "ray.yaml"), file="ray.yaml")


def metis_files(folder: Path) -> object:
    (folder / "hosts").touch()
    described = parse_metis_clusterfile(read_text(folder / "clusterfile.json"))
    return metis_cluster("a 4\n", described)


def metis_hostfile(folder: Path) -> object:
    described = parse_metis_clusterfile(CLUSTERFILE.decode())
    return metis_cluster(read_text(folder / "hosts"), described)


def metis_profile(folder: Path) -> object:
    return parse_metis_profile(read_texts(folder, (".json",)), folder="metis")


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
    "Ray's cluster file": Reader(
        b"cluster_name: a\nprovider: {type: aws}\n", "ray.yaml", ray_cluster
    ),
    "Metis's cluster file": Reader(CLUSTERFILE, "clusterfile.json", metis_files),
    "Metis's hostfile": Reader(b"a 4\na slots=4\n", "hosts", metis_hostfile),
    "Metis's profile": Reader(METIS_PROFILE, "DeviceType.T4_tp1_bs1.json", metis_profile),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_file_that_hostile_ones_are_made_of_is_read(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / reader.name).write_bytes(reader.content)
    reader.read(tmp_path)


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """Put something else in place of words or of any bytes of a file, up to four times."""
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
    """Choose a reader and what it is given."""
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
    for left in folder.iterdir():
        left.unlink()
    (folder / reader.name).write_bytes(content)
    before_bytes, started_s = peak_bytes(), time.monotonic()
    with suppress(InputError):
        reader.read(folder)
    assert time.monotonic() - started_s < LONGEST_S
    assert peak_bytes() - before_bytes < MOST_BYTES


def peak_bytes() -> int:
    """Return the most memory that this process had at once so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

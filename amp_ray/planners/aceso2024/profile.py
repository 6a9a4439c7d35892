"""Aceso's profile database: one CSV per micro-batch, tp and algorithm, and tables of links.

Times of operators are in microseconds, of collectives in milliseconds; sizes are in MiB per device.
A failed measurement is marked by an impossible value.

The files lack some facts about a model: its operators, the share of their memory that is kept for
the backward pass, and which operators read or write only a part of the activation on a tp rank. For
GPT and T5 the names of the operators decide: algorithm 0 divides them as Megatron-LM does,
algorithm 1 divides by rows instead of columns. For a ResNet the sizes decide: a tensor that shrinks
with tp is divided.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from amp_ray.arrays import BoolArray, FloatArray
from amp_ray.clusters.device import Device
from amp_ray.errors import InputError, Mistakes, Where, shown
from amp_ray.inputs.operator_profile import (
    COLLECTIVES,
    CollectiveKind,
    CollectiveTable,
    OperatorFamily,
    OperatorKey,
    OperatorProfile,
    OperatorTable,
    TransferTable,
    operator_table,
)
from amp_ray.inputs.profile import Anchor, DeviceTable, Profile
from amp_ray.inputs.strict_text import is_count, read_rows
from amp_ray.models.model import Model
from amp_ray.units import GIGA, MIB, MICROSECONDS_PER_SECOND, MILLISECONDS_PER_SECOND, counted

_LAYER_LENGTHS: Final[dict[OperatorFamily, tuple[int, ...]]] = {"gpt": (13,), "t5": (13, 21)}
"""Number of operators of a layer: GPT's; T5's encoder and decoder."""

_NUM_OTHERS: Final[dict[OperatorFamily, int]] = {"gpt": 3, "t5": 5}
"""Number of operators outside of layers: embeddings, final norms, output layer with loss."""

_BOTTLENECK_LENGTH: Final = 8  # operators of one bottleneck of a ResNet

_BLOCK_NAME: Final = re.compile(r"(?P<group>.*?)[-._]?\d*[-._]?downsample")

_SHARES: Final[Mapping[str, float]] = {
    "enc-attention-dropout": 1.5,
    "enc-attention-softmax": 0.0,
    "bn1": 0.0,
}
"""Share of an operator's activations that Aceso's memory model counts, if it is not 1.

T5's decoder has operators such as ``dec-attention-dropout-1``; they count as measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcesoChain:
    """The operators of a model in the order of the forward pass."""

    family: OperatorFamily
    names: tuple[str, ...]
    # Shape ``(num_operators,)``. Row of the profile's files for each operator.
    rows: NDArray[np.int64]
    # For the fields below see `amp_ray.inputs.operator_profile.OperatorProfile`
    layer_bounds: tuple[int, ...]
    starts_block: BoolArray
    kept_share: FloatArray


def family_of(model: str) -> OperatorFamily:
    """Return the family of a model, from its name: ``gpt_...``, ``t5_...`` or ``..resnet_...``.

    Example:
        >>> family_of("wide_resnet_2B"), family_of("t5_770M"), family_of("gpt_1_3B")
        ('resnet', 't5', 'gpt')
    """
    if "resnet" in model.casefold():
        return "resnet"
    return "t5" if model.casefold().startswith("t5") else "gpt"


def aceso_chain(rows: Sequence[str], *, family: OperatorFamily, num_layers: int) -> AcesoChain:
    """Repeat the rows of an operator file to form a model with ``num_layers`` layers.

    GPT has ``13 L + 3`` operators and T5 ``34 L + 5``: the file has one layer of GPT, and of T5 one
    layer of the encoder and one of the decoder. The rows of a ResNet are its operators.

    Raises:
        ValueError: If the rows do not belong to the family.
    """
    if family == "resnet":
        starts = (row for row, name in enumerate(rows) if _starts_block(name, family))
        layers = _blocks(rows, dict.fromkeys(starts, _BOTTLENECK_LENGTH))
    else:
        layers = _repeated(rows, family, num_layers)
    order = [row for layer in layers for row in layer]
    names = tuple(rows[row] for row in order)
    return AcesoChain(
        family=family,
        names=names,
        rows=np.array(order, dtype=np.int64),
        layer_bounds=(0, *accumulate(map(len, layers))),
        starts_block=np.array([_starts_block(name, family) for name in names]),
        kept_share=np.array(_kept_shares(names)),
    )


def _repeated(rows: Sequence[str], family: OperatorFamily, num_layers: int) -> list[list[int]]:
    """Return the rows of every layer, repeating the file's one layer of each kind."""
    starts = [row for row, name in enumerate(rows) if _starts_block(name, family)]
    lengths = _LAYER_LENGTHS[family]
    num_others = len(rows) - sum(lengths)
    layers = _blocks(rows, dict(zip(starts, lengths, strict=False)))
    kinds = tuple(len(layer) for layer in layers if len(layer) > 1)
    if len(starts) != len(lengths) or kinds != lengths or num_others != _NUM_OTHERS[family]:
        raise ValueError(
            f"found {counted(len(rows), 'operator')}, {len(starts)} of them a 1st-layernorm; a "
            f"model of family {family} has layers of {' and '.join(map(str, lengths))} operators, "
            f"which start with one, and {_NUM_OTHERS[family]} others (embeddings, final norms, "
            "post-process)"
        )
    return [layer for kind in layers for layer in [kind] * (num_layers if len(kind) > 1 else 1)]


def _blocks(rows: Sequence[str], lengths: Mapping[int, int]) -> list[list[int]]:
    """Divide rows into blocks, given their lengths by first row, and single rows between blocks."""
    blocks: list[list[int]] = []
    end = 0
    for row in range(len(rows)):
        if row in lengths or row >= end:
            blocks.append([row])
            end = row + lengths.get(row, 1)
        else:
            blocks[-1].append(row)
    return blocks


def _starts_block(name: str, family: OperatorFamily) -> bool:
    return name.endswith("-conv1") if family == "resnet" else "1st-layernorm" in name


def _kept_shares(names: Sequence[str]) -> list[float]:
    """Return the share of each operator's activations that is kept until the backward pass."""
    shares = []
    groups: set[str] = set()
    for name in names:
        match = _BLOCK_NAME.fullmatch(name)
        shares.append(_kept_share(name, is_first=match is None or match["group"] not in groups))
        if match is not None:
            groups.add(match["group"])
    return shares


def _kept_share(name: str, *, is_first: bool) -> float:
    """Return one operator's share; 0 for a downsampling that is not the first of its group."""
    return 0.0 if name.endswith("-bn3") or not is_first else _SHARES.get(name, 1.0)


NUM_ALGORITHMS: Final = 2

_FIRST: Final = ("qkv", "attention-q", "attention-kv", "GEMM-1")
"""Operators divided by columns in algorithm 0: they read all and write a part."""

_LAST: Final = ("attention-dense", "GEMM-2")
"""Operators divided by rows in algorithm 0: they read a part and write all."""

_BETWEEN: Final = (
    "attention-score",
    "attention-softmax",
    "attention-dropout",
    "attention-context",
    "gelu",
)
"""Operators that read and write a part: heads, or units of the feed-forward layer."""


def divided_operators(
    chain: AcesoChain, tables: Mapping[OperatorKey, OperatorTable]
) -> tuple[BoolArray, BoolArray]:
    """Return whether each tp rank reads, and writes, only a part, shapes ``(2, num_operators)``."""
    if chain.family == "resnet":
        return _by_size(len(chain.names), tables)
    pairs = [
        [_by_name(name, algorithm) for name in chain.names] for algorithm in range(NUM_ALGORITHMS)
    ]
    both = np.array(pairs, dtype=np.bool_)
    return both[..., 0], both[..., 1]


def _by_name(name: str, algorithm: int) -> tuple[bool, bool]:
    """Return whether an operator of a transformer reads, and writes, only a part.

    Example:
        >>> _by_name("enc-attention-qkv", 0), _by_name("enc-attention-qkv", 1)
        ((False, True), (True, False))
    """
    if "post" in name:
        return False, False
    if any(part in name for part in _BETWEEN):
        return True, True
    if any(part in name for part in _FIRST):
        return algorithm == 1, algorithm == 0
    if any(part in name for part in _LAST):
        return algorithm == 0, algorithm == 1
    return False, False


def _by_size(
    num_operators: int, tables: Mapping[OperatorKey, OperatorTable]
) -> tuple[BoolArray, BoolArray]:
    """Return whether input and output shrink from tp 1 to the smallest other tp, by `_shrinks`."""
    reads = np.zeros((NUM_ALGORITHMS, num_operators), dtype=np.bool_)
    writes = reads.copy()
    for algorithm in range(NUM_ALGORITHMS):
        pairs = [
            (key, OperatorKey(key.micro_batch_size, 1, algorithm))
            for key in sorted(tables, key=lambda key: (key.tp, key.micro_batch_size))
            if key.tp > 1 and key.algorithm == algorithm
        ]
        for divided, whole in pairs:
            if whole in tables:
                few, all_of = tables[divided], tables[whole]
                reads[algorithm] = _shrinks(few.input_bytes, all_of.input_bytes, divided.tp)
                writes[algorithm] = _shrinks(few.output_bytes, all_of.output_bytes, divided.tp)
                break
    return reads, writes


def _shrinks(divided_bytes: FloatArray, whole_bytes: FloatArray, tp: int) -> BoolArray:
    """Return whether each size is closer to a part than to the whole."""
    nearer: BoolArray = divided_bytes < (1 + 1 / tp) / 2 * whole_bytes
    return nearer


SUFFIX: Final = ".csv"

INTRA_FILE: Final = "p2p_intra_node.csv"
INTER_FILE: Final = "p2p_inter_node.csv"

NOT_MEASURED: Final = (1e6, 1e7, 1e9)  # values that mark a failed measurement in a file
_LARGEST: Final = 1e12  # larger numbers in a file are mistakes

_SHARED_FILES: Final[Mapping[str, str]] = {"t5_22B": "t5_11B"}
"""Models with the files of another model, which has the same layers in another number."""

_OPERATORS: Final = re.compile(
    r"(?P<model>[A-Za-z0-9][\w.-]*?)_mbs(?P<size>[1-9]\d{0,5})_tp(?P<tp>[1-9]\d{0,5})"
    r"_algo(?P<algorithm>[01])\.csv"
)

_COLUMNS: Final[Mapping[str, tuple[str, float]]] = {
    "forward_s": ("forward-compute", 1 / MICROSECONDS_PER_SECOND),
    "backward_s": ("backward-compute", 1 / MICROSECONDS_PER_SECOND),
    "input_bytes": ("input_size", MIB),
    "output_bytes": ("output_size", MIB),
    "weight_bytes": ("weights", MIB),
    "activation_bytes": ("activations", MIB),
    "forward_reserved_bytes": ("fwd_reserved", MIB),
    "backward_reserved_bytes": ("bwd_reserved", MIB),
}
"""Column and unit, by field of a table."""

_TIMES: Final = ("forward-compute", "backward-compute")

_NAME_COLUMN: Final = "op_name"

Row = tuple[Where, dict[str, float]]


def parse_aceso_profile(
    files: Mapping[str, str], *, folder: str, model: str, num_layers: int
) -> OperatorProfile:
    """Read the operators of one model from a profile folder, given as text by name.

    Args:
        files: All CSV files of the folder; files of other models are ignored.
        folder: Name of the folder, for messages.
        model: Name in the file names: ``gpt_1_3B`` for ``gpt_1_3B_mbs1_tp1_algo0.csv``.
        num_layers: Number of blocks of the model. One block is profiled (``gpt``; ``t5``: one of
            encoder and decoder each); the files of a ``resnet`` name all of its operators.

    Raises:
        InputError: If the model or a needed file is missing, or a file is wrong.
    """
    measured_as = model
    operator_files = _operator_files(files, model)
    if not operator_files and model in _SHARED_FILES:
        measured_as = _SHARED_FILES[model]
        operator_files = _operator_files(files, measured_as)
    if not operator_files:
        raise _unknown_model(files, folder, model)
    tables, chain = _tables(operator_files, files, folder, family_of(model), num_layers)
    intra = _transfers(files, INTRA_FILE, folder)
    inter = _transfers(files, INTER_FILE, folder) if INTER_FILE in files else intra
    collectives = _collectives(files, measured_as, folder)
    reads_divided, writes_divided = divided_operators(chain, tables)
    profile = OperatorProfile(
        source=f"Aceso's profile {folder} of {model}",
        model=model,
        family=chain.family,
        names=chain.names,
        layer_bounds=chain.layer_bounds,
        starts_block=chain.starts_block,
        kept_share=chain.kept_share,
        reads_divided=reads_divided,
        writes_divided=writes_divided,
        tables=tables,
        collectives=collectives,
        intra=intra,
        inter=inter,
    )
    notes = list(_notes(profile, folder))
    if measured_as != model:
        notes.append(f"{folder}: {model} has the layers of {measured_as}, whose files are read")
    if INTER_FILE not in files:
        notes.append(f"{folder}: no {INTER_FILE}; transfers between nodes cost what they do within")
    return replace(profile, notes=tuple(notes))


def _operator_files(files: Mapping[str, str], model: str) -> dict[OperatorKey, str]:
    names = {}
    for name in sorted(files):
        match = _OPERATORS.fullmatch(name)
        if match is not None and match["model"] == model:
            key = OperatorKey(int(match["size"]), int(match["tp"]), int(match["algorithm"]))
            names[key] = name
    return names


def _unknown_model(files: Mapping[str, str], folder: str, model: str) -> InputError:
    matches = filter(None, map(_OPERATORS.fullmatch, files))
    models = sorted({match["model"] for match in matches})
    has = f"it has {', '.join(models)}" if models else "it has no file of that form at all"
    message = f"no file such as {model}_mbs1_tp1_algo0.csv; {has}"
    return InputError(message, where=Where(file=folder))


def _tables(
    operator_files: Mapping[OperatorKey, str],
    files: Mapping[str, str],
    folder: str,
    family: OperatorFamily,
    num_layers: int,
) -> tuple[dict[OperatorKey, OperatorTable], AcesoChain]:
    """Read every operator file, and repeat its rows to form the model's chain."""
    read: dict[OperatorKey, tuple[tuple[str, ...], OperatorTable]] = {}
    mistakes = Mistakes()
    for key, name in sorted(operator_files.items()):
        with mistakes.collect():
            read[key] = _operator_file(files[name], f"{folder}/{name}")
    mistakes.check()
    first = min(read)
    rows = read[first][0]
    for key, (names, _) in read.items():
        if names != rows:
            different = sorted(set(names) ^ set(rows)) or ["in another order"]
            message = (
                f"found other operators than in {operator_files[first]}: "
                f"{', '.join(different[:3])}; a profile is of one model"
            )
            raise InputError(message, where=Where(file=f"{folder}/{operator_files[key]}"))
    try:
        chain = aceso_chain(rows, family=family, num_layers=num_layers)
    except ValueError as error:
        raise InputError(
            str(error), where=Where(file=f"{folder}/{operator_files[first]}")
        ) from None
    return {key: table.take(chain.rows) for key, (_, table) in read.items()}, chain


def _operator_file(text: str, file: str) -> tuple[tuple[str, ...], OperatorTable]:
    """Read one operator file: row names, and values in SI units."""
    columns = tuple(column for column, _ in _COLUMNS.values())
    names: list[str] = []
    values: list[dict[str, float]] = []
    mistakes = Mistakes()
    for where, cells in _records(text, file, (_NAME_COLUMN, *columns)):
        with mistakes.collect():
            names.append(cells[_NAME_COLUMN])
            if cells[_NAME_COLUMN] in names[:-1]:
                message = f"operator {shown(cells[_NAME_COLUMN])} a second time"
                raise InputError(message, where=where)
            values.append({name: _number(cells[name], where.at(name)) for name in columns})
    mistakes.check()
    if not names:
        raise InputError("no operator in it", where=Where(file=file))
    arrays = {
        name: np.array([row[column] for row in values]) * unit
        for name, (column, unit) in _COLUMNS.items()
    }
    measured = [all(row[column] not in NOT_MEASURED for column in _TIMES) for row in values]
    return tuple(names), operator_table(arrays, np.array(measured))


def _records(
    text: str, file: str, columns: Sequence[str]
) -> Iterator[tuple[Where, dict[str, str]]]:
    """Yield the rows of a CSV with a header, as cells by column; ignore other columns."""
    rows = read_rows(text, file)
    where, header = next(rows, (Where(file=file, line=1), []))
    missing = [column for column in columns if column not in header]
    if missing:
        message = f"expected the header {','.join(columns)}; missing: {', '.join(missing)}"
        raise InputError(message, where=where)
    for place, row in rows:
        if len(row) != len(header):
            message = f"expected {len(header)} columns, found {len(row)}: is the file cut short?"
            raise InputError(message, where=place)
        yield place, dict(zip(header, row, strict=True))


def _number(cell: str, where: Where) -> float:
    """Read a non-negative number."""
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST:
        raise InputError(f"found {shown(cell)}; expected a number from 0", where=where)
    return value


def _collectives(
    files: Mapping[str, str], model: str, folder: str
) -> dict[tuple[CollectiveKind, int], CollectiveTable]:
    tables = {}
    for kind in COLLECTIVES:
        prefix = f"prim_{model}_{kind}_"
        for name in sorted(files):
            count = name.removeprefix(prefix).removesuffix(f"gpus{SUFFIX}")
            if name == f"{prefix}{count}gpus{SUFFIX}" and is_count(count, 2):
                tables[kind, int(count)] = _collective(files[name], f"{folder}/{name}")
    return tables


def _collective(text: str, file: str) -> CollectiveTable:
    """Read one table of a collective; if a size occurs twice, its last row counts."""
    size_column, time_column = "data_size(MB)", "time(ms)"
    times: dict[float, float] = {}
    num_failed = 0
    for where, cells in _records(text, file, (size_column, time_column)):
        size = _number(cells[size_column], where.at(size_column))
        time_ms = _number(cells[time_column], where.at(time_column))
        if time_ms in NOT_MEASURED:
            num_failed += 1
        else:
            times[size] = time_ms
    sizes = sorted(times)
    return CollectiveTable(
        sizes_bytes=np.array(sizes) * MIB,
        seconds=np.array([times[size] for size in sizes]) / MILLISECONDS_PER_SECOND,
        num_failed=num_failed,
    )


def _transfers(files: Mapping[str, str], name: str, folder: str) -> TransferTable:
    """Read a table of transfers: a line of sizes in MiB, then a line of rates in GB/s."""
    file = f"{folder}/{name}"
    if name not in files:
        message = "no such file; expected a line of sizes in MiB and a line of rates in GB/s"
        raise InputError(message, where=Where(file=file))
    lines = [
        np.array([_number(cell, where) for cell in cells])
        for where, cells in read_rows(files[name], file)
    ]
    expected = 2
    if len(lines) != expected or len(lines[0]) != len(lines[1]):
        message = (
            "expected a line of sizes in MiB and a line with a rate in GB/s for each, found "
            f"{len(lines)} lines of {[len(line) for line in lines[:3]]} numbers"
        )
        raise InputError(message, where=Where(file=file))
    sizes, rates = lines
    if not (np.diff(sizes, prepend=0.0) > 0).all() or not (rates > 0).all():
        message = "sizes must ascend from above 0, and rates be above 0"
        raise InputError(message, where=Where(file=file))
    return TransferTable(sizes_bytes=sizes * MIB, bytes_per_s=rates * GIGA)


def _notes(profile: OperatorProfile, folder: str) -> Iterator[str]:
    """Yield a note for each missing or failed part of the grid of measurements."""
    tables = profile.tables
    for tp in profile.tps:
        for algorithm in profile.algorithms:
            sizes = {key.micro_batch_size for key in tables if key[1:] == (tp, algorithm)}
            missing = [str(size) for size in profile.micro_batch_sizes if size not in sizes]
            if missing:
                yield (
                    f"{folder}: {profile.model} at tp {tp}, algorithm {algorithm} lacks "
                    f"micro-batch size {', '.join(missing)}, which others have"
                )
    for key, table in sorted(tables.items()):
        failed = dict.fromkeys(
            name for name, good in zip(profile.names, table.measured, strict=True) if not good
        )
        if failed:
            yield (
                f"{folder}: {profile.model} at micro-batch size {key.micro_batch_size}, tp "
                f"{key.tp}, algorithm {key.algorithm}: {', '.join(failed)} not measured"
            )
    for (kind, number), collective in sorted(profile.collectives.items()):
        if collective.num_failed:
            yield (
                f"{folder}: {kind} among {number} devices: {collective.num_failed} sizes not "
                "measured"
            )


def read_aceso_profile(
    files: Mapping[str, str],
    *,
    folder: str,
    profiled: str | None,
    model: Model,
    devices: Iterable[Device],
) -> Profile:
    """Read a folder of Aceso's profile files for an experiment; add a table of layers per device.

    Times include tensor-parallel all-reduces. There is no table of layers if the model's layers do
    not match the chain of operators, or if an operator of the table failed. ``profiled`` is the
    name of the model in the folder, such as ``gpt_1_3B``; an experiment of this source has one. All
    devices are taken to be of the one measured type.

    Raises:
        InputError: If the folder lacks the model or a needed file, or a file is wrong.
    """
    assert profiled is not None, "refused where the experiment is checked"
    operators = parse_aceso_profile(
        files, folder=folder, model=profiled, num_layers=model.shape.num_layers
    )
    fits = len(operators.layer_bounds) == model.num_layers + 1
    table: DeviceTable = {
        (key.tp, key.micro_batch_size): Anchor(
            forward_s=_layers(measured.forward_s, operators),
            backward_s=_layers(measured.backward_s, operators),
        )
        for key, measured in sorted(operators.tables.items())
        if fits and key.algorithm == 0 and measured.measured.all()
    }
    return Profile(
        source=operators.source,
        tables={device.name: table for device in devices} if table else {},
        includes_all_reduces=True,
        operators=operators,
    )


def _layers(values: FloatArray, operators: OperatorProfile) -> FloatArray:
    return np.array([values[first:end].sum() for first, end in pairwise(operators.layer_bounds)])

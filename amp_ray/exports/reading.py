"""Read the strategy of another program's script or configuration.

Nothing is executed: a script is read word by word, and only variables that it sets are replaced.
"""

import ast
import io
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Where, shown
from amp_ray.exports.megatron import TooLongError, pairs_of, read_flags, replaced
from amp_ray.exports.our_program import read_ds_config
from amp_ray.exports.torchtitan import read_settings
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.strict_text import parse_json, parse_toml

_MEGATRON: Final = re.compile(
    r"--(tensor-model-parallel-size|pipeline-model-parallel-size|micro-batch-size)\b"
)
_TITAN_FLAGS: Final = re.compile(r"--(parallelism|training)\.\w")
_TITAN_TOML: Final = re.compile(r"^\[parallelism\]\s*$", re.MULTILINE)
_TITAN_PYTHON: Final = re.compile(r"^PARALLELISM = \{", re.MULTILINE)

_ARRAYS: Final = ("HOSTS", "DEVICES")  # of an exported script: hosts, and slots of each

_DS_CONFIG: Final = re.compile(
    r'^\s*\{.*"(zero_optimization|gradient_accumulation_steps)"\s*:', re.DOTALL
)

_NO_FLAGS: Final = (
    "no flags of Megatron-LM or torchtitan found, such as --tensor-model-parallel-size or "
    "--parallelism.tensor_parallel_degree; a list of strategies is CSV or JSON"
)
_NO_YAML: Final = (
    "no strategy is read from YAML; expected CSV, JSON, a script with flags of Megatron-LM or "
    "torchtitan, torchtitan's TOML or DeepSpeed's JSON"
)
_LACKS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("sh", "bash", "slurm", "sbatch"), _NO_FLAGS),
    **dict.fromkeys(("yaml", "yml"), _NO_YAML),
    "py": "no PARALLELISM = {...} found, as amp-ray export --to torchtitan writes it",
    "toml": "no [parallelism] found, torchtitan's section",
    "ds_config": "no train_batch_size or train_micro_batch_size_per_gpu found for DeepSpeed",
}
"""Messages for files from which no strategy can be read, by the ending of their names."""

_MOST_CHARACTERS: Final = 2**18  # most characters of a script or a configuration
_MOST_WRITTEN_OUT: Final = 2**20  # most characters of a script's words, variables replaced
_SLOTS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_NAMED: Final = re.compile(r"--[\w.-]+|\w+(?=: )")
"""The flag or key at the beginning of a message."""

_BETWEEN_WORDS: Final = re.compile(r"(?:\s+|#[^\n]*)*")

_TOO_DEEP: Final = (RecursionError, MemoryError)
"""Exceptions of Python's own parsers for brackets nested too deeply."""

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE: Final = r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^}]{0,999}))?\})"


class _LineError(ValueError):
    """A mistake in one line of a text."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def read_program(text: str, *, file: str, experiment: Experiment) -> dict[str, Any] | None:
    """Return the STRATEGY object of a program's script or configuration; None for other texts.

    It knows DeepSpeed's configuration, scripts with flags of Megatron-LM or torchtitan, and
    torchtitan's configurations.

    Raises:
        InputError: If the text contradicts the experiment, or the file's name ends like that of a
            script or a configuration without settings that are read.
    """
    read = _reader(text, file)
    if read is None:
        kind = "sh" if text.startswith("#!") else file.rpartition(".")[2].lower()
        kind = "ds_config" if _DS_CONFIG.search(text) else kind
        if kind in _LACKS:
            raise InputError(_LACKS[kind], where=Where(file=file))
        return None
    if len(text) > _MOST_CHARACTERS:
        message = f"longer than {_MOST_CHARACTERS:,} characters: is this the right file?"
        raise InputError(message, where=Where(file=file))
    try:
        record = read(text, experiment)
        return _fitted(record, experiment)
    except _LineError as error:
        raise InputError(str(error), where=Where(file=file, line=error.line)) from None
    except InputError:  # has a place already
        raise
    except ValueError as error:
        line = _line_of(str(error), text)
        raise InputError(str(error), where=Where(file=file, line=line)) from None


def _line_of(message: str, text: str) -> int | None:
    """Return the first line that contains the flag or key at the beginning of a message."""
    named = _NAMED.match(message)
    if named is None:
        return None
    place = re.search(rf"^[^#\n]*?{re.escape(named[0])}", text, re.MULTILINE)
    return None if place is None else 1 + text.count("\n", 0, place.end())


def is_program(text: str) -> bool:
    """Return whether `read_program` can read a text."""
    return _reader(text, "") is not None


def _reader(text: str, file: str) -> Callable[[str, Experiment], dict[str, Any]] | None:
    if text.lstrip()[:1] == "{":
        is_config = re.search(r'"train_(micro_)?batch_size', text)
        return partial(_from_ds_config, file=file) if is_config else None
    if _MEGATRON.search(text):
        return _from_megatron
    if any(pattern.search(text) for pattern in (_TITAN_FLAGS, _TITAN_TOML, _TITAN_PYTHON)):
        return partial(_from_titan, file=file)
    return None


def _from_ds_config(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    config, model = parse_json(text, file=file), experiment.model
    return read_ds_config(config, experiment.cluster.num_devices, model.num_parameters)


def _from_megatron(text: str, experiment: Experiment) -> dict[str, Any]:
    record = read_flags(_once_each(words_of(text)), experiment.model)
    placement = _placement(text, experiment.cluster)
    return record if placement is None else {**record, "placement": placement}


def _placement(text: str, cluster: Cluster) -> list[list[Any]] | None:
    """Return host and slot of every rank, if an exported script sets them."""
    hosts, devices = (re.search(rf"^{name}=\((.*)\)$", text, re.MULTILINE) for name in _ARRAYS)
    if hosts is None or devices is None or not {*_split(hosts[1])} <= {*cluster.host_names}:
        return None
    wrong = [slots for slots in devices[1].split() if not _SLOTS.fullmatch(slots)]
    if wrong:
        raise ValueError(f"DEVICES: found {shown(wrong[0])}; expected slots such as 0,1")
    pairs = zip(_split(hosts[1]), devices[1].split(), strict=False)
    places = [[host, int(slot)] for host, slots in pairs for slot in slots.split(",")]
    return None if places == [*map(list, cluster.places)] else places


def _from_titan(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    """Read torchtitan's settings from flags, TOML or an exported Python file."""
    settings: dict[str, Any] = {}
    if _TITAN_PYTHON.search(text):
        settings = _python_settings(text)
    elif _TITAN_TOML.search(text):
        settings = parse_toml(text, file=file)
    else:
        for flag, value in _once_each(words_of(text)).items():
            section, _, key = flag.partition(".")
            settings.setdefault(section, {})[key.replace("-", "_")] = _literal(value)
    return read_settings(settings, experiment)


def _python_settings(text: str) -> dict[str, Any]:
    """Return the values of an exported configuration, which must be literals."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise _LineError(f"cannot be read as Python: {error.msg}", error.lineno) from None
    except _TOO_DEEP:
        raise ValueError("cannot be read as Python: nested too deeply") from None
    settings = {}
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in {"PARALLELISM", "TRAINING", "RECOMPUTE"}:
                try:
                    settings[name.lower()] = ast.literal_eval(statement.value)
                except (ValueError, TypeError, *_TOO_DEEP):
                    message = f"{name}: expected plain numbers, texts and lists"
                    raise _LineError(message, statement.lineno) from None
    return settings


def _literal(value: str) -> object:
    """Return a number, a list or a word; an empty value means true."""
    try:
        return ast.literal_eval(value) if value else True
    except (ValueError, SyntaxError, TypeError, *_TOO_DEEP):
        return value


def words_of(text: str) -> list[str]:
    r"""Return the words of a script, with the script's own variables replaced.

    Raises:
        ValueError: If the text is no shell script, or its variables expand to very long texts.

    Example:
        >>> words_of('TP=2\nA=(--tp "$TP")\nB="--pp ${PP:-4}"  # both\nrun ${A[@]} $B')
        ['--tp', '2', '--pp', '4', 'run', '${A[@]}', '--pp 4']
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    room = _MOST_WRITTEN_OUT
    for line, word in _split_by_line(text):
        assigned = _ASSIGNMENT.fullmatch(word)
        try:
            value = _filled(word if assigned is None else assigned[2], variables)
        except TooLongError as error:
            raise _LineError(f"{shown(word)} is {error}", line) from None
        room -= len(value)
        if room < 0:
            message = f"with its variables the script has more than {_MOST_WRITTEN_OUT} characters"
            raise _LineError(message, line)
        if assigned is None:
            words.append(value)
            continue
        variables[assigned[1]] = value
        if "--" in value:
            words += _split(value)
    return words


def _split(text: str) -> list[str]:
    """Split shell into words, without brackets and separators."""
    return [word for _, word in _split_by_line(text)]


def _split_by_line(text: str) -> Iterator[tuple[int, str]]:
    """Yield words, each with the number of the line that it ends in."""
    stream = io.StringIO(text.replace("\\\n", "  "))  # keeps the length, and so the places
    lexer = shlex.shlex(stream, posix=True, punctuation_chars="();<>&")
    lexer.whitespace_split = True
    line, end = 1, 0
    while True:
        try:
            word = lexer.get_token()
        except ValueError as error:
            between = _BETWEEN_WORDS.match(text, end)
            line += 0 if between is None else between[0].count("\n")
            raise _LineError(f"cannot be read as a script: {error}", line) from None
        if word is None:
            return
        before, end = end, max(end, stream.tell() - 1)  # without the separator after the word
        line += text.count("\n", before, end)
        if not set(word) <= set("();<>&"):
            yield line, word


def _filled(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with all known variables replaced."""

    def value(match: re.Match[str]) -> tuple[str, int]:
        name = match[1] or match[2]
        return variables.get(name, match[0] if match[3] is None else match[3]), 1

    return replaced(_VARIABLE, value, word)


def _once_each(words: Sequence[str]) -> dict[str, str]:
    """Return flags with their values; refuse a flag with two different values."""
    flags: dict[str, str] = {}
    starts = [index for index, word in enumerate(words) if word.startswith("--")]
    for first, end in zip(starts, [*starts[1:], len(words)], strict=True):
        for flag, value in pairs_of(words[first:end]).items():
            if flags.setdefault(flag, value) != value:
                raise ValueError(f"--{flag} is {shown(flags[flag])} and {shown(value)}: keep one")
    return flags


def _fitted(record: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Complete a STRATEGY object from the experiment's devices, and check its other keys."""
    for name in ("global_batch_size", "precision"):
        expected = getattr(experiment, name)
        value = record.pop(name, expected)
        if value != expected:
            raise ValueError(
                f"{name} is {value}; the experiment has {expected}: add --set {name}={value}"
            )
    for name in ("gradients", "moments", "primary"):
        expected = experiment.traits.formats.kept.get(name)
        value = record.pop(name, None)
        if value not in {None, "fp32", expected}:
            raise ValueError(
                f"{name} in {value}; the experiment has {expected or 'the usual'}: set "
                f"'precision: {{compute: {experiment.precision}, {name}: {value}}}'"
            )
    offloaded = record.pop("offloaded_blocks", experiment.traits.offloaded_blocks)
    if offloaded != experiment.traits.offloaded_blocks:
        raise ValueError(
            f"--cpu-offloading-num-layers {offloaded}; the experiment has "
            f"{experiment.traits.offloaded_blocks}: add --set traits.offloaded_blocks={offloaded}"
        )
    batch = experiment.global_batch_size
    per_replica = record["tp"] * record["pp"] * record.get("cp", 1)
    num_devices = len(record.get("placement", experiment.cluster.node_of_device))
    record["dp"], rest = divmod(num_devices, per_replica)
    if rest:
        raise ValueError(
            f"tp {record['tp']} x pp {record['pp']} do not divide the "
            f"{num_devices} devices of the experiment"
        )
    samples = record["dp"] * record["micro_batch_size"]
    record["num_micro_batches"], rest = divmod(batch, samples)
    if rest:
        raise ValueError(
            f"dp {record['dp']} x micro-batch size {record['micro_batch_size']} = {samples} does "
            f"not divide global_batch_size {batch}"
        )
    groups = record.pop("shard_groups", 1)
    if groups > 1:
        record["shard_ranks"] = record["dp"] // groups
    off = {name for name in ("cp", "ep", "virtual_stages") if record.get(name, 1) == 1}
    return {name: value for name, value in record.items() if name not in off}

"""Read the strategy of another program's script or configuration.

Nothing is executed: a script is read word by word, and only variables that it sets are replaced.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from amp_ray.clusters.cluster import Cluster
from amp_ray.errors import InputError, Where, shown
from amp_ray.exports.configs import configuration_notes, read_configuration
from amp_ray.exports.launchers import (
    Launch,
    batch_variables,
    is_launcher,
    launch_of,
    launch_variables,
)
from amp_ray.exports.megatron import is_recipe, read_flags
from amp_ray.exports.megatron_keys import FlagTable, check_model, check_optimizer, notes_of
from amp_ray.exports.our_program import ds_config_notes, read_ds_config, without_comments
from amp_ray.exports.shell import Branch, Command, LineError, branches_of, words_of
from amp_ray.exports.torchtitan import (
    check_configuration,
    key_is_without_effect,
    notes_of_settings,
    read_settings,
)
from amp_ray.inputs.experiment import Experiment
from amp_ray.inputs.not_read import NotRead, not_read
from amp_ray.inputs.strict_text import parse_json, parse_toml
from amp_ray.inputs.yaml_text import parse_yaml

_MEGATRON: Final = re.compile(
    r"""(?:--|(?<=[\s'"])(?:\w+\.)+)
    (tensor[-_]model[-_]parallel[-_]size|pipeline[-_]model[-_]parallel[-_]size|micro[-_]batch[-_]size)
    (?![-\w])""",
    re.VERBOSE,
)
_YAML: Final = re.compile(r"^distributed_type:|^parallelism:(?=(?:.|\n)*^tokens:)", re.MULTILINE)
_TITAN_FLAGS: Final = re.compile(r"--(parallelism|training)\.\w")
_TITAN_TOML: Final = re.compile(
    r"^(?:\[parallelism\]\s*$|(?:tensor_parallel|data_parallel\w*)_degree\s*=)", re.MULTILINE
)
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
    "no strategy is read from this YAML; expected one of nanotron (parallelism, tokens) or "
    "Accelerate (distributed_type), CSV, JSON, a script with flags of Megatron-LM or torchtitan, "
    "torchtitan's TOML or DeepSpeed's JSON"
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
_SLOTS: Final = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")
_NAMED: Final = re.compile(r"-{1,2}[A-Za-z][\w.-]*|\w+(?=: )|\w+_\w+|[A-Z][A-Z_]+|\w+(?:\.\w+)+")
"""The flag or key at the beginning of a message."""

_TOO_DEEP: Final = (RecursionError, MemoryError)
"""Exceptions of Python's own parsers for brackets nested too deeply."""

_OTHER_MODELS: Final = frozenset({"rollout", "ref", "critic", "reward_model", "generation"})
_OVERRIDE: Final = re.compile(r"\+{0,2}((?:\w+\.)+\w+|mixed_precision)=(.*)", re.DOTALL)
_PRECISIONS: Final = {
    **dict.fromkeys(("bf16_mixed", "bf16-mixed", "bf16"), "bf16"),
    **dict.fromkeys(("fp16_mixed", "16-mixed", "16"), "fp16"),
    "bf16_with_nvfp4_mixed": "fp4-format",
}
"""Flags by values of mixed_precision (Megatron-Bridge) and trainer.precision (NeMo)."""
_OFF: Final = frozenset({"false", "null", "none"})
_SEVERAL: Final = frozenset({"recompute-modules", "hierarchical-context-parallel-sizes"})
_SWIFT: Final = re.compile(r"\bmegatron (?:pt|sft|rlhf)\b")
_MORE_OF_THE_RUN: Final = "it holds more of the run, which is not read"


def read_program(text: str, *, file: str, experiment: Experiment) -> dict[str, Any] | None:
    """Return the STRATEGY object of a program's script or configuration; None for other texts.

    Beside its keys it has ``not_read``, a tuple of `NotRead`, if the file has such keys.

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
    except LineError as error:
        raise InputError(str(error), where=Where(file=file, line=error.line)) from None
    except InputError:  # has a place already
        raise
    except ValueError as error:
        line = _line_of(str(error), text)
        raise InputError(str(error), where=Where(file=file, line=line)) from None


def _line_of(message: str, text: str) -> int | None:
    """Return the first line that contains the flag or key at the beginning of a message."""
    named = _NAMED.match(message)
    for name in () if named is None else (named[0], named[0].partition(".")[0]):
        spelled = re.sub("[-_]", "[-_]", re.escape(name).replace(r"\-", "-"))
        line = rf"^(?:#SBATCH)?[^#\n]*?(?<![\w-])(?:--)?{spelled}(?![A-Za-z_-])"
        place = re.search(line, text, re.MULTILINE)
        if place is not None:
            return 1 + text.count("\n", 0, place.end())
    return None


def is_program(text: str) -> bool:
    """Return whether `read_program` can read a text."""
    return _reader(text, "") is not None


def _reader(text: str, file: str) -> Callable[[str, Experiment], dict[str, Any]] | None:
    if without_comments(text).lstrip()[:1] == "{":
        is_config = re.search(r'"train_(micro_)?batch_size', text)
        return partial(_from_ds_config, file=file) if is_config else None
    if _YAML.search(text) and not file.endswith((".sh", ".sbatch")):
        return partial(_from_yaml, file=file)
    if _MEGATRON.search(text):
        return partial(_from_megatron, file=file)
    if any(pattern.search(text) for pattern in (_TITAN_FLAGS, _TITAN_TOML, _TITAN_PYTHON)):
        return partial(_from_titan, file=file)
    return None


def _from_yaml(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    config = parse_yaml(text, file=file).values
    record, known = read_configuration(config, text, experiment)
    record |= _placed(experiment.cluster, *record.pop("processes"))
    if record.get("bounds", ()) is None:
        del record["bounds"]
    return {**record, "not_read": configuration_notes(config, experiment, known, file)}


def _from_ds_config(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    config = parse_json(without_comments(text), file=file)
    record = read_ds_config(config, experiment)
    return {**record, "not_read": ds_config_notes(config, experiment, record, file)}


def _from_megatron(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    command = _flags_of(text, _MEGATRON_DIALECT)
    flags = {
        name: "" if word.lower() == "true" else word
        for name, word in command.flags.items()
        if word.lower() not in _OFF
    }
    if _SWIFT.search(text):  # its default; Megatron-LM's is tp
        flags.setdefault("expert-tensor-parallel-size", "1")
    try:
        check_model(flags, experiment.model.shape)
        if is_recipe(flags.get("recipe", ""), experiment.model.shape):
            del flags["recipe"]
        check_optimizer(flags, experiment)
        record = read_flags(flags, experiment.model)
    except ValueError as error:
        raise ValueError(command.in_its_words(str(error))) from None
    placement = _placement(text, experiment.cluster)
    record |= command.places(experiment.cluster) if placement is None else {"placement": placement}
    notes = (
        replace(note, names=tuple(map(command.in_its_words, note.names)))
        for note in notes_of(flags, experiment, file)
    )
    return {**record, "not_read": (*notes, *command.more_of_the_run(file))}


def _placement(text: str, cluster: Cluster) -> list[list[Any]] | None:
    """Return host and slot of every rank, if an exported script sets them."""
    hosts, devices = (re.search(rf"^{name}=\((.*)\)$", text, re.MULTILINE) for name in _ARRAYS)
    if hosts is None or devices is None or not {*words_of(hosts[1])} <= {*cluster.host_names}:
        return None
    wrong = [slots for slots in devices[1].split() if not _SLOTS.fullmatch(slots)]
    if wrong:
        raise ValueError(f"DEVICES: found {shown(wrong[0])}; expected slots such as 0,1")
    pairs = zip(words_of(hosts[1]), devices[1].split(), strict=False)
    places = [[host, int(slot)] for host, slots in pairs for slot in slots.split(",")]
    return None if places == [*map(list, cluster.places)] else places


def _from_titan(text: str, experiment: Experiment, *, file: str) -> dict[str, Any]:
    """Read torchtitan's settings from flags, TOML or an exported Python file."""
    settings: dict[str, Any] = {}
    placement: dict[str, Any] = {}
    notes: tuple[NotRead, ...] = ()
    if _TITAN_PYTHON.search(text):
        settings = _python_settings(text)
    elif _TITAN_TOML.search(text):
        settings = parse_toml(text, file=file)
    else:
        command = _flags_of(text, _TITAN_DIALECT)
        placement = command.places(experiment.cluster)
        notes = command.more_of_the_run(file)
        for flag, value in command.flags.items():
            section, _, key = flag.rpartition(".")
            settings.setdefault(section, {})[key] = _literal(value)
        settings = {**settings.pop("", {}), **settings}
        check_configuration(command.launch.unread.get("CONFIG"), "CONFIG", experiment.model.shape)
    record = read_settings(settings, experiment) | placement
    return {**record, "not_read": (*notes_of_settings(settings, file), *notes)}


def _python_settings(text: str) -> dict[str, Any]:
    """Return the values of an exported configuration, which must be literals."""
    try:
        statements = ast.parse(text).body
    except SyntaxError as error:
        raise LineError(f"cannot be read as Python: {error.msg}", error.lineno) from None
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
                    raise LineError(message, statement.lineno) from None
    return settings


def _literal(value: str) -> object:
    """Return a number, a list or a word; an empty value means true."""
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    try:
        return ast.literal_eval(value) if value else True
    except (ValueError, SyntaxError, TypeError, *_TOO_DEEP):
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dialect:
    """How a program writes its flags."""

    marks: re.Pattern[str]  # a flag or key that only commands of this program have
    name_of: Callable[[str], str]  # normal form of the name of a flag or key
    matters: Callable[[str], bool]  # whether a plan may depend on a flag
    is_read: Callable[[str], bool]  # whether its value is read or compared


def _megatron_name(name: str) -> str:
    """Return Megatron's name of a flag, or of a key such as ``model.seq_length``."""
    *path, last = name.split(".")
    if _OTHER_MODELS & {*path}:  # of verl: models beside the one that is trained
        return name
    flag = last.replace("_", "-")
    return FlagTable.shipped().aliases.get(flag, flag)


_MEGATRON_DIALECT: Final = _Dialect(
    marks=_MEGATRON,
    name_of=_megatron_name,
    matters=lambda flag: not FlagTable.shipped().is_without_effect(flag),
    is_read=lambda flag: FlagTable.shipped().is_read(flag),
)
_TITAN_DIALECT: Final = _Dialect(
    marks=_TITAN_FLAGS,
    name_of=lambda name: name.replace("-", "_"),
    matters=lambda key: not key_is_without_effect(key),
    is_read=lambda key: not key_is_without_effect(key),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a script says of a training program."""

    flags: dict[str, str]  # values by normal form
    written: dict[str, str]  # the same names as the file writes them
    launch: Launch

    def in_its_words(self, text: str) -> str:
        """Return a text in which flags are named as the file names them."""
        return re.sub(r"--([\w.-]*\w)", lambda match: self.written.get(match[1], match[0]), text)

    def places(self, cluster: Cluster) -> dict[str, Any]:
        """Return the devices of the processes, as `_placed`, if their number is stated."""
        processes = self.launch.processes
        return {} if processes is None else _placed(cluster, processes, self.launch.stated)

    def more_of_the_run(self, file: str) -> tuple[NotRead, ...]:
        return not_read(self.launch.unread, file, why=_MORE_OF_THE_RUN)


def _flags_of(text: str, dialect: _Dialect) -> _Found:
    """Return the flags of a script's training command, and how it is started.

    Raises:
        ValueError: If a flag has two values, or one that depends on a condition of the script, or
            if no command has flags.
    """
    first: _Found | None = None
    environment = batch_variables(text)
    for branch in branches_of(text, environment=environment, wanted=launch_variables()):
        command = _of_branch(branch, dialect, text)
        if command is None:
            continue
        if first is not None:
            _check_alike(first, command, branch, dialect)
            command = _Found(
                flags={**command.flags, **first.flags},
                written={**command.written, **first.written},
                launch=command.launch if first.launch.processes is None else first.launch,
            )
        first = command
    mark = dialect.marks.search(text)
    if mark and first is None:
        message = f"{mark[0]} stands in no command that is read: write it alone into a file"
        raise LineError(message, 1 + text.count("\n", 0, mark.end()))
    return first or _Found(flags={}, written={}, launch=Launch())


def _check_alike(first: _Found, found: _Found, branch: Branch, dialect: _Dialect) -> None:
    """Refuse a branch with other values, or another number of processes, than the first one."""
    pairs = {
        first.written.get(flag, found.written.get(flag, flag)): [
            "missing" if word is None else shown(word)
            for word in (first.flags.get(flag), found.flags.get(flag))
        ]
        for flag in sorted({*first.flags, *found.flags})
        if dialect.is_read(flag)
    }
    if None not in (first.launch.processes, found.launch.processes):
        numbers = [str(read.launch.processes) for read in (first, found)]
        pairs["the number of processes"] = numbers
    for name, (one, other) in pairs.items():
        if one != other:
            raise LineError(
                f"{name} is {one} or {other}, by the condition {shown(branch.condition)}: "
                "write the number into the file",
                branch.line,
            )


def _of_branch(branch: Branch, dialect: _Dialect, text: str) -> _Found | None:
    """Return what a branch's training commands say; None if it has none."""
    flags: dict[str, str] = {}
    written: dict[str, str] = {}
    launch = Launch()
    commands = [*branch.commands, Command(line=0, words=branch.values)]
    for command in commands:
        is_list = command.words[:1] and command.words[0].startswith("--")
        is_meant = is_list or any(dialect.marks.search(f" {word}") for word in command.words)
        if not is_meant or (flags and not command.line):
            continue
        start = _start_of_program(command.words)
        for flag, value, word in _pairs(command.words[start:], dialect):
            written.setdefault(flag, word)
            if flags.setdefault(flag, value) != value and dialect.matters(flag):
                raise LineError(
                    f"{word} is {shown(flags[flag])} and {shown(value)}: keep one",
                    command.line or None,
                )
        read = launch_of(command, start, text)
        launch = read if launch.processes is None else launch
    return _Found(flags=flags, written=written, launch=launch) if flags else None


def _start_of_program(words: Sequence[str]) -> int:
    """Return the index of the first word after the program that a launcher starts."""
    before = ""
    for index, word in enumerate(words, start=1):
        is_module = before == "-m" and not is_launcher(word)
        if word.endswith(".py") or is_module or _SWIFT.fullmatch(f"{before} {word}"):
            return index
        before = word
    return 0


def _pairs(words: Sequence[str], dialect: _Dialect) -> list[tuple[str, str, str]]:
    """Return flags, and keys of overrides, with their values, and as they are written.

    A flag without a value has an empty one.
    """
    pairs: list[tuple[str, str, str]] = []
    for word in words:
        override = _OVERRIDE.fullmatch(word)
        if word.startswith("--") and word != "--":
            flag, _, value = word.removeprefix("--").partition("=")
            pairs.append((dialect.name_of(flag), value, f"--{flag}"))
        elif override:
            name, value = dialect.name_of(override[1]), override[2].strip("'\"")
            precision = _PRECISIONS.get(value) if name.endswith("precision") else None
            name, value = (precision, "") if precision else (name, value)
            pairs.append((name, value, override[1]))
        elif pairs:
            name, value, written = pairs[-1]
            if not value or (name in _SEVERAL and re.fullmatch(r"\w+", word)):
                pairs[-1] = name, f"{value} {word}".strip(), written
    return pairs


def _placed(cluster: Cluster, num_processes: int, stated: str) -> dict[str, Any]:
    """Return the first devices as ``placement``, if there are more of them than processes.

    Raises:
        ValueError: If there are fewer.
    """
    if num_processes > cluster.num_devices:
        raise ValueError(f"{stated}; the experiment has {cluster.num_devices} devices")
    places = [[host, slot] for host, slot in cluster.places[:num_processes]]
    return {"placement": places} if num_processes < cluster.num_devices else {}


def _check_job(record: dict[str, Any], experiment: Experiment) -> None:
    """Take the keys of an experiment out of a record; raise `ValueError` where they differ."""
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
        if value not in {None, expected or "fp32"}:
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


def _fitted(record: dict[str, Any], experiment: Experiment) -> dict[str, Any]:
    """Complete a STRATEGY object from the experiment's devices, and check its other keys."""
    _check_job(record, experiment)
    batch = experiment.global_batch_size
    per_replica = record["tp"] * record["pp"] * record.get("cp", 1)
    num_devices = len(record.get("placement", experiment.cluster.node_of_device))
    record["dp"], rest = divmod(num_devices, per_replica)
    if rest:
        degrees = f"tp {record['tp']} x pp {record['pp']}"
        raise ValueError(f"{degrees} do not divide the {num_devices} devices of the experiment")
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
    off |= {"not_read"} - {name for name, notes in record.items() if notes}
    return {name: value for name, value in record.items() if name not in off}

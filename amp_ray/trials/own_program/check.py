"""What is wrong with a user's own program, whatever the strategy is."""

from amp_ray.errors import InputError
from amp_ray.spec.experiment import Experiment
from amp_ray.spec.own_program import OwnProgram
from amp_ray.trials.own_program.files import file_names
from amp_ray.trials.own_program.placeholders import SEVERAL, names_in
from amp_ray.trials.own_program.values import NOT_PER_NODE


def check_program(experiment: Experiment) -> OwnProgram:
    """Refuse a program that could not be launched whatever the strategy is.

    Raises:
        InputError: With the place in the file, for an unknown placeholder, a stray brace, a name
            of a file that cannot be, or settings that contradict each other.
    """
    trials = experiment.trials
    program = trials.program
    assert program is not None
    for index, word in enumerate(program.argv):
        with experiment.places.at("trials", "program", "argv", index):
            _check_text(word, program, alone=True)
    for name, text in trials.environment.items():
        with experiment.places.at("trials", "environment", name):
            _check_variable(name)
            _check_text(text, program, alone=False)
    if program.cwd is not None and (not program.cwd.startswith("/") or "\0" in program.cwd):
        message = (
            f"found {program.cwd!r}; expected a folder that every host has, from the root: "
            "'/home/me/code'. Without cwd the program starts in the trial's folder"
        )
        raise InputError(message, where=experiment.where("trials", "program", "cwd"))
    for index, pattern in enumerate(program.collect):
        if "/" in pattern:
            message = f"found {pattern!r}; what comes back lies in the trial's folder, not below"
            raise InputError(message, where=experiment.where("trials", "program", "collect", index))
    if trials.launcher != "agent":
        message = (
            f"found {trials.launcher!r} for a program of your own; put the launcher into its argv, "
            "with per: node"
        )
        raise InputError(message, where=experiment.where("trials", "launcher"))
    file_names(experiment)
    return program


def _check_text(text: str, program: OwnProgram, *, alone: bool) -> None:
    """Refuse placeholders that can have no value, and what no argument can hold."""
    if "\0" in text:
        message = f"found {text!r}; no argument or variable can hold a zero byte"
        raise ValueError(message)
    for name in names_in(text):
        if program.per == "node" and name in NOT_PER_NODE:
            message = f"found {{{name}}} with per: node, where one command starts all ranks of one"
            raise ValueError(message)
        if name in SEVERAL and not (alone and text == f"{{{name}}}"):
            message = f"{{{name}}} stands for several arguments: it has to be one of its own"
            raise ValueError(message)


def _check_variable(name: str) -> None:
    """Refuse what cannot be the name of a variable."""
    if "=" in name or "\0" in name:
        message = f"found {name!r}, which cannot be the name of a variable"
        raise ValueError(message)

"""Refuse unknown keywords of the functions by name, with the nearest known one."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, get_args, is_typeddict

from amp_ray.errors import InputError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def checks_keywords(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return the function with an `InputError` for a keyword that it does not take."""

    @wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        keywords = _keywords(function)
        for name in kwargs:
            if name not in keywords:
                close = difflib.get_close_matches(name, keywords, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(keywords)}"
                raise InputError(f"{function.__name__}() takes no {name!r}; {hint}")
        return function(*args, **kwargs)

    return checked


def _keywords(function: Callable[..., object]) -> list[str]:
    """Return the names of a function's keywords, those of its ``Unpack`` included."""
    names = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.append(name)
            continue
        for part in get_args(parameter.annotation):
            names += [*part.__annotations__] if is_typeddict(part) else []
    return names

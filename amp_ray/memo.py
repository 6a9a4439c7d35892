"""Results of a method, kept in the object that it was called on."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Object = TypeVar("_Object")
_Result = TypeVar("_Result")


def memoised(
    method: Callable[Concatenate[_Object, _Parameters], _Result],
) -> Callable[Concatenate[_Object, _Parameters], _Result]:
    """Compute a method's result once for the same arguments, as ``cached_property`` does.

    The object needs a ``__dict__``, where the results go: they end with the object, and a copy by
    ``replace`` starts without them.
    """
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def look_up(
        instance: _Object, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> _Result:
        results = instance.__dict__.get(name)
        if results is None:
            results = instance.__dict__[name] = {}
        key = (*args, *kwargs.items()) if kwargs else args
        try:
            result: _Result = results[key]  # hashes the arguments once
        except KeyError:
            result = results[key] = method(instance, *args, **kwargs)
        return result

    return look_up

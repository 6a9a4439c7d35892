"""Array types of the partition package, and the checks that its tables share."""

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from amp_ray.arrays import FloatArray, IntArray

SmallIntArray = NDArray[np.int32]  # for millions of entries
Number = TypeVar("Number", bound=np.generic)


def frozen_times(name: str, values: ArrayLike, num_dimensions: int) -> FloatArray:
    """Freeze an array of times.

    Args:
        name: Name of the array, for messages.
        values: Copied, unless they already are a read-only array of this kind.
        num_dimensions: Required number of dimensions.

    Returns:
        A read-only, contiguous array.

    Raises:
        ValueError: If the dimensions differ, or a time is negative, infinite or not a number.
    """
    array = _frozen(name, values, np.float64, num_dimensions)
    # NaN fails every comparison, so two reductions find every invalid value.
    if not (array.min(initial=0.0) >= 0.0 and array.max(initial=0.0) < np.inf):
        index = np.argwhere(~((array >= 0.0) & (array < np.inf)))[0]
        msg = (
            f"{element(name, *index)} is {array[tuple(index)]}: "
            "times must be finite and not negative"
        )
        raise ValueError(msg)
    return array


def frozen_integers(
    name: str, values: ArrayLike, num_dimensions: int, *, smallest: int
) -> IntArray:
    """Freeze an array of integers.

    Args:
        name: Name of the array, for messages.
        values: Copied, unless they already are a read-only array of this kind.
        num_dimensions: Required number of dimensions.
        smallest: Least allowed value.

    Returns:
        A read-only, contiguous array.

    Raises:
        ValueError: If the dimensions differ, the type is no integer, or a value is too small.
    """
    raw = np.asarray(values)
    if raw.size and not np.issubdtype(raw.dtype, np.integer):
        msg = f"{name} holds values of type {raw.dtype}, expected integers"
        raise ValueError(msg)
    array = _frozen(name, raw, np.int64, num_dimensions)
    if array.min(initial=smallest) < smallest:
        index = np.argwhere(array < smallest)[0]
        msg = f"{element(name, *index)} is {array[tuple(index)]}, expected at least {smallest}"
        raise ValueError(msg)
    return array


def element(name: str, *index: int) -> str:
    """Format one element of an array, for messages.

    Example:
        >>> element("cut_time_s", 1, 4)
        'cut_time_s[1, 4]'
    """
    return f"{name}[{', '.join(str(position) for position in index)}]"


def _frozen(
    name: str, values: ArrayLike, dtype: type[Number], num_dimensions: int
) -> NDArray[Number]:
    """Return a contiguous, read-only array of the type."""
    array = np.asarray(values)
    if array.ndim != num_dimensions:
        msg = f"{name} has shape {array.shape}, expected {num_dimensions} dimension(s)"
        raise ValueError(msg)
    if array.dtype == dtype and array.flags.c_contiguous and not array.flags.writeable:
        return array
    frozen = np.array(array, dtype=dtype, order="C")
    frozen.flags.writeable = False
    return frozen

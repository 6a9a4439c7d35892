"""The types of arrays."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int32]  # for millions of entries
BoolArray = NDArray[np.bool_]

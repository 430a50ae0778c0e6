# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays to a framework's tensors and back, without changing a bit."""

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
import numpy as np

NAMES = ("numpy", "torch", "jax")
CARRIER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(array):
    """The array as integers: NaN equals NaN, and -0 is not 0."""
    return np.ascontiguousarray(array).view(CARRIER[array.dtype.itemsize])


class NumPy:
    name = "numpy"
    writable = True
    tensor_type = np.ndarray

    def tensor(self, array):
        return array

    def array(self, tensor):
        return tensor


class Torch:
    name = "torch"
    writable = True

    def __init__(self, torch):
        self.torch = torch
        self.tensor_type = torch.Tensor

    def tensor(self, array):
        """Shares memory with `array`, strides included."""
        carrier = array.view(CARRIER[array.dtype.itemsize])
        return self.torch.from_numpy(carrier).view(getattr(self.torch, str(array.dtype)))

    def array(self, tensor):
        carrier = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        return tensor.view(carrier[tensor.element_size()]).numpy().view(dtype)


class Jax:
    name = "jax"
    writable = False  # JAX arrays are immutable: no out=, no lse=, no cache

    def __init__(self, jax):
        self.jax = jax
        self.tensor_type = jax.Array

    def tensor(self, array):
        return self.jax.numpy.asarray(array)

    def array(self, tensor):
        return np.asarray(tensor)

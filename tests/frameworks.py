# SPDX-License-Identifier: Apache-2.0
"""Converts NumPy arrays to tensors of a framework and back, bit by bit.

On the CPU, tensors share the array's memory. On a GPU they have a copy of all the memory that the
array is a view of, and lie in it as the array does.
"""

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with NumPy)
import numpy as np

NAMES = ("numpy", "torch", "jax")
GPU_NAMES = ("torch", "cupy", "jax")
CARRIER = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits(array):
    """The array as integers: NaN equals NaN, and -0 is not 0."""
    return np.ascontiguousarray(array).view(CARRIER[array.dtype.itemsize])


def owner_of(array):
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def place_in(owner, array):
    """(offset, strides) of a view, in elements of its own."""
    offset = array.ctypes.data - owner.ctypes.data
    return offset // array.itemsize, [stride // array.itemsize for stride in array.strides]


class NumPy:
    name = "numpy"
    writable = True
    tensor_type = np.ndarray

    def tensor(self, array):
        return array

    def array(self, tensor):
        return tensor

    def fetch(self, array, tensor):
        """Copies what was written to `tensor` back to the array that it was made from."""


class Torch:
    name = "torch"
    writable = True

    def __init__(self, torch):
        self.torch = torch
        self.tensor_type = torch.Tensor

    def tensor(self, array):
        """A tensor that shares the memory of `array`, with its strides."""
        carrier = array.view(CARRIER[array.dtype.itemsize])
        return self.torch.from_numpy(carrier).view(getattr(self.torch, str(array.dtype)))

    def array(self, tensor):
        carrier = {1: self.torch.uint8, 2: self.torch.int16, 4: self.torch.int32}
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        return tensor.view(carrier[tensor.element_size()]).numpy().view(dtype)

    def fetch(self, array, tensor):
        pass


class Jax:
    name = "jax"
    writable = False  # JAX arrays are immutable: no out=, no lse=, no cache

    def __init__(self, jax, platform="cpu"):
        self.jax = jax
        self.tensor_type = jax.Array
        self.device = jax.devices(platform)[0]

    def tensor(self, array):
        return self.jax.device_put(array, self.device)

    def array(self, tensor):
        return np.asarray(tensor)


class TorchCuda(Torch):
    def __init__(self, torch, device="cuda:0"):
        super().__init__(torch)
        self.device = device

    def tensor(self, array):
        owner = owner_of(array)
        memory = self.torch.from_numpy(owner.reshape(-1).view(CARRIER[owner.itemsize]))
        memory = memory.to(self.device).view(getattr(self.torch, str(array.dtype)))
        offset, strides = place_in(owner, array)
        return memory.as_strided(array.shape, strides, offset)

    def array(self, tensor):
        return super().array(tensor.cpu())

    def fetch(self, array, tensor):
        owner = owner_of(array)
        memory = tensor.as_strided((owner.size,), (1,), 0)
        bits(owner).reshape(-1)[:] = bits(self.array(memory))


class CuPy:
    """bfloat16 as uint16 and 8-bit floats as uint8, as usual without these dtypes."""

    name = "cupy"
    writable = True
    STORED = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}

    def __init__(self, cupy):
        self.cupy = cupy
        self.tensor_type = cupy.ndarray

    def tensor(self, array):
        owner = owner_of(array)
        dtype = self.STORED.get(str(array.dtype), array.dtype)
        memory = self.cupy.asarray(owner.reshape(-1).view(dtype))
        offset, strides = place_in(owner, array)
        strides = [stride * array.itemsize for stride in strides]
        start = memory.data + offset * array.itemsize
        return self.cupy.ndarray(array.shape, dtype, start, strides)

    def array(self, tensor):
        array = tensor.get()
        return array.view("bfloat16") if array.dtype == np.uint16 else array

    def fetch(self, array, tensor):
        owner = owner_of(array)
        offset, _ = place_in(owner, array)
        start = tensor.data - offset * array.itemsize
        memory = self.cupy.ndarray((owner.size,), tensor.dtype, start)
        bits(owner).reshape(-1)[:] = bits(memory.get())


def gpu_framework(name, module):
    if name == "jax":
        return Jax(module, "gpu")
    return {"torch": TorchCuda, "cupy": CuPy}[name](module)

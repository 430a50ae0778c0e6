# SPDX-License-Identifier: Apache-2.0
"""The types of arguments, for type checkers: tensors, lengths, dtypes, devices and streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar


class Tensor(Protocol):
    """A tensor of any framework: NumPy, PyTorch, CuPy, JAX or another one that speaks DLPack."""

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...
    @property
    def __dlpack_device__(self) -> Callable[..., Any]: ...


TensorT = TypeVar("TensorT", bound=Tensor)
"""A tensor of the framework in which results are returned."""

ResultT_co = TypeVar("ResultT_co", covariant=True)

Lengths: TypeAlias = Sequence[int] | Tensor
"""Integers on the host: a list, a NumPy array, or a tensor of one dimension."""

PrefixRows: TypeAlias = Sequence[Sequence[int]] | Tensor
"""Rows of three integers on the host: a list of lists or tuples, or a tensor of shape [n, 3]."""

KeyRange: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(request, query, kv_len), arrays [tokens] of int64 -> (begin, end), integers or such arrays."""


class FrameworkDType(Protocol):
    """A dtype of NumPy or PyTorch."""

    @property
    def itemsize(self) -> int: ...


class TorchDevice(Protocol):
    """A device of PyTorch: torch.device."""

    @property
    def type(self) -> str: ...


class NumberedDevice(Protocol):
    """A device of CuPy or JAX."""

    @property
    def id(self) -> int: ...


class CudaStream(Protocol):
    """A stream of cuda.core, or of another library that follows its protocol."""

    @property
    def __cuda_stream__(self) -> Any: ...


class TorchStream(Protocol):
    """A stream of PyTorch: torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A stream of CuPy: cupy.cuda.Stream."""

    @property
    def ptr(self) -> int: ...


FloatName: TypeAlias = Literal["float32", "float16", "bfloat16"]
Float8Name: TypeAlias = Literal["float8_e4m3fn", "float8_e5m2"]

# The scalar types of NumPy, JAX and ml_dtypes, such as np.float32, are classes: type[Any].
FloatDType: TypeAlias = FloatName | FrameworkDType | type[Any]
KvDType: TypeAlias = FloatName | Float8Name | FrameworkDType | type[Any]
MlaDType: TypeAlias = KvDType | Literal["fp8_ds_mla"]
VariantDType: TypeAlias = (
    Literal["float32", "int32", "int64", "uint32"] | FrameworkDType | type[Any]
)
KvLayout: TypeAlias = Literal["NHD", "HND"]
LogprobsOf: TypeAlias = Literal["filtered", "raw"]
KernelGroup: TypeAlias = Literal["general", "hopper"]
Device: TypeAlias = str | TorchDevice | NumberedDevice
Stream: TypeAlias = int | CudaStream | TorchStream | CupyStream


class BoundRun(Protocol[ResultT_co]):
    """What `Attention.bind` returns. A call runs the attention on the bound tensors."""

    def __call__(self, stream: Stream | None = None) -> ResultT_co: ...

# What the stub generator does not see: the exceptions, whose module is the package.
^_core\.__suffix__$:
    class UnsupportedError(NotImplementedError):
        """Valid, but no kernel of this build can do it."""

    class CudaError(RuntimeError):
        """A CUDA call failed."""

_core\.(Plan|BoundRun)\.__reduce_ex__$:
    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        """Refused: a copy would share what it points to."""
    \from typing import NoReturn, SupportsIndex

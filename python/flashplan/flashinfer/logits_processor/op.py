# SPDX-License-Identifier: Apache-2.0
"""The base classes of the operators that a pipeline runs."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from flashplan.flashinfer.logits_processor.types import TaggedTensor, TensorType


class Op(abc.ABC):
    """Takes a tensor of the type IN and returns one of the type OUT."""

    IN: ClassVar[TensorType | None] = None
    OUT: ClassVar[TensorType | None] = None

    def __init__(self) -> None:
        if self.IN is None or self.OUT is None:
            raise ValueError(
                f"Operator {type(self).__name__} must define IN and OUT tensor types, "
                f"got {self.IN} and {self.OUT}"
            )

    @abc.abstractmethod
    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        """Applies the operator. kwargs are all arguments of the pipeline's call."""

    def _validate_input_type(self, tensor: TaggedTensor) -> TensorType:
        """Returns OUT. Raises ValueError unless the tensor has the type IN."""
        if tensor.type != self.IN:
            raise ValueError(
                f"Operator {type(self).__name__} cannot accept input type {tensor.type}. "
                f"Expected: {self.IN}"
            )
        assert self.OUT is not None
        return self.OUT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.IN} -> {self.OUT})"


class ParameterizedOp(Op):
    """An operator with parameters, given by a call of the pipeline or else by the constructor."""

    def __init__(self, **default_params: Any) -> None:
        super().__init__()
        self.default_params = default_params

    def _get_param(self, name: str, kwargs: dict[str, Any], required: bool = True) -> Any:
        found = kwargs.get(name, self.default_params.get(name))
        if found is None and required:
            raise ValueError(
                f"Required parameter '{name}' not provided for {type(self).__name__}, got "
                f"{', '.join(sorted(kwargs)) or 'none'}"
            )
        return found

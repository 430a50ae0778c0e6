# SPDX-License-Identifier: Apache-2.0
"""The meanings of tensors in a pipeline: logits, probabilities or indices."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor


class TensorType(enum.Enum):
    """Logits and probabilities are float [batch, vocab], indices are the ids of tokens [batch]."""

    LOGITS = 1
    PROBS = 2
    INDICES = 3

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"TensorType.{self.name}"


@dataclasses.dataclass(slots=True, frozen=True)
class TaggedTensor:
    """A tensor with its meaning. PyTorch's functions take it and return plain tensors."""

    data: Tensor
    type: TensorType

    @staticmethod
    def logits(t: Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.LOGITS)

    @staticmethod
    def probs(t: Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.PROBS)

    @staticmethod
    def indices(t: Tensor) -> TaggedTensor:
        return TaggedTensor(t, TensorType.INDICES)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = [x.data if isinstance(x, TaggedTensor) else x for x in args]
        return func(*plain, **(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def size(self, dim: int | None = None) -> Any:
        return self.data.size(dim)

    def __repr__(self) -> str:
        return (
            f"TaggedTensor(type={self.type}, shape={self.shape}, dtype={self.dtype}, "
            f"device={self.device})"
        )

# SPDX-License-Identifier: Apache-2.0
"""Pipelines from logits to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from flashplan.flashinfer.logits_processor.compiler import compile_pipeline
from flashplan.flashinfer.logits_processor.legalization import (
    LegalizationError,
    infer_initial_type,
    legalize_processors,
)
from flashplan.flashinfer.logits_processor.types import TaggedTensor, TensorType
from flashplan.flashinfer.logits_processor.validators import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashplan.flashinfer.logits_processor.fusion_rules import FusionRule
    from flashplan.flashinfer.logits_processor.op import Op
    from flashplan.flashinfer.logits_processor.processors import LogitsProcessor
    from flashplan.flashinfer.logits_processor.validators import ValidityCheck


class LogitsPipe:
    """Steps that are applied one after the other.

    Args:
        processors: the steps, at least one.
        compile: fuse operators where rules allow it, for instance TopK and Sample.
        input_type: LOGITS or PROBS; needed if the first step takes both.
        custom_fusion_rules: rules in addition to FlashInfer's.
        custom_validity_checks: functions of the operators that raise CompileError.

    Raises:
        ValueError: processors is empty, a step does not take what the one before it returns, or a
            validity check fails.

    Examples:
        >>> import torch
        >>> from flashplan.flashinfer.logits_processor import LogitsPipe, Sample, Softmax, TopK
        >>> pipe = LogitsPipe([Softmax(), TopK(), Sample()])
        >>> pipe
        LogitsPipe([Softmax -> TopK -> Sample], ops=[SoftmaxOp -> ProbsTopKOp -> ProbsSampleOp], \
compiled_ops=[SoftmaxOp -> FusedProbsTopKSampleOp])
        >>> pipe(torch.tensor([[0.0, 3.0, 1.0]]), top_k=1)
        tensor([1], dtype=torch.int32)
    """

    def __init__(
        self,
        processors: Iterable[LogitsProcessor],
        compile: bool = True,
        input_type: TensorType | None = None,
        custom_fusion_rules: Iterable[FusionRule] | None = None,
        custom_validity_checks: Iterable[ValidityCheck] | None = None,
    ) -> None:
        self.processors = list(processors)
        if not self.processors:
            raise ValueError("processors: Pipeline cannot be empty, got none")
        try:
            self._initial_type = input_type or infer_initial_type(self.processors)
            self.ops = legalize_processors(self.processors, self._initial_type)
            self.compiled_ops: list[Op] | None = None
            if compile:
                self.compiled_ops = compile_pipeline(
                    self.ops, custom_fusion_rules, custom_validity_checks
                )
        except (LegalizationError, CompileError) as error:
            raise ValueError(f"Pipeline creation failed: {error}") from error

    @property
    def initial_type(self) -> TensorType:
        """The type of tensors that the first step takes: LOGITS or PROBS."""
        return self._initial_type

    def compile(
        self,
        custom_fusion_rules: Iterable[FusionRule] | None = None,
        custom_validity_checks: Iterable[ValidityCheck] | None = None,
    ) -> None:
        """Fuses operators where rules allow it.

        Raises:
            ValueError: a check fails.
        """
        try:
            self.compiled_ops = compile_pipeline(
                self.ops, custom_fusion_rules, custom_validity_checks
            )
        except CompileError as error:
            raise ValueError(f"Compilation failed: {error}") from error

    def __call__(self, x: Tensor | TaggedTensor, **kwargs: Any) -> Tensor:
        """Applies the steps to x [batch, vocab], which has the type initial_type if it has none.

        kwargs are the parameters of all steps, such as temperature and top_k.

        Raises:
            ValueError: a step fails, for instance because a parameter is missing.
        """
        tensor = x if isinstance(x, TaggedTensor) else TaggedTensor(x, self._initial_type)
        for i, op in enumerate(self.ops if self.compiled_ops is None else self.compiled_ops):
            try:
                tensor = op(tensor, **kwargs)
            except Exception as error:
                raise ValueError(
                    f"Error executing operator {i} ({type(op).__name__}): {error}"
                ) from error
        return tensor.data

    def __repr__(self) -> str:
        steps, ops, compiled = (
            " -> ".join(type(x).__name__ for x in found)
            for found in (self.processors, self.ops, self.compiled_ops or ())
        )
        return f"LogitsPipe([{steps}], ops=[{ops}], compiled_ops=[{compiled}])"

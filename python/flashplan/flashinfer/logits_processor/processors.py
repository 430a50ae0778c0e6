# SPDX-License-Identifier: Apache-2.0
"""The steps that describe a pipeline. A step has an operator for logits, for probabilities, or one
for each of them."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

from flashplan.flashinfer.logits_processor.operators import (
    LogitsSampleOp,
    LogitsTopKOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)
from flashplan.flashinfer.logits_processor.types import TensorType

if TYPE_CHECKING:
    from flashplan.flashinfer.logits_processor.op import Op, ParameterizedOp


class LogitsProcessor(abc.ABC):
    """A step of a pipeline. `params` has parameters of its operators, used by calls of the pipeline
    that do not give them."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abc.abstractmethod
    def legalize(self, input_type: TensorType | None) -> list[Op]:
        """The operators of this step for a tensor of this type; None: the type is not known.

        Raises:
            ValueError: the step does not take tensors of this type.
        """

    def __repr__(self) -> str:
        params = ", ".join(f"{name}={value}" for name, value in self.params.items())
        return f"{type(self).__name__}({params})"


class _Step(LogitsProcessor):
    OPS: ClassVar[dict[TensorType, type[ParameterizedOp]]] = {}

    def legalize(self, input_type: TensorType | None) -> list[Op]:
        if input_type is None or input_type not in self.OPS:
            raise ValueError(
                f"{type(self).__name__} can only be applied to "
                f"{' or '.join(map(str, self.OPS))}, got {input_type}"
            )
        return [self.OPS[input_type](**self.params)]


class Temperature(_Step):
    """Divides logits by `temperature`: a float > 0, or a tensor [batch] of such."""

    OPS = {TensorType.LOGITS: TemperatureOp}


class Softmax(_Step):
    """Turns logits into probabilities, once at most in a pipeline. enable_pdl has no effect."""

    OPS = {TensorType.LOGITS: SoftmaxOp}

    def __init__(self, enable_pdl: bool | None = None, **params: Any) -> None:
        super().__init__(enable_pdl=enable_pdl, **params)


class TopK(_Step):
    """Keeps the `top_k` largest: other logits become -inf; other probabilities become 0, and those
    that are kept are divided by their sum. `top_k` is an int > 0, or a tensor [batch] of such.

    Args:
        joint_topk_topp: if TopP and Sample follow in a compiled pipeline, whether both filters
            apply to the same probabilities; otherwise TopP applies to what TopK keeps.
    """

    OPS = {TensorType.LOGITS: LogitsTopKOp, TensorType.PROBS: ProbsTopKOp}

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)


class TopP(_Step):
    """Keeps the fewest largest probabilities with a sum >= `top_p`: a float in (0, 1], or a tensor
    [batch] of such."""

    OPS = {TensorType.PROBS: TopPOp}


class MinP(_Step):
    """Keeps probabilities >= `min_p` * the largest one. `min_p` is a float in (0, 1], or a tensor
    [batch] of such."""

    OPS = {TensorType.PROBS: MinPOp}


class Sample(_Step):
    """Draws tokens, the last step of a pipeline: int32 [batch].

    A call of the pipeline may give indices, generator, and seed with offset, which are those of
    `sampling_from_probs`. deterministic has no effect: equal arguments give equal tokens.
    """

    OPS = {TensorType.LOGITS: LogitsSampleOp, TensorType.PROBS: ProbsSampleOp}

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

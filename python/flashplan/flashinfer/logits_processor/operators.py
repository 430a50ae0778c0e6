# SPDX-License-Identifier: Apache-2.0
"""The operators of pipelines, on the functions of `flashplan.flashinfer.sampling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashplan.flashinfer import sampling
from flashplan.flashinfer._sampling import draw, parameter
from flashplan.flashinfer.logits_processor.op import ParameterizedOp
from flashplan.flashinfer.logits_processor.types import TaggedTensor, TensorType

LOGITS, PROBS, INDICES = TensorType.LOGITS, TensorType.PROBS, TensorType.INDICES

# For each parameter: a check of a value that is no tensor [batch], and the message if it fails.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda x: isinstance(x, float) and x > 0,
        "Temperature must be positive float or a tensor array",
    ),
    "top_k": (
        lambda x: isinstance(x, int) and x > 0,
        "top_k must be a positive integer or a tensor array",
    ),
    "top_p": (lambda x: 0 < x <= 1, "top_p must be float in (0, 1] or a tensor array"),
    "min_p": (lambda x: 0 < x <= 1, "min_p must be float in (0, 1] or a tensor array"),
}


class _FilterOp(ParameterizedOp):
    def _checked(self, name: str, kwargs: dict[str, Any]) -> Any:
        value = self._get_param(name, kwargs)
        is_good, message = _RULES[name]
        if not isinstance(value, Tensor) and not is_good(value):
            raise ValueError(f"{message}, got {value!r}")
        return value


class TemperatureOp(_FilterOp):
    """Divides logits by temperature, which is a number or a tensor [batch]."""

    IN, OUT = LOGITS, LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        given = self._checked("temperature", kwargs)
        temperature = parameter("temperature", given, tensor.data, torch.float32)
        if isinstance(temperature, Tensor):
            temperature = temperature.unsqueeze(-1)
        return TaggedTensor(tensor.data / temperature, out)


class SoftmaxOp(ParameterizedOp):
    """Computes the probabilities of logits, float32. enable_pdl has no effect."""

    IN, OUT = LOGITS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        return TaggedTensor(sampling.softmax(tensor.data), out)


class FusedTemperatureSoftmaxOp(_FilterOp):
    """Computes the probabilities of logits / temperature, float32, by one kernel."""

    IN, OUT = LOGITS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        temperature = self._checked("temperature", kwargs)
        return TaggedTensor(sampling.softmax(tensor.data, temperature), out)


class LogitsTopKOp(_FilterOp):
    """Applies `top_k_mask_logits`."""

    IN, OUT = LOGITS, LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        top_k = self._checked("top_k", kwargs)
        return TaggedTensor(sampling.top_k_mask_logits(tensor.data, top_k), out)


class ProbsTopKOp(_FilterOp):
    """Applies `top_k_renorm_probs`."""

    IN, OUT = PROBS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        top_k = self._checked("top_k", kwargs)
        return TaggedTensor(sampling.top_k_renorm_probs(tensor.data, top_k), out)


class TopPOp(_FilterOp):
    """Applies `top_p_renorm_probs`."""

    IN, OUT = PROBS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        top_p = self._checked("top_p", kwargs)
        return TaggedTensor(sampling.top_p_renorm_probs(tensor.data, top_p), out)


class MinPOp(_FilterOp):
    """Keeps probabilities >= min_p * the largest one, divided by their sum; others become 0."""

    IN, OUT = PROBS, PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        probs = tensor.data
        min_p = parameter("min_p", self._checked("min_p", kwargs), probs, torch.float32)
        if isinstance(min_p, Tensor):
            min_p = min_p.unsqueeze(-1)
        kept = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0)
        return TaggedTensor(kept / kept.sum(-1, keepdim=True), out)


class _SampleOp(_FilterOp):
    """Draws a token from each row, among the tokens that FILTERS keep.

    A call of the pipeline may give indices, generator, and seed with offset, which are those of
    `sampling_from_probs`. deterministic has no effect.
    """

    FILTERS: ClassVar[tuple[str, ...]] = ()

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        out = self._validate_input_type(tensor)
        filters = {name: self._checked(name, kwargs) for name in self.FILTERS}
        indices, generator, seed, offset = (
            self._get_param(name, kwargs, required=False)
            for name in ("indices", "generator", "seed", "offset")
        )
        tokens, _ = draw(
            tensor.data,
            indices,
            generator,
            False,
            seed,
            offset,
            from_probs=self.IN is PROBS,
            joint=len(filters) > 1,
            **filters,
        )
        return TaggedTensor(tokens, out)


class LogitsSampleOp(_SampleOp):
    """Draws by `sampling_from_logits`."""

    IN, OUT = LOGITS, INDICES


class ProbsSampleOp(_SampleOp):
    """Draws by `sampling_from_probs`."""

    IN, OUT = PROBS, INDICES


class FusedProbsTopKSampleOp(_SampleOp):
    """Draws by `top_k_sampling_from_probs`."""

    IN, OUT = PROBS, INDICES
    FILTERS = ("top_k",)


class FusedProbsTopPSampleOp(_SampleOp):
    """Draws by `top_p_sampling_from_probs`."""

    IN, OUT = PROBS, INDICES
    FILTERS = ("top_p",)


class FusedProbsMinPSampleOp(_SampleOp):
    """Draws by `min_p_sampling_from_probs`."""

    IN, OUT = PROBS, INDICES
    FILTERS = ("min_p",)


class FusedProbsTopKTopPSampleOp(_SampleOp):
    """Draws by `top_k_top_p_sampling_from_probs` with filter_apply_order="joint"."""

    IN, OUT = PROBS, INDICES
    FILTERS = ("top_k", "top_p")

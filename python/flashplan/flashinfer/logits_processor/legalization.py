# SPDX-License-Identifier: Apache-2.0
"""Converts the steps of a pipeline to operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashplan.flashinfer.logits_processor.types import TensorType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashplan.flashinfer.logits_processor.op import Op
    from flashplan.flashinfer.logits_processor.processors import LogitsProcessor


class LegalizationError(Exception):
    """A step can not take what the step before it returns, or the first step can not take the
    input of the pipeline."""


def legalize_processors(
    processors: Sequence[LogitsProcessor], initial_type: TensorType = TensorType.LOGITS
) -> list[Op]:
    """The operators of steps, the first of which takes a tensor of initial_type.

    Raises:
        LegalizationError: there are no steps, or a step does not take what the one before gives.
    """
    if not processors:
        raise LegalizationError("Cannot legalize empty processor list")
    ops: list[Op] = []
    current: TensorType | None = initial_type
    for i, processor in enumerate(processors):
        name = type(processor).__name__
        try:
            found = processor.legalize(current)
        except Exception as error:
            raise LegalizationError(
                f"Failed to legalize processor {i} ({name}): {error}"
            ) from error
        if not found:
            raise LegalizationError(
                f"Failed to legalize processor {i} ({name}): Processor {name} produced no ops"
            )
        ops += found
        current = ops[-1].OUT
    return ops


def infer_initial_type(processors: Sequence[LogitsProcessor]) -> TensorType:
    """What the first step takes: logits or probabilities.

    Raises:
        LegalizationError: it takes both, or none of them.
    """
    first = processors[0]
    taken = [x for x in (TensorType.LOGITS, TensorType.PROBS) if _takes(first, x)]
    name = type(first).__name__
    if len(taken) > 1:
        raise LegalizationError(
            f"Cannot infer input type: {name} can accept both LOGITS and PROBS. Please specify "
            "input_type explicitly when creating the LogitsPipe."
        )
    if not taken:
        raise LegalizationError(
            f"Processor {name} cannot accept standard pipeline inputs (LOGITS or PROBS)"
        )
    return taken[0]


def _takes(processor: LogitsProcessor, kind: TensorType) -> bool:
    try:
        processor.legalize(kind)
    except (ValueError, LegalizationError):
        return False
    return True

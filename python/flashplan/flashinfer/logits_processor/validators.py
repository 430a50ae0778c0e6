# SPDX-License-Identifier: Apache-2.0
"""Checks of the operators of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from flashplan.flashinfer.logits_processor.op import Op
from flashplan.flashinfer.logits_processor.operators import SoftmaxOp
from flashplan.flashinfer.logits_processor.types import TensorType

# A check of a pipeline's operators, which raises CompileError if they can not follow each other.
ValidityCheck: TypeAlias = Callable[[list[Op]], None]


class CompileError(Exception):
    """The operators do not form a pipeline."""


def types_fit(ops: list[Op]) -> None:
    """Checks that each operator takes what the one before returns, and the first one logits or
    probabilities. Raises CompileError."""
    name = type(ops[0]).__name__
    if ops[0].IN not in (TensorType.LOGITS, TensorType.PROBS):
        raise CompileError(
            f"First operator ({name}) cannot accept standard pipeline inputs. Expected LOGITS or "
            f"PROBS, but operator accepts: {ops[0].IN}"
        )
    for i in range(1, len(ops)):
        before, after = ops[i - 1 : i + 1]
        if before.OUT != after.IN:
            raise CompileError(
                f"Type mismatch at operator {i} ({type(after).__name__}). Expected input type: "
                f"{before.OUT}, but operator accepts: {after.IN}."
            )


def one_softmax(ops: list[Op]) -> None:
    if sum(isinstance(op, SoftmaxOp) for op in ops) > 1:
        raise CompileError(
            "Multiple Softmax operators found. Only one Softmax is allowed per pipeline."
        )


def indices_are_last(ops: list[Op]) -> None:
    for i, op in enumerate(ops[:-1]):
        if op.OUT == TensorType.INDICES:
            raise CompileError(
                "No operator may follow one that outputs Indices. Found "
                f"{type(ops[i + 1]).__name__} after {type(op).__name__} which outputs Indices."
            )


def get_default_validity_checks() -> list[ValidityCheck]:
    return [types_fit, one_softmax, indices_are_last]

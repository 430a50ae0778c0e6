# SPDX-License-Identifier: Apache-2.0
"""Rules by which one operator replaces several operators of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flashplan.flashinfer.logits_processor.op import Op, ParameterizedOp
from flashplan.flashinfer.logits_processor.operators import (
    FusedProbsMinPSampleOp,
    FusedProbsTopKSampleOp,
    FusedProbsTopKTopPSampleOp,
    FusedProbsTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    MinPOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)


class FusionRule(NamedTuple):
    """Consecutive operators that build() replaces by one.

    Attributes:
        pattern: their classes, or bases of them.
        guard: takes operators that fit the pattern, and says whether to replace them.
        build: takes these operators, and returns the one that replaces them.
        prio: rules with larger ones are tried earlier.
    """

    pattern: tuple[type, ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


def _parameters(ops: list[Op]) -> dict[str, Any]:
    """The parameters that the operators were made with."""
    merged: dict[str, Any] = {}
    for op in ops:
        merged |= getattr(op, "default_params", {})
    return merged


def _rule(fused: type[ParameterizedOp], *pattern: type[ParameterizedOp], prio: int) -> FusionRule:
    return FusionRule(pattern, lambda _: True, lambda ops: fused(**_parameters(ops)), prio)


def get_default_fusion_rules() -> list[FusionRule]:
    joint = _rule(FusedProbsTopKTopPSampleOp, ProbsTopKOp, TopPOp, ProbsSampleOp, prio=100)
    return [
        _rule(FusedTemperatureSoftmaxOp, TemperatureOp, SoftmaxOp, prio=100),
        joint._replace(guard=lambda ops: bool(_parameters(ops).get("joint_topk_topp"))),
        _rule(FusedProbsTopKSampleOp, ProbsTopKOp, ProbsSampleOp, prio=10),
        _rule(FusedProbsTopPSampleOp, TopPOp, ProbsSampleOp, prio=10),
        _rule(FusedProbsMinPSampleOp, MinPOp, ProbsSampleOp, prio=10),
    ]

# SPDX-License-Identifier: Apache-2.0
"""Checks the operators of a pipeline and fuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashplan.flashinfer.logits_processor.fusion_rules import FusionRule, get_default_fusion_rules
from flashplan.flashinfer.logits_processor.validators import (
    CompileError,
    ValidityCheck,
    get_default_validity_checks,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flashplan.flashinfer.logits_processor.op import Op


class Compiler:
    """Holds fusion rules and validity checks, at first those of FlashInfer."""

    def __init__(self) -> None:
        self.fusion_rules: list[FusionRule] = []
        self.validity_checks: list[ValidityCheck] = get_default_validity_checks()
        for rule in get_default_fusion_rules():
            self.register_fusion_rule(rule)

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Adds a rule. It is tried after rules that have the same prio."""
        self.fusion_rules.append(rule)
        self.fusion_rules.sort(key=lambda known: -known.prio)

    def register_validity_check(self, check: ValidityCheck) -> None:
        self.validity_checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """Checks ops, and returns the operators to run instead of them.

        Raises:
            CompileError: ops is empty, or a validity check fails.
        """
        if not ops:
            raise CompileError("Cannot compile empty operator list")
        compiled = list(ops)
        for check in self.validity_checks:
            check(compiled)
        begin = 0
        while begin < len(compiled):
            rule = self._rule_for(compiled, begin)
            if rule is None:
                begin += 1
                continue
            end = begin + len(rule.pattern)
            compiled[begin:end] = [rule.build(compiled[begin:end])]
            begin = max(begin - 1, 0)  # a rule may fit the new operator and the one before it
        return compiled

    def _rule_for(self, ops: list[Op], begin: int) -> FusionRule | None:
        for rule in self.fusion_rules:
            window = ops[begin : begin + len(rule.pattern)]
            fits = len(window) == len(rule.pattern) and all(map(isinstance, window, rule.pattern))
            if fits and rule.guard(window):
                return rule
        return None


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Iterable[FusionRule] | None = None,
    custom_validity_checks: Iterable[ValidityCheck] | None = None,
) -> list[Op]:
    """Calls `Compiler.compile` with FlashInfer's rules and checks, and further ones."""
    compiler = Compiler()
    for rule in custom_fusion_rules or ():
        compiler.register_fusion_rule(rule)
    for check in custom_validity_checks or ():
        compiler.register_validity_check(check)
    return compiler.compile(ops)

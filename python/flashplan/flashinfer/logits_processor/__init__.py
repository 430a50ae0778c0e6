# SPDX-License-Identifier: Apache-2.0
"""Pipelines from logits to tokens with FlashInfer's names.

Steps (`Temperature`, `Softmax`, `TopK`, `TopP`, `MinP`, `Sample`) become operators that fit the
type of their input, logits or probabilities; a compiled pipeline fuses them.
"""

from flashplan.flashinfer.logits_processor.compiler import Compiler, compile_pipeline
from flashplan.flashinfer.logits_processor.fusion_rules import FusionRule
from flashplan.flashinfer.logits_processor.legalization import (
    LegalizationError,
    legalize_processors,
)
from flashplan.flashinfer.logits_processor.op import Op, ParameterizedOp
from flashplan.flashinfer.logits_processor.pipeline import LogitsPipe
from flashplan.flashinfer.logits_processor.processors import (
    LogitsProcessor,
    MinP,
    Sample,
    Softmax,
    Temperature,
    TopK,
    TopP,
)
from flashplan.flashinfer.logits_processor.types import TaggedTensor, TensorType
from flashplan.flashinfer.logits_processor.validators import CompileError

__all__ = [
    "CompileError",
    "Compiler",
    "FusionRule",
    "LegalizationError",
    "LogitsPipe",
    "LogitsProcessor",
    "MinP",
    "Op",
    "ParameterizedOp",
    "Sample",
    "Softmax",
    "TaggedTensor",
    "Temperature",
    "TensorType",
    "TopK",
    "TopP",
    "compile_pipeline",
    "legalize_processors",
]

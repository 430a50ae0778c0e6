# SPDX-License-Identifier: Apache-2.0
"""A random valid call of any function that takes tensors."""

from misuse.calls import Append, Merge, MergeStack, Run, pick
from misuse.row_calls import AddRmsNorm, Gated, LayerNorm, RmsNorm


def any_call(rng):
    rows = pick(rng, RmsNorm, AddRmsNorm, LayerNorm, Gated)
    return pick(rng, Run, Run, Run, Append, Append, Merge, MergeStack, rows)(rng)

# SPDX-License-Identifier: Apache-2.0
"""A random valid call of any function that takes tensors."""

from misuse.calls import Append, AppendSlots, Merge, MergeStack, RopeAppend, Run, pick
from misuse.data_calls import CheckData
from misuse.row_calls import AddRmsNorm, AddRmsNormTo, Gated, LayerNorm, RmsNorm
from misuse.sampling_calls import Penalties, Sample, Softmax, Verify


def any_call(rng):
    rows = pick(rng, RmsNorm, AddRmsNorm, AddRmsNormTo, LayerNorm, Gated)
    append = pick(rng, Append, AppendSlots, RopeAppend)
    attention = (Run, Run, Run, append, append, Merge, MergeStack, CheckData)
    return pick(rng, *attention, rows, pick(rng, Softmax, Sample, Sample, Verify, Penalties))(rng)


def any_writing_call(rng):
    """One that has an output."""
    call = any_call(rng)
    return call if call.written else any_writing_call(rng)

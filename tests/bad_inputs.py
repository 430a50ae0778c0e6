# SPDX-License-Identifier: Apache-2.0
"""Calls that must be refused: (what is wrong, exception, argument that the message names, call)."""

from bad_appends import APPEND, APPEND_SCALES, ROPE_APPEND, SLOTS
from bad_device_data import DEVICE_DATA
from bad_filters import FILTERED, LISTS, MASK, RENORM
from bad_mla import MLA, SPARSE
from bad_mla_ops import APPEND_MLA, GATHER_MLA
from bad_operators import MASKS, MERGE, OTHER
from bad_plans import FIND, OPTIONS, PLAN
from bad_quantize import QUANTIZE, ROTATE, RUN_NARROW
from bad_rows import ADD_RMSNORM, GATED, GATHER, LAYERNORM, RMSNORM, ROPE
from bad_runs import RUN
from bad_sampling import PENALTIES, SAMPLE, SOFTMAX, VERIFY

# In a group every mistake has another message.
GROUPS = [
    OPTIONS + PLAN + RUN + APPEND + MASKS + MERGE + OTHER,
    FIND,
    APPEND_SCALES,
    SLOTS,
    DEVICE_DATA,
    ROPE_APPEND,
    RMSNORM,
    LAYERNORM,
    ADD_RMSNORM,
    GATED,
    GATHER,
    ROPE,
    QUANTIZE,
    ROTATE,
    RUN_NARROW,
    SAMPLE,
    FILTERED,
    RENORM,
    MASK,
    LISTS,
    SOFTMAX,
    VERIFY,
    PENALTIES,
    MLA,
    SPARSE,
    APPEND_MLA,
    GATHER_MLA,
]
BAD = [bad for group in GROUPS for bad in group]

# SPDX-License-Identifier: Apache-2.0
"""What a wrong argument raises, and what is left after it."""

import numpy as np

import flashplan as fp

# --8<-- [start:errors]
attn = fp.Attention(8, 2, 64, q_dtype="float32", device="cpu")
attn.plan([0, 1], [40])
try:
    attn.plan([0, 1], [-3])
except ValueError as error:
    print(error)  # kv_lens[0]: expected >= 0, got -3
# The plan of [40] is still there: a call that fails changes nothing.

supported, reason = fp.is_supported(8, 2, 64, kv_dtype="float16", device="cpu")
# --8<-- [end:errors]
assert not supported and reason

# --8<-- [start:device_data]
table = np.array([[3, 1, 8]], np.int32)  # or a tensor on the GPU
try:
    fp.check_device_data(attn, block_table=table, num_pages=8)
except ValueError as error:
    print(error)  # block_table[0, 2]: expected a page in [0, 8), got 8
# --8<-- [end:device_data]

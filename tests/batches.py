# SPDX-License-Identifier: Apache-2.0
"""Lengths of the batches that many cases have."""

# A prefill, a decode, a continued prefill and an empty request, in one batch.
BATCH = {"qo_lens": (33, 1, 5, 0), "kv_lens": (33, 71, 40, 9)}
DECODE = {"qo_lens": (1,) * 5, "kv_lens": (200, 1, 64, 65, 130)}

# A system prompt, few-shot examples behind it, and separate prefixes; for decodes, drafts, prompts.
TREE = {"qo_lens": (1,) * 9, "kv_lens": (300, 290, 259, 700, 400, 401, 402, 90, 30)}
FOREST = {
    "qo_lens": (1, 4, 0, 2, 60, 2, 1, 1, 1),
    "kv_lens": (800, 930, 790, 900, 850, 670, 680, 690, 900),
}

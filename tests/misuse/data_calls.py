# SPDX-License-Identifier: Apache-2.0
"""Random valid calls of check_device_data()."""

import numpy as np

import flashplan as fp
import solve
from misuse.calls import TABLES, Call, pick, small_case


class CheckData(Call):
    """With a page table, real lengths or slots."""

    related = dict.fromkeys(("kv_lens", "slot_mapping"), ("block_table",)) | {
        "page_indptr": ("block_table", "page_indices"),
        "page_indices": ("block_table", "page_indptr"),
        "num_pages": (*TABLES, "slot_mapping"),
    }
    numbers = ("num_pages",)

    def __init__(self, rng):
        super().__init__(rng)
        self.case = case = small_case(rng, page_size=pick(rng, 1, 2, 5, 16), planned_lens=None)
        inputs, _, _ = solve.problem(case, int(rng.integers(2**31)))
        self.attn = fp.Attention(**case.options())
        self.attn.plan(*inputs.plan_args(), **inputs.plan_options())
        self.options = {"num_pages": len(inputs.k)}
        given = pick(rng, "table", "kv_lens", "slots")
        if given == "table":
            for name, table in inputs.tables().items():
                self.place(name, table)
        elif given == "kv_lens":
            self.place("kv_lens", np.array([rng.integers(0, n + 1) for n in case.kv_lens], "i4"))
        else:
            self.place("slot_mapping", rng.integers(-1, len(inputs.k) * case.page_size, 7))

    def invoke(self, **changes):
        fp.check_device_data(self.attn, **self.arguments() | changes)

    def verify(self):
        """Nothing is written."""

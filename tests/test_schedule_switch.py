# SPDX-License-Identifier: Apache-2.0
"""FLASHPLAN_SCHEDULE, which is read once: each test is a process of its own."""

import os
import subprocess
import sys

import pytest

CODE = """
import numpy as np
import flashplan as fp
rng = np.random.default_rng(1)
lens = [3000, 5, 700, 1, 64]
attn = fp.Attention(8, 2, 64, page_size=None, q_dtype="float32", device="cpu", num_ctas=16)
attn.plan(np.arange(6), lens)
k, v = (rng.standard_normal((sum(lens), 2, 64), dtype=np.float32) for _ in range(2))
o = attn.run(rng.standard_normal((5, 8, 64), dtype=np.float32), k, v)
print(float(np.abs(o).sum()))
"""


def output_with(schedule):
    environment = os.environ | ({"FLASHPLAN_SCHEDULE": schedule} if schedule else {})
    command = [sys.executable, "-c", CODE]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("schedule", ["balanced", "whole", "in_order"])
def test_results_do_not_change(schedule):
    expected = output_with(None)
    assert expected.returncode == 0, expected.stderr
    result = output_with(schedule)
    assert float(result.stdout) == pytest.approx(float(expected.stdout), rel=1e-5)


def test_other_values_are_refused():
    result = output_with("random")
    assert "FLASHPLAN_SCHEDULE: expected balanced, whole or in_order, got random" in result.stderr
    assert "UnsupportedError" in result.stderr

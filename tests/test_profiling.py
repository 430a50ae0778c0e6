# SPDX-License-Identifier: Apache-2.0
"""Calls are events of torch.profiler, if the environment asks for them."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np
{first}
attn = fp.Attention(2, 1, 8, page_size=None, q_dtype="float32", device="cpu")
q, kv = np.ones((1, 2, 8), np.float32), np.ones((3, 1, 8), np.float32)
attn.plan([0, 1], [3])
attn.run(q, kv, kv)  # without torch, or outside of a profile
import torch
with torch.profiler.profile() as profile:
    attn.plan([0, 1], [3])
    assert (attn.run(q, kv, kv) == 1).all()
    try:
        attn.run(q)
    except TypeError as error:
        print(error)
print(sorted(event.key for event in profile.key_averages() if "flashplan" in event.key))
"""


@pytest.mark.parametrize("first", ["import flashplan as fp", "import torch, flashplan as fp"])
@pytest.mark.parametrize(
    ("value", "events"), [("1", ["flashplan.plan", "flashplan.run"]), ("0", []), (None, [])]
)
def test_events(torch, first, value, events):
    environment = {k: v for k, v in os.environ.items() if k != "FLASHPLAN_PROFILE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env=environment | ({} if value is None else {"FLASHPLAN_PROFILE": value}),
        capture_output=True,
        text=True,
        check=True,
    )
    error, found = done.stdout.splitlines()
    assert error == "Attention.run() missing 1 required positional argument: 'k'"
    assert found == str(events)

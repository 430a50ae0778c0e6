# SPDX-License-Identifier: Apache-2.0
"""The interpreter exits cleanly while daemon threads are inside the library."""

import subprocess
import sys

import pytest

CHILD = """
import sys
import threading
import time

import numpy as np

import flashplan as fp

{setup}

def attention():
    q, k = np.ones((64, 8, 64), np.float32), np.ones((512, 8, 64), np.float32)
    attn = fp.Attention(8, 8, 64, page_size=None, q_dtype="float32", device="cpu")
    while True:
        attn.plan([0, 64], [512])
        attn.run(tensor(q), tensor(k), tensor(k), return_lse=True)
        started.set()

def merge():
    o, lse = np.ones((2, 500, 8, 64), np.float32), np.ones((2, 500, 8), np.float32)
    while True:
        fp.merge_states(tensor(o), tensor(lse))

def append():
    new, caches = np.ones((256, 8, 64), np.float32), np.ones((2, 4, 64, 8, 64), np.float32)
    lens, table = np.int32([256]), np.int32([[0, 1, 2, 3]])
    while True:
        fp.append_paged_kv(tensor(new), tensor(new), *caches, np.int32([0, 256]), lens,
                           block_table=table)

started = threading.Event()
for target in (attention, attention, merge, append):
    threading.Thread(target=target, daemon=True).start()
started.wait()
time.sleep({wait})
"""

SETUPS = {
    "numpy": "tensor = np.asarray",
    # Python code runs, and gives way to other threads, in the middle of a call.
    "python": """
class Tensor:
    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
    def __dlpack__(self, **options):
        sum(range(200))
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
tensor = Tensor
sys.setswitchinterval(1e-6)
""",
}


@pytest.mark.parametrize("name", SETUPS)
def test_daemon_threads(name):
    for i in range(20):
        code = CHILD.format(setup=SETUPS[name], wait=0.003 * i)
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (child.returncode, child.stderr) == (0, "")


FORK = """
import os
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_fork_beside_daemon_threads():
    """The child has none of the threads, but all that their frames held."""
    code = CHILD.format(setup=SETUPS["numpy"], wait=0.01) + FORK
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert (child.returncode, child.stderr) == (0, "")

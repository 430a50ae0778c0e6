# SPDX-License-Identifier: Apache-2.0
"""Gate: nothing is left at exit, and memory does not grow."""

import os
import subprocess
import sys

import pytest

USE = """
import gc
import sys
import numpy as np
import flashplan as fp

def cycle(n, workspace=None):
    attn = fp.Attention(4, 2, 64, page_size=16, q_dtype="float32", device="cpu", max_batch_size=n,
                        max_qo_tokens=n, num_ctas=4)
    plan = attn.plan(list(range(n + 1)), [50] * n)
    q = np.ones((n, 4, 64), np.float32)
    cache = np.ones((8, 16, 2, 64), np.float32)
    table = np.zeros((n, 4), np.int32)
    o, lse = attn.run(q, cache, cache, block_table=table, return_lse=True)
    attn.run(q, cache, cache, block_table=table, out=o, lse=lse)
    fp.merge_states(o, lse, o, lse)
    fp.append_paged_kv(q[:1, :2], q[:1, :2], cache, cache.copy(), np.array([0, 1], np.int32),
                       np.array([1], np.int32), block_table=table[:1])
    plan.describe(), plan._repr_html_(), plan.work_tiles, fp.show_config()
    double = q.astype(np.float64)
    for bad in (dict(q=q[:, :1]), dict(block_table=None), dict(q="text"), dict(q=double)):
        try:
            attn.run(**{"q": q, "k": cache, "v": cache, "block_table": table} | bad)
        except (TypeError, ValueError):
            pass
    return attn, plan, o
"""

EXIT = {
    "after use": "cycle(4)",
    "with live objects": "keep = cycle(4)",
    "with live objects in the module": "fp.keep = cycle(4)",
    "with a workspace": """
workspace = np.zeros(1 << 24, np.uint8)
workspace = workspace[-workspace.ctypes.data % 256:]
attn = fp.Attention(4, 2, 64, device="cpu", workspace=workspace, max_batch_size=4, num_ctas=4)
""",
    "with a reference cycle": """
class Engine: pass
engine = Engine()
engine.attn, engine.plan, _ = cycle(4)
engine.self = engine
del engine
""",
    "after an error": """
try:
    fp.Attention(0, 0, 0)
except ValueError as error:
    keep = error
""",
}


@pytest.mark.parametrize("ending", EXIT, ids=lambda ending: ending.replace(" ", "_"))
def test_nothing_is_leaked_at_exit(ending):
    done = subprocess.run(
        [sys.executable, "-c", USE + EXIT[ending]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr
    assert done.stderr == ""


def test_nothing_is_leaked_after_torch(torch):
    code = USE + (
        "import torch\n"
        "x = torch.ones(1, 1, 8)\n"
        "attn = fp.Attention(1, 1, 8, page_size=None, q_dtype='float32', device='cpu')\n"
        "attn.plan([0, 1], [1])\n"
        "keep = attn.run(x, x, x)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr


@pytest.mark.parametrize("work", ["cycle(8)", "step()"])
def test_memory_is_constant(work):
    """Resident memory after many engines, and after many steps of one."""
    code = USE + (
        "attn, _, _ = cycle(8)\n"
        "x = np.ones((8, 4, 64), np.float32)\n"
        "cache, table = np.ones((8, 16, 2, 64), np.float32), np.zeros((8, 4), np.int32)\n"
        "def step():\n"
        "    for n in range(20):\n"
        "        attn.plan(list(range(9)), [n] * 8)\n"
        "        attn.run(x, cache, cache, block_table=table, return_lse=True)\n"
        "def resident():\n"
        "    gc.collect()\n"
        "    return int(open('/proc/self/statm').read().split()[1])\n"
        f"for _ in range(100): {work}\n"
        "before = resident()\n"
        f"for _ in range(300): {work}\n"
        "print(resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown = int(done.stdout) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 1 << 20

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


# What keeps objects until the process ends: the frames of a daemon thread, and PyTorch's registry
# of operators and cache of compiled functions.
KEPT = {
    "by a daemon thread": """
import threading
started = threading.Event()
def work():
    attn = cycle(4)[0]
    {drop}
    started.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
started.wait()
""",
    "by a custom operator": """
import torch
attn, _, _ = cycle(4)
@torch.library.custom_op("leaks::run", mutates_args=())
def run(q: torch.Tensor) -> torch.Tensor:
    cache = torch.ones(8, 16, 2, 64)
    return attn.run(q, cache, cache, block_table=torch.zeros(4, 4, dtype=torch.int32))
run(torch.ones(4, 4, 64))
{drop}
""",
    "by a compiled function": """
import torch
attn, _, _ = cycle(4)
@torch.compile(backend="eager")
def run(q):
    cache = torch.ones(8, 16, 2, 64)
    return attn.run(q, cache, cache, block_table=torch.zeros(4, 4, dtype=torch.int32)) + 1
run(torch.ones(4, 4, 64))
{drop}
""",
}


def output_at_exit(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", USE + code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("ending", EXIT, ids=lambda ending: ending.replace(" ", "_"))
def test_nothing_is_leaked_at_exit(ending):
    assert output_at_exit(EXIT[ending], FLASHPLAN_LEAK_WARNINGS="1") == ""


@pytest.mark.parametrize("keeper", KEPT, ids=lambda keeper: keeper.replace(" ", "_"))
def test_exit_is_silent_with_what_others_keep(keeper, torch):
    assert output_at_exit(KEPT[keeper].format(drop="")) == ""
    # The reference is the caller's: the library keeps none of its own.
    drop = "del attn"
    assert output_at_exit(KEPT[keeper].format(drop=drop), FLASHPLAN_LEAK_WARNINGS="1") == ""


def test_leak_warnings_can_be_turned_on():
    """Otherwise the tests above would show nothing."""
    warning = output_at_exit(
        KEPT["by a daemon thread"].format(drop=""), FLASHPLAN_LEAK_WARNINGS="1"
    )
    assert "leaked 1 instances" in warning


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
        "for _ in range(3):\n"
        "    before = resident()\n"
        f"    for _ in range(150): {work}\n"
        "    print(resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # A leak makes memory grow in each round. The heap may grow in one of them for other reasons.
    grown = min(map(int, done.stdout.split())) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 1 << 19

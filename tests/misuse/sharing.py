# SPDX-License-Identifier: Apache-2.0
"""Threads, signals, forks and the end of the process."""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import flashplan as fp
from misuse import note
from misuse.calls import Append, Merge, MergeStack, Run, pick
from misuse.finding import Finding, OfTheCaller, Skip, kind
from misuse.row_calls import Gated, LayerNorm, RmsNorm

WAIT = 30  # seconds

# The address sanitizer of gcc does not take its allocator's locks for a fork: where another thread
# allocates at that moment, the child may wait for such a lock forever.
CAN_FORK_BESIDE_THREADS = "ASAN_OPTIONS" not in os.environ


def outcome(call, attempts, refusal="one thread at a time|another"):
    """Repeats a call: each time it must give the right result, or a refusal with a reason."""
    for _ in range(attempts):
        try:
            call()
        except RuntimeError as error:
            if not any(text in str(error) for text in refusal.split("|")):
                raise


def together(*bodies):
    """Runs each body in a thread of its own, all at once; raises what the first one raised."""
    errors, start = [], threading.Barrier(len(bodies))

    def guarded(body):
        start.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        if thread.is_alive():
            faulthandler.dump_traceback()
            raise Finding("threads hang")
    if errors:
        raise errors[0]


@kind("threads apart", weight=1)
def threads_apart(rng):
    """Each thread makes calls with objects of its own."""
    repeatable = (Run, Append, Merge, MergeStack, RmsNorm, LayerNorm, Gated)
    calls = [pick(rng, *repeatable)(rng) for _ in range(int(rng.integers(2, 5)))]
    note("threads with calls of their own")

    def work(call):
        def body():
            for _ in range(20):
                if not call.judge({}, []):
                    raise Finding("a valid call was refused")

        return body

    together(*map(work, calls))


@kind("threads in one object", weight=1)
def threads_in_one_object(rng):
    """A call gives the right result, or says that another thread is using the object."""
    call = Run(rng)
    note(f"threads in one object, {call.case}")

    def run():
        o, lse = call.invoke(out=None, lse=None, return_lse=True)
        expected = call.exact[0]
        if o.shape != expected.shape:
            raise Finding("a shared object gave a wrong shape")
        tolerance = 1e-4 if call.case.output_dtype == call.case.q_dtype == "float32" else 0.1
        error = np.abs(o.astype(np.float64) - expected)
        if not (error <= tolerance * (1 + np.abs(expected))).all():
            raise Finding(f"a shared object gave a wrong result: {np.nanmax(error)}")

    def plan():
        call.attn.plan(*call.inputs.plan_args())

    bodies = [pick(rng, run, run, plan) for _ in range(int(rng.integers(2, 5)))]
    together(*(lambda body=body: outcome(body, 20) for body in bodies))
    plan()
    run()


@kind("threads in one workspace", weight=1)
def threads_in_one_workspace(rng):
    """Two objects with one workspace at the same time: right results, or a refusal."""
    lens = {"qo_lens": (9, 1), "kv_lens": (200, 200)}
    calls = [Run(rng, num_ctas=8, head_dim=24, **lens) for _ in range(2)]
    size = max(call.attn.workspace_bytes for call in calls)
    memory = np.zeros(size + 256, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :][:size]
    note("two objects with one workspace in two threads")
    for call in calls:
        call.tensors.pop("workspace", None)
        call.attn = fp.Attention(**call.case.options(), workspace=memory)
        call.attn.plan(*call.inputs.plan_args())

    def work(call):
        def once():
            call.invoke()
            call.verify()

        return lambda: outcome(once, 30, "workspace|one thread at a time")

    together(*map(work, calls))


@kind("number of threads", weight=0.5)
def number_of_threads(rng):
    """set_num_threads() while others run."""
    calls = [Run(rng) for _ in range(2)]
    before = fp.get_num_threads()
    note("set_num_threads() while others run")

    def change():
        for _ in range(30):
            fp.set_num_threads(int(pick(np.random.default_rng(), 1, 2, 3, 9)))

    together(change, *(lambda call=call: [call.judge({}, []) for _ in range(15)] for call in calls))
    fp.set_num_threads(before)


class Interrupted(OfTheCaller):
    """Raised by the handler of a signal."""


@kind("signals", weight=1)
def signals(rng):
    """Signal handlers that run, and raise, during calls."""
    call = pick(rng, Run, Run, Append, MergeStack)(rng)
    raises = bool(rng.integers(2))
    note(f"signals during {type(call).__name__}, raising: {raises}")

    armed = False  # so that it raises during calls alone, and once for each

    def handler(*_):
        nonlocal armed
        if raises and armed:
            armed = False
            raise Interrupted

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        try:
            armed = True
            if isinstance(call, Run):
                call.attn.plan(*call.inputs.plan_args())
            call.invoke()
            armed = False
        except Interrupted:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)
    if isinstance(call, Run):
        call.attn.plan(*call.inputs.plan_args())
    call.invoke()
    call.verify()


def in_fork(body):
    """Runs `body` in a forked child; its exit code must be 0."""
    with tempfile.TemporaryFile() as stacks:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                faulthandler.enable(stacks)
                body()
                code = 0
            except BaseException as error:
                print(f"in the forked child: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        native = native_stacks(child)
        os.kill(child, signal.SIGABRT)  # faulthandler prints the stacks, then the child ends
        os.waitpid(child, 0)
        stacks.seek(0)
        raise Finding(f"a forked child hangs:\n{stacks.read().decode()}{native}")


def native_stacks(process):
    """What gdb says, where it is installed."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return ""
    command = [gdb, "-p", str(process), "-batch", "-ex", "thread apply all backtrace 20"]
    variables = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith(("#", "Thread")))


@kind("fork", weight=1)
def fork(rng):
    """A child forked while threads run, or after the pool has begun, computes the same."""
    call, other = Run(rng), Run(rng)
    call.invoke()
    busy = CAN_FORK_BESIDE_THREADS and bool(rng.integers(2))
    note(f"fork while {'another thread runs' if busy else 'nothing runs'}")
    stop = threading.Event()

    def work():
        while not stop.is_set():
            other.invoke()

    def body():
        call.attn.plan(*call.inputs.plan_args())
        for _ in range(3):
            call.invoke()
            call.verify()

    thread = threading.Thread(target=work, daemon=True)
    if busy:
        thread.start()
    try:
        code = in_fork(body)
    finally:
        stop.set()
        if busy:
            thread.join(WAIT)
    if code != 0:
        raise Finding(f"a forked child ended with {code}")
    call.invoke()
    call.verify()


START = """
import gc, os, sys, threading, time, warnings
import numpy as np
import flashplan as fp
attn = fp.Attention(4, 2, 64, page_size=None, q_dtype="float32", device="cpu", num_ctas=8)
attn.plan([0, 4], [3000])
q, k = np.ones((4, 4, 64), np.float32), np.ones((3000, 2, 64), np.float32)
def loop():
    while True:
        attn.run(q, k, k)
def merge():
    o, l = np.ones((8, 200, 4, 64), np.float32), np.ones((8, 200, 4), np.float32)
    while True:
        fp.merge_states(o, l)
def append():
    c = np.ones((100, 16, 2, 64), np.float32)
    t = np.arange(100, dtype=np.int32)[None]
    while True:
        fp.append_paged_kv(k[:1500], k[:1500], c, c.copy(), np.array([0, 1500], np.int32),
                           np.array([1600], np.int32), block_table=t)
def plan():
    other = fp.Attention(4, 2, 64, q_dtype="float32", device="cpu")
    while True:
        other.plan([0, *range(100)], [50] * 100)
def start(*bodies):
    for body in bodies:
        threading.Thread(target=body, daemon=True).start()
    time.sleep(0.05)
"""

FORK_BESIDE_A_THREAD = "a fork that exits as usual"
ENDINGS = {
    "a daemon thread in run()": "start(loop)",
    "daemon threads in every call": "start(loop, merge, append, plan)",
    "sys.exit() with a daemon thread": "start(loop); sys.exit(0)",
    "an object that is used in __del__": """
class Late:
    def __del__(self):
        try: attn.run(q, k, k)
        except ImportError: pass  # modules are gone
late = Late(); late.me = late
""",
    "a run at atexit": "import atexit; atexit.register(attn.run, q, k, k); start(merge)",
    "a module that keeps everything": "fp.attn, sys.modules['x'] = attn, attn; start(loop)",
    "a subclass passed in": """
class Array(np.ndarray):
    def method(self): return Array
attn.run(q.view(Array), k, k)
""",
    "a reference cycle through a workspace": """
class Array(np.ndarray): pass
w = np.zeros(attn.workspace_bytes + 256, np.uint8).view(Array)
w.attn = fp.Attention(4, 2, 64, page_size=None, q_dtype="float32", device="cpu", num_ctas=8,
                      workspace=w)
""",
    FORK_BESIDE_A_THREAD: "start(loop)\nif os.fork() == 0: sys.exit(0)\nos.wait()",
}

REIMPORT = """
import sys
import numpy as np
import flashplan
keep = {} if KEEP else None
for name in [n for n in sys.modules if n.startswith("flashplan")]:
    module = sys.modules.pop(name)
    if KEEP: keep[name] = module
try:
    import flashplan as again
except ImportError as error:
    assert "flashplan" in str(error), error
else:
    a = again.Attention(1, 1, 8, page_size=None, q_dtype="float32", device="cpu")
    a.plan([0, 1], [1])
    one = np.ones((1, 1, 8), np.float32)
    assert (a.run(one, one, one) == 1).all()
"""


def ends_well(what, code):
    note(f"the end of a process with {what}")
    try:
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True,
                              text=True, timeout=60, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Finding(f"a process with {what} hangs at its end") from None
    if done.returncode != 0 or done.stderr:
        raise Finding(
            f"a process with {what} ends with code {done.returncode}\n{done.stderr[-1500:]}"
        )


@kind("exit", weight=0.3)
def at_exit(rng):
    ending = pick(rng, *ENDINGS)
    if ending == FORK_BESIDE_A_THREAD and not CAN_FORK_BESIDE_THREADS:
        raise Skip
    ends_well(ending, START + ENDINGS[ending])


@kind("import again", weight=0.1)
def import_again(rng):
    ends_well("a second import", REIMPORT.replace("KEEP", pick(rng, "True", "False")))

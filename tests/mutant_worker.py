# SPDX-License-Identifier: Apache-2.0
"""A worker: a copy of the tree, in which it builds and tests one mutant at a time."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
BUILD_SECONDS, STEP_SECONDS, TEST_SECONDS = 1200, 1200, 240
NO_TESTS = 5  # pytest's exit code where all tests are left out

# Steps are "ctest:<regex of names>" or "pytest:<files>". For each folder, the steps that are likely
# to notice its mutants run first.
FIRST = {
    "src/abi": ["ctest:test_schedule", "ctest:test_engine", "pytest:test_masks test_key_ranges"],
    "src/cuda/tensor_maps": ["ctest:test_emulated_(wide|mla|key_tail)|test_lists"],
    "src/cuda": ["ctest:test_invariance|test_faults|test_lists"],
    "src/plan/schedule/division": ["ctest:test_division|test_schedule"],
    "src/plan/schedule/prefix": ["ctest:test_prefix"],
    "src/plan/kernel/select_kernel": [
        "ctest:test_select_kernel|test_kernel_families|test_batch_kind"
    ],
    "src/plan/kernel/batch_kind": ["ctest:test_batch_kind"],
    "src/kernels/device/merge_part": ["ctest:test_merge_part"],
    "src/kernels/device/key_tail": ["ctest:test_emulated_key_tail"],
    "src/kernels/device/sm80": ["ctest:test_emulated_decode"],
    "src/kernels/device/sm90/kv_loader": ["ctest:test_emulated_key_tail"],
    "src/kernels/device/sm90/wide": ["ctest:test_emulated_wide"],
    "src/kernels/device/sm90/consumer": ["ctest:test_emulated_widen"],
    "src/kernels/device/sm90/producer_warp": ["ctest:test_emulated_widen"],
    "src/kernels/device/sm90/query_loader": ["ctest:test_emulated_widen"],
    "src/kernels/families": ["ctest:test_select_kernel|test_kernel_families|test_batch_kind"],
    "src/plan/workspace": ["ctest:test_workspace_layout|test_status"],
    "src/plan/check": ["ctest:test_status", "pytest:test_errors"],
    "src/plan/rope_turns": ["pytest:test_errors test_rope"],
    "src/plan": [
        "ctest:test_schedule|test_balance|test_prefix",
        "ctest:test_select_kernel|test_kernel_families|test_status",
    ],
    "src/cpu/thread_pool": ["ctest:test_thread_pool"],
    "src/cpu/merge": ["ctest:test_append_merge|test_engine", "pytest:test_prefixes"],
    "src/cpu/float_formats": ["ctest:test_append_merge|test_engine"],
    "src/cpu/compile_variant": [
        "ctest:test_variants|test_variant_cache",
        "pytest:test_variants",
    ],
    "src/cpu": [
        "ctest:test_engine",
        "pytest:test_nonfinite",
        "ctest:test_variants",
        "pytest:test_attention",
    ],
    "src/api/find": ["ctest:test_prefix"],
    "src/api/run.cpp": [
        "ctest:test_status|test_run_status|test_invariance",
        "pytest:test_changed_meanwhile",
    ],
    "src/api/plan": ["ctest:test_status|test_invariance", "pytest:test_errors test_plan"],
    "src/api/batch": ["ctest:test_status", "pytest:test_errors test_plan"],
    "src/api/run_checks": [
        "ctest:test_status|test_run_status|test_aliasing",
        "pytest:test_device_data test_errors",
    ],
    "src/api": ["ctest:test_status|test_run_status|test_aliasing"],
    "src/checks": ["ctest:test_tensor_checks|test_memory_checks|test_status|test_aliasing"],
    "src/ops/cpu/verify": ["ctest:test_changed_meanwhile", "pytest:test_speculative"],
    "src/ops/cpu/speculative": ["pytest:test_speculative"],
    "src/ops/speculative": ["pytest:test_speculative"],
    "src/ops/cuda/sample/softmax": ["ctest:test_emulated_softmax"],
    "src/ops/cuda/sample/row_filter": ["ctest:test_emulated_filters"],
    "src/ops/cuda/sample/verify": ["ctest:test_emulated_verify"],
    "src/ops/cuda/sample/speculative_verify": ["ctest:test_emulated_verify"],
    "src/ops/filter": ["pytest:test_filters"],
    "src/ops/cpu/filter": ["pytest:test_sampling test_filters"],
    "src/ops/cpu/write_filtered": ["pytest:test_filters"],
    "src/ops/sampling.cpp": ["pytest:test_sampling test_filters"],
    "src/ops/cuda": ["ctest:test_emulated_sampling|test_emulated_plain"],
    "src/ops/rope": ["ctest:test_rows", "pytest:test_rope test_rope_append"],
    "src/ops/cpu/rope": ["ctest:test_rows", "pytest:test_rope test_rope_append"],
    "src/ops/apply_penalties": ["pytest:test_penalties"],
    "src/ops/cpu/apply_penalties": ["ctest:test_changed_meanwhile", "pytest:test_penalties"],
    "src/ops/cpu/append": [
        "ctest:test_append_merge|test_changed_meanwhile",
        "pytest:test_append test_rope_append",
    ],
    "src/ops/append": ["ctest:test_append_merge|test_aliasing", "pytest:test_append"],
    "src/ops/merge": ["ctest:test_append_merge|test_aliasing", "pytest:test_merge"],
    "src/ops/cpu/kernels_sampling": ["ctest:test_sampling", "pytest:test_sampling"],
    "src/ops/cpu/candidates": ["ctest:test_sampling", "pytest:test_sampling"],
    "src/ops/cpu/plain_sample": ["ctest:test_sampling", "pytest:test_sampling"],
    "src/ops/sampling": ["ctest:test_sampling", "pytest:test_sampling test_speculative"],
    "src/ops": [
        "ctest:test_rows|test_sampling|test_append_merge|test_aliasing",
        "pytest:test_errors test_rows",
    ],
    "src/common/processors": ["ctest:test_processors", "pytest:test_api"],
    "src/common": ["ctest:test_(status|thread_pool|variant_cache)|test_variants"],
    "src/variant": [
        "ctest:test_variants|test_variant_cache",
        "pytest:test_variants test_variant_descriptions",
    ],
    "src/c_abi": ["ctest:test_c_abi|test_c_structs", "ctest:test_c_ops|test_c_sampling"],
    "bindings/xla": ["pytest:test_jax test_jax_devices test_jax_refusals"],
    "bindings/tensors/producer": ["pytest:test_dlpack test_frameworks test_torch_tensors"],
    "bindings/ops": ["pytest:test_append test_merge test_errors"],
    "bindings": ["pytest:test_errors test_dlpack test_streams test_jax"],
    "python/flashplan/attention": ["pytest:test_api test_describe"],
    "python/flashplan/runs": ["pytest:test_api test_attention"],
    "python/flashplan/transformers": ["pytest:test_transformers test_transformers_models"],
    "python/flashplan/flash_": ["pytest:test_flash_attn test_flash_plans test_flash_packed"],
    "python/flashplan/flashinfer": [
        "pytest:test_flashinfer_batch test_flashinfer_graphs test_flashinfer_single",
        "pytest:test_flashinfer_cascade test_flashinfer_names test_flashinfer_page",
        "pytest:test_flashinfer_latent test_flashinfer_sampling",
    ],
    "python/flashplan/jax": ["pytest:test_jax test_jax_devices test_jax_refusals"],
    "python/flashplan/torch": ["pytest:test_torch"],
    "python/flashplan/variant": ["pytest:test_variants test_variant_descriptions"],
    "python": ["pytest:test_errors test_api"],
}
# Mutants that survive the steps of their file run through these, the fastest steps first.
QUICK = [
    "ctest:test_(aliasing|append_merge|memory_checks|run_status|select_kernel|status|tensor_checks)",
    "ctest:test_(thread_pool|workspace_layout)",
    "pytest:test_streams test_append test_nonfinite test_merge test_api test_dlpack test_errors",
    "ctest:test_rows|test_sampling",
    "pytest:test_rows test_sampling",
    "ctest:test_schedule|test_balance|test_prefix|test_engine",
    "pytest:test_frameworks test_torch_tensors test_leaks test_objects",
]
SLOW = [
    "pytest:test_attention test_prefixes",
    "ctest:*",  # all other tests
    "pytest:test_plan test_same_bits",
    "pytest:test_exit test_properties",
    "pytest:*",  # all other files
]
# Those that run none of the code that mutants are of, or the demo.
NEVER = {"test_examples", "test_mutants", "test_nvrtc", "test_reference"}
NEVER_CTEST = ["header:.*", "install", "consumer", "stubs_are_current"]


class OutOfTime(Exception):
    """The time limit has passed, so the current mutant has no result."""


class Clock:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds if seconds else float("inf")

    def left(self):
        return max(self.end - time.monotonic(), 0)


def named(tool):
    """All tests that steps of a tool name, without "*"."""
    steps = [step.partition(":")[2] for step in [*QUICK, *SLOW] if step.startswith(tool)]
    return [what for what in steps if what != "*"]


def ctest_options(what, left_out):
    """Which tests a step runs; "*": those that no step names."""
    if what == "*":
        return ["-E", f"^({'|'.join([*named('ctest'), *NEVER_CTEST, *left_out])})$"]
    return ["-R", f"^({what})$", *(["-E", f"^({'|'.join(left_out)})$"] if left_out else [])]


def targets(step):
    """What a step needs built: test programs by name, the extension, or everything."""
    tool, _, what = step.partition(":")
    if tool == "pytest":
        return ["_core"]
    programs = sorted(path.stem for path in (ROOT / "tests" / "cpp").glob("test_*.cpp"))
    chosen = [name for name in programs if re.fullmatch(what, name)] if what != "*" else []
    return chosen or ["all"]


def pytest_files(what):
    """The paths of the files that a step names; "*": those that no step names."""
    if what != "*":
        return [f"tests/{name}.py" for name in what.split()]
    others = set(" ".join(named("pytest")).split()) | NEVER
    names = sorted({path.stem for path in (ROOT / "tests").glob("test_*.py")} - others)
    return [f"tests/{name}.py" for name in names]


def source_files():
    """Relative paths of all files of the tree, without hidden files and build outputs."""
    for folder, folders, names in os.walk(ROOT):
        top = folder == str(ROOT)
        folders[:] = [
            name
            for name in folders
            if name[0] != "." and name != "__pycache__" and not (top and name in ("build", "dist"))
        ]
        for name in names:
            if not name.endswith(".so"):
                yield os.path.relpath(os.path.join(folder, name), ROOT)


class Worker:
    """A copy of the tree with a build of its own."""

    def __init__(self, number, processors, clock, cpu_isas=None):
        self.processors, self.clock, self.cpu_isas = processors, clock, cpu_isas
        self.tree = WORK / str(number) / "tree"
        self.build = WORK / str(number) / "build"
        self.site = WORK / str(number) / "site"
        self.left_out = {"ctest": [], "pytest": []}  # tests that fail without a mutant
        self.copy_tree()
        self.must("cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja", *self.options())
        self.must("cmake", "--build", self.build, "--target", "_core")
        package = self.site / "flashplan"
        package.mkdir(parents=True, exist_ok=True)
        modules = [*(self.tree / "python" / "flashplan").iterdir()]
        for file in [*modules, *(self.build / "bindings").glob("_core*.so")]:
            link = package / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)

    def options(self):
        return (
            "-DCMAKE_BUILD_TYPE=Release",
            "-DFLASHPLAN_CUDA=OFF",
            "-DFLASHPLAN_PYTHON=ON",
            "-DFLASHPLAN_INSTALL=OFF",
            f"-DPython_EXECUTABLE={sys.executable}",
            *([] if self.cpu_isas is None else [f"-DFLASHPLAN_CPU_ISAS={self.cpu_isas}"]),
        )

    def copy_tree(self):
        """Copies only files that differ, so that the others are not built again."""
        files = set(source_files())
        for path in self.tree.rglob("*"):
            if path.is_file() and str(path.relative_to(self.tree)) not in files:
                path.unlink()
        for file in files:
            source, target = ROOT / file, self.tree / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or source.read_bytes() != target.read_bytes():
                shutil.copyfile(source, target)

    def run(self, command, seconds):
        """The exit code, None after a timeout, and the output."""
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "CMAKE_BUILD_PARALLEL_LEVEL": str(len(self.processors)),
            "CCACHE_BASEDIR": str(WORK),
            "CCACHE_NOHASHDIR": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, self.processors)), *map(str, command)],
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=min(seconds, self.clock.left() + 1e-3))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if not self.clock.left():
                raise OutOfTime from None
            return None, ""
        return process.returncode, text

    def must(self, *command):
        code, text = self.run(command, BUILD_SECONDS)
        if code != 0:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{text[-3000:]}")

    def test(self, step, stop=True):
        """Names of the tests that fail, the first alone with `stop`; all of the step's where the
        output names none."""
        tool, _, what = step.partition(":")
        if tool == "ctest":
            command = ["ctest", "--test-dir", self.build, "--timeout", TEST_SECONDS]
            command += ctest_options(what, self.left_out[tool])
            command += ["--stop-on-failure"] if stop else []
        else:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["--assert=plain"]  # to explain a failure may take longer than the tests
            command += ["-o", f"faulthandler_timeout={TEST_SECONDS}"]
            command += [*(["-x"] if stop else []), *pytest_files(what)]
            command += [f"--deselect={name}" for name in self.left_out[tool]]
        code, text = self.run(command, STEP_SECONDS)
        if code in (0, NO_TESTS):
            return []
        names = re.findall(r"^(?:FAILED|ERROR) (\S+)|^\s*\d+ - (\S+) \(", text, re.M)
        if names:
            return [a or b for a, b in names]
        return pytest_files(what) if tool == "pytest" else [what]

    def failures(self, step):
        """Names of all tests of a step that fail as the sources are now."""
        self.must("cmake", "--build", self.build, "--target", *targets(step))
        return self.test(step, stop=False)

    def try_mutant(self, mutant, steps):
        """(verdict, by what): "killed", "invalid" where it does not compile, "" if none notices."""
        path = self.tree / mutant.file
        original = path.read_text()
        path.write_text(original.replace(mutant.old, mutant.new))
        if mutant.file.startswith(("bindings", "python")):  # C++ tests run none of their code
            steps = [step for step in steps if step.startswith("pytest")]
        try:
            for step in steps:
                # Also for Python: the library may still be that of the last mutant.
                code, text = self.run(
                    ["cmake", "--build", self.build, "--target", *targets(step)], BUILD_SECONDS
                )
                if code != 0:
                    errors = [line for line in text.splitlines() if "error" in line]
                    return "invalid", " ".join(errors[:1]) or text[-300:]
                failed = self.test(step)
                if failed:
                    return "killed", f"{step.partition(':')[0]} {failed[0]}"
            return "", ""
        finally:
            path.write_text(original)

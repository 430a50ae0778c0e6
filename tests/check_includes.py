# SPDX-License-Identifier: Apache-2.0
"""Checks that each folder includes only headers of folders below it, so that there is no circle.

pre-commit runs it over all sources.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

UP_TO_API = (
    "flashplan/",
    "common/",
    "abi/",
    "checks/",
    "variant/",
    "plan/",
    "cpu/",
    "cuda/",
    "kernels/",
    "api/",
)
# From the bottom to the top: folder -> (prefixes of our headers that it may include, prefixes of
# third-party headers). The longest folder that contains a file counts. upward_rules() refuses
# prefixes of folders above.
RULES = {
    "include/flashplan": (("flashplan/",), ()),
    "src/common": (("flashplan/", "common/"), ()),
    "src/abi": (("flashplan/tensor.h", "flashplan/schedule.h", "abi/"), ()),
    "src/checks": (("flashplan/", "common/", "abi/", "checks/"), ()),
    "src/kernels/device": (("flashplan/tensor.h", "abi/", "kernels/device/"), ()),
    "src/kernels/device/sm80": (("flashplan/tensor.h", "abi/", "kernels/device/"), ()),
    "src/kernels/device/sm90": (("flashplan/tensor.h", "abi/", "kernels/device/"), ()),
    "src/variant": (("flashplan/", "common/", "abi/", "variant/"), ()),
    "src/plan": (("flashplan/", "common/", "abi/", "variant/", "plan/"), ()),
    "src/cpu": (("flashplan/", "common/", "abi/", "variant/", "plan/", "cpu/"), ()),
    "src/cuda": (
        ("flashplan/", "common/", "abi/", "variant/", "plan/", "cuda/"),
        ("nvtx3/",),
    ),
    "src/kernels": (
        ("flashplan/", "common/", "abi/", "variant/", "plan/", "cuda/", "kernels/"),
        (),
    ),
    "src/api": (UP_TO_API, ()),
    "src/ops": (
        (
            "flashplan/",
            "common/",
            "abi/",
            "checks/",
            "plan/rope_turns.h",
            "cpu/",
            "cuda/device.h",
            "cuda/runtime.h",
            "ops/",
        ),
        ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cooperative_groups.h", "immintrin.h"),
    ),
    "src/c_abi": (("flashplan/", "abi/params.h", "common/", "c_abi/"), ()),
    "bindings": (
        (
            "flashplan/",
            "bindings/",
            "common/error.h",
            "common/dtypes.h",
            "common/run_tensors.h",
            "cuda/",
            "api/batch_checks.h",
            "api/kernels.h",
            "checks/memory_checks.h",
            "checks/tensor_checks.h",
            "plan/rope_turns.h",
            "variant/",
        ),
        ("nanobind/", "Python.h", "dlpack/"),
    ),
    "tests/cpp": ((*UP_TO_API, "ops/"), ("fuzzer/", "cuda_runtime_api.h", "xla/")),
    "bench": (("flashplan/", "plan/", "kernels/families.h"), ()),
    # A project of its own, around examples/engine.
    "bench/serving": (("engine/", "device.h", "model_config.h", "open_device.h", "check.h"), ()),
}
# Headers of C and POSIX that this project uses; <vector> and the like need no entry.
SYSTEM = {
    "dirent.h",
    "dlfcn.h",
    "fcntl.h",
    "ftw.h",
    "poll.h",
    "pthread.h",
    "sched.h",
    "signal.h",
    "spawn.h",
    "stddef.h",
    "stdint.h",
    "sys/mman.h",
    "sys/random.h",
    "sys/resource.h",
    "sys/stat.h",
    "sys/wait.h",
    "unistd.h",
}
# The headers of the CUDA runtime and the driver, and the one file that includes them.
CUDA = {"cuda.h", "cuda_runtime_api.h"}
CUDA_INCLUDED_BY = "src/cuda/runtime.h"
# Folders of one family of GPU kernels each. A family includes no header of another one, and the
# code that families share, in src/kernels/device itself, includes no header of a family.
FAMILIES = {"src/kernels/device/sm80", "src/kernels/device/sm90"}
# Folders whose code NVRTC must be able to compile.
ONLY_CSTDINT = {"src/abi", "src/kernels/device", *FAMILIES}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def holder_of(name):
    """The folder of RULES that a file belongs to, or None."""
    return max((f for f in RULES if name.startswith(f + "/")), key=len, default=None)


def violations(path, folder):
    own, third_party = RULES[folder]
    for bracket, header in INCLUDE.findall(path.read_text()):
        if bracket == '"':
            # A bare name is a neighbour in the same folder.
            allowed = header.startswith(own) or (path.parent / header).is_file()
            if folder.startswith("src/kernels/device"):
                allowed = allowed and holder_of(f"src/{header}") not in FAMILIES - {folder}
        elif folder in ONLY_CSTDINT:
            allowed = header == "cstdint"
        else:
            is_runtime = path == ROOT / CUDA_INCLUDED_BY and header in CUDA
            is_standard = "." not in header and "/" not in header
            is_known = header in SYSTEM or header.startswith((*own, *third_party))
            allowed = is_standard or is_runtime or is_known
        if not allowed:
            yield f"{path.relative_to(ROOT)}: may not include {header}"


def upward_rules():
    """Rules that let a folder include one above it, which would start a circle."""
    order = list(RULES)
    for folder, (own, _) in RULES.items():
        for prefix in own:
            places = [f"{root}{prefix}" for root in ("src/", "include/", "")]
            holders = [f for f in RULES for place in places if place.startswith(f + "/")]
            if holders and order.index(max(holders, key=len)) > order.index(folder):
                yield f"RULES: {folder} stands below {prefix} and may not include it"


def main():
    found = list(upward_rules())
    for folder in RULES:
        for path in sorted((ROOT / folder).rglob("*")):
            is_source = path.suffix in {".h", ".cpp", ".cu"}
            if is_source and folder == holder_of(path.relative_to(ROOT).as_posix()):
                found += violations(path, folder)
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Each folder includes only what stands below it. Run by pre-commit over all sources."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# folder -> (headers of ours it may include, by prefix; third-party headers, by prefix)
RULES = {
    "include/flashplan": (("flashplan/",), ()),
    "src/common": (("flashplan/", "common/"), ()),
    "src/plan": (("flashplan/", "common/", "plan/", "run/registry.h", "cpu/scratch.h"), ()),
    "src/cpu": (("flashplan/", "common/", "cpu/", "plan/", "run/params.h"), ()),
    "src/run": (("flashplan/", "common/", "plan/", "run/", "cpu/"), ()),
    "bindings": (("flashplan/", "bindings/"), ("nanobind/", "Python.h", "dlpack/")),
    "tests/cpp": (("flashplan/", "common/", "plan/", "run/", "cpu/"), ("fuzzer/",)),
    "bench": (("flashplan/", "plan/"), ()),
}
# The C library and POSIX, by the names this project uses; <vector> and the like need no entry.
SYSTEM = {"pthread.h", "sched.h", "unistd.h"}

INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)


def violations(path, own, third_party):
    for bracket, header in INCLUDE.findall(path.read_text()):
        if bracket == '"':
            # A bare name is a neighbour in the same folder.
            allowed = header.startswith(own) or (path.parent / header).is_file()
        else:
            is_standard = "." not in header and "/" not in header
            allowed = is_standard or header in SYSTEM or header.startswith((*own, *third_party))
        if not allowed:
            yield f"{path.relative_to(ROOT)}: may not include {header}"


def main():
    found = []
    for folder, rule in RULES.items():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cpp"}:
                found += violations(path, *rule)
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""docs/environment.md names every variable of the environment that is read, and no other one."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text()

# In C++ a string of several words in capitals counts as the name of a variable. A name of one word
# (CXX, PATH, HOME) counts only as the argument of a function that reads variables.
IN_CPP = (r'"([A-Z]+(?:_[A-Z]+)+)"', r'(?:getenv|words_of|environment)\("([A-Z]+)"\)')
IN_PYTHON = (r"(?:environ(?:\.get|\.setdefault)?[\[(]|getenv\()\"(\w+)\"",)
IN_CMAKE = (r"\benv\{(\w+)\}", r"\bENV\{(\w+)\}")
SOURCES = (
    ("src", "*.cpp", IN_CPP),
    ("bindings", "*.cpp", IN_CPP),
    ("python", "*.py", IN_PYTHON),
    ("cmake", "*.py", IN_PYTHON),
    ("tests", "*.py", IN_PYTHON),
    ("cmake", "*.cmake", IN_CMAKE),
    (".", "CMakeLists.txt", IN_CMAKE),
    (".", "CMakePresets.json", IN_CMAKE),
)
STATUS_NAMES = ROOT / "src" / "c_abi" / "c_abi.cpp"  # look like names of variables
NOT_OURS = {
    "ASAN_OPTIONS",
    "PYTEST_XDIST_WORKER",
    "PYTHONPATH",
    "TSAN_OPTIONS",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
}


def paths(folder, pattern):
    found = (ROOT / folder).glob(pattern) if folder == "." else (ROOT / folder).rglob(pattern)
    return [path for path in found if path != STATUS_NAMES]


def variables_that_are_read():
    names = set()
    for folder, pattern, expressions in SOURCES:
        for path in paths(folder, pattern):
            text = path.read_text()
            names.update(*(re.findall(expression, text) for expression in expressions))
    return names - NOT_OURS


def test_the_page_names_all_variables():
    read = variables_that_are_read()
    assert {"CXX", "HOME", "TORCH_CUDA_ARCH_LIST", "FLASHPLAN_WHEEL", "OMP_NUM_THREADS"} <= read
    assert read <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_tables_name_no_variable_that_nobody_reads():
    """TMPDIR is read by the C++ library."""
    in_tables = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert len(in_tables) > 10
    assert in_tables - {"TMPDIR"} <= variables_that_are_read()

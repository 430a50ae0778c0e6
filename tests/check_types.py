# SPDX-License-Identifier: Apache-2.0
"""mypy --strict, pyright and stubtest over the package and over programs of a user.

Each checker must accept the package and tests/typed/accepted.py, and refuse every call of
tests/typed/refused.py. stubtest compares the stubs with the installed package.
"""

import ast
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
ACCEPTED, REFUSED = "tests/typed/accepted.py", "tests/typed/refused.py"


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def must_pass(*command):
    done = run(*command)
    if done.returncode != 0:
        print(" ".join(command), done.stdout, done.stderr, sep="\n")
    return done.returncode == 0


def calls():
    """The lines of the statements that must be refused: all expressions except the docstring."""
    body = ast.parse((ROOT / REFUSED).read_text()).body
    return {statement.lineno for statement in body[1:] if isinstance(statement, ast.Expr)}


def refused_by_mypy():
    output = run("mypy", REFUSED).stdout
    return {int(line) for line in re.findall(rf"^{REFUSED}:(\d+): error", output, re.MULTILINE)}


def refused_by_pyright():
    output = json.loads(run("pyright", "--outputjson", REFUSED).stdout)
    errors = [x for x in output["generalDiagnostics"] if x["severity"] == "error"]
    return {error["range"]["start"]["line"] + 1 for error in errors}


def refuses_nonsense(checker, refused):
    for line in sorted(calls() - refused):
        print(f"{REFUSED}:{line}: {checker} accepts it")
    for line in sorted(refused - calls()):
        print(f"{REFUSED}:{line}: {checker} refuses what is meant to be right")
    return calls() == refused


def mypy_passes():
    """One check after the other, since they share a cache."""
    return all(
        [
            must_pass("mypy", "python/flashplan", ACCEPTED),
            refuses_nonsense("mypy", refused_by_mypy()),
            must_pass(
                *(sys.executable, "tests/run_stubtest.py", "flashplan"),
                *("--mypy-config-file", "tests/typed/stubtest.ini"),
                *("--allowlist", "tests/typed/stubtest_allowlist.txt", "--ignore-unused-allowlist"),
            ),
        ]
    )


def pyright_passes():
    return all([must_pass("pyright"), refuses_nonsense("pyright", refused_by_pyright())])


def main():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [pool.submit(mypy_passes), pool.submit(pyright_passes)]
    sys.exit(not all(future.result() for future in futures))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small bugs put into the sources one at a time, to see whether a test notices.

    python tests/mutants.py --check              each mutant's text is in its file once
    python tests/mutants.py [--only TEXT] [--sample N] [--quick] [--jobs N]

tests/mutants/*.txt holds the list: `file: what it would break`, then the text ("- ") and what
replaces it ("+ "). Each mutant is built in a copy of the tree, in which C++ tests and pytest run,
those first that are likely to notice. Prints the survivors and the score; fails below 90 %.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
WORK = ROOT / "build" / "mutants"
GOAL = 0.9
BUILD_SECONDS, CTEST_SECONDS, PYTEST_SECONDS = 1200, 150, 1200

# What is likely to notice a mutant of a folder, cheapest first; then all the rest runs.
FIRST = {
    "src/plan": ["ctest:test_schedule", "ctest:test_select_kernel", "ctest:test_status"],
    "src/cpu": ["ctest:test_engine", "ctest:test_append_merge"],
    "src/api": ["ctest:test_status", "ctest:test_tensor_checks", "ctest:test_append_merge"],
    "src/common": ["ctest:test_status"],
    "bindings": ["pytest:tests/test_errors.py tests/test_dlpack.py tests/test_streams.py"],
    "python": ["pytest:tests/test_errors.py tests/test_api.py"],
}
ALL = [
    "ctest:",
    "pytest:tests/test_errors.py tests/test_dlpack.py tests/test_plan.py tests/test_api.py "
    "tests/test_merge.py tests/test_append.py tests/test_streams.py tests/test_leaks.py",
    "pytest:tests --ignore=tests/test_examples.py --ignore=tests/test_nvrtc.py --ignore=tests/gpu",
]
SKIPPED_CTEST = "header:|install|consumer|stubs_are_current"  # none of them runs the code


@dataclasses.dataclass(frozen=True)
class Mutant:
    number: int
    file: str
    why: str
    old: str
    new: str

    def __str__(self):
        return f"{self.number:3} {self.file}: {self.why}"


def mutants():
    """All mutants of the lists, in their order."""
    found = []
    for path in sorted(LISTS.glob("*.txt")):
        for block in re.split(r"\n{2,}", path.read_text()):
            lines = [line for line in block.splitlines() if not line.startswith("#")]
            if not lines:
                continue
            file, _, why = lines[0].partition(": ")
            old, new = (
                "\n".join(line[2:] for line in lines[1:] if line.startswith(sign))
                for sign in ("- ", "+ ")
            )
            found.append(Mutant(len(found) + 1, file, why, old, new))
    return found


def problems():
    """What is wrong with the lists, in words."""
    texts = []
    for mutant in mutants():
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if mutant.old and path.is_file() else 0
        if count != 1 or mutant.old == mutant.new:
            texts.append(f"{mutant}: expected its text once in the file, got {count} times")
    return texts


class Worker:
    """A copy of the tree with a build of its own."""

    def __init__(self, number, quick):
        self.quick = quick
        self.tree = WORK / str(number) / "tree"
        self.build = WORK / str(number) / "build"
        self.site = WORK / str(number) / "site"
        self.copy_tree()
        self.must("cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja", *self.options())
        self.must("cmake", "--build", self.build)
        package = self.site / "flashplan"
        package.mkdir(parents=True, exist_ok=True)
        modules = [*(self.tree / "python" / "flashplan").iterdir()]
        for file in [*modules, *(self.build / "bindings").glob("_core*.so")]:
            link = package / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
        failed = self.first_failure([ALL[0], ALL[1]])
        if failed:
            sys.exit(f"the tests fail without a mutant: {failed}")

    def options(self):
        return (
            "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
            "-DFLASHPLAN_CUDA=OFF",
            "-DFLASHPLAN_PYTHON=ON",
            "-DFLASHPLAN_INSTALL=OFF",
        )

    def copy_tree(self):
        """Files that are there already and the same are left alone, so that they are not built."""
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        text = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
        files = set(text.stdout.splitlines())
        for path in self.tree.rglob("*"):
            if path.is_file() and str(path.relative_to(self.tree)) not in files:
                path.unlink()
        for file in files:
            source, target = ROOT / file, self.tree / file
            if not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file() or source.read_bytes() != target.read_bytes():
                shutil.copyfile(source, target)

    def run(self, command, seconds):
        """Exit code and output; code None: it took too long."""
        environment = os.environ | {
            "PYTHONPATH": str(self.site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2"),
        }
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        return process.returncode, text

    def must(self, *command):
        code, text = self.run(command, BUILD_SECONDS)
        if code != 0:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{text[-3000:]}")

    def test(self, step):
        """Empty, or what failed."""
        tool, _, what = step.partition(":")
        if tool == "ctest":
            command = ["ctest", "--test-dir", self.build, "--stop-on-failure", "-E", SKIPPED_CTEST]
            command += ["--timeout", CTEST_SECONDS, *(["-R", f"^{what}$"] if what else [])]
            seconds = 10 * CTEST_SECONDS
        else:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
            command += what.split()
            seconds = PYTEST_SECONDS
        code, text = self.run(command, seconds)
        if code == 0:
            return ""
        if code is None:
            return f"{tool} (hang)"
        names = re.findall(
            r"^(?:FAILED|ERROR) (\S+)|- (\S+) \((?:Failed|Timeout|SEGFAULT)", text, re.M
        )
        name = next((a or b for a, b in names), what or text[-200:])
        return f"{tool} {name}"

    def first_failure(self, steps):
        for step in steps:
            failed = self.test(step)
            if failed:
                return failed
        return ""

    def try_mutant(self, mutant):
        """(verdict, by what): "killed", "survived", or "invalid" where it does not compile."""
        path = self.tree / mutant.file
        original = path.read_text()
        path.write_text(original.replace(mutant.old, mutant.new))
        try:
            # Also for Python: the library may still be that of the last mutant.
            code, text = self.run(["cmake", "--build", self.build], BUILD_SECONDS)
            if code != 0:
                errors = [line for line in text.splitlines() if "error" in line]
                return "invalid", " ".join(errors[:1]) or text[-300:]
            first = next((f for folder, f in FIRST.items() if mutant.file.startswith(folder)), [])
            steps = ALL[:2] if self.quick else ALL
            steps = steps[1:] if mutant.file.startswith("python") else steps
            failed = self.first_failure([*first, *steps])
            return ("killed", failed) if failed else ("survived", "")
        finally:
            path.write_text(original)


def run(chosen, jobs, quick):
    """Prints a line for each mutant as it is done. Returns {verdict: mutants}."""
    workers = queue.Queue()
    for number in range(jobs):
        workers.put(Worker(number, quick))
    verdicts = {"killed": [], "survived": [], "invalid": []}

    def one(mutant):
        worker = workers.get()
        start = time.monotonic()
        verdict, by = worker.try_mutant(mutant)
        workers.put(worker)
        verdicts[verdict].append(mutant)
        seconds = time.monotonic() - start
        print(f"{verdict:8} {mutant}{' <- ' if by else ''}{by} ({seconds:.0f} s)", flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(one, mutant) for mutant in chosen]:
            future.result()
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see that the lists are right")
    parser.add_argument("--only", default="", help="those whose line has this text")
    parser.add_argument("--sample", type=int, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--quick", action="store_true", help="leave out the slow half of pytest")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    wrong = problems()
    if wrong:
        sys.exit("\n".join(wrong))
    chosen = [mutant for mutant in mutants() if args.only in str(mutant)]
    if args.check:
        print(f"{len(chosen)} mutants")
        return 0
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    verdicts = run(chosen, args.jobs, args.quick)
    for verdict in ("invalid", "survived"):
        for mutant in verdicts[verdict]:
            print(f"{verdict}: {mutant}")
    valid = len(verdicts["killed"]) + len(verdicts["survived"])
    score = len(verdicts["killed"]) / max(valid, 1)
    print(f"{len(verdicts['killed'])} of {valid} killed: {score:.0%}")
    return 0 if score >= GOAL and not verdicts["invalid"] else 1


if __name__ == "__main__":
    sys.exit(main())

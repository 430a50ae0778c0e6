#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts small bugs into the sources, one at a time, to see whether a test notices them.

    python tests/mutants.py --check              each mutant's text is in its file once
    python tests/mutants.py [--only TEXT] [--sample N] [--seed S] [--first] [--quick] [--trust]
                            [--jobs N] [--cpu-isas LIST] [--shard I/N] [--time-limit SECONDS]
                            [--verdicts FILE]

tests/mutants/*.txt holds the list: `file: what it would break`, then the text ("- ") and what
replaces it ("+ "). Each job has a copy of the tree with a build of its own, and builds only what
the next tests need. Every mutant meets the tests that are likely to notice it; then those that no
test noticed meet the quick tests, and then the slow ones. Prints the survivors and the score; fails
below 90 %. With ccache as CMAKE_CXX_COMPILER_LAUNCHER, further copies are built in seconds.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import queue
import random
import re
import sys
import time

from mutant_worker import FIRST, QUICK, SLOW, Clock, OutOfTime, Worker, pytest_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
GOAL = 0.9
VERDICTS = ("untried", "unnoticed", "invalid", "survived", "killed")


@dataclasses.dataclass(frozen=True)
class Mutant:
    number: int
    file: str
    why: str
    old: str
    new: str

    @property
    def name(self):
        """An id that does not change when other mutants are added."""
        return f"{self.file}: {self.why}"

    def __str__(self):
        return f"{self.number:3} {self.name}"


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
    """Messages about errors in the lists."""
    texts = []
    for mutant in mutants():
        path = ROOT / mutant.file
        count = path.read_text().count(mutant.old) if mutant.old and path.is_file() else 0
        if count != 1 or mutant.old == mutant.new:
            texts.append(f"{mutant}: expected its text once in the file, got {count} times")
    return texts


class Trial:
    """Tries mutants with several workers."""

    def __init__(self, jobs, clock, record, cpu_isas):
        self.clock, self.record = clock, record
        processors = sorted(os.sched_getaffinity(0))
        # Two of the processors for each job, so that threads matter.
        shares = [
            [processors[(job + i) % len(processors)] for i in range(min(2, len(processors)))]
            for job in range(jobs)
        ]
        self.workers = [Worker(0, processors, clock, cpu_isas)]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            further = [
                pool.submit(Worker, job, shares[job], clock, cpu_isas) for job in range(1, jobs)
            ]
            self.workers += [future.result() for future in further]
        if jobs > 1:
            self.workers[0].processors = shares[0]

    def each(self, things, call):
        """[call(worker, thing)], by as many workers as there are; None where time ran out."""
        idle = queue.Queue()
        for worker in self.workers:
            idle.put(worker)

        def one(thing):
            worker = idle.get()
            try:
                return call(worker, thing) if self.clock.left() else None
            except OutOfTime:
                return None
            finally:
                idle.put(worker)

        with concurrent.futures.ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(one, things))

    def leave_out_failures(self, steps):
        """Runs the tests without a mutant, since tests that fail then prove nothing."""
        parts = []
        for step in steps:
            tool, _, what = step.partition(":")
            files = (
                [pathlib.Path(file).stem for file in pytest_files(what)] if tool == "pytest" else []
            )
            parts += [f"pytest:{name}" for name in files] or [step]
        for step, failed in zip(parts, self.each(parts, lambda w, step: w.failures(step))):
            for name in failed or ():
                print(f"fails without a mutant, left out: {step} {name}", flush=True)
                for worker in self.workers:
                    worker.left_out[step.partition(":")[0]].append(name)

    def run(self, chosen, steps_of, otherwise="survived"):
        """{mutant: verdict}, `otherwise` if no step notices it, None if time ran out."""

        def one(worker, mutant):
            start = time.monotonic()
            verdict, by = worker.try_mutant(mutant, steps_of(mutant))
            verdict = verdict or otherwise
            seconds = time.monotonic() - start
            print(f"{verdict:9} {mutant}{' <- ' if by else ''}{by} ({seconds:.0f} s)", flush=True)
            self.record(mutant, verdict, by)
            return verdict

        return dict(zip(chosen, self.each(chosen, one)))


def first_steps(mutant):
    return next((steps for folder, steps in FIRST.items() if mutant.file.startswith(folder)), [])


def verdicts_of(chosen, args, clock, record):
    """{verdict: mutants}. Where time ran out: "unnoticed" so far, or "untried"."""
    trial = Trial(args.jobs, clock, record, args.cpu_isas)
    rounds = [
        ("first", first_steps),
        ("quick", lambda mutant: QUICK),
        ("slow", lambda mutant: SLOW),
    ][: 1 if args.first else 2 if args.quick else 3]
    found = dict.fromkeys(chosen, "unnoticed")
    for name, steps_of in rounds:
        left = [mutant for mutant in chosen if found[mutant] == "unnoticed"]
        if not args.trust:
            trial.leave_out_failures(dict.fromkeys(s for m in left for s in steps_of(m)))
        print(f"{name} tests of {len(left)} mutants, {clock.left():.0f} s left", flush=True)
        is_last = name == rounds[-1][0] and name != "first"
        otherwise = "survived" if is_last else "unnoticed"
        tried = trial.run(left, steps_of, otherwise)
        untried = "untried" if name == "first" else "unnoticed"
        found |= {mutant: verdict or untried for mutant, verdict in tried.items()}
    verdicts = {verdict: [] for verdict in VERDICTS}
    for mutant, verdict in found.items():
        verdicts[verdict].append(mutant)
    return verdicts


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only see that the lists are right")
    parser.add_argument("--only", default="", help="those whose line has this text")
    parser.add_argument("--sample", type=int, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th mutant from the I-th on")
    parser.add_argument("--first", action="store_true", help="the likely tests alone")
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("--trust", action="store_true", help="all tests pass without a mutant")
    jobs = max(len(os.sched_getaffinity(0)) // 2, 1)
    parser.add_argument("--jobs", type=int, default=jobs, help=f"mutants at a time ({jobs})")
    parser.add_argument("--cpu-isas", help="FLASHPLAN_CPU_ISAS: '' is built in a third of the time")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop and report")
    parser.add_argument(
        "--verdicts", type=pathlib.Path, help="file to append to; mutants it knows go last"
    )
    return parser.parse_args()


def main():
    args = parse()
    clock = Clock(args.time_limit)
    wrong = problems()
    if wrong:
        sys.exit("\n".join(wrong))
    chosen = [mutant for mutant in mutants() if args.only in str(mutant)]
    if args.check:
        print(f"{len(chosen)} mutants")
        return 0
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    if args.verdicts and args.verdicts.is_file():
        lines = [line.split("\t") for line in args.verdicts.read_text().splitlines()]
        known = {name for verdict, name, _ in lines if verdict in ("killed", "survived")}
        chosen.sort(key=lambda mutant: mutant.name in known)
    shard, shards = map(int, args.shard.split("/"))
    chosen = chosen[shard - 1 :: shards]

    def record(mutant, verdict, by):
        if args.verdicts:
            with args.verdicts.open("a") as file:
                file.write(f"{verdict}\t{mutant.name}\t{by}\n")

    try:
        verdicts = verdicts_of(chosen, args, clock, record)
    except OutOfTime:
        sys.exit("the time limit passed before the first mutant")
    for verdict in VERDICTS[:-1]:
        for mutant in verdicts[verdict]:
            print(f"{verdict}: {mutant}")
    valid = len(verdicts["killed"]) + len(verdicts["survived"])
    score = len(verdicts["killed"]) / max(valid, 1)
    print(f"{len(verdicts['killed'])} of {valid} killed: {score:.0%}")
    return 0 if score >= GOAL and not verdicts["invalid"] else 1


if __name__ == "__main__":
    sys.exit(main())

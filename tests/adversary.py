#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random misuse of the whole Python surface, in a child process.

    python tests/adversary.py [--seconds N] [--seed S] [--kinds a,b]   search
    python tests/adversary.py --seed S --case N                        one case again

Case N of a seed is always the same. A finding is a crash, a hang, a sanitizer's report, a result
that differs from the reference, a write outside of the outputs, memory that grows, or an exception
that does not name the argument. Prints what was tried, by kind; fails if anything was found.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback

HANG_SECONDS = 60
MAX_DATA_BYTES = 3 << 30  # of a child: what asks for more gets a MemoryError
MODULES = (
    "tensors",
    "torch_tensors",
    "arguments",
    "aliasing",
    "values",
    "indices",
    "extremes",
    "sharing",
    "lifetimes",
)


def kinds(only=()):
    import misuse.finding

    for module in MODULES:
        importlib.import_module(f"misuse.{module}")
    found = misuse.finding.KINDS
    return {name: kind for name, kind in found.items() if not only or name in only}


def run_case(seed, number, chosen):
    """Runs a case. Returns (kind, what was found or "")."""
    import numpy as np

    from misuse.finding import Finding, Skip

    rng = np.random.default_rng([seed, number])
    weights = np.array([kind.weight for kind in chosen.values()])
    kind = list(chosen.values())[rng.choice(len(chosen), p=weights / weights.sum())]
    try:
        if kind.needs:
            importlib.import_module(kind.needs)
        kind.body(rng)
    except (Skip, ModuleNotFoundError):
        return kind.name, None
    except Finding as finding:
        return kind.name, str(finding)
    except Exception as error:
        return kind.name, f"unexpected {error!r}\n{traceback.format_exc()}"
    return kind.name, ""


def child(args, chosen):
    """Runs cases from args.case on until args.until; one line of JSON for each event."""
    import faulthandler
    import warnings

    import misuse

    faulthandler.enable()
    warnings.simplefilter("ignore")
    if not os.environ.keys() & {"ASAN_OPTIONS", "TSAN_OPTIONS"}:  # they take terabytes of addresses
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints goes with the rest
    pid = os.getpid()

    def say(**event):
        if os.getpid() == pid:
            print(json.dumps(event), file=pipe, flush=True)

    misuse.listen(lambda text: say(note=text))
    for number in range(args.case, sys.maxsize):
        if time.time() > args.until:
            break
        say(case=number)
        name, finding = run_case(args.seed, number, chosen)
        say(done=number, kind=name, finding=finding)
    say(end=True)


class Search:
    def __init__(self, args):
        self.args = args
        self.tried = collections.Counter()
        self.skipped = 0
        self.findings = collections.defaultdict(list)  # signature -> [(case, text)]
        self.until = time.time() + args.seconds

    def run(self):
        number = self.args.first
        try:
            while number is not None and time.time() < self.until:
                number = self.run_child(number)
        except KeyboardInterrupt:
            print("interrupted")
        return self.report()

    def run_child(self, first):
        """Returns the case to go on with, None at the end."""
        options = ["--seed", str(self.args.seed), "--case", str(first), "--until", str(self.until)]
        if self.args.kinds:
            options += ["--kinds", self.args.kinds]
        case, note = first, ""
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, __file__, *options], stdout=subprocess.PIPE, stderr=errors
            )
            hung = False
            while True:
                ready, _, _ = select.select([process.stdout], [], [], HANG_SECONDS)
                if not ready:
                    hung = True
                    process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
                    break
                line = process.stdout.readline()
                if not line:
                    break
                event = json.loads(line)
                if "case" in event:
                    case, note = event["case"], ""
                elif "note" in event:
                    note = event["note"]
                elif "done" in event:
                    self.count(case, note, event)
                elif "end" in event:
                    process.wait()
                    return None
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            errors.seek(0)
            text = errors.read().decode(errors="replace")
        what = "hang" if hung else f"crash: {ending(code)}"
        self.findings[signature(f"{what} {note}")].append((case, f"{what}\n{note}\n{text[-4000:]}"))
        return case + 1

    def count(self, case, note, event):
        if event["finding"] is None:
            self.skipped += 1
            return
        self.tried[event["kind"]] += 1
        if event["finding"]:
            text = event["finding"]
            sort = f"{event['kind']}: {text.partition(':')[0]}"
            self.findings[signature(sort)].append((case, f"{text}\n{note}"))

    def report(self):
        for found in self.findings.values():
            case, text = found[0]
            again = f"python tests/adversary.py --seed {self.args.seed} --case {case}"
            if self.args.kinds:
                again += f" --kinds '{self.args.kinds}'"
            print(f"\n--- {len(found)} x: {text}\n    again: {again}")
        print(f"\nseed {self.args.seed}: {sum(self.tried.values())} cases, {self.skipped} skipped")
        for name, count in sorted(self.tried.items()):
            print(f"  {name:24}{count:8}")
        total = sum(map(len, self.findings.values()))
        print(f"{total} findings of {len(self.findings)} sorts")
        return 1 if self.findings else 0


def ending(code):
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def signature(text):
    """Equal for what is likely the same defect."""
    return re.sub(r"(0x)?[0-9a-f]*\d+", "#", text.splitlines()[0])[:120]


def once(args, chosen):
    import misuse

    misuse.listen(lambda text: print(f"about to: {text}", flush=True))
    name, finding = run_case(args.seed, args.case, chosen)
    print(f"{name}: {finding or 'nothing found'}")
    return 1 if finding else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default="", help="these only, with commas")
    parser.add_argument("--first", type=int, default=0, help="the first case of a search")
    parser.add_argument("--case", type=int, help="run this case alone, in this process")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is None:
        return Search(args).run()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    chosen = kinds(args.kinds.split(",") if args.kinds else ())
    return child(args, chosen) if args.until else once(args, chosen)


if __name__ == "__main__":
    sys.exit(main())

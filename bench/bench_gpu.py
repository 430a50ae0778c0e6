# SPDX-License-Identifier: Apache-2.0
"""Times the GPU rows of tests/bench_cases.py and the small operators on one GPU.

Each result is checked before it is timed. Rows stand beside the ceilings of the GPU and, with
--peers, beside other libraries; rows with shared prefixes also beside the plan without them. The
targets for one H200 are in bench/targets.json: TFLOP/s of prefill rows, ratios to the plan without
the variant, the 8-bit cache or batch_invariant of rows with one, microseconds of others.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "tests"))

import torch

import flashplan as fp
from bench_cases import GPU_BENCH, MLA_BENCH, MLA_PROMPTS, SPARSE_BENCH
from environment import RESULTS, write_json
from flashplan.bench import work
from flashplan.bench.gpu import Timer, ceilings
from gpu_inputs import assert_right, make_gpu_inputs
from gpu_mla import mla_row, prompt_row
from gpu_ops import OPS
from gpu_peers import peers_of
from gpu_timer import host_microseconds

ROWS = GPU_BENCH | {"mla": MLA_BENCH | SPARSE_BENCH | MLA_PROMPTS, "ops": OPS}
SECTIONS = tuple(ROWS)
TARGETS = json.loads((pathlib.Path(__file__).parent / "targets.json").read_text())
BY_TFLOP_S = ("prefill", "paged")  # sections whose targets are rates
WITHOUT_IT = "without it"
OF_BFLOAT16 = "bfloat16 cache"
# Targets of these sections.
AS_RATIOS = {"variants": WITHOUT_IT, "8-bit cache": OF_BFLOAT16, "invariant": WITHOUT_IT}
QUICK = {
    "prefill": "s512, s1024, s4096, s8192, b4 s8192 32/8, b4 s8192 d64, b4 s8192 d256, zipf 1024",
    "paged": "s4096 page 16",
    "decode": "b1 kv8k, b1 kv128k, b16 kv1k, b64 kv4k, b64 kv4k page 1, b64 kv4k 64/8, b256 kv2k, "
    "b64 kv4k 32/32, b16 kv1k 32/32, b16 uniform 512-1024 32/32, b16 zipf 1024 32/32, "
    "b16 zipf 16k, b64 kv4k e4m3, b8 kv2k 64/8, b64 kv4k 48/1",
    "serving": "chunk 2048 of 32k, chunk 2048 of 8k + 64 x 4k, 64 x 4 drafts, 16 x 8 drafts 64/8",
    "8-bit cache": "s4096 e4m3, chunk 2048 of 8k + 64 x 4k e4m3",
    "prefix": "1024 x 16, 8192 x 64",
    "device": "16 trees of 64, b64 kv4k real lengths",
    "variants": "s4096 alibi, s4096 rope, b64 kv4k rope",
    "invariant": ", ".join(TARGETS["invariant"]),
    "mla": ", ".join(TARGETS["mla"]),
    "ops": ", ".join(TARGETS["ops"]),
}


def flops(case):
    return work.flops(
        case.qo_lens,
        case.kv_lens,
        case.num_qo_heads,
        case.head_dims,
        causal=case.causal,
        window_left=case.window_left,
    )


def kv_bytes(case, inputs):
    """Keys of a shared prefix count once."""
    shared = [keys for _, n, keys in case.shared_prefixes for _ in range(n - 1)]
    item_size = inputs.k.element_size()
    every, again = (
        work.kv_bytes(qo, kv, case.num_kv_heads, case.head_dims, item_size, window_left=window)
        for qo, kv, window in (
            (case.qo_lens, case.kv_lens, case.window_left),
            ([1] * len(shared), shared, -1),
        )
    )
    return every - again


def run_peers(case, inputs, timer, args):
    times = {}
    for name, make in peers_of(case, args.flex).items():
        try:
            call, rows = make(case, inputs)
            assert_right(case, inputs, rows(call()), name)
            times[name] = timer.microseconds(call, args.repeats)
        except Exception as error:  # a peer's failure is no reason to stop
            print(f"    {name}: {first_line(error)}")
    return times


def left_out(case):
    """What the plan beside a row does without; None if there is no such plan."""
    if case.shared_prefixes:
        return "without groups"
    if case.planned_lens or case.custom_mask:
        return "exact and causal"
    if case.variant or case.rope or case.batch_invariant:
        return WITHOUT_IT
    return OF_BFLOAT16 if case.kv_dtype and max(case.qo_lens) > 1 else None


def attention_row(case, timer, args, ragged=None):
    """The row, and the call that it timed. `ragged` is such a call, to be timed in turn with it."""
    inputs = make_gpu_inputs(case, args.device)
    attn = fp.Attention(**case.options() | {"device": args.device})
    plan_args, plan_options = inputs.plan_args(), inputs.plan_options()
    plan = attn.plan(*plan_args, **plan_options)
    shape = (len(inputs.q), case.num_qo_heads, case.head_dims[1])
    dtype = getattr(torch, case.product_dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=args.device)
    tables = inputs.other_tensors()

    def call():
        attn.run(inputs.q, inputs.k, inputs.v, **tables, out=out)

    call()
    assert_right(case, inputs, out, "flashplan")
    beside = [ragged] if ragged else []
    if without := left_out(case):
        plain = dataclasses.replace(
            case,
            planned_lens=None,
            custom_mask=None,
            variant=None,
            rope=None,
            q_dtype=case.product_dtype,
            kv_dtype=None,
            batch_invariant=False,
        )
        other = fp.Attention(**plain.options() | {"device": args.device})
        other.plan(plan_args[0], case.kv_lens)
        pages = {"block_table": inputs.block_table}
        queries, keys, values = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
        beside = [lambda: other.run(queries, keys, values, **pages, out=out)]
    us, *beside_us = timer.in_turn([call, *beside], args.repeats)
    row = {
        "case": str(case),
        "kernel": plan.kernel_name,
        "us": us,
        "tflop_s": flops(case) / us / 1e6,
        "tb_s": kv_bytes(case, inputs) / us / 1e6,
        # About 30 ms of work: after more, the next row would find the GPU at a lower clock.
        "run_host_us": host_microseconds(call, int(min(200, max(10, 3e4 / us)))),
        "plan_host_us": host_microseconds(lambda: attn.plan(*plan_args, **plan_options)),
    }
    if ragged:
        row["share_of_ragged"] = beside_us[0] / us
    if args.peers:
        row["peers_us"] = run_peers(case, inputs, timer, args)
    if without:
        row["peers_us"] = {without: beside_us[0]} | row.get("peers_us", {})
    return row, call


def op_row(op, timer, args):
    make, num_bytes = op
    call, check = make(args.device)
    call()
    check()
    us = timer.microseconds(call, args.repeats)
    return {"us": us, "tb_s": num_bytes / us / 1e6, "run_host_us": host_microseconds(call)}


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def compared(section, name, row, ceiling):
    """The row with its share of the nearer ceiling, and of the target: over 1 is ahead of it."""
    row = {"section": section, "name": name, "peers_us": {}} | row
    memory = row["tb_s"] / ceiling["copy_tb_s" if section == "ops" else "read_tb_s"]
    matmul = row.get("tflop_s", 0) / ceiling["matmul_bf16_tflop_s"]
    row["share_of_matmul" if matmul > memory else "share_of_memory"] = max(matmul, memory)
    target = TARGETS.get(section, {}).get(name)
    if target:
        row["target"] = target
        if section in BY_TFLOP_S:
            row["share_of_target"] = row["tflop_s"] / target
        elif section in AS_RATIOS:
            row["share_of_target"] = target * row["peers_us"][AS_RATIOS[section]] / row["us"]
        else:
            row["share_of_target"] = target / row["us"]
    return row


HEADER = (
    f"{'row':30}{'us':>9}{'TFLOP/s':>9}{'TB/s':>7}{'limit':>7}{'target':>8}{'reached':>9}"
    f"{'ragged':>8}"
    f"{'run us':>8}{'plan us':>8}  peers, time over ours"
)


def print_row(row):
    def cell(key, width, form):
        return f"{row[key]:{width}{form}}" if key in row else " " * width

    limit = "share_of_matmul" if "share_of_matmul" in row else "share_of_memory"
    peers = ", ".join(f"{peer} {us / row['us']:.2f}" for peer, us in row["peers_us"].items())
    print(
        f"{row['name']:30}{row['us']:9.1f}{cell('tflop_s', 9, '.0f')}{cell('tb_s', 7, '.2f')}"
        f"{cell(limit, 7, '.0%')}{cell('target', 8, 'g')}{cell('share_of_target', 9, '.1%')}"
        f"{cell('share_of_ragged', 8, '.1%')}{cell('run_host_us', 8, '.1f')}"
        f"{cell('plan_host_us', 8, '.1f')}  {peers}",
        flush=True,
    )


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ragged_twin(case):
    """The case whose keys are the same without pages."""
    return dataclasses.replace(case, page_size=None)


def in_order():
    """All rows (section, name, case or op). Paged ones follow their ragged twin."""
    for name, case in GPU_BENCH["prefill"].items():
        yield "prefill", name, case
        for paged_name, paged in GPU_BENCH["paged"].items():
            if ragged_twin(paged) == case:
                yield "paged", paged_name, paged
    for section in SECTIONS[2:]:
        for name, what in ROWS[section].items():
            yield section, name, what


def selected(args):
    """The rows to run."""
    for section, name, what in in_order():
        quick = not args.quick or name in QUICK[section].split(", ")
        if section in args.section and args.only in name and quick:
            yield section, name, what


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the rows that show most")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rest", type=float, default=0.25, help="seconds before each row")
    parser.add_argument("--peers", action="store_true", help="cuDNN, torch flash, flashinfer")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too: compiles each row")
    parser.add_argument("--out", help="JSON; default, where all rows are run: results/h200.json")
    args = parser.parse_args()
    if not (args.out or args.quick or args.only or set(args.section) < set(SECTIONS)):
        args.out = RESULTS / "h200.json"

    began = time.perf_counter()
    torch.cuda.set_device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    timer = Timer(args.device)
    ceiling = ceilings(timer, args.device)
    print({name: round(value, 2) for name, value in ceiling.items()})
    print(HEADER)
    rows = []
    twin, call_of_twin = None, None
    for section, name, what in selected(args):
        try:
            torch.cuda.empty_cache()
            # After long matrix work the GPU runs at a lower clock for a while.
            time.sleep(args.rest)
            if section == "ops":
                row = op_row(what, timer, args)
            elif section == "mla":
                make_row = prompt_row if name in MLA_PROMPTS else mla_row
                row = make_row(what, timer, args)
            else:
                has_twin = section == "paged" and ragged_twin(what) == twin
                row, call = attention_row(what, timer, args, call_of_twin if has_twin else None)
                if section == "prefill":
                    twin, call_of_twin = what, call
            rows.append(compared(section, name, row, ceiling))
            print_row(rows[-1])
        except Exception as error:  # reported, and the rest goes on
            print(f"{name:30} {first_line(error)}", flush=True)
            rows.append({"section": section, "name": name, "error": first_line(error)})
    print(f"{time.perf_counter() - began:.0f} s")
    if args.out:
        properties = torch.cuda.get_device_properties(args.device)
        gpu = {"name": properties.name, "sms": properties.multi_processor_count}
        write_json(args.out, rounded({"gpu": gpu, "ceilings": ceiling, "rows": rows}))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Checks the symbols of the library.

check_symbols.py library FILE      libflashplan.so exports exactly the public API
check_symbols.py instance OBJECT.. the CPU kernels of one instruction set define nothing that the
                                   linker could take for the rest of the program
"""

import re
import shutil
import subprocess
import sys

PUBLIC = {
    "flashplan::Plan::Plan",
    "flashplan::Plan::~Plan",
    "flashplan::Plan::operator=",
    "flashplan::Plan::create",
    "flashplan::Plan::plan",
    "flashplan::Plan::run",
    "flashplan::Plan::check_device_data",
    "flashplan::Plan::options",
    "flashplan::Plan::schedule",
    "flashplan::Plan::workspace_bytes",
    "flashplan::Plan::kernel_name",
    "flashplan::Plan::describe",
    "flashplan::Plan::timeline_svg",
    "flashplan::Variant::Variant",
    "flashplan::Variant::~Variant",
    "flashplan::Variant::operator=",
    "flashplan::Variant::compile_log",
    "flashplan::Variant::create",
    "flashplan::Variant::name",
    "flashplan::add_rmsnorm",
    "flashplan::append_mla",
    "flashplan::append_paged_kv",
    "flashplan::apply_penalties",
    "flashplan::apply_rope",
    "flashplan::gated_activation",
    "flashplan::gather_mla",
    "flashplan::gather_rows",
    "flashplan::filtered_probs",
    "flashplan::find_shared_prefixes",
    "flashplan::is_supported",
    "flashplan::layernorm",
    "flashplan::merge_states",
    "flashplan::num_threads",
    "flashplan::quantize_fp8",
    "flashplan::rmsnorm",
    "flashplan::rope_append_paged_kv",
    "flashplan::sample",
    "flashplan::set_num_threads",
    "flashplan::show_config",
    "flashplan::softmax",
    "flashplan::speculative_verify",
    "flashplan::to_string",
    "flashplan::top_k_mask",
    "flashplan::version",
    "flashplan::workspace_bytes",
    "flashplan_add_rmsnorm",
    "flashplan_append_mla",
    "flashplan_append_paged_kv",
    "flashplan_append_tensors_init",
    "flashplan_apply_penalties",
    "flashplan_apply_rope",
    "flashplan_apply_rope_scaled",
    "flashplan_apply_rope_table",
    "flashplan_attention_tensors_init",
    "flashplan_batch_init",
    "flashplan_device_data_init",
    "flashplan_filtered_probs",
    "flashplan_find_shared_prefixes",
    "flashplan_gated_activation",
    "flashplan_gather_mla",
    "flashplan_gather_rows",
    "flashplan_is_supported",
    "flashplan_layernorm",
    "flashplan_merge_states",
    "flashplan_merge_states_base2",
    "flashplan_mla_append_tensors_init",
    "flashplan_mla_gather_tensors_init",
    "flashplan_num_threads",
    "flashplan_options_init",
    "flashplan_penalty_tensors_init",
    "flashplan_plan_check_device_data",
    "flashplan_plan_create",
    "flashplan_plan_describe",
    "flashplan_plan_destroy",
    "flashplan_plan_kernel_name",
    "flashplan_plan_plan",
    "flashplan_plan_run",
    "flashplan_plan_workspace_bytes",
    "flashplan_quantize_fp8",
    "flashplan_rmsnorm",
    "flashplan_rope_append_paged_kv",
    "flashplan_rope_init",
    "flashplan_rope_tensors_init",
    "flashplan_sample",
    "flashplan_sample_tensors_init",
    "flashplan_set_num_threads",
    "flashplan_show_config",
    "flashplan_softmax",
    "flashplan_speculative_verify",
    "flashplan_status_name",
    "flashplan_tensor_init",
    "flashplan_top_k_mask",
    "flashplan_variant_compile_log",
    "flashplan_variant_create",
    "flashplan_variant_description_init",
    "flashplan_variant_destroy",
    "flashplan_verify_tensors_init",
    "flashplan_version",
    "flashplan_workspace_bytes",
}


def defined_symbols(files, *options):
    """(type, name without arguments) of each symbol that `files` define."""
    nm = shutil.which("nm") or sys.exit("check_symbols: nm is not installed (package binutils)")
    command = [nm, "--defined-only", "--demangle", *options, *files]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        match = re.match(r"[0-9a-f]+ (\w) (.+)", line)
        if match:
            yield match[1], re.sub(r"(\[abi:\w+\])?\(.*", "", match[2])


def check_library(path):
    exported = {name for _, name in defined_symbols([path], "--dynamic")}
    for name in sorted(exported - PUBLIC):
        print(f"exported, but not in the public API: {name}")
    for name in sorted(PUBLIC - exported):
        print(f"in the public API, but not exported: {name}")
    return exported == PUBLIC


def check_instance(paths):
    # The linker may keep the AVX-512 copy of a weak function for all callers. The library would
    # then stop with an illegal instruction on a machine without AVX-512.
    weak = sorted({name for kind, name in defined_symbols(paths) if kind in "WV"})
    isa_namespace = re.compile(r"\bflashplan::(\w+::)*(baseline|avx2|avx512)::")
    bad = [name for name in weak if not isa_namespace.search(name)]
    for name in bad:
        print(f"weak symbol outside the namespace of its instruction set: {name}")
    return not bad


if __name__ == "__main__":
    mode, *files = sys.argv[1:]
    ok = check_library(*files) if mode == "library" else check_instance(files)
    sys.exit(not ok)

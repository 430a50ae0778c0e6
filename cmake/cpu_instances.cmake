# SPDX-License-Identifier: Apache-2.0
include(CheckCXXCompilerFlag)

set(FLASHPLAN_CPU_ISAS avx2 avx512 CACHE STRING
  "Instruction sets of x86-64 that CPU kernels are compiled for, besides the baseline")

# Compiles the CPU kernels `sources` once per instruction set: an object library flashplan_cpu_<isa>,
# with FLASHPLAN_ISA=<isa> and the same as a string in FLASHPLAN_ISA_NAME. `registry`, a target, gets
# FLASHPLAN_HAVE_<ISA>=1 for each set besides the baseline; `out_targets` receives the libraries.
function(flashplan_add_cpu_instances out_targets registry sources)
  set(flags_baseline "")
  set(flags_avx2 -march=x86-64-v3)
  # Compilers default to 256-bit vectors for the sake of code that uses few; these are tight loops.
  set(flags_avx512 -march=x86-64-v4 -mprefer-vector-width=512)

  set(isas baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    foreach(isa IN LISTS FLASHPLAN_CPU_ISAS)
      if(NOT DEFINED flags_${isa} OR isa STREQUAL "baseline")
        message(FATAL_ERROR "FLASHPLAN_CPU_ISAS: expected avx2, avx512 or both, got ${isa}")
      endif()
      string(JOIN " " flags ${flags_${isa}})
      check_cxx_compiler_flag("${flags}" FLASHPLAN_COMPILER_HAS_${isa})
      if(FLASHPLAN_COMPILER_HAS_${isa})
        list(APPEND isas ${isa})
      endif()
    endforeach()
  endif()

  foreach(isa IN LISTS isas)
    set(target flashplan_cpu_${isa})
    add_library(${target} OBJECT ${sources})
    target_compile_definitions(${target} PRIVATE
      FLASHPLAN_ISA=${isa} FLASHPLAN_ISA_NAME="${isa}")
    # What lets the compiler vectorise reductions and contract a * b + c. Not -ffast-math: NaN and
    # infinity mean something here.
    target_compile_options(${target} PRIVATE -O3 -fno-math-errno -fno-trapping-math
      -ffp-contract=fast -fopenmp-simd ${flags_${isa}})
    flashplan_set_internal(${target})
    list(APPEND targets ${target})
    if(NOT isa STREQUAL "baseline")
      string(TOUPPER ${isa} isa)
      target_compile_definitions(${registry} PRIVATE FLASHPLAN_HAVE_${isa}=1)
    endif()
  endforeach()
  set(${out_targets} ${targets} PARENT_SCOPE)
endfunction()

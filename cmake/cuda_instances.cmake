# SPDX-License-Identifier: Apache-2.0
# One source per kernel, in the build tree: of src/kernels/kernels.json, with the list of them, and of
# sample().

set(FLASHPLAN_KERNEL_DTYPES all CACHE STRING
  "Dtypes of q and kv to compile kernels for: all, or a list as float16;bfloat16;float8_e4m3fn")
set(FLASHPLAN_KERNEL_HEAD_DIMS all CACHE STRING
  "Head dims to compile kernels for: all, or a list as 128;192x128 (qk x vo)")
option(FLASHPLAN_KERNEL_SOFTCAP "Compile each kernel a second time, with a softcap, as Gemma 2 needs it" ON)

# Whether the cache variable `chosen` names all of `items`.
function(flashplan_is_chosen out chosen items)
  set(${out} ON PARENT_SCOPE)
  foreach(item IN LISTS items)
    if(NOT "${${chosen}}" STREQUAL "all" AND NOT item IN_LIST ${chosen})
      set(${out} OFF PARENT_SCOPE)
    endif()
  endforeach()
endfunction()

# Of the architectures that are built for, those of a manifest entry: "80+" are 80 and later, "90a" is
# that one alone.
function(flashplan_architectures out wanted)
  set(found "")
  foreach(architecture IN LISTS FLASHPLAN_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(architecture STREQUAL wanted OR (wanted MATCHES "^([0-9]+)\\+$" AND number GREATER_EQUAL CMAKE_MATCH_1))
      list(APPEND found ${architecture})
    endif()
  endforeach()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# `out_targets` receives object libraries, one for each set of architectures; `registry`, a target, gets
# the list of kernels.
function(flashplan_add_cuda_instances out_targets registry)
  set(manifest ${PROJECT_SOURCE_DIR}/src/kernels/kernels.json)
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${manifest})
  file(READ ${manifest} json)
  foreach(chosen FLASHPLAN_KERNEL_DTYPES FLASHPLAN_KERNEL_HEAD_DIMS)
    foreach(item IN LISTS ${chosen})
      if(NOT item STREQUAL "all" AND NOT json MATCHES "\"${item}\"")
        message(FATAL_ERROR "${chosen}: expected all, or names of ${manifest}, got ${item}")
      endif()
    endforeach()
  endforeach()
  set(folder ${PROJECT_BINARY_DIR}/kernels)
  set(short_float16 f16)
  set(short_bfloat16 bf16)
  set(short_float8_e4m3fn e4m3)
  set(short_float8_e5m2 e5m2)
  set(short_fp8_ds_mla ds)
  set(cpp_float16 kFloat16)
  set(cpp_bfloat16 kBFloat16)
  set(cpp_float8_e4m3fn kFloat8E4M3)
  set(cpp_float8_e5m2 kFloat8E5M2)
  set(cpp_fp8_ds_mla kFp8DsMla)
  set(declarations "")
  set(entries "")
  set(targets "")
  set(count 0)

  string(JSON last LENGTH "${json}")
  math(EXPR last "${last} - 1")
  foreach(i RANGE ${last})
    foreach(field family architectures q_dtype kv_dtype)
      string(JSON ${field} GET "${json}" ${i} ${field})
    endforeach()
    # Lists of plain words: the brackets and commas of JSON, and quotes, are all that is to go.
    foreach(field head_dims softcap)
      string(JSON ${field} GET "${json}" ${i} ${field})
      string(REGEX MATCHALL "[0-9a-z]+" ${field} "${${field}}")
    endforeach()
    flashplan_is_chosen(is_chosen FLASHPLAN_KERNEL_DTYPES "${q_dtype};${kv_dtype}")
    flashplan_architectures(architectures "${architectures}")
    if(NOT is_chosen OR NOT architectures)
      continue()
    endif()
    set(q_type ${cpp_${q_dtype}})
    set(kv_type ${cpp_${kv_dtype}})
    set(dtypes ${short_${q_dtype}})
    if(NOT q_dtype STREQUAL kv_dtype)
      string(APPEND dtypes _${short_${kv_dtype}})
    endif()
    list(JOIN architectures "_" target)
    set(target flashplan_cuda_${target})
    if(NOT TARGET ${target})
      add_library(${target} OBJECT)
      flashplan_set_internal_cuda(${target})
      list(TRANSFORM architectures APPEND "-real" OUTPUT_VARIABLE real_architectures)
      set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${real_architectures}")
      list(APPEND targets ${target})
    endif()

    foreach(head_dim IN LISTS head_dims)
      flashplan_is_chosen(is_chosen FLASHPLAN_KERNEL_HEAD_DIMS ${head_dim})
      if(NOT is_chosen)
        continue()
      endif()
      string(REGEX REPLACE "x.*" "" qk ${head_dim})
      string(REGEX REPLACE ".*x" "" vo ${head_dim})
      foreach(has_softcap IN LISTS softcap)
        if(has_softcap AND NOT FLASHPLAN_KERNEL_SOFTCAP)
          continue()
        endif()
        set(name ${family}_${dtypes}_d${head_dim})
        if(has_softcap)
          string(APPEND name _softcap)
        endif()
        set(source ${folder}/${name}.cu)
        file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "kernels/@family@.h"
namespace flashplan {
Kernel @name@(Architecture architecture) noexcept {
  return make_@family@_kernel<DType::@q_type@, DType::@kv_type@, @qk@, @vo@, /*softcap=*/@has_softcap@>(
      "@name@", architecture);
}
}  // namespace flashplan
]])
        target_sources(${target} PRIVATE ${source})
        string(APPEND declarations "Kernel ${name}(Architecture architecture) noexcept;\n")
        foreach(architecture IN LISTS architectures)
          string(REGEX REPLACE "^([0-9]+)([a-z])$" "\\1, '\\2'" architecture ${architecture})
          string(APPEND entries "    ${name}({${architecture}}),\n")
        endforeach()
        math(EXPR count "${count} + 1")
      endforeach()
    endforeach()
  endforeach()
  if(count EQUAL 0)
    message(FATAL_ERROR "FLASHPLAN_KERNEL_DTYPES: expected a dtype of q and one of kv, "
      "got ${FLASHPLAN_KERNEL_DTYPES}: no kernel is left")
  endif()
  message(STATUS "CUDA kernels: ${count} instances")

  file(CONFIGURE OUTPUT ${folder}/kernel_list.cpp @ONLY CONTENT [[
#include "kernels/kernel_list.h"
namespace flashplan {
@declarations@
std::span<const Kernel> cuda::kernels() noexcept {
  static const Kernel all[] = {
@entries@  };
  return all;
}
}  // namespace flashplan
]])
  target_sources(${registry} PRIVATE ${folder}/kernel_list.cpp)
  set(${out_targets} ${targets} PARENT_SCOPE)
endfunction()

# Adds the kernels of sample() to `target`: a source for each way to draw and each dtype of logits,
# which are compiled in parallel. Two ways share a source, since their kernels call the same functions.
function(flashplan_add_sampler target)
  foreach(ways plain counted_stream cluster)
    string(REPLACE "_" ";" each_way ${ways})
    foreach(dtype Float32 Float16 BFloat16)
      set(includes "")
      set(instances "")
      foreach(way IN LISTS each_way)
        string(APPEND includes "#include \"ops/cuda/sample/${way}_kernel.h\"\n")
        string(APPEND instances "template Status cuda::sample_${way}<DType::k${dtype}>("
          "const SampleParams&, Device, Stream) noexcept;\n")
      endforeach()
      set(source ${PROJECT_BINARY_DIR}/kernels/sample_${ways}_${dtype}.cu)
      file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
@includes@
namespace flashplan {
@instances@
}  // namespace flashplan
]])
      target_sources(${target} PRIVATE ${source})
    endforeach()
  endforeach()
endfunction()

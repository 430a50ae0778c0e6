# SPDX-License-Identifier: Apache-2.0
# src/kernels/kernels.json -> one source per kernel and the list of them, in the build tree.

set(FLASHPLAN_KERNEL_DTYPES all CACHE STRING
  "Dtypes of q and kv to compile kernels for: all, or a list as float16;bfloat16;float8_e4m3fn")
set(FLASHPLAN_KERNEL_HEAD_DIMS all CACHE STRING
  "Head dims to compile kernels for: all, or a list as 128;192x128 (qk x vo)")

# The list at a path of kernels.json; [192, 128] is spelled 192x128.
function(flashplan_json_list out json)
  string(JSON length LENGTH "${json}" ${ARGN})
  math(EXPR last "${length} - 1")
  set(items "")
  foreach(i RANGE ${last})
    string(JSON type TYPE "${json}" ${ARGN} ${i})
    if(type STREQUAL "ARRAY")
      string(JSON qk GET "${json}" ${ARGN} ${i} 0)
      string(JSON vo GET "${json}" ${ARGN} ${i} 1)
      set(item ${qk}x${vo})
    else()
      string(JSON item GET "${json}" ${ARGN} ${i})
    endif()
    list(APPEND items ${item})
  endforeach()
  set(${out} ${items} PARENT_SCOPE)
endfunction()

# The items of `all` that the cache variable `chosen` names.
function(flashplan_choose out chosen)
  if("${${chosen}}" STREQUAL "all")
    set(${out} ${ARGN} PARENT_SCOPE)
    return()
  endif()
  foreach(item IN LISTS ${chosen})
    if(NOT item IN_LIST ARGN)
      list(JOIN ARGN ", " all)
      message(FATAL_ERROR "${chosen}: expected all, or some of ${all}, got ${item}")
    endif()
  endforeach()
  set(${out} ${${chosen}} PARENT_SCOPE)
endfunction()

# `out` receives the sources.
function(flashplan_add_cuda_instances out)
  set(manifest ${PROJECT_SOURCE_DIR}/src/kernels/kernels.json)
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${manifest})
  file(READ ${manifest} json)
  set(folder ${PROJECT_BINARY_DIR}/kernels)
  set(short_float16 f16)
  set(short_bfloat16 bf16)
  set(short_float8_e4m3fn e4m3)
  set(short_float8_e5m2 e5m2)
  set(cpp_float16 kFloat16)
  set(cpp_bfloat16 kBFloat16)
  set(cpp_float8_e4m3fn kFloat8E4M3)
  set(cpp_float8_e5m2 kFloat8E5M2)
  set(declarations "")
  set(entries "")
  set(sources "")

  string(JSON num_families LENGTH "${json}")
  math(EXPR last_family "${num_families} - 1")
  foreach(i RANGE ${last_family})
    string(JSON family MEMBER "${json}" ${i})
    foreach(axis q_dtype kv_dtype head_dim softcap)
      flashplan_json_list(${axis}s "${json}" ${family} ${axis})
    endforeach()
    set(dtypes ${q_dtypes} ${kv_dtypes})
    list(REMOVE_ITEM dtypes same)
    flashplan_choose(dtypes FLASHPLAN_KERNEL_DTYPES ${dtypes})
    flashplan_choose(head_dims FLASHPLAN_KERNEL_HEAD_DIMS ${head_dims})

    foreach(q IN LISTS q_dtypes)
      foreach(kv IN LISTS kv_dtypes)
        set(name_dtypes ${short_${q}}_${short_${kv}})
        if(kv STREQUAL "same")
          set(kv ${q})
          set(name_dtypes ${short_${q}})
        endif()
        if(NOT q IN_LIST dtypes OR NOT kv IN_LIST dtypes)
          continue()
        endif()
        set(q_type ${cpp_${q}})
        set(kv_type ${cpp_${kv}})
        foreach(head_dim IN LISTS head_dims)
          string(REGEX MATCH "^([0-9]+)x?([0-9]*)$" matched ${head_dim})
          set(qk ${CMAKE_MATCH_1})
          set(vo ${CMAKE_MATCH_2})
          if(NOT vo)
            set(vo ${qk})
          endif()
          foreach(softcap IN LISTS softcaps)
            set(name ${family}_${name_dtypes}_d${head_dim})
            set(has_softcap false)
            if(softcap)
              string(APPEND name _softcap)
              set(has_softcap true)
            endif()
            set(source ${folder}/${name}.cu)
            file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
#include "kernels/@family@.h"
namespace flashplan {
const KernelInstance& instance_@name@() noexcept {
  static const KernelInstance instance =
      make_@family@_instance<DType::@q_type@, DType::@kv_type@, @qk@, @vo@, /*softcap=*/@has_softcap@>("@name@");
  return instance;
}
}  // namespace flashplan
]])
            list(APPEND sources ${source})
            string(APPEND declarations "const KernelInstance& instance_${name}() noexcept;\n")
            string(APPEND entries "    instance_${name}(),\n")
          endforeach()
        endforeach()
      endforeach()
    endforeach()
  endforeach()
  if(NOT sources)
    message(FATAL_ERROR "FLASHPLAN_KERNEL_DTYPES: expected a dtype of q and one of kv, "
      "got ${FLASHPLAN_KERNEL_DTYPES}: no kernel is left")
  endif()
  list(LENGTH sources count)
  message(STATUS "CUDA kernels: ${count} instances")

  file(CONFIGURE OUTPUT ${folder}/instances.cpp @ONLY CONTENT [[
#include "kernels/instances.h"
namespace flashplan {
@declarations@
std::span<const KernelInstance> kernel_instances() noexcept {
  static const KernelInstance instances[] = {
@entries@  };
  return instances;
}
const char* kernel_architectures() noexcept { return "@FLASHPLAN_ARCHITECTURES@"; }
}  // namespace flashplan
]])
  set(${out} ${sources} ${folder}/instances.cpp PARENT_SCOPE)
endfunction()

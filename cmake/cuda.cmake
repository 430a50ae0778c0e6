# SPDX-License-Identifier: Apache-2.0
# FLASHPLAN_CUDA=AUTO|ON|OFF -> FLASHPLAN_WITH_CUDA, and CMAKE_CUDA_ARCHITECTURES as it is built for;
# without CUDA FLASHPLAN_WHY_NO_CUDA, for show_config() and the end of the build.

# What CMAKE_CUDA_ARCHITECTURES=release stands for, and what is built for where there is no GPU: as
# many of these as nvcc knows.
set(FLASHPLAN_RELEASE_ARCHITECTURES 80 86 89 90a 100 120)

# Builds of containers know variables of the environment alone.
if(FLASHPLAN_CUDA STREQUAL "AUTO" AND DEFINED ENV{FLASHPLAN_CUDA})
  set(FLASHPLAN_CUDA $ENV{FLASHPLAN_CUDA})
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{CUDAARCHS})
  set(CMAKE_CUDA_ARCHITECTURES $ENV{CUDAARCHS})
elseif(NOT CMAKE_CUDA_ARCHITECTURES AND DEFINED ENV{TORCH_CUDA_ARCH_LIST})
  # PyTorch lists compute capabilities, as "8.0 9.0+PTX". The Hopper kernels use wgmma,
  # which the architecture 90a alone has. PyTorch's list can not name it, so 9.0 is taken as 90a.
  string(REPLACE " " ";" CMAKE_CUDA_ARCHITECTURES "$ENV{TORCH_CUDA_ARCH_LIST}")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "(\\.|\\+PTX$)" "")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^90$" "90a")
  list(FILTER CMAKE_CUDA_ARCHITECTURES INCLUDE REGEX "^[0-9]+[af]?$")
endif()

if(NOT FLASHPLAN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "FLASHPLAN_CUDA: expected AUTO, ON or OFF, got ${FLASHPLAN_CUDA}")
endif()

set(FLASHPLAN_WITH_CUDA OFF)
set(FLASHPLAN_WHY_NO_CUDA "")
if(FLASHPLAN_CUDA STREQUAL "OFF")
  set(FLASHPLAN_WHY_NO_CUDA "FLASHPLAN_CUDA=OFF")
  message(STATUS "CUDA kernels: off (${FLASHPLAN_WHY_NO_CUDA})")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(EXISTS /dev/nvidia0)
  set(has_gpu ON)
else()
  execute_process(COMMAND nvidia-smi -L RESULT_VARIABLE result OUTPUT_VARIABLE gpus ERROR_QUIET)
  if(result EQUAL 0 AND gpus MATCHES "GPU 0")
    set(has_gpu ON)
  else()
    set(has_gpu OFF)
  endif()
endif()

if(FLASHPLAN_CUDA STREQUAL "ON")
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "FLASHPLAN_CUDA=ON, but no nvcc was found: install the CUDA toolkit, set "
      "CMAKE_CUDA_COMPILER to its nvcc, or configure with FLASHPLAN_CUDA=OFF.")
  endif()
  set(reason "FLASHPLAN_CUDA=ON")
elseif(NOT CMAKE_CUDA_COMPILER)
  set(FLASHPLAN_WHY_NO_CUDA "no nvcc was found")
elseif(CMAKE_CUDA_ARCHITECTURES)
  set(reason "nvcc, and CMAKE_CUDA_ARCHITECTURES is given")
elseif(has_gpu)
  set(reason "nvcc and a GPU")
else()
  set(FLASHPLAN_WHY_NO_CUDA "nvcc was found, but no GPU and no CMAKE_CUDA_ARCHITECTURES")
  if(SKBUILD) # pip shows no warning
    message(FATAL_ERROR "flashplan: ${FLASHPLAN_WHY_NO_CUDA}, so this package would be for CPUs alone. "
      "Say which GPUs it is for: TORCH_CUDA_ARCH_LIST=9.0 or CUDAARCHS=90a in the environment, or "
      "pip install -C cmake.define.CMAKE_CUDA_ARCHITECTURES=90a (\"release\" stands for all). "
      "Or say FLASHPLAN_CUDA=OFF for CPUs.")
  endif()
endif()
if(FLASHPLAN_WHY_NO_CUDA)
  message(STATUS "CUDA kernels: off (${FLASHPLAN_WHY_NO_CUDA})")
  # Repeated as the last lines of the build: nobody asked for a library without CUDA.
  add_custom_target(flashplan_without_cuda ALL
    COMMAND ${CMAKE_COMMAND} -E echo "flashplan is built for the CPU alone: ${FLASHPLAN_WHY_NO_CUDA}."
    COMMAND ${CMAKE_COMMAND} -E echo "For NVIDIA GPUs install nvcc and name their architectures, as -DCMAKE_CUDA_ARCHITECTURES=90a; for none set FLASHPLAN_CUDA=OFF."
    COMMENT "Summary" VERBATIM)
  return()
endif()

if(NOT CMAKE_CUDA_ARCHITECTURES)
  if(has_gpu)
    set(CMAKE_CUDA_ARCHITECTURES native)
  else()
    set(CMAKE_CUDA_ARCHITECTURES release)
  endif()
endif()
set(wants_release OFF)
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "release")
  set(wants_release ON)
  set(CMAKE_CUDA_ARCHITECTURES 80) # a name that CMake knows, while it looks at nvcc
endif()
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)
set(CMAKE_CUDA_RUNTIME_LIBRARY None) # linked by name in src/CMakeLists.txt, once

# Names of sets become what they stand for. Then machine code alone: nothing is to be compiled at run
# time, and select_kernel() refuses a GPU that there is no code for.
if(wants_release)
  set(CMAKE_CUDA_ARCHITECTURES "")
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES_ALL REPLACE "-real$" "" OUTPUT_VARIABLE known)
  foreach(architecture IN LISTS FLASHPLAN_RELEASE_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(number IN_LIST known)
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture})
    endif()
  endforeach()
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "native")
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
  # The instructions that one generation alone has, wgmma for one, need the "a".
  list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^((9|1[0-9])[0-9])(-real)?$" "\\1a")
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "all")
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_ALL})
elseif(CMAKE_CUDA_ARCHITECTURES STREQUAL "all-major")
  set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_ALL_MAJOR})
endif()
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "-(real|virtual)$" "")
list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
list(FILTER CMAKE_CUDA_ARCHITECTURES EXCLUDE REGEX "^[5-7][0-9]$") # of the sets
set(FLASHPLAN_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}")
if(NOT FLASHPLAN_ARCHITECTURES)
  message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected 80 or later")
endif()
list(TRANSFORM CMAKE_CUDA_ARCHITECTURES APPEND "-real")

set(FLASHPLAN_WITH_CUDA ON)
message(STATUS "CUDA kernels: on (${reason}), architectures ${FLASHPLAN_ARCHITECTURES}")

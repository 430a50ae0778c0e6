# SPDX-License-Identifier: Apache-2.0

# What every target of this project is compiled with. Consumers get none of it.
function(flashplan_set_warnings target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wundef;-Werror=switch>"
    # Clang warns of each `omp simd` loop that it cannot vectorise: under a sanitizer that is most of them.
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang,AppleClang>:-Wno-pass-failed>"
    # -Wpedantic and -Wconversion would complain of the code that nvcc makes for the host.
    "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Xcompiler=-Wall,-Wextra,-Werror=switch>")
endfunction()

# SPDX-License-Identifier: Apache-2.0

# What every target of this project is compiled with. Consumers get none of it.
function(flashplan_set_warnings target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wundef>"
    # -Wpedantic and -Wconversion would complain of the code that nvcc makes for the host.
    "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:-Xcompiler=-Wall,-Wextra>")
endfunction()

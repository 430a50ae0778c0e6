// SPDX-License-Identifier: Apache-2.0
// Numbers and arrays of integers that the host reads, from any Python object that holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace flashplan {

namespace nb = nanobind;

/// Integers of a list, tuple, range or host tensor of any integer dtype, copied to `buffer`: Python
/// code can change a list, and the memory of a tensor is valid only while it is imported. `buffer`
/// is reused between calls, so it allocates only for more integers than any call had before.
///
/// With `columns` = 0 the argument has one dimension. With `columns` > 0 it is a tensor of shape
/// [n, columns], or a list or tuple of n lists or tuples of `columns` integers.
///
/// Raises TypeError or ValueError naming the argument. An argument of more than `max_size` entries
/// is refused before it is read; `limit` is the reason given in the message.
struct IntsArg {
  IntsArg(const char* name, nb::handle object, int64_t max_size, const char* limit,
          std::vector<int32_t>& buffer, int32_t columns = 0);
  const int32_t* data = nullptr;
  int32_t size = 0;  // number of integers, or of rows if `columns` > 0
};

/// Raises ValueError unless `indptr` has one entry more than `lens`, the argument kv_lens.
void check_indptr_size(const char* name, const IntsArg& indptr, const IntsArg& lens);

/// A Python number as a float. Raises TypeError or ValueError naming the argument.
float float_arg(const char* name, nb::handle object);

/// A Python or NumPy bool. Raises TypeError naming the argument.
bool bool_arg(const char* name, nb::handle object);

}  // namespace flashplan

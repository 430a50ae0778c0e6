// SPDX-License-Identifier: Apache-2.0
// The positions of elements and logits that the hooks of variants get, on the CPU and on a GPU.
#pragma once

#include <cstdint>

#include "abi/host_device.h"

namespace flashplan {

/// The position of a logit. `query` and `key` are positions among the keys of the request.
struct LogitPosition {
  int32_t request;
  int32_t query;  // of query i: kv_len - qo_len + i; negative if there are more queries than keys
  int32_t key;
  int32_t qo_head;
  int32_t kv_head;
  int32_t qo_len;
  int32_t kv_len;  // the real one if run() gets lengths
};

/// The position of an element of q, k, v or o. `token` is the position of its query or key among
/// the keys of the request.
struct ElementPosition {
  int32_t request;
  int32_t token;
  int32_t head;  // for elements of q and o the query head, for those of k and v the kv head
  int32_t dim;

  /// The position of the element `distance` dims behind this one.
  FLASHPLAN_HOST_DEVICE ElementPosition next(int32_t distance) const {
    return {request, token, head, dim + distance};
  }
};

}  // namespace flashplan

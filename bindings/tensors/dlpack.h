// SPDX-License-Identifier: Apache-2.0
// The structs and codes of DLPack 1.3 that the bindings use, laid out as the specification says
// (github.com/dmlc/dlpack, include/dlpack/dlpack.h). They are declared again because no package
// registry offers this version of the header.
#pragma once

#include <cstdint>

namespace flashplan::dlpack {

enum DeviceCode : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kHandle = 3,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4M3fn = 10,
  kFloat8E5M2 = 12,
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct DeviceId {
  int32_t type;  // a DeviceCode
  int32_t index;
};

struct DataType {
  uint8_t code;  // a TypeCode
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  DeviceId device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {  // in capsules named "dltensor"
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor*);
};

constexpr uint64_t kReadOnlyFlag = 1;

struct ManagedTensorVersioned {  // in capsules named "dltensor_versioned"
  Version version;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

/// The C exchange API: `type.__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api".
struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedTensorVersioned**, void*,
                  void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
  int (*managed_to_object)(ManagedTensorVersioned* tensor, void** out);
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows memory, does not synchronise
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace flashplan::dlpack

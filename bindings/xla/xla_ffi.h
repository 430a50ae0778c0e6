// SPDX-License-Identifier: Apache-2.0
// The structs and codes of XLA's foreign function interface that the bindings use. This binary
// interface is stable and has a version number. They are declared again because XLA's own header
// comes only with jaxlib, a large dependency; a test compares the layouts with that header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashplan::xla {

constexpr int32_t kMajorVersion = 0;
constexpr int32_t kMinorVersion = 3;

struct Error;
struct Context;

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct Version {
  size_t struct_size;
  Extension* extensions;
  int32_t major_version;
  int32_t minor_version;
};

/// XLA calls a handler with this extension to ask which version and which traits it has.
struct Metadata {
  size_t struct_size;
  Version version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

/// A dense row-major array.
struct Buffer {
  size_t struct_size;
  Extension* extensions;
  int32_t dtype;
  void* data;
  int64_t rank;
  const int64_t* dims;
};
constexpr int32_t kBuffer = 1;  // the type of an argument or a result

enum DataType : int32_t {
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU32 = 8,
  kF16 = 10,
  kF32 = 11,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
};

struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t count;
  const int32_t* types;
  void** values;
};

struct Text {
  const char* data;
  size_t size;
};
struct Scalar {
  int32_t dtype;
  const void* value;
};
constexpr int32_t kScalar = 3;  // the type of an attribute

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t count;
  const int32_t* types;
  Text** names;
  void** values;
};

struct CreateError {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  int32_t code;
};
struct GetStream {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // written by XLA
};
struct GetDevice {
  size_t struct_size;
  Extension* extensions;
  Context* context;
  int32_t device;  // written by XLA
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(CreateError*);
  void (*other_calls[3])();
  Error* (*get_stream)(GetStream*);
  void (*more_calls[12])();
  Error* (*get_device)(GetDevice*);
};

struct Call {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int32_t stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

using Handler = Error*(Call*);

}  // namespace flashplan::xla

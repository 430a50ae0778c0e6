// SPDX-License-Identifier: Apache-2.0
// Checks that the structs of bindings/xla/xla_ffi.h have the layouts of those in the header of the
// installed jaxlib, with which tests/test_jax.py compiles this file.
#include <xla/ffi/api/c_api.h>

#include <cstddef>

#include "../../bindings/xla/xla_ffi.h"

#if XLA_FFI_API_MINOR >= 4  // jaxlib 0.11 has another name for it
using XLA_FFI_Extension_Base = XLA_FFI_InternalExtension;
#endif

namespace flashplan::xla {

#define SAME(ours, our_field, theirs, their_field)                            \
  static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) && \
                sizeof(ours::our_field) == sizeof(theirs::their_field))

static_assert(kMajorVersion == XLA_FFI_API_MAJOR && kMinorVersion <= XLA_FFI_API_MINOR);
static_assert(int{kMetadataExtension} == int{XLA_FFI_Extension_Metadata});
static_assert(int{kBuffer} == int{XLA_FFI_ArgType_BUFFER});
static_assert(int{kBuffer} == int{XLA_FFI_RetType_BUFFER});
static_assert(int{kScalar} == int{XLA_FFI_AttrType_SCALAR});
static_assert(int{kS32} == int{XLA_FFI_DataType_S32} && int{kS64} == int{XLA_FFI_DataType_S64});
static_assert(int{kU8} == int{XLA_FFI_DataType_U8});
static_assert(int{kU32} == int{XLA_FFI_DataType_U32} && int{kF32} == int{XLA_FFI_DataType_F32});
static_assert(int{kF16} == int{XLA_FFI_DataType_F16} && int{kBF16} == int{XLA_FFI_DataType_BF16});
static_assert(int{kF8E5M2} == int{XLA_FFI_DataType_F8E5M2});
static_assert(int{kF8E4M3FN} == int{XLA_FFI_DataType_F8E4M3FN});

SAME(Extension, type, XLA_FFI_Extension_Base, type);
SAME(Extension, next, XLA_FFI_Extension_Base, next);
SAME(Version, major_version, XLA_FFI_Api_Version, major_version);
SAME(Version, minor_version, XLA_FFI_Api_Version, minor_version);
SAME(Metadata, version, XLA_FFI_Metadata, api_version);
SAME(Metadata, traits, XLA_FFI_Metadata, traits);
SAME(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
SAME(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(Buffer, data, XLA_FFI_Buffer, data);
SAME(Buffer, rank, XLA_FFI_Buffer, rank);
SAME(Buffer, dims, XLA_FFI_Buffer, dims);
SAME(Buffers, count, XLA_FFI_Args, size);
SAME(Buffers, types, XLA_FFI_Args, types);
SAME(Buffers, values, XLA_FFI_Args, args);
SAME(Buffers, count, XLA_FFI_Rets, size);
SAME(Buffers, types, XLA_FFI_Rets, types);
SAME(Buffers, values, XLA_FFI_Rets, rets);
SAME(Text, data, XLA_FFI_ByteSpan, ptr);
SAME(Text, size, XLA_FFI_ByteSpan, len);
SAME(Scalar, dtype, XLA_FFI_Scalar, dtype);
SAME(Scalar, value, XLA_FFI_Scalar, value);
SAME(Attributes, count, XLA_FFI_Attrs, size);
SAME(Attributes, types, XLA_FFI_Attrs, types);
SAME(Attributes, names, XLA_FFI_Attrs, names);
SAME(Attributes, values, XLA_FFI_Attrs, attrs);
SAME(CreateError, message, XLA_FFI_Error_Create_Args, message);
SAME(CreateError, code, XLA_FFI_Error_Create_Args, errc);
SAME(GetStream, context, XLA_FFI_Stream_Get_Args, ctx);
SAME(GetStream, stream, XLA_FFI_Stream_Get_Args, stream);
SAME(GetDevice, context, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(GetDevice, device, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
SAME(Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(Api, get_stream, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(Api, get_device, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);
SAME(Call, extensions, XLA_FFI_CallFrame, extension_start);
SAME(Call, api, XLA_FFI_CallFrame, api);
SAME(Call, context, XLA_FFI_CallFrame, ctx);
SAME(Call, arguments, XLA_FFI_CallFrame, args);
SAME(Call, results, XLA_FFI_CallFrame, rets);
SAME(Call, attributes, XLA_FFI_CallFrame, attrs);

}  // namespace flashplan::xla

// SPDX-License-Identifier: Apache-2.0
// Variant::create(), which checks the names and dtypes of a description.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <string_view>

#include "abi/params.h"
#include "common/error.h"
#include "common/run_tensors.h"
#include "variant/source.h"
#include "variant/variant_impl.h"

namespace flashplan {
namespace {

constexpr std::size_t kLongestName = 64;

constexpr std::string_view kInputs[] = {"x",   "request", "token",   "head",   "dim",   "query",
                                        "key", "qo_head", "kv_head", "qo_len", "kv_len"};
constexpr std::string_view kFunctions[] = {"exp",   "exp2", "log", "log2", "tanh",    "sqrt",
                                           "rsqrt", "pow",  "sin", "cos",  "erf",     "floor",
                                           "ceil",  "abs",  "min", "max",  "infinity"};
// The arguments of run() in Python that are not in kRunTensors. A variant's tensors and scalars are
// keyword arguments of run(), too, so they must not have these names.
constexpr std::string_view kRunArguments[] = {"self", "attn", "return_lse", "stream", "pdl"};
constexpr std::string_view kKeywords[] = {"alignas",       "alignof",     "and",
                                          "and_eq",        "asm",         "auto",
                                          "bitand",        "bitor",       "bool",
                                          "break",         "case",        "catch",
                                          "char",          "char16_t",    "char32_t",
                                          "char8_t",       "class",       "co_await",
                                          "co_return",     "co_yield",    "compl",
                                          "concept",       "const",       "const_cast",
                                          "consteval",     "constexpr",   "constinit",
                                          "continue",      "decltype",    "default",
                                          "delete",        "do",          "double",
                                          "dynamic_cast",  "else",        "enum",
                                          "explicit",      "export",      "extern",
                                          "false",         "float",       "for",
                                          "friend",        "goto",        "if",
                                          "inline",        "int",         "long",
                                          "mutable",       "namespace",   "new",
                                          "noexcept",      "not",         "not_eq",
                                          "nullptr",       "operator",    "or",
                                          "or_eq",         "private",     "protected",
                                          "public",        "register",    "reinterpret_cast",
                                          "requires",      "return",      "short",
                                          "signed",        "sizeof",      "static",
                                          "static_assert", "static_cast", "struct",
                                          "switch",        "template",    "this",
                                          "thread_local",  "throw",       "true",
                                          "try",           "typedef",     "typeid",
                                          "typename",      "union",       "unsigned",
                                          "using",         "virtual",     "void",
                                          "volatile",      "wchar_t",     "while",
                                          "xor",           "xor_eq",      "defined"};

template <std::size_t kCount>
bool contains(const std::string_view (&names)[kCount], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

/// Checks that `name` is an identifier that C++ does not reserve.
Status check_name(const char* argument, const char* name) {
  const std::string_view text = name != nullptr ? name : "";
  const auto is_word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  };
  const bool is_identifier = !text.empty() && text.size() <= kLongestName &&
                             std::all_of(text.begin(), text.end(), is_word) &&
                             !(text[0] >= '0' && text[0] <= '9') && text[0] != '_' &&
                             text.find("__") == std::string_view::npos;
  if (!is_identifier) {
    return error(StatusCode::kInvalidArgument,
                 "%s: expected an identifier of up to %zu letters, digits and single _, which does "
                 "not begin with a digit or _, got \"%.80s\"",
                 argument, kLongestName, text.data() != nullptr ? text.data() : "");
  }
  if (contains(kKeywords, text)) {
    return error(StatusCode::kInvalidArgument, "%s: expected no word of C++, got \"%s\"", argument,
                 name);
  }
  return {};
}

/// Checks the name of a tensor or a scalar.
Status check_argument_name(const Variant::Impl& variant, const char* argument, const char* name) {
  FLASHPLAN_RETURN_IF_ERROR(check_name(argument, name));
  const std::string_view text = name;
  const bool is_ours = text.starts_with("flashplan") || text.starts_with("FLASHPLAN");
  const bool is_of_run = contains(kRunArguments, name) || find_run_tensor(name) != nullptr;
  const char* use = is_ours                      ? "the library's own code"
                    : contains(kInputs, name)    ? "what bodies are called with"
                    : contains(kFunctions, name) ? "a function that bodies have"
                    : is_of_run                  ? "another argument of run()"
                                                 : nullptr;
  for (const Variant::Impl::Tensor& tensor : variant.tensors) {
    if (tensor.name == name) use = "an earlier tensor";
  }
  for (const Variant::Impl::Scalar& scalar : variant.scalars) {
    if (scalar.name == name) use = "an earlier scalar";
  }
  if (use == nullptr) return {};
  return error(StatusCode::kInvalidArgument,
               "%s: expected a name of its own, got that of %s: \"%s\"", argument, use, name);
}

Status check_count(const char* argument, int32_t count, const void* entries, int32_t most) {
  if (count >= 0 && count <= most && (count == 0 || entries != nullptr)) return {};
  return error(StatusCode::kInvalidArgument, "%s: expected 0 to %d entries, got %d%s", argument,
               most, count, count > 0 && entries == nullptr ? " at null" : "");
}

Status copy_tensors(const VariantDescription& d, Variant::Impl* variant) {
  FLASHPLAN_RETURN_IF_ERROR(check_count("tensors", d.num_tensors, d.tensors, kMaxVariantTensors));
  for (int32_t i = 0; i < d.num_tensors; ++i) {
    const VariantTensor& tensor = d.tensors[i];
    FLASHPLAN_RETURN_IF_ERROR(check_argument_name(*variant, "tensors", tensor.name));
    if (element_type(tensor.dtype) == nullptr) {
      return error(StatusCode::kInvalidType,
                   "tensors: expected float32, int32, int64 or uint32 for \"%s\", got %s",
                   tensor.name, to_string(tensor.dtype));
    }
    variant->tensors.push_back({tensor.name, tensor.dtype});
  }
  return {};
}

Status copy_scalars(const VariantDescription& d, Variant::Impl* variant) {
  FLASHPLAN_RETURN_IF_ERROR(check_count("scalars", d.num_scalars, d.scalars, kMaxVariantScalars));
  for (int32_t i = 0; i < d.num_scalars; ++i) {
    FLASHPLAN_RETURN_IF_ERROR(check_argument_name(*variant, "scalars", d.scalars[i].name));
    variant->scalars.push_back({d.scalars[i].name, d.scalars[i].value});
  }
  return {};
}

/// Copies a body, and refuses one with preprocessor directives: macros can keep a compiler busy for
/// ever, and NVRTC before 12.9 can not be stopped.
Status copy_body(const char* name, const char* body, std::optional<std::string>* to) {
  if (body == nullptr) return {};
  const std::string_view text = body;
  for (const std::string_view directive : {"#", "%:"}) {
    if (text.find(directive) == std::string_view::npos) continue;
    return error(StatusCode::kInvalidArgument,
                 "%s: expected a body without preprocessor directives, got \"%s\" in it", name,
                 directive.data());
  }
  *to = body;
  return {};
}

Status copy_bodies(const VariantDescription& d, Variant::Impl* variant) {
  FLASHPLAN_RETURN_IF_ERROR(copy_body("query", d.query, &variant->query));
  FLASHPLAN_RETURN_IF_ERROR(copy_body("key", d.key, &variant->key));
  FLASHPLAN_RETURN_IF_ERROR(copy_body("value", d.value, &variant->value));
  FLASHPLAN_RETURN_IF_ERROR(copy_body("output", d.output, &variant->output));
  FLASHPLAN_RETURN_IF_ERROR(copy_body("logits", d.logits, &variant->logits));
  FLASHPLAN_RETURN_IF_ERROR(copy_body("mask", d.mask, &variant->mask));
  const Variant::Impl& v = *variant;
  if (v.query || v.key || v.value || v.output || v.logits || v.mask || !v.softmax) return {};
  return error(
      StatusCode::kInvalidArgument,
      "query, key, value, output, logits, mask: expected at least one body, or no softmax, "
      "got none");
}

}  // namespace

Variant::Variant() noexcept = default;
Variant::~Variant() = default;
Variant::Variant(const Variant&) noexcept = default;
Variant& Variant::operator=(const Variant&) noexcept = default;

Status Variant::create(const VariantDescription& description, Variant* variant) noexcept try {
  if (variant == nullptr) {
    return error(StatusCode::kInvalidArgument, "variant: expected a pointer, got null");
  }
  auto impl = std::make_shared<Impl>();
  FLASHPLAN_RETURN_IF_ERROR(check_name("name", description.name));
  impl->name = description.name;
  impl->softmax = description.softmax;
  FLASHPLAN_RETURN_IF_ERROR(copy_bodies(description, impl.get()));
  FLASHPLAN_RETURN_IF_ERROR(copy_tensors(description, impl.get()));
  FLASHPLAN_RETURN_IF_ERROR(copy_scalars(description, impl.get()));
  variant->impl_ = std::move(impl);
  return {};
} catch (const std::bad_alloc&) {
  return error(StatusCode::kOutOfMemory, "variant: expected memory for its source, got none");
}

const char* Variant::name() const noexcept { return impl_ ? impl_->name.c_str() : ""; }

std::string Variant::compile_log() const noexcept try {
  if (!impl_) return {};
  const std::scoped_lock lock(impl_->log_mutex);
  return impl_->log;
} catch (...) {
  return {};
}

}  // namespace flashplan

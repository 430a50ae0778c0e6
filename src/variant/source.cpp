// SPDX-License-Identifier: Apache-2.0
#include "variant/source.h"

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numbers>

namespace flashplan {
namespace {

constexpr const char* kOfElements = "float x, int request, int token, int head, int dim";
constexpr const char* kOfKeys =
    "int request, int query, int key, int qo_head, int kv_head, int qo_len, int kv_len";

/// Appends a function whose body is the user's text. `#line` makes the compiler report errors at
/// the lines of that text.
void append_body(std::string& text, const Variant::Impl& variant, const char* name,
                 const std::string& result, const std::string& parameters,
                 const std::string& body) {
  text += "  FLASHPLAN_DEVICE " + result + " flashplan_" + name + "(" + parameters + ") const {\n";
  text += "#line 1 \"" + variant.name + "." + name + "\"\n";
  text += body + "\n}\n\n#line 1 \"flashplan\"\n";
}

/// Appends a struct whose functions are the bodies that the user wrote, and whose members are the
/// tensors and scalars that these bodies use. The struct has no other names, so that no name of the
/// library can clash with the user's names.
void append_bodies(std::string& text, const Variant::Impl& v) {
  // The user's name may be that of a macro in a system header, such as NULL, so the macro is
  // removed.
  for (const Variant::Impl::Tensor& tensor : v.tensors) text += "#undef " + tensor.name + "\n";
  for (const Variant::Impl::Scalar& scalar : v.scalars) text += "#undef " + scalar.name + "\n";
  text += "struct UserBodies {\n";
  for (const Variant::Impl::Tensor& tensor : v.tensors) {
    text.append("  const ").append(element_type(tensor.dtype)).append("* ");
    text += tensor.name + ";\n";
  }
  for (const Variant::Impl::Scalar& scalar : v.scalars) text += "  float " + scalar.name + ";\n";
  const std::string of_logits = std::string("float x, ") + kOfKeys;
  if (v.query) append_body(text, v, "query", "float", kOfElements, *v.query);
  if (v.key) append_body(text, v, "key", "float", kOfElements, *v.key);
  if (v.value) append_body(text, v, "value", "float", kOfElements, *v.value);
  if (v.output) append_body(text, v, "output", "float", kOfElements, *v.output);
  if (v.logits) append_body(text, v, "logits", "float", of_logits, *v.logits);
  if (v.mask) append_body(text, v, "mask", "bool", kOfKeys, *v.mask);
  text += "};\n";
}

void append_element_hook(std::string& text, const char* flag, const std::string& name) {
  text += std::string("  static constexpr bool ") + flag + " = true;\n";
  text += "  FLASHPLAN_DEVICE float " + name + "(float x, const ElementPosition& at) const {\n";
  text += "    return bodies.flashplan_" + name + "(x, at.request, at.token, at.head, at.dim);\n";
  text += "  }\n";
}

/// The shortest text of a float, written alike in every locale.
std::string number(float x) {
  char text[32] = {};
  return {std::begin(text), std::to_chars(std::begin(text), std::end(text), x).ptr};
}

/// Appends the members of a variant that rotates; append_rope_turns() appends the tables that they
/// read.
void append_rope(std::string& text, const RopeTurns& rope) {
  text += "  static constexpr bool kRotates = true;\n";
  text += "  static constexpr int kRotaryDim = " + std::to_string(rope.rotary_dim) + ";\n";
  text += "  static constexpr bool kInterleaved = ";
  text += rope.interleaved ? "true;\n" : "false;\n";
  text += "  static constexpr float kGain = " + number(rope.gain) + ";\n";
  text += "  static FLASHPLAN_DEVICE unsigned long long turns(int pair) {\n";
  text += "    return flashplan_turns[pair];\n  }\n";
  text += "  static FLASHPLAN_DEVICE float2 step(int pair) {\n";
  text += "    return flashplan_steps[pair];\n  }\n";
}

/// Appends the tables of a rotation, with an entry for each pair of dims: the angle from a position
/// to the next one, in 2^-64 of a turn, and {cos, sin} of the angle over 8 positions.
void append_rope_turns(std::string& text, const RopeTurns& rope) {
  text += "__device__ const unsigned long long flashplan_turns[] = {";
  for (int32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    text += std::to_string(rope.part_of_turn(i)) + "U, ";
  }
  text += "};\n__device__ const float2 flashplan_steps[] = {";
  for (int32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    const double turns = 8 * rope.turns[i];
    const double angle = 2 * std::numbers::pi * (turns - std::floor(turns));
    text += '{';
    text += number(static_cast<float>(std::cos(angle))) + ", ";
    text += number(static_cast<float>(std::sin(angle))) + "}, ";
  }
  text += "};\n";
}

constexpr const char* kAtLogit =
    "at.request, at.query, at.key, at.qo_head, at.kv_head, at.qo_len, at.kv_len);\n";

}  // namespace

std::string variant_source(const Variant::Impl& v, bool softcap, const RopeTurns* rope) {
  // Without a softmax the weights are the scaled logits, so OwnLogits computes logits even if there
  // is no body for them.
  const bool own_logits = v.logits || !v.softmax;
  const char* base = own_logits ? "OwnLogits" : softcap ? "Softcap" : "Standard";
  std::string text;
  if (rope != nullptr) append_rope_turns(text, *rope);
  append_bodies(text, v);
  text += std::string("struct UserVariant : ") + base + " {\n";
  if (!v.softmax) text += "  static constexpr bool kUseSoftmax = false;\n";
  text += "  UserBodies bodies;\n";
  text += "  FLASHPLAN_DEVICE explicit UserVariant(const AttentionParams& p)\n";
  text += std::string("      : ") + base + "(p), bodies{";
  for (std::size_t i = 0; i < v.tensors.size(); ++i) {
    text += std::string("static_cast<const ") + element_type(v.tensors[i].dtype) +
            "*>(p.arguments.tensors[" + std::to_string(i) + "]), ";
  }
  for (std::size_t i = 0; i < v.scalars.size(); ++i) {
    text += "p.arguments.scalars[" + std::to_string(i) + "], ";
  }
  text += "} {}\n";
  if (rope != nullptr) append_rope(text, *rope);
  if (v.query) append_element_hook(text, "kTransformsQuery", "query");
  if (v.key) append_element_hook(text, "kTransformsKey", "key");
  if (v.value) append_element_hook(text, "kTransformsValue", "value");
  if (v.output) append_element_hook(text, "kTransformsOutput", "output");
  text += "  static constexpr bool kIsBuiltIn = false;\n";
  if (v.logits || v.mask) text += "  static constexpr bool kReadsPositions = true;\n";
  if (own_logits) {
    text += "  static constexpr bool kTransformsLogits = true;\n";
    text += "  FLASHPLAN_DEVICE float logit(float product, const LogitPosition& at) const {\n";
    text += v.logits
                ? std::string("    return bodies.flashplan_logits(scaled(product), ") + kAtLogit
                : std::string("    return scaled(product);\n");
    text += "  }\n";
  }
  if (v.mask) {
    text += "  static constexpr bool kMasksLogits = true;\n";
    text += "  FLASHPLAN_DEVICE bool visible(const LogitPosition& at) const {\n";
    text += std::string("    return bodies.flashplan_mask(") + kAtLogit;
    text += "  }\n";
  }
  return text + "};\n";
}

const char* dtype_constant(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "DType::kFloat32";
    case DType::kFloat16: return "DType::kFloat16";
    case DType::kBFloat16: return "DType::kBFloat16";
    case DType::kFloat8E4M3: return "DType::kFloat8E4M3";
    case DType::kFloat8E5M2: return "DType::kFloat8E5M2";
    case DType::kInt32: return "DType::kInt32";
    case DType::kInt64: return "DType::kInt64";
    case DType::kUInt32: return "DType::kUInt32";
    case DType::kFp8DsMla: return "DType::kFp8DsMla";
  }
  return "DType::unknown";  // which does not compile
}

// Types are named by keywords, because a user's tensor may be called int32_t.
const char* element_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "float";
    case DType::kInt32: return "int";
    case DType::kInt64: return "long long";
    case DType::kUInt32: return "unsigned";
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFp8DsMla: break;
  }
  return nullptr;
}

}  // namespace flashplan

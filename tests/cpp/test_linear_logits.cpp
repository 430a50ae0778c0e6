// SPDX-License-Identifier: Apache-2.0
// Which bodies of logits are recognised as x plus a linear function of the key.
#include "abi/linear_logits.h"

#include <cmath>
#include <string>

#include "check.h"
#include "variant/source.h"

#define FLASHPLAN_DEVICE [[gnu::always_inline, maybe_unused]] inline

namespace flashplan::test {
namespace {

// flashplan compiles users' bodies without these warnings.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wunused-parameter"

namespace bodies {
#include "abi/variant_math.h"

/// The body `return expression;` as source.cpp writes it.
#define BODY(name, expression)                                                                 \
  struct name {                                                                                \
    float slope = 0.3F;                                                                        \
    template <typename X, typename Key>                                                        \
    auto logits_of(X x, int request, int query, Key key, int qo_head, int kv_head, int qo_len, \
                   int kv_len) const -> decltype(expression) {                                 \
      return expression;                                                                       \
    }                                                                                          \
  }
BODY(Alibi, x + slope * (key - query));
BODY(FromBehind, x - slope * (query - key));
BODY(Mirrored, 2 * (-key + kv_len) / 3.0 * slope + x + 1 - request);
BODY(Twice, (x + slope * key) - (key - query) * 0.25F + min(qo_len, 3));
BODY(WithoutKey, x + (qo_head > 1 ? slope : 0));

BODY(Distance, x - slope * abs(query - key));
BODY(Capped, x + slope * max(key - query, -64));
BODY(Halves, x + key / 2 * slope);
BODY(Square, x + slope * (key * key));
BODY(Compared, x + (key > query ? slope : 0));
BODY(Exponential, x + bodies::pow(slope, key));
BODY(Scaled, x * 2 + key);
BODY(OfXAlone, max(x, -8) + key);
BODY(WithoutX, slope*(key - query));
BODY(Unsigned, x + (key - 3U) * slope);
}  // namespace bodies

#pragma GCC diagnostic pop

struct Base {
  explicit Base(int /*params*/) {}
};
template <typename Bodies>
struct User : Base {
  using Base::Base;
  Bodies bodies;
};

template <typename Bodies>
void check_values() {
  static_assert(HasLinearLogits<Bodies>);
  const Biased<User<Bodies>, Bodies> variant(0);
  LogitPosition at = {
      .request = 2, .query = 70, .key = 50, .qo_head = 3, .kv_head = 1, .qo_len = 9, .kv_len = 90};
  const OfKey<float> bias = variant.bias(at);
  for (int key = 0; key < 90; ++key) {
    const auto expected = static_cast<float>(Bodies{}.logits_of(
        0.0F, at.request, at.query, key, at.qo_head, at.kv_head, at.qo_len, at.kv_len));
    const float actual = bias.rest + bias.slope * static_cast<float>(key - at.key);
    CHECK(std::fabs(actual - expected) < 1e-5F * (1.0F + std::fabs(expected)));
  }
}

TEST(linear_bodies_have_their_coefficients) {
  check_values<bodies::Alibi>();
  check_values<bodies::FromBehind>();
  check_values<bodies::Mirrored>();
  check_values<bodies::Twice>();
  check_values<bodies::WithoutKey>();
}

TEST(other_bodies_are_not_taken_for_linear) {
  static_assert(!HasLinearLogits<bodies::Distance>);
  static_assert(!HasLinearLogits<bodies::Capped>);
  static_assert(!HasLinearLogits<bodies::Halves>);
  static_assert(!HasLinearLogits<bodies::Square>);
  static_assert(!HasLinearLogits<bodies::Compared>);
  static_assert(!HasLinearLogits<bodies::Exponential>);
  static_assert(!HasLinearLogits<bodies::Scaled>);
  static_assert(!HasLinearLogits<bodies::OfXAlone>);
  static_assert(!HasLinearLogits<bodies::WithoutX>);
  static_assert(!HasLinearLogits<bodies::Unsigned>);
}

bool may_be_linear(const std::string& logits) {
  Variant::Impl variant;
  variant.name = "v";
  variant.logits = logits;
  return !linear_logits_source(variant).empty();
}

TEST(only_a_single_return_statement_may_be_linear) {
  CHECK(may_be_linear("return x + key;"));
  CHECK(may_be_linear("\n  return(x + key) ;\n"));
  for (const char* other :
       {"", "return", "return;", "x + key;", "returned + x;", "return x + key",
        "float y = x; return y;", "return [&] { return x; }();", "return x + key; // linear",
        "return x + /* a bias */ key;", "return x + '\\n';", "#define Y x\nreturn Y;"}) {
    CHECK(!may_be_linear(other));
  }
  Variant::Impl variant;
  variant.name = "v";
  variant.logits = "return x + key;";
  variant.mask = "return key < query;";
  CHECK(linear_logits_source(variant).empty());
  variant.mask.reset();
  variant.softmax = false;
  CHECK(linear_logits_source(variant).empty());
}

}  // namespace
}  // namespace flashplan::test

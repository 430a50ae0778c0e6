// SPDX-License-Identifier: Apache-2.0
#include "dense_model.h"

#include <cmath>
#include <cstddef>

namespace engine {

namespace {

using Row = std::vector<double>;

const float* values_of(const DeviceWeights& weights) {
  return static_cast<const float*>(weights.get());
}

/// The product with one part of a matrix.
Row product(const Row& x, const Matrix& matrix, std::size_t part = 0) {
  Row y(static_cast<std::size_t>(matrix.parts[part].rows));
  const float* row = values_of(matrix.parts[part].values);
  for (double& sum : y) {
    for (const double value : x) sum += value * double{*row++};
  }
  return y;
}

/// Normalises x[begin, begin + size).
void normalize(Row* x, std::size_t begin, std::size_t size, const DeviceWeights& weight,
               float eps) {
  double sum = 0;
  for (std::size_t i = begin; i < begin + size; ++i) sum += (*x)[i] * (*x)[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(size) + double{eps});
  for (std::size_t i = 0; i < size; ++i) (*x)[begin + i] *= scale * double{values_of(weight)[i]};
}

Row normalized(Row x, const DeviceWeights& weight, float eps) {
  normalize(&x, 0, x.size(), weight, eps);
  return x;
}

double frequency(const flashplan::Rope& rope, int32_t pair, int32_t head_dim) {
  const double plain = std::pow(rope.theta, -2.0 * pair / head_dim);
  if (rope.scaling != flashplan::RopeScaling::kLlama3) return plain / rope.scale;
  const double turns = rope.original_length * plain / (2 * std::acos(-1.0));
  if (turns < rope.low_freq_factor) return plain / rope.scale;
  if (turns > rope.high_freq_factor) return plain;
  const double part =
      (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - part) * plain / rope.scale + part * plain;
}

/// Normalises each head, if the model has weights for this, and rotates it.
void finish_heads(Row* x, const ModelConfig& c, const DeviceWeights& weight, std::size_t position) {
  const auto dim = static_cast<std::size_t>(c.head_dim);
  for (std::size_t begin = 0; begin < x->size(); begin += dim) {
    if (weight != nullptr) normalize(x, begin, dim, weight, c.norm_eps);
    for (std::size_t i = 0; i < dim / 2; ++i) {
      const double angle =
          static_cast<double>(position) * frequency(c.rope, static_cast<int32_t>(i), c.head_dim);
      double& a = (*x)[begin + i];
      double& b = (*x)[begin + i + dim / 2];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = turned;
    }
  }
}

/// Attention of the last token, whose query is q, to all tokens.
Row attend(const Row& q, const std::vector<Row>& k, const std::vector<Row>& v,
           const ModelConfig& c) {
  const auto dim = static_cast<std::size_t>(c.head_dim);
  const auto group = static_cast<std::size_t>(c.num_qo_heads / c.num_kv_heads);
  Row out(q.size());
  for (std::size_t head = 0; head * dim < q.size(); ++head) {
    const std::size_t kv = head / group * dim;
    double sum = 0;
    for (std::size_t j = 0; j < k.size(); ++j) {
      double logit = 0;
      for (std::size_t d = 0; d < dim; ++d) logit += q[head * dim + d] * k[j][kv + d];
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(dim)));
      sum += weight;
      for (std::size_t d = 0; d < dim; ++d) out[head * dim + d] += weight * v[j][kv + d];
    }
    for (std::size_t d = 0; d < dim; ++d) out[head * dim + d] /= sum;
  }
  return out;
}

void add(Row* x, const Row& y) {
  for (std::size_t i = 0; i < x->size(); ++i) (*x)[i] += y[i];
}

}  // namespace

std::vector<Row> DenseModel::logits(const std::vector<int32_t>& tokens) const {
  const ModelConfig& c = model_.config;
  std::vector<std::vector<Row>> k(model_.layers.size()), v(model_.layers.size());
  std::vector<Row> result;
  for (std::size_t position = 0; position < tokens.size(); ++position) {
    const float* embedding = values_of(model_.embedding.parts[0].values) +
                             static_cast<std::ptrdiff_t>(tokens[position]) * c.hidden;
    Row hidden(embedding, embedding + c.hidden);
    for (std::size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer& layer = model_.layers[i];
      Row x = normalized(hidden, layer.attention_norm, c.norm_eps);
      Row q = product(x, layer.qkv, 0);
      k[i].push_back(product(x, layer.qkv, 1));
      v[i].push_back(product(x, layer.qkv, 2));
      finish_heads(&q, c, layer.q_norm, position);
      finish_heads(&k[i].back(), c, layer.k_norm, position);
      add(&hidden, product(attend(q, k[i], v[i], c), layer.o));
      x = normalized(hidden, layer.ffn_norm, c.norm_eps);
      Row gate = product(x, layer.gate_up, 0);
      const Row up = product(x, layer.gate_up, 1);
      for (std::size_t j = 0; j < gate.size(); ++j) gate[j] *= up[j] / (1 + std::exp(-gate[j]));
      add(&hidden, product(gate, layer.down));
    }
    result.push_back(product(normalized(hidden, model_.norm, c.norm_eps), model_.output));
  }
  return result;
}

}  // namespace engine

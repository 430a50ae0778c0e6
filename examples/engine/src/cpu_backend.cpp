// SPDX-License-Identifier: Apache-2.0
#include "cpu_backend.h"

#include <algorithm>
#include <utility>

namespace engine {

namespace fp = flashplan;

namespace {

fp::TensorView matrix(const std::vector<float>& values, int64_t rows, int64_t columns) {
  return fp::contiguous(const_cast<float*>(values.data()), fp::DType::kFloat32, fp::Device{},
                        {rows, columns});
}

fp::TensorView vector(const Weights& weights, int64_t size) {
  return fp::contiguous(weights.get(), fp::DType::kFloat32, fp::Device{}, {size});
}

fp::TensorView indices(const std::vector<int32_t>& values) {
  return fp::contiguous(values.data(), fp::DType::kInt32, fp::Device{},
                        {static_cast<int64_t>(values.size())});
}

std::size_t size_of(int64_t rows, int64_t columns) {
  return static_cast<std::size_t>(rows * columns);
}

}  // namespace

CpuBackend::CpuBackend(Model model, const Options& options)
    : model_(std::move(model)),
      options_(options),
      multiply_(options.batch_invariant || options.products == Products::kRowByRow
                    ? multiply_row_by_row
                    : multiply_fastest) {
  const ModelConfig& c = model_.config;
  fp::AttentionOptions attention;
  attention.num_qo_heads = c.num_qo_heads;
  attention.num_kv_heads = c.num_kv_heads;
  attention.head_dim_qk = attention.head_dim_vo = c.head_dim;
  attention.page_size = options.page_size;
  attention.q_dtype = attention.kv_dtype = attention.o_dtype = fp::DType::kFloat32;
  attention.max_batch_size = options.max_batch_size;
  attention.max_qo_tokens = options.max_step_tokens;
  attention.batch_invariant = options.batch_invariant;
  check(fp::Plan::create(attention, &plan_));
  workspace_.resize(plan_.workspace_bytes() / sizeof(WorkspaceBlock) + 1);

  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const std::size_t cache_size =
      size_of(int64_t{c.num_layers} * options.num_pages, options.page_size * kv_size);
  k_cache_.resize(cache_size);
  v_cache_.resize(cache_size);
  const int64_t tokens = options.max_step_tokens, draws = options.max_batch_size;
  hidden_.resize(size_of(tokens, c.hidden));
  x_.resize(size_of(tokens, c.hidden));
  qkv_.resize(size_of(tokens, q_size + 2 * kv_size));
  out_.resize(size_of(tokens, q_size));
  gate_up_.resize(size_of(tokens, 2 * int64_t{c.ffn}));
  ffn_.resize(size_of(tokens, c.ffn));
  last_.resize(size_of(draws, c.hidden));
  logits_.resize(size_of(draws, c.vocab));
  shared_prefixes_.resize(size_of(draws, 3));
}

void CpuBackend::run(const Step& step, Drawn* drawn) {
  plan(step);
  forward(step);
  const auto num_draws = static_cast<int64_t>(step.draws.size());
  if (num_draws == 0) return;
  const ModelConfig& c = model_.config;
  for (int64_t i = 0; i < num_draws; ++i) {
    const int64_t row = step.last_rows[static_cast<std::size_t>(i)];
    std::copy_n(x_.data() + row * c.hidden, c.hidden, last_.data() + i * c.hidden);
  }
  multiply_(last_.data(), num_draws, c.hidden, model_.output.get(), c.vocab, logits_.data(),
            c.vocab);
  draw(step.draws, logits_.data(), c.vocab, drawn);
}

// --8<-- [start:plan]
void CpuBackend::plan(const Step& step) {
  fp::Batch batch;
  batch.qo_indptr = step.qo_indptr.data();
  batch.kv_lens = step.kv_lens.data();
  batch.batch_size = step.batch_size();
  if (!options_.batch_invariant) {  // such plans read no prefix together
    fp::HostPageTable table;
    table.page_indptr = indices(step.page_indptr);
    table.page_indices = indices(step.page_indices);
    check(fp::find_shared_prefixes(batch, options_.page_size, table, shared_prefixes_.data(),
                                   &batch.num_shared_prefixes));
    batch.shared_prefixes = shared_prefixes_.data();
  }
  check(plan_.plan(batch));
}
// --8<-- [end:plan]

void CpuBackend::forward(const Step& step) {
  const ModelConfig& c = model_.config;
  const int64_t tokens = step.num_tokens();
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t token = step.tokens[static_cast<std::size_t>(i)];
    std::copy_n(model_.embedding.get() + token * c.hidden, c.hidden, hidden_.data() + i * c.hidden);
  }
  const fp::TensorView hidden = matrix(hidden_, tokens, c.hidden);
  const fp::TensorView x = matrix(x_, tokens, c.hidden);
  fp::RmsNormOptions norm;
  norm.eps = c.norm_eps;
  check(fp::rmsnorm(hidden, vector(model_.layers[0].attention_norm, c.hidden), x, norm));
  for (int32_t i = 0; i < c.num_layers; ++i) {
    const Layer& layer = model_.layers[static_cast<std::size_t>(i)];
    attend(step, i);
    multiply_(out_.data(), tokens, int64_t{c.num_qo_heads} * c.head_dim, layer.o.get(), c.hidden,
              x_.data(), c.hidden);
    // hidden += x, and x becomes the norm of that.
    check(fp::add_rmsnorm(x, hidden, vector(layer.ffn_norm, c.hidden), norm));
    feed_forward(layer, tokens);
    const bool is_last = i + 1 == c.num_layers;
    const Weights& next =
        is_last ? model_.norm : model_.layers[static_cast<std::size_t>(i) + 1].attention_norm;
    check(fp::add_rmsnorm(x, hidden, vector(next, c.hidden), norm));
  }
}

void CpuBackend::attend(const Step& step, int32_t layer_index) {
  const ModelConfig& c = model_.config;
  const Layer& layer = model_.layers[static_cast<std::size_t>(layer_index)];
  const int64_t tokens = step.num_tokens();
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  const int64_t stride = q_size + 2 * kv_size;
  float* const q_begin = qkv_.data();
  float* const k_begin = q_begin + q_size;
  float* const v_begin = k_begin + kv_size;
  multiply_(x_.data(), tokens, c.hidden, layer.q.get(), q_size, q_begin, stride);
  multiply_(x_.data(), tokens, c.hidden, layer.k.get(), kv_size, k_begin, stride);
  multiply_(x_.data(), tokens, c.hidden, layer.v.get(), kv_size, v_begin, stride);

  const auto heads = [&](float* begin, int32_t num_heads) {
    fp::TensorView view =
        fp::contiguous(begin, fp::DType::kFloat32, fp::Device{}, {tokens, num_heads, c.head_dim});
    view.stride[0] = stride;
    return view;
  };
  const fp::TensorView q = heads(q_begin, c.num_qo_heads);
  const fp::TensorView k = heads(k_begin, c.num_kv_heads);
  if (c.has_head_norms) {
    fp::RmsNormOptions norm;
    norm.eps = c.norm_eps;
    check(fp::rmsnorm(q, vector(layer.q_norm, c.head_dim), q, norm));
    check(fp::rmsnorm(k, vector(layer.k_norm, c.head_dim), k, norm));
  }
  fp::AppendTensors append;
  append.k = k;
  append.v = heads(v_begin, c.num_kv_heads);
  append.k_cache = cache_of(k_cache_, layer_index);
  append.v_cache = cache_of(v_cache_, layer_index);
  append.indptr = indices(step.qo_indptr);
  append.kv_lens = indices(step.kv_lens);
  append.page_indptr = indices(step.page_indptr);
  append.page_indices = indices(step.page_indices);
  check(fp::rope_append_paged_kv(q, append, c.rope, q));

  fp::AttentionTensors tensors;
  tensors.q = q;
  tensors.k = append.k_cache;
  tensors.v = append.v_cache;
  tensors.page_indptr = append.page_indptr;
  tensors.page_indices = append.page_indices;
  tensors.o = fp::contiguous(out_.data(), fp::DType::kFloat32, fp::Device{},
                             {tokens, c.num_qo_heads, c.head_dim});
  tensors.workspace = workspace_.data();
  tensors.workspace_bytes = workspace_.size() * sizeof(WorkspaceBlock);
  check(plan_.run(tensors));
}

void CpuBackend::feed_forward(const Layer& layer, int64_t num_tokens) {
  const ModelConfig& c = model_.config;
  const int64_t stride = 2 * int64_t{c.ffn};
  multiply_(x_.data(), num_tokens, c.hidden, layer.gate.get(), c.ffn, gate_up_.data(), stride);
  multiply_(x_.data(), num_tokens, c.hidden, layer.up.get(), c.ffn, gate_up_.data() + c.ffn,
            stride);
  check(fp::gated_activation(fp::Activation::kSilu, matrix(gate_up_, num_tokens, stride),
                             matrix(ffn_, num_tokens, c.ffn)));
  multiply_(ffn_.data(), num_tokens, c.ffn, layer.down.get(), c.hidden, x_.data(), c.hidden);
}

fp::TensorView CpuBackend::cache_of(std::vector<float>& cache, int32_t layer) const {
  const ModelConfig& c = model_.config;
  const std::size_t size = size_of(int64_t{options_.num_pages} * options_.page_size,
                                   int64_t{c.num_kv_heads} * c.head_dim);
  return fp::contiguous(cache.data() + size * static_cast<std::size_t>(layer), fp::DType::kFloat32,
                        fp::Device{},
                        {options_.num_pages, options_.page_size, c.num_kv_heads, c.head_dim});
}

}  // namespace engine

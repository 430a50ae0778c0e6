// SPDX-License-Identifier: Apache-2.0
#include "model_backend.h"

#include <algorithm>
#include <utility>

namespace engine {

namespace fp = flashplan;

namespace {

fp::TensorView host_indices(const std::vector<int32_t>& values) {
  return fp::contiguous(values.data(), fp::DType::kInt32, fp::Device{},
                        {static_cast<int64_t>(values.size())});
}

void check_all(std::initializer_list<fp::Status> statuses) {
  for (const fp::Status& status : statuses) check(status);
}

}  // namespace

ModelBackend::ModelBackend(Model model, std::unique_ptr<Device> device, const Options& options)
    : model_(std::move(model)),
      options_(options),
      device_(std::move(device)),
      memory_(model_.config, options, device_.get()),
      has_pdl_(options.has_pdl && device_->place().type == fp::DeviceType::kCuda),
      cache_dtype_(options.has_8bit_cache ? fp::DType::kFloat8E4M3 : device_->dtype()) {
  create_plans();
  allocate();
  if (device_->place().type == fp::DeviceType::kCuda) choose_products();
  if (device_->has_graphs()) record_graphs();
}

void ModelBackend::create_plans() {
  const ModelConfig& c = model_.config;
  fp::AttentionOptions attention;
  attention.num_qo_heads = c.num_qo_heads;
  attention.num_kv_heads = c.num_kv_heads;
  attention.head_dim_qk = attention.head_dim_vo = c.head_dim;
  attention.page_size = options_.page_size;
  attention.q_dtype = attention.o_dtype = device_->dtype();
  attention.kv_dtype = cache_dtype_;
  if (options_.rotates_in_attention) attention.rope = c.rope;
  attention.max_batch_size = options_.max_batch_size;
  attention.batch_invariant = options_.batch_invariant;
  attention.device = device_->place();
  attention.max_qo_tokens = options_.max_step_tokens;
  check(fp::Plan::create(attention, &plans_.mixed));
  attention.max_qo_tokens = options_.max_batch_size;
  check_all({fp::Plan::create(attention, &plans_.decodes),
             fp::Plan::create(attention, &plans_.sharing_decodes)});
  workspace_bytes_ = std::max(plans_.mixed.workspace_bytes(), plans_.decodes.workspace_bytes());
}

void ModelBackend::allocate() {
  const ModelConfig& c = model_.config;
  const fp::DType dtype = device_->dtype();
  const int64_t kv_size = int64_t{c.num_kv_heads} * c.head_dim;
  const int64_t q_size = int64_t{c.num_qo_heads} * c.head_dim;
  const int64_t tokens = device_->padded_rows(options_.max_step_tokens);
  const int64_t draws = device_->padded_rows(options_.max_batch_size);
  workspace_ = device_->allocate(std::max<std::size_t>(workspace_bytes_, 1));
  const int64_t cached_tokens = int64_t{options_.num_pages} * options_.page_size;
  k_caches_ = allocate_rows(c.num_layers * cached_tokens, kv_size, cache_dtype_);
  v_caches_ = allocate_rows(c.num_layers * cached_tokens, kv_size, cache_dtype_);
  token_ids_ = allocate_rows(tokens, 1, fp::DType::kInt32);
  hidden_ = allocate_rows(tokens, c.hidden, dtype);
  x_ = allocate_rows(tokens, c.hidden, dtype);
  qkv_ = allocate_rows(tokens, q_size + 2 * kv_size, dtype);
  out_ = allocate_rows(tokens, q_size, dtype);
  gate_up_ = allocate_rows(tokens, 2 * int64_t{c.ffn}, dtype);
  ffn_ = allocate_rows(tokens, c.ffn, dtype);
  last_ = allocate_rows(draws, c.hidden, dtype);
  logits_ = allocate_rows(draws, c.vocab, fp::DType::kFloat32);
  shared_prefixes_.resize(static_cast<std::size_t>(options_.max_batch_size) * 3);
}

void ModelBackend::start(const Step& step) {
  const fp::Batch batch = batch_of(step);
  const bool is_decode = step.num_tokens() == step.batch_size();
  const bool is_sharing = is_decode && batch.num_shared_prefixes > 0;
  fp::Plan* const plan = is_sharing  ? &plans_.sharing_decodes
                         : is_decode ? &plans_.decodes
                                     : &plans_.mixed;
  StepSize size{step.num_tokens(), step.batch_size(), static_cast<int64_t>(step.draws.size())};
  const int64_t graph = graph_size(step);
  if (graph > 0) size = {graph, graph, graph};
  memory_.send(step, size);
  check(plan->plan(batch, device_->stream()));
  if (graph > 0) {
    const auto key = static_cast<int32_t>(is_sharing ? -graph : graph);
    device_->record(key, [=, this] { forward(size, plan); });
  } else {
    forward(size, plan);
  }
  draw(step.draws);
  memory_.fetch(static_cast<int64_t>(step.draws.size()), step.draws.num_logprobs);
}

void ModelBackend::finish(Drawn* drawn) { memory_.wait(drawn); }

void ModelBackend::choose_products() {
  const Layer& layer = model_.layers[0];
  const fp::DType dtype = device_->dtype();
  const ModelConfig& c = model_.config;
  const int64_t qkv_stride = (c.num_qo_heads + 2 * int64_t{c.num_kv_heads}) * c.head_dim;
  const auto for_sizes = [&](int64_t most, const auto& multiply_rows) {
    for (int64_t m = 1; m <= most; m = device_->padded_rows(m) + 1) multiply_rows(m);
  };
  for_sizes(options_.max_step_tokens, [&](int64_t m) {
    multiply(x_, m, layer.qkv, qkv_, qkv_stride, dtype);
    multiply(out_, m, layer.o, x_, c.hidden, dtype);
    multiply(x_, m, layer.gate_up, gate_up_, 2 * int64_t{c.ffn}, dtype);
    multiply(ffn_, m, layer.down, x_, c.hidden, dtype);
  });
  for_sizes(options_.max_batch_size, [&](int64_t m) {
    multiply(last_, m, model_.output, logits_, c.vocab, fp::DType::kFloat32);
  });
}

void ModelBackend::record_graphs() {
  // A plan keeps the kernel of its first graph. So the sequences here are as long as real ones may
  // be, and have no page in common, because a plan could choose another kernel for a shared prefix.
  // Nobody uses the pages yet.
  const int64_t room = int64_t{options_.num_pages} * options_.page_size;
  const auto kv_len =
      static_cast<int32_t>(std::min<int64_t>({1024, room, model_.config.max_tokens}));
  const int32_t num_pages = (kv_len + options_.page_size - 1) / options_.page_size;
  Drawn drawn(options_.max_batch_size);
  for (int32_t count = 1; count <= options_.max_batch_size; ++count) {
    Step step;
    step.draws.add_likeliest(count);
    step.tokens.assign(static_cast<std::size_t>(count), 0);
    step.kv_lens.assign(static_cast<std::size_t>(count), kv_len);
    for (int32_t i = 0; i <= count; ++i) step.qo_indptr.push_back(i);
    if (graph_size(step) != count) continue;
    step.last_rows.assign(step.qo_indptr.begin(), step.qo_indptr.end() - 1);
    for (int32_t i = 0; i <= count; ++i) step.page_indptr.push_back(i * num_pages);
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t page = 0; page < num_pages; ++page) {
        step.page_indices.push_back((i + page * count) % options_.num_pages);
      }
    }
    for (int repeat = 0; repeat < 2; ++repeat) {
      step.has_paused = true;
      start(step);
      finish(&drawn);
    }
  }
}

int64_t ModelBackend::graph_size(const Step& step) const {
  const int64_t batch = step.batch_size();
  const bool has_graph = device_->has_graphs() && batch == step.num_tokens() &&
                         batch == static_cast<int64_t>(step.draws.size());
  if (!has_graph) return 0;
  int64_t size = 1;
  while (size < batch) size += size < 8 ? size : size < 64 ? 8 : size < 256 ? 16 : 32;
  return std::min<int64_t>(size, options_.max_batch_size);
}

// --8<-- [start:plan]
fp::Batch ModelBackend::batch_of(const Step& step) {
  fp::Batch batch;
  batch.qo_indptr = step.qo_indptr.data();
  batch.kv_lens = step.kv_lens.data();
  batch.batch_size = step.batch_size();
  // Batch-invariant plans do not share prefixes, and neither do plans that rotate keys.
  if (options_.shares_prefixes && !options_.batch_invariant && !options_.rotates_in_attention) {
    fp::HostPageTable table;
    table.page_indptr = host_indices(step.page_indptr);
    table.page_indices = host_indices(step.page_indices);
    check(fp::find_shared_prefixes(batch, options_.page_size, table, shared_prefixes_.data(),
                                   &batch.num_shared_prefixes));
    batch.shared_prefixes = shared_prefixes_.data();
  }
  return batch;
}
// --8<-- [end:plan]

void ModelBackend::forward(const StepSize& size, fp::Plan* plan) {
  const ModelConfig& c = model_.config;
  const fp::Stream stream = device_->stream();
  const fp::TensorView hidden = rows(hidden_, size.tokens, c.hidden);
  const fp::TensorView x = rows(x_, size.tokens, c.hidden);
  fp::TensorView ids = rows(token_ids_, size.tokens, 1);
  ids.dtype = fp::DType::kInt32;
  check(fp::gather_rows(memory_.pool(), memory_.sources(size), ids, stream));
  ids.rank = 1;
  fp::TensorView embedding = weights(model_.embedding.parts[0].values, int64_t{c.vocab} * c.hidden);
  embedding =
      fp::contiguous(embedding.data, embedding.dtype, embedding.device, {c.vocab, c.hidden});
  check(fp::gather_rows(embedding, ids, hidden, stream));
  fp::RmsNormOptions norm;
  norm.eps = c.norm_eps;
  norm.pdl = has_pdl_;
  check(fp::rmsnorm(hidden, weights(model_.layers[0].attention_norm, c.hidden), x, norm, stream));
  for (int32_t i = 0; i < c.num_layers; ++i) {
    const Layer& layer = model_.layers[static_cast<std::size_t>(i)];
    attend(size, i, plan);
    multiply(out_, size.tokens, layer.o, x_, c.hidden, device_->dtype());
    // hidden += x; x = norm of hidden.
    check(fp::add_rmsnorm(x, hidden, weights(layer.ffn_norm, c.hidden), norm, stream));
    feed_forward(layer, size.tokens);
    const bool is_last = i + 1 == c.num_layers;
    const DeviceWeights& next =
        is_last ? model_.norm : model_.layers[static_cast<std::size_t>(i) + 1].attention_norm;
    check(fp::add_rmsnorm(x, hidden, weights(next, c.hidden), norm, stream));
  }
  if (size.draws == 0) return;
  check(fp::gather_rows(x, memory_.last_rows(size), rows(last_, size.draws, c.hidden), stream));
  multiply(last_, size.draws, model_.output, logits_, c.vocab, fp::DType::kFloat32);
}

void ModelBackend::attend(const StepSize& size, int32_t layer_index, fp::Plan* plan) {
  const ModelConfig& c = model_.config;
  const Layer& layer = model_.layers[static_cast<std::size_t>(layer_index)];
  const fp::Stream stream = device_->stream();
  const int64_t stride = (c.num_qo_heads + 2 * int64_t{c.num_kv_heads}) * c.head_dim;
  multiply(x_, size.tokens, layer.qkv, qkv_, stride, device_->dtype());

  const fp::TensorView qkv =
      fp::contiguous(qkv_.get(), device_->dtype(), device_->place(),
                     {size.tokens, c.num_qo_heads + 2 * c.num_kv_heads, c.head_dim});
  const auto heads = [&](int64_t first, int64_t count) {
    fp::TensorView view = qkv;
    view.data =
        static_cast<std::byte*>(qkv.data) + first * c.head_dim * fp::item_size(device_->dtype());
    view.shape[1] = count;
    return view;
  };
  const fp::TensorView q = heads(0, c.num_qo_heads);
  const fp::TensorView k = heads(c.num_qo_heads, c.num_kv_heads);
  if (c.has_head_norms) {
    fp::RmsNormOptions norm;
    norm.eps = c.norm_eps;
    norm.pdl = has_pdl_;
    check_all({fp::rmsnorm(q, weights(layer.q_norm, c.head_dim), q, norm, stream),
               fp::rmsnorm(k, weights(layer.k_norm, c.head_dim), k, norm, stream)});
  }
  fp::AppendTensors append;
  append.k = k;
  append.v = heads(int64_t{c.num_qo_heads} + c.num_kv_heads, c.num_kv_heads);
  append.k_cache = cache_of(k_caches_, layer_index);
  append.v_cache = cache_of(v_caches_, layer_index);
  append.indptr = memory_.qo_indptr(size);
  append.kv_lens = memory_.kv_lens(size);
  append.page_indptr = memory_.page_indptr(size);
  append.page_indices = memory_.page_indices();
  append.pdl = has_pdl_;
  check(options_.rotates_in_attention ? fp::append_paged_kv(append, stream)
                                      : fp::rope_append_paged_kv(q, append, c.rope, q, stream));
  if (!options_.has_attention) return;

  fp::AttentionTensors tensors;
  tensors.q = q;
  tensors.k = append.k_cache;
  tensors.v = append.v_cache;
  tensors.page_indptr = append.page_indptr;
  tensors.page_indices = append.page_indices;
  tensors.o = fp::contiguous(out_.get(), device_->dtype(), device_->place(),
                             {size.tokens, c.num_qo_heads, c.head_dim});
  tensors.pdl = has_pdl_;
  tensors.workspace = workspace_.get();
  tensors.workspace_bytes = workspace_bytes_;
  check(plan->run(tensors, stream));
}

void ModelBackend::feed_forward(const Layer& layer, int64_t num_tokens) {
  const ModelConfig& c = model_.config;
  const int64_t stride = 2 * int64_t{c.ffn};
  multiply(x_, num_tokens, layer.gate_up, gate_up_, stride, device_->dtype());
  check(fp::gated_activation(fp::Activation::kSilu, rows(gate_up_, num_tokens, stride),
                             rows(ffn_, num_tokens, c.ffn), 1.0F, device_->stream(), has_pdl_));
  multiply(ffn_, num_tokens, layer.down, x_, c.hidden, device_->dtype());
}

void ModelBackend::draw(const Draws& draws) {
  const auto count = static_cast<int64_t>(draws.size());
  if (count == 0) return;
  const fp::TensorView logits = fp::contiguous(logits_.get(), fp::DType::kFloat32, device_->place(),
                                               {count, model_.config.vocab});
  if (draws.has_penalties) {
    penalize(logits, draws.history(true), memory_.repetition(draws), &all_tokens_);
    penalize(logits, draws.history(false), memory_.of_new_tokens(draws), &new_tokens_);
  }
  check(fp::sample(logits, memory_.sampling(draws), memory_.outputs(draws), device_->stream()));
}

void ModelBackend::penalize(const fp::TensorView& logits, const History& history,
                            const fp::PenaltyOptions& penalties, std::shared_ptr<void>* memory) {
  const std::size_t lens_bytes = history.lens.size() * sizeof(int32_t);
  const std::size_t tokens_bytes = history.tokens.size() * sizeof(int32_t);
  *memory = device_->allocate(lens_bytes + tokens_bytes);
  auto* const tokens = static_cast<std::byte*>(memory->get());
  std::byte* const lens = tokens + tokens_bytes;
  device_->copy(tokens, history.tokens.data(), tokens_bytes);
  device_->copy(lens, history.lens.data(), lens_bytes);
  const auto count = static_cast<int64_t>(history.lens.size());
  const fp::Device place = device_->place();
  check(fp::apply_penalties(
      logits, fp::contiguous(tokens, fp::DType::kInt32, place, {count, history.max_len}),
      fp::contiguous(lens, fp::DType::kInt32, place, {count}), penalties, device_->stream()));
}

void ModelBackend::multiply(const Memory& x, int64_t rows, const Matrix& w, const Memory& y,
                            int64_t y_stride, fp::DType y_dtype) {
  Product product;
  product.x = x.get();
  product.m = rows;
  product.k = w.inputs;
  product.y_stride = y_stride;
  product.y_dtype = y_dtype;
  auto* column = static_cast<std::byte*>(y.get());
  for (const Matrix::Part& part : w.parts) {
    product.w = part.values.get();
    product.n = part.rows;
    product.y = column;
    device_->multiply(product);
    column += part.rows * fp::item_size(y_dtype);
  }
}

fp::TensorView ModelBackend::rows(const Memory& memory, int64_t count, int64_t columns) const {
  return fp::contiguous(memory.get(), device_->dtype(), device_->place(), {count, columns});
}

fp::TensorView ModelBackend::weights(const DeviceWeights& values, int64_t size) const {
  return fp::contiguous(values.get(), device_->dtype(), device_->place(), {size});
}

fp::TensorView ModelBackend::cache_of(const Memory& caches, int32_t layer) const {
  const ModelConfig& c = model_.config;
  const int64_t bytes = int64_t{options_.num_pages} * options_.page_size * c.num_kv_heads *
                        c.head_dim * fp::item_size(cache_dtype_);
  return fp::contiguous(static_cast<std::byte*>(caches.get()) + layer * bytes, cache_dtype_,
                        device_->place(),
                        {options_.num_pages, options_.page_size, c.num_kv_heads, c.head_dim});
}

ModelBackend::Memory ModelBackend::allocate_rows(int64_t rows, int64_t columns,
                                                 fp::DType dtype) const {
  return device_->allocate(static_cast<std::size_t>(rows * columns * fp::item_size(dtype)));
}

}  // namespace engine

// SPDX-License-Identifier: Apache-2.0
// With batch_invariant the logits of a request have the same bits whatever else the engine does.
#include <cmath>
#include <cstring>

#include "check.h"
#include "drive.h"
#include "products.h"

using namespace engine;

namespace {

using Bits = std::vector<float>;
/// (request, sample, number of tokens before) -> logits.
using AllLogits = std::map<std::tuple<RequestId, int32_t, int32_t>, Bits>;

/// A CPU that keeps the logits of all draws.
class RecordingBackend final : public Backend {
 public:
  RecordingBackend(const Options& options, AllLogits* all)
      : cpu_(cpu_backend(tiny_model("qwen3"), options)), all_(all) {}

  void start(const Step& step) override {
    cpu_->start(step);
    const auto vocab = tiny_config("qwen3").vocab;
    const float* row = cpu_->logits();
    for (const Sequence* s : step.draws.sequences) {
      const Bits logits(row, row + vocab);
      const auto key = std::tuple(s->shared->id, s->sample, s->num_tokens());
      CHECK(all_->emplace(key, logits).second);
      row += vocab;
    }
  }

  void finish(Drawn* drawn) override { cpu_->finish(drawn); }

 private:
  std::unique_ptr<ModelBackend> cpu_;
  AllLogits* all_;
};

Options some_options() {
  Options options;
  options.page_size = 4;
  options.num_pages = 400;
  options.max_batch_size = 16;
  options.max_step_tokens = 64;
  options.batch_invariant = true;
  return options;
}

AllLogits logits_of(const std::vector<Arrival>& arrivals, const Options& options) {
  AllLogits all;
  Core core(tiny_config("qwen3"), std::make_unique<RecordingBackend>(options, &all), options);
  serve(core, arrivals);
  return all;
}

/// Checks that the logits of `request` in a batch, `logits`, have the same bits as `alone`.
void check_equal(const AllLogits& logits, RequestId request, const AllLogits& alone) {
  for (const auto& [key, expected] : alone) {
    const auto& [id, sample, position] = key;
    const auto place = logits.find({request, sample, position});
    CHECK(place != logits.end());
    if (place == logits.end()) return;
    const std::size_t size = expected.size() * sizeof(float);
    CHECK_EQ(std::memcmp(expected.data(), place->second.data(), size), 0);
  }
}

/// Prompts longer than a chunk of the batch-invariant schedule, so that merges of states count.
Arrival random_arrival(Random& random) {
  Arrival arrival;
  arrival.request.prompt = random_prompt(random, pick(random, 0, 3) == 0 ? 900 : 30);
  arrival.request.max_new_tokens = pick(random, 1, 12);
  arrival.request.num_samples = pick(random, 0, 3) == 0 ? 2 : 1;
  arrival.request.ignore_model_stops = true;
  arrival.request.sampling.temperature = 1.0F;
  arrival.request.sampling.seed = pick(random, 0, 1000);
  return arrival;
}

}  // namespace

TEST(logits_do_not_depend_on_neighbours) {
  Random random(1);
  for (int round = 0; round < 6; ++round) {
    std::vector<Arrival> arrivals;
    for (int32_t i = 0; i < 12; ++i) {
      arrivals.push_back(random_arrival(random));
      arrivals.back().step = i == 0 ? 0 : arrivals[arrivals.size() - 2].step + pick(random, 0, 3);
    }
    Options options = some_options();
    options.max_step_tokens = pick(random, 16, 200);
    options.num_pages = pick(random, 300, 500);
    options.page_size = pick(random, 4, 20);
    const AllLogits together = logits_of(arrivals, options);
    for (std::size_t i = 0; i < arrivals.size(); ++i) {
      const AllLogits alone = logits_of({{arrivals[i].request, 0}}, some_options());
      CHECK(!alone.empty());
      check_equal(together, static_cast<RequestId>(i), alone);
    }
  }
}

TEST(rows_of_products_do_not_depend_on_others) {
  Random random(2);
  std::uniform_real_distribution<float> values(-1.0F, 1.0F);
  for (const int64_t inner : {1, 7, 8, 24, 37, 200}) {
    for (int64_t rows = 1; rows <= 9; ++rows) {
      constexpr int64_t kColumns = 5, kStride = 7;
      std::vector<float> x(static_cast<std::size_t>(rows * inner));
      std::vector<float> w(static_cast<std::size_t>(kColumns * inner));
      for (float& value : x) value = values(random);
      for (float& value : w) value = values(random);
      std::vector<float> y(static_cast<std::size_t>(rows * kStride), 9.0F), one(kStride), fast = y;
      multiply_row_by_row(x.data(), rows, inner, w.data(), kColumns, y.data(), kStride);
      multiply_fastest(x.data(), rows, inner, w.data(), kColumns, fast.data(), kStride);
      for (int64_t i = 0; i < rows; ++i) {
        const float* row = x.data() + i * inner;
        multiply_row_by_row(row, 1, inner, w.data(), kColumns, one.data(), kStride);
        for (int64_t j = 0; j < kStride; ++j) {
          const auto place = static_cast<std::size_t>(i * kStride + j);
          double sum = j < kColumns ? 0.0 : 9.0;  // nothing is written between rows
          for (int64_t p = 0; p < inner && j < kColumns; ++p) {
            sum += double{row[p]} * double{w[static_cast<std::size_t>(j * inner + p)]};
          }
          CHECK(std::abs(double{y[place]} - sum) < 1e-4);
          CHECK(std::abs(double{fast[place]} - sum) < 1e-4);
          if (j < kColumns) CHECK(y[place] == one[static_cast<std::size_t>(j)]);
        }
      }
    }
  }
}

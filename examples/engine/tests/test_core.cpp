// SPDX-License-Identifier: Apache-2.0
#include "core.h"

#include <algorithm>

#include "check.h"
#include "cpu_backend.h"
#include "dense_model.h"
#include "tiny_model.h"

using namespace engine;

TEST(one_request) {
  for (const char* type : {"llama", "qwen3"}) {
    Options options;
    options.page_size = 4;
    options.num_pages = 32;
    Core core(tiny_config(type), std::make_unique<CpuBackend>(tiny_model(type), options), options);
    Request request;
    request.prompt = {1, 20, 33, 7, 50, 61, 2};
    request.max_new_tokens = 20;
    request.ignore_model_stops = true;
    core.add(0, request);
    std::vector<Output> outputs;
    while (!core.is_idle()) core.step(&outputs);
    std::vector<int32_t> tokens = request.prompt;
    for (const Output& o : outputs) tokens.push_back(o.token);
    CHECK_EQ(tokens.size(), 27U);
    const DenseModel dense(tiny_model(type));
    const auto logits = dense.logits(tokens);
    for (std::size_t i = request.prompt.size(); i < tokens.size(); ++i) {
      const auto& row = logits[i - 1];
      const double best = *std::ranges::max_element(row);
      std::cout << tokens[i] << ":" << best - row[static_cast<std::size_t>(tokens[i])] << " ";
      CHECK(row[static_cast<std::size_t>(tokens[i])] >= best - 1e-3);
    }
    std::cout << "\n";
  }
}

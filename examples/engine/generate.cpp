// SPDX-License-Identifier: Apache-2.0
// Continues prompts of token ids, all at once:
//
//   generate FOLDER NEW_TOKENS 1,15043,3186 1,450
//
// FOLDER has config.json, and the weights in *.safetensors. If it has no such file, the engine
// makes random weights.
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "engine/engine.h"

namespace {

/// Reads token ids that are separated by commas, as in "1,15043,3186".
std::vector<int32_t> parse_tokens(const std::string& text) {
  std::vector<int32_t> tokens;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const char* const end = part.data() + part.size();
    const auto [last, error] = std::from_chars(part.data(), end, tokens.emplace_back());
    if (last == end && error == std::errc()) continue;
    throw std::invalid_argument("prompt: expected ids as in 1,15043,3186, got " + text);
  }
  return tokens;
}

bool has_weights(const std::filesystem::path& folder) {
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.path().extension() == ".safetensors") return true;
  }
  return false;
}

void generate(int argc, char** argv) {
  const std::filesystem::path folder = argv[1];
  const auto engine = has_weights(folder) ? engine::Engine::load(folder, {})
                                          : engine::Engine::random(folder, 0, {});
  std::vector<std::vector<int32_t>> texts;
  for (int i = 3; i < argc; ++i) {
    engine::Request request;
    request.prompt = parse_tokens(argv[i]);
    request.max_new_tokens = std::atoi(argv[2]);
    engine->submit(request);  // ids count from 0
    texts.push_back(request.prompt);
  }
  // --8<-- [start:poll]
  for (std::size_t num_running = texts.size(); num_running > 0;) {
    for (const engine::Output& output : engine->poll(std::chrono::seconds(1))) {
      texts[static_cast<std::size_t>(output.request)].push_back(output.token);
      if (output.finish != engine::Finish::kNot) --num_running;
    }
  }
  // --8<-- [end:poll]
  for (const std::vector<int32_t>& text : texts) {
    for (const int32_t token : text) std::printf("%d ", token);
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: generate FOLDER NEW_TOKENS PROMPT...\n");
    return 2;
  }
  try {
    generate(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
// The engine for callers in C, and in languages that call C. engine.h explains every member.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct engine_handle engine_handle;

typedef struct engine_options {
  int32_t page_size;
  int32_t num_pages;
  int32_t max_batch_size;
  int32_t max_step_tokens;
  int32_t batch_invariant;  // 0 or 1
  int32_t device;           // engine::DeviceType
  int32_t has_8bit_cache;   // 0 or 1
} engine_options;

typedef struct engine_request {
  const int32_t* prompt;
  int32_t prompt_len;
  int32_t max_new_tokens;
  int32_t num_samples;
  int32_t num_logprobs;
  int32_t ignore_model_stops;  // 0 or 1
  int32_t top_k;
  float temperature;
  float top_p;
  float min_p;
  float repetition;
  float presence;
  float frequency;
  int64_t seed;
} engine_request;

#define ENGINE_MAX_LOGPROBS 20

typedef struct engine_output {
  int64_t request;
  int32_t sample;
  int32_t token;
  int32_t finish;  // engine::Finish
  float logprob;
  int32_t num_likeliest;
  int32_t likeliest_tokens[ENGINE_MAX_LOGPROBS];
  float likeliest_logprobs[ENGINE_MAX_LOGPROBS];
} engine_output;

typedef struct engine_statistics {
  int64_t steps;
  int64_t mixed_steps;
  int64_t computed_tokens;
  int64_t reused_tokens;
  int64_t preemptions;
  int32_t used_pages;
  int32_t running;
  int32_t waiting;
} engine_statistics;

typedef enum engine_status {
  ENGINE_OK = 0,
  ENGINE_INVALID = 1,  // an argument, a file or a request is refused
  ENGINE_FAILED = 2,   // a file can not be read, there is no memory, or a step has failed
} engine_status;

// Functions that can fail write the reason to `message`, which has ENGINE_MESSAGE_SIZE bytes; a
// longer text is cut off. Any thread may call any function except engine_close().
#define ENGINE_MESSAGE_SIZE 512

// Loads the model of a folder, and starts the thread that serves it.
int32_t engine_open(const char* folder, const engine_options* options, engine_handle** engine,
                    char* message);
// Stops the engine after the current step, and frees it. No other call may be under way, or follow.
void engine_close(engine_handle* engine);

// Queues a request, and writes its number. `prompt` is copied.
int32_t engine_submit(engine_handle* engine, const engine_request* request, int64_t* id,
                      char* message);
// Ends a sample, or all samples of a request if `sample` is -1. Returns 0 if the request had ended.
int32_t engine_abort(engine_handle* engine, int64_t request, int32_t sample);
// Writes up to `capacity` outputs, and how many it wrote to `count`. Waits up to `timeout_ms` if
// there is none. Outputs that had no room come with the next call. One thread at a time may poll.
int32_t engine_poll(engine_handle* engine, int32_t timeout_ms, engine_output* outputs,
                    int32_t capacity, int32_t* count, char* message);
void engine_get_statistics(engine_handle* engine, engine_statistics* statistics);

#ifdef __cplusplus
}
#endif

// SPDX-License-Identifier: Apache-2.0
#include "cublaslt.h"

#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "cuda_call.h"

namespace engine {

namespace {

// The constants and structs of cublasLt.h that are used here. They are the same in versions 12 and
// 13.
constexpr int32_t kSuccess = 0;
constexpr int32_t kComputeFloat32 = 68;    // CUBLAS_COMPUTE_32F
constexpr int32_t kTransposed = 1;         // CUBLAS_OP_T
constexpr int32_t kTransposeA = 3;         // CUBLASLT_MATMUL_DESC_TRANSA
constexpr int32_t kMaxWorkspaceBytes = 1;  // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  std::size_t workspace_bytes;
  int32_t status;
  float num_waves;
  int32_t reserved[4];
};

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr std::size_t kFlushedBytes = std::size_t{128} << 20;
constexpr int32_t kMostCandidates = 8;
/// The most rows of a product for which algorithms are timed. Larger products are bound by
/// arithmetic, and the first algorithm that cuBLASLt names is good for them.
constexpr int64_t kMostTimedRows = 256;

}  // namespace

struct CublasLt::Functions {
  int32_t (*create)(void** handle);
  int32_t (*destroy)(void* handle);
  int32_t (*create_product)(void** product, int32_t compute_type, cudaDataType_t scale_type);
  int32_t (*destroy_product)(void* product);
  int32_t (*set_product)(void* product, int32_t attribute, const void* value, std::size_t size);
  int32_t (*create_layout)(void** layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                           int64_t stride);
  int32_t (*destroy_layout)(void* layout);
  int32_t (*create_preference)(void** preference);
  int32_t (*destroy_preference)(void* preference);
  int32_t (*set_preference)(void* preference, int32_t attribute, const void* value,
                            std::size_t size);
  int32_t (*get_heuristic)(void* handle, void* product, void* a, void* b, void* c, void* d,
                           void* preference, int32_t wanted, Heuristic* results, int32_t* count);
  int32_t (*multiply)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
                      const void* b, void* b_layout, const void* beta, const void* c,
                      void* c_layout, void* d, void* d_layout, const Algorithm* algorithm,
                      void* workspace, std::size_t workspace_bytes, cudaStream_t stream);
};

/// How products of a shape are computed. Matrices are stored by rows and cuBLASLt reads them by
/// columns, so it sees their transposes, and computes y^T = w x^T.
struct CublasLt::Choice {
  explicit Choice(const Functions& all) : functions(all) {}
  ~Choice() {
    if (product != nullptr) functions.destroy_product(product);
    for (void* layout : {w, x, y}) {
      if (layout != nullptr) functions.destroy_layout(layout);
    }
  }
  Choice(const Choice&) = delete;
  Choice& operator=(const Choice&) = delete;

  const Functions& functions;
  void* product = nullptr;
  void *w = nullptr, *x = nullptr, *y = nullptr;
  Algorithm algorithm{};
};

CublasLt::CublasLt(cudaStream_t stream) : stream_(stream), functions_(new Functions) {
  const char* path = std::getenv("ENGINE_CUBLASLT");
  if (path != nullptr) {
    library_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  } else {
    library_ = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) library_ = dlopen("libcublasLt.so.12", RTLD_NOW | RTLD_LOCAL);
  }
  if (library_ == nullptr) throw std::runtime_error(std::string("cuBLASLt: ") + dlerror());
  const auto find = [this](const char* name, auto* function) {
    void* address = dlsym(library_, name);
    if (address == nullptr) throw std::runtime_error(std::string("cuBLASLt: ") + dlerror());
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(address);
  };
  Functions& f = *functions_;
  find("cublasLtCreate", &f.create);
  find("cublasLtDestroy", &f.destroy);
  find("cublasLtMatmulDescCreate", &f.create_product);
  find("cublasLtMatmulDescDestroy", &f.destroy_product);
  find("cublasLtMatmulDescSetAttribute", &f.set_product);
  find("cublasLtMatrixLayoutCreate", &f.create_layout);
  find("cublasLtMatrixLayoutDestroy", &f.destroy_layout);
  find("cublasLtMatmulPreferenceCreate", &f.create_preference);
  find("cublasLtMatmulPreferenceDestroy", &f.destroy_preference);
  find("cublasLtMatmulPreferenceSetAttribute", &f.set_preference);
  find("cublasLtMatmulAlgoGetHeuristic", &f.get_heuristic);
  find("cublasLtMatmul", &f.multiply);
  check(f.create(&handle_), "cublasLtCreate");
  call(cudaMalloc(&workspace_, kWorkspaceBytes), "cudaMalloc");
  call(cudaMalloc(&flushed_, kFlushedBytes), "cudaMalloc");
  call(cudaEventCreate(&begin_), "cudaEventCreate");
  call(cudaEventCreate(&end_), "cudaEventCreate");
}

CublasLt::~CublasLt() {
  choices_.clear();
  if (handle_ != nullptr) functions_->destroy(handle_);
  cudaFree(workspace_);
  cudaFree(flushed_);
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

void CublasLt::multiply(const Product& p) {
  const Shape shape{p.m, p.n, p.k, p.y_stride, p.y_dtype};
  const auto place = choices_.find(shape);
  run(place != choices_.end() ? *place->second : choose(shape, p), p);
}

CublasLt::Choice& CublasLt::choose(const Shape& shape, const Product& product) {
  const Functions& f = *functions_;
  auto choice = std::make_unique<Choice>(f);
  check(f.create_product(&choice->product, kComputeFloat32, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  check(f.set_product(choice->product, kTransposeA, &kTransposed, sizeof(kTransposed)),
        "cublasLtMatmulDescSetAttribute");
  const auto create = [&](void** layout, cudaDataType_t type, int64_t rows, int64_t columns,
                          int64_t stride) {
    check(f.create_layout(layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns),
                          stride),
          "cublasLtMatrixLayoutCreate");
  };
  const bool is_wide = shape.y_dtype == flashplan::DType::kFloat32;
  create(&choice->w, CUDA_R_16BF, shape.k, shape.n, shape.k);
  create(&choice->x, CUDA_R_16BF, shape.k, shape.m, shape.k);
  create(&choice->y, is_wide ? CUDA_R_32F : CUDA_R_16BF, shape.n, shape.m, shape.y_stride);

  void* preference = nullptr;
  check(f.create_preference(&preference), "cublasLtMatmulPreferenceCreate");
  const std::shared_ptr<void> owner(preference, f.destroy_preference);
  const uint64_t workspace_bytes = kWorkspaceBytes;
  check(f.set_preference(preference, kMaxWorkspaceBytes, &workspace_bytes, sizeof(workspace_bytes)),
        "cublasLtMatmulPreferenceSetAttribute");
  Heuristic candidates[kMostCandidates];
  int32_t count = 0;
  const int32_t wanted = shape.m <= kMostTimedRows ? kMostCandidates : 1;
  check(f.get_heuristic(handle_, choice->product, choice->w, choice->x, choice->y, choice->y,
                        preference, wanted, candidates, &count),
        "cublasLtMatmulAlgoGetHeuristic");
  if (count == 0) throw std::runtime_error("cuBLASLt: expected an algorithm, got none");
  int32_t best = 0;
  float least = std::numeric_limits<float>::infinity();
  for (int32_t i = 0; i < count && count > 1; ++i) {
    choice->algorithm = candidates[i].algorithm;
    const float time = time_of(*choice, product);
    if (time >= least) continue;
    least = time;
    best = i;
  }
  choice->algorithm = candidates[best].algorithm;
  return *choices_.emplace(shape, std::move(choice)).first->second;
}

void CublasLt::run(const Choice& choice, const Product& p) {
  const float one = 1.0F, zero = 0.0F;
  check(functions_->multiply(handle_, choice.product, &one, p.w, choice.w, p.x, choice.x, &zero,
                             p.y, choice.y, p.y, choice.y, &choice.algorithm, workspace_,
                             kWorkspaceBytes, stream_),
        "cublasLtMatmul");
}

float CublasLt::time_of(const Choice& choice, const Product& product) {
  float least = std::numeric_limits<float>::infinity();
  for (int repeat = 0; repeat < 4; ++repeat) {
    call(cudaMemsetAsync(flushed_, repeat, kFlushedBytes, stream_), "cudaMemsetAsync");
    call(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    run(choice, product);
    call(cudaEventRecord(end_, stream_), "cudaEventRecord");
    call(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float time = 0;
    call(cudaEventElapsedTime(&time, begin_, end_), "cudaEventElapsedTime");
    if (repeat > 0) least = std::min(least, time);  // the first run loads the kernel
  }
  return least;
}

void CublasLt::check(int32_t status, const char* function) const {
  if (status == kSuccess) return;
  throw std::runtime_error(std::string(function) + ": status " + std::to_string(status));
}

}  // namespace engine

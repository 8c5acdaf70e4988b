# Fovea. `make help` lists the targets. Each installs what it lacks (tools/setup.sh), configures, builds, and does its job.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
JOBS ?= $(shell nproc)
# Extra arguments for CMake, as in: make test CMAKE_FLAGS=-DFOVEA_WERROR=ON
CMAKE_FLAGS ?=
FUZZ_RUNS ?= 1000000
BENCH_FLAGS ?=
PROFILE_FLAGS ?=
LADDER_FLAGS ?=
REPORT_FLAGS ?=

# $(call configure,PRESET): only when there is no build tree, CMAKE_FLAGS are given, or nvcc was installed since; ninja
# reconfigures by itself.
NEW_NVCC := build/cuda-toolkit/requirements-cuda.txt
NEW_CUTE := build/cutlass/requirements-cute.txt
configure = if [[ ! -f build/$(1)/build.ninja || $(NEW_NVCC) -nt build/$(1)/build.ninja || \
                    $(NEW_CUTE) -nt build/$(1)/build.ninja || -n "$(CMAKE_FLAGS)" ]]; then \
              cmake --preset $(1) $(CMAKE_FLAGS) > build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }; \
            fi
# $(call build,PRESET,TARGETS)
build = cmake --build build/$(1) --parallel $(JOBS) --target $(2)
# Tests run at the same time, so threads that wait must not spin.
ctest = OMP_WAIT_POLICY=passive ctest --test-dir build/$(1) --output-on-failure --parallel $(JOBS)

SOURCE_DIRS := include src cli bindings integrations bench ladder tests docs
FORMATTED = $(shell git ls-files --cached --others --exclude-standard -- \
              $(foreach d,$(SOURCE_DIRS),$(foreach e,c cc cpp cu cuh h hpp,'$(d)/*.$(e)')) | sort -u)

.PHONY: help setup run ladder build test test-all test-release test-python test-report test-sanitizers test-threads test-chips \
        test-llama bench-llama test-gpu bench bench-gpu profile profile-ladder resources report asan tsan fuzz arm64 format format-check clean \
        time-run time-test
.NOTPARALLEL:

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

setup: ## install what a build needs (apt packages)
	@tools/setup.sh build
	@mkdir -p build

build: setup ## configure and build everything, preset release
	@$(call configure,release)
	@$(call build,release,all)

# Programs for this machine: no CUDA without a GPU, with one that chip's kernels only.
.PHONY: programs
programs:
	@tools/setup.sh run
	@mkdir -p build
	@$(call configure,run)
	@$(call build,run,bin/fovea)

run: programs ## attention of a real layer over a real text, as a picture: build/attention.png
	build/run/bin/fovea demo --input data/minilm_layer3_qkv.safetensors --output build/attention.png

# Parts of the tests; tools/run_tests.py says what is in them and which rotation of them runs.
TEST = @command -v python3 > /dev/null || tools/setup.sh build; exec python3 tools/run_tests.py
test: ## one of five rotations of all tests (ROTATION=1 to 5 chooses; else the number of commits)
	$(TEST) --rotation "$(ROTATION)"

test-all: ## all tests, every rotation: before a release
	$(TEST) --rotation all

test-release: ## ctest in an optimised build; ROTATION=3 or all: with the CUDA kernels for sm_90
	$(TEST) --rotation "$(if $(ROTATION),$(ROTATION),2)" packages build tests

test-python: ## the Python package, beside PyTorch, JAX and transformers (installed into build/venv, 2.3 GB)
	$(TEST) --rotation "$(if $(ROTATION),$(ROTATION),2)" packages build get-python python

test-report: ## the page of `fovea report`, in a real browser
	$(TEST) --rotation 5 get-browser report

test-sanitizers: ## errors, ABI and conformance under ASan and UBSan; 20,000 inputs for each fuzz target
	$(TEST) --rotation all get-clang sanitizers

test-threads: ## one plan from many threads under ThreadSanitizer
	$(TEST) --rotation 5 packages threads

test-chips: ## the CUDA kernels compiled for sm_75, sm_80, sm_86 and sm_89
	$(TEST) --rotation all packages chips

.PHONY: test-setup cuda-setup
test-setup:
	@tools/setup.sh test
	@mkdir -p build

# `make build` does without: those who want the CPU backends alone need not download a compiler.
cuda-setup: setup
	@tools/setup.sh cuda
	@tools/setup.sh cute
	@tools/setup.sh disassembler

ROTATION ?=
THIRD ?=
PARTS := packages get-clang get-python get-browser build tests threads sanitizers python report chips
.PHONY: $(addprefix part-,$(PARTS))
# Arguments of ctest that leave out the tests of other rotations, and of other thirds if THIRD is given; none for all of them.
rotating = $(if $(filter 1 2 3,$(ROTATION)),--label-exclude 'rotation_[^$(ROTATION)]$(if $(THIRD),|third_[^$(THIRD)])')$(if $(filter 4,$(ROTATION)),--label-regex '^emulation'$(if $(THIRD), --label-exclude 'third_[^$(THIRD)]'))
part-packages: cuda-setup
part-get-clang: test-setup
part-get-python:
	tools/setup.sh python
part-get-browser:
	tools/setup.sh report-test

# The kernels take most of a build, so rotation 3 alone links them, and with them only the tests that CUDA changes. Rotations 1
# and 5 have no optimised build, rotation 4 emulated kernels alone. Each tree keeps what it has from one time to the next.
TREE_OF_2 := test
TREE_OF_3 := test-cuda
TREE_OF_4 := test-emulation
TEST_TREE := $(or $(TREE_OF_$(ROTATION)),test-all)
part-build:
	$(call configure,$(TEST_TREE))
	$(call build,$(TEST_TREE),all)

part-tests:
	$(call ctest,$(TEST_TREE)) $(rotating)

# Rotation 3 has kernels that are made ahead of time; a build without CUDA skips these tests.
PYTHON_TESTS := $(if $(filter 3,$(ROTATION)),tests/python/test_compile.py,tests/python)
# The module comes from the build tree; pip packs it and installs it into build/venv as a user's would be.
part-python:
	if [[ ! -x build/venv/bin/python ]]; then \
	  echo "no build/venv (tools/setup.sh python makes it), so the Python package is not tested"; \
	else \
	  cmake build/$(TEST_TREE) -DFOVEA_PYTHON=ON > build/python.log 2>&1 || { cat build/python.log; exit 1; }; \
	  $(call build,$(TEST_TREE),fovea_python); \
	  build/venv/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps --no-build-isolation . \
	    --config-settings=cmake.define.FOVEA_PYTHON_MODULE=$(CURDIR)/build/$(TEST_TREE)/python/fovea/_core.abi3.so; \
	  OMP_WAIT_POLICY=passive build/venv/bin/python -m pytest --quiet $(PYTHON_TESTS); \
	  if [[ "$(ROTATION)" != 3 ]]; then NUMBA_ENABLE_CUDASIM=1 build/venv/bin/python -m pytest --quiet tests/ladder; fi; \
	fi

part-report:
	if [[ ! -x build/report-test-venv/bin/python ]]; then \
	  echo "no build/report-test-venv (tools/setup.sh report-test makes it), so the page of fovea report is not tested"; \
	else \
	  build/report-test-venv/bin/python -m pytest --quiet tests/report; \
	fi

# Checks of the sources. Rotations without an optimised build have them here.
CHECKS := ^(docs_(pages|tables|sizes|file_heads)|cuda_tools|include_order|parts_of_the_tests)
# One build tree serves sanitized tests (rotation 1) and fuzz targets (rotation 5): the vector code is compiled once for both.
part-sanitizers:
	if command -v clang++ > /dev/null; then \
	  $(call configure,fuzz); \
	  if [[ "$(ROTATION)" != 5 ]]; then \
	    $(call build,fuzz,sanitized_tests); \
	    $(call ctest,fuzz) --tests-regex '$(CHECKS)'; \
	    $(call ctest,fuzz) --label-regex sanitized $(if $(THIRD),--label-exclude 'third_[^$(THIRD)]'); \
	  fi; \
	  if [[ "$(ROTATION)" != 1 ]]; then \
	    $(call build,fuzz,fuzz_all); \
	    tools/fuzz.sh build/fuzz 20000; \
	  fi; \
	elif [[ "$(ROTATION)" == 5 ]]; then \
	  echo "no clang++, so no fuzzing"; \
	else \
	  echo "no clang++, so no fuzzing; the sanitizers come from the preset asan"; \
	  $(call configure,asan); \
	  $(call build,asan,sanitized_tests); \
	  $(call ctest,asan) --tests-regex '$(CHECKS)'; \
	  $(call ctest,asan) --label-regex sanitized $(if $(THIRD),--label-exclude 'third_[^$(THIRD)]'); \
	fi

part-threads:
	$(call configure,tsan)
	$(call build,tsan,test_threads)
	$(call ctest,tsan) --tests-regex '$(CHECKS)'
	$(call ctest,tsan) --tests-regex '^threads$$'

# sm_90 is in part-build of rotation 3.
part-chips:
	cmake --preset chips -DFOVEA_CUDA_ARCHITECTURES="75;80;86;89" $(CMAKE_FLAGS)
	cmake --build build/chips --parallel $(JOBS) --target device_code

test-llama: setup ## the ggml backend in an unchanged llama.cpp: ggml's own tests of attention (77 MB from PyPI, a quarter of an hour)
	@python3 integrations/ggml/llama.py test

bench-llama: setup ## llama.cpp with and without Fovea: single operations, prompts, generation, logits, perplexity (BENCH_FLAGS, see llama.py --help)
	@python3 integrations/ggml/llama.py bench $(BENCH_FLAGS)

test-gpu: cuda-setup ## the conformance suite on every CUDA backend, and compute-sanitizer; needs an NVIDIA GPU
	@$(call configure,release)
	@$(call build,release,all)
	@tools/test_gpu.sh build/release

bench-gpu: cuda-setup ## speed of the CUDA backends, beside PyTorch's where it is installed (BENCH_FLAGS, see bench/gpu/compare.py)
	@$(call configure,release)
	@$(call build,release,all)
	python3 bench/gpu/compare.py --lib build/release/lib/libfovea.so $(BENCH_FLAGS)

profile: cuda-setup ## counters of the CUDA kernels by Nsight Compute, as a table (PROFILE_FLAGS, see bench/gpu/counters.py)
	@$(call configure,release)
	@$(call build,release,all)
	python3 bench/gpu/counters.py --lib build/release/lib/libfovea.so $(PROFILE_FLAGS)

profile-ladder: cuda-setup ## counters, registers and spills of each rung of the ladder by Nsight Compute (PROFILE_FLAGS)
	@$(call configure,release)
	@$(call build,release,bin/fovea)
	python3 bench/gpu/counters.py --ladder $(PROFILE_FLAGS)

resources: cuda-setup ## writes docs/kernels/resources.md from what the compiler says of each CUDA kernel
	@$(call configure,release)
	@$(call build,release,resources_page)

ladder: programs ## every rung of the ladder that this machine can run: checked, then timed (LADDER_FLAGS, see fovea ladder --help)
	build/run/bin/fovea ladder $(LADDER_FLAGS)

report: ## build/report.html: what was measured, drawn from the files in bench/results (REPORT_FLAGS, see bench/report/report.py)
	@tools/setup.sh report
	@mkdir -p build
	@python=build/report-venv/bin/python; [[ -x $$python ]] || python=python3; \
	$$python bench/report/report.py --output build/report.html $(REPORT_FLAGS)

bench: setup ## speed of the CPU backends, beside PyTorch where it is installed
	@$(call configure,release)
	@$(call build,release,all)
	python3 bench/cpu/compare.py --lib build/release/lib/libfovea.so --fovea build/release/bin/fovea

asan: test-setup ## every test under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(call configure,asan)
	@$(call build,asan,all)
	$(call ctest,asan)

tsan: test-setup ## every test under ThreadSanitizer
	@$(call configure,tsan)
	@$(call build,tsan,all)
	$(call ctest,tsan)

fuzz: test-setup ## a longer run of each fuzz target (FUZZ_RUNS inputs)
	@$(call configure,fuzz)
	@$(call build,fuzz,fuzz_all)
	tools/fuzz.sh build/fuzz $(FUZZ_RUNS)

arm64: ## cross-compile for 64-bit ARM and run the tests under qemu
	@tools/setup.sh arm64
	@mkdir -p build
	@$(call configure,arm64)
	@$(call build,arm64,all)
	$(call ctest,arm64)

format: test-setup ## clang-format all sources in place
	@clang-format -i $(FORMATTED)

format-check: test-setup ## fail on sources that clang-format would change
	@clang-format --dry-run -Werror $(FORMATTED)

time-run: ## seconds of `make run` from a bare clone on two cores, into bench/results/house/seconds.json
	@python3 tools/time_from_bare.py run

time-test: ## the same for `make test`
	@python3 tools/time_from_bare.py test

clean: ## remove build/
	rm -rf build

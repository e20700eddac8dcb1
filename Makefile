# make demo | test | test-lowest | test-ascend | test-ascend-triton | test-vllm | soak | lint | bench | wheel | clean, each from a clean clone. Everything made here is in .gitignore.
#   PYTHON=python3.12   use this Python (default: python3.11 where it exists, else any from 3.10 on)
#   ARGS="..."          passed on to pytest, the demo or the benchmark
SHELL := /bin/bash -o pipefail
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# Beside the environment, for the tests that ask for them: torch_npu changes torch when it is imported; triton-ascend
# takes triton's place, wants numpy 1, and has wheels for Python up to 3.11.
TORCH_NPU := .torch-npu
TRITON_ASCEND := .triton-ascend
# bishengir-compile, which plans the memory of triton-ascend's kernels.
ASCEND_IR := .ascendnpu-ir
# vLLM wants a torch of its own, so an environment of its own: gigabytes. Of the newest it is the sources that are read.
VLLM := .vllm
VLLM_ASK := vllm==0.22.1
VLLM_READ := vllm==0.33.0
VLLM_PYTHONS := python3.12 python3.11 python3.10
# The dependencies at their floors; torch is the environment's own, since an older one is gigabytes.
LOWEST := .lowest
LOWEST_ASK := click commonmark 'huggingface-hub<1'
# Python 3.11 first: for it the torch of constraints.txt may be had as a CPU build.
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3.10 python3)
CPP_FILES := $(shell find cpp device_kernels gpu_kernels tests/support/ttnn_stand_in \
    \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(shell find cpp -type f 2>/dev/null)

# The constraints hold in pip's build environments too (the second name is that of newer pips).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start a hundred processes, so Python keeps bytecode: of what is imported, which is a quarter of what is installed.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(PY) -m pip install --no-compile

# The Tenstorrent kernels: ttnn has wheels for these only, and wants an older numpy than everything else here.
TT_VENV := .venv-tenstorrent
TT_PYTHONS := python3.12 python3.10

# What `make test` installs beside the environment, at the same time.
BESIDE := $(addsuffix /.installed,$(LOWEST) $(TORCH_NPU) $(TRITON_ASCEND) $(ASCEND_IR))
TOGETHER := $(MAKE) --no-print-directory --output-sync=target -j

.PHONY: help demo test test-lowest test-tenstorrent test-ascend test-ascend-triton test-vllm soak lint lint-style lint-types \
    format bench wheel clean

help:
	@echo "make demo    generate text with the bundled model"
	@echo "make test    checks and tests"
	@echo "make test-tenstorrent    tests on a Tenstorrent card or simulator (docs/tenstorrent.md)"
	@echo "make test-lowest   of these, the demo with the oldest versions of the dependencies"
	@echo "make test-ascend   of these, those of that backend with torch_npu itself"
	@echo "make test-ascend-triton   of these, that backend's Triton kernels with triton-ascend"
	@echo "make test-vllm   the plug-in in vLLM itself (the first time: gigabytes; not part of make test)"
	@echo "make soak    ten minutes of random load on the engine (ARGS=\"--seconds 60 --seed 7\")"
	@echo "make lint    the checks alone;  make format applies the formatters"
	@echo "make bench   measure a model (ARGS=... as for ttnn-moe bench-model)"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove what was made"

demo: $(VENV)/.installed
	$(PY) -m ttnn_moe generate $(ARGS)

# One thread a test worker: there are as many workers as two cores want.
test:
	@$(TOGETHER) $(VENV)/.installed-dev $(if $(ARGS),,$(BESIDE))
	@$(MAKE) --no-print-directory lint
	@echo "==> pytest"
	OMP_NUM_THREADS=1 $(PY) -m pytest $(ARGS)
	$(if $(ARGS),,@$(TOGETHER) test-lowest test-ascend test-ascend-triton)

# --no-deps leaves out torch, so what the others ask for, and the environment lacks or has too new, is named.
test-lowest: $(LOWEST)/.installed | $(VENV)/.installed-dev
	@test ! -e $< || { set -x; \
	    for command in "generate --max-new-tokens 8" "why --device cpu" --help "generate --help"; do \
	        PYTHONPATH="$(CURDIR)/$(LOWEST)" OMP_NUM_THREADS=1 $(PY) -m ttnn_moe $$command >/dev/null || exit 1; \
	    done; }

# Without a card or a simulator named by TT_METAL_SIMULATOR, the tests say what is missing, and skip.
test-tenstorrent: $(TT_VENV)/.installed
	$(TT_VENV)/bin/python -m pytest -n 0 -rs -m "not gpu" $(addprefix tests/tenstorrent/test_,\
	    tenstorrent.py tenstorrent_host.py planner.py planner_programs.py) $(ARGS)

# No NPU and no CANN: torch_npu's operators over CPU implementations. What asks for none of them ran in `make test`.
test-ascend: $(TORCH_NPU)/.installed | $(VENV)/.installed-dev
	@test ! -e $< || { set -x; PYTHONPATH="$(CURDIR)/$(TORCH_NPU)" TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 \
	    $(PY) -m pytest tests/ascend --ignore tests/ascend/test_ascend_triton.py \
	    --ignore tests/ascend/test_ascend_qwen3_ranks.py \
	    'tests/contract/test_parallel.py::test_processes[2]' \
	    $(addprefix tests/tools/test_selfcheck.py::test_,ascend_on_stand_ins_passes_operator_by_operator \
	    under_torchrun_expert_parallelism_is_checked_too) $(ARGS); }

# Interpreted, and compiled for a 910B3 as far as that goes without CANN: with ascendnpu-ir through the planning of memory.
test-ascend-triton: $(TRITON_ASCEND)/.installed $(ASCEND_IR)/.installed | $(VENV)/.installed-dev
	@test ! -e $< || { set -x; export PYTHONPATH="$(CURDIR)/$(TRITON_ASCEND)"; \
	    TRITON_INTERPRET=1 $(PY) tests/support/ascend_triton_cases.py interpret && \
	    PATH="$(CURDIR)/$(ASCEND_IR)/ascendnpuir/bin:$$PATH" $(PY) tests/support/ascend_triton_cases.py compile; }

# On a CPU, with the reference backend: hooks, loading, numbers. `make test` runs most of it with a stand-in.
test-vllm: $(VLLM)/.installed
	PYTHONPATH="$(CURDIR):$(CURDIR)/tests/support" TTNN_MOE_VLLM_SOURCES="$(CURDIR)/$(VLLM)/sources" OMP_NUM_THREADS=1 \
	    VLLM_NO_USAGE_STATS=1 $(VLLM)/bin/python -m pytest -n 0 -rs tests/integrations/test_vllm.py \
	    $(addprefix tests/integrations/test_vllm_,arranged.py gpt_oss.py model.py quantised.py refused.py router.py steps.py whole.py) $(ARGS)

# Ten minutes of random load on the engine; CI runs some seconds of it as a test.
soak: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(PY) tests/support/engine_soak.py $(ARGS)

lint: $(VENV)/.installed-dev
	@$(TOGETHER) lint-types lint-style

lint-style: $(VENV)/.installed-dev
	@echo "==> ruff"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@echo "==> clang-format"
	@$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run --Werror $(CPP_FILES))

lint-types: $(VENV)/.installed-dev
	@echo "==> mypy"
	@$(PY) -m mypy

format: $(VENV)/.installed-dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format -i $(CPP_FILES))

bench: $(VENV)/.installed
	$(PY) -m ttnn_moe bench-model $(ARGS)

wheel: $(VENV)/.installed-dev
	$(PY) -m build --outdir dist

clean:
	rm -rf $(VENV) $(TT_VENV) $(TORCH_NPU) $(TRITON_ASCEND) $(ASCEND_IR) $(LOWEST) $(VLLM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed from the checkout as it is (editable): Python and kernel sources need no second install; C++ is built
# again when it changes.
$(VENV)/.installed: $(BUILD_INPUTS) | $(VENV)/bin/pip
	@$(call install,.)
	@touch $@

$(VENV)/.installed-dev: $(BUILD_INPUTS) | $(VENV)/bin/pip
	@$(call install,.[dev])
	@touch $@ $(VENV)/.installed

# SFPI, the compiler of the kernels, is a download of its own; without it the tests say so.
$(TT_VENV)/.installed: pyproject.toml CMakeLists.txt constraints-tenstorrent.txt $(shell find cpp -type f 2>/dev/null)
	@test -x $(TT_VENV)/bin/python || for python in $(TT_PYTHONS); do \
	    if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then exec "$$python" -m venv $(TT_VENV); fi; \
	done; \
	test -x $(TT_VENV)/bin/python || { \
	    echo "No Python for ttnn: tried $(TT_PYTHONS); its wheels are for these. Install one of them." >&2; exit 1; }
	@echo "==> installing '.[tenstorrent]' into $(TT_VENV) (the first time: torch and ttnn, gigabytes)"
	@PIP_CONSTRAINT=constraints-tenstorrent.txt PIP_BUILD_CONSTRAINT=constraints-tenstorrent.txt \
	    $(TT_VENV)/bin/python -m pip install --editable '.[tenstorrent]' hypothesis nanobind pytest pytest-xdist
	@$(TT_VENV)/bin/python -m ttnn_moe.tenstorrent.sfpi || echo "NOTE: without SFPI nothing can be run on a device" >&2
	@touch $@

$(TORCH_NPU)/.installed: constraints.txt | $(VENV)/bin/pip
	@$(call beside,torch-npu)

$(TRITON_ASCEND)/.installed: Makefile | $(VENV)/bin/pip
	@PIP_CONSTRAINT=; $(call beside,triton-ascend==3.2.0 'numpy<2' pybind11)

$(ASCEND_IR)/.installed: Makefile | $(VENV)/bin/pip
	@PIP_CONSTRAINT=; $(call beside,ascendnpu-ir==1.2.0)

# The package itself is taken from the checkout: its C++ is not needed here.
$(VLLM)/.installed: Makefile
	@test -x $(VLLM)/bin/python || for python in $(VLLM_PYTHONS); do \
	    if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then exec "$$python" -m venv $(VLLM); fi; \
	done; \
	test -x $(VLLM)/bin/python || { echo "No Python for vLLM: tried $(VLLM_PYTHONS). Install one of them." >&2; exit 1; }
	@echo "==> installing $(VLLM_ASK) into $(VLLM), and reading $(VLLM_READ) (the first time: gigabytes)"
	@PIP_CONSTRAINT= $(VLLM)/bin/python -m pip install --quiet $(VLLM_ASK) loguru platformdirs pytest pytest-xdist
	@rm -rf $(VLLM)/sources; mkdir $(VLLM)/sources
	@PIP_CONSTRAINT= $(VLLM)/bin/python -m pip download --quiet --no-deps --dest $(VLLM)/wheel $(VLLM_READ) \
	    && $(VLLM)/bin/python -m zipfile -e $(VLLM)/wheel/*.whl $(VLLM)/sources && rm -rf $(VLLM)/wheel
	@find $(VLLM)/sources -type f ! -name '*.py' -delete
	@touch $@

$(LOWEST)/.installed: constraints-lowest.txt Makefile | $(VENV)/bin/pip
	@rm -rf $(LOWEST); if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
	    echo "NOTE: the lowest versions are not tested: they have wheels for Python up to 3.12" >&2; \
	else \
	    set -x; PIP_CONSTRAINT= $(PIP_INSTALL) --quiet --no-deps --target $(LOWEST) \
	        $$(sed '/^#/d; /^torch=/d' constraints-lowest.txt) $(LOWEST_ASK) && touch $@; \
	fi

# Packages beside the environment; where they cannot be had, that is said, and their tests are left out.
define beside
rm -rf $(@D); echo "==> installing $(1) into $(@D)"; \
if $(PIP_INSTALL) --quiet --no-deps --target $(@D) $(1); then touch $@; else \
    echo "NOTE: the tests with $(firstword $(1)) are skipped: it cannot be installed (pip says why, above)" >&2; fi
endef

define install
python=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); options=; \
command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
    echo "No C++ compiler: got none of $${CXX:-c++}, g++, clang++ on PATH." \
        "Install one (Debian and Ubuntu: apt install g++) or set CXX=." >&2; exit 1; }; \
headers=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
if ! test -f "$$headers/Python.h"; then \
    echo "NOTE: $$headers/Python.h is missing, so the native planner is left out; everything else works." \
        "To have it: install Python's headers (Debian and Ubuntu: apt install python$$python-dev), make clean." >&2; \
    options="--config-settings=cmake.define.TTNN_MOE_PLANNER=OFF"; \
fi; \
echo "==> installing '$(1)' for Python $$python into $(VENV) (the first time: torch and more, some minutes)"; \
$(PIP_INSTALL) $$options --editable '$(1)'
endef

$(VENV)/bin/pip:
	@for python in $(PYTHONS); do \
	    if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	        echo "==> $(VENV) with $$("$$python" --version), $$(command -v "$$python")"; \
	        exec "$$python" -m venv $(VENV); \
	    fi; \
	done; \
	echo "No Python to use: tried $(PYTHONS); expected Python 3.10 or newer with venv and pip" \
	    "(Debian and Ubuntu: apt install python3 python3-venv python3-dev); or say which: make PYTHON=/path/to/python" >&2; \
	exit 1

# make install          .venv with the core, every plugin of this repository and the development tools
# make check            ruff, mypy, and the mechanical rules of our English
# make test             the quick tests: on all cores, in about ten minutes, then on a GPU; plugin=triton for one plugin
# make test-all         all tests, with the coverage of the core: an hour; plugin=triton for one plugin
# make tune             the main job on a small model: capture, tune, dispatch, compare
# make bench            the price of dispatch on this machine
# make fuzz             each reader on mutated files; seconds=60 of a core for each
# make docs             the tests that keep the documents true
# make site             the documents and the API reference as web pages, in build/site
#
# PY=python3.12         the interpreter that .venv is made from; a torch that it has is kept
# TORCH_INDEX=address   where torch comes from, if PY has none: the plain index for an NVIDIA GPU, else PyTorch's of CPU builds;
#                       AMD: https://download.pytorch.org/whl/rocm7.1; empty: what pip's configuration gives
# OFFLINE=1 PY=python3  no venv and no index: install into that Python, from what it already has
# WHEELS=folder         OFFLINE: wheels to install first (platformdirs, pebble); default .whl where it exists
# args="-k dispatch"    passed on to pytest, or to the script that tune and bench run

PY ?= python3
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml setup.py core/tunedgemm/backends/native.c .ci/choose_torch.py $(PLUGINS:%=%/pyproject.toml)
WHEELS ?= $(wildcard .whl)

ifdef OFFLINE
RUN := $(PY)
# The Python is the caller's choice, so a distribution's marker against pip is overridden.
export PIP_BREAK_SYSTEM_PACKAGES = 1
STAMP := .venv/offline$(subst /,-,$(shell command -v $(PY)))
SITE := $(PY)
else
RUN := .venv/bin/python
STAMP := .venv/installed
SITE := build/site-venv/bin/python
endif

TESTS := $(if $(plugin),plugins/$(plugin)/tests)
# Where pytest-xdist or pytest-cov is missing (an offline machine) the tests run without it.
IN_PROCESSES = $$($(RUN) -c 'import xdist; print("-n", $(1))' 2>/dev/null)
COVERAGE = $$($(RUN) -c 'import pytest_cov; print("--cov --cov-report=term")' 2>/dev/null)

.PHONY: install check test test-all bench tune fuzz docs site

install: $(STAMP)

.venv/bin/python:
	$(PY) -m venv .venv

.venv/installed: $(PROJECTS) | .venv/bin/python
	@.venv/bin/python .ci/choose_torch.py $(PY) -e '.[dev]' $(PLUGINS:%=-e ./%)
	@touch $@

.venv/offline%: $(PROJECTS)
	$(if $(wildcard $(WHEELS)/*.whl),$(PY) -m pip install -q --no-index --no-deps $(wildcard $(WHEELS)/*.whl))
	$(PY) -m pip install -q --no-index --no-build-isolation --no-deps -e . $(PLUGINS:%=-e ./%)
	@mkdir -p .venv && touch $@

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) .ci/english.py

# One thread a process: threads that wait for each other take the time of other processes.
ON_CPU = CUDA_VISIBLE_DEVICES=-1 HIP_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1 $(RUN) -m pytest -q $(call IN_PROCESSES,"auto --dist loadfile --no-loadscope-reorder")
# Most of their time goes to compilers: a process a core, while each has 8 GiB of the GPU's memory.
GPU_PROCESSES = min(__import__("os").cpu_count(), 1 + (__import__("torch").cuda.mem_get_info()[1] >> 33)), "--dist worksteal"
# Without a GPU, or where args pick none of its tests (5), there are none.
ON_GPU = ! $(RUN) -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || OMP_NUM_THREADS=1 $(RUN) -m pytest -q $(call IN_PROCESSES,$(GPU_PROCESSES)) \
	-m "gpu and $(1)" $(TESTS) $(args) || [ $$? = 5 ]

test: install
	$(ON_CPU) -m "not slow and not nightly and not timing" $(TESTS) $(args)
	$(call ON_GPU,not slow and not nightly and not timing)

test-all: install
	$(RUN) -m pytest -q -m timing $(TESTS) $(args)
	$(ON_CPU) $(if $(plugin),,$(COVERAGE)) -m "not timing" $(TESTS) $(args)
	$(call ON_GPU,not timing)

bench: install
	$(RUN) benchmarks/host_time.py --only dispatch $(args)

tune: install
	$(RUN) examples/models/tune_llama.py $(args)

fuzz: install
	FUZZ_SECONDS=$(or $(seconds),60) $(RUN) -m pytest -q tests/fuzz $(args)

docs: install
	$(RUN) -m pytest tests/test_docs.py $(args)

# The site imports nothing of the project, so it has a small environment without torch.
build/site-venv/bin/python: pyproject.toml
	$(PY) -m venv build/site-venv
	sed -n 's/^site = \[\(.*\)\]$$/\1/p' pyproject.toml | sed 's/", "/" "/g' | xargs $@ -m pip install -q
	@touch $@

site: $(if $(OFFLINE),,$(SITE))
	NO_MKDOCS_2_WARNING=1 $(SITE) -m mkdocs build

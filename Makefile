PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PORT ?= 8000
JOBS ?= 2
TESTS ?=
CLIENTS ?= .clients
FUZZ ?= .fuzz

.PHONY: serve install test lint unit test-long test-native test-clients browser bench docs clean

serve: $(VENV)/.installed
	$(BIN)/python tools/serve_demo.py --port $(PORT)

$(BIN)/python:
	$(PY) tools/make_venv.py $(VENV)

# torch first, by one rule: keep what is there, a container's too; NVIDIA nodes: the default index; else the CPU build.
# It is no dependency of the package, so that pip has no reason to replace it.
$(VENV)/.torch: | $(BIN)/python
	TORCH_INDEX=$(TORCH_INDEX) sh tools/install_torch.sh $(BIN)/python
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py $(wildcard backends/cpu/native/*.[chi]*) $(VENV)/.torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@$(BIN)/python -W ignore -m trencadis.backends.cpu.native.kernel_library
	$(BIN)/python -m compileall -q core backends multimodal server trencadis assets
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@touch $@

# Playwright drives the system's Chromium; it downloads none.
$(VENV)/.browser: pyproject.toml $(VENV)/.test
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[browser]'
	@touch $@

# Libraries of others have venvs of their own: they bring packages that the server must not see.
$(CLIENTS)/.installed: examples/clients/requirements.txt
	$(PY) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

# vLLM's sdist with its own server tests; the environment also sees the packages of this project's tests.
$(CLIENTS)/vllm/.installed: tests/compat/vllm_suite/requirements.txt tests/compat/vllm_suite/download.py $(VENV)/.test
	$(PY) -m venv $(CLIENTS)/vllm
	$(CLIENTS)/vllm/bin/python -m pip install -q --disable-pip-version-check -r $<
	$(BIN)/python -m tests.compat.vllm_suite.download $(CLIENTS)/vllm/src $(CLIENTS)/vllm/bin/python
	@touch $@

$(FUZZ)/.installed: tests/schema/requirements.txt
	$(PY) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

install: $(VENV)/.installed

browser: $(VENV)/.browser

test: $(VENV)/.test lint unit

lint: $(VENV)/.test
	$(BIN)/python tools/lint_links.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .lint && ../$(BIN)/mypy --config-file ../pyproject.toml -p trencadis
	cd .lint && ../$(BIN)/mypy --config-file ../pyproject.toml -p tests

# Whole files to JOBS processes of one thread each: a tenth of the tests takes most of the time.
# tests/budget.toml bounds the CPU seconds of the run; TRENCADIS_TEST_CPU_BUDGET=warn prints them only.
unit: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(TESTS)

test-long: $(VENV)/.test
	$(BIN)/python -m pytest -m long -s

# The kernels of the CPU with sanitizers: their tests and a seeded fuzz, in about three minutes of two idle cores.
test-native: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.native.sanitizers

test-clients: $(VENV)/.test $(CLIENTS)/.installed $(CLIENTS)/vllm/.installed
	CLIENTS=$(abspath $(CLIENTS)) $(BIN)/python -m pytest -m long -s -rs tests/e2e/test_client_examples.py tests/compat

bench: $(VENV)/.test
	$(BIN)/python benchmarks/run.py

# The site, from docs/ and from the code: nothing is fetched, and a warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

clean:
	rm -rf $(VENV) $(CLIENTS) $(FUZZ) .lint build docs/reference *.egg-info

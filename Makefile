# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv data run test check docs picture bench soak fuzz engine wheels image up clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# TORCH_INDEX names the index of torch and torchvision, PyTorch's CPU builds by default; see docker/torch.sh.
$(VENV)/.ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]}: 3.11 or later is needed. Use make PYTHON=python3.11.")'
	$(PYTHON) -m venv $(VENV)
	docker/torch.sh requirements.txt $(BIN)/python install --quiet
	$(PIP) install --quiet --requirement requirements.txt
	$(PIP) install --quiet --no-deps --editable .
	@touch $@

venv: $(VENV)/.ready ## the virtual environment, with pinned packages

data: $(VENV)/.ready ## CIFAR-10, verified by checksum
	$(BIN)/testbed data get cifar10

run: data ## the main job: six modes and a control run on a four-node network of this machine, a table and a report
	@if docker info >/dev/null 2>&1; then PYTHON=$(PYTHON) docker/image.sh || echo "no image: another place is used"; fi
	$(BIN)/testbed sweep experiments/quick.toml $(ARGS)

test: $(VENV)/.ready ## all tests that this machine can run (with CI=true: all, or fail; ARGS=-n0: one at a time)
	$(BIN)/python -m pytest --numprocesses 2 $(ARGS)

check: $(VENV)/.ready ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready ## the tables in docs/modes.md and the list in .env.example, from the rows in testbed/spec/mode.py
	$(BIN)/python docs/generate.py

picture: $(VENV)/.ready ## docs/report.png, the picture of a report page (ARGS=FOLDER; needs Chromium)
	$(BIN)/python docs/picture.py $(or $(ARGS),runs/quick) docs/report.png

bench: data ## the speed this project promises, measured (90 minutes; ARGS=PART for one part; do nothing else meanwhile)
	$(BIN)/python -m tests.bench $(ARGS)

soak: $(VENV)/.ready ## what must hold when things go wrong, counted; resumes (ARGS="kill resume": some parts)
	$(BIN)/python -m tests.soak $(ARGS)

fuzz: $(VENV)/.ready ## specs, modes, faults and files made up at random, far longer than in make test
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests/unit/spec -q $(ARGS)
	$(BIN)/python -m tests.soak hostile

engine: ## a Docker engine with Compose where there is none (Debian, root; asks first)
	docker/engine.sh $(ARGS)

wheels: ## the rank side's packages as wheels, for building the image without an index
	PYTHON=$(PYTHON) docker/wheels.sh

image: ## the image that every node runs, unless it is up to date
	PYTHON=$(PYTHON) docker/image.sh

up: image ## docker compose up, with base and image made first: four nodes in containers, no controller
	docker compose up $(ARGS)

clean: $(VENV)/.ready ## remove what a killed controller left behind; runs/ and data/ stay
	$(BIN)/testbed clean

# Two commands do everything on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv data run test check docs picture bench measure soak repeat fuzz engine uml wheels image up down clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# TORCH_INDEX is the index of torch and torchvision; by default PyTorch's index of CPU builds (docker/torch.sh).
$(VENV)/.ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]}: 3.11 or later is needed. Use make PYTHON=python3.11.")'
	$(PYTHON) -m venv $(VENV)
	docker/torch.sh requirements.txt $(BIN)/python install --quiet
	$(PIP) install --quiet --requirement requirements.txt
	$(PIP) install --quiet --no-deps --editable .
	@touch $@

venv: $(VENV)/.ready ## make the virtual environment, with pinned packages

data: $(VENV)/.ready ## fetch CIFAR-10 and verify its checksums
	$(BIN)/testbed data get cifar10

run: data ## run six modes and a control on a network of four nodes on this machine; print a table, write a report
	@if docker info >/dev/null 2>&1; then PYTHON=$(PYTHON) docker/image.sh || echo "no image: another substrate is used"; fi
	$(BIN)/testbed sweep experiments/quick.toml $(ARGS)

# Three workers on two cores: tests with containers and with deadlines often wait.
test: $(VENV)/.ready ## run all tests that this machine can run (CI=true: fail if it cannot run all; ARGS=-n0: one at a time)
	$(BIN)/python -m pytest --numprocesses 3 $(ARGS)

check: $(VENV)/.ready ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.ready ## write the tables of the documents from results/ and testbed/spec
	$(BIN)/python -m docs.generate

picture: $(VENV)/.ready ## make docs/report.png, a picture of a report page (ARGS=FOLDER; needs Chromium)
	$(BIN)/python docs/picture.py $(or $(ARGS),runs/quick) docs/report.png

bench: data ## run the benchmarks (about 2 hours on an idle machine; ARGS=PART: one part; ARGS=--resume; ARGS=quick: 10 minutes, against committed figures)
	$(BIN)/python -m tests.bench $(ARGS)

measure: data ## measure what is missing of all experiments and benchmarks at this commit; resumes (ARGS=--list: say what)
	$(BIN)/python -m tests.bench.measure $(ARGS)

soak: $(VENV)/.ready ## inject kills, faults and bad input many times and count failures; resumes (ARGS="kill resume": some parts)
	$(BIN)/python -m tests.soak $(ARGS)

repeat: $(VENV)/.ready ## run the tests ten times, every second time beside a busy core; resumes (ARGS="--times 3 tests/unit")
	$(BIN)/python -m tests.repeat $(ARGS)

fuzz: $(VENV)/.ready ## try random specs, modes, faults and files, many more than make test
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests/unit/spec -q $(ARGS)
	$(BIN)/python -m tests.soak hostile

engine: ## install and start a Docker engine with Compose (Debian, as root; asks first, ARGS=-y: does not)
	docker/engine.sh $(ARGS)

# Unpacked, not installed: the kernel is an ordinary program. --on uml finds it in this folder, which has one version.
UML := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/testbed/uml
uml: ## fetch user-mode Linux for --on uml (Debian and its derivatives; any user)
	@rm -rf "$(UML).new" && mkdir -p "$(UML).new"
	cd "$(UML).new" && apt-get download user-mode-linux && dpkg-deb -x user-mode-linux_*.deb . && rm user-mode-linux_*.deb
	@rm -rf "$(UML)" && mv "$(UML).new" "$(UML)"

wheels: ## download the packages of a rank, to build the image without a package index
	PYTHON=$(PYTHON) docker/wheels.sh

image: ## build the image of a rank, unless it is up to date (ARGS=-y: install what a base image needs without asking)
	PYTHON=$(PYTHON) docker/image.sh $(filter -y,$(ARGS))

up: image ## build the image, then docker compose up: four nodes in containers, without a controller
	COMPOSE_PROJECT_NAME=$$($(PYTHON) -m testbed.control.substrates.clone project) PWD="$(CURDIR)" docker compose up $(filter-out -y,$(ARGS))

down: ## remove the containers and the network of make up
	COMPOSE_PROJECT_NAME=$$($(PYTHON) -m testbed.control.substrates.clone project) PWD="$(CURDIR)" docker compose down $(ARGS)

clean: $(VENV)/.ready ## remove what killed controllers left, and this clone's stopped containers (ARGS=--dry-run: only list)
	$(BIN)/testbed clean $(ARGS)

# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Only python3 (>= 3.11) is needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL_FILES := launch_multi_gpu.sh .ci/run deploy/slurm.sbatch
ALONE := alone or quality or netns or root or slurm

.DEFAULT_GOAL := help
.PHONY: help quickstart constraints test test-all walkthrough picture chaos mutants same-runs bench bench-peers bench-growth gpu-bench gpu-check gpu-data lint style format clean

help: ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

quickstart: $(VENV)/.installed ## install, look for devices, train the digits with DDP on every GPU (or two CPU processes)
	$(BIN)/python main_multi_gpu.py --multi-gpu ddp --resume never \
		--nproc-per-node $$($(BIN)/python -c 'import torch; print(torch.cuda.device_count() or 2)')
	@printf '\nNext: source $(BIN)/activate, then bash launch_multi_gpu.sh, or python main_multi_gpu.py --help\n'

test: style ## what CI runs, three tests at a time: lint, types, unit tests, several processes, recipes, README
	@$(BIN)/python -m tests.support.pythons # other versions of Python, which a test trains with
	@$(BIN)/python -m compileall -q multigpu_cli *.py # once, and not in each process that a test starts
	$(BIN)/mypy & types=$$!; code=0; $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder || code=$$?; wait $$types || { code=$$?; echo "mypy: errors, see above"; }; exit $$code
	@$(BIN)/python -m tests.test_house_rules # the sizes of the house

test-all: export COVERAGE_FILE := $(CURDIR)/.coverage_cache/part
test-all: lint ## everything, three hours: also what is slow or needs more than two CPU cores; at the end, which lines ran
	rm -rf .coverage_cache
	code=0; $(BIN)/coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not ($(ALONE))' || code=$$?; \
		$(BIN)/coverage run -m pytest -m '$(ALONE)' || code=$$?; \
		$(BIN)/python -m tests.coverage_by_room; exit $$code

walkthrough: ## what a new user types, in a fresh clone and environment: the README's commands, each row of "what you have"
	$(PYTHON) -m tests.support.walkthrough

picture: $(VENV)/.installed-dev ## docs/run.svg, which the README shows, from a real run
	$(BIN)/python -m benchmarks.picture docs/run.svg

chaos: $(VENV)/.installed-dev ## kill, stop and damage ROUNDS=5 small trainings, drawn from SEED; each must end as if nothing had been
	$(BIN)/python -m tests.chaos --rounds $(or $(ROUNDS),5) $(if $(SEED),--seed $(SEED))

mutants: $(VENV)/.installed-dev ## COUNT=300 small faults in the code, drawn from SEED=17; the tests must notice them: an hour, goes on if stopped
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),300) --seed $(or $(SEED),17) $(if $(SINCE),--since $(SINCE)) $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again)

same-runs: $(VENV)/.installed-dev ## seventeen kinds of runs with the code of OLD=PATH (a checkout of another commit) and with this: is anything else?
	$(BIN)/python -m tests.quality.same_runs $(OLD) $(if $(ONLY),--only $(ONLY)) $(if $(KEEP),--keep $(KEEP))

gpu-check: ## every way that needs a GPU, a JSON line each, with this machine's own python3; BUDGET=540 seconds, then again
	$(PYTHON) -m tests.gpu.check --budget $(or $(BUDGET),540) $(if $(ONLY),--only $(ONLY)) $(if $(RESULTS),--results $(RESULTS))

bench: $(VENV)/.installed ## how fast it is, against hand-written loops and limits, under ten minutes on two quiet cores
	$(BIN)/python -m benchmarks.suite

bench-peers: $(VENV)/.installed-dev ## fine-tuning on packed texts beside TRL's SFTTrainer, in pairs: a quarter of an hour on two quiet cores
	$(BIN)/python -m benchmarks.peers_chat

bench-growth: $(VENV)/.installed-dev ## how cost grows with samples, runs, turns, ranks, …: twenty minutes on two quiet cores
	$(BIN)/python -m benchmarks.growth

gpu-bench: ## the same on a GPU, with this machine's own python3: ten minutes at most, goes on if called again
	$(PYTHON) -m benchmarks.gpu $(if $(RESULTS),--into $(RESULTS))

gpu-data: ## what gpu-bench trains on, copied from ../shared/data into shared/data, which git ignores, for a machine that has this folder alone
	mkdir -p shared/data
	cp -rL ../shared/data/har ../shared/data/fashion-mnist shared/data
	chmod -R u+w shared/data

lint: style ## ruff, mypy, shellcheck
	$(BIN)/mypy

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SHELL_FILES)

format: $(VENV)/.installed-dev ## let ruff lay the code out
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A stamp is newer than what it was made from, so a second call installs nothing.
$(VENV)/.installed: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(wildcard constraints/*.txt) | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.installed

# The tested versions for this Python; a version without a file of its own gets the newest. A search for them takes minutes.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(addprefix --constraint ,$(wildcard \
	constraints/$(shell $(BIN)/python -c 'import sys; print("python%d.%d.txt" % sys.version_info[:2])')))

constraints: ## refresh constraints/, the versions that make installs, for each supported Python on this machine: minutes
	$(PYTHON) -m tests.support.constraints

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv --upgrade-deps $(VENV) || { rm -f $@; exit 1; } # without pip (Debian: apt install python3-venv) it is of no use

clean: ## remove the environment and caches; checkpoints stay
	rm -rf $(VENV) .venv-python* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` do everything on a fresh machine: all they need is Python 3.11+ and pip.
.DEFAULT_GOAL := help
# The environment is made in steps that build on each other; only the checks run side by side.
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

VENV := .venv
# Run as modules: a console script remembers the folder that it was installed in.
RUN := $(VENV)/bin/python -m
CORE := $(VENV)/.core
COMPILED := $(VENV)/.compiled
KERNELS := $(shell find amp_ray -name kernels.py -o -path '*/kernels/*.py' -o -name '*.pxd' 2>/dev/null) $(wildcard amp_ray/compiled/*.py)
DEMO := $(VENV)/.demo
STAMP := $(VENV)/.installed
# The interpreter to make the environment with; by default the first that is fit for it.
PYTHON ?=
# What `make venv` and `make test` install beside the core, by name of the extras in pyproject.toml:
# trials are tested with real training over real SSH, and the documents as the site that they become.
EXTRAS ?= dev,docs,ray,ssh,training
# Every folder with Python files, for the tools that do not look for them themselves.
CHECKED := $(sort $(dir $(wildcard amp_ray/*.py cluster/*.py docs/*.py experiments/*.py tests/*.py))) conftest.py hatch_build.py
# Tests that start real processes run two files at a time: they wait for these more than they compute. So the
# suites run side by side. Status 5 is pytest's word for no tests: all of a suite need an extra that is not
# installed, and the end of the output says so.
SEPARATE := integration hosts
SUITES := unit $(SEPARATE)
PYTEST := $(RUN) pytest
PARALLEL := -n auto --maxprocesses=4
BY_FILE := -n 2 --dist loadfile
# Tests and measurements start the package hundreds of times: its bytecode is kept, as that of an installed one.
unexport PYTHONDONTWRITEBYTECODE
# What the suites left out, for the end of `make test`.
LEFT_OUT := $(VENV)/.left-out
# The checks that failed, for the same place; `make test` prints the output of each at its end.
FAILED := $(VENV)/.failed
NOTE = || { echo $@ >> $(FAILED); exit 1; }

.PHONY: help
help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ------------------------------------------------------------------------------- environment

# The stamps name the folder and the extras that they were made for: a copied checkout starts anew, other
# extras are added.
ifneq ($(shell cat $(CORE) 2>/dev/null),$(CURDIR))
.PHONY: $(CORE)
CLEAR := --clear
endif
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR) $(EXTRAS))
.PHONY: $(STAMP)
endif
INSTALL := $(RUN) pip install -qq --disable-pip-version-check -c constraints.txt -e

.PHONY: venv
venv: $(STAMP) $(COMPILED)  ## Create .venv and install everything that the tests need, with the tested versions

# What planning needs, and no more: seconds, and no torch.
$(CORE): pyproject.toml constraints.txt
	@rm -f $@
	@python=; for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	  if $$candidate -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: Python 3.11 or newer with its venv module is needed;" \
	       "found $$($(or $(PYTHON),python3) --version 2>/dev/null || echo none)." \
	       "Debian, Ubuntu: apt-get install python3 python3-venv;" \
	       "or name yours: make PYTHON=/path/to/python3.12 venv" >&2; exit 1; \
	fi; \
	echo "== $(VENV): $$($$python --version), amp-ray =="; \
	$$python -m venv $(CLEAR) $(VENV)
	@$(INSTALL) .
	@echo '$(CURDIR)' > $@

# What trials on this machine need: torch and DeepSpeed, no GPU.
$(DEMO): $(CORE)
	@rm -f $@
	@echo "== $(VENV): amp-ray[training], about a minute =="
	@$(INSTALL) '.[training]'
	@echo '$(CURDIR)' > $@

$(STAMP): $(CORE)
	@rm -f $@
	@echo "== $(VENV): amp-ray[$(EXTRAS)], about a minute =="
	@$(INSTALL) '.[$(EXTRAS)]'
	@echo '$(CURDIR) $(EXTRAS)' > $@

# Kernels are compiled when the package is installed, and again when their sources change.
$(COMPILED): $(CORE) $(KERNELS)
	@$(RUN) amp_ray.compiled || true
	@touch $@

# --------------------------------------------------------------------------------------- use

.PHONY: demo
demo: $(DEMO) $(COMPILED)  ## Plan, run real DeepSpeed trials on this machine's CPU, recalibrate; about three minutes
	@rm -rf $(VENV)/demo-study
	$(VENV)/bin/python experiments/demo.py --full --study $(VENV)/demo-study

.PHONY: plan
plan: $(COMPILED)  ## Plan an experiment of the AMP paper and print the ranking
	$(VENV)/bin/amp-ray plan experiments/homogeneous.yaml

.PHONY: bench
bench: $(COMPILED)  ## Print the table of speed and memory
	$(VENV)/bin/python tests/benchmarks/run.py

.PHONY: closed-loop
closed-loop: $(DEMO) $(COMPILED)  ## Profile this machine, plan from that, run the best five: predicted against measured
	$(VENV)/bin/python experiments/profile_to_trials.py

.PHONY: one-gpu
one-gpu: $(DEMO) $(COMPILED)  ## Measure on one CUDA device for eight minutes what can be predicted of it; 3 without a device
	$(VENV)/bin/python experiments/one_gpu.py

.PHONY: dist
dist: $(CORE)  ## Build a wheel for this Python, which needs no compiler where it is installed: dist/
	@rm -rf dist
	@$(RUN) pip wheel -qq --disable-pip-version-check --no-deps -w dist .
	@ls dist

.PHONY: reference
reference: $(COMPILED)  ## Write the parts of the documents that are made from the code into their pages
	@$(VENV)/bin/python docs/reference.py

.PHONY: screens
screens: $(COMPILED)  ## Run the commands of the tutorials, and write their outputs into the pages
	@$(VENV)/bin/python docs/screens.py

.PHONY: docs
docs: venv  ## Build the documents as a site that opens from disk: site/index.html
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet --strict
	@echo site/index.html

.PHONY: picture
picture: $(COMPILED)  ## Make the README's picture anew: the report of a plan, as Chromium shows it
	@rm -f $(VENV)/llama.yaml
	@$(VENV)/bin/amp-ray init -o $(VENV)/llama.yaml --model llama-3-8b --cluster dgx-h100 --nodes 4 --batch 512 --runtime megatron-core
	@$(VENV)/bin/amp-ray report $(VENV)/llama.yaml -o $(VENV)/report.html
	@chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,1800 --virtual-time-budget=10000 \
	  --screenshot=docs/assets/report.png file://$(CURDIR)/$(VENV)/report.html 2>/dev/null; ls -l docs/assets/report.png

.PHONY: accuracy
accuracy: $(COMPILED)  ## Print the cost model's error on the published measurements
	$(VENV)/bin/python experiments/accuracy.py

# ------------------------------------------------------------------------------------ checks

.PHONY: test
test: venv  ## Run every check and every test, to the end whatever fails
	@echo "== lint and $(SUITES) side by side; each prints at its end =="
	@rm -f $(LEFT_OUT) $(FAILED); export AMP_RAY_LEFT_OUT="$(CURDIR)/$(LEFT_OUT)"; trap "exit 130" INT; \
	$(MAKE) -j --no-print-directory --keep-going --output-sync SIDE_BY_SIDE=yes lint $(SUITES:%=test-%) \
	  || failed="$$(cat $(FAILED) | xargs)"; \
	echo "== left out =="; sort -u $(LEFT_OUT) 2>/dev/null | grep . || echo nothing; \
	if [ "$${failed+yes}" ]; then echo "== failed: $$failed ==" >&2; exit 1; fi; \
	echo "== all passed =="

.PHONY: $(SUITES:%=test-%)
test-unit: venv
	@echo "== pytest: unit, property, golden, contract, doctests =="
	@$(PYTEST) $(PARALLEL) $(SEPARATE:%=--ignore=tests/%) $(NOTE)

$(SEPARATE:%=test-%): test-%: venv
	@echo "== pytest: $* =="
	@$(PYTEST) $(BY_FILE) tests/$* || [ $$? -eq 5 ] $(NOTE)

.PHONY: fuzz
fuzz: venv  ## Read 10,000 hostile inputs with everything that reads any (minutes)
	@HYPOTHESIS_PROFILE=fuzz $(PYTEST) $(wildcard tests/property/test_hostile_*.py)

.PHONY: net
net: $(COMPILED)  ## Compare the answers to many commands with the recorded ones; RECORD=yes records, ONLY='plan/*' some
	@OPENBLAS_CORETYPE=Haswell PYTHONPATH=tests/lib $(RUN) net $(if $(RECORD),--record) $(if $(ONLY),--only '$(ONLY)')

.PHONY: goldens
goldens: $(COMPILED)  ## Record the figures of the golden strategies anew, and say how many differ; DRAW=yes draws and searches anew
	@PYTHONPATH=tests/lib $(RUN) goldens $(if $(DRAW),draw,price)

.PHONY: plans
plans: $(COMPILED)  ## Compare plans of searches with the recorded ones: time and CPU; RECORD=yes records, ONLY='small-11*' some
	@$(VENV)/bin/python tests/benchmarks/compare_plans.py $(if $(RECORD),--record) $(if $(ONLY),'$(ONLY)')

.PHONY: paired
paired: $(COMPILED)  ## Compare the CPU time of commands with that in another checkout, OLD=path
	@$(VENV)/bin/python tests/benchmarks/paired.py $(OLD)

.PHONY: house
house: $(COMPILED)  ## Print how large and how entangled the package is
	@$(VENV)/bin/python tests/lib/support/house.py

# `make soak N=200` is two hundred faults, `make scale N=256` as many hosts. They need what test hosts need.
.PHONY: soak
soak: venv  ## Kill, cut, fill and resume studies on test hosts, N=20 times at random
	@AMP_RAY_SOAK=$(or $(N),20) $(PYTEST) -rP tests/hosts/test_soak.py

.PHONY: scale
scale: venv  ## Run a study on N=64 test hosts; print time, CPU and memory of the controller
	@AMP_RAY_HOSTS=$(or $(N),64) $(PYTEST) -rP tests/hosts/test_scale.py

.PHONY: physics
physics: venv  ## Train on test hosts, and compare the cost of links and slow hosts with predictions (minutes)
	@$(PYTEST) -rP tests/hosts/bench_physics.py

.PHONY: ray-gain
ray-gain: venv  ## Search alone and with four workers on two Ray nodes on this machine; print the gain (minutes)
	@$(PYTEST) -rP tests/hosts/bench_ray.py

.PHONY: mutants
mutants: venv  ## Change one line at a time, as root, and see whether a test fails; N=60 lines, SEED=0 (hours)
	@PYTHONPATH=tests/lib $(RUN) mutants --num $(or $(N),60) --seed $(or $(SEED),0)

# PARSERS names the interpreter of an environment with the programs: megatron-core, torchtitan.
.PHONY: check-exports
check-exports: $(COMPILED)  ## Run exports of all presets through the parsers of installed programs
	@PYTHONPATH=tests/lib $(VENV)/bin/python tests/check_exports.py \
	  $(if $(PARSERS),--python $(PARSERS))

.PHONY: lint
lint: lint-ruff lint-format lint-types lint-imports  ## Run the four static checks

.PHONY: lint-ruff
lint-ruff: venv
	@echo "== ruff check =="
	@$(RUN) ruff check . $(NOTE)

.PHONY: lint-format
lint-format: venv
	@echo "== ruff format --check =="
	@$(RUN) ruff format --check . $(NOTE)

.PHONY: lint-types
lint-types: venv
	@echo "== mypy --strict =="
	@$(RUN) mypy $(CHECKED) $(NOTE)

.PHONY: lint-imports
lint-imports: venv
	@echo "== lint-imports =="
	@$(VENV)/bin/lint-imports $(NOTE)

.PHONY: format
format: venv  ## Format the code and mend what ruff can mend safely
	@$(RUN) ruff check --fix-only .
	@$(RUN) ruff format .

.PHONY: coverage
coverage: venv  ## Measure branch coverage (htmlcov/index.html shows the lines)
	@$(PYTEST) $(PARALLEL) --cov --cov-report=term --cov-report=html

.PHONY: clean
clean:  ## Remove .venv, caches and reports
	rm -rf $(VENV) .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache htmlcov dist site amp_ray/compiled/built
	find $(filter %/,$(CHECKED)) -name __pycache__ -type d -prune -exec rm -rf {} +

# `make help` lists the targets. Each one creates .venv and installs what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDEXPANSION:

PYTHON ?= python3
VENV := .venv
.PRECIOUS: $(VENV)/.with-%
PY := $(VENV)/bin/python
SIZE ?= small
RUNS ?= runs
# runs at a time: two on a CPU, one on a machine with a GPU
JOBS ?= $(if $(shell command -v nvidia-smi),1,2)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16
	@printf '%-15s %s\n' vision-sweep 'a small test of plasticity on images that ship with the repository; table and figure' \
		language-sweep 'continual pretraining of a small GPT; table and figure' \
		dqn-sweep 'DQN on Atari with a midpoint reset; table and figure' \
		sac-sweep 'SAC with a midpoint reset; table and figure' \
		install-NAME 'what vision, language, dqn, sac, ray, slurm or all need beside `make install`' \
		bench-NAME 'methods, table1, convergence or speed'
	@printf '\nVariables of a sweep (default):\n'; printf '  %-12s %s\n' \
		EXPERIMENT 'names of files in conf/experiment, or the start of a name: fig2b is all of fig2b_*' \
		SIZE 'smoke, small, medium or paper (small)' \
		METHODS 'a comma-separated list, or all' \
		SEEDS 'a comma-separated list (1,2,3; vision-sweep: 1,2,3,4,5)' \
		JOBS 'runs at a time ($(JOBS) here)' \
		OVERRIDES 'any settings of the script, as in learning_rate=1e-3 (python vision/train.py --help lists them)' \
		RUNS 'the folder of all runs (runs)'
	@printf 'Example: make vision-sweep EXPERIMENT=random_label SIZE=smoke METHODS=none,fire SEEDS=1,2 OVERRIDES=batch_size=32\n'
# ---- environment
# of pip's output the downloads, so that a first use shows that something happens, and the errors; its exit code counts
pip = set -o pipefail; PYTHONUNBUFFERED=1 $(PY) -m pip install --disable-pip-version-check --progress-bar off $(1) 2>&1 \
	| { grep --line-buffered -oE '^ *Downloading .{0,80}|^Installing collected packages|^.*(ERROR|error:).*' || true; }
with = $(foreach extra,$(1),$(VENV)/.with-$(extra))

$(PY):
	@echo "First use: creating $(VENV) and installing PyTorch and what this target needs. This takes 1 to 5 minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(call pip,--upgrade pip)

# torch goes first and alone, so that no other package picks its build; then one stamp for each extra
$(VENV)/.with-torch: constraints.txt | $(PY)
	@echo "installing PyTorch"
	@$(call pip,-c constraints.txt torch numpy)
	@touch $@
$(VENV)/.with-%: pyproject.toml constraints.txt $(VENV)/.with-torch
	@echo "installing what '$*' needs"
	@$(call pip,-c constraints.txt -e '.[$*]')
	@touch $@
needs_language := language language-data
needs_sac := sac humanoid
needs_all := vision language language-data dqn sac humanoid
install: $(call with,suite) ## create .venv and install what the analysis and vision/train.py on shipped images need
install-%: $$(call with,suite $$(or $$(needs_$$*),$$*)) ;
# ---- experiments
# of each domain: experiment, methods, seeds (with three, no paired test of several comparisons is sure to decide), script
vision := random_label none,full_reset,fire 1,2,3,4,5 vision/train.py
language := fig3_best none,shrink_perturb,full_reset,fire 1,2,3 language/train.py
dqn := fig4a_catch none,shrink_perturb,full_reset,plasticity_injection,fire 1,2,3 rl/dqn/train.py
sac := fig4b_hopper none,shrink_perturb,full_reset,plasticity_injection,fire 1,2,3 rl/sac/train.py
comma := ,
space := $(subst ,, )
cells = $(or $(wildcard conf/experiment/$(1).yaml),$(wildcard conf/experiment/$(1)_*.yaml),$(1))
experiments = $(patsubst conf/experiment/%.yaml,%,$(foreach name,$(subst $(comma),$(space),$(or $(EXPERIMENT),$(word 1,$($*)))),$(call cells,$(name))))
methods = $(if $(filter all,$(METHODS)),$$($(PY) -m harness.domains $*),$(or $(METHODS),$(word 2,$($*))))
seeds = $(or $(SEEDS),$(word 3,$($*)))
# the H1 tasks of the paper have link meshes, their _primitive variants have none
meshes := $(if $(filter-out %_primitive %_hopper,$(filter fig4b%,$(subst $(comma),$(space),$(EXPERIMENT)))),humanoid)
SWEEPS := vision-sweep language-sweep dqn-sweep sac-sweep
# all runs, then table and figure even if a run failed; the exit code says whether one did
$(SWEEPS): %-sweep: $$(call with,suite $$* $(meshes))
	@echo 'Training $(experiments) at size $(SIZE) with methods $(methods) and seeds $(seeds); then a table, a figure and verdicts.'
	@status=0; \
	$(PY) $(word 4,$($*)) -m experiment=$(subst $(space),$(comma),$(experiments)) size=$(SIZE) method=$(methods) seed=$(seeds) \
		run.root=$(RUNS) run.jobs=$(JOBS) $(OVERRIDES) || status=$$?; \
	$(PY) -m analysis tables --experiment $(experiments) --size $(SIZE) --root $(RUNS) || status=$$?; exit $$status
data: $(call with,suite vision) ## download image data ahead of time: DATA=cifar10,cifar100,tiny_imagenet
	$(PY) -m vision.data $(or $(subst $(comma),$(space),$(DATA)),cifar10 cifar100 tiny_imagenet)
paper: install-all ## the runs of Figures 2 to 4 and of 5a, the most informative first: PLAN=1 prints the plan, BUDGET=30h limits the time
	$(PY) -m harness.campaign paper run.root=$(RUNS) $(if $(filter command%,$(origin JOBS)),run.jobs=$(JOBS)) \
		$(if $(PLAN),--plan) $(if $(BUDGET),--budget $(BUDGET)) $(OPTIONS)
status: $(call with,suite) ## list which runs are done, running, failed or missing
	$(PY) -m harness.status --root $(RUNS)
# ---- analysis
figures: $(call with,suite) ## draw Figures 2 to 5 and the probes from the runs in RUNS
	$(PY) -m analysis figures --root $(RUNS)
tables: $(call with,suite) ## regenerate the figures and tables of the documents from analysis/results
	$(PY) -m analysis figures --root analysis/results --formats png
	$(PY) -m analysis figures dial --root analysis/results/dial --out analysis/results/figures --formats png && $(PY) -m analysis tables --write
explore: $(call with,suite explore) ## write one page to explore the runs in RUNS, and the committed results: explore.html
	$(PY) -m analysis explore --root $(RUNS)
notebooks: $(call with,suite notebooks) ## execute the notebooks in place
	$(PY) -m analysis.notebooks
docs: $(call with,suite explore docs) ## build the documentation site: build/site/index.html
	$(PY) -m sphinx -q -W --keep-going -j auto -c docs . build/site
	$(PY) -m analysis explore --root analysis/results --out build/site/explore.html
bench_methods := method_costs
bench_table1 := method_costs --table-1
bench-speed: $(call with,suite vision language dqn sac) ## steps a second of the four training scripts
	for domain in vision language dqn sac; do $(PY) -m benchmarks.speed $$domain || exit 1; done
gpu-check: $(call with,suite vision language dqn sac) ## on a GPU: runs, speeds, cost of the paper; WRITE=1 keeps them, DEVICE=cpu
	$(PY) -m benchmarks.gpu_check --device $(or $(DEVICE),cuda) $(if $(WRITE),--write)
bench-%: $(call with,suite) $(call with,vision) ; $(PY) -m benchmarks.$(or $(bench_$*),$*)
# ---- quality
TESTS := $(VENV)/.with-suite,vision,language,language-data,dqn,sac,humanoid,explore,notebooks,reference,dev
test: $(TESTS) lint ## lint, format check, type check, tests
	$(PY) -m pytest -q -n 2 --dist loadfile
test-slow: $(TESTS) ## the long checks
	$(PY) -m pytest -q -m slow
lint: $(call with,dev)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy fire_core
format: $(call with,dev) ## format the code, sort imports
	$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .
.PHONY: $(SWEEPS) help install data gpu-check paper status figures tables explore notebooks docs test test-slow lint format

# `make help` lists the targets. Each one creates .venv and installs what it needs.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# What a sweep runs; set them on the command line: make vision-sweep SEEDS=1,2 METHODS=none,fire SIZE=smoke
SIZE ?= small
# runs at a time: two on a CPU, one on a machine with a GPU
JOBS ?= $(if $(shell command -v nvidia-smi),1,2)
RUNS ?= runs
OVERRIDES ?=

methods = $(if $(filter all,$(METHODS)),$$($(PY) -m harness.domains $(1)),$(METHODS))
launcher = $(if $(filter 1,$(JOBS)),,hydra/launcher=ray $(ray_settings) $(gpus))
ray_settings = +hydra.launcher.ray.init.num_cpus=$(JOBS) +hydra.launcher.ray.init.include_dashboard=false \
	+hydra.launcher.ray.init.logging_level=error
# Ray hides the GPU from jobs that do not ask for a share of it
gpus = $(if $(shell command -v nvidia-smi),+hydra.launcher.ray.remote.num_gpus=$(shell awk 'BEGIN {print 1 / $(JOBS)}'))
export RAY_DEDUP_LOGS := 0
ray = $(if $(filter 1,$(JOBS)),,$(VENV)/.with-ray)
# what must be there in the end, where the labels of the runs are the names of the methods and the seeds are written out
expected = $(if $(OVERRIDES)$(findstring range,$(SEEDS)),,--methods $(call methods,$(1)) --seeds $(SEEDS))
# $(call sweep,script,domain): all runs, then table and figure even if a run failed; the exit code says whether one did
define sweep
	status=0; set -x; \
	$(PY) $(1) -m experiment=$(subst $(space),$(comma),$(strip $(experiments))) size=$(SIZE) method=$(call methods,$(2)) seed=$(SEEDS) run.root=$(RUNS) \
		$(launcher) $(OVERRIDES) || status=$$?; \
	$(PY) -m analysis tables --experiment $(experiments) --size $(SIZE) --root $(RUNS) $(call expected,$(2)) || status=$$?; \
	{ set +x; } 2> /dev/null; exit $$status
endef
# the H1 tasks of the paper have link meshes, their _primitive variants have none
meshes = $(if $(filter-out %_primitive %_hopper,$(filter fig4b%,$(experiments))),$(VENV)/.with-humanoid)
comma := ,
space := $(subst ,, )
# fig2b stands for every experiment of that figure
cells = $(or $(wildcard conf/experiment/$(1).yaml),$(wildcard conf/experiment/$(1)_*.yaml),$(1))
experiments = $(patsubst conf/experiment/%.yaml,%,$(foreach name,$(subst $(comma),$(space),$(EXPERIMENT)),$(call cells,$(name))))

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20
	@printf '\nVariables of a sweep (default):\n'
	@printf '  %-12s %s\n' \
		EXPERIMENT 'names of files in conf/experiment, or the start of a name: fig2b is all of fig2b_*' \
		SIZE 'smoke, small, medium or paper (small)' \
		METHODS 'a comma-separated list, or all' \
		SEEDS 'a comma-separated list (1,2,3; vision-sweep: 1,2,3,4,5)' \
		JOBS 'runs at a time ($(JOBS) here); more than 1 installs Ray' \
		OVERRIDES 'any settings of the script, as in learning_rate=1e-3 (python vision/train.py --help lists them)' \
		RUNS 'the folder of all runs (runs)'
	@printf 'Example: make vision-sweep EXPERIMENT=random_label SIZE=smoke METHODS=none,fire SEEDS=1,2 JOBS=1 OVERRIDES=batch_size=32\n'

# ---------------------------------------------------------------------------------------------- environment
# of pip's output the downloads, so that a first use shows that something happens, and the errors; its exit code counts
pip = set -o pipefail; PYTHONUNBUFFERED=1 $(PY) -m pip install --disable-pip-version-check --progress-bar off $(1) 2>&1 \
	| { grep --line-buffered -oE '^ *Downloading .{0,80}|^Installing collected packages|^.*(ERROR|error:).*' || true; }

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

.PHONY: install
install: $(VENV)/.with-suite ## create .venv and install what the analysis and vision/train.py on shipped images need

.PHONY: install-vision install-language install-dqn install-sac install-ray install-slurm install-all
install-vision: $(VENV)/.with-suite $(VENV)/.with-vision ## what vision/train.py needs for all data sets, and for the nets of torchvision
install-language: $(VENV)/.with-suite $(VENV)/.with-language $(VENV)/.with-language-data ## what language/train.py and prepare.py need
install-dqn: $(VENV)/.with-suite $(VENV)/.with-dqn ## what rl/dqn/train.py needs
install-sac: $(VENV)/.with-suite $(VENV)/.with-sac $(VENV)/.with-humanoid ## what rl/sac/train.py needs, the H1 robot included
install-ray: $(VENV)/.with-suite $(VENV)/.with-ray ## what JOBS above 1 needs
install-slurm: $(VENV)/.with-suite $(VENV)/.with-slurm ## what runs on a Slurm cluster need
install-all: install-vision install-language install-dqn install-sac ## what all four scripts need

.PHONY: doctor
doctor: $(VENV)/.with-suite ## install the suite, then list what is missing and the command that installs it
	@$(PY) -m harness.doctor || true

# ---------------------------------------------------------------------------------------------- experiments
.PHONY: plan
plan:
	@echo 'Training $(strip $(experiments)) at size $(SIZE) with methods $(METHODS) and seeds $(SEEDS), $(JOBS) at a time; then a table and a figure.$(about)'

.PHONY: vision-sweep
vision-sweep: EXPERIMENT ?= random_label
vision-sweep: METHODS ?= none,full_reset,fire
# with three seeds, no paired test of several comparisons is sure to decide
vision-sweep: SEEDS ?= 1,2,3,4,5
# of the default on two cores
vision-sweep: about = $(if $(filter random_label/none$(comma)full_reset$(comma)fire/1$(comma)2$(comma)3$(comma)4$(comma)5/small,$(EXPERIMENT)/$(METHODS)/$(SEEDS)/$(SIZE)), This takes 3 to 5 minutes on two cores (5 to 7 with the first installation).)
vision-sweep: plan $(VENV)/.with-suite $(VENV)/.with-vision $(ray) ## a small test of plasticity on images that ship with the repository; table and figure
	@$(call sweep,vision/train.py,vision)

.PHONY: data
data: DATA ?= cifar10,cifar100,tiny_imagenet
data: $(VENV)/.with-suite $(VENV)/.with-vision ## download image data ahead of time, resumed where it stopped: DATA=cifar10,...
	$(PY) -m vision.prepare $(subst $(comma),$(space),$(DATA))

.PHONY: language-sweep
language-sweep: EXPERIMENT ?= fig3_best
language-sweep: METHODS ?= none,shrink_perturb,full_reset,fire
language-sweep: SEEDS ?= 1,2,3
language-sweep: plan $(VENV)/.with-suite $(VENV)/.with-language $(ray) ## continual pretraining of a small GPT; table and figure
	@$(call sweep,language/train.py,language)

.PHONY: dqn-sweep
dqn-sweep: EXPERIMENT ?= fig4a_catch
dqn-sweep: METHODS ?= none,shrink_perturb,full_reset,plasticity_injection,fire
dqn-sweep: SEEDS ?= 1,2,3
dqn-sweep: plan $(VENV)/.with-suite $(VENV)/.with-dqn $(ray) ## DQN on Atari with a midpoint reset; table and figure
	@$(call sweep,rl/dqn/train.py,dqn)

.PHONY: sac-sweep
sac-sweep: EXPERIMENT ?= fig4b_hopper
sac-sweep: METHODS ?= none,shrink_perturb,full_reset,plasticity_injection,fire
sac-sweep: SEEDS ?= 1,2,3
sac-sweep: plan $(VENV)/.with-suite $(VENV)/.with-sac $(meshes) $(ray) ## SAC with a midpoint reset; table and figure
	@$(call sweep,rl/sac/train.py,sac)

.PHONY: paper
paper: install-all $(VENV)/.with-ray ## every run of the paper, the most informative first: PLAN=1 prints the plan, BUDGET=30h limits the time
	$(PY) -m harness.campaign paper --root $(RUNS) --launcher ray $(if $(filter command%,$(origin JOBS)),--jobs $(JOBS)) \
		$(if $(PLAN),--plan) $(if $(BUDGET),--budget $(BUDGET)) $(OPTIONS)

.PHONY: status
status: $(VENV)/.with-suite ## list which runs are done, running, failed or missing
	$(PY) -m harness.status --root $(RUNS)

# ---------------------------------------------------------------------------------------------- analysis
.PHONY: figures
figures: $(VENV)/.with-suite ## draw Figures 2 to 5 and the probes from the runs in RUNS
	$(PY) -m analysis figures --root $(RUNS)

.PHONY: tables
tables: $(VENV)/.with-suite ## regenerate the figures and tables of the documents from analysis/results
	$(PY) -m analysis figures --root analysis/results --formats png
	$(PY) -m analysis tables --write

.PHONY: explore
explore: $(VENV)/.with-suite $(VENV)/.with-explore ## write one page to explore the runs in RUNS, and the committed results: explore.html
	$(PY) -m analysis explore --root $(RUNS)

.PHONY: notebooks
notebooks: $(VENV)/.with-suite $(VENV)/.with-notebooks ## execute the notebooks in place
	$(PY) -m analysis.notebooks

.PHONY: docs
docs: $(VENV)/.with-suite $(VENV)/.with-explore $(VENV)/.with-docs ## build the documentation site: build/site/index.html
	$(PY) -m sphinx -q -W --keep-going -j auto -c docs . build/site
	$(PY) -m analysis explore --root analysis/results --out build/site/explore.html
	@echo build/site/index.html

# ---------------------------------------------------------------------------------------------- benchmarks
.PHONY: bench-convergence bench-methods bench-table1 bench-fire bench-vision bench-language bench-dqn bench-sac
bench-convergence: $(VENV)/.with-suite ## DfI after each number of iterations, by kind of matrix and by model
	$(PY) -m benchmarks.convergence
bench-methods: $(VENV)/.with-suite ## time and memory of each method's boundary and training step
	$(PY) -m benchmarks.method_costs
bench-table1: $(VENV)/.with-suite $(VENV)/.with-vision ## what each method costs in the paper's Table 1 setting
	$(PY) -m benchmarks.method_costs --table-1
bench-fire: $(VENV)/.with-suite ## solvers against a plain reading of the published algorithm
	$(PY) -m benchmarks.bench_fire
bench-vision: $(VENV)/.with-suite $(VENV)/.with-vision ## our loop against the usual image-classification loop
	$(PY) -m benchmarks.bench_vision
bench-language: $(VENV)/.with-suite $(VENV)/.with-language ## tokens per second against a plain loop
	$(PY) -m benchmarks.bench_language
bench-dqn: $(VENV)/.with-suite $(VENV)/.with-dqn $(VENV)/.with-reference ## steps and updates per second against the usual stack
	$(PY) -m benchmarks.bench_dqn
bench-sac: $(VENV)/.with-suite $(VENV)/.with-sac ## updates per second against a plain SAC loop
	$(PY) -m benchmarks.bench_sac

# ---------------------------------------------------------------------------------------------- quality
TEST_EXTRAS := suite,vision,language,language-data,dqn,sac,humanoid,explore,notebooks,reference,dev

.PHONY: test
test: $(VENV)/.with-$(TEST_EXTRAS) lint ## lint, format check, type check, tests
	$(PY) -m pytest -q -n 2 --dist loadfile

.PHONY: test-slow
test-slow: $(VENV)/.with-$(TEST_EXTRAS) ## the long checks
	$(PY) -m pytest -q -m slow

.PHONY: lint
lint: $(VENV)/.with-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy fire_core

.PHONY: format
format: $(VENV)/.with-dev ## format the code, sort imports
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

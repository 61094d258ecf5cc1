# RLHF from the command line. `make` lists the targets; README.md explains them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PROFILE ?= demo
ARGS ?=
SWEEP ?=
JOB ?= jobs/$(PROFILE)/$@.yaml
PYTHON ?=
PIP_ARGS ?=
PORT ?= 5000
CLUSTER ?= cluster.yaml
NAME ?=

VENV := .venv
PY := $(VENV)/bin/python
PINS := pyproject.toml constraints.txt
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
# Whether uv installs: where it is, unless pip is told of an index or a folder of its own, which uv does not read.
UV = [ -z "$(PIP_ARGS)" ] && command -v uv >/dev/null && ! $(PY) -m pip config list | grep -qE "index-url|find-links"

# Makes the environment if there is none that works, then installs; $(1) is what to install.
# The stamp is written last, so that an install that failed is tried again.
define install
	@if ! $(PY) -c "$(SUPPORTED)" 2>/dev/null; then \
	  for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3); do \
	    if $$python -c "$(SUPPORTED)" 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "error: Python 3.11 to 3.14 is needed; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." >&2; \
	    echo "       Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; \
	  fi; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo "installing $(1) into $(VENV) (the first time takes a minute or two)"
	@if $(UV); then uv pip install --python $(PY) -c constraints.txt -e "$(1)"; \
	else $(PY) -m pip install --progress-bar off --root-user-action ignore --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e "$(1)" \
	  | awk '/^ *Downloading .* MB\)/ { print "  downloading " $$2 " " $$3 " " $$4; fflush() } /^Installing collected/ { print "  unpacking"; fflush() }'; fi
	@touch $(VENV)/.core $@
endef

$(VENV)/.core: $(PINS)
	$(call install,.)
$(VENV)/.dev: $(PINS)
	$(call install,.[dev])
$(VENV)/.notebook: $(PINS)
	$(call install,.[notebook])
$(VENV)/.cloud: $(PINS)
	$(call install,.[cloud])

.PHONY: help setup rlhf sft rm dpo kto ppo evaluate generate collect chat score serve export sweep iterate validate plan doctor test test-all bench chaos museum gpu \
        lint format report notebook ui up status dashboard down jobs logs stop

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PROFILE=demo|own|llama3-8b|llama3-8b-qlora|llama3-70b-qlora|llama3-70b picks jobs/PROFILE, JOB=file.yaml names one job, ARGS=\"section.key=value ...\" overrides."
	@echo "  For example: make sft PROFILE=llama3-8b ARGS=\"trainer.learning_rate=1e-4 data.train=my.jsonl data.eval=null data.eval_fraction=0.1\""
	@echo "  Whatever fails, make ends with status 2; $(PY) -m pipeline has statuses that tell failures apart (README.md)."
	@echo "  With RAY_ADDRESS=http://HEAD:8265 the stages are submitted to that cluster; cluster.yaml says how to get one."

setup: $(VENV)/.core ## make .venv and install, once; again only if pyproject.toml or constraints.txt changed
	@:

rlhf: setup ## the whole pipeline: sft, rm, ppo and evaluate of one profile
	@$(PY) -m pipeline rlhf jobs/$(PROFILE) $(ARGS)

sft: setup ## supervised fine-tuning on demonstrations
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

rm: setup ## a reward model from preference pairs
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

dpo: setup ## direct preference optimisation, from the sft adapter
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

kto: setup ## from single completions with a thumb up or down, from the sft adapter
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

ppo: setup ## PPO against the reward model, from the sft adapter
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

evaluate: setup ## compare a policy with a baseline, evaluate a reward model, on held-out rows
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

generate: setup ## completions of a file of prompts: make generate ARGS="data.train=prompts.jsonl"
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

collect: setup ## rows to train on from a policy's own completions, scored: pairs for dpo, the best of n for sft
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

chat: JOB = jobs/$(PROFILE)/generate.yaml
chat: setup ## talk with the policy in the terminal, each completion with its score
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

score: setup ## the reward model's scores of a file of pairs or completions
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

serve: setup ## policies and reward models behind an OpenAI endpoint, on http://127.0.0.1:8000
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

export: setup ## policy and reward for others: merged models or adapters, in a folder or on the hub (docs/hub.md)
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

sweep: JOB = jobs/$(PROFILE)/sft.yaml
sweep: setup ## trials of a job side by side: make sweep JOB=jobs/demo/rm.yaml SWEEP="trainer.learning_rate=1e-3,2e-3 lora.r=8,16"
	@$(PY) -m pipeline $@ $(JOB) $(foreach values,$(SWEEP),'$(values)') $(ARGS)

iterate: setup ## rounds of collect, dpo and evaluate on the policy's own completions, as one run that goes on where it was killed
	@$(PY) -m pipeline $@ $(JOB) $(ARGS)

validate: setup ## read a job's data and report on it, without training: make validate JOB=jobs/demo/sft.yaml
	@$(PY) -m pipeline $@ $(if $(filter jobs/$(PROFILE)/$@.yaml,$(JOB)),jobs/$(PROFILE)/sft.yaml,$(JOB)) $(ARGS)

plan: setup ## memory, time and money that a job will need: make plan PROFILE=llama3-8b
	@$(PY) -m pipeline $@ $(if $(filter jobs/$(PROFILE)/$@.yaml,$(JOB)),jobs/$(PROFILE)/ppo.yaml,$(JOB)) $(ARGS)

doctor: setup ## one rollout and one minibatch of a ppo job, examined from all sides
	@$(PY) -m pipeline $@ $(if $(filter jobs/$(PROFILE)/$@.yaml,$(JOB)),jobs/$(PROFILE)/ppo.yaml,$(JOB)) $(ARGS)

test: $(VENV)/.dev ## the tests that take seconds each
	@$(PY) -m pytest -m "not slow" -n 2 --dist loadfile --durations=15 $(ARGS)

test-all: $(VENV)/.dev .bench/trl ## every test
	@$(PY) -m pytest $(ARGS)

# TRL 1.12 is the last with a PPOTrainer. It has a folder of its own: only the process that measures it sees it.
.bench/trl: $(VENV)/.core
	@rm -rf $@
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@ trl==1.12.0
	@touch $@

bench: setup .bench/trl ## what we cost beside TRL, measured here: make bench ARGS="ppo --size demo"
	@$(PY) tests/bench $(ARGS)

chaos: setup ## kill workers, drivers and nodes, spoil checkpoints; every run must end with the same numbers: ARGS="--seed 7"
	@$(PY) tests/chaos $(ARGS)

museum: $(VENV)/.dev ## plant 70 known bugs, one at a time, and report which ones the self-checks name
	@$(PY) tests/museum $(ARGS)

# Without `setup`: a machine with a GPU often has an environment with torch, and needs no other.
gpu: ## what one GPU shows of this, in 25 minutes: docs/gpu.md; PYTHON=python3 for one with torch, transformers and peft; SMALL=1: on a CPU
	@PYTHONPATH=. $(or $(PYTHON),$(if $(wildcard $(PY)),$(PY),python3)) -m tests.gpu $(ARGS)

lint: $(VENV)/.dev ## style, format and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: $(VENV)/.dev ## rewrite the sources in the format that `make lint` asks for
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

report: setup ## a page about a run, or several: make report RUN="runs/NAME ..."
	@$(PY) -m pipeline $@ $(RUN)

notebook: $(VENV)/.notebook ## run notebooks/*.ipynb from top to bottom, and say how to open them
	@$(PY) notebooks/execute.py $(NOTEBOOK)
	@echo "To change them, open them in an editor with the kernel $(PY), or in a JupyterLab of your own:"
	@echo "  $(PY) -m ipykernel install --user --name rlhf; pipx run --spec jupyterlab jupyter-lab notebooks"

ui: setup ## MLflow's pages on http://127.0.0.1:5000 (PORT=...): of the local runs, with RAY_ADDRESS of the cluster's
ifdef RAY_ADDRESS
	@echo "http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning (user admin, password: the token in ~/.ray/auth_token)"
	@PATH=$(abspath $(VENV))/bin:$$PATH ray dashboard $(CLUSTER) --port $(PORT) --remote-port 5000
else
	@mkdir -p runs
	@echo "http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning"
	@$(PY) -m mlflow ui --backend-store-uri sqlite:///runs/mlflow.db --host 127.0.0.1 --port $(PORT)
endif

# ---------------------------------------------------------------- a cluster: cluster.yaml says what it is and costs
up: $(VENV)/.cloud ## start a cluster, or bring it up to date: CLUSTER=cluster.yaml
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER) $(ARGS)

status: $(VENV)/.cloud ## nodes, what waits for resources, and jobs of the cluster
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER)

dashboard: $(VENV)/.cloud ## the tunnel to the cluster's dashboard and jobs, at http://127.0.0.1:8265, while it runs
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER)

down: $(VENV)/.cloud ## end every node of the cluster
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER) $(ARGS)

jobs: setup ## list the jobs of the cluster at RAY_ADDRESS
	@$(PY) -m pipeline.cloud.submit jobs

logs: setup ## follow a job of that cluster: NAME=... (default: the newest)
	@$(PY) -m pipeline.cloud.submit logs $(NAME)

stop: setup ## stop a job of that cluster: NAME=...
	@$(PY) -m pipeline.cloud.submit stop $(NAME)

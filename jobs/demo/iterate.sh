#!/usr/bin/env bash
# Online DPO. In each round the newest policy samples completions, the reward model picks the best and the worst of each
# prompt, dpo trains on these pairs, and evaluate compares the result with the policy before the round.
#   bash jobs/demo/iterate.sh                                  (needs `make sft rm` first)
#   NAME=longer ROUNDS=5 bash jobs/demo/iterate.sh trainer.beta=0.2        arguments are keys of dpo
#   JOBS=jobs/own PROMPTS=1000 bash jobs/demo/iterate.sh                   the jobs of another folder
# Each step is an ordinary run with a name. So the same command continues: it skips the runs that are finished, and
# resumes the run that was cut short.
set -euo pipefail
PATH=$PWD/.venv/bin:$PATH
JOBS=${JOBS:-$(dirname "$0")} RUNS=${RUNS:-runs} NAME=${NAME:-loop} ROUNDS=${ROUNDS:-3} SEED=${SEED:-1} policy=

step() { # runs the job of this name with some keys
  python -m pipeline "$1" "$JOBS/$1.yaml" run.storage_path="$RUNS" run.name="$NAME-$round-$1" "${@:2}"
}
result() { # prints what a step's result.json has: a format with keys in braces
  python -c 'import json, sys; print(sys.argv[2].format(**json.load(open(sys.argv[1]))))' \
    "$RUNS/$NAME-$round-$1/result.json" "$2"
}

for round in $(seq "$ROUNDS"); do
  seed=trainer.seed=$((SEED + 1000 * (round - 1))) # other samples in each round
  # The first round begins with the policy of collect.yaml. With PROMPTS, each round draws that many other prompts.
  step collect $seed ${policy:+policy=$policy} \
    ${PROMPTS:+trainer.num_prompts=$PROMPTS trainer.skip_prompts=$((PROMPTS * (round - 1)))}
  policy=$(result collect '{inputs[policy]}') # with the number of its version, because an alias may move
  # The alias `candidate` is for a policy that is not evaluated yet. The gate of evaluate moves `champion`.
  step dpo $seed policy=$policy data.train="$RUNS/$NAME-$round-collect/rows.jsonl" mlflow.alias=candidate gate={} "$@"
  trained=$(result dpo 'models:/{registered_model}/{version}')
  step evaluate policy=$trained baseline=$policy data.pairs=null mlflow.alias=champion 'gate={eval_win_rate: ">= 0.5"}'
  if [ "$(result evaluate '{alias}')" != champion ]; then
    echo "round $round failed its gate; the policy is still $policy" >&2
    exit 1
  fi
  policy=$trained
done
echo "the policy after $ROUNDS rounds: $policy"

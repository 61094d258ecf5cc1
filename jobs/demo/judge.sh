#!/usr/bin/env bash
# Train a reward model on the labels of a judge. sft trains a policy that says whether a completion is right, `serve` answers
# as that judge, and evaluate measures it. collect labels completions with it, rm learns from the labels, and ppo from rm.
#   bash jobs/demo/judge.sh                                    (needs `make sft` first)
# Each step is an ordinary run with a name. So the same command continues: it skips the runs that are finished.
set -euo pipefail
PATH=$PWD/.venv/bin:$PATH
JOBS=$(dirname "$0") RUNS=${RUNS:-runs}
judge="reward={judge: $JOBS/judges/right.yaml}"

step() { # runs the job of this name with some keys
  python -m pipeline "$1" "$JOBS/$1.yaml" run.storage_path="$RUNS" run.name="judge-$1" "${@:2}"
}

step sft data.transform=python:pipeline.demo:judge_examples data.train="$JOBS/data/preferences.jsonl" \
  data.eval="$JOBS/data/preferences_eval.jsonl" trainer.num_train_epochs=1 mlflow.registered_model=demo-judge gate={}
python -m pipeline serve "$JOBS/serve.yaml" run.storage_path="$RUNS" serve.port=8123 \
  'serve.policies={judge: models:/demo-judge@champion}' serve.rewards={} &
server=$!
trap 'kill $server; wait $server || true' EXIT
until curl -sf http://127.0.0.1:8123/v1/models >/dev/null; do
  kill -0 $server # ends the script if the server has ended
  sleep 0.5
done
step evaluate "$judge" policy=null baseline=null judge=null data.eval=null
step collect "$judge" trainer.num_prompts=150
step rm data.train="$RUNS/judge-collect/rows.jsonl" data.eval="$JOBS/data/preferences_eval.jsonl" \
  mlflow.registered_model=demo-distilled gate={}
step ppo reward=models:/demo-distilled@champion mlflow.registered_model=demo-distilled-ppo gate={}

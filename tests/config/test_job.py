"""Job files: each mistake is answered by one clear message and exit status 2, before heavy imports."""

import dataclasses
import json
import re

import pytest

from pipeline.__main__ import main
from pipeline.config import load_job, rules, schema
from pipeline.config.schema_of import REFUSED
from pipeline.config.stages import STAGE
from pipeline.errors import InputError

GOOD = {
    "sft": "stage: sft\nmodel: {name_or_path: m, dtype: float32}\ndata: {train: a.jsonl}\n",
    "rm": "stage: rm\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\n",
    "dpo": "stage: dpo\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\npolicy: models:/rlhf-sft@champion\n",
    "kto": "stage: kto\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\npolicy: models:/rlhf-sft@champion\n",
    "ppo": "stage: ppo\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\npolicy: base\nreward: models:/rlhf-rm/3\n",
    "evaluate": "stage: evaluate\nmodel: {name_or_path: m}\ndata: {eval: a.jsonl}\npolicy: runs/adapter\n",
    "generate": "stage: generate\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\npolicy: base\n",
    "collect": "stage: collect\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\npolicy: base\nreward: models:/rlhf-rm/3\n",
    "score": "stage: score\nmodel: {name_or_path: m}\ndata: {train: a.jsonl}\nreward: runs/adapter\n",
    "serve": "stage: serve\nmodel: {name_or_path: m}\nserve: {policies: {one: models:/one@champion}}\n",
    "export": "stage: export\nmodel: {name_or_path: m}\npolicy: runs/adapter\n",
}


@pytest.fixture
def job(tmp_path):
    """Writes a job file: the good one of a stage, or the given text."""

    def write(stage_or_text):
        path = tmp_path / "job.yaml"
        path.write_text(GOOD.get(stage_or_text, stage_or_text), encoding="utf-8")
        return str(path)

    return write


# (stage or text, overrides, what the message says)
BAD = [
    ("sft", ["trainer.learing_rate=1"], r"trainer\.learing_rate: unknown key; did you mean trainer\.learning_rate\?"),
    ("sft", ["model.learning_rate=1"], r"model\.learning_rate: unknown key; did you mean trainer\.learning_rate\?"),
    ("sft", ["trainer.qqqqqqq=1"], r"the keys of `trainer` are those of SFTConfig"),
    ("sft", ["trainr.learning_rate=1"], r"trainr: unknown section; did you mean trainer\?"),
    ("sft", ["model.dtype=bf16"], r"model\.dtype: found 'bf16', expected one of float32, bfloat16, float16; did you mean bfloat16"),
    ("sft", ["trainer.learning_rate=fast"], r"trainer\.learning_rate: found 'fast', expected a number"),
    ("sft", ["trainer.bf16=yes"], r"trainer\.bf16: found 'yes', expected true or false or null"),
    ("sft", ["lora.r=true"], r"lora\.r: found true, expected a whole number"),
    ("sft", ["run.name=2026"], r"run\.name: found 2026, expected text or null; put it in quotes"),
    ("sft", ["data.train=[1,2]"], r"data\.train: found \[1, 2\], expected text or a list of text"),
    ("sft", ["trainer.max_grad_norm=.inf"], r"trainer\.max_grad_norm: found inf, expected a finite number"),
    ("sft", ["scaling.num_workers=[1,2,3]"], r"scaling\.num_workers: found \[1, 2, 3\], expected a whole number or a list of 2"),
    ("sft", ["trainer=[1]"], r"trainer: found \[1\], expected a mapping"),
    ("sft", ["model={}"], r"model\.name_or_path: missing, expected text"),
    ("sft", ["trainer.learning_rate"], r"trainer\.learning_rate: expected section\.key=value"),
    ("sft", ["model.name_or_path.x=1"], r"model\.name_or_path is 'm', which has no keys"),
    ("sft", ["data.train=*.jsonl"], r"not valid YAML.*put the value in quotes"),
    ("stage: sft\nmodel: {name_or_path: m\n", [], r"job\.yaml:3:1: not valid YAML"),
    ("stage: sft\nstage: rm\n", [], r"job\.yaml:2: stage: repeated key, first on line 1"),
    ("stage: sft\nlora:\n  r: 8\n  r: 9\n", [], r"job\.yaml:4: lora\.r: repeated key, first on line 3"),
    ("stage: sft\ntrainer: {1: 2}\n", [], r"job\.yaml:2: trainer: a key is not text"),
    ("stage: sft\nmodel: !!python/object/apply:os.system [ls]\n", [], r"job\.yaml:2:8: not valid YAML"),
    ("- sft\n", [], r"found \['sft'\], expected sections"),
    ("", [], r"stage: missing, expected one of sft, rm, dpo, kto, ppo, evaluate"),
    ("stage: stf\n", [], r"stage: found 'stf', expected one of"),
    ("rm", [], r"this is a job for `rm`, not `sft`: use python -m pipeline rm"),
    ("dpo", ["policy=null"], r"policy: missing; `dpo` needs it"),
    ("ppo", ["reward=null"], r"reward: missing; `ppo` needs it: reward: models:/rlhf-rm@champion"),
    ("sft", ["reward=models:/rlhf-rm@champion"], r"reward: `sft` takes no reward"),
    ("ppo", ["policy=models:/rlhf-sft"], r"policy: found 'models:/rlhf-sft', expected models:/NAME@ALIAS"),
    ("ppo", ["reward=python:rewards.py"], r"reward: found 'python:rewards\.py', expected python:MODULE:FUNCTION"),
    ("ppo", ["reward=[{reward: a, wieght: 2}]"], r"reward\.0: found .*expected \{reward: NAME, weight: NUMBER\}"),
    ("ppo", ["reward=[models:/a@b, {reward: a, weight: high}]"], r"reward\.1: found .*expected"),
    ("ppo", ["reward=my_rewards:polite"], r"reward: found 'my_rewards:polite', expected python:my_rewards:polite for a Python function"),
    ("ppo", ["reward=[{reward: a.b:c, weight: 2}]"], r"reward\.0: found 'a\.b:c', expected python:a\.b:c for a Python function"),
    ("ppo", ["judge=my_rewards:polite"], r"judge: found 'my_rewards:polite', expected python:my_rewards:polite for a Python function"),
    ("ppo", ["trainer.max_steps=30"], r"max_steps: unknown key; .*trainer\.total_episodes = updates \* trainer\.batch_size"),
    ("ppo", ["policy=python:a:b"], r"policy: found 'python:a:b', expected an adapter"),
    ("sft", ["data.train=null"], r"data\.train: missing; `sft` needs rows"),
    ("evaluate", ["data.eval=null"], r"data\.eval: missing; `evaluate` needs prompts"),
    ("evaluate", ["data.train=a.jsonl"], r"data\.train: `evaluate` does not use this key \(.*put the prompts under data\.eval"),
    ("sft", ["data.eval=b.jsonl", "data.eval_fraction=0.1"], r"data\.eval_fraction: given together with data\.eval"),
    ("sft", ["data.eval_fraction=1"], r"data\.eval_fraction: found 1, expected 0 or more and below 1"),
    ("sft", ["trainer.eval_strategy=epoch"], r"trainer\.eval_strategy: there is nothing to evaluate on"),
    ("sft", ["data.batch_size=8", "trainer.gradient_accumulation_steps=2"], r"follows from data\.batch_size; keep only one"),
    ("sft", ["data.batch_size=12"], r"data\.batch_size: found 12, expected a multiple of 8.*set data\.batch_size=16"),
    ("sft", ["data.batch_size=8", "trainer.per_device_train_batch_size=2", "scaling.num_workers=[1,3]"], r"expected a multiple of 12.*set data\.batch_size=12"),
    ("sft", ["scaling.num_workers=[1,2]"], r"data\.batch_size: missing; with elastic scaling\.num_workers"),
    ("sft", ["scaling.num_workers=-1"], r"scaling\.num_workers: found -1, expected 0 \(in this process\), at least 1"),
    ("sft", ["scaling.num_workers=[3,2]", "data.batch_size=8"], r"scaling\.num_workers: found \[3, 2\]"),
    ("ppo", ["data.batch_size=8"], r"data\.batch_size: `ppo` does not use this key \(use trainer\.batch_size"),
    ("ppo", ["trainer.response_length=0"], r"trainer\.response_length: found 0, expected above 0"),
    ("sft", ["trainer.use_cpu=true", "scaling.use_gpu=true"], r"trainer\.use_cpu: given together with scaling\.use_gpu"),
    ("ppo", ["trainer.eval_steps=2"], r"trainer\.eval_steps: there is nothing to evaluate on: set data\.eval"),
    ("evaluate", ["data.train=null", "data.eval=a.jsonl", "trainer.num_ppo_epochs=2"], r"trainer\.num_ppo_epochs: unknown key"),
    ("sft", ["lora.target_modules=[lm_head]"], r"lora\.target_modules: found lm_head, to which TRL's trainers apply no adapter"),
    ("sft", ["lora.target_modules='.*(lm_head|q_proj)'"], r"lora\.target_modules: found lm_head"),
    ("sft", ["trainer.eval_steps=2", "trainer.eval_strategy=epoch", "data.eval=b.jsonl"], r"trainer\.eval_steps: found 2, which counts only with trainer\.eval_strategy=steps"),
    ("sft", ["trainer.max_grad_norm=1e-30"], r"trainer\.max_grad_norm: found 1e-30, expected 0 or between 1e-06"),
    ("sft", ["trainer.learning_rate=-1"], r"trainer\.learning_rate: found -1, expected above 0 and at most 100, for example 2e-05"),
    ("sft", ["model.chat_template=nowhere.jinja"], r"model\.chat_template: found 'nowhere\.jinja', expected an existing"),
    ("sft", ["lora.init_lora_weights=pissa"], r"rewrites base weights"),
    ("sft", ["model.fsdp=true", "model.load_in_4bit=true"], r"model\.fsdp: given together with model\.load_in_4bit"),
    ("dpo", ["model.fsdp=true", "lora.use_dora=true"], r"model\.fsdp: given together with lora\.use_dora"),
    ("ppo", ["model.fsdp=true", "rollout.engine=vllm", "rollout.num_workers=1"], r"rollout\.engine: found vllm together with model\.fsdp.* rollout\.engine=transformers"),
    ("sft", ["lora.bias=all"], r"lora\.bias: .*expected none"),
    ("sft", ["run.name=a/b"], r"run\.name: found 'a/b'"),
    ("sft", ["run.name=.."], r"run\.name: found '\.\.'"),
    ("sft", ["run.name=feedback"], r"run\.name: found 'feedback', which run\.storage_path uses for all runs"),
    ("sft", ["mlflow.registered_model=a/b"], r"mlflow\.registered_model: found 'a/b'"),
    ("sft", ["mlflow.alias=latest"], r"mlflow\.alias: `latest` is reserved"),
    ("sft", ["mlflow.tracking_uri=file:///x"], r"mlflow\.tracking_uri: MLflow no longer writes"),
    ("sft", ["gate.eval_loss=0.5"], r"gate\.eval_loss: found '0\.5', expected a comparison"),
    ("sft", ["trainer.output_dir=x"], r"trainer\.output_dir: is set by the pipeline: checkpoints go to"),
    ("sft", ["trainer.max_length=512"], r"use data\.max_length"),
    ("rm", ["lora.task_type=CAUSAL_LM", "stage=sft"], r"lora\.task_type: is set by the pipeline"),
    ("sft", ["scaling.trainer_resources={}"], r"scaling\.trainer_resources: is set by the pipeline"),
    ("sft", ["trainer.seed=-1"], r"command line: trainer\.seed: found -1, expected between 0 and 4294967295, for example 42"),
    ("sft", ["trainer.seed=9223372036854775808"], r"trainer\.seed: found 9\.22\d*e\+18, expected a whole number"),
    ("sft", [f"trainer.seed={'9' * 5000}"], r"trainer\.seed: found inf, expected a finite number"),
    ("sft", ["trainer.adam_beta1=1"], r"trainer\.adam_beta1: found 1, expected 0 or more and below 1, for example 0\.9"),
    ("sft", ["trainer.logging_steps=0"], r"trainer\.logging_steps: found 0, expected above 0 and below 1 or a whole number between 1 and"),
    ("sft", ["trainer.max_steps=0"], r"trainer\.max_steps: found 0, expected -1 or between 1 and"),
    ("sft", ["trainer.warmup_steps=1.5"], r"trainer\.warmup_steps: found 1\.5, expected 0 or above 0 and below 1 or a whole number"),
    ("sft", ["trainer.loss_type=huber"], r"trainer\.loss_type: found 'huber', expected one of nll, dft, chunked_nll"),
    ("sft", ["trainer.fp16=true", "trainer.bf16=false"], r"trainer\.fp16: needs a GPU"),
    ("sft", ["trainer.save_strategy=best"], r"trainer\.save_strategy: found best, .*run\.keep=best"),
    ("sft", ["run.keep=best"], r"run\.keep: found 'best', and there are no held-out rows .*set data\.eval or data\.eval_fraction, or run\.keep=last"),
    ("ppo", ["run.stop_if.eval_kl='> 20'"], r"run\.stop_if: found \{'eval_kl': '> 20'\}, and there are no held-out rows .*run\.stop_if=\{\}"),
    ("ppo", ["run.stop_if.eval_kl=20", "data.eval_fraction=0.1", "trainer.eval_steps=1"], r"run\.stop_if: found \{'eval_kl': 20\}, expected a mapping of text"),
    ("ppo", ["run.stop_if.eval_klx='> 20'", "data.eval_fraction=0.1", "trainer.eval_steps=1"], r"run\.stop_if\.eval_klx: `ppo` has no such metric; did you mean eval_kl\?"),
    ("ppo", ["run.stop_if.eval_judge=< 0.5", "data.eval_fraction=0.1", "trainer.eval_steps=1"], r"run\.stop_if\.eval_judge: eval_judge needs a judge, and there is none"),
    ("ppo", ["run.early_stopping_patience=2"], r"run\.early_stopping_patience: found 2, and there are no held-out rows .*run\.early_stopping_patience=null"),
    ("sft", ["run.keep=best", "data.eval_fraction=0.1"], r"run\.keep: found 'best', but the job evaluates only after training: set trainer\.eval_strategy=epoch, or run\.keep=last"),
    ("ppo", ["run.keep=best", "data.eval_fraction=0.1"], r"run\.keep: .*set trainer\.eval_steps=10"),
    ("sft", ["run.keep=best", "data.eval_fraction=0.1", "trainer.eval_strategy=epoch", "run.metric_for_best_model=eval_mean_token_acuracy"], r"run\.metric_for_best_model: found 'eval_mean_token_acuracy', which no evaluation of `sft` has; expected one of eval_loss, eval_entropy, .*did you mean eval_mean_token_accuracy\?"),
    ("sft", ["run.keep=best", "data.eval_fraction=0.1", "trainer.eval_strategy=epoch", "run.metric_for_best_model=eval_entropy"], r"run\.metric_for_best_model: is a larger eval_entropy better\? Set run\.greater_is_better=true or false"),
    ("sft", ["run.keep=best", "data.eval_fraction=0.1", "trainer.eval_strategy=epoch", "run.metric_for_best_model=eval_runtime"], r"run\.metric_for_best_model: found 'eval_runtime'"),
    ("ppo", ["run.keep=best", "data.eval_fraction=0.1", "trainer.eval_steps=1", "run.metric_for_best_model=eval_judge"], r"run\.metric_for_best_model: eval_judge needs a judge, and there is none"),
    ("sft", ["trainer.eval_on_start=true"], r"trainer\.eval_on_start: there is nothing to evaluate on"),
    ("dpo", ["trainer.loss_type=[]"], r"trainer\.loss_type: found an empty list"),
    ("dpo", ["trainer.loss_type=[exo_pair]"], r"trainer\.label_smoothing: exo_pair needs it above 0"),
    ("dpo", ["trainer.loss_type=sigmoidal"], r"trainer\.loss_type: found .*'sigmoidal'.*, expected a list of one of sigmoid, .*did you mean sigmoid\?"),
    ("dpo", ["trainer.loss_type=true"], r"trainer\.loss_type: found true, expected a list of one of"),
    ("dpo", ["trainer.f_divergence_type=forward_kl", "trainer.loss_type=[apo_zero]"], r"'forward_kl', which has no meaning for apo_zero"),
    ("kto", ["trainer.per_device_train_batch_size=1"], r"per_device_train_batch_size: found 1: .*KL term; expected 2 or more, or trainer\.loss_type=apo_zero_unpaired"),
    ("kto", ["trainer.precompute_ref_log_probs=true"], r"precompute_ref_log_probs: each epoch pairs different rows"),
    ("kto", ["trainer.sync_ref_model=true"], r"trainer\.sync_ref_model: the reference is the frozen sft adapter"),
    ("ppo", ["trainer.temperature=1e-40"], r"trainer\.temperature: found 1e-40, expected 0\.000001 or more"),
    ("ppo", ["scaling.num_workers=65"], r"trainer\.batch_size: fewer prompts for an update than workers; expected at least trainer\.batch_size=65"),
    ("ppo", ["reward=[{reward: models:/a@b, weight: .nan}]"], r"reward\.0\.weight: found nan"),
    ("sft", ["scaling.num_workers=[1,10000]", "data.batch_size=1048576"], r"no data\.batch_size is divisible by .* on any of 1 to 10000 workers"),
    ("sft", ["lora.r=0"], r"lora\.r: found 0, expected between 1 and 8192, for example 8"),
    ("sft", ["lora.target_modules=[]"], r"lora\.target_modules: found an empty list, expected layers to adapt"),
    ("sft", ["lora.target_modules='('"], r"lora\.target_modules: found '\(', which is no pattern"),
    ("sft", ["lora.rank_pattern={q_proj: 0}"], r"lora\.rank_pattern: found 0 for 'q_proj', expected a whole number between 1"),
    ("sft", ["lora.rank_pattern=null"], r"lora\.rank_pattern: found null, expected a mapping"),
    ("sft", ["scaling.resources_per_worker={CPU: two}"], r"scaling\.resources_per_worker\.CPU: found 'two', expected a number"),
    ("sft", ["serve.port=1"], r"serve: `sft` does not use this key \(only `serve` answers requests"),
    ("score", ["trainer.temperature=0"], r"trainer\.temperature: unknown key"),
    ("sft", ["scaling.label_selector={a: 'in(b, c)'}"], r"scaling\.label_selector\.a: found 'in\(b, c\)', expected in\(b,c\)"),
    ("score", ["scaling.label_selector=[{a: b}]"], r"scaling\.label_selector: found a list, expected one mapping, for all actors"),
    ("collect", ["trainer.num_generations=1"], r"trainer\.num_generations: found 1: a pair needs two completions"),
    ("collect", ["trainer.temperature=0"], r"trainer\.temperature: found 0, so all completions of a prompt are the same"),
    ("collect", ["trainer.select=best", "trainer.min_margin=1"], r"trainer\.min_margin: trainer\.select=best makes no pairs"),
    ("collect", ["trainer.skip_prompts=4"], r"trainer\.skip_prompts: needs trainer\.num_prompts"),
    ("export", ["model.load_in_4bit=true"], r"model\.load_in_4bit: `export` does not use this key \(an adapter is merged into the unquantized base"),
    ("export", ["policy=null"], r"policy: missing; `export` needs it, or a reward"),
    ("export", ["policy=base"], r"policy: found 'base', expected an adapter"),
    ("export", ["reward=python:m:f"], r"reward: found 'python:m:f', expected one reward adapter"),
    ("export", ["run.storage_path=memory://runs"], r"run\.storage_path: 'memory://runs' is a bucket"),
    ("export", ["trainer.push_to_hub=true"], r"trainer\.push_to_hub: needs trainer\.hub_model_id=OWNER/NAME"),
    ("export", ["trainer.hub_model_id=mine"], r"trainer\.hub_model_id: found 'mine', expected OWNER/NAME"),
    ("export", ["trainer.hub_model_id=o/mine", "reward=models:/rlhf-rm@champion"], r"one model; set reward=null or policy=null"),
    ("sft", ["model.revision=' '"], r"model\.revision: found empty text, expected a value; remove the key, or use null"),
    ("sft", ["gate.eval_los=<= 1"], r"gate\.eval_los: `sft` has no such metric; did you mean eval_loss\?"),
    ("rm", ["gate.eval_rewards/accuracies=>= 1", "stage=sft"], r"gate\.eval_rewards/accuracies: `sft` has no such metric"),
    ("sft", ["gate={eval_loss: [1]}"], r"gate\.eval_loss: found \[1\], expected a comparison"),
    ("sft", ["gate=5"], r"gate: found 5, expected a mapping"),
    # the command line
    ("sft", ["lora={r: 8, r: 16}"], r"r: repeated key, first on line 1; keep one of them in 'lora="),
    ("ppo", ["trainer.num_generations=3"], r"trainer\.batch_size: found 64, expected a multiple of num_generations \(3\)"),
    # rollout workers
    ("generate", ["rollout.num_workers=1"], r"rollout\.num_workers: `generate` does not use this key \(only `ppo` learns"),
    ("ppo", ["rollout.engine=sglang"], r"rollout\.engine: found 'sglang', expected one of transformers, vllm"),
    ("ppo", ["rollout.staleness=1"], r"rollout\.staleness: found 1, expected 0 without rollout workers: .*rollout\.num_workers=1"),
    ("ppo", ["rollout.num_workers=[2,1]"], r"rollout\.num_workers: found \[2, 1\], expected 0 to 10000, or \[min, max\]"),
    ("ppo", ["rollout.tensor_parallel_size=2"], r"rollout\.tensor_parallel_size: found 2, expected 1 unless .*rollout\.use_gpu=true"),
    # files
    ("stage: sft\n" + "#" * 200_000, [], r"found 200,011 characters, expected a job file"),
    ("stage: sft\nmodel:\n\tname_or_path: m\n", [], r":3:1: not valid YAML"),
    ("stage: sft\n---\nstage: rm\n", [], r":2:1: not valid YAML: but found another document"),
    ("stage: sft\ndata: {batch_size: !!int ''}\n", [], r"job\.yaml: not valid YAML: a tag"),
    ("sft", ["trainer.gradient_checkpointing_kwargs=text"], r"gradient_checkpointing_kwargs: found 'text', expected a mapping or null"),
    ("stage: sft\ndata: &a {train: *a}\n", [], r"job\.yaml: not valid YAML: a tag .* or an alias"),
    ("~\n", [], r"found null, expected sections"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    BAD,
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_by_a_message(job, capsys, text, overrides, message):
    stage = text if text in GOOD and text != "rm" else "sft"
    assert main([stage, job(text), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    assert re.search(message, printed.err), printed.err


def test_missing_file_and_folder(tmp_path, capsys):
    assert main(["sft", str(tmp_path / "no.yaml")]) == 2
    assert "no such job file" in capsys.readouterr().err
    assert main(["sft", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "abcdefghijklmnopqrstuvwxyz",
        "AKIA" + "ABCDEFGHIJKLMNOP",
        "ghp_" + "a1" * 18,
        "http://user:" + "hunter2hunter2@host:5000",
    ],
)
@pytest.mark.parametrize("place", ["file", "value", "key", "unparsable"])
def test_a_secret_is_refused_and_never_printed(job, capsys, secret, place):
    text = GOOD["sft"] + (f"mlflow: {{tracking_uri: '{secret}'}}\n" if place == "file" else "")
    override = {
        "file": [],
        "value": [f"run.name={secret}"],
        "key": [f"{secret}=1"],
        "unparsable": [f"data.train=*{secret}"],
    }
    assert main(["sft", job(text), *override[place]]) == 2
    printed = capsys.readouterr()
    assert secret not in printed.out + printed.err
    assert "looks like a secret" in printed.err and "HF_TOKEN" in printed.err


def test_a_broken_file_is_not_quoted_in_the_message(job, capsys):
    secret = "hf_" + "abcdefghijklmnopqrstuvwxyz"
    assert main(["sft", job(f"stage: sft\nmodel: [{secret}, *x y\n")]) == 2
    assert secret not in capsys.readouterr().err


def test_yaml_scalars_mean_what_they_look_like(job):
    text = GOOD["sft"] + "trainer: {learning_rate: 1e-4, eval_strategy: no, num_train_epochs: 2, seed: 007}\n"
    with pytest.raises(InputError, match=r"trainer\.seed: found 7\.0"):  # no octal numbers by accident
        load_job(job(text), [])
    made = load_job(job(text), ["trainer.seed=7", "model.revision='1234567'", "run.name=2026-11-20"])
    assert made.trainer == {"learning_rate": 1e-4, "eval_strategy": "no", "num_train_epochs": 2, "seed": 7}
    assert (made.model.revision, made.run.name) == ("1234567", "2026-11-20")


def test_overrides_replace_add_and_remove(job):
    made = load_job(
        job("ppo"),
        [
            "data.train=[a.jsonl,s3://b/c.jsonl]",
            "lora={r: 4, target_modules: all-linear}",
            "lora.lora_alpha=8",
            "data.eval=d.jsonl",
            "gate.eval_reward=>= 0.5",
            "gate.eval_kl='<= 10'",
            "reward=[models:/rm@champion, {reward: python:a.b:c, weight: 2}]",
            "trainer.learning_rate=1e-5",
            "scaling.num_workers=[1,2]",
        ],
        "ppo",
    )
    assert made.data.train == ["a.jsonl", "s3://b/c.jsonl"]
    assert made.lora == {"r": 4, "target_modules": "all-linear", "lora_alpha": 8}
    assert made.gate == {"eval_reward": ">= 0.5", "eval_kl": "<= 10"}
    assert made.rewards == [("models:/rm@champion", 1.0), ("python:a.b:c", 2.0)]
    assert made.workers == (1, 2)
    assert load_job(job("ppo"), ["gate.x=>1", "gate.x=null"]).gate == {}


def test_a_job_is_plain_data(job):
    made = load_job(job("ppo"), ["scaling.num_workers=[1,2]"])
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()
    assert made.to_dict()["data"]["on_error"] == "raise"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.stage = "sft"


def test_refused_keys_exist():
    known = set().union(*(schema.keys(STAGE[stage].trainer) for stage in ("sft", "rm", "dpo")))
    assert set(REFUSED["trainer"]) <= known
    assert set(REFUSED["lora"]) <= set(schema.keys("peft.tuners.lora.config.LoraConfig"))
    assert set(REFUSED["scaling"]) <= set(schema.keys("ray.train.v2.api.config.ScalingConfig"))


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        ([], False),
        (["data.train=mine.jsonl"], True),
        (["data.train=[mine.jsonl]", "trainer.seed=2"], True),
        (["data.train=mine.jsonl", "data.eval=my_eval.jsonl"], False),
        (["data.train=mine.jsonl", "data.eval=null", "data.eval_fraction=0.1"], False),
        (["data.eval=my_eval.jsonl"], False),
    ],
)
def test_rows_of_the_command_line_that_are_evaluated_on_the_job_files_rows(overrides, warned, in_root):
    made = load_job("jobs/demo/sft.yaml", ["gate={}", *overrides], "sft")
    said = list(rules.warnings(made))
    assert len(said) == warned
    for line in said:
        assert "'jobs/demo/data/demonstrations_eval.jsonl'" in line
        assert line.endswith("set data.eval=null data.eval_fraction=0.1")
    assert "overridden" not in made.to_dict()


def test_a_gate_that_holds_nothing_back(in_root):
    held = load_job("jobs/demo/sft.yaml", ["mlflow.registered_model=null"], "sft")
    assert [line.partition(":")[0] for line in rules.warnings(held)] == ["gate"]
    open_gate = load_job("jobs/demo/sft.yaml", ["mlflow.registered_model=null", "gate={}"], "sft")
    assert not list(rules.warnings(open_gate))


# ---------------------------------------------------------------- the command line
def test_help_and_usage(capsys):
    for arguments, status, text in ((["--help"], 0, "examples:"), ([], 2, "VERB")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status and text in "".join(capsys.readouterr())


def test_exit_statuses(job, capsys, monkeypatch):
    from pipeline import __main__

    class Wrapped(Exception):  # the shape of ray.exceptions.RayTaskError and of ray.train.WorkerGroupError
        def __init__(self, cause=None, failures=None):
            self.cause, self.worker_failures = cause, failures or {}

    def outcome(error):
        def run(*_):
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(__main__, "dispatch", run)
        return main(["sft", "x.yaml"]), capsys.readouterr().err

    assert outcome(None) == (0, "")
    assert outcome(InputError("no")) == (2, "error: no\n")
    assert outcome(Wrapped(cause=InputError("row 3"))) == (2, "error: row 3\n")
    assert outcome(Wrapped(failures={1: Wrapped(cause=InputError("deep"))})) == (2, "error: deep\n")
    status, printed = outcome(ValueError("boom"))
    assert status == 1 and "Traceback" in printed and "ValueError: boom" in printed
    status, printed = outcome(KeyboardInterrupt())
    assert status == 130 and printed.count("interrupted") == 1 and "Traceback" not in printed


def test_a_real_ray_error_is_unwrapped():
    from ray.exceptions import RayTaskError

    from pipeline.__main__ import input_error

    error = RayTaskError("read", "traceback", InputError("a.jsonl:3: bad"))
    assert str(input_error(error.as_instanceof_cause())) == "a.jsonl:3: bad"
    assert input_error(RayTaskError("read", "traceback", ValueError("x")).as_instanceof_cause()) is None

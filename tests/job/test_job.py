"""Tests job files and the command line: each mistake causes one clear message and exit status 2, before slow imports."""

import json
import os
import re

import pytest
from ray.exceptions import RayTaskError
from running import ROOT

from pipeline import __main__
from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.job import OPERATORS, load_job, parse_gate
from pipeline.job.job import Source, sources_of, sources_with_defaults, transforms_of
from pipeline.job.rules import find_warnings
from pipeline.job.stages import STAGE_SPECS

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
    "serve": "stage: serve\nmodel: {name_or_path: m}\nserve: {policies: {one: models:/one@champion, a-transform: base}}\n",
    "export": "stage: export\nmodel: {name_or_path: m}\npolicy: runs/adapter\n",
}


@pytest.fixture
def job(tmp_path):
    """Writes a job file: a valid one for a stage, or the given text."""

    def write(stage_or_text):
        path = tmp_path / "job.yaml"
        path.write_text(GOOD.get(stage_or_text, stage_or_text), encoding="utf-8")
        return str(path)

    return write


# (stage or text, overrides, expected message)
BAD = [
    ("sft", ["trainer.learing_rate=1"], r"trainer\.learing_rate: unknown key; did you mean trainer\.learning_rate\?"),
    ("sft", ["trainr.learning_rate=1"], r"trainr: unknown section; did you mean trainer\?"),
    ("sft", ["model.dtype=bf16"], r"model\.dtype: found 'bf16', expected one of float32, bfloat16, float16; did you mean bfloat16"),
    ("sft", ["run.name=2026"], r"run\.name: found 2026, expected text or null; put it in quotes"),
    ("sft", ["trainer.max_grad_norm=.inf"], r"trainer\.max_grad_norm: found inf, expected a finite number"),
    ("sft", ["model={}"], r"model\.name_or_path: missing, expected text"),
    ("sft", ["trainer.learning_rate"], r"trainer\.learning_rate: expected section\.key=value"),
    ("sft", ["model.name_or_path.x=1"], r"name_or_path is 'm', which has no keys"),
    ("sft", ["data.train=*.jsonl"], r"not valid YAML.*put the value in quotes"),
    ("stage: sft\nmodel: {name_or_path: m\n", [], r"job\.yaml:3:1: not valid YAML"),
    ("stage: sft\ntrainer: {1: 2}\n", [], r"job\.yaml:2: trainer: a key is not text"),
    ("stage: sft\nmodel: !!python/object/apply:os.system [ls]\n", [], r"job\.yaml:2:8: not valid YAML"),
    ("", [], r"stage: found null, expected one of sft, rm, dpo, kto, ppo, evaluate"),
    ("rm", [], r"this is a job for `rm`, not `sft`; use python -m pipeline rm"),
    ("dpo", ["policy=null"], r"policy: missing; `dpo` needs it"),
    ("sft", ["reward=models:/rlhf-rm@champion"], r"reward: `sft` takes no reward"),
    ("ppo", ["policy=models:/rlhf-sft"], r"policy: found 'models:/rlhf-sft', expected models:/NAME@ALIAS"),
    ("ppo", ["reward=python:rewards.py"], r"reward: found 'python:rewards\.py', expected python:MODULE:FUNCTION"),
    ("ppo", ["reward=[{reward: a, wieght: 2}]"], r"reward\.0: found .*expected \{reward: NAME, weight: NUMBER\}"),
    ("ppo", ["reward=my_rewards:polite"], r"reward: found 'my_rewards:polite', expected python:my_rewards:polite for a Python function"),
    ("ppo", ["trainer.max_steps=30"], r"max_steps: unknown key; .*trainer\.total_episodes = updates \* trainer\.batch_size"),
    ("ppo", ["policy=python:a:b"], r"policy: found 'python:a:b', expected an adapter"),
    ("sft", ["data.train=null"], r"data\.train: missing; `sft` needs rows"),
    ("evaluate", ["data.eval=null"], r"data\.eval: missing; `evaluate` needs prompts"),
    ("evaluate", ["data.train=a.jsonl"], r"data\.train: `evaluate` does not use this key \(.*set data\.eval to the prompts"),
    ("sft", ["trainer.eval_strategy=epoch"], r"trainer\.eval_strategy: no rows to evaluate on"),
    ("sft", ["data.batch_size=12"], r"data\.batch_size: found 12, expected a multiple of 8.*set data\.batch_size=16"),
    ("sft", ["data.batch_size=8", "trainer.per_device_train_batch_size=2", "scaling.num_workers=[1,3]"], r"expected a multiple of 12.*set data\.batch_size=12"),
    ("sft", ["scaling.num_workers=[1,2]"], r"data\.batch_size: missing; with elastic scaling\.num_workers"),
    ("sft", ["lora.target_modules=[lm_head]"], r"lora\.target_modules: found lm_head, to which TRL's trainers apply no adapter"),
    ("sft", ["trainer.eval_steps=2", "trainer.eval_strategy=epoch", "data.eval=b.jsonl"], r"trainer\.eval_steps: found 2, which has an effect only with trainer\.eval_strategy=steps"),
    ("sft", ["trainer.learning_rate=-1"], r"trainer\.learning_rate: found -1, expected a number above 0 and at most 100, for example 2e-05"),
    ("sft", ["model.fsdp=true", "model.load_in_4bit=true"], r"model\.fsdp: set together with model\.load_in_4bit"),
    ("ppo", ["model.fsdp=true", "rollout.engine=vllm", "rollout.num_workers=1"], r"rollout\.engine: found vllm together with model\.fsdp.* rollout\.engine=transformers"),
    ("ppo", ["policy=base", "lora.rank_pattern={q_proj: 2}", "rollout.engine=vllm"], r"rollout\.engine: found vllm, which ignores lora\.rank_pattern; .* remove lora\.rank_pattern"),
    ("sft", ["run.name=feedback"], r"run\.name: found 'feedback', .* for a new folder in run\.storage_path, which has artifacts"),
    ("sft", ["mlflow.alias=latest"], r"mlflow\.alias: found 'latest'.*reserved by MLflow"),
    ("sft", ["gate.eval_loss=0.5"], r"gate\.eval_loss: found '0\.5', expected a comparison"),
    ("sft", ["trainer.output_dir=x"], r"trainer\.output_dir: is set by the pipeline: checkpoints are saved to"),
    ("sft", ["trainer.fp16=true", "trainer.bf16=false"], r"trainer\.fp16: needs scaling\.use_gpu; set the missing keys"),
    ("sft", ["run.load_best_model_at_end=true"], r"run\.load_best_model_at_end: found true, but there are no evaluations .*set data\.eval or data\.eval_fraction, and trainer\.eval_strategy=epoch"),
    ("ppo", ["run.stop_if.eval_kl='> champion'", "data.eval_fraction=0.1", "trainer.eval_steps=1"], r"run\.stop_if\.eval_kl: found '> champion'; only gates .* can use the champion"),
    ("sft", ["learning_rate=1e-4"], r"learning_rate: unknown section; did you mean trainer\.learning_rate\?"),
    ("sft", ["lora.rank=8"], r"lora\.rank: unknown key; did you mean lora\.r\?"),
    ("sft", ["trainer.foo=1"], r"trainer\.foo: unknown key; `rlhf help trainer` lists the keys"),
    ("ppo", ["reward=my/rewards.py"], r"reward: found 'my/rewards\.py', expected python:my\.rewards:FUNCTION"),
    ("ppo", ["reward=null"], r"reward: missing; .* or a folder, or python:MODULE:FUNCTION"),
    ("sft", ["gate.train_loss=<= champion"], r"gate\.train_loss: found '<= champion'; only gates on eval_"),
    ("sft", ["run.load_best_model_at_end=true", "data.eval_fraction=0.1", "trainer.eval_strategy=epoch", "run.metric_for_best_model=eval_los"], r"run\.metric_for_best_model: `sft` has no such metric \(eval_los\); did you mean eval_loss\?"),
    ("sft", ["run.load_best_model_at_end=true", "data.eval_fraction=0.1", "trainer.eval_strategy=epoch", "run.metric_for_best_model=eval_entropy"], r"run\.metric_for_best_model: is a larger eval_entropy better\? Set run\.greater_is_better=true or false"),
    ("ppo", ["run.load_best_model_at_end=true", "data.eval_fraction=0.1", "trainer.eval_steps=1", "run.metric_for_best_model=eval_judge"], r"run\.metric_for_best_model: eval_judge needs a judge, which the job does not have"),
    ("dpo", ["trainer.loss_type=sigmoidal"], r"trainer\.loss_type: found .*'sigmoidal'.*, expected a list of one of sigmoid, .*did you mean sigmoid\?"),
    ("kto", ["trainer.per_device_train_batch_size=1"], r"trainer\.per_device_train_batch_size: found 1, expected a whole number between 2 and 1048576"),
    ("sft", ["scaling.num_workers=[3,1]"], r"scaling\.num_workers: found \[3, 1\], expected \[min, max\]"),
    ("sft", ["scaling.label_selector={a: 'in(b, c)'}"], r"scaling\.label_selector\.a: found 'in\(b, c\)', expected in\(b,c\)"),
    ("ppo", ["scaling.num_workers=65"], r"trainer\.batch_size: fewer prompts for an update than workers; expected at least trainer\.batch_size=65"),
    ("generate", ["trainer.temperature=1e-9"], r"trainer\.temperature: found 1e-09, expected 0 or a number of at least 0.01, for example 1\.0"),
    ("generate", ["trainer.min_new_tokens=256"], r"trainer\.min_new_tokens: found 256, expected less than response_length"),
    ("collect", ["trainer.num_generations=1"], r"trainer\.num_generations: found 1, but a pair needs two completions"),
    ("collect", ["trainer.temperature=0"], r"trainer\.temperature: found 0, so all completions of a prompt are the same"),
    ("collect", ["trainer.select=best", "trainer.min_margin=1"], r"trainer\.min_margin: trainer\.select=best makes no pairs"),
    ("export", ["reward=python:m:f"], r"reward: found 'python:m:f', expected one reward adapter"),
    ("export", ["run.storage_path=memory://runs"], r"run\.storage_path: 'memory://runs' is a bucket"),
    ("export", ["trainer.hub_model_id=mine"], r"trainer\.hub_model_id: found 'mine', expected OWNER/NAME"),
    ("export", ["trainer.hub_model_id=o/mine", "reward=models:/rlhf-rm@champion"], r"one model; set reward=null or policy=null"),
    ("sft", ["gate.eval_los=<= 1"], r"gate\.eval_los: `sft` has no such metric .*; did you mean eval_loss\?"),
    ("ppo", ["rollout.staleness=1"], r"rollout\.staleness: found 1, expected 0 without rollout workers, .*rollout\.num_workers=1"),
    ("stage: sft\ndata: &a {train: *a}\n", [], r"job\.yaml: not valid YAML: a character, a tag .* or an alias"),
    ("serve", ["serve.rewards={one: models:/r@champion}"], r"serve\.rewards: found one, which is also in serve\.policies"),
    ("serve", ["serve.policies={a b: models:/r@champion}"], r"serve\.policies: found \['a b'\], expected ids"),
    # sources of rows
    ("sft", ["data.train=[{path: a, weight: 1}, {path: b}]"], r"data\.train: 1 of 2 sources have no weight"),
    ("sft", ["data.train=[{path: a, wieght: 1}]"], r"data\.train\.0\.wieght: unknown key; did you mean weight"),
    ("sft", ["data.eval=[{path: a, weight: 1}]"], r"data\.eval\.0\.weight: weights apply only to training rows"),
    ("sft", ["data.train=[a, {path: b, label: {first: 1}}]"], r"data\.train\.1\.label: found"),
    ("sft", ["data.train=[a, {path: b, transform: f.py}]"], r"data\.train\.1\.transform: found 'f\.py', expected python:MODULE"),
    ("sft", ["data.train=[a, {path: b, group_by: q}]"], r"data\.train\.1\.group_by: found 'q'; only a transform"),
    ("sft", ["data.train=[{path: 'hf://datasets/a/b@x', revision: main}]"], r"data\.train\.0\.revision: found 'main' .*set the revision once"),
    ("sft", ["data.stopping_strategy=all_exhausted"], r"data\.stopping_strategy: no source of data\.train has a weight"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    BAD,
    ids=lambda value: str(value)[:40] if isinstance(value, list) else "",
)
def test_a_wrong_job_gives_one_message_with_the_key(job, capsys, text, overrides, message):
    stage = text if text in GOOD and text != "rm" else "sft"
    assert main([stage, job(text), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    assert re.search(message, printed.err), printed.err


NESTED = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else 'a'] * 9)}]\n" for i in range(9))


def test_a_job_that_would_never_end_is_refused_at_once(job, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (str(tmp_path / "pipe"), "pipe: is a pipe"),
        (job(NESTED), "more than 100,000 values"),
    ):
        assert main(["sft", path]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["my-own-token\n", "- my-own-token\n"], ids=["text", "list"])
@pytest.mark.parametrize("of", ["job", "extends"])
def test_a_file_that_is_no_job_is_not_quoted(of, text, job, tmp_path, capsys):
    write(tmp_path / "other", text)
    path = job("extends: other\n") if of == "extends" else str(tmp_path / "other")
    assert main(["sft", path]) == 2
    error = capsys.readouterr().err
    assert "other: is no job file; expected sections such as" in error and "my-own-token" not in error


@pytest.mark.parametrize(
    "secret", ["hf_" + "abcdefghijklmnopqrstuvwxyz", "http://user:" + "hunter2hunter2@host:5000"]
)
@pytest.mark.parametrize(
    ("more", "override"),
    [
        ("mlflow: {{tracking_uri: '{}'}}\n", []),
        ("", ["run.name={}"]),
        ("", ["{}=1"]),
        ("model: [{}, *x y\n", []),  # an error message does not quote the text of a broken file
    ],
)
def test_a_secret_is_refused_and_never_printed(job, capsys, secret, more, override):
    given = [one.format(secret) for one in override]
    assert main(["sft", job(GOOD["sft"] + more.format(secret)), *given]) == 2
    printed = capsys.readouterr()
    assert secret not in printed.out + printed.err
    assert "looks like a secret" in printed.err and "HF_TOKEN" in printed.err


def test_yaml_scalars_mean_what_they_look_like(job):
    text = GOOD["sft"] + "trainer: {learning_rate: 1e-4, eval_strategy: no, num_train_epochs: 2, seed: 007}\n"
    # YAML 1.1 would read the seed 007 as an octal number.
    with pytest.raises(InputError, match=r"trainer\.seed: found 7\.0"):
        load_job(job(text), [])
    made = load_job(job(text), ["trainer.seed=7", "model.revision='1234567'", "run.name=2026-11-20"])
    assert made.trainer == {"learning_rate": 1e-4, "eval_strategy": "no", "num_train_epochs": 2, "seed": 7}
    assert (made.model.revision, made.run.name) == ("1234567", "2026-11-20")
    assert load_job(job("generate"), ["trainer.temperature=0.0"]).args.temperature == 0


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
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


# ---------------------------------------------------------------- extends
def write(path, text):
    path.write_text(text)
    return path


def test_a_job_extends_another_key_by_key(tmp_path):
    base = write(tmp_path / "base.yaml", "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: 3}\n")
    path = write(tmp_path / "mine.yaml", "extends: base.yaml\ndata:\n  train: b\n")
    job = load_job(path, ["data.max_length=7"])
    assert (job.data.train, job.data.seed, job.data.max_length, job.source) == ("b", 3, 7, str(path))
    third = write(tmp_path / "third.yaml", "extends: mine.yaml\n")
    with pytest.raises(InputError, match=r"third\.yaml:1: extends: found 'mine\.yaml', which extends a job"):
        load_job(third)
    write(path, "extends: base.yaml\ndata:\n  train: b\n  sed: 4\n")
    with pytest.raises(InputError, match=r"mine\.yaml:4: data\.sed: unknown key; did you mean data\.seed"):
        load_job(path)
    write(base, "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: x}\n")
    write(path, "extends: base.yaml\n")
    with pytest.raises(InputError, match=r"base\.yaml:3: data\.seed"):
        load_job(path)


def test_of_several_extended_files_later_ones_win_and_an_empty_section_replaces(tmp_path):
    one = "stage: sft\nmodel: {name_or_path: m}\ndata: {train: a, seed: 3}\ngate: {train_loss: '< 1'}\n"
    write(tmp_path / "one.yaml", one)
    write(tmp_path / "two.yaml", "data: {seed: 4, max_length: 9}\nlora: {r: 8}\n")
    path = write(tmp_path / "mine.yaml", "extends: [one.yaml, two.yaml]\ndata: {max_length: 7}\ngate: {}\n")
    job = load_job(path)
    assert (job.data.train, job.data.seed, job.data.max_length, job.lora) == ("a", 4, 7, {"r": 8})
    assert load_job(tmp_path / "one.yaml").gate and not job.gate


# ---------------------------------------------------------------- held-out rows, gates, sources
@pytest.mark.parametrize("stage", [name for name, spec in STAGE_SPECS.items() if spec.learns])
def test_data_eval_null_also_turns_the_evaluations_of_the_file_off(stage, in_root):
    job = load_job(f"jobs/demo/{stage}.yaml", ["data.eval=null"], stage)
    assert job.trainer.get("eval_strategy", "no") == "no" and not job.trainer.get("eval_on_start")
    assert not job.trainer.get("eval_steps")


@pytest.mark.parametrize(
    ("stage", "overrides", "warns"),
    [
        ("sft", [], False),
        ("rm", [], True),
        ("rm", ["trainer.disable_dropout=false"], False),
        ("ppo", [], True),
    ],
)
def test_dropout_without_effect_gives_a_warning(stage, overrides, warns, in_root):
    job = load_job(f"jobs/demo/{stage}.yaml", ["lora.lora_dropout=0.5", *overrides], stage)
    said = [line for line in find_warnings(job) if "lora_dropout" in line]
    assert len(said) == warns
    assert not warns or f"changes nothing: `{stage}` trains without dropout" in said[0]


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["gate={}"], ""),
        (["gate={}", "data.train=mine.jsonl"], "'jobs/demo/data/demonstrations_eval.jsonl'"),
        (["gate={}", "data.train=mine.jsonl", "data.eval=my_eval.jsonl"], ""),
        (["gate={}", "data.eval=null"], "no rows are held out"),
        (["mlflow.registered_model=null"], "gate: mlflow.registered_model is null"),
        (["mlflow.registered_model=null", "gate={}"], ""),
    ],
)
def test_settings_that_are_often_unintended_give_a_warning(overrides, warned, in_root):
    said = list(find_warnings(load_job("jobs/demo/sft.yaml", overrides, "sft")))
    assert warned in "".join(said) and len(said) == bool(warned)


def test_an_export_runs_in_the_process_of_the_command(monkeypatch, in_root):
    """`export` must not connect to a cluster, even if one is available."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    assert load_job("jobs/demo/export.yaml", [], "export").in_process


def test_a_message_about_a_missing_job_file_suggests_job_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs/vet").mkdir(parents=True)
    for name in ("sft", "generate"):
        (tmp_path / f"jobs/vet/{name}.yaml").write_text(f"stage: {name}\n")
    both = "jobs/vet/generate.yaml, jobs/vet/sft.yaml"
    for typed, says in (
        (["jobs/vet"], f"jobs/vet: no such job file; expected one of {both}\n"),
        (["vet"], f"vet: no such job file; expected one of {both}\n"),
        (["jobs/vet/rm.yaml"], f"jobs/vet/rm.yaml: no such job file; expected one of {both}\n"),
        (["jobs/velo/sft.yaml"], "jobs/velo/sft.yaml: no such job file; profiles here are vet\n"),
        (["jobs/vet/generate.yaml"], "this is a job for `generate`, not `sft`; use jobs/vet/sft.yaml\n"),
        (
            ["--model_name_or_path", "X", "--dataset_name", "Y"],
            "before the keys: jobs/own/sft.yaml model.name_or_path=X\n",
        ),
    ):
        assert main(["sft", *typed]) == 2
        assert capsys.readouterr().err.endswith(says)
    assert main([]) == 2
    assert "\n    validate " in capsys.readouterr().err


def test_gate_rules():
    assert [parse_gate(rule) for rule in (">= 0.95", "<1e-3", "<=champion")] == [
        (">=", 0.95),
        ("<", 1e-3),
        ("<=", None),
    ]
    assert OPERATORS[">="](1.0, 1.0) and not OPERATORS[">"](1.0, 1.0)
    for wrong in ("0.95", "== 1", ">= ", ">= nan", ">= 1e400", 0.95, None, [">= 1"]):
        with pytest.raises(ValueError, match="expected a comparison"):
            parse_gate(wrong)


def test_a_gate_without_the_held_out_rows_that_it_needs(tmp_path, in_root):
    # without eval rows, a gate from the job file only causes a warning
    taken_away = load_job("jobs/demo/sft.yaml", ["data.eval=null"])
    assert "gate.eval_loss: needs held-out rows" in " ".join(find_warnings(taken_away))
    with pytest.raises(InputError, match=r"gate\.eval_loss: needs held-out rows .*data\.eval_fraction=0\.1"):
        load_job("jobs/demo/sft.yaml", ["data.eval=null", "gate.eval_loss=<=1"])
    text = f"extends: {ROOT}/jobs/own/rm.yaml\ndata: {{eval_fraction: 0}}\ngate: {{eval_accuracy: '<= 1'}}\n"
    with pytest.raises(InputError, match=r"rm\.yaml:3: gate\.eval_accuracy: needs held-out rows"):
        load_job(write(tmp_path / "rm.yaml", text))


def test_keys_of_a_source_replace_keys_of_the_data_section(in_root):
    own = "{path: b, columns: {prompt: q}, transform: python:m:f, group_by: tree}"
    given = [f"data.train=[a, {own}]", "data.columns={prompt: text}", "data.transform=python:m:g"]
    job = load_job("jobs/demo/sft.yaml", given)
    first, second = sources_with_defaults(job.data, "train")
    assert first == Source("a", columns={"prompt": "text"}, transform="python:m:g")
    assert second == Source("b", columns={"prompt": "q"}, transform="python:m:f", group_by="tree")
    assert transforms_of(job.data) == {"data.transform": "python:m:g", "data.train.1.transform": "python:m:f"}
    assert sources_of("a") == [Source("a")] and sources_of(None) == []
    for path, location in (("n", "n@v1"), ("n:config/train", "n@v1:config/train")):
        assert Source(f"hf://datasets/o/{path}", revision="v1").location == f"hf://datasets/o/{location}"


# ---------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        (["job.yaml", "--lora.r=8", "policy=base"], ["policy=base", "lora.r=8"]),
        (["--lora.r", "8", "job.yaml"], ["lora.r=8"]),
        (["job.yaml", "--run.max_failures", "-1"], ["run.max_failures=-1"]),
    ],
)
def test_a_key_can_be_an_option(typed, overrides, monkeypatch):
    calls = []
    monkeypatch.setattr(__main__, "run_subcommand", lambda *given: calls.append(given) or 0)
    assert main(["dpo", *typed]) == 0 and calls == [("dpo", "job.yaml", overrides)]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["sft", "job.yaml", "--lora.r"], "lora.r: a value is missing; for example lora.r=VALUE"),
        (["sfft", "job.yaml"], "unknown subcommand 'sfft'; did you mean sft?"),
    ],
)
def test_a_wrong_command_line_gives_a_message(typed, says, capsys):
    assert main(typed) == 2 and capsys.readouterr().err.startswith(f"error: {says}")


def test_exit_statuses(capsys, monkeypatch):
    def outcome(error):
        def run(*_):
            if error is not None:
                raise error
            return 0

        monkeypatch.setattr(__main__, "run_subcommand", run)
        return main(["sft", "x.yaml"]), capsys.readouterr().err

    assert outcome(None) == (0, "")
    assert outcome(InputError("no")) == (2, "error: no\n")
    task = RayTaskError("read", "traceback", InputError("a.jsonl:3: bad"))
    assert outcome(task.as_instanceof_cause()) == (2, "error: a.jsonl:3: bad\n")
    status, printed = outcome(ValueError("boom"))
    assert status == 1 and "Traceback" in printed and "ValueError: boom" in printed
    status, printed = outcome(KeyboardInterrupt())
    assert status == 130 and printed.count("interrupted") == 1 and "Traceback" not in printed

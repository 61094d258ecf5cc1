"""Tests `rlhf init`, which writes job files for the user's own data files."""

import json
import re
import shutil
import subprocess

import datasets
import pytest
from running import ROOT

from pipeline.__main__ import main
from pipeline.commands import shipped, validate
from pipeline.commands.init import TAKES
from pipeline.job import load_job
from pipeline.settle.inputs import check_paths

MODEL = str(ROOT / "jobs/demo/model")
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
PAIRS = [
    {"question": f"What is {n} and {n}?", "output_1": f"It is {2 * n}.", "output_2": f"It is {n}, I think.", "preference": 1 + n % 2}
    for n in range(20)
]  # fmt: skip


THUMBS = [{"question": f"Say {n}.", "answer": f"{n}.", "thumbs": ["up", "down"][n % 2]} for n in range(60)]
ASKED = [{"question": f"Say {n}.", "reference": str(n), "topic": "numbers"} for n in range(60)]
MANY = [{**row, "question": f"{row['question']} {n}"} for n, row in enumerate(PAIRS * 3)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(path, made):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path.name


def plain_pairs(count):
    return [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": "No."} for n in range(count)]


def init(*given, model=MODEL):
    """Runs `init` with the model of the demo. Returns a function that loads the job of (profile, stage)."""
    assert main(["init", *given, "--model", str(model)]) == 0
    return lambda name, stage: load_job(f"jobs/{name}/{stage}.yaml", [], stage)


def next_commands(shown):
    """Returns the subcommands below `Run next:`. The commands are make targets if make runs the tests."""
    return re.findall(r"(\w+) (?:JOB=)?jobs/", shown.partition("Run next:")[2])


def test_a_job_for_each_stage_that_can_read_the_rows(here, capsys):
    assert main(["init", rows(here / "my.pairs.jsonl", PAIRS)]) == 0
    assert "rm" in next_commands(capsys.readouterr().out)
    job = load_job("jobs/my/rm.yaml", [], "rm")
    columns = {"prompt": "question", "first": "output_1", "second": "output_2", "label": "preference"}
    assert (job.data.train, job.data.columns) == ("my.pairs.jsonl", columns)
    assert job.model.name_or_path == load_job(ROOT / "jobs/own/rm.yaml").model.name_or_path
    # `init` does not change a folder that already contains jobs.
    (here / "jobs/my/rm.yaml").write_text("mine\n")
    assert main(["init", "my.pairs.jsonl"]) == 2
    assert "jobs/my exists; add jobs to it with --name my, or choose another name" in capsys.readouterr().err
    assert (here / "jobs/my/rm.yaml").read_text() == "mine\n"


def test_demonstrations_alone_make_a_policy_of_another_profile(here, capsys):
    plain = [{"prompt": f"Say {n}.", "completion": f"{n}, as you wish."} for n in range(10)]
    assert main(["init", rows(here / "talks.jsonl", plain), "--profile", "llama3-8b-qlora"]) == 0
    job = load_job("jobs/talks/sft.yaml", [], "sft")
    assert job.model.load_in_4bit and job.data.columns is None and job.data.eval_fraction == 0.1
    assert job.mlflow.registered_model == "talks-sft"
    written = {path.stem for path in (here / "jobs/talks").glob("*.yaml")}
    assert written == {"sft", "ppo", "generate", "serve", "export"}
    assert load_job("jobs/talks/generate.yaml").policy == "models:/talks-sft@champion"
    shown = capsys.readouterr().out
    # without preference pairs, `init` cannot add a reward model
    assert "set `reward` in jobs/talks/ppo.yaml" in shown
    # `init` cannot read the tokenizer of a gated model.
    assert "warning: the jobs keep the lengths of the profile: " in shown
    assert next_commands(shown) == ["validate", "sft", "chat", "serve", "export"]


def test_a_folder_becomes_a_profile_with_all_jobs(here, capsys):
    """Uses rows of the demo. Eval files are not trained on, and length limits are computed with the rows and the tokenizer."""
    (here / "my").mkdir()
    for file in (ROOT / "jobs/demo/data").glob("*.jsonl"):
        (here / "my" / file.name).write_text("".join(file.open().readlines()[:100]))
    init("my", "--name", "velo")
    jobs = {path.stem: load_job(path) for path in (here / "jobs/velo").glob("*.yaml")}
    assert jobs.keys() == {path.stem for path in (ROOT / "jobs/own").glob("*.yaml")}
    data = {name: (job.data.train, job.data.eval, job.data.max_length) for name, job in jobs.items()}
    train, held_out = "my/{}.jsonl".format, "my/{}_eval.jsonl".format
    assert data == {
        "sft": (train("demonstrations"), held_out("demonstrations"), 64),
        "rm": (train("preferences"), held_out("preferences"), 64),
        "dpo": (train("preferences"), held_out("preferences"), 64),
        "kto": (train("thumbs"), held_out("thumbs"), 64),
        "ppo": (train("prompts"), held_out("prompts"), 64),
        "evaluate": (None, held_out("prompts"), 64),
        "collect": (train("prompts"), None, 64),
        "generate": (train("prompts"), None, 64),
        "score": (train("preferences"), None, 64),
        "serve": (None, None, None),
        "export": (None, None, None),
    }
    assert jobs["ppo"].trainer["response_length"] == jobs["serve"].trainer["response_length"] == 32
    starts = {jobs["ppo"].policy, jobs["dpo"].policy, jobs["evaluate"].baseline}
    assert starts == {"models:/velo-sft@champion"}
    assert jobs["serve"].serve.policies.keys() == {"velo-ppo", "velo-dpo", "velo-kto", "velo-sft"}
    best = [f"models:/velo-{stage}@champion" for stage in ("ppo", "dpo", "kto", "sft")]
    assert best == jobs["export"].policy == jobs["generate"].policy == jobs["evaluate"].policy
    assert "rlhf-own" not in "".join(path.read_text() for path in (here / "jobs/velo").iterdir())
    assert next_commands(capsys.readouterr().out) == ["validate", "sft", "rm", "ppo", "evaluate"]
    assert main(["validate", "jobs/velo/ppo.yaml"]) == 0


@pytest.mark.parametrize(("gpu", "episodes"), [(None, 1280), ("/usr/bin/nvidia-smi", 2560)])
def test_the_jobs_fit_the_gpu_of_this_machine(gpu, episodes, here, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda program: gpu)
    job = init(rows(here / "pairs.jsonl", plain_pairs(20)))("pairs", "ppo")
    assert job.trainer["total_episodes"] == episodes
    assert job.scaling["use_gpu"] is job.trainer["bf16"] is bool(gpu)


def test_unreadable_rows_are_reported(here, capsys):
    """`init` names the first line that is not UTF-8, and the first element that is not JSON."""
    text = "".join(f"question {n},it\x93s {n},no\n" for n in range(9))
    (here / "windows.csv").write_bytes(("prompt,chosen,rejected\n1 or 2?,1,2\n" + text).encode("latin-1"))
    init("windows.csv")
    shown = capsys.readouterr().out
    assert "warning: 9 of the first 10 rows cannot be read; windows.csv:3: found byte 0x93" in shown
    assert "iconv -f WINDOWS-1252 -t UTF-8" in shown
    (here / "half.json").write_text(json.dumps(plain_pairs(9))[:-1])
    init("half.json")
    assert "1 of the first 10 rows cannot be read; half.json: element 10: found" in capsys.readouterr().out


def test_messages_and_a_base_without_a_chat_template_use_the_built_in_one_in_every_job(here, tmp_path):
    """If the jobs had different templates, the reward model would read plain text, and the policy would read conversations."""
    shutil.copytree(MODEL, here / "base")
    (here / "base/chat_template.jinja").unlink()
    turns = [{"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]} for n in range(9)]  # fmt: skip
    rows(here / "both/talks.jsonl", turns)
    rows(here / "both/pairs.jsonl", PAIRS)
    assert main(["init", "both", "--model", "base"]) == 0
    jobs = [load_job(path) for path in (here / "jobs/both").glob("*.yaml")]
    assert {job.model.chat_template for job in jobs} == {"plain"}
    assert main(["init", "both/pairs.jsonl", "--model", "base"]) == 0
    assert load_job("jobs/pairs/rm.yaml").model.chat_template is None


def talks(count, tools=False):
    """Yields conversations with a system prompt and two questions. With `tools`, every second conversation calls a tool."""
    for n in range(count):
        call = [{"type": "function", "function": {"name": "book", "arguments": "{}"}}]
        answer = {"content": None, "tool_calls": call} if tools and n % 2 else {"content": f"{n}!"}
        said = ["You are at the desk of a vet.", f"Say {n}.", answer, "And more?", {"content": "No."}]
        roles = ("system", "user", "assistant", "user", "assistant")
        turns = [one if isinstance(one, dict) else {"content": one} for one in said]
        yield {"messages": [{"role": role, **turn} for role, turn in zip(roles, turns, strict=True)]}


def test_columns_may_be_set(here, capsys):
    """`init` cannot guess the meaning of columns whose names do not describe their content."""
    made = [{"ask": f"Say {n}.", "x": f"{n}.", "y": "No.", "by": ["l", "r"][n % 2]} for n in range(60)]
    columns = "data.columns={prompt: ask, first: x, second: y, label: by}"
    meaning = "data.label={first: l, second: r}"
    path = rows(here / "ratings.jsonl", made)
    written = init(path, columns, meaning)
    rm, dpo = written("ratings", "rm"), written("ratings", "dpo")
    assert rm.data.columns == {"prompt": "ask", "first": "x", "second": "y", "label": "by"}
    assert rm.data.label == {"first": "l", "second": "r"}
    assert dpo.data.columns == rm.data.columns
    ppo = written("ratings", "ppo").data  # gets only the columns that ppo reads
    assert (ppo.columns, ppo.label) == ({"prompt": "ask"}, None)
    assert "columns {'prompt': 'ask', 'first': 'x'" in capsys.readouterr().out
    assert main(["validate", "jobs/ratings/rm.yaml"]) == 0


def test_a_set_column_is_not_guessed_as_another_field(here):
    """If `init` guessed that the column of verdicts has completions, sft would learn to write verdicts."""
    names = {
        "Question": "Why {}?",
        "Answer A": "So {}.",
        "Answer B": "Not {}.",
        "Which answer is better?": "{} A",
    }
    made = [{name: text.format(n) for name, text in names.items()} for n in range(20)]
    columns = (
        "data.columns={prompt: Question, first: Answer A, second: Answer B, label: 'Which answer is better?'}"
    )
    init(rows(here / "form.jsonl", made), columns)
    assert "sft" not in {path.stem for path in (here / "jobs/form").glob("*.yaml")}
    assert "label: 'Which answer is better?'" in (here / "jobs/form/rm.yaml").read_text()


def test_rows_that_the_chat_template_rejects_are_reported(here, capsys):
    rows(here / "calls.jsonl", talks(60, tools=True))
    init("calls.jsonl")
    assert "warning: sft skips 30 of the first 60 rows: " in capsys.readouterr().out


def test_columns_that_may_say_which_completions_are_bad_are_asked_about(here, capsys):
    made = [{**row, "thumbs_up": n % 2, "thumbs_down": 1 - n % 2} for n, row in enumerate(ASKED)]
    rows(here / "log.jsonl", [{**row, "answer": f"It is {n}."} for n, row in enumerate(made)])
    init("log.jsonl")
    shown = capsys.readouterr().out
    assert (
        "warning: log.jsonl: sft and kto will not use this file: `thumbs_down` may mark bad rows; set data.columns="
        in shown
    )
    assert not {"sft", "kto"} & {path.stem for path in (here / "jobs/log").glob("*.yaml")}


def test_every_folder_of_jobs_is_in_the_list_of_shipped_folders():
    listed = subprocess.run(["git", "ls-files", "jobs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split("/")[1] for line in listed.stdout.split() if line.count("/") > 1} == {*shipped.FOLDERS}


# ---- which files and rows `init` selects for a job -----------------------------------------------------------------------------


def test_eval_files_are_not_trained_on(here, capsys):
    """Uses a folder with shards, upper-case names and a file in another format, and a dataset with an eval split."""
    for name in ("export_2025/part_1.JSONL", "export_2025/part_2.JSONL", "export_2024/part_1.JSONL"):
        rows(here / name, PAIRS)
    rows(here / "export_2025/pairs_valid.Json", PAIRS)
    (here / "export_2025/ratings.xlsx").write_bytes(b"PK")
    (here / "export_2025/dataset_info.json").write_text("{}")
    data = init("export_2025", "--name", "both")("both", "rm").data
    assert (data.train, data.eval) == ("export_2025/part_*.JSONL", "export_2025/pairs_valid.Json")
    assert data.eval_fraction == 0
    shown = capsys.readouterr().out
    assert "export_2025/ratings.xlsx: not read (not a data file)" in shown and "dataset_info" not in shown
    rows(here / "alone/test_pairs.jsonl", PAIRS)  # the only file of a folder
    data = init("alone")("alone", "rm").data
    assert (data.train, data.eval, data.eval_fraction) == ("alone/test_pairs.jsonl", None, 0.1)
    one = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict(train=one, validation=one).save_to_disk(here / "saved")
    data = init("saved")("saved", "rm").data
    assert (data.train, data.eval) == ("saved", "saved/validation")


def test_each_file_goes_to_the_stages_that_can_read_it(here, capsys):
    """Files of the same format may have different columns. `init` skips a file that no stage can read."""
    rows(here / "two/a.jsonl", PAIRS)
    rows(here / "two/b.jsonl", plain_pairs(9))
    rows(here / "two/c.jsonl", [{"numbers": n} for n in range(5)])
    rows(here / "two/labels.jsonl", THUMBS)
    written = init("two")
    shown = capsys.readouterr().out
    assert "two/c.jsonl: skipped, read by no stage; the file's columns are numbers" in shown
    columns = "{'prompt': 'question', 'completion': 'answer', 'label': 'thumbs'}"
    assert f"two/labels.jsonl: labels, read by sft, kto; columns {columns}\n" in shown
    a, b = written("two", "dpo").data.train
    assert (a["path"], a["columns"]["label"], b) == ("two/a.jsonl", "preference", {"path": "two/b.jsonl"})
    assert main(["validate", "jobs/two/dpo.yaml"]) == 0


def test_evaluate_gets_the_eval_prompts_of_ppo_with_all_their_columns(here):
    """A reward function may read other columns of the prompt rows, such as `reference`."""
    rows(here / "my/prompts.jsonl", [{"user_query": row.pop("question"), **row} for row in map(dict, ASKED)])
    rows(here / "my/ratings.jsonl", PAIRS)
    written = init("my")
    assert written("my", "ppo").data.columns == {"prompt": "user_query"}
    job = written("my", "evaluate")
    kept = [json.loads(line) for line in (here / job.data.eval).read_text().splitlines()]
    assert 0 < len(kept) < 20 and job.data.columns is None
    assert all((row["prompt"], row["topic"]) == (f"Say {row['reference']}.", "numbers") for row in kept)
    ppo = load_job("jobs/my/ppo.yaml")
    assert ppo.policy == job.baseline == "base"
    assert validate.run(ppo)["splits"]["eval"]["kept"] == len(kept)


def test_a_label_with_an_unclear_meaning_is_left_to_the_user(here, capsys):
    """`init` still computes the length limits, because length limits do not depend on the meaning of the label."""
    unclear = [row | {"preference": n % 2} for n, row in enumerate(PAIRS)]
    written = init(rows(here / "u.jsonl", unclear))
    assert (written("u", "rm").data.max_length, written("u", "ppo").trainer["response_length"]) == (64, 16)
    assert "label: null" in (here / "jobs/u/rm.yaml").read_text()
    shown = capsys.readouterr().out
    jobs = ("rm", "dpo", "kto", "score")
    assert all(f"set `label` in jobs/u/{job}.yaml; a comment" in shown for job in jobs)


def test_prompts_alone_suggest_no_command_before_a_reward_is_set(here, capsys):
    init(rows(here / "prompts.jsonl", ASKED))
    assert next_commands(capsys.readouterr().out) == []
    (here / "length.py").write_text("def score(completions):\n    return [len(one) for one in completions]\n")
    written = init("prompts.jsonl", "--name", "shorter", "reward=python:length:score")
    assert written("shorter", "ppo").reward == "python:length:score"
    assert written("shorter", "generate").policy == "models:/shorter-ppo@champion"
    assert next_commands(capsys.readouterr().out)[:2] == ["validate", "ppo"]


def test_a_profile_gets_jobs_for_one_more_file(here, capsys):
    """`init` does not change existing jobs. New jobs use the base of the existing jobs and start from their sft policy."""
    rows(here / "my/chats.jsonl", talks(60))
    init("my", "--name", "vet")
    edited = (here / "jobs/vet/sft.yaml").read_text() + "\n# mine\n"
    (here / "jobs/vet/sft.yaml").write_text(edited)
    rows(here / "ratings.jsonl", MANY)
    capsys.readouterr()
    assert main(["init", "ratings.jsonl", "--name", "vet"]) == 0
    shown = capsys.readouterr().out
    assert "wrote jobs/vet: rm, dpo, kto, ppo, score, evaluate, collect\n" in shown
    assert "  not changed: export, generate, serve, sft\n" in shown
    assert (here / "jobs/vet/sft.yaml").read_text() == edited
    dpo = load_job("jobs/vet/dpo.yaml")
    assert (dpo.policy, dpo.model.name_or_path) == ("models:/vet-sft@champion", MODEL)
    assert load_job("jobs/vet/evaluate.yaml").baseline == "models:/vet-sft@champion"
    assert main(["init", "ratings.jsonl", "--name", "vet"]) == 2
    assert "jobs/vet already has a job for each stage that can train on these rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "more", "message"),
    [
        ([{"a": 1}], [], "matches no format of"),
        (PAIRS, ["--profile", "nonsense"], "there is no profile 'nonsense'"),
        (PAIRS, ["--name", "own"], "the project comes with a profile own; choose another name"),
        (PAIRS, ["--name", "a/b"], "name: found 'a/b', expected at most 64 letters"),
        (PAIRS, ["data.columns={prompt: question, chosen: nothing}"], "data.columns: no stage can read rows.jsonl"),
        (PAIRS, ["trainer.learning_rate=1"], "unknown option 'trainer.learning_rate'; expected --name"),
        (PAIRS, ["data.columns=3"], "data.columns: found 3"),
        ([TALK], ["reward=models:/x/1"], "reward: only ppo uses a reward, and there is no new ppo job for these rows"),
        ("nothing.jsonl", [], "there is no file"),
        (MODEL, [], "is the folder of a model"),
    ],
)  # fmt: skip
def test_a_wrong_option_or_unreadable_rows_create_no_folder(made, more, message, here, capsys):
    path = made if isinstance(made, str) else rows(here / "rows.jsonl", made)
    assert main(["init", path, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and ":0:" not in error and not (here / "jobs").exists()


FOLDERS = {
    "chats": {"chats": [*talks(60)]},
    "labels": {"labels": THUMBS},
    "all": {"chats": [*talks(60)], "ratings": MANY, "labels": THUMBS, "prompts": ASKED},
}


@pytest.mark.parametrize(("kinds", "template"), [*((kinds, True) for kinds in FOLDERS), ("all", False)])
def test_every_job_loads_for_any_rows_and_base(kinds, template, here):
    """Tests random rows and bases. Jobs that train on files must keep at least 20 of their rows."""
    shutil.copytree(MODEL, here / "base")
    if not template:
        (here / "base/chat_template.jinja").unlink()
    for name, made in FOLDERS[kinds].items():
        rows(here / f"my/{name}.jsonl", made)
    assert main(["init", "my", "--name", "vet", "--model", "base"]) == 0
    for path in (here / "jobs/vet").glob("*.yaml"):
        stage = path.stem
        job = load_job(path, ["reward=models:/any/1"] if stage == "ppo" else [], stage)
        check_paths(job)
        if stage in TAKES:
            assert validate.run(job)["splits"]["train"]["kept"] >= 20

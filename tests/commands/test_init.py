"""`rlhf init`: jobs for a file whose columns nobody has named."""

import json
import re
import shutil

import datasets
import pytest
from running import ROOT

from pipeline.__main__ import main
from pipeline.commands import validate
from pipeline.commands.init import EXAMPLES
from pipeline.config import load_job

MODEL = str(ROOT / "jobs/demo/model")
PAIRS = [
    {"question": f"What is {n} and {n}?", "output_1": f"It is {2 * n}.", "output_2": f"It is {n}, I think.", "preference": 1 + n % 2}
    for n in range(20)
]  # fmt: skip


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


def init(*given):
    """Writes jobs with the demo's model. Returns a function that loads one: (name of its folder, stage)."""
    assert main(["init", *given, "--model", MODEL]) == 0
    return lambda name, stage: load_job(f"jobs/{name}/{stage}.yaml", [], stage)


def next_commands(shown):
    """The subcommands that `init` prints at its end; in `make test` they are targets of make."""
    return re.findall(r"(\w+) (?:JOB=)?jobs/", shown.partition("Run next:")[2])


def test_a_job_for_each_stage_that_can_read_the_rows(here, capsys):
    assert main(["init", rows(here / "my.pairs.jsonl", PAIRS)]) == 0
    assert "rm" in next_commands(capsys.readouterr().out)
    job = load_job("jobs/my/rm.yaml", [], "rm")
    columns = {"prompt": "question", "first": "output_1", "second": "output_2", "label": "preference"}
    assert (job.data.train, job.data.columns) == ("my.pairs.jsonl", columns)
    assert job.model.name_or_path == load_job(ROOT / "jobs/own/rm.yaml").model.name_or_path
    # Jobs that are there are not overwritten.
    (here / "jobs/my/rm.yaml").write_text("mine\n")
    assert main(["init", "my.pairs.jsonl"]) == 2
    assert "jobs/my exists" in capsys.readouterr().err and (here / "jobs/my/rm.yaml").read_text() == "mine\n"


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
    assert "set `reward` in jobs/talks/ppo.yaml" in shown  # no pairs, so no reward model
    assert "warning: sft keeps the lengths of the profile: " in shown  # the model is gated
    assert next_commands(shown) == ["validate", "sft", "chat", "serve", "export"]


def test_a_folder_becomes_a_profile_with_all_jobs(here, capsys):
    """The demo's files: those for evaluation are not trained on, and lengths come from rows and tokenizer."""
    shutil.copytree(ROOT / "jobs/demo/data", here / "my")
    init("my", "--name", "velo")
    files = [path for path in (here / "jobs/velo").glob("*.yaml") if path.stem != "iterate"]
    jobs = {path.stem: load_job(path) for path in files}
    assert jobs.keys() | {"iterate"} == {path.stem for path in (ROOT / "jobs/own").glob("*.yaml")}
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
        "serve": (None, None, 64),
        "export": (None, None, None),
    }
    assert jobs["ppo"].trainer["response_length"] == jobs["serve"].trainer["response_length"] == 32
    starts = {jobs["ppo"].policy, jobs["dpo"].policy, jobs["evaluate"].baseline}
    assert starts == {"models:/velo-sft@champion"}
    assert jobs["serve"].serve.policies.keys() == {"velo-ppo", "velo-sft"}
    assert "num_prompts: null" in (here / "jobs/velo/iterate.yaml").read_text()
    assert "rlhf-own" not in "".join(path.read_text() for path in (here / "jobs/velo").iterdir())
    assert next_commands(capsys.readouterr().out) == ["validate", "sft", "rm", "ppo", "evaluate"]
    assert main(["validate", "jobs/velo/ppo.yaml"]) == 0


def test_files_of_a_folder_are_read_whatever_their_case_or_named(here, capsys):
    rows(here / "my" / "PAIRS.JSONL", plain_pairs(8))
    rows(here / "my" / "pairs_valid.Json", plain_pairs(4))
    (here / "my" / "ratings.xlsx").write_bytes(b"PK")
    (here / "my" / "dataset_info.json").write_text("{}")
    job = init("my")("my", "rm")
    assert (job.data.train, job.data.eval) == ("my/PAIRS.JSONL", "my/pairs_valid.Json")
    shown = capsys.readouterr().out
    assert "my/ratings.xlsx: not read (no format of rows)" in shown and "dataset_info" not in shown


@pytest.mark.parametrize(("gpu", "episodes"), [(None, 1280), ("/usr/bin/nvidia-smi", 2560)])
def test_the_jobs_are_for_the_gpu_of_this_machine(gpu, episodes, here, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda program: gpu)
    job = init(rows(here / "pairs.jsonl", plain_pairs(20)))("pairs", "ppo")
    assert job.trainer["total_episodes"] == episodes
    assert job.scaling["use_gpu"] is job.trainer["bf16"] is bool(gpu)


def test_evaluate_gets_the_prompts_that_ppo_holds_out(here):
    job = init(rows(here / "pairs.jsonl", plain_pairs(80)))("pairs", "evaluate")
    prompts = [json.loads(line)["prompt"] for line in (here / job.data.eval).read_text().splitlines()]
    assert 0 < len(prompts) < 20 and load_job("jobs/pairs/ppo.yaml").policy == job.baseline == "base"
    assert validate.run(load_job("jobs/pairs/ppo.yaml"))["splits"]["eval"]["kept"] == len(prompts)


def test_a_label_whose_meaning_is_not_clear_is_left_to_say(here, capsys):
    """The lengths are known without it."""
    unclear = [row | {"preference": n % 2} for n, row in enumerate(PAIRS)]
    assert init(rows(here / "u.jsonl", unclear))("u", "rm").data.max_length == 64
    assert "label: null" in (here / "jobs/u/rm.yaml").read_text()
    shown = capsys.readouterr().out
    assert all(
        f"set `label` in jobs/u/{job}.yaml; a comment" in shown for job in ("rm", "dpo", "kto", "score")
    )


@pytest.mark.parametrize(
    ("made", "more", "message"),
    [
        ([{"a": 1}], [], "matches no format of"),
        (PAIRS, ["--profile", "nonsense"], "there is no profile 'nonsense'"),
        (PAIRS, ["--color", "red"], "unknown option 'color'"),
        (PAIRS, ["--name", "own"], "choose another name"),
        ("nothing.jsonl", [], "there is no file"),
        (MODEL, [], "is the folder of a model"),
    ],
)
def test_what_cannot_become_a_job_is_refused(made, more, message, here, capsys):
    path = made if isinstance(made, str) else rows(here / "rows.jsonl", made)
    assert main(["init", path, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and ":0:" not in error and not (here / "jobs").exists()


def test_held_out_files_are_not_trained_on(here):
    """Of a folder with files of both, and of a set with a split for it."""
    for name in ("train-0", "train-1", "test"):
        rows(here / f"both/{name}.jsonl", PAIRS)
    data = init("both")("both", "rm").data
    assert (data.train, data.eval) == ("both/train-*.jsonl", "both/test.jsonl")
    assert data.eval_fraction == 0
    one = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict(train=one, validation=one).save_to_disk(here / "saved")
    data = init("saved")("saved", "rm").data
    assert (data.train, data.eval) == ("saved", "saved/validation")


def test_each_file_goes_to_the_stages_that_can_read_it(here, capsys):
    """Files of one kind may have different columns. A file that no stage reads is skipped."""
    rows(here / "two/a.jsonl", PAIRS)
    rows(here / "two/b.jsonl", plain_pairs(9))
    rows(here / "two/c.jsonl", [{"numbers": n} for n in range(5)])
    written = init("two")
    assert "two/c.jsonl: skipped, read by no stage; its columns are numbers" in capsys.readouterr().out
    a, b = written("two", "dpo").data.train
    assert (a["path"], a["columns"]["label"], b) == ("two/a.jsonl", "preference", {"path": "two/b.jsonl"})
    assert main(["validate", "jobs/two/dpo.yaml"]) == 0


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_of_an_example_are_read_as_in_the_example(name, here):
    stage, _, example = name.partition("/")
    (path,) = (ROOT / "tests/data/shapes").glob(f"{example}.*")
    ours = init(str(path), "--name", "mine")("mine", stage).data
    theirs = load_job(ROOT / f"jobs/examples/{example}.yaml", [], stage).data
    assert ours.train == str(path) and (theirs.transform or theirs.label)
    for key in ("columns", "label", "transform", "group_by"):
        assert getattr(ours, key) == getattr(theirs, key)
    assert (here / f"jobs/examples/{example}.yaml").exists() == bool(theirs.transform)


def test_rows_that_cannot_be_read_are_reported(here, capsys):
    """A CSV file of Windows: the first line with a curly quote names the problem, before any run drops the rows."""
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
    """The reward model reads plain text, and would otherwise see another format than the policy."""
    shutil.copytree(MODEL, here / "base")
    (here / "base/chat_template.jinja").unlink()
    turns = [{"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]} for n in range(9)]  # fmt: skip
    rows(here / "both/talks.jsonl", turns)
    rows(here / "both/pairs.jsonl", PAIRS)
    assert main(["init", "both", "--model", "base"]) == 0
    jobs = [load_job(path) for path in (here / "jobs/both").glob("*.yaml") if path.stem != "iterate"]
    assert {job.model.chat_template for job in jobs} == {"plain"}
    assert main(["init", "both/pairs.jsonl", "--model", "base"]) == 0
    assert load_job("jobs/pairs/rm.yaml").model.chat_template is None


def test_evaluate_reads_the_held_out_prompts_of_a_file_with_other_column_names(here):
    made = [{"user_query": f"What is {n} and {n}?", "locale": "en"} for n in range(60)]
    rows(here / "both/prompts.jsonl", made)
    rows(here / "both/pairs.jsonl", PAIRS)
    written = init("both")
    assert written("both", "ppo").data.columns == {"prompt": "user_query"}
    assert written("both", "evaluate").data.columns is None

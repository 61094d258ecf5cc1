"""`rlhf init`: jobs for a file whose columns nobody has named."""

import json

import datasets
import pytest
import yaml
from running import ROOT

from pipeline.__main__ import main
from pipeline.commands import shipped
from pipeline.commands.init import EXAMPLES, name_of
from pipeline.config import load_job
from pipeline.data import lookahead
from pipeline.data.files import find

PAIRS = [
    {"question": f"What is {n} and {n}?", "output_1": f"It is {2 * n}.", "output_2": f"It is {n}, I think.", "preference": 1 + n % 2}
    for n in range(20)
]  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(path, made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path.name


def test_a_job_for_each_stage_that_can_read_the_rows(here, capsys):
    assert main(["init", rows(here / "my.pairs.jsonl", PAIRS)]) == 0
    shown = capsys.readouterr().out
    assert "python -m pipeline rm jobs/my/rm.yaml" in shown
    assert sorted(path.stem for path in (here / "jobs/my").iterdir()) == ["dpo", "kto", "ppo", "rm"]
    job = load_job("jobs/my/rm.yaml", [], "rm")
    assert job.data.columns == {
        "prompt": "question",
        "first": "output_1",
        "second": "output_2",
        "label": "preference",
    }
    assert (
        job.data.train == "my.pairs.jsonl"
        and job.model.name_or_path == load_job(ROOT / "jobs/own/rm.yaml").model.name_or_path
    )
    # the rows can be read with it, as they could not without
    lookahead.settled(
        lookahead.preprocessing("rm", job.data), {"train": find(job.data.train, "data.train")}, "rm"
    )
    with pytest.raises(Exception, match="of no shape that `rm` reads"):
        bare = lookahead.preprocessing("rm", load_job(ROOT / "jobs/own/rm.yaml").data)
        lookahead.settled(bare, {"train": find(job.data.train, "data.train")}, "rm")


def test_rows_that_fit_as_they_are_get_no_columns_and_another_profile_is_named(here):
    plain = [{"prompt": f"Say {n}.", "completion": f"{n}, as you wish."} for n in range(10)]
    assert main(["init", rows(here / "talks.jsonl", plain), "llama3-8b-qlora"]) == 0
    text = yaml.safe_load((here / "jobs/talks/sft.yaml").read_text())
    assert text["extends"] == "../llama3-8b-qlora/sft.yaml" and "columns" not in text["data"]
    assert (here / "jobs/llama3-8b-qlora/llama3.jinja").exists() or (
        here / "jobs/llama3-8b-qlora/sft.yaml"
    ).exists()
    assert load_job("jobs/talks/sft.yaml", [], "sft").data.eval_fraction == 0.1


def test_a_label_whose_meaning_is_not_clear_is_left_to_say(here):
    unclear = [row | {"preference": n % 2} for n, row in enumerate(PAIRS)]
    assert main(["init", rows(here / "u.jsonl", unclear)]) == 0
    assert "label: null" in (here / "jobs/u/rm.yaml").read_text()


@pytest.mark.parametrize(
    ("made", "more", "message"),
    [
        ([{"a": 1}], [], "is of no shape that"),
        (PAIRS, ["nonsense"], "there is no profile 'nonsense'"),
        (None, [], "there is no file"),
    ],
)
def test_what_cannot_become_a_job_is_refused(made, more, message, here, capsys):
    if made:
        rows(here / "rows.jsonl", made)
    assert main(["init", "rows.jsonl", *more]) == 2
    assert message in capsys.readouterr().err and not (here / "jobs").exists()


def test_jobs_that_are_there_are_not_overwritten(here, capsys):
    name = rows(here / "my.jsonl", PAIRS)
    assert main(["init", name]) == 0
    (here / "jobs/my/rm.yaml").write_text("mine\n")
    assert main(["init", name]) == 2
    assert "there already" in capsys.readouterr().err and (here / "jobs/my/rm.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/own.jsonl", "own_rows"), ("hf://datasets/org/set@main:config/train", "set"), ("a/b c.csv.gz", "b_c"), ("s3://x/rows/", "rows")],
)  # fmt: skip
def test_the_folder_of_the_jobs_is_no_profiles(path, name):
    assert name_of(path) == name


def test_every_profile_has_a_job_for_each_stage_that_init_writes():
    for profile in shipped.profiles():
        assert all(
            (shipped.JOBS / profile / f"{stage}.yaml").is_file()
            for stage in ("sft", "rm", "dpo", "kto", "ppo")
        ), profile


def test_held_out_files_are_not_trained_on(here):
    """Of a folder with files of both, and of a set with a split for it."""
    (here / "both").mkdir()
    for name in ("train-0", "train-1", "test"):
        rows(here / f"both/{name}.jsonl", PAIRS)
    assert main(["init", "both"]) == 0
    data = load_job("jobs/both/rm.yaml", [], "rm").data
    assert data.train == ["both/train-0.jsonl", "both/train-1.jsonl"] and data.eval == "both/test.jsonl"
    assert data.eval_fraction == 0
    one = datasets.Dataset.from_list(PAIRS)
    datasets.DatasetDict(train=one, validation=one).save_to_disk(here / "saved")
    assert main(["init", "saved"]) == 0
    data = load_job("jobs/saved/rm.yaml", [], "rm").data
    assert (data.train, data.eval) == ("saved", "saved/validation")


def test_all_files_are_looked_at(here, capsys):
    (here / "two").mkdir()
    rows(here / "two/a.jsonl", PAIRS)
    rows(here / "two/b.jsonl", [{"text": f"Say {n} to it."} for n in range(5)])
    assert main(["init", "two"]) == 2
    shown = capsys.readouterr().err
    assert (
        "two/a.jsonl has the columns question, output_1" in shown
        and "two/b.jsonl has text: rows of two" in shown
    )


def test_what_is_trained_has_names_of_its_own(here):
    both = [{"prompt": f"Say {n}.", "chosen": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}],
             "rejected": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "No!"}],
             "messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]} for n in range(9)]  # fmt: skip
    assert main(["init", rows(here / "all.jsonl", both)]) == 0
    jobs = {stage: load_job(f"jobs/all/{stage}.yaml", [], stage) for stage in ("sft", "rm", "dpo", "ppo")}
    assert {job.mlflow.registered_model for job in jobs.values()} == {f"all-{stage}" for stage in jobs}
    assert jobs["dpo"].policy == jobs["ppo"].policy == "models:/all-sft@champion"
    assert jobs["ppo"].reward == "models:/all-rm@champion"
    assert main(["init", rows(here / "pairs.jsonl", PAIRS)]) == 0  # without demonstrations of their own
    assert load_job("jobs/pairs/dpo.yaml", [], "dpo").policy == "models:/rlhf-own-sft@champion"


@pytest.mark.parametrize("name", [name for name in EXAMPLES])
def test_the_example_that_reads_such_rows_is_named(name, here, capsys):
    stage, _, example = name.partition("/")
    (path,) = (ROOT / "tests/data/shapes").glob(f"{example}.*")
    assert main(["init", str(path)]) == 0
    assert (
        f"python -m pipeline {stage} jobs/examples/{example}.yaml data.train={path}"
        in capsys.readouterr().out
    )
    data = load_job(f"jobs/examples/{example}.yaml", [], stage).data
    assert data.transform or data.label
    assert not (here / f"jobs/{name_of(str(path))}/{stage}.yaml").exists()


def test_every_example_with_a_transform_is_known_by_its_columns():
    files = (ROOT / "jobs/examples").glob("*.yaml")
    told = [file for file in files if "transform: " in file.read_text() or "good: " in file.read_text()]
    assert {name.partition("/")[2] for name in EXAMPLES} == {file.stem for file in told}


def test_answers_labelled_as_bad_are_not_imitated(here):
    made = [{"question": f"Say {n}.", "answer": f"It is {n}.", "feedback": ("up", "down")[n % 2]} for n in range(8)]  # fmt: skip
    assert main(["init", rows(here / "support.jsonl", made)]) == 0
    data = load_job("jobs/support/sft.yaml", [], "sft").data
    assert data.columns == {"prompt": "question", "completion": "answer", "label": "feedback"}
    assert data.on_error == "skip"  # so the answers labelled as bad are left out


def test_ratings_need_thresholds(here, capsys):
    made = [{"prompt": f"Say {n}.", "completion": f"It is {n}.", "rating": 1 + n % 5} for n in range(10)]
    assert main(["init", rows(here / "r.jsonl", made)]) == 0
    assert "label: null" in (text := (here / "jobs/r/kto.yaml").read_text()) and "{good: VALUE, bad: VALUE}" in text  # fmt: skip


def test_the_folder_of_a_model_holds_no_rows(capsys):
    assert main(["init", str(ROOT / "jobs/demo/model")]) == 2
    error = capsys.readouterr().err
    assert "is the folder of a model" in error and ":0:" not in error

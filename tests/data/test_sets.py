"""Tests datasets: folders of save_to_disk, folders with a README, and datasets on a Hub that runs on this machine."""

import json
import os
import subprocess
import sys

import pytest
from datasets import Dataset, DatasetDict
from model_hub import of_folder, serve
from running import ROOT
from toy_data import ROWS, make, read_rows

from pipeline.data import files
from pipeline.errors import InputError

README = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*
  - split: test_prefs
    path: data/test-*
- config_name: small
  data_files: small.jsonl
---
# A set
"""


@pytest.fixture
def folder(tmp_path):
    """Makes and returns a folder like the clone of a Hub dataset."""
    path = tmp_path / "prefs"
    (path / "data").mkdir(parents=True)
    Dataset.from_list(ROWS[:30]).to_parquet(path / "data/train-00000-of-00001.parquet")
    Dataset.from_list(ROWS[30:]).to_parquet(path / "data/test-00000-of-00001.parquet")
    (path / "small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    (path / "README.md").write_text(README)
    return path


def found(item, key="data.train"):
    return [os.path.basename(file.path) for file in files.find_files(str(item), key)]


def found_paths(item, key="data.train"):
    return [file.path for file in files.find_files(str(item), key)]


def test_saved_folders(tmp_path):
    def rows(item, key="data.train"):
        return [row for path in found_paths(tmp_path / item, key) for _, row in read_rows(path)]

    splits = DatasetDict({"train": Dataset.from_list(ROWS[:40]), "test": Dataset.from_list(ROWS[40:])})
    splits.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    assert rows("saved") == rows("saved/") == rows("saved/train") == ROWS[:40]
    assert rows("saved/test", "data.eval") == ROWS[40:]
    several = r"several splits; expected one of .*saved/train, .*saved/test"
    with pytest.raises(InputError, match=several) as caught:
        found(tmp_path / "saved", "data.eval")
    assert caught.value.key == "data.eval"
    with pytest.raises(InputError, match="no split 'validation'; expected one of"):
        found(tmp_path / "saved/validation")
    assert make(tmp_path, train=str(tmp_path / "saved")).train.num_rows == 40
    (tmp_path / "saved/train/state.json").write_text("{")
    with pytest.raises(InputError, match=r"saved' cannot be read \(JSONDecodeError"):
        found(tmp_path / "saved")


def test_a_folder_with_a_readme(folder):
    for item in ("", "/", "/train", ":default", ":default/train"):
        assert found(f"{folder}{item}") == ["train-00000-of-00001.parquet"], item
    for item in ("/test_prefs", ":default/test_prefs"):
        assert found(f"{folder}{item}", "data.eval") == ["test-00000-of-00001.parquet"]
    assert found(f"{folder}:small") == found(f"{folder}:small/train", "data.eval") == ["small.jsonl"]
    # a glob pattern may select files in a dataset folder
    assert found(f"{folder}/data/test*") == ["test-00000-of-00001.parquet"]
    assert found(f"{folder}/data") == ["train-00000-of-00001.parquet"]
    assert found(f"{folder}/data", "data.eval") == ["test-00000-of-00001.parquet"]
    for item, said in [
        (":large/train", r"Available: \['default', 'small'\]"),
        (":small/test", r"no split 'test'; expected one of .*prefs:small/train"),
        ("/tset", "no split 'tset'; expected one of .*prefs/train, .*prefs/test_prefs"),
    ]:
        with pytest.raises(InputError, match=said):
            found(f"{folder}{item}")
    (folder / "README.md").unlink()
    assert len(found(folder)) == 2  # all files but data/test-00000-of-00001.parquet
    # without a README, the file names determine the splits
    assert found(f"{folder}:default/train") == ["train-00000-of-00001.parquet"]


def test_a_readme_that_lists_data_files_is_rejected(tmp_path):
    (tmp_path / "small.jsonl").write_text('{"data": [{"prompt": "a"}]}')
    readme = "configs:\n- config_name: small\n  data_files: small.jsonl\n  field: data\n"
    (tmp_path / "README.md").write_text(f"---\n{readme}---\n")
    with pytest.raises(InputError, match=r"README of .* sets `field`"):
        found(f"{tmp_path}:small")


# ---- the Hub, in a new process because huggingface_hub reads its settings once ----------------------------------------

READ = """
import json, sys
from pathlib import Path
from toy_data import ROWS, make, read_rows, write
from pipeline.data import files
for item in json.loads(sys.argv[1]):
    try:
        found = files.find_files(item, "data.train")
        print(json.dumps([[f.path, f.revision] for f in found] + [len(read_rows(f.path)) for f in found]))
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
here = Path(sys.argv[2])
make(here, train=write(here / "rows.jsonl", ROWS))
assert "torch" not in sys.modules, "a task of Ray Data would take seconds more"
"""


def in_process(items, tmp_path, **environment):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    command = [sys.executable, "-c", READ, json.dumps(items), str(tmp_path)]
    environment = {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "0", **environment}
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_dataset_on_the_hub_is_pinned_and_read_from_the_hub(folder, tmp_path):
    name = "hf://datasets/owner/prefs"
    train, test = (f"data/{split}-00000-of-00001.parquet" for split in ("train", "test"))
    expected = {
        name: (train, 30),
        f"{name}/train": (train, 30),
        f"{name}@v1:default/train": (train, 30),
        f"{name}/test_prefs": (test, 20),
        f"{name}:small": ("small.jsonl", 3),
        f"{name}/small.jsonl": ("small.jsonl", 3),
    }
    nobody = "hf://datasets/nobody/none:a/train"
    wrong = [f"{name}:large", f"{name}/tset", f"{name}@v9", nobody, f"{name}/data/none.jsonl"]
    with serve() as hub:
        commits = {hub.put("datasets/owner/prefs", of_folder(folder), branch=one) for one in ("main", "v1")}
        made = in_process([*expected, *wrong], tmp_path, HF_ENDPOINT=hub.address)
    (commit,) = commits
    pinned = f"{name}@{commit}"
    assert made[:6] == [[[f"{pinned}/{path}", commit], count] for path, count in expected.values()]
    said = ["Available: ['default', 'small']", f"{name}/test_prefs", *["cannot be read from the Hub"] * 2]
    for error, words in zip(made[6:], [*said, "there is no file"], strict=True):
        assert error.startswith("InputError") and words in error


def test_an_unreachable_hub_and_its_cache(folder, tmp_path):
    (folder / "test_prefs").mkdir()  # a folder with the same name as a split
    (folder / "test_prefs/notes.txt").write_text("n")
    name = "hf://datasets/owner/prefs"
    away = in_process([f"{name}:default/train"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")[0]
    for words in (
        "cannot be read from the Hub",
        "hf download --repo-type dataset owner/prefs",
        "HF_HUB_OFFLINE=1",
    ):
        assert words in away
    cold = in_process([name], tmp_path, HF_HUB_OFFLINE="1")[0]
    assert "is not in the local cache" in cold and "hf download" in cold
    download = "from huggingface_hub import snapshot_download as s; s('owner/prefs', repo_type='dataset')"
    with serve() as hub:
        commit = hub.put("datasets/owner/prefs", of_folder(folder))
        settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        subprocess.run(
            [sys.executable, "-c", download], env={**os.environ, **settings}, check=True, timeout=120
        )
    items = [name, f"{name}/test_prefs", f"{name}:small", f"{name}/small.jsonl"]
    made = in_process(items, tmp_path, HF_HUB_OFFLINE="1")
    assert [one[0][1] for one in made] == [commit] * 4 and [one[1] for one in made] == [30, 20, 3, 3]

"""Tests submitting jobs to a real Ray head with a token, and the checks before the upload."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.metadata import version as ray_version
from pathlib import Path

import psutil
import pytest
from head import TOKEN, Head, Proxy
from ray.job_submission import JobInfo, JobStatus
from running import ROOT
from sockets import sockets

from pipeline.__main__ import main
from pipeline.cloud import preflight, submit
from pipeline.cloud.clusterfile import NodeType
from pipeline.cloud.workload import workload_of
from pipeline.errors import InputError
from pipeline.job import load_job
from tools.chaos.runs import until

GPU = NodeType({"CPU": 8.0, "GPU": 1.0}, max_workers=4)


@pytest.fixture(scope="module")
def head():
    with Head() as one:
        yield one


@pytest.fixture
def cluster(head, monkeypatch):
    """Sets the environment variables of a user who submits jobs to this head."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    return head


def refused(capsys, *arguments):
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


SECRETS = [".env", "jobs/.env.prod", ".aws/credentials", ".ssh/id_ed25519", ".ray/auth_token", "tls.key", "service-account-1.json"]  # fmt: skip


def test_the_paths_of_a_job_are_all_its_local_files(in_root):
    rows = "data.train=[{path: /e, weight: 1}, {path: s3://b/c, weight: 2}]"
    job = load_job("jobs/demo/ppo.yaml", ["policy=/a", "judge={judge: /b}", "reward=[/c, /d]", rows], "ppo")
    found = {path: key for key, path in workload_of(job).paths}
    keys = {"/a": "policy", "/b": "judge", "/c": "reward.0", "/d": "reward.1", "/e": "data.train"}
    assert keys.items() <= found.items() and "s3://b/c" not in found


def test_keys_and_tokens_in_the_folder_are_not_uploaded(tmp_path):
    shutil.copy(ROOT / ".rayignore", tmp_path)
    uploaded = ["pipeline/run/launch.py", "jobs/demo/sft.yaml", "my_rewards.py", "data/rows.jsonl"]
    for name in [*SECRETS, *uploaded]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert set(preflight.upload_files(str(tmp_path))) - {".rayignore"} == set(uploaded)


def test_a_sweep_is_submitted_under_its_name(in_root):
    path, overrides = "jobs/demo/rm.yaml", ["lora.r=8,16"]
    name, [job] = submit.load_workloads("sweep", path, overrides)
    assert name == submit.load_workloads("sweep", path, overrides)[0] and name.startswith("sweep-rm-")
    assert (job.stage, job.storage_path) == ("rm", "runs")
    with pytest.raises(InputError, match=r"lora\.r"):
        submit.load_workloads("sweep", path, ["lora.r=8,0"])


# ------------------------------------------------------------------------------------------- errors, with a head


def test_a_job_with_a_mistake_is_not_submitted(cluster, capsys, tmp_path, monkeypatch):
    sft, runs = ("sft", "jobs/demo/sft.yaml"), f"run.storage_path={tmp_path}/runs"
    room = "32 workers with 1 CPU each, but the cluster has resources for 4"
    assert "s3://BUCKET/runs" in refused(capsys, *sft)  # a relative storage_path
    assert "trainer.learning_rat" in refused(capsys, *sft, runs, "trainer.learning_rat=1")
    assert room in refused(capsys, *sft, runs, "scaling.num_workers=32", "data.batch_size=512")
    monkeypatch.setenv("FORWARD", "NOT_SET_HERE")
    assert "NOT_SET_HERE is not set" in refused(capsys, *sft, runs)
    monkeypatch.delenv("FORWARD")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)
    assert "rejects the token" in refused(capsys, *sft, runs)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nothing"))
    assert "copy ~/.ray/auth_token from the head" in refused(capsys, *sft, runs)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert submit.Api(cluster.address).jobs() == []


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("/api/version", {"ray_version": "2.59.0"}, r"runs Ray 2\.59\.0 and"),
        ("/api/v0/cluster_metadata", {"pythonVersion": "3.10.4"}, r"make setup PYTHON=python3\.10"),
    ],
)
def test_a_cluster_with_other_versions_is_refused(path, change, message, cluster):
    """Simulates another version of Ray or Python by changing the head's response."""
    api = submit.Api(cluster.address)

    def get(requested):
        answer = api.get(requested)
        answer.get("data", answer).update(change if requested == path else {})
        return answer

    assert preflight.query_cluster(api.get, api.address).nodes
    with pytest.raises(InputError, match=message):
        preflight.query_cluster(get, api.address)


# ---------------------------------------------------------------------------------------- errors, without a head


def a_cluster(*nodes, types=None, most=0):
    return preflight.Cluster([NodeType(one) for one in nodes], types or {}, most)


@pytest.fixture
def job(monkeypatch):
    monkeypatch.chdir(ROOT)
    return lambda *overrides: workload_of(load_job(ROOT / "jobs/demo/sft.yaml", list(overrides)))


def test_resources_include_nodes_that_the_autoscaler_may_start(job):
    scaled_to_zero = a_cluster({}, types={"gpu": GPU}, most=4)
    gpus = ["scaling.use_gpu=true", "data.batch_size=840"]
    gpus.append("trainer.per_device_train_batch_size=1")
    preflight.check_resources(job(*gpus, "scaling.num_workers=4").places, scaled_to_zero)
    message = r"resources for 4 .*may start 4 x gpu \(8 CPU \+ 1 GPU\)\); set scaling.num_workers=4, change"
    with pytest.raises(InputError, match=message) as refused:
        preflight.check_resources(job(*gpus, "scaling.num_workers=8").places, scaled_to_zero)
    preflight.check_resources(job(*gpus, refused.value.change).places, scaled_to_zero)
    with pytest.raises(InputError, match="resources for 2 "):  # max_workers limits all node types together
        preflight.check_resources(
            job(*gpus, "scaling.num_workers=4").places, replace(scaled_to_zero, max_workers=2)
        )
    with pytest.raises(InputError, match="workers with 2 GPU each, but the cluster has resources for 0"):
        preflight.check_resources(job(*gpus, "scaling.resources_per_worker={GPU: 2}").places, scaled_to_zero)
    # With num_workers=[2, 8], a job can start with two workers.
    preflight.check_resources(job(*gpus, "scaling.num_workers=[2, 8]").places, scaled_to_zero)


def test_a_cluster_of_kuberay_may_have_an_autoscaler_with_unknown_types(job, capsys):
    head = [{"state": "ALIVE", "is_head_node": True, "node_ip": "10.0.0.1", "resources_total": {},
             "labels": {"ray.io/node-group": "headgroup"}}]  # fmt: skip
    python = "{}.{}.{}".format(*sys.version_info)
    answers = {
        "/api/version": {"ray_version": ray_version("ray")},
        "/api/v0/cluster_metadata": {"data": {"pythonVersion": python}},
    }
    nodes = {"data": {"result": {"result": head}}}
    cluster = preflight.query_cluster(lambda path: answers.get(path, nodes), "http://h")
    assert cluster.several
    preflight.check_resources(job("scaling.num_workers=4", "data.batch_size=64").places, cluster)
    assert (
        "warning: scaling.num_workers: no live nodes have resources for 4 workers" in capsys.readouterr().out
    )


def test_several_nodes_need_shared_storage_and_a_shared_mlflow_server(tmp_path, monkeypatch):
    two = a_cluster({"CPU": 4}, {"CPU": 4})
    with monkeypatch.context() as patch, pytest.raises(InputError, match="on this machine's own disk"):
        patch.chdir(tmp_path)
        preflight.check_storage(str(tmp_path), None, two)
    for shared in ("/mnt/not-here/runs", "s3://bucket/runs"):
        preflight.check_storage(shared, "http://10.9.8.0:5000", two)
    for own in ("sqlite:////mnt/mlflow.db", "http://127.0.0.1:5000"):
        with pytest.raises(InputError, match=r"mlflow\.tracking_uri: .* is a different file or server"):
            preflight.check_storage("s3://bucket/runs", own, two)
    preflight.check_storage(str(tmp_path), None, a_cluster({"CPU": 4}))


def test_files_that_nodes_do_not_get_are_named(job, tmp_path, monkeypatch):
    files, two = preflight.upload_files(), a_cluster({"CPU": 4}, {"CPU": 4})
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "pipeline").rglob("*.py")}
    assert modules | {"jobs/demo/sft.yaml"} <= set(files)
    assert not [name for name in files if name.startswith((".git/", ".venv", "tests/", "runs/"))]
    preflight.check_paths_on_cluster(job().paths, two, files)

    outside = tmp_path / "outside.jsonl"
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    shutil.copytree(ROOT / "jobs/demo", "jobs/demo")
    for name in (outside, here / "rows.jsonl"):
        name.write_text("{}\n")
    overrides = ["data.train=r*.jsonl", "model.name_or_path=jobs/demo/model"]
    rows = workload_of(load_job("jobs/demo/sft.yaml", overrides)).paths
    preflight.check_paths_on_cluster(rows, two, preflight.upload_files())
    Path(".rayignore").write_text("rows.jsonl\n")
    with pytest.raises(InputError, match=r"data\.train: 'rows.jsonl' would not be uploaded"):
        preflight.check_paths_on_cluster(rows, two, preflight.upload_files())
    elsewhere = workload_of(load_job("jobs/demo/sft.yaml", [f"data.train={outside}"])).paths
    with pytest.raises(InputError, match=r"data\.train: .*outside\.jsonl' is on this machine's own disk"):
        preflight.check_paths_on_cluster(elsewhere, two, {"jobs/demo/sft.yaml": 1})
    # The only node may be this machine, so a local path is accepted.
    preflight.check_paths_on_cluster([("data.train", str(outside))], a_cluster({"CPU": 4}), {})


def test_a_too_large_upload_names_its_largest_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(7):
        (tmp_path / f"big{number}.bin").touch()
        os.truncate(f"big{number}.bin", (20 + number) * 2**20)
    with pytest.raises(InputError, match="is 161 MiB, but the limit for uploads is 100 MiB") as error:
        preflight.upload_files()
    named = [line.split()[-1] for line in str(error.value).splitlines()[1:]]
    assert named == [f"big{number}.bin" for number in (6, 5, 4, 3, 2)]


def test_secrets_are_forwarded_by_name(monkeypatch, tmp_path, in_root):
    for name in submit.FORWARDED:
        monkeypatch.delenv(name, raising=False)
    assert submit.forwarded_variables() == {}
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert submit.forwarded_variables() == {"HF_TOKEN": "hf_secret"}, "nodes have their own IAM role"
    monkeypatch.setenv("FORWARD", "AWS_SECRET_ACCESS_KEY")
    assert submit.forwarded_variables().keys() == {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY"}

    file = tmp_path / "judge.yaml"
    file.write_text("model: wise\nform: score\nendpoint: https://there/v1\napi_key_variable: JUDGE_API_KEY\n")
    _, [job] = submit.load_workloads("ppo", "jobs/demo/ppo.yaml", [f"judge={{judge: {file}}}"])
    names = submit.judge_key_variables(job.judges)
    assert "JUDGE_API_KEY" not in submit.forwarded_variables(names), "it is not set here"
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    assert submit.forwarded_variables(names)["JUDGE_API_KEY"] == "secret"


# ------------------------------------------------------------------------------------------------------- real jobs


def submit_shell(api, name, lines=3, pause=0.0, status=0, end="true"):
    """Submits a shell command that prints lines."""
    code = f"for n in $(seq 0 {lines - 1}); do echo line $n; sleep {pause}; done; {end}; exit {status}"
    api.submit(submission_id=name, entrypoint=code, metadata={"run": name})


def test_the_exit_status_is_the_status_of_the_job(cluster, capsys):
    api = submit.Api(cluster.address)
    submit_shell(api, "fails", status=2, end="echo error: key: wrong")
    submit_shell(api, "died", status=2)  # as if a file of a library were missing
    assert submit.follow_submission(api, "fails") == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("line")]
    assert lines == ["line 0", "line 1", "line 2"]
    assert submit.follow_submission(api, "died") == 1
    assert "died failed: " in capsys.readouterr().err


def test_a_lost_connection_loses_no_line_and_repeats_none(cluster, capsys, monkeypatch):
    proxy = Proxy(cluster.port)
    # Ray's client prefers RAY_ADDRESS to its argument `address`.
    monkeypatch.setenv("RAY_ADDRESS", proxy.address)
    api = submit.Api(proxy.address)
    submit_shell(api, "cut", lines=25, pause=0.2)
    until(lambda: "line 1" in api.client().get_job_logs("cut"), "the first lines")

    for seconds, change in ((1, proxy.cut), (2.5, proxy.mend)):
        threading.Timer(seconds, change).start()
    assert submit.follow_submission(api, "cut") == 0
    shown = capsys.readouterr()
    assert "connection lost" in shown.err
    lines = [line for line in shown.out.splitlines() if line.startswith("line")]
    assert lines == [f"line {n}" for n in range(25)]


class ClientWithoutLog:
    """A Ray client that returns the job states `states` one after another, and cannot read the log."""

    def __init__(self, *states):
        self.states = list(states)

    def client(self):
        return self

    async def tail_job_logs(self, _):
        raise RuntimeError("WebSocket connection closed")
        yield

    def get_job_info(self, _):
        if isinstance(state := self.states.pop(0), Exception):
            raise state
        return JobInfo(status=JobStatus(state), message="its node died", entrypoint="", driver_exit_code=None)


def test_a_job_whose_log_cannot_be_read_ends_with_its_state(capsys, monkeypatch):
    monkeypatch.setattr(submit, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(submit.time, "sleep", lambda _: None)
    assert submit.follow_submission(ClientWithoutLog("RUNNING", "RUNNING", "FAILED"), "job") == 1
    message = capsys.readouterr().err
    lost = "connection lost (RuntimeError: WebSocket connection closed); job is still running"
    assert message.count(lost) == 1
    assert "the end of the log is missing" in message and "job failed: its node died" in message
    assert submit.follow_submission(ClientWithoutLog(OSError("no route"), "SUCCEEDED"), "job") == 0
    monkeypatch.setattr(submit, "SILENT_SECONDS", -1)
    with pytest.raises(OSError, match="no route"):  # creating Ray's client succeeds, but its requests fail
        submit.follow_submission(ClientWithoutLog(OSError("no route")), "job")


def test_leaving_a_job_and_ending_it(cluster, capsys, monkeypatch):
    """Ctrl-C ends `logs`, but the job continues and its name stays in use. `stop` ends the job."""
    api = submit.Api(cluster.address)
    submit_shell(api, "long", lines=1000, pause=0.2)
    command = [sys.executable, "-m", "pipeline.cloud.submit", "logs", "long"]
    how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **how) as follower:
        assert any(line.startswith("line 1") for line in follower.stdout)
        assert not sockets(psutil.Process(follower.pid)), "the process that follows a job listens on no port"
        follower.send_signal(signal.SIGINT)
        _, message = follower.communicate(timeout=60)
        assert follower.returncode == 130
    assert "make logs NAME=long" in message and "make stop NAME=long" in message
    with pytest.raises(InputError, match="'long' is running on this cluster"):
        submit.next_attempt(api, "long")
    assert submit.main(["stop", "long"]) == 0
    assert submit.follow_submission(api, "long") == 1
    assert "long stopped" in capsys.readouterr().err
    assert submit.next_attempt(api, "long") == "long.2"
    assert submit.main(["logs", "nobody"]) == 2
    assert "no job 'nobody'" in capsys.readouterr().err
    monkeypatch.delenv("RAY_ADDRESS")
    assert submit.main(["jobs"]) == 2
    assert "RAY_ADDRESS: missing; expected http://HEAD:8265" in capsys.readouterr().err


READ_SECRET = """
import os, ray, pipeline.__main__
pipeline.__main__.main([])
print("package", pipeline.__file__, os.path.isdir(pipeline.__path__[0] + "/jobs/demo"))
print("driver", os.environ["HF_TOKEN"][::-1])
ray.init(log_to_driver=False)
print("worker", ray.get(ray.remote(lambda: os.environ["HF_TOKEN"][::-1]).remote()))
"""


def test_jobs_get_an_installed_package_and_secrets_that_no_log_of_ray_has(
    cluster, capsys, tmp_path, monkeypatch
):
    """If a job is submitted outside a clone, the nodes import this machine's package instead of the package in their image."""
    with submit.runtime_env({}) as clone:
        assert clone["working_dir"] == "." and not clone["py_modules"]
    monkeypatch.chdir(tmp_path)
    api, secret = submit.Api(cluster.address), "hf_" + "planted" * 4
    command = shlex.join(["python", "-c", READ_SECRET])
    with submit.runtime_env({"HF_TOKEN": secret}) as environment:
        api.submit(submission_id="secret", entrypoint=command, runtime_env=environment)
    assert submit.follow_submission(api, "secret") == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert f"driver {secret[::-1]}" in shown and f"worker {secret[::-1]}" in shown
    [line] = [line for line in shown.splitlines() if line.startswith("package")]
    assert "py_modules" in line and line.endswith("True")
    assert secret not in str(api.get("/api/jobs/"))
    logs = cluster.folder / "session_latest/logs"
    assert len(found := [path for path in logs.rglob("*") if path.is_file()]) > 10
    assert not [path for path in found if secret.encode() in path.read_bytes()]


def test_an_address_with_a_vendors_scheme_is_resolved_by_ray(cluster, tmp_path, monkeypatch, capsys):
    """Uses the module of a fake vendor, which returns the cluster's address and credentials."""
    (tmp_path / "mycloud.py").write_text(
        "from ray.dashboard.modules.dashboard_sdk import ClusterInfo\n"
        "def get_job_submission_client_cluster_info(address, **_):\n"
        f"    return ClusterInfo('{cluster.address}', headers={{'Authorization': 'Bearer {TOKEN}'}})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("RAY_ADDRESS", "mycloud://cluster-1")
    assert submit.is_dashboard("mycloud://cluster-1") and not submit.is_dashboard("ray://head:10001")
    assert submit.main(["jobs"]) == 0
    assert preflight.query_cluster(submit.Api("mycloud://cluster-1").get, "mycloud://cluster-1").nodes
    monkeypatch.setenv("RAY_ADDRESS", "nocloud://cluster-1")
    assert submit.main(["jobs"]) == 2
    assert (
        "RAY_ADDRESS: 'nocloud://cluster-1' is not an address that Ray can parse (" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_stage_runs_on_the_cluster(cluster, capfd, tmp_path):
    """Two processes submit the same run at the same time.

    One process starts the run, and the other process exits with a message.
    """
    short = ["gate={}", "trainer.max_steps=1", "trainer.eval_on_start=false", "trainer.eval_strategy=no"]
    arguments = ["sft", "jobs/demo/sft.yaml", f"run.storage_path={tmp_path}/runs", "run.name=far", *short]
    command = [sys.executable, "-m", "pipeline", *arguments]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [subprocess.Popen(command, **how) for _ in range(2)]
    (status, shown), (other, refusal) = sorted((one.wait(), one.stdout.read()) for one in both)
    assert (status, other) == (0, 2), shown + refusal
    assert "submitting far to" in shown and "rlhf-sft v1" in shown, shown
    assert "on this cluster (far); to see its log, run make logs NAME=far" in refusal.splitlines()[-1]
    assert (tmp_path / "runs/far/result.json").exists()
    # No other process has tried to acquire the lease.
    assert len(list((tmp_path / "runs/far/lease").iterdir())) == 1
    wrong = [*arguments, "run.name=wrong", "data.train=jobs/demo/data/preferences.jsonl"]
    assert main(wrong) == 2
    assert "these rows can train rm" in capfd.readouterr().out


def test_a_command_on_this_machine_needs_the_registry_of_the_cluster(monkeypatch, capsys, tmp_path, in_root):
    """Without a tracking URI, the command would search an empty SQLite file on this machine."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    command = ["chat", "jobs/llama3-8b/generate.yaml", f"run.storage_path={tmp_path}"]
    error = refused(capsys, *command)
    assert "RAY_ADDRESS: found http://127.0.0.1:9, but" in error and "make chat PROFILE=llama3-8b;" in error
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    here = ["model.name_or_path=jobs/demo/model", "scaling.use_gpu=false"]
    assert "no registered model" in refused(capsys, *command, *here)

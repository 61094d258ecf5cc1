"""Tests that only the session that started an embedded Ray can use it, and that a session leaves no process or file behind."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import grpc
import psutil
import pytest
from running import ROOT, stage
from sockets import on_loopback, sockets

from tests.test_security import SECRETS, leaks
from tools.chaos.runs import until

# A client with the token could make Ray's agent run this command.
COMMAND = json.dumps({"entrypoint": "true"})
# (method, path, body) of requests that the HTTP servers of a session answer only with the token
REQUESTS = [
    ("POST", "/api/job_agent/jobs/", COMMAND),
    ("GET", "/api/job_agent/jobs/x/logs", None),
    ("POST", "/get_or_create_runtime_env", ""),
]
OPEN = ("# HELP", "# TYPE")  # start of Prometheus metrics, which need no token
# One method of each of Ray's gRPC services that can run code, read data or stop processes.
CALLS = ["CoreWorkerService/PushTask", "InternalKVGcsService/InternalKVKeys", "NodeManagerService/RequestWorkerLease",
         "ReporterService/GetTraceback"]  # fmt: skip


def http_answers(address, port):
    """Sends REQUESTS without a token. Returns [(path, status, start of the body)], or [] if the server does not speak HTTP."""
    answers = []
    for method, path, body in REQUESTS:
        connection = http.client.HTTPConnection(address, port, timeout=5)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answers.append((path, response.status, response.read(200).decode("utf-8", "replace")))
        except (http.client.HTTPException, OSError):
            return []
        finally:
            connection.close()
    return answers


def grpc_codes(address, port):
    """Returns {method: status code} of CALLS without a token."""
    codes = {}
    # Uses a plain gRPC channel, because Ray's own channels would send the token.
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        for method in CALLS:
            call = channel.unary_unary(
                f"/ray.rpc.{method}", request_serializer=bytes, response_deserializer=bytes
            )
            try:
                call(b"", timeout=5)
                codes[method] = "OK"
            except grpc.RpcError as error:
                codes[method] = error.code().name
    return codes


def knock(address, port, ended):
    """Sends a server requests without a token, by HTTP or gRPC. Returns the answers. Tries again while the server is starting.

    Args:
        ended: event that is set when the run has ended.
    """
    for _ in range(5):
        answers = http_answers(address, port)
        codes = {} if answers else grpc_codes(address, port)
        if answers or "UNAUTHENTICATED" in codes.values() or ended.wait(2):
            break
    return answers, codes


SFT = [
    "trainer.max_steps=2", "trainer.warmup_steps=0", "trainer.learning_rate=2e-2", "trainer.save_strategy=steps",
    "trainer.save_steps=1",
]  # fmt: skip
RUNS = {
    "sft": ["sft", "jobs/demo/sft.yaml", *SFT, "scaling.num_workers=2"],
    "ppo": [
        "ppo", "jobs/demo/ppo.yaml", "policy=base", "reward=python:pipeline.demo:gold", "judge=null", "data.eval=null",
        "trainer.total_episodes=32", "trainer.batch_size=16", "trainer.normalize_rewards=false", "scaling.num_workers=1",
        "rollout.num_workers=1",
    ],
}  # fmt: skip
WORKERS = {"sft": "ray::RayTrainWorker", "ppo": "ray::RolloutWorker"}


@pytest.fixture(scope="module", params=["sft", pytest.param("ppo", marks=pytest.mark.slow)])
def run(request, tmp_path_factory):
    """Runs a job with workers. Returns the run's listening sockets, their answers to requests without a token, and the output."""
    folder = tmp_path_factory.mktemp("sockets")
    command = [
        sys.executable, "-m", "pipeline", *RUNS[request.param], f"run.storage_path={folder}", "run.name=one",
        "run.report=false", "gate={}",
    ]  # fmt: skip
    # user settings that the session must override
    env = os.environ | SECRETS | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    env.pop("RAY_AUTH_TOKEN", None)
    # In this folder, Ray's processes look for the address of the cluster that was last started on this machine.
    root = Path(tempfile.mkdtemp(prefix="r"))  # a short path, because socket paths have a length limit
    (root / "ray").mkdir()
    (root / "ray/ray_current_cluster").write_text("127.0.0.1:1")
    env["RAY_TMPDIR"] = str(root)
    listening, knocks, ended = {}, {}, threading.Event()
    with (
        subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as driver,
        ThreadPoolExecutor(16) as hands,
    ):
        try:
            while driver.poll() is None:
                for place, name in sockets(psutil.Process(driver.pid)).items():
                    if place not in listening and on_loopback(place[0]):
                        knocks[place] = hands.submit(knock, *place, ended)
                    names = listening.setdefault(place, set())
                    names.add(name)  # the name of a process changes when it becomes a RayTrainWorker
                time.sleep(2)  # pauses, because the search uses much CPU time
        finally:
            driver.kill()
            ended.set()
        said = driver.stdout.read()
    # Another user could replace Ray's unix sockets inside of this folder.
    mode = (root / f"rlhf-{os.getuid()}").stat().st_mode & 0o777
    shutil.rmtree(root)
    assert mode == 0o700
    assert driver.returncode == 0, said.decode()[-3000:]
    return SimpleNamespace(
        listening=listening, knocks={place: one.result() for place, one in knocks.items()}, stdout=said, stderr=b"",
        folder=folder / "one", worker=WORKERS[request.param],
    )  # fmt: skip


def test_a_run_listens_on_loopback_only(run):
    outside = {place: name for place, name in run.listening.items() if not on_loopback(place[0])}
    assert not outside
    names = " ".join(chain.from_iterable(run.listening.values()))
    assert all(name in names for name in ("raylet", "gcs_server", "ray::DashboardAgent", run.worker))


def test_no_server_of_a_run_accepts_a_request_without_the_token(run):
    obeyed, agent, codes = [], set(), []
    for place, (answers, spoken) in run.knocks.items():
        for path, status, body in answers:
            if status < 400 and not body.startswith(OPEN):
                obeyed.append((run.listening[place], path, status, body))
            if path == REQUESTS[0][1]:
                agent.add(status)
        codes += spoken.items()
    assert not obeyed
    assert 401 in agent, "no request reached the agent that runs jobs"
    assert "OK" not in [code for _, code in codes]
    refused = {method for method, code in codes if code == "UNAUTHENTICATED"}
    assert refused == set(CALLS), "each of these services must require the token"


SAMPLES = [r"   [TWN].*[.?]", r"     before  [A-Z]\w+\.", r"     after   [A-Z]\w+\."] * 4
PHASES = [  # phases of a run in the order of its log
    r"== sft  run one  jobs/demo/sft.yaml", "starting Ray", "reading and tokenizing the rows", "<report>", r"  data  .*",
    "starting 2 workers: importing torch and transformers", r"loading jobs/demo/model \(1\.40MB\)",
    "evaluating 60 held-out rows, then training", r"step 0/2  held-out loss .*", r"step 2/2  .*held-out loss .*",
    "checking that the adapter reloads as it was saved", "registering rlhf-sft", *SAMPLES, r"  registered +rlhf-sft v1 @champion .*",
    r"  result +/.*/one/result\.json", r"  time +[\w ]+, [\d,]+ tokens",
]  # fmt: skip
# Lines that may be missing: progress of waits, which is printed only after a delay, and eval metrics.
WAITS = ["opening MLflow", "checking the model", r"  (held-out loss|(end )?token accuracy) +\S+ -> \S+"]
SHOWN = [  # all lines of stdout if it is not a terminal
    r"== sft  run one  jobs/demo/sft.yaml", r"  data +500 training rows, 60 eval rows, 52 duplicates",
    r"  train +2/2  held-out loss .*", *SAMPLES, *[WAITS[-1]] * 3, *PHASES[-3:],
]  # fmt: skip


@pytest.mark.parametrize("run", ["sft"], indirect=True)
def test_a_run_announces_each_phase_and_says_nothing_else(run):
    """Libraries must print nothing, because their output would hide the pipeline's warnings."""
    from pipeline.data.report import Report

    log, result = (run.folder / "log.txt").read_text(), json.loads((run.folder / "result.json").read_text())
    report = Report.from_dict(result["data"]["report"]).render(samples=False)
    assert report in log
    lines = [line for line in log.replace(report, "<report>").splitlines() if line]
    lines = [line for line in lines if not any(re.fullmatch(one, line) for one in WAITS)]
    assert len(lines) == len(PHASES) and all(map(re.fullmatch, PHASES, lines)), log
    printed = run.stdout.decode().splitlines()
    # The progress line of step 0 appears only if Ray starts slowly.
    shown = [line for line in printed if line and not re.match(r"  train +0/2 ", line)]
    assert len(shown) == len(SHOWN) and all(map(re.fullmatch, SHOWN, shown)), shown


@pytest.mark.parametrize("run", ["sft"], indirect=True)
def test_a_run_writes_no_secret_of_its_environment_anywhere(run):
    """Searches for secrets in the log, checkpoints, MLflow's database and artifacts, result.json and stdout."""
    written = {path.name for path in run.folder.parent.rglob("*")}
    assert {"mlflow.db", "result.json", "job.json", "adapter_model.safetensors", "log.txt"} <= written
    assert leaks(run.folder.parent, run) == []


# tests/stages/test_exact_batches.py compares the loss of each step on toy rows.
@pytest.mark.parametrize("run", ["sft"], indirect=True)
def test_two_workers_learn_what_this_process_learns(run, tmp_path):
    alone = stage("sft", tmp_path, "alone", *SFT)["metrics"]
    two = json.loads((run.folder / "result.json").read_text())["metrics"]
    for metric in ("initial_loss", "eval_loss", "train_loss"):
        assert two[metric] == pytest.approx(alone[metric], abs=1e-5)
    assert two["initial_loss"] - two["eval_loss"] > 5e-3, "nothing was learned, so nothing was compared"


SESSION = """
import sys
import ray  # before the session, as a notebook may have done
from pipeline.run import session
with session.embedded_ray(num_cpus=1, logging_level="warning"):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def start():
    """Returns a function that starts a process with an embedded session. The fixture ends the processes after the test."""
    started = []
    root = Path(tempfile.mkdtemp(prefix="r"))  # a short path, because socket paths have a length limit

    def begin():
        process = subprocess.Popen(
            [sys.executable, "-c", SESSION], cwd=ROOT, env=os.environ | {"RAY_TMPDIR": str(root)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline().startswith("127.0.0.1:")
        return process

    begin.sessions = lambda: sorted(root.glob("*/ray/session_*_*"))
    yield begin
    for process in started:
        process.kill()
        process.communicate()
    shutil.rmtree(root, ignore_errors=True)


def test_a_killed_session_leaves_only_rays_agents_and_an_ended_one_no_process_and_no_file(start):
    """After a kill, Ray's agents try for a minute to report the end of their session.

    The next session deletes all but the newest files of killed sessions.
    """
    driver = start()
    left = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()

    def only_agents():
        _, alive = psutil.wait_procs(left, timeout=0)
        with contextlib.suppress(psutil.NoSuchProcess):  # the process has ended in the meantime
            return all("Agent" in process.name() for process in alive)

    until(only_agents, "the end of all but the agents", patience=8)
    (newest,) = start.sessions()
    older = newest.with_name(newest.name.replace("session_20", "session_19"))
    older.mkdir()
    driver = start()
    running = start.sessions()
    assert len(running) == 2, "the newest killed session, whose logs may be needed, and the running one"
    assert newest in running
    left = psutil.Process(driver.pid).children(recursive=True)
    driver.communicate()
    assert driver.returncode == 0
    gone, alive = psutil.wait_procs(left, timeout=30)
    assert len(gone) > 4 and not alive
    assert start.sessions() == [newest]


def program(text, **more):
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, **more)


def test_a_call_of_ray_outside_a_session_starts_none(tmp_path):
    """By default, ray.put() would start a Ray with a dashboard, and write a token into the home folder."""
    script = "import pipeline, ray\ntry: ray.put(1)\nexcept Exception as error: print(type(error).__name__, ray.is_initialized())"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path)}
    done = program(script, env=environment, check=True)
    assert done.stdout.split()[1:] == ["False"] and not (tmp_path / ".ray").exists()


def test_a_ray_that_does_not_start_is_one_message():
    text = """
        import sys
        from pipeline import __main__
        from pipeline.run import session
        from pipeline.system import process
        def run(*_):
            with session.embedded_ray(num_cpus=1, object_store_memory=10**15):
                pass
        __main__.run_subcommand = run
        sys.exit(process.run_main(lambda: __main__.main(["sft", "job.yaml"])))
    """
    done = program(textwrap.dedent(text))
    assert done.returncode == 1
    says = (
        r"failed: Ray did not start \(ValueError: .*memory.*\)\. Its logs are in /.*/session_latest/logs.*"
        r"then run the same command again\n"
    )
    assert re.fullmatch(says, done.stderr), done.stderr

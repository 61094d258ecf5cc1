"""Starts, watches, restarts and compares runs of a stage. Each run is a separate process."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 14
# Token of the clusters and their drivers, so that no client on another machine can use the clusters.
AUTHENTICATION = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
PATIENCE = 240  # seconds after which a wait fails
SMALL = {
    "trl": [
        f"trainer.max_steps={STEPS}", "data.batch_size=8", "trainer.per_device_train_batch_size=4", "trainer.logging_steps=1",
        "trainer.save_strategy=steps", "trainer.save_steps=3", "data.eval=null", "trainer.eval_strategy=no",
        "trainer.eval_on_start=false",
    ],
    "ppo": [
        f"trainer.total_episodes={8 * STEPS}", "trainer.batch_size=8", "trainer.response_length=16", "trainer.save_steps=3",
        "trainer.kl_controller=adaptive", "trainer.kl_horizon=100", "trainer.normalize_values=true", "data.eval=null",
        "judge=null",
    ],
    # If no node has resources for a rollout worker, the trainers themselves sample before PATIENCE seconds have passed.
    "ahead": [
        "rollout.num_workers=1", "rollout.staleness=1", "rollout.chunk_timeout_s=5", "rollout.worker_wait_timeout_s=20",
        "trainer.local_rollout_forward_batch_size=4",
    ],
}  # fmt: skip
# metrics that differ between equal runs, because they depend on time or on the machine
MEASURED = re.compile(
    r"runtime|per_second|second|time|memory|flos|mfu|rollout/(wait_seconds|wait_fraction|idle|queue|bytes|workers|lost)"
)


def until(there: Any, what: str, patience: float = PATIENCE, every: float = 0.1) -> Any:
    """Calls `there()` repeatedly until its result is true. Returns this result."""
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        if found := there():
            return found
        time.sleep(every)
    raise TimeoutError(f"waited {patience:.0f} s for {what}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answers(url: str, **headers: str) -> bytes:
    """Returns the body of a server's response, or b"" if there is none."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5) as answer:
            return answer.read()
    except OSError:
        return b""


class Server:
    """An MLflow server. Several nodes must not share a SQLite file, even on one machine."""

    def __init__(self, folder: Path, artifacts: str | None = None):
        self.folder, self.artifacts = folder, artifacts or str(folder / "artifacts")
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination", self.artifacts,
        ]  # fmt: skip
        with open(self.folder / "mlflow.log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until(lambda: answers(f"{self.uri}/health"), "the MLflow server")
        return self

    def __exit__(self, *_: Any) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Run:
    """A run with a fixed name. After a kill, `again` starts the run in a new process."""

    process: Any = None  # process of the last driver

    def __init__(self, stage: str, name: str, folder: Path, server: Server, overrides: list[str]):
        self.name, self.folder, self.log = name, folder / "runs" / name, folder / f"{name}.log"
        self.arguments = [
            stage, f"jobs/demo/{stage}.yaml", "gate={}", f"run.storage_path={folder / 'runs'}", f"run.name={name}",
            f"mlflow.tracking_uri={server.uri}", f"mlflow.registered_model={name}", *overrides,
        ]  # fmt: skip
        self.lines: list[str] = []
        self.address: str | None = None  # address of a cluster that outlives the driver
        self.extra: tuple[str, ...] = ()
        self.pause = 0.35  # pause after each step in seconds
        self.env: dict[str, str] = {}
        self.finally_do: list[Any] = []

    def start(self, *extra: str) -> "Run":
        env = os.environ | {
            "CHAOS_STEP_S": str(self.pause), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **AUTHENTICATION,
            "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
            "PIPELINE_NOTICE_EVERY_S": "0.5", "PYTHONUNBUFFERED": "1",
            "RAY_prestart_worker_first_driver": "0",  # Ray starts no worker processes in advance
            **self.env,
        }  # fmt: skip
        env.pop("RAY_ADDRESS", None)
        if self.address:
            env["RAY_ADDRESS"] = self.address
        self.extra = extra
        command = [sys.executable, str(Path(__file__).parent / "slowly.py"), *self.arguments, "-v", *extra]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()
        return self

    def again(self) -> "Run":
        """Runs the same command again."""
        return self.start(*self.extra)

    def _read(self, lines: Any) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            for line in lines:
                self.lines.append(line)
                log.write(f"{time.strftime('%H:%M:%S')} {line}")
                log.flush()

    def says(self, pattern: str, since: int = 0) -> bool:
        return any(re.search(pattern, line) for line in self.lines[since:])

    def wait_for(self, pattern: str) -> None:
        def there() -> bool:
            ended = self.process.poll() is not None
            if ended:
                time.sleep(0.5)  # time to read the last lines of the driver
            if ended and not self.says(pattern):
                raise RuntimeError(f"the driver ended before it printed {pattern!r}")
            return self.says(pattern)

        until(there, f"{pattern!r} in {self.log}", every=0.02)

    def ends(self) -> int:
        return self.process.wait(timeout=PATIENCE)

    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        for undo in self.finally_do:
            undo()


class Baselines:
    """Makes undisturbed runs on first use. dpo, kto and ppo start from the adapters of sft and rm."""

    def __init__(self, folder: Path, server: Server):
        self.folder, self.server = folder, server
        self.made: dict[tuple[str, int], Run] = {}

    def of(self, stage: str, workers: int) -> Run:
        if (stage, workers) not in self.made:
            started = time.monotonic()
            run = self.start(stage, f"{stage}-{workers}", workers)
            try:
                status = run.start().ends()
            finally:
                run.stop()
            if status != 0:
                last = "".join(run.lines[-20:])
                raise RuntimeError(f"the undisturbed run failed: {run.log}\n{last}")
            self.made[stage, workers] = run
            seconds = time.monotonic() - started
            print(
                f"{stage:<4} undisturbed, {workers} worker{'s' * (workers > 1)}  {seconds:.0f} s", flush=True
            )
        return self.made[stage, workers]

    def start(self, stage: str, name: str, workers: int) -> Run:
        """Returns a run that is ready to start. `ahead` is ppo with a rollout worker that samples one update ahead."""
        ahead = SMALL["ahead"] if stage == "ahead" else []
        stage = "ppo" if ahead else stage
        overrides = [*SMALL["ppo" if stage == "ppo" else "trl"], f"scaling.num_workers={workers}", *ahead]
        if stage in ("dpo", "kto", "ppo"):
            overrides.append(f"policy={self.of('sft', 1).result()['adapter']}")
        if stage == "ppo":
            overrides.append(f"reward={self.of('rm', 1).result()['adapter']}")
        return Run(stage, name, self.folder, self.server, overrides)


def differences(client: Any, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Describes the differences between two finished runs, by their result.json.

    Args:
        client: MlflowClient of the store that has both runs.
    """
    weights = [Path(one["adapter"], "adapter_model.safetensors").read_bytes() for one in (a, b)]
    problems = [] if weights[0] == weights[1] else ["adapter_model.safetensors differs"]
    facts = [{**comparable(one["metrics"]), "kept": one["kept"], "ended": one["ended"]} for one in (a, b)]
    problems += [f"metric {text}" for text in unequal(*facts)]
    points = [curves(client, one["mlflow_run_id"]) for one in (a, b)]
    problems += [f"curve of {text}" for text in unequal(*points)] if points[0] else ["no curves"]
    found = client.search_runs(["1", "0"], filter_string=f"attributes.run_name = '{b['name']}'")
    if [one.info.status for one in found] != ["FINISHED"]:
        problems.append(f"MLflow runs: {[one.info.status for one in found]}, expected one, FINISHED")
    return problems


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not MEASURED.search(key)}


def curves(client: Any, run_id: str) -> dict[str, list[tuple[int, float]]]:
    keys = comparable(client.get_run(run_id).data.metrics)
    return {key: [(p.step, p.value) for p in client.get_metric_history(run_id, key)] for key in keys}


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {shown(b.get(key), a.get(key))}, expected {shown(a.get(key), b.get(key))}"
        for key in sorted(a.keys() | b.keys())
        if repr(a.get(key)) != repr(b.get(key))  # NaN equals NaN
    ][:6]


def shown(value: Any, other: Any) -> str:
    """Returns a number, or the part of a curve that the other curve lacks."""
    if not isinstance(value, list):
        return str(value)
    missing = [point for point in value if point not in (other or [])]
    return f"{len(value)} points" + (f" with {missing[:3]}" if missing else "")

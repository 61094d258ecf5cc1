"""Submits jobs to a Ray cluster. If RAY_ADDRESS=http(s)://HEAD:8265 is set, each stage runs on that cluster.

    RAY_ADDRESS=http://HEAD:8265 make sft PROFILE=llama3-8b ARGS="run.storage_path=s3://BUCKET/runs"
    python -m pipeline.cloud.submit logs|stop|jobs [NAME]        # later, from any machine

A submission uploads the working directory (except files in .rayignore), and runs `python -m pipeline STAGE JOB` on the head. This
process shows the job's log and exits with the job's status. If this process or its connection ends, the job continues.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pipeline
from pipeline.cloud import preflight
from pipeline.cloud.workload import Workload, workload_of
from pipeline.errors import InputError, in_brief
from pipeline.input_uri import InputURI
from pipeline.job import judge, load_job
from pipeline.job.stages import STAGE_SPECS
from pipeline.run import session
from pipeline.system import process, terminal
from pipeline.system.credentials import FORWARDED_MODULE, without_credentials

# Stages whose run.name becomes the name of the submission
CLUSTER_STAGES = tuple(name for name, spec in STAGE_SPECS.items() if spec.runs_in != "here")
VERBS = (*CLUSTER_STAGES, "sweep", "validate", "run")
# Environment variables of this machine that are forwarded to a job. AWS_* is not forwarded, because nodes have a role.
FORWARDED = """HF_TOKEN HF_ENDPOINT HF_HUB_OFFLINE MLFLOW_TRACKING_URI MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD
    MLFLOW_TRACKING_TOKEN MLFLOW_TRACKING_INSECURE_TLS WANDB_API_KEY WANDB_BASE_URL WANDB_ENTITY WANDB_MODE
    RLHF_SERVE_TOKENS""".split()
# Ray's loggers that are silenced because they print the name of each ignore file three times
CHATTY = ("ray._private.runtime_env", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
SILENT_SECONDS = 600  # time without a response after which this process stops showing a job's log


def submit_and_follow(verb: str, path: str, overrides: list[str]) -> int:
    """Checks a job, submits it, and shows its log. Returns the job's exit status."""
    name, workloads = load_workloads(verb, path, overrides)
    if verb in CLUSTER_STAGES and workloads[0].name is None:
        overrides = [*overrides, f"run.name={name}"]
    api = Api(os.environ["RAY_ADDRESS"])
    with api.first_contact():
        cluster = preflight.query_cluster(api.get, api.address)
    files = preflight.upload_files()
    for job in workloads:
        preflight.check_storage(job.storage_path, job.tracking_uri, cluster)
        preflight.check_paths_on_cluster(job.paths, cluster, files)
        preflight.check_resources(job.places, cluster)
        preflight.check_memory(job, cluster)
    submission = next_attempt(api, name)
    variables = forwarded_variables(judge_key_variables(file for job in workloads for file in job.judges))
    verbosity = [flag for flag, level in terminal.FLAGS.items() if level == terminal.screen.level][:1]
    size = sum(files.values()) / 2**20
    print(f"submitting {submission} to {api.address}: {len(files)} files, {size:.1f} MiB", flush=True)
    if variables:
        print(f"forwarding {', '.join(sorted(variables))}", flush=True)
    command = shlex.join(["python", "-m", "pipeline", verb, path, *overrides, *verbosity])
    with runtime_env(variables) as environment:
        try:
            api.submit(
                submission_id=submission,
                entrypoint=command,
                runtime_env=environment,
                metadata={"run": name, "verb": verb, "job": path},
            )
        except RuntimeError as error:
            if "already exists" in str(error):  # another process has just submitted a job with this name
                next_attempt(api, name)
            raise
    return follow_submission(api, submission)


@contextlib.contextmanager
def runtime_env(variables: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yields Ray's runtime environment for a job, with the files to upload, settings, and forwarded variables.

    The variables are uploaded as a Python module, because Ray would show `env_vars` in its logs and its list of jobs.
    """
    environment: dict[str, Any] = {"working_dir": ".", "env_vars": session.ENVIRONMENT, "py_modules": []}
    package = Path(pipeline.__file__).parent
    if package.parent != Path.cwd():  # not in a clone, so the installed package is uploaded
        environment["py_modules"].append(str(package))
    with tempfile.TemporaryDirectory() as folder:
        if variables:
            module = Path(folder, FORWARDED_MODULE)
            module.mkdir()
            (module / "__init__.py").write_text(f"VARIABLES = {variables!r}\n", encoding="utf-8")
            environment["py_modules"].append(str(module))
            environment["worker_process_setup_hook"] = "pipeline.system.credentials.take_forwarded"
        yield environment


def check_registry(command: str, references: Iterable[str], tracking_uri: str | None) -> None:
    """Raises InputError if a command that runs on this machine needs registered models, but no MLflow server is set."""
    server = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if server or not any(InputURI.parse(reference).is_registered for reference in references):
        return
    raise InputError(
        f"found {os.environ['RAY_ADDRESS']}, but this command runs on this machine, whose registry does not contain the cluster's "
        "models. Run `make ui` in a second terminal, and then run MLFLOW_TRACKING_URI=http://127.0.0.1:5000 "
        f"MLFLOW_TRACKING_USERNAME=admin MLFLOW_TRACKING_PASSWORD=$(cat ~/.ray/auth_token) {command}; "
        "to use models of this machine, unset RAY_ADDRESS",
        key="RAY_ADDRESS",
    )


def load_workloads(verb: str, path: str, overrides: list[str]) -> tuple[str, list[Workload]]:
    """Returns (name of the submission, jobs). Checks the jobs as if they ran on this machine."""
    if verb == "run":
        from pipeline.commands import run as rlhf

        jobs = [*rlhf.load_profile(path, overrides).values()]
    elif verb == "sweep":
        from pipeline.sweep import space

        sweep = space.read_sweep(path, overrides)
        return str(sweep.job.run.name), [workload_of(load_job(path, sweep.arguments))]
    else:
        jobs = [load_job(path, overrides, verb if verb in CLUSTER_STAGES else None)]
    name = jobs[0].run.name if verb in CLUSTER_STAGES else None
    default = f"{verb}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid() % 10000:04d}"
    return name or default, [workload_of(job) for job in jobs]


def judge_key_variables(files: Iterable[str]) -> set[str]:
    """Returns the names of the environment variables that contain the judges' API keys."""
    return {variable for file in files if (variable := judge.read_definition(file).api_key_variable)}


def forwarded_variables(extra: Iterable[str] = ()) -> dict[str, str]:
    """Returns {name: value} for those environment variables in FORWARDED, `extra` and $FORWARD that are set."""
    optional = {*FORWARDED, *extra}
    names = {*optional, *os.environ.get("FORWARD", "").replace(",", " ").split()}
    if unset := sorted(name for name in names - optional if not os.environ.get(name)):
        raise InputError(f"FORWARD: {', '.join(unset)} is not set; export it, or remove it from FORWARD")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def next_attempt(api: "Api", name: str) -> str:
    """Returns a submission id: NAME, or NAME.2, NAME.3, ... if NAME is taken. Ray accepts each submission id only once.

    Raises InputError if a submission with this name is still running.
    """
    attempts = [job for job in api.jobs() if (job.metadata or {}).get("run") == name]
    if running := [job for job in attempts if not job.status.is_terminal()]:
        state = f"{running[0].status.value.lower()} on this cluster ({running[0].submission_id})"
        advice = f"to see its log, run make logs NAME={name}; to stop it, run make stop NAME={name}; or set a different run.name"
        raise InputError(f"{name!r} is {state}; {advice}", key="run.name")
    return f"{name}.{len(attempts) + 1}" if attempts else name


# ------------------------------------------------------------------------------------------------------ the API


def is_dashboard(address: str) -> bool:
    """Returns True if jobs can be submitted to the address, such as http://HEAD:8265 or anyscale://NAME."""
    return "://" in address and not address.startswith("ray://")


def check_address(address: str) -> None:
    """Raises InputError if no process listens at HOST:PORT. Without this check, Ray would wait for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"no process answers at {address!r} ({in_brief(error)}); expected http://HEAD:8265 to submit jobs to a cluster, or "
            "auto or HOST:6379 on a node of the cluster",
            key="RAY_ADDRESS",
        ) from error


class Api:
    """A client for the Jobs API of a cluster's head."""

    def __init__(self, address: str):
        from ray.dashboard.modules.dashboard_sdk import parse_cluster_info

        token = os.environ.get("RAY_AUTH_TOKEN", "")  # the variable and the file that Ray reads
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        if not token and file.is_file():
            token = file.read_text(encoding="utf-8")
        headers = {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
        try:
            info = parse_cluster_info(address.rstrip("/"), headers=headers)
        except Exception as error:  # a vendor's module may parse the address and raise any exception
            problem = f"{address!r} is not an address that Ray can parse ({in_brief(error)})"
            raise InputError(problem, key="RAY_ADDRESS") from error
        self.address = info.address
        self.access: dict[str, Any] = {"headers": info.headers or {}, "cookies": info.cookies}

    @contextlib.contextmanager
    def first_contact(self) -> Iterator[None]:
        """Turns every error in the `with` block into an InputError about RAY_ADDRESS."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # a different program may listen at this port and cause any exception
            message = (
                f"no dashboard of a Ray cluster answers at {self.address!r} ({in_brief(error)}); expected http://HEAD:8265 of a "
                "running cluster (make status) with an open tunnel (make dashboard)"
            )
            raise InputError(message, key="RAY_ADDRESS") from error

    def get(self, path: str) -> Any:
        """Sends an authorized GET request, and returns the parsed JSON. Raises InputError if the head rejects the token."""
        import requests

        seconds = (3, 10)  # time limits for the connection and for the response
        response = requests.get(self.address + path, timeout=seconds, **self.access)
        if response.status_code in (401, 403):
            advice = "copy ~/.ray/auth_token from the head to the same path on this machine, or export RAY_AUTH_TOKEN"
            raise InputError(f"the cluster at {self.address} rejects the token; {advice}", key="RAY_ADDRESS")
        response.raise_for_status()
        return response.json()

    def client(self) -> Any:
        from ray.job_submission import JobSubmissionClient

        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.ERROR)
        return JobSubmissionClient(self.address, **self.access)

    def jobs(self) -> list[Any]:
        """Returns Ray's JobDetails of all submissions to the cluster, oldest first."""
        with self.first_contact():
            self.get("/api/version")
            submissions = [job for job in self.client().list_jobs() if job.submission_id]
            return sorted(submissions, key=lambda job: job.start_time or 0)

    def submit(self, **job: Any) -> None:
        """Uploads and submits a job. Retries for a minute, because a head that has just started cannot run jobs yet."""
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client().submit_job(**job)
                return
            except RuntimeError as error:
                if "No available agent" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(2)


# ---------------------------------------------------------------------------------------------------- following


def follow_submission(api: Api, submission: str) -> int:
    """Shows the log of a submission until the job ends. Returns the job's exit status. Ctrl-C does not stop the job.

    If the connection is lost, reconnects and shows the rest of the log. The exit status is correct even if a part of
    the log is missing.
    """
    import aiohttp

    errors = (OSError, RuntimeError, aiohttp.ClientError)
    shown, failed = 0, False  # number of printed characters, and whether the log has a line with `error: `
    silent_since, problem = None, ""  # time of the first failed request, and why reading the log failed

    async def tail(client: Any) -> None:
        nonlocal shown, failed, problem
        received = 0
        async for text in client.tail_job_logs(submission):
            received += len(text)
            failed |= "error: " in text
            if received > shown:
                print(text[max(0, len(text) - (received - shown)) :], end="", flush=True)
                shown, problem = received, ""

    def report(error: Exception) -> None:
        nonlocal problem
        if not problem:
            print(f"\nconnection lost ({in_brief(error)}); {submission} is still running", file=sys.stderr)
        problem = in_brief(error)

    try:
        while True:
            try:
                client = api.client()
                try:
                    asyncio.run(tail(client))
                    problem = ""
                except errors as error:
                    report(error)
                details = client.get_job_info(submission)
                silent_since = None
                if details.status.is_terminal():
                    break
            except errors as error:
                if "does not exist" in str(error):  # for example, because the head was replaced
                    raise
                report(error)
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > SILENT_SECONDS:
                    raise
            time.sleep(1)
    except KeyboardInterrupt:
        advice = f"For its log, run make logs NAME={submission}; to stop it, run make stop NAME={submission}"
        print(f"\n{submission} is still running. {advice}", file=sys.stderr)
        return 130
    if problem:
        print(f"the end of the log is missing ({problem}); run make logs NAME={submission}", file=sys.stderr)
    status, code = details.status.value, details.driver_exit_code
    if status == "SUCCEEDED":
        return 0
    # A library may also end the process with status 2, but then the log has no error message of the pipeline.
    if status == "FAILED" and (code == 1 or (code == 2 and failed)):
        return int(code)  # the job's log already contains the error message
    print(f"{submission} {status.lower()}: {details.message}", file=sys.stderr)
    return 1


# ----------------------------------------------------------------------------------------- logs, stop and jobs


def main(arguments: list[str]) -> int:
    """Runs `logs`, `stop` or `jobs`. NAME is the name of a run or of a submission. Without NAME, `logs` shows the newest job."""
    try:
        verb, name = (*arguments, "", "")[:2]
        if verb not in ("logs", "stop", "jobs") or len(arguments) > 2 or (verb == "stop" and not name):
            raise InputError(f"expected logs [NAME], stop NAME or jobs, found {shlex.join(arguments)!r}")
        if not (address := os.environ.get("RAY_ADDRESS")):
            raise InputError("missing; expected http://HEAD:8265 of a running cluster", key="RAY_ADDRESS")
        api = Api(address)
        jobs = api.jobs()
        if verb == "jobs":
            for job in jobs:
                started = time.strftime("%Y-%m-%d %H:%M", time.localtime((job.start_time or 0) / 1000))
                print(f"{started}  {job.status.value:<9}  {job.submission_id}  {job.entrypoint}")
            return 0
        names = [(job.submission_id, (job.metadata or {}).get("run")) for job in jobs]
        matching = [ids[0] for ids in names if not name or name in ids]
        if not matching:
            newest = ", ".join(ids[0] for ids in names[-10:]) or "none"
            raise InputError(f"NAME: no job {name!r} on {api.address}; the newest jobs are {newest}")
        if verb == "logs":
            return follow_submission(api, matching[-1])
        was_running = api.client().stop_job(matching[-1])
        print(f"{matching[-1]} {'is being stopped' if was_running else 'has ended already'}")
        return 0
    except InputError as error:
        print(f"error: {without_credentials(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(process.run_main(lambda: main(sys.argv[1:])))

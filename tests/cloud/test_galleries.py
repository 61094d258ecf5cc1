"""The entries for galleries: Anyscale's template, which Ray's documentation renders. Its test script runs here on a CPU."""

import ast
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

import nbformat
import pytest
import yaml
from head import free_port
from running import ROOT
from tools import install

HOME = ROOT / "docs/galleries"
[ENTRY] = yaml.safe_load((HOME / "anyscale/BUILD.yaml").read_text())
TEMPLATE = HOME / "anyscale" / ENTRY["dir"]
NOTEBOOK = nbformat.read(TEMPLATE / "README.ipynb", as_version=4)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHORT = "sft.gate={} rm.gate={} ppo.gate={} sft.trainer.max_steps=2 rm.trainer.max_steps=2 ppo.trainer.total_episodes=64"


def test_the_entry_names_what_is_there():
    """As Anyscale's scripts/hooks/validate-build-yaml.py demands, which has accepted it."""
    name = ENTRY["name"]
    assert Path(ENTRY["dir"]).name == Path(ENTRY["test"]["tests_path"]).name == name
    assert (HOME / "anyscale" / ENTRY["test"]["tests_path"] / "tests.sh").exists()
    for cloud, file in (("AWS", "aws.yaml"), ("GCP", "gce.yaml")):
        assert ENTRY["compute_config"][cloud] == f"configs/{name}/{file}"
        nodes = yaml.safe_load((HOME / "anyscale/configs" / name / file).read_text())
        assert nodes["head_node"]["resources"] == {"CPU": 0} and nodes["worker_nodes"][0]["min_nodes"] == 2
    assert (TEMPLATE / "requirements.txt").read_text().splitlines() == PROJECT["dependencies"]
    ray = next(pin for pin in PROJECT["dependencies"] if pin.startswith("ray")).partition("==")[2]
    assert ENTRY["cluster_env"]["image_uri"].startswith(f"anyscale/ray:{ray}-py312-")


def test_rays_documentation_renders_the_template():
    source = ast.parse((HOME / "ray/doc/source/template_collections.py").read_text())
    [(name, target)] = ast.literal_eval(source.body[0].value).items()
    [example] = yaml.safe_load((HOME / "ray/doc/source/train/examples.yml").read_text())["examples"]
    assert name == ENTRY["name"]
    assert example["link"] == f"../_collections/{target['target']}/README"


def test_the_commands_of_the_notebook_are_those_of_the_readme():
    readme = re.findall(r"^make \w+.*?(?=  #|$)", (ROOT / "README.md").read_text(), re.MULTILINE)
    done = [
        subprocess.run([*shlex.split(one), "-n"], cwd=ROOT, capture_output=True, text=True) for one in readme
    ]
    known = {
        " ".join(line.split()[1:])
        for one in done
        for line in one.stdout.splitlines()
        if "-m pipeline" in line
    }
    code = "\n".join(cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code")
    assert all(cell.source.startswith("%%bash -e\n") for cell in NOTEBOOK.cells if cell.cell_type == "code")
    code = re.sub(r"\$\{MODEL:-(.*?)\}", r"\1", code)
    used = {
        re.sub(r" (\S+=\S+|\$\{.*?\})", "", line) for line in re.findall(r"python (-m pipeline .*)", code)
    }
    assert len(used) == 4 and used <= known, used - known


@pytest.mark.slow
def test_its_test_script_passes(tmp_path):
    """With papermill, on a Ray of its own, with little training. The packages are those of this environment."""
    tools = install(tmp_path / "tools", "papermill==2.7.0", "nbconvert==7.17.2", "ipykernel")
    page = tmp_path / "README.md"
    convert = [
        tools / "jupyter-nbconvert",
        "--to",
        "markdown",
        TEMPLATE / "README.ipynb",
        "--output-dir",
        tmp_path,
    ]
    subprocess.run(convert, check=True, capture_output=True)
    assert page.read_text() == (TEMPLATE / "README.md").read_text()

    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "papermill").symlink_to(tools / "papermill")
    for name in ("pip", "uv"):
        (stubs / name).write_text("#!/bin/sh\n")
        (stubs / name).chmod(0o755)
    folder = shutil.copytree(TEMPLATE, tmp_path / "template")
    gcs, dashboard, mlflow = free_port(), free_port(), free_port()
    environment = os.environ | {
        "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "REPOSITORY": str(ROOT), "MODEL": "jobs/demo/model", "STORAGE": str(tmp_path), "MLFLOW_PORT": str(mlflow),
        "CLUSTER": f"http://127.0.0.1:{dashboard}", "DEMO_ARGS": SHORT, "ARGS": SHORT,
    }  # fmt: skip
    for name in ("PYTHONPATH", "RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    home = tempfile.mkdtemp(prefix="rd")  # short: socket names in it have a limit
    options = f"--head --block --port {gcs} --dashboard-port {dashboard} --num-cpus 4 --disable-usage-stats --temp-dir {home}"
    script = HOME / "anyscale" / ENTRY["test"]["tests_path"] / "tests.sh"
    with subprocess.Popen(
        ["ray", "start", *options.split()], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    ) as head:
        try:
            for _ in range(60):
                time.sleep(1)
                try:
                    urllib.request.urlopen(f"{environment['CLUSTER']}/api/version", timeout=2).close()
                    break
                except OSError:
                    continue
            run = subprocess.Popen(
                ["bash", script], cwd=folder, env=environment, start_new_session=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            try:
                said, _ = run.communicate(timeout=900)
            finally:
                with contextlib.suppress(ProcessLookupError):  # its MLflow server
                    os.killpg(run.pid, signal.SIGTERM)
            assert run.returncode == 0, said[-4000:]
            assert len(list((tmp_path / "rlhf/runs").glob("*/result.json"))) == 4
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            head.wait()
            shutil.rmtree(home, ignore_errors=True)

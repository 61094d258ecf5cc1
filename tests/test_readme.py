"""Runs the commands of the README and of docs/ on a copy of the repository, with settings that make the runs short.

Also tests that the files, links, keys, metrics and messages on the pages exist.
"""

import os
import re
import shlex
import shutil
import subprocess

import psutil
import pytest
import reference
import yaml
from head import TOKEN, Head
from running import ROOT, copy_repository
from sockets import on_loopback, sockets

from pipeline import metrics
from pipeline.data.formats import DEMONSTRATIONS, PREFERENCES, PROMPTS
from pipeline.job import judge, load_job, schema
from pipeline.job.schema import keys_of
from pipeline.job.stages import INPUTS
from tools.chaos.runs import answers, until

README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
SKILL = ROOT / "skills/rlhf-pipeline/SKILL.md"
TEXTS = {
    "README.md": README,
    "AGENTS.md": (ROOT / "AGENTS.md").read_text(),
    "SKILL.md": SKILL.read_text(),
    **PAGES,
}


def commands_of(text):
    """Returns the commands in a page's bash blocks, except commands that need an account."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    lines = [line for line in lines if not line.endswith("# account")]
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


TRANSCRIPT = re.search(r"```\n(jobs/demo: .*?)```", PAGES["runs.md"], re.DOTALL)[1]  # output of `make rlhf`
# {page whose commands are run in their order: its first targets}
TUTORIALS = {"tutorial.md": ["validate", "sft", "rm"], "failed_gates.md": ["init", "validate", "sft"]}
COMMANDS = commands_of("".join(text for name, text in TEXTS.items() if name not in TUTORIALS))
TRL = "gate={} trainer.max_steps=2 trainer.eval_on_start=false trainer.eval_strategy=no"
# {target of make: settings that shorten its run}. The settings are appended to the ARGS of the command.
SHORT = {
    "rlhf": "sft.gate={} rm.gate={} ppo.gate={} sft.trainer.max_steps=2 rm.trainer.max_steps=2 ppo.trainer.total_episodes=64",
    **dict.fromkeys(("init", "validate", "evaluate", "generate", "score", "export"), ""),
    **dict.fromkeys(("sft", "rm", "dpo", "kto", "sweep"), TRL),
    "ppo": "gate={} trainer.total_episodes=64",
    # `plan` needs no shorter settings and no network, because it has the shapes of gated models built in
    "plan": "",
    "collect": "trainer.num_prompts=8",
}
# The command of the README, but with a local model.
INIT = "make init DATA=my NAME=velo MODEL=jobs/demo/model"


def target(command):
    return next(word for word in shlex.split(command) if word != "make" and "=" not in word)


def arguments_of(command):
    return next((word.removeprefix("ARGS=") for word in shlex.split(command) if word.startswith("ARGS=")), "")


def commands_with(*starts):
    return [command for command in dict.fromkeys(COMMANDS) if command.startswith(starts)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """Returns a copy of the repository with rows of a user in the folder `my`."""
    folder = copy_repository(tmp_path_factory.mktemp("copy"), ".dev")
    (folder / "my").mkdir()
    for name in ("demonstrations", "preferences", "prompts"):
        shutil.copy(ROOT / f"jobs/demo/data/{name}.jsonl", folder / "my")
    shutil.copy(ROOT / "jobs/demo/data/prompts_eval.jsonl", folder / "my/held_out.jsonl")
    return folder


def shortened(command):
    """Returns the command with the model of the demo and with the settings of SHORT."""
    arguments = f"{arguments_of(command)} {SHORT.get(target(command), '')}".strip()
    return re.sub(r"MODEL=\S+", "MODEL=jobs/demo/model", command) + f" ARGS={shlex.quote(arguments)}"


def shell(command, copy, **options):
    excluded = ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "MAKEFLAGS", "MAKELEVEL", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in excluded}
    return subprocess.run(
        command, shell=True, cwd=copy, capture_output=True, text=True, env=environment, timeout=900, **options
    )


def test_the_readme_is_short_and_has_commands():
    assert README.count("\n") <= 150
    assert COMMANDS[:2] == ["make rlhf", "make chat"]
    excerpt = re.search(r"```\n(jobs/demo: .*?)```", README, re.DOTALL)[1].splitlines()
    assert len(excerpt) > 10 and {*excerpt} <= {"...", *TRANSCRIPT.splitlines()}


def test_every_file_of_the_tree_is_in_its_folder():
    tree = re.search(r"```\n(pipeline/.*?)```", PAGES["architecture.md"], re.DOTALL)[1]
    folder, count = ROOT / "pipeline", 0
    for line in tree.splitlines()[1:]:
        if match := re.match(r"  (\w+)/ ", line):
            folder = ROOT / "pipeline" / match[1]
        elif re.match(r"  \w", line):
            folder = ROOT / "pipeline"
        for name in re.findall(r"\w+\.py", line):
            assert (folder / name).is_file(), line
            count += 1
    assert count > 40


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_generated_page_is_up_to_date(page):
    assert PAGES[page] == reference.PAGES[page](), "run `.venv/bin/python docs/reference.py`"


def test_metrics_on_pages_are_in_the_table():
    text = "".join(text for name, text in TEXTS.items() if name != "configuration.md")
    matches = re.findall(
        r"`((?:eval_|initial_|objective/|completions/|val/|rollout/)[\w/]+)`|gate\.([\w/]+)=", text
    )
    assert [name for name in map("".join, matches) if not metrics.find_metric(name)] == []


def test_the_messages_of_the_troubleshooting_page_exist():
    """Each heading on the page is a message of the pipeline. In a heading, `...` stands for values."""
    source = "".join(path.read_text() for path in (ROOT / "pipeline").rglob("*.py"))
    headings = re.findall(r"^#### `(.*)`$", PAGES["troubleshooting.md"], re.MULTILINE)
    parts = [part.strip() for heading in headings for part in heading.split("...") if part.strip(" ()")]
    assert len(parts) > 10 and not [part for part in parts if part.rstrip(" (") not in source]


def test_the_jobs_of_commands_that_need_an_account_load(in_root):
    """Tests cannot run commands that need an account, so this test only loads the jobs of these commands."""
    jobs = re.findall(r"^make (\w+) PROFILE=([\w-]+) .*# account$", "\n".join(TEXTS.values()), re.MULTILINE)
    assert ("rm", "llama3-8b-qlora") in jobs
    for verb, profile in jobs:
        load_job(f"jobs/{profile}/{verb}.yaml", [], verb)


def test_the_skill_is_one_that_agents_find():
    """Checks the header's fields against the Agent Skills format. Checks that the files and result keys in the text exist."""
    _, head, body = SKILL.read_text().split("---\n", 2)
    facts = yaml.safe_load(head)
    assert facts.keys() == {"name", "description"} and facts["name"] == SKILL.parent.name
    assert len(facts["description"]) <= 1024 and body.count("\n") < 100
    paths = re.findall(r"`(docs/[\w.]+)`", body)
    assert len(paths) > 4 and not [name for name in paths if not (ROOT / name).exists()]
    result = "".join(path.read_text() for path in (ROOT / "pipeline/run").glob("*.py"))
    cells = re.findall(r"^\| (`.*?`) \|", body, re.MULTILINE)
    assert cells and not [
        name for name in re.findall(r"`(\w+)`", "".join(cells)) if f'"{name}"' not in result
    ]


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_has_short_lines_and_names_and_links_that_exist(page):
    """Lines have at most 100 columns, except tables, links and commands. Links are relative to the folder of the page."""
    text, folder = TEXTS[page], ROOT if page in ("README.md", "AGENTS.md") else ROOT / "docs"
    whole = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    wide = [line for line in whole.splitlines() if len(line) > 100 and not line.startswith(("|", "!["))]
    assert not [line for line in wide if "https://" not in line]
    paths = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|ipynb|jinja))`", text)
    assert not [name for name in paths if not any((ROOT / top / name).exists() for top in ("", "pipeline"))]
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = folder / file if file else folder / page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link


@pytest.mark.parametrize("page", PAGES)
def test_the_yaml_of_a_page_has_keys_that_exist(page):
    """Each YAML fragment on a page must have keys of a job of rm or export, or keys of a judge's file."""
    for fragment in re.findall(r"```yaml\n(.*?)```", PAGES[page], re.DOTALL):
        read = yaml.safe_load(fragment)
        if read.keys() <= schema.keys(judge.CLASS).keys():
            continue
        sections = {section: keys for section, keys in read.items() if section not in INPUTS}
        keys = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
        assert any(keys <= keys_of(stage).keys() for stage in ("rm", "export")), fragment


def shape(transcript):
    """Returns the first word of each output line of `make rlhf`, except lines that depend on the run's length or on gates."""
    words = [
        line.split()[0] for line in transcript.splitlines() if line.strip() and not line.startswith("   ")
    ]
    words = [word for word in words if word not in ("train", "drawing", "win", "KL", "eval_eos_rate", "not")]
    return words[: words.index("Done") + 1]


@pytest.mark.parametrize(
    ("rows", "shapes"),
    [("demonstrations", DEMONSTRATIONS), ("preference pairs", PREFERENCES), ("prompts", PROMPTS)],
)
def test_the_formats_are_listed_in_the_order_in_which_the_code_tries_them(rows, shapes):
    formats = re.search(rf"^\| {rows} \(.*?\| (.*) \|$", PAGES["data.md"], re.MULTILINE)[1]
    assert formats.replace("`", "").split(", ") == list(shapes)


def test_each_command_for_own_data_names_the_profile():
    """Without PROFILE, a command for the user's own data would train the demo's model instead."""
    [block] = re.findall(r"```bash\nmake init .*?```", README, re.DOTALL)
    commands = commands_of(block)
    assert len(commands) == 5 and not [command for command in commands if "velo" not in command]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [c for c in dict.fromkeys(COMMANDS) if re.match(r"make \w+", c) and target(c) in SHORT]
)
def test_a_make_command(command, copy):
    if "velo" in command and target(command) != "init" and not (copy / "jobs/velo").exists():
        assert shell(INIT, copy).returncode == 0
    result = shell(shortened(command), copy)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    if command == "make rlhf":  # in this test, `make rlhf` has no gates and other times
        assert TRANSCRIPT.count("\n") <= 45 and result.stdout.count("\n") <= 45
        assert shape(result.stdout) == shape(TRANSCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_from_top_to_bottom(page, copy):
    """Runs the page's commands with the model and rows of the demo, few steps, and gates that always pass."""
    commands = commands_of(PAGES[page])
    assert [target(command) for command in commands[:3]] == TUTORIALS[page]
    for command in commands:
        result = shell(shortened(command), copy, input="Hello.\n/quit\n")
        assert result.returncode == 0, command + result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.slow
def test_make_report_draws_a_finished_run(copy):
    name = next(path.parent.name for path in (copy / "runs").glob("*/result.json"))
    result = shell(f"make report RUN=runs/{name}", copy)
    assert result.returncode == 0 and "report" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_with("make chat"))
def test_make_chat_answers(command, copy):
    result = shell(command, copy, input="What is the capital of Peru?\n/quit\n")
    assert result.returncode == 0 and "reward" in result.stdout, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_with("make ui", "make serve"))
def test_a_service_answers(command, copy, monkeypatch):
    monkeypatch.setenv("RLHF_SERVE_TOKENS", "planted0" * 4)  # token for the command with serve.host=0.0.0.0
    words = [*shlex.split(command), "PORT=8077"]
    if target(command) == "serve":
        words.append(f"ARGS={arguments_of(command)} serve.port=8077")

    with subprocess.Popen(words, cwd=copy, start_new_session=True) as server:
        try:
            until(lambda: answers("http://127.0.0.1:8077/health"), command, patience=120, every=1)
            private = [on_loopback(address) for address, _ in sockets(psutil.Process(server.pid))]
            assert private and ("0.0.0.0" in command or all(private))
        finally:
            os.killpg(server.pid, 15)


@pytest.mark.slow
def test_a_cluster_runs_the_same_job(copy, monkeypatch):
    """Starts a separate Ray head for the command with `RAY_ADDRESS=auto`."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    command = next(c for c in COMMANDS if c.startswith("RAY_ADDRESS=auto"))
    assert "make sft" in command
    small = f"{TRL} scaling.num_workers=2 data.batch_size=16 trainer.per_device_train_batch_size=8"
    with Head() as head:
        result = shell(
            f"RAY_ADDRESS={head.gcs} make sft ARGS={shlex.quote(f'{small} run.name=clustered')}", copy
        )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert (copy / "runs/clustered/result.json").exists()


def test_every_command_is_covered():
    """Each command on a page must be run by a test."""
    special = (
        *("make test", "make lint"),  # what CI runs
        "make setup",  # test_setup.py
        # commands/test_collect.py
        *(
            "bash jobs/demo/iterate.sh",
            "NAME=seed-2 SEED=2 bash jobs/demo/iterate.sh",
        ),
        "bash jobs/demo/judge.sh",  # scoring/test_runs.py
        *("make ui", "make serve", "make chat", "make report"),  # above
        "make notebook",  # test_notebooks.py
        "make gpu",  # gpu/test_pretend.py
        "python -m tools.gpu.pretend",  # gpu/test_runs.py
        *("make up", "make dashboard", "make down"),  # cluster/test_ray_up.py
        "hf jobs uv run --dry-run",  # cloud/test_launchers.py
        "make image",  # cloud/test_image.py
        *("export IMAGE=", "python -m pipeline.cloud.rayjob"),  # cloud/test_rayjob.py
        *(".venv/bin/ray get-auth-token", "aws cloudformation deploy"),  # cloud/test_clusterfile.py, below
        *("RAY_ADDRESS=http", "RAY_ADDRESS=auto"),  # tests/cloud/test_submit.py, and a test above
        "curl -s http://127.0.0.1:8000",  # serving/test_server.py
        *("lm_eval --model", "RLHF_BASE_URL="),  # serving/test_eval_tools.py
    )
    for command in COMMANDS:
        assert command.startswith(special) or target(command) in SHORT, command


def test_the_command_for_the_stack_sets_its_parameters():
    """The command must set all stack parameters that have no default.

    cloud/test_clusterfile.py creates the stack in a mock of AWS.
    """
    [command] = [command for command in COMMANDS if command.startswith("aws cloudformation")]
    file = ROOT / shlex.split(command)[shlex.split(command).index("--template-file") + 1]
    parameters = re.search(r"^Parameters:\n(.*?)^\w", file.read_text(), re.M | re.S)[1]
    blocks = re.split(r"^  (?=\w)", parameters, flags=re.M)[1:]
    names = [block.split(":")[0] for block in blocks if "Default:" not in block]
    assert names == re.findall(r"(\w+)=", command.partition("--parameter-overrides")[2])

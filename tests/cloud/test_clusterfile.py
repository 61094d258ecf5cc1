"""Tests the cluster files, the checks and AWS requests of `make up` (on a mock of AWS), and the start script of the nodes."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from running import ROOT

from pipeline.cloud import clusterfile
from pipeline.errors import InputError

AWS = ROOT / "cluster.yaml"
FILES = [AWS, ROOT / "jobs/cloud/gcp.yaml", ROOT / "jobs/cloud/local.yaml"]
ONE_SECOND = "0.0003"  # in hours, the unit that start-node.sh expects
IMAGE = "ami-12c6146b"  # an AMI that exists in the mock of AWS
needs_moto = pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="needs the extra `mock`")
pytestmark = pytest.mark.usefixtures("in_root")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Returns a home folder that contains only a Ray token, and puts fake ssh and rsync programs on the PATH."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    for tool in clusterfile.TOOLS:  # empty files, because the check only searches the PATH for these programs
        (tmp_path / "bin" / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 32)
    return tmp_path


def filled(file, folder):
    """Returns a cluster file whose EDIT lines are filled in."""
    text = file.read_text().replace("ami-EDIT", IMAGE).replace("[EDIT]", "[10.0.0.2, 10.0.0.3]")
    text = text.replace("EDIT", "filled-in").replace(".venv/pyvenv.cfg", f"{sys.prefix}/pyvenv.cfg")
    copy = folder / file.name
    copy.write_text(text)
    return copy


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_cluster_file_is_valid_once_its_lines_are_filled_in(file, home):
    with pytest.raises(InputError, match="fill in these lines") as error:
        clusterfile.check_cluster_file(file)
    lines = file.read_text().splitlines()
    named = [int(number) for number in re.findall(r"\.yaml:(\d+): ", str(error.value))]
    assert named and all("EDIT" in lines[number - 1] for number in named)
    shown = clusterfile.describe_cluster(clusterfile.check_cluster_file(filled(file, home)))
    if file == AWS:
        assert (
            "1 x m7i.2xlarge, $0.40 an hour (2026-11-20), until `make down`, or 8 hours without a job"
            in shown
        )
        assert "0 to 4 x g6.2xlarge (gpu1), $0.98 an hour" in shown
        assert "0 to 4 x g6e.2xlarge (rollout_spot), spot, below $2.24 an hour" in shown
    if "gcp" in file.name:  # on Google Cloud, only the GPU machine has a known price
        assert "n2-standard-8, price unknown" in shown and "(gpu1), $0.98 an hour" in shown


def test_mistakes_are_found_before_anything_is_started(home, monkeypatch):
    file = filled(AWS, home)
    file.write_text(file.read_text().replace("      SecurityGroupIds: *group\n", ""))
    message = r"gpu1\.node_config\.SecurityGroupIds: missing, so Ray would open port 22 to the world"
    with pytest.raises(InputError, match=message):
        clusterfile.check_cluster_file(file)
    file = filled(AWS, home)
    file.write_text(re.sub(r"(?s)( gpu4:.*?min_workers: )0", r"\g<1>1", file.read_text()))
    with pytest.raises(
        InputError, match=r"gpu4\.min_workers: an idle head shuts itself down .* would keep running; set 0"
    ):
        clusterfile.check_cluster_file(file)
    file.write_text(file.read_text().replace("HEAD_IDLE_HOURS=8 ", ""))
    shown = clusterfile.describe_cluster(clusterfile.check_cluster_file(file))
    assert "1 to 1 x g6e.12xlarge (gpu4)" in shown and "until `make down`, even if no job runs" in shown
    file = filled(AWS, home)
    (home / ".ray/auth_token").unlink()
    with pytest.raises(InputError, match=r"there is no ~/\.ray/auth_token; .*ray get-auth-token --generate"):
        clusterfile.check_cluster_file(file)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="needs ssh"):
        clusterfile.check_cluster_file(file)


def signed_out(monkeypatch, folder):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    # prevents boto3 from querying the metadata service of this machine
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_without_an_aws_account_a_command_says_how_to_sign_in(home, monkeypatch, capsys):
    signed_out(monkeypatch, home)
    monkeypatch.setattr(clusterfile.os, "execve", lambda *_: pytest.fail("called ray"))
    message = (
        r"you are not signed in to AWS \(NoCredentialsError: .*; run `aws configure` .*AWS_ACCESS_KEY_ID"
        if importlib.util.find_spec("boto3")
        else r'boto3 is not installed here; run \.venv/bin/pip install -c constraints\.txt -e "\.\[cloud\]"'
    )
    for command in ("up", "down"):
        assert clusterfile.main([command, str(filled(AWS, home))]) == 2
        assert re.match(f"error: {message}", capsys.readouterr().err)


def test_own_machines_need_no_account(home, monkeypatch, capsys):
    signed_out(monkeypatch, home)
    called = []
    monkeypatch.setattr(clusterfile.subprocess, "run", lambda command: called.append(command[1:]))
    monkeypatch.setattr(clusterfile.os, "execve", lambda *given: called.append(given[1][1:]))
    file = filled(FILES[2], home)
    clusterfile.main(["status", str(file), "--x"])
    assert called == [["exec", str(file), "RAY_AUTH_MODE=token ray status", "--x"]]
    clusterfile.main(["down", str(file)])
    assert called[1:] == [["exec", str(file), "bash ~/rlhf/start-node.sh stop"], ["down", str(file)]]
    assert "not deleted: ~/rlhf and ~/mlflow on each machine" in capsys.readouterr().out


def test_only_node_types_that_say_so_are_spot_and_the_head_has_no_gpu():
    types = yaml.safe_load(AWS.read_text())["available_node_types"]
    assert types["head"]["resources"]["GPU"] == 0
    for name, kind in types.items():
        assert kind["min_workers"] == 0
        profile = "rlhf-head" if name == "head" else "rlhf-worker"
        assert kind["node_config"]["IamInstanceProfile"]["Name"] == profile
        # IMDSv2, so that a process cannot read the IAM role's credentials with a plain GET request
        assert kind["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
        market = {"MarketType": "spot"} if name.endswith("_spot") else None
        assert kind["node_config"].get("InstanceMarketOptions") == market
        assert name == "head" or kind["labels"]["market"] == ("spot" if market else "on-demand")


def test_the_head_may_give_instances_only_the_role_of_workers():
    class Template(yaml.SafeLoader):
        """Reads CloudFormation's !Ref, !Sub and !GetAtt as text."""

    Template.add_multi_constructor("!", lambda loader, tag, node: node.value)
    resources = yaml.load((ROOT / "jobs/cloud/aws.yaml").read_text(), Template)["Resources"]
    (policy,) = resources["HeadRole"]["Properties"]["Policies"]
    [passing] = [one for one in policy["PolicyDocument"]["Statement"] if "iam:PassRole" in one["Action"]]
    assert passing["Resource"] == "WorkerRole.Arn"
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_no_worker_on_google_cloud_has_the_account_of_the_head():
    types = yaml.safe_load((ROOT / "jobs/cloud/gcp.yaml").read_text())["available_node_types"]
    accounts = {
        name: {one["email"] for one in node["node_config"]["serviceAccounts"]} for name, node in types.items()
    }
    head = accounts.pop("head")
    assert head and accounts and all(worker and not worker & head for worker in accounts.values())


@pytest.fixture
def ec2(monkeypatch, home):
    """Starts a mock of AWS for this process and its children, and creates the stack of aws.yaml in a separate VPC."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-west-2", **keys}.items():
        monkeypatch.setenv(name, value)
    import boto3

    boto3.setup_default_session()  # replaces the session that has an earlier test's credentials
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    template = (ROOT / "jobs/cloud/aws.yaml").read_text()  # creates the IAM roles and the S3 bucket
    assert not re.search(r": [&*]", template), "CloudFormation knows no YAML aliases"
    cloud, net = boto3.client("cloudformation"), boto3.client("ec2")
    vpc = net.create_vpc(CidrBlock="10.7.0.0/16")["Vpc"]["VpcId"]
    subnet = net.create_subnet(VpcId=vpc, CidrBlock="10.7.0.0/20", AvailabilityZone="us-west-2b")["Subnet"]
    net.modify_subnet_attribute(SubnetId=subnet["SubnetId"], MapPublicIpOnLaunch={"Value": True})
    given = {"Bucket": "my-bucket", "SshFrom": "203.0.113.7/32", "Vpc": vpc}
    cloud.create_stack(
        StackName="rlhf",
        TemplateBody=template,
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in given.items()],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )
    assert cloud.describe_stacks(StackName="rlhf")["Stacks"][0]["StackStatus"] == "CREATE_COMPLETE"
    yield boto3
    server.stop()


def head_and_profile(boto3):
    """Returns the only instance and the name of its instance profile, or None until both exist."""
    client = boto3.client("ec2")
    listed = [one for page in client.describe_instances()["Reservations"] for one in page["Instances"]]
    found = client.describe_iam_instance_profile_associations()["IamInstanceProfileAssociations"]
    if not listed or not found:
        return None
    (head,) = listed
    return head, found[0]["IamInstanceProfile"]["Arn"].rpartition("/")[2]


@needs_moto
def test_ray_up_starts_the_head_on_ec2(ec2, home):
    """Runs the real `ray up` until the mock of AWS has an instance, and then ends `ray up`, which cannot log in to a mock."""
    [stack] = ec2.client("cloudformation").describe_stacks(StackName="rlhf")["Stacks"]
    made = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}["SecurityGroup"]
    file = filled(AWS, home)
    file.write_text(file.read_text().replace("sg-filled-in", made))
    command = [str(Path(sys.prefix) / "bin/ray"), "up", "-y", "--no-config-cache", str(file)]
    with open(home / "up.log", "w") as log:
        up = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        try:
            for _ in range(60):
                time.sleep(0.5)
                started = head_and_profile(ec2)
                if started or up.poll() is not None:
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(up.pid, signal.SIGKILL)
            up.wait()
    assert started, (home / "up.log").read_text()[-3000:]
    head, profile = started
    assert (head["InstanceType"], head["ImageId"], profile) == ("m7i.2xlarge", IMAGE, "rlhf-head")
    assert "InstanceLifecycle" not in head  # an on-demand instance, because the cluster ends if its head ends
    # the IAM role may start only instances with this tag
    assert {"Key": "ray-cluster-name", "Value": "rlhf"} in head["Tags"]
    (group,) = (one["GroupId"] for one in head["SecurityGroups"])
    assert group == made
    [found] = ec2.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"]
    rules = found["IpPermissions"]
    outside = [(one["FromPort"], one["ToPort"], one["IpRanges"]) for one in rules if one["IpRanges"]]
    assert outside == [(22, 22, [{"CidrIp": "203.0.113.7/32"}])]
    assert [pair["GroupId"] for rule in rules for pair in rule["UserIdGroupPairs"]] == [group]


@needs_moto
def test_the_roles_have_few_permissions(ec2):
    iam = ec2.client("iam")
    for name in ("rlhf-head", "rlhf-worker"):
        (role,) = iam.get_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Roles"]
        assert role["RoleName"] == name
        attached = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        assert [policy["PolicyName"] for policy in attached] == ["rlhf-bucket"]
    # workers are not allowed to start instances
    assert iam.list_role_policies(RoleName="rlhf-worker")["PolicyNames"] == []
    policy = iam.get_role_policy(RoleName="rlhf-head", PolicyName="autoscale")["PolicyDocument"]
    # the mock of AWS stores the IAM policy as text
    policy = yaml.safe_load(policy) if isinstance(policy, str) else policy
    for statement in policy["Statement"]:
        assert "*" not in "".join(statement["Action"])
        if "ec2:TerminateInstances" in statement["Action"]:
            assert statement["Condition"]["StringEquals"] == {"ec2:ResourceTag/ray-cluster-name": "rlhf"}


# --------------------------------------------------------------------------------------------- the start script of a node


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Returns a function that runs start-node.sh with fake programs. The fake programs log their arguments."""
    (here := tmp_path / "rlhf").mkdir()
    (here / "start-node.sh").write_text((ROOT / "jobs/cloud/start-node.sh").read_text())
    (here / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.99.1\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("a" * 32)
    programs = tmp_path / "bin"
    programs.mkdir()

    def program(name, code=""):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/log\n{code}\n')
        (programs / name).chmod(0o755)

    def run(*arguments, **variables):
        env = {"HOME": str(tmp_path), "PATH": f"{programs}:/usr/bin:/bin", **variables}
        command = ["bash", here / "start-node.sh", *arguments]
        how = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(command, env=env, **how)
        log = tmp_path / "log"
        return done, log.read_text().splitlines() if log.exists() else []

    run.program, run.home = program, tmp_path
    program("python", f'exec {sys.executable} "$@"')
    return run


def test_a_new_node_installs_the_pins_with_the_python_of_the_submitter(node):
    uv = f"{node.home}/bin/uv"
    script = f"printf '#!/bin/sh\\necho uv $@ >> {node.home}/log' > {uv}; chmod +x {uv}"
    node.program("curl", f'echo "{script}"'.replace("$@", "\\$@"))
    node.program("make")
    done, log = node("install")
    assert done.returncode == 0, done.stderr
    here = node.home / "rlhf"
    assert re.fullmatch(r"curl -LsSf https://astral\.sh/uv/[\d.]+/install\.sh", log[0])
    assert log[1:] == [
        f"uv venv --seed --python 3.99 {here}/.venv",
        f"make -s -C {here} .venv/.cloud PYTHON=python3.99",
    ]
    node("install")
    bashrc = (node.home / ".bashrc").read_text()
    assert bashrc.splitlines() == ["export PATH=$HOME/rlhf/.venv/bin:$PATH"]


def test_a_too_old_driver_is_named_before_ray_starts(node):
    node.program("nvidia-smi", "echo 550.163.01")
    node.program("ray")
    done, log = node("worker")
    assert (
        done.returncode == 1 and "NVIDIA's driver is 550.163.01, and torch needs 580 or newer" in done.stderr
    )
    assert not [line for line in log if line.startswith("ray")]


def test_the_sizes_of_an_a100_have_labels(node):
    node.program("nvidia-smi", '[[ "$*" == *=name* ]] && echo NVIDIA A100-SXM4-80GB || echo 580.1')
    node.program("python", "echo 10.0.0.1 eth0")
    node.program("ray", "echo $RAY_OVERRIDE_LABELS")
    node.program("setsid")
    done, _ = node("worker", RAY_HEAD_IP="10.0.0.1")
    assert done.stdout == '{"ray.io/accelerator-type": "A100-80G"}\n', done.stderr
    done, _ = node("worker", RAY_HEAD_IP="10.0.0.1", RAY_OVERRIDE_LABELS="of the autoscaler")
    assert done.stdout == "of the autoscaler\n"


def first(calls, program, home):
    """Returns a shell condition that is true until the program has been called more than `calls` times."""
    return f"(( $(grep -c ^{program} {home}/log) <= {calls} ))"


def test_a_head_without_jobs_shuts_down(node):
    state = f"{first(2, 'curl', node.home)} && s=RUNNING || s=SUCCEEDED"
    node.program("curl", f"{state}; echo '[{{\"status\": \"'$s'\"}}]'")
    node.program("sudo")
    done, log = node("idle", ONE_SECOND)
    assert done.returncode == 0, done.stderr
    asked = [line for line in log if line.startswith("curl")]
    assert len(asked) >= 3, "two polls with a running job, then a second without"
    assert log[-1] == "sudo shutdown -h now" and "Authorization: Bearer " + "a" * 32 in asked[0]


def test_a_head_with_a_dead_dashboard_is_not_idle_while_ray_runs(node):
    node.program("curl", "exit 7")
    node.program("pgrep", first(2, "pgrep", node.home))
    node.program("sudo")
    done, log = node("idle", ONE_SECOND)
    assert done.returncode == 0, done.stderr
    assert len([line for line in log if line == "pgrep -x raylet"]) >= 3 and log[-1] == "sudo shutdown -h now"


def test_a_worker_without_a_head_shuts_down(node):
    node.program("timeout", first(2, "timeout", node.home))
    node.program("sudo")
    done, log = node("idle", ONE_SECOND, RAY_HEAD_IP="10.0.0.9")
    assert done.returncode == 0, done.stderr
    asked = [line for line in log if line == "timeout 10 bash -c < /dev/tcp/10.0.0.9/6379"]
    assert len(asked) >= 3 and log[-1] == "sudo shutdown -h now"
    # local.yaml is left out, because it uses the user's own machines, which must not shut down
    for file in FILES[:2]:
        [start] = yaml.safe_load(file.read_text())["worker_start_ray_commands"][1:]
        assert start == "HEAD_IDLE_HOURS=1 bash ~/rlhf/start-node.sh worker"

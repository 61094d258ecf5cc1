"""Tests on which nodes Ray's autoscaler places the shipped jobs, and that the checks before an upload find the same nodes."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, ResourceRequestByCount
from ray.core.generated.common_pb2 import LabelSelectorOperator
from running import ROOT
from settled import plan_of

from pipeline.cloud import clusterfile, preflight, rayjob
from pipeline.cloud.workload import workload_of
from pipeline.errors import InputError
from pipeline.job import load_job
from pipeline.job.stages import STAGE_SPECS
from pipeline.planning import plan
from pipeline.settle.placement import GPU_LABEL
from pipeline.settle.places import places_of

FILES = ["cluster.yaml", "jobs/cloud/gcp.yaml"]
ON_WORKERS = [name for name, spec in STAGE_SPECS.items() if spec.runs_in != "here"]
JOBS = [
    f"{profile}/{stage}"
    for profile in ("llama3-8b-qlora", "llama3-8b", "llama3-70b-qlora")
    for stage in ON_WORKERS
] + [f"llama3-70b/{stage}" for stage, spec in STAGE_SPECS.items() if spec.runs_in == "train"]
# The quick tests use the stage with one role and the stage with the most roles.
JOBS = [pytest.param(job, marks=[pytest.mark.slow] * (not job.endswith(("/sft", "/ppo")))) for job in JOBS]
pytestmark = pytest.mark.usefixtures("in_root")


def bundles(job):
    workers = places_of(job, elsewhere=True).workers
    return [workers.each] * workers.fewest


def request(bundle):
    """Returns the autoscaler's resource request for a bundle. A label selector has the form NAME or in(NAME,...)."""
    among = LabelSelectorOperator.LABEL_OPERATOR_IN
    selector = [
        (key, among, re.fullmatch(r"(?:in\()?(.*?)\)?", value)[1].split(","))
        for key, value in bundle.selector.items()
    ]
    return ResourceRequestUtil.make(bundle.resources, label_selectors=[selector] if selector else None)


def started(config, gang=(), tasks=0, without=(), actors=()):
    """Returns {node type: count} of the nodes that the autoscaler starts for a placement group, one-CPU tasks and actors."""
    kinds = AutoscalingConfig(config, skip_content_hash=True).get_node_type_configs()
    for name in (config["head_node_type"], *without):  # the head node is already running
        del kinds[name]
    cpu = ResourceRequestByCount(request=ResourceRequestUtil.make({"CPU": 1}), count=tasks)
    gangs = [GangResourceRequest(requests=[request(one) for one in gang])] if gang else []
    alone = [ResourceRequestByCount(request=request(one), count=1) for one in actors]
    asked = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=kinds,
        max_num_nodes=config["max_workers"],
        gang_resource_requests=gangs,
        resource_requests=[cpu, *alone],
    )
    reply = ResourceDemandScheduler().schedule(asked)
    return Counter({one.instance_type: one.count for one in reply.to_launch})


def run_checks(job, cluster):
    """Raises InputError if the cluster lacks resources or memory for the job."""
    workload = workload_of(job)
    preflight.check_resources(workload.places, cluster)
    preflight.check_memory(workload, cluster)


def read(file):
    return yaml.safe_load((ROOT / file).read_text())


@pytest.mark.parametrize("name", JOBS)
def test_a_job_passes_the_checks_and_gets_gpus_with_enough_memory(name, aws):
    """Removes the node types that the autoscaler chooses, one after another, as if the cloud had no capacity for them."""
    job = load_job(f"jobs/{name}.yaml", [])
    run_checks(job, aws)
    planned = plan_of(job).peak / plan.GIB
    seen = set()
    for file in FILES:
        without = []
        while True:
            nodes = started(read(file), bundles(job), without=without)
            if not nodes:
                break
            labels = [read(file)["available_node_types"][kind]["labels"] for kind in nodes]
            assert without or {one["market"] for one in labels} == {"on-demand"}, (
                "only jobs that select spot nodes get them"
            )
            for kind in nodes:
                gpu = read(file)["available_node_types"][kind]["labels"][GPU_LABEL]
                assert planned <= plan.memory_of(gpu), f"{planned:.0f} GiB needed, {nodes} in {file}"
                seen.add(gpu)
            without += nodes
    assert seen, f"no node type of {FILES} holds {name}"


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("tasks", [1, 1000])
def test_a_task_without_a_gpu_starts_no_gpu_node(file, tasks):
    config = read(file)
    nodes = started(config, tasks=tasks)
    assert not [name for name in nodes if config["available_node_types"][name]["resources"].get("GPU")]
    head = config["available_node_types"][config["head_node_type"]]
    assert head["resources"]["CPU"] > 0, "the driver needs resources"
    assert f"--num-cpus={head['resources']['CPU']} --num-gpus=0" in config["head_start_ray_commands"][1]


def rollout_jobs():
    """Yields (cluster file, ppo job) for each profile, with the overrides that the job's comments name."""
    ahead = ["rollout.num_workers=3", "rollout.staleness=1", "rollout.label_selector={market: spot}"]
    stay = "scaling.label_selector={{market: on-demand{}}}".format
    gpus = ', ray.io/accelerator-type: "in(A100-40G,L40S,A100-80G,H100,H200)"'
    yield "cluster.yaml", load_job("jobs/llama3-8b/ppo.yaml", [*ahead, stay(gpus)])
    for file in FILES:
        yield file, load_job("jobs/llama3-8b-qlora/ppo.yaml", [*ahead, stay("")])


def test_rollout_workers_get_spot_nodes_and_trainers_on_demand_nodes():
    for file, job in rollout_jobs():
        config, types = read(file), read(file)["available_node_types"]
        trainers = started(config, bundles(job))
        both = started(config, bundles(job), actors=[places_of(job, elsewhere=True).rollout.each] * 3)
        assert trainers and all(types[name]["labels"]["market"] == "on-demand" for name in trainers)
        samplers = both - trainers
        assert both & trainers == trainers and sum(samplers.values()) == 3
        assert samplers == {"rollout_spot": 3}
        if "qlora" not in job.source:
            assert trainers == {"gpu4": 1}
        planned = plan_of(job, learns=False).peak / plan.GIB
        gpus = {types[name]["labels"][GPU_LABEL] for name in samplers}
        assert all(planned <= plan.memory_of(gpu) for gpu in gpus), (planned, gpus)


def test_the_checks_include_rollout_workers(aws):
    for file, job in rollout_jobs():
        if file == "cluster.yaml":
            run_checks(job, aws)

    def ppo(*overrides):
        return load_job("jobs/llama3-8b/ppo.yaml", list(overrides))

    with pytest.raises(
        InputError, match=r"2 rollout workers with 1 GPU, market: spto each, .* resources for 0 "
    ):
        run_checks(ppo("rollout.num_workers=2", "rollout.label_selector={market: spto}"), aws)
    small = ppo("rollout.num_workers=1", "rollout.label_selector={market: on-demand}")
    message = (
        r"a rollout worker needs 2\d GiB.* on L4 with 22; "
        r"set \"(rollout\.label_selector=\{market: on-demand, ray\.io/accelerator-type: '?in\(.*\)'?\})\""
    )
    with pytest.raises(InputError, match=message) as error:
        run_checks(small, aws)
    typed = re.search(message, str(error.value))[1]
    run_checks(ppo("rollout.num_workers=1", typed), aws)


def autoscaling_config_of(spec):
    """Returns the node types that Ray's autoscaler reads from a manifest, without a running node."""
    spec = spec.get("rayClusterSpec") or spec["rayClusterConfig"]
    for group in spec["workerGroupSpecs"]:
        # the KubeRay operator sets numOfHosts to 1 by default
        group |= {"numOfHosts": 1, "replicas": 0, "minReplicas": 0}
    spec["autoscalerOptions"] = {"version": "v2"}
    return _derive_autoscaling_config_from_ray_cr({"metadata": {"namespace": "a", "name": "b"}, "spec": spec})


def placed_bundles(job):
    """Returns the job's bundles. With STRICT_PACK, all workers share a node, so the result is one bundle."""
    each = bundles(job)
    if job.scaling.get("placement_strategy") != "STRICT_PACK":
        return each
    total = Counter()
    for one in each:
        total.update(one.resources)
    return [replace(each[0], resources=dict(total))]


@pytest.mark.parametrize("name", JOBS)
def test_the_pods_of_kuberay_have_resources_for_the_workers(name, monkeypatch):
    for variable in rayjob.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in {"IMAGE": "r.io/rlhf:1", "GPU": "H100", "NODE_SELECTOR": "gpu=h100"}.items():
        monkeypatch.setenv(variable, value)
    overrides = ["run.storage_path=s3://b/runs", "mlflow.tracking_uri=http://m:5000"]
    if name.endswith("serve"):
        overrides.append("serve.feedback_path=/mnt/feedback")
    job = load_job(f"jobs/{name}.yaml", overrides)
    spec = rayjob.manifest([f"jobs/{name}.yaml"], overrides)["spec"]
    [group] = (spec.get("rayClusterSpec") or spec["rayClusterConfig"])["workerGroupSpecs"]
    config = autoscaling_config_of(spec)
    assert started(config, placed_bundles(job)) == {"workers": group["maxReplicas"]}
    assert started(config, tasks=1000) == {}
    if name.startswith("llama3-70b/"):
        assert group["maxReplicas"] == 1, "STRICT_PACK needs one pod"


@pytest.mark.parametrize("path", ["demo/rm", "llama3-8b/rm", "llama3-8b/generate"])
def test_the_checked_bundles_are_the_bundles_of_ray_train(path):
    from ray.train import ScalingConfig

    job = load_job(f"jobs/{path}.yaml", [])
    for more in ({}, {"accelerator_type": "H100"}, {"resources_per_worker": {"CPU": 2, "memory": 1e9}}):
        job.scaling.update(more)
        job.scaling["num_workers"] = job.scaling["num_workers"] or 1  # 0 becomes 1 on a cluster
        config = ScalingConfig(**job.scaling)
        mine = bundles(job)
        assert [one.resources for one in mine] == [config._resources_per_worker_not_none] * config.num_workers
        selectors = config._label_selector_per_worker(config.num_workers) or [{}] * len(mine)
        assert [one.selector for one in mine] == selectors


@pytest.fixture
def aws():
    """Returns the cluster of cluster.yaml before any worker node runs."""
    types, most = clusterfile.types_of("rlhf")
    return preflight.Cluster([clusterfile.NodeType({"CPU": 4.0})], types, most)


def sft(*overrides):
    return load_job("jobs/llama3-70b-qlora/sft.yaml", list(overrides))


def test_too_small_gpus_are_refused(aws):
    anywhere = sft("scaling.label_selector=null")
    message = (
        r"scaling\.label_selector: a worker needs 46 GiB, but Ray may place it on L4 with 22 or L40S with 44; "
        r"""set "scaling\.label_selector=(\{ray\.io/accelerator-type: in\(H100\)\})" """
    )
    with pytest.raises(InputError, match=message) as error:
        run_checks(anywhere, aws)
    typed = re.search(message, str(error.value))[1]
    run_checks(sft(f"scaling.label_selector={typed}"), aws)
    without = replace(aws, types={"gpu4": aws.types["gpu4"]})
    with pytest.raises(InputError, match=r"in\(A100-80G,H100,H200\).*if the cluster has such nodes"):
        run_checks(anywhere, without)


def test_labels_of_live_nodes_are_checked(aws):
    """Checks label selectors against the labels that Ray sets on nodes by default."""
    for label in ("H100", "A100", "A100-80G"):
        gpus = clusterfile.NodeType({"CPU": 96.0, "GPU": 8.0}, labels={GPU_LABEL: label})
        up = replace(aws, types={}, nodes=[gpus])
        if label == "A100":
            with pytest.raises(InputError, match=r"resources for 0 \(nodes: 96 CPU \+ 8 GPU A100;"):
                run_checks(sft(), up)
        else:
            run_checks(sft(), up)
    wanted = sft("scaling.label_selector=null", "scaling.accelerator_type=H100")
    # Ray itself adds the resource accelerator_type:H100 to the node type of an EC2 instance
    run_checks(wanted, aws)

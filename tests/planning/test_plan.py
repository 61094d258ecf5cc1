"""Tests that `plan` estimates the memory of real models correctly, and that a job fits after the changes that `plan` prints."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
import toy_ppo as toy
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray.util.accelerators import accelerators
from running import ROOT
from settled import plan_of, work_of

from pipeline.__main__ import main
from pipeline.commands.plan import check_fit, gpu_names, of_rollout_workers
from pipeline.errors import Failure, InputError
from pipeline.job import load_job
from pipeline.models.adapters import SharedBase
from pipeline.planning import plan, shape
from pipeline.planning.rows import Rows, estimate_rows
from pipeline.planning.shape import Shape, bytes_saved
from pipeline.settle import placement
from pipeline.settle.places import places_of
from pipeline.system import prices

LLAMA_8B, LLAMA_70B = (shape.SHAPES[f"meta-llama/Llama-3.1-{size}"] for size in ("8B", "70B"))
ROWS = Rows(1000, 512)


def shape_of(job):
    work = work_of(job)
    return Shape(work.frozen, work.lora, "reward" in (work.spec.learns, *work.spec.inputs))


def job(folder, name="demo/ppo", *overrides):
    return load_job(ROOT / f"jobs/{name}.yaml", [f"model.name_or_path={folder}", *overrides])


@pytest.fixture
def llama_8b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2"])
def test_parameters_and_adapters_are_counted_exactly(kind, tmp_path):
    model = toy.base(kind)
    model.config.save_pretrained(tmp_path)
    real = sum(p.numel() for p in model.parameters())
    shape = shape_of(job(tmp_path))
    assert shape.parameters == real
    lora = {"r": 5, "target_modules": "all-linear"}
    shared = SharedBase(model)
    shared.add("reward", lora=lora, head=True)
    assert shape.adapter(lora) == sum(p.numel() for p in shared.parameters_of("reward"))


def saved_bytes(shared, rows, width):
    """Runs a real forward pass. Returns the bytes that autograd saves for the backward pass, without the parameters."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    own = {p.untyped_storage().data_ptr() for p in shared.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = shared.hidden("policy", torch.randint(4, 60, (rows, width)))
    del hidden
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


@pytest.mark.parametrize(
    ("bf16", "settings", "dtype"),
    [
        (False, [], torch.float32),
        (True, [], torch.bfloat16),  # on a CPU, trainer.bf16 also sets the dtype of the base
        (True, ["scaling.use_gpu=true"], torch.float32),
    ],
)
def test_activations_equal_those_of_the_real_model(bf16, settings, dtype, tmp_path):
    model = toy.base("llama", num_hidden_layers=5).to(dtype)
    model.config.save_pretrained(tmp_path)
    asked = job(tmp_path, "demo/ppo", "lora.r=4", f"trainer.bf16={str(bf16).lower()}", *settings)
    shape = shape_of(asked)
    assert shape.weights == sum(p.numel() * p.element_size() for p in model.parameters())
    shared = SharedBase(model, autocast=torch.bfloat16 if bf16 else None)
    shared.add("policy", lora=asked.lora, trainable=True)
    whole, checkpointed = (shape.activations(6, 100, bf16, checkpointing=on) for on in (False, True))
    counted = bytes_saved(shape.model, shape.lora, 5, 6, 100, bf16)
    assert counted == saved_bytes(shared, 6, 100)
    assert whole - 600 * shape.forward(bf16) == pytest.approx(counted, rel=0.01)
    assert checkpointed < 0.5 * whole
    if not bf16:
        assert shape.cache(bf16) * 40 == toy.cache_bytes(shared, rows=4, tokens=10)


def test_memory_is_planned_for_few_decoded_rows_but_time_for_all(llama_8b):
    """Without a limit in the job, a run decodes as many rows as fit into the free memory."""
    rows = "trainer.local_rollout_forward_batch_size"
    free, all_rows, few = (job(llama_8b, "llama3-8b/ppo", f"{rows}={n}") for n in ("null", 128, 64))
    assert plan_of(free).peak == plan_of(few).peak < plan_of(all_rows).peak
    hours = [plan.estimate_hours(plan_of(asked), "H100", ROWS) for asked in (free, all_rows, few)]
    assert hours[0] == hours[1] < hours[2]
    assert plan._changes(work_of(free))[0] == (rows, 32)


# (size, config, parameters of embedding, lm head, layers and last norm, bytes of 8 heads' keys and values in the cache)
BY_HAND = [
    ("8b", LLAMA_8B, 2 * 128256 * 4096 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096,
     32 * 2 * 8 * 128 * 2),
    ("70b", LLAMA_70B, 2 * 128256 * 8192 + 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 8192,
     80 * 2 * 8 * 128 * 2),
]  # fmt: skip


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "ppo"])
@pytest.mark.parametrize("profile", ["llama3-8b", "llama3-8b-qlora", "llama3-70b-qlora", "llama3-70b"])
def test_the_header_of_a_profile_names_the_peak_and_the_smallest_gpu(profile, stage, in_root):
    path = f"jobs/{profile}/{stage}.yaml"
    planned = load_job(path)
    peak = plan_of(planned, {}).peak / plan.GIB
    header = (ROOT / path).read_text().partition("\nstage:")[0]
    assert f"`plan` estimates a peak of {peak:.0f} GiB on each GPU" in header
    smallest = min(plan.GPUS[name].memory for name in gpu_names(places_of(planned, elsewhere=True)))
    stated = int(re.search(r"GPUs? of (\d+) GB", header)[1])
    assert peak < smallest and stated - 2 <= smallest < stated


@pytest.mark.parametrize(("size", "config", "parameters", "cache"), BY_HAND)
def test_plans_for_8b_and_70b_equal_a_calculation_by_hand(size, config, parameters, cache, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = f"llama3-{size}-qlora/ppo"
    # vLLM runs in rollout workers, so trainers reserve no memory for vLLM. vLLM splits base and cache over a worker's GPUs.
    settings = ["num_workers=2", "use_gpu=true", "tensor_parallel_size=2", "engine=vllm"]
    asked = job(tmp_path, name, *(f"rollout.{one}" for one in settings))
    planned = plan_of(asked)
    assert planned.shape.parameters == parameters and planned.shape.cache(planned.settings.bf16) == cache
    assert not any("vLLM" in item.what or "KV cache" in item.what for item in planned.items)
    base, _, filled = (item for item in plan_of(asked, learns=False).items if "vLLM" in item.what)
    assert base.size == 2 * parameters / 2
    rows, width = (int(n) for n in re.findall(r"(\d+) rows of (\d+) tokens", filled.what)[0])
    assert filled.size == rows * width * cache / 2


def test_plan_advises_shards_before_quantization(llama_8b):
    workers = ["scaling.num_workers=4", "data.batch_size=32"]
    asked = job(llama_8b, "llama3-8b/sft", *workers)
    for gib, key, other in (
        (12, "model.fsdp", "model.load_in_4bit"),
        (9, "model.load_in_4bit", "model.fsdp"),
    ):
        changes, smaller = plan.fit_into(work_of(asked), gib * plan.GIB)
        assert f"{key}=true" in changes and not any(other in change for change in changes)
        again = plan_of(job(llama_8b, "llama3-8b/sft", *workers, *changes))
        assert again.peak == smaller.peak <= gib * plan.GIB
    dora = {"policy": {**asked.lora, "use_dora": True}}
    # model.fsdp does not support DoRA, a single worker, or vLLM.
    assert "model.load_in_4bit=true" in plan.fit_into(work_of(asked), 12 * plan.GIB, dora)[0]
    alone = job(llama_8b, "llama3-8b/sft", "scaling.num_workers=1", "data.batch_size=32")
    assert "model.load_in_4bit=true" in plan.fit_into(work_of(alone), 12 * plan.GIB)[0]
    for engine in ("vllm", "transformers"):
        rollout = [f"rollout.engine={engine}", "rollout.num_workers=2"]
        changes = plan._changes(work_of(job(llama_8b, "llama3-8b/ppo", "scaling.num_workers=4", *rollout)))
        assert (("model.fsdp", True) in changes) == (engine == "transformers")


def test_hours_are_matrix_products_divided_by_speed(llama_8b):
    keeps = ["trainer.gradient_checkpointing=false", "trainer.num_train_epochs=1"]
    asked = job(llama_8b, "llama3-8b/sft", *keeps)
    planned = dataclasses.replace(plan_of(asked), tokens=(1000, 0))
    # FLOPs per weight and token: 2 for the forward pass and 2 for the backward pass
    flops = 4 * 8_030_261_248 * 1000 * 10_000
    expected = flops / (989e12 * plan.UTILIZATION) / 3600 / asked.workers[1]
    assert plan.estimate_hours(planned, "H100", Rows(10_000, 1000)) == pytest.approx(expected)


def rows_of(words, count, file):
    row = {"prompt": "What is the capital of Norway?", "completion": " ".join(["Oslo"] * words)}
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(count)))
    return file


def test_hours_grow_with_the_number_and_the_length_of_the_rows(tmp_path, in_root, capsys, monkeypatch):
    overrides = ["scaling.use_gpu=true", "trainer.packing=true"]

    def hours(file):
        asked = load_job(ROOT / "jobs/demo/sft.yaml", [f"data.train={file}", *overrides])
        rows, how = estimate_rows(work_of(asked), 256)
        assert how == f"{rows.count:,} rows, {rows.tokens:.0f} tokens on average"
        return rows, plan.estimate_hours(plan_of(asked), "L4", rows)

    few, short = hours(rows_of(10, 100, tmp_path / "a.jsonl"))
    many, twice = hours(rows_of(10, 200, tmp_path / "b.jsonl"))
    longer, more = hours(rows_of(30, 100, tmp_path / "c.jsonl"))
    assert (few.count, many.count) == (100, 200) and few.tokens == many.tokens < longer.tokens < 256
    assert twice == pytest.approx(2 * short) and more == pytest.approx(short * longer.tokens / few.tokens)
    given = [*overrides, f"data.train={tmp_path / 'a.jsonl'}", f"run.storage_path={tmp_path}"]
    assert main(["plan", "jobs/demo/sft.yaml", *given]) == 0
    assert f"data: 100 rows, {few.tokens:.0f} tokens on average" in capsys.readouterr().out
    monkeypatch.setattr("pipeline.planning.rows.CHUNK", 4096)
    large = rows_of(10, 2000, tmp_path / "d.jsonl")
    rows, how = estimate_rows(work_of(load_job("jobs/demo/sft.yaml", [f"data.train={large}"])), 256)
    assert how.endswith(", estimated") and rows.count == pytest.approx(2000, rel=0.03)


def test_a_plan_for_kto_has_the_share_of_desirable_rows_and_two_rows_in_a_micro_batch(in_root):
    asked = load_job("jobs/demo/kto.yaml", ["policy=base"])
    _, how = estimate_rows(work_of(asked), 256)
    assert how.startswith("1,800 rows, ") and how.endswith(", 32% desirable")
    sizes = {
        value for key, value in plan._changes(work_of(asked)) if key == "trainer.per_device_train_batch_size"
    }
    assert min(sizes) == 2
    both = [plan._with(work_of(asked), {"trainer.gradient_checkpointing": on}) for on in (False, True)]
    kept, recomputed = (plan.estimate_hours(plan.make_plan(one), "L4", ROWS) for one in both)
    # both sums include KTO's three forward passes without gradients
    assert recomputed / kept == pytest.approx((3 + 3) / (2 + 3))


def test_gated_models_are_planned_without_a_token_or_a_network(capsys, in_root, tmp_path):
    """Tests run offline, so `plan` uses the model shape in SHAPES, and its output says so."""
    assert main(["plan", "jobs/llama3-70b-qlora/ppo.yaml", f"run.storage_path={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "70.6 B parameters" in out and "data: full-length rows of 512 tokens assumed" in out
    assert "using a built-in shape, because the base's config.json cannot be read: " in out
    assert "no model is registered yet" in out and not list(tmp_path.iterdir())
    table = re.findall(r"^   (\S+) +\d+  yes +([\d.]+) h  \$ *(\d+)$", out, re.M)
    assert [name for name, *_ in table] == ["A100-80G", "H100", "H200"]
    for name, hours, dollars in table:  # the price is for four workers, and hours are rounded
        assert int(dollars) == pytest.approx(4 * float(hours) * prices.read_prices().gpus[name], rel=0.01)


def test_every_gpu_has_a_name_that_ray_knows():
    assert set(plan.GPUS) <= {value for value in vars(accelerators).values() if isinstance(value, str)}


@pytest.mark.parametrize(
    ("name", "overrides", "status", "says"),
    [
        # Jobs that do not fit into GPU memory, and jobs that fit.
        ("llama3-8b/ppo", ["scaling.label_selector={ray.io/accelerator-type: A100-40G}", "trainer.batch_size=2048",
                           "trainer.local_rollout_forward_batch_size=512"], 1, r"with trainer\.local_rollout_forward_batch_size="),
        ("demo/sft", ["model.name_or_path={8b}", "data.max_length=4096"], 1, "a worker needs"),
        ("demo/sft", [], 0, "1 worker on the CPU:"),
        ("llama3-8b/sft", [], 0, r"data: 10,000 rows per epoch and full-length rows of 2,048 tokens assumed \(data\.train is not on"),
        ("llama3-8b-qlora/sft", ["scaling.accelerator_type=A100"], 0, r"GPU .*\n   A100-40G .* yes .*\n   A100-80G .* yes .*\n   Assumed"),
        # Jobs that cannot be planned, or that a run would reject.
        ("llama3-8b/sft", ["model.name_or_path=some/model"], 2, "cannot be read from the hub"),
        ("demo/export", ["run.name=x"], 2, "stage: found export; expected a stage with workers"),
        ("llama3-8b/evaluate", [], 0, r"The job fits on A100-40G, .*H200\."),
        ("llama3-8b/sft", ["scaling.accelerator_type=A10G"], 2, r"found 'A10G', which scaling\.label_selector=.* excludes; change"),
        ("llama3-8b/sft", ["scaling.accelerator_type=TPU"], 2, r"scaling\.accelerator_type: found 'TPU'"),
        ("demo/sft", ["data.max_length=1000"], 2, r"data\.max_length: 1000 is more than the model's context of 256 tokens; use data\.max_length=256"),
        ("demo/sft", ["lora.target_modules=[nothing]"], 2, r"lora\S*: .*nothing"),
    ],
)  # fmt: skip
def test_plan_prints_whether_a_job_fits_or_why_it_cannot_be_planned(
    name, overrides, status, says, llama_8b, tmp_path, capsys, in_root
):
    base = [f"model.name_or_path={llama_8b}"] if name.startswith("llama3") else []
    given = [one.replace("{8b}", str(llama_8b)) for one in overrides]
    assert main(["plan", f"jobs/{name}.yaml", f"run.storage_path={tmp_path}/runs", *base, *given]) == status
    said = "".join(capsys.readouterr())
    assert re.search(says, said) and "Traceback" not in said, said


def test_the_plan_of_an_evaluation_counts_its_adapters(models, in_root, capsys):
    policy, reward = models["toy-policy"], models["toy-rm"]
    given = [f"policy={policy}", f"baseline={policy}", f"reward={reward}", "judge=null"]
    assert main(["plan", "jobs/demo/evaluate.yaml", *given]) == 0
    said = capsys.readouterr().out
    assert "adapters: policy, baseline, reward\n" in said and "note" not in said and "checkpoint" not in said


QWEN = {  # the base model of jobs/own
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def jobs_of_profile(profile, tmp_path):
    """Returns {path: overrides} for the jobs of a profile that have workers. The overrides make these jobs use GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    found = {}
    for path in sorted((ROOT / "jobs" / profile).glob("*.yaml")):
        if path.stem in ("export", "iterate"):
            continue
        given = ["scaling.use_gpu=true"] + [f"model.name_or_path={tmp_path}"] * (profile == "own")
        if profile in ("demo", "own"):
            given += ["scaling.num_workers=1"]
        found[path] = given
    return found


@pytest.mark.parametrize(("count", "gpu"), [(1, "L4"), (8, "H100")])
@pytest.mark.parametrize(
    "profile", ["demo", "own", "llama3-8b", "llama3-8b-qlora", "llama3-70b-qlora", "llama3-70b"]
)
def test_a_profile_starts_on_a_machine_with_gpus_or_says_what_to_change(
    profile, count, gpu, tmp_path, in_root, monkeypatch
):
    """Applies the changes that the messages propose. A changed job must fit, or the message must propose larger GPUs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: count)
    memory, fitted = plan.GPUS[gpu].memory * plan.GIB, 0
    for path, given in jobs_of_profile(profile, tmp_path).items():
        asked = load_job(path, given, path.stem)
        if asked.workers[0] > count:
            with pytest.raises(
                InputError, match=rf"this machine has {count}; set scaling\.num_workers"
            ) as few:
                placement.check_fits(places_of(asked))
            placement.check_fits(places_of(load_job(path, [*given, few.value.change], path.stem)))
        try:
            check_fit(plan_of(asked, {}), places_of(asked), {}, memory, count)
        except Failure as failure:
            said = str(failure)
            given += shlex.split("".join(re.findall(r"; with (.*?) a worker needs", said)))
            changed = load_job(path, given, path.stem)
            placement.check_fits(places_of(changed))
            peak = plan_of(changed, {}).peak
            larger = re.search(r"; use (.*), a smaller model", said)
            assert (larger is None) == (peak <= memory), said
            if larger:
                assert all(peak <= plan.GPUS[name].memory * plan.GIB for name in larger[1].split(", ")), said
            fitted += larger is None
        else:
            assert plan_of(asked, {}).peak <= memory
            placement.check_fits(places_of(asked))
            fitted += 1
    assert bool(fitted) == ("70b" not in profile or memory > 75 * plan.GIB)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rm", "dpo", "kto", "ppo"])
@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [("float32", "false"), ("bfloat16", "false"), ("float32", "true")]
)
def test_the_planned_memory_is_within_20_percent_of_the_memory_of_a_real_step(stage, dtype, checkpointing):
    """Measures how much the memory of a CPU process grows in a step. The allocator returns freed memory to the system."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, str(ROOT / "tests/support/peaks.py"), stage, dtype, checkpointing]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    measured = json.loads(done.stdout.splitlines()[-1])
    print(f"{stage} {dtype} {checkpointing}: {measured}")
    # In the first step, the libraries allocate 32 MiB in addition.
    assert abs(measured["planned"] - measured["grown"]) < 0.2 * measured["grown"] + 32 * 2**20


def test_the_rows_of_a_mixture_are_counted_as_often_as_they_are_drawn(tmp_path, in_root):
    one, other = rows_of(2, 300, tmp_path / "a.jsonl"), rows_of(60, 40, tmp_path / "b.jsonl")
    weighted = f"{{path: {one}, weight: 1}}, {{path: {other}, weight: 1}}"
    jobs = [
        load_job("jobs/demo/sft.yaml", [f"data.train=[{rows}]"]) for rows in (f"{one}, {other}", weighted)
    ]
    plain, mixed = (estimate_rows(work_of(one), 256)[0] for one in jobs)
    assert (plain.count, mixed.count) == (340, 80) and mixed.tokens > 1.5 * plain.tokens


def test_a_rollout_worker_needs_no_memory_for_a_critic_and_gradients(llama_8b, capsys):
    three, rows = "rollout.num_workers=3", "trainer.local_rollout_forward_batch_size=64"
    one = job(llama_8b, "llama3-8b/ppo", three, rows)
    worker = plan_of(one, learns=False)
    assert not [item.what for item in worker.items if re.search("critic|gradients and", item.what)]
    assert plan_of(one).peak > worker.peak > plan_of(one).items[0].size
    said = of_rollout_workers(places_of(one).rollout, worker)
    assert "fits on A100-40G" in said and "3 rollout workers cost at least $6.72 an hour" in said
    l4 = job(llama_8b, "llama3-8b/ppo", three, "rollout.label_selector={ray.io/accelerator-type: L4}")
    with pytest.raises(Failure, match=r"rollout\.label_selector: a rollout.* allow larger GPUs: A100-40G"):
        of_rollout_workers(places_of(l4, elsewhere=True).rollout, plan_of(l4, learns=False))

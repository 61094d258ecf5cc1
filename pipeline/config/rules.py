"""What a job may not contain, beyond the types and ranges of the schema. Each rule names a key and what to do instead.

`problems` yields (key, message). Settings that are valid but often unintended are `warnings`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline import references
from pipeline.config import gates, schema
from pipeline.config.gates import Problems
from pipeline.config.job import HUB, SPLITS, Data, Export, Job, Source, completed, sources_of
from pipeline.config.stages import STAGE
from pipeline.config.yaml_tree import Tree
from pipeline.errors import about, show
from pipeline.intervals import outside
from pipeline.models import hub
from pipeline.models.adapter_files import adapts_lm_head
from pipeline.ppo.settings import SettingError
from pipeline.references import Ref

# What run.storage_path contains in addition to the folders of runs.
RESERVED = ("artifacts", "data", "feedback", "mlflow.db", "report")
MODEL_ID = r"[A-Za-z0-9][\w.-]{0,63}"  # how a request to `serve` may name a model
REPOSITORY = r"(?!.*\.\.)[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]{0,95}"
MAX_WORKERS = 10_000
LARGEST_BATCH = 1 << 20


def check(tree: Tree, job: Job) -> None:
    """Raises InputError for the first problem of a job."""
    for key, message in problems(job):
        raise tree.error(key, message)


def problems(job: Job) -> Problems:
    """Yields (key, what is wrong with it). Later checks may assume that earlier ones found nothing."""
    yield from _unused(job)
    yield from _settings(job)
    for stages, key, wrong, advice in RULES:
        facts = STAGE[job.stage]
        concerned = any(word == job.stage or getattr(facts, word, False) for word in stages.split())
        if (concerned or not stages) and (found := wrong(job)):
            yield key, advice.format(found, value=show(_value(job, key)))
    for further in (_patterns, _sources, _scaling, _batches, gates.keep_problems, gates.problems, _inputs):
        yield from further(job)


def _value(job: Job, key: str) -> Any:
    section, _, name = key.partition(".")
    values = getattr(job, section)
    if not name:
        return values
    return values.get(name) if isinstance(values, dict) else getattr(values, name)


# ---------------------------------------------------------------- rules about one or two keys
class Rule(NamedTuple):
    """A combination of settings that a job may not have."""

    stages: str  # names of stages, or facts of them (stages.Stage); "": all stages
    key: str
    wrong: Callable[[Job], Any]  # returns what breaks the rule, or something false
    advice: str  # {value}: the key's value; {}: what `wrong` returned


def _given(key: str, *others: str) -> Callable[[Job], Any]:
    """Returns whether a job sets all of these keys to something true."""
    return lambda job: all(_value(job, one) for one in (key, *others))


def _no_template(job: Job) -> bool:
    template = job.model.chat_template
    return template not in (None, "plain") and not os.path.isfile(os.path.expanduser(str(template)))


def _bad_pattern(name: str) -> Callable[[Job], Any]:
    def wrong(job: Job) -> re.error | None:
        pattern = job.lora.get(name)
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except re.error as error:
            return error
        return None

    return wrong


def _evaluates_nothing(job: Job) -> bool:
    """Returns whether `trainer` asks for evaluations and there are no rows. PPOConfig has no eval_strategy; its eval_steps
    decides.
    """
    strategy = job.trainer.get("eval_strategy", "no") != "no"
    return not job.held_out and bool(strategy or (job.stage == "ppo" and job.trainer.get("eval_steps")))


def _needs_gpu(key: str) -> Callable[[Job], Any]:
    return lambda job: job.trainer.get(key) and not job.scaling.get("use_gpu")


def _losses(job: Job) -> set[str]:
    return set(job.trainer.get("loss_type", ["sigmoid"]))


def _without_divergence(job: Job) -> str:
    """Returns the losses that have no f-divergence, if the job sets one."""
    diverging = set("sigmoid sigmoid_norm hinge ipo exo_pair robust discopop sft".split())
    given = job.trainer.get("f_divergence_type", "reverse_kl") != "reverse_kl"
    return ", ".join(sorted(_losses(job) - diverging)) if given else ""


def _in_kto_loss(key: str, *values: Any) -> Callable[[Job], Any]:
    return lambda job: job.trainer.get("loss_type", "kto") == "kto" and job.trainer.get(key) in values


def _too_few_prompts(job: Job) -> int:
    """Returns the least batch_size that gives each worker a prompt, or 0."""
    generations, workers = job.args.num_generations, job.workers[1]
    return workers * generations if job.args.batch_size // generations < workers else 0


def _bad_id(section: str) -> Callable[[Job], Any]:
    def wrong(job: Job) -> str:
        return ", ".join(show(one) for one in _value(job, section) if not re.fullmatch(MODEL_ID, one))

    return wrong


def _in_bucket(job: Job) -> str:
    path = job.serve.feedback_path or job.run.storage_path
    return path if "://" in path else ""


NOTHING_HELD_OUT = "there is nothing to evaluate on: set data.eval or data.eval_fraction, or "
RULES = [Rule(*row) for row in (
    # model and lora
    ("", "model.chat_template", _no_template, "found {value}, expected an existing Jinja file, `plain`, or null"),
    ("", "lora.bias", lambda job: job.lora.get("bias", "none") != "none",
     "found {value}, which trains biases of the base, expected none: the base stays frozen and shared"),
    ("", "lora.init_lora_weights",
     lambda job: job.lora.get("init_lora_weights") not in (None, True, False, "gaussian", "orthogonal"),
     "found {value}, which rewrites base weights that all adapters share; expected true or gaussian"),
    ("", "model.fsdp", _given("model.fsdp", "model.load_in_4bit"),
     "given together with model.load_in_4bit, whose 4-bit weights FSDP cannot gather; keep one: an nf4 base is not sharded, "
     "and takes a quarter of the memory of bfloat16"),
    ("", "model.fsdp", _given("model.fsdp", "lora.use_dora"),
     "given together with lora.use_dora, which takes norms of unsharded weights; keep one"),
    ("", "rollout.engine", lambda job: job.model.fsdp and job.rollout.get("engine") == "vllm",
     "found vllm together with model.fsdp: each process with vLLM also loads the full base on one device, for "
     "reference and rewards; set rollout.engine=transformers, or model.fsdp=false if the base fits on one device"),
    ("trl", "lora.target_modules", lambda job: adapts_lm_head(job.lora.get("target_modules")),
     "found lm_head, to which TRL's trainers apply no adapter; remove it"),
    ("", "lora.target_modules", lambda job: job.lora.get("target_modules") == [],
     "found an empty list, expected layers to adapt, for example all-linear"),
    *(("", f"lora.{key}", _bad_pattern(key), "found {value}, which is no pattern ({})")
      for key in ("target_modules", "exclude_modules")),
    # data
    ("reads_train", "data.train", lambda job: not job.data.train and job.stage,
     "missing; `{}` needs rows, for example data.train=jobs/demo/data/*.jsonl"),
    ("evaluate", "data.eval", lambda job: not job.data.eval and not ((job.data.pairs or job.data.benchmarks) and not job.policy),
     "missing; `evaluate` needs prompts, for example data.eval=jobs/demo/data/prompts_eval.jsonl (or, for a reward model "
     "alone, data.pairs and policy=null)"),
    ("evaluate", "policy", lambda job: job.data.eval and not job.policy,
     "missing; `evaluate` needs it to answer data.eval: models:/rlhf-ppo@champion (or `base`: no adapter); for a reward "
     "model alone set data.eval=null"),
    ("evaluate", "baseline", lambda job: job.baseline and not job.data.eval,
     "there are no prompts to compare it on: set data.eval, or baseline=null"),
    ("", "data.subset", lambda job: job.data.subset and not job.data.pairs,
     "names a column of data.pairs, and there are none"),
    *(("", f"data.{name}", lambda job, name=name: getattr(job.data, name) and not job.reward,
       "there is no reward model to evaluate: set reward, for example reward=models:/rlhf-rm@champion")
      for name in ("pairs", "benchmarks")),
    ("evaluate", "trainer.probes", lambda job: job.trainer.get("probes") and not job.data.pairs,
     "there are no pairs whose completions it could edit: set data.pairs, or trainer.probes=false"),
    ("evaluate", "trainer.best_of_n", lambda job: job.trainer.get("best_of_n") and not (job.data.eval and job.reward),
     "needs prompts (data.eval) and a reward that chooses: set both, or trainer.best_of_n=0"),
    ("", "data.eval_fraction", _given("data.eval", "data.eval_fraction"),
     "given together with data.eval; keep one: a separate file, or a share of data.train"),
    ("trl", "trainer.eval_strategy", _evaluates_nothing, NOTHING_HELD_OUT + "eval_strategy=no"),
    ("ppo", "trainer.eval_steps", _evaluates_nothing, NOTHING_HELD_OUT + "eval_steps=0"),
    ("trl", "trainer.eval_on_start", lambda job: job.trainer.get("eval_on_start") and not job.held_out,
     NOTHING_HELD_OUT + "eval_on_start=false"),
    ("", "scaling.num_workers", lambda job: not 1 <= job.workers[0] <= job.workers[1] <= MAX_WORKERS,
     f"found {{value}}, expected 0 (in this process), at least 1, or [min, max] with 1 <= min <= max <= {MAX_WORKERS}"),
    ("trl", "data.batch_size", lambda job: job.data.batch_size is None and job.workers[0] < job.workers[1],
     "missing; with elastic scaling.num_workers it keeps the global batch fixed, for example 64"),
    ("trl", "trainer.gradient_accumulation_steps", lambda job: job.data.batch_size and "gradient_accumulation_steps" in job.trainer,
     "follows from data.batch_size; keep only one of the two"),
    # trainer
    ("", "trainer.use_cpu", _given("trainer.use_cpu", "scaling.use_gpu"),
     "given together with scaling.use_gpu=true; keep one"),
    *(("trl", f"trainer.{what}_steps",
       lambda job, what=what: f"{what}_steps" in job.trainer and job.trainer.get(f"{what}_strategy") == "epoch",
       f"found {{value}}, which counts only with trainer.{what}_strategy=steps; the job sets epoch")
      for what in ("eval", "save", "logging")),
    ("trl", "trainer.fp16", _needs_gpu("fp16"), "needs a GPU; on CPUs set trainer.fp16=false trainer.bf16=true"),
    ("trl", "trainer.activation_offloading", _needs_gpu("activation_offloading"),
     "needs a GPU, from which it offloads; remove it"),
    ("trl", "trainer.save_strategy", lambda job: job.trainer.get("save_strategy") == "best",
     "found best, which leaves a stopped run few checkpoints to continue from; expected steps or epoch. run.keep=best "
     "registers the best step with any save_strategy"),
    ("trl", "trainer.sync_ref_model", _given("trainer.sync_ref_model"),
     "the reference is the frozen sft adapter, which never changes"),
    # TRL raises these only in a worker, after it has loaded the model.
    ("dpo", "trainer.loss_type", lambda job: not _losses(job),
     "found an empty list, expected a loss, for example [sigmoid]"),
    ("dpo", "trainer.label_smoothing", lambda job: "exo_pair" in _losses(job) and not job.trainer.get("label_smoothing"),
     "exo_pair needs it above 0, for example 0.001"),
    ("dpo", "trainer.f_divergence_type", _without_divergence,
     "found {value}, which has no meaning for {}; expected reverse_kl"),
    ("dpo", "trainer.use_weighting", lambda job: job.trainer.get("use_weighting") and {"aot", "aot_unpaired"} & _losses(job),
     "needs paired losses, and aot and aot_unpaired are not; remove it"),
    ("kto", "trainer.per_device_train_batch_size", _in_kto_loss("per_device_train_batch_size", 1),
     "found 1: the kto loss needs the completions of other rows for its KL term; expected 2 or more, or "
     "trainer.loss_type=apo_zero_unpaired, which has none"),
    ("kto", "trainer.precompute_ref_log_probs", _in_kto_loss("precompute_ref_log_probs", True),
     "each epoch pairs different rows for the KL term, so their log-probs cannot be computed before training; remove it"),
    ("ppo", "trainer.batch_size", _too_few_prompts,
     "fewer prompts for an update than workers; expected at least trainer.batch_size={}"),
    ("evaluate generate collect serve", "trainer.min_new_tokens",
     lambda job: job.args.min_new_tokens >= job.args.response_length, "found {value}, expected less than response_length"),
    ("collect", "trainer.num_generations", lambda job: job.args.select != "best" and job.args.num_generations < 2,
     "found {value}: a pair needs two completions; expected 2 or more, for example 4, or trainer.select=best"),
    ("collect", "trainer.temperature", lambda job: job.args.temperature == 0 and job.args.num_generations > 1,
     "found 0, so all completions of a prompt are the same; expected a temperature above 0, for example 1.0"),
    ("collect", "trainer.min_margin", lambda job: job.args.select == "best" and job.args.min_margin,
     "trainer.select=best makes no pairs; remove it"),
    ("collect", "trainer.skip_prompts", lambda job: job.args.skip_prompts and job.args.num_prompts is None,
     "needs trainer.num_prompts, which draws prompts in an order; without it all are used"),
    # run and mlflow
    ("", "run.name", lambda job: name_problem(job.run.name, job.stage), "{}"),
    ("", "mlflow.registered_model", lambda job: not re.fullmatch(references.NAME, job.mlflow.registered_model or "none"),
     "found {value}, expected letters, digits, spaces and `. _ - + ( )`, for example rlhf-sft"),
    ("", "mlflow.alias", lambda job: re.fullmatch(r"latest|v\d+", job.mlflow.alias, re.IGNORECASE) and job.mlflow.alias,
     "`{}` is reserved by MLflow; use another word, for example champion"),
    ("", "mlflow.alias", lambda job: not re.fullmatch(r"[\w-]{1,255}", job.mlflow.alias),
     "found {value}, expected letters, digits, `_` and `-`, for example champion"),
    ("", "mlflow.tracking_uri", lambda job: str(job.mlflow.tracking_uri).startswith("file:"),
     "MLflow no longer writes to file: stores; use sqlite:///runs/mlflow.db or http://host:5000"),
    # serve
    ("serve", "serve.policies", lambda job: not job.serve.inputs,
     "missing; `serve` needs it, or serve.rewards: 'serve.policies={{my-policy: models:/rlhf-ppo@champion}}'"),
    *(("serve", key, _bad_id(key), "found {}, expected an id of letters, digits, `.`, `_` and `-`")
      for key in ("serve.policies", "serve.rewards")),
    ("serve", "serve.rewards", lambda job: ", ".join(sorted(job.serve.policies.keys() & job.serve.rewards.keys())),
     "found {}, which serve.policies also names; expected another id"),
    ("serve", "serve.feedback_path", _in_bucket,
     "feedback goes into a folder of one node, not into a bucket ({}); set serve.feedback_path=FOLDER"),
    ("serve", "serve.cache_tokens", lambda job: job.serve.cache_tokens is not None and job.rollout.get("engine") == "vllm",
     "found {value}; expected null with rollout.engine=vllm: rollout.gpu_memory_utilization sets the size of its KV cache"),
    # export
    ("export", "policy", lambda job: not job.policy and not job.reward,
     "missing; `export` needs it, or a reward: policy=models:/rlhf-ppo@champion"),
    ("export", "policy", lambda job: job.policy == "base",
     "found 'base', expected an adapter to merge: models:/rlhf-ppo@champion, or its folder"),
    ("export", "reward", lambda job: isinstance(job.reward, list) or Ref.parse(str(job.reward)).is_function,
     "found {value}, expected one reward adapter: models:/rlhf-rm@champion, or its folder"),
    *(("export", f"trainer.{key}",
       lambda job, key=key: not job.args.hub_model_id and job.trainer.get(key) not in (None, getattr(Export, key)),
       "needs trainer.hub_model_id=OWNER/NAME; set that too") for key in ("push_to_hub", "hub_private_repo", "hub_revision")),
    ("export", "trainer.hub_model_id", lambda job: not re.fullmatch(REPOSITORY, job.args.hub_model_id or "owner/name"),
     "found {value}, expected OWNER/NAME: a user or an organization, and a name of letters, digits, `.`, `_` and `-`"),
    ("export", "trainer.hub_model_id", lambda job: job.policy and job.reward and job.args.hub_model_id,
     "{} is one repository, for one model; set reward=null or policy=null"),
)]  # fmt: skip


# ---------------------------------------------------------------- rules that look at several values
def _unused(job: Job) -> Problems:
    """Yields values that would change nothing, unless they are the default."""
    for key, why in STAGE[job.stage].unused.items():
        section, _, name = key.partition(".")
        value = _value(job, key)
        if name:
            default = schema.keys(schema.class_of(section, job.stage))[name].get("default")
        else:
            default = type(value)()
        if value not in (None, {}, [], default):
            yield key, f"`{job.stage}` does not use this key ({why}); remove it"


def name_problem(name: str | None, subcommand: str) -> str | None:
    """Returns why a run or an iteration cannot have this name, or None."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return f"found {show(name)}, expected letters, digits, `.`, `_` and `-`: it names a folder in run.storage_path"
    if name in RESERVED:
        return (
            f"found {show(name)}, which run.storage_path uses for all runs; expected another name, "
            f"for example {subcommand}-{name}"
        )
    return None


def _settings(job: Job) -> Problems:
    """Yields what our own config classes reject when they are made."""
    for section, make in (
        ("trainer", lambda: job.stage == "ppo" and job.args),
        ("rollout", lambda: job.rollout_config),
    ):
        try:
            make()
        except SettingError as error:
            yield f"{section}.{error.key}", error.message


def _not_in(value: Any, allowed: str) -> str | None:
    """Returns what was expected if `value` is not one of the allowed numbers (pipeline.intervals), or None."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return outside(value, allowed) if number else "a number"


def _patterns(job: Job) -> Problems:
    """Yields ranks and alphas of layers that peft accepts and then fails on in a worker."""
    for key, allowed in (("rank_pattern", "whole [1, 8192]"), ("alpha_pattern", "(0, 1000000]")):
        if key in job.lora and job.lora[key] is None:
            yield f"lora.{key}", "found null, expected a mapping of layers to numbers; remove it"
        for layers, value in (job.lora.get(key) or {}).items():
            if expected := _not_in(value, allowed):
                yield f"lora.{key}", f"found {show(value)} for {show(layers)}, expected {expected}"


def _sources(job: Job) -> Problems:
    """Yields unknown keys of a source, invalid conversions of its rows, and weights that do not fit together."""
    data, known = job.data, schema.keys(schema.class_of("source", ""))
    for name in SPLITS:
        spec = getattr(data, name)
        for index, item in enumerate(spec if isinstance(spec, list) else []):
            for key, problem in schema.wrong(item, known) if isinstance(item, dict) else ():
                yield f"data.{name}.{index}.{key}", problem
    yield from _preprocessing("data", data)
    for name in SPLITS:
        sources = zip(sources_of(getattr(data, name)), completed(data, name), strict=True)
        for index, (source, full) in enumerate(sources):
            key = f"data.{name}.{index}"
            yield from _preprocessing(key, source)
            if source.revision is not None and (not source.path.startswith(HUB) or "@" in source.path):
                found = f"found {show(source.revision)} for {show(source.path)}"
                expected = f"only a dataset on the hub ({HUB}NAME) has a revision, and it is given once"
                yield f"{key}.revision", f"{found}; {expected}"
            if full.group_by and not full.transform:
                found = f"found {show(full.group_by)}; only a transform can read several rows at once"
                advice = f"{found}: also set transform: python:MODULE:FUNCTION"
                yield f"{key}.group_by" if source.group_by else "data.group_by", advice
            if name != "train" and source.weight is not None:
                yield f"data.{name}", "found a weight; only data.train is mixed by weights: remove it"
    weights = [source.weight for source in sources_of(data.train)]
    given = [weight for weight in weights if weight is not None]
    if not given and data.stopping_strategy != "first_exhausted":
        yield "data.stopping_strategy", "no source of data.train has a weight: there is nothing to draw from"
    if given and not STAGE[job.stage].learns:
        yield "data.train", f"found a weight; `{job.stage}` reads every row once: remove it"
    if 0 < len(given) < len(weights):
        found = f"{len(given)} of {len(weights)} sources have a weight"
        yield "data.train", f"{found}; expected one for each, or for none"


def _preprocessing(key: str, given: Data | Source) -> Problems:
    """Yields invalid values of transform, columns and label, of the section or of a source.

    data/reshape.py checks the fields of each stage later.
    """
    if given.transform is not None and not Ref.parse(given.transform).is_function:
        expected = "expected python:MODULE:FUNCTION, for example python:my_rows:pairs"
        yield f"{key}.transform", f"found {show(given.transform)}, {expected}"
    for field, column in (given.columns or {}).items():
        if not column or not all([column] if isinstance(column, str) else column):
            yield f"{key}.columns.{field}", f"found {show(column)}, expected the name of a column"
    if given.label is None:
        return
    found = f"found {show(given.label)}, expected"
    if given.label.keys() not in ({"good", "bad"}, {"first", "second"}, {"first", "second", "tie"}):
        expected = (
            "{first: VALUE, second: VALUE} and perhaps tie: VALUE, or {good: VALUE, bad: VALUE} for ratings"
        )
        yield f"{key}.label", f"{found} {expected}"
    values = [one for some in given.label.values() for one in (some if isinstance(some, list) else [some])]
    nested = any(isinstance(one, list | dict) for one in values)
    if nested or len({_compared(one) for one in values}) < len(values):
        yield f"{key}.label", f"{found} different texts or numbers for each of its keys"


def _compared(value: Any) -> str:
    """Returns a label as it is compared with the labels of rows: 1, 1.0 and "1" are equal."""
    text = str(float(value) if isinstance(value, bool) else value).strip().lower()
    with contextlib.suppress(ValueError):
        text = str(float(text))
    return text


def _scaling(job: Job) -> Problems:
    """Yields resources and labels that Ray cannot count, or would wait for forever."""
    for section in ("scaling", "rollout"):
        given = getattr(job, section)
        for name, amount in (given.get("resources_per_worker") or {}).items():
            if expected := _not_in(amount, "[0, inf)"):
                yield f"{section}.resources_per_worker.{name}", f"found {show(amount)}, expected {expected}"
        selectors = given.get("label_selector") or {}
        if isinstance(selectors, list) and STAGE[job.stage].runs_in == "data":
            yield f"{section}.label_selector", "found a list, expected one mapping, for all actors"
        if isinstance(selectors, list) and len(selectors) != job.workers[1]:
            expected = f"expected one for all workers, or one for each of {job.workers[1]}"
            yield f"{section}.label_selector", f"found {len(selectors)}, {expected}"
        for selector in selectors if isinstance(selectors, list) else [selectors]:
            for name, value in selector.items():
                # Ray (2.60) takes the blank as part of the name, and then waits forever
                if " " in str(value):
                    fixed = str(value).replace(" ", "")
                    yield f"{section}.label_selector.{name}", f"found {show(value)}, expected {fixed}"


def _batches(job: Job) -> Problems:
    """Yields why data.batch_size is not per_device_train_batch_size * workers * accumulation for every number of workers."""
    (low, high), size = job.workers, job.data.batch_size
    if size is None or not STAGE[job.stage].trl:
        return
    name = "per_device_train_batch_size"
    device = job.trainer.get(name, schema.keys(STAGE[job.stage].trainer)[name]["default"])
    step = device * math.lcm(*range(low, high + 1))
    workers = f"any of {low} to {high} workers" if low < high else f"{low} worker{'s' * (low > 1)}"
    if step > LARGEST_BATCH and low < high:
        found = (
            f"found [{low}, {high}]: no data.batch_size is divisible by trainer.{name}={device} on {workers}"
        )
        yield "scaling.num_workers", f"{found}; set a narrower range"
    elif size % step:
        found = f"found {size}, expected a multiple of {step}, to be divisible by trainer.{name}={device} on {workers}"
        usual = math.ceil(size / step) * step
        yield "data.batch_size", f"{found}; set data.batch_size={usual} or a smaller trainer.{name}"


def _inputs(job: Job) -> Problems:
    """Yields names that cannot be the name of a model or function."""
    named = [(key, getattr(job, key)) for key in ("policy", "baseline", "judge") if getattr(job, key)]
    named += [(f"serve.{key}", name) for key, name in job.serve.inputs.items()]
    for index, item in enumerate(
        job.reward if isinstance(job.reward, list) else [job.reward] if job.reward else []
    ):
        key = f"reward.{index}" if isinstance(job.reward, list) else "reward"
        form = "{reward: NAME, weight: NUMBER}"
        if isinstance(item, dict):
            if set(item) - {"reward", "weight"} or _not_in(item.get("weight", 1.0), "[-1000000, 1000000]"):
                yield key, f"found {show(item)}, expected {form}"
            item = item.get("reward")
        if not isinstance(item, str) or not item:
            yield key, f"found {show(item)}, expected a name such as models:/rlhf-rm@champion, or {form}"
        named.append((key, item))
    for key, name in named:
        adapter = key in ("policy", "baseline") or key.startswith("serve.policies.")
        if name.startswith("models:") and not Ref.parse(name).is_registered:
            expected = "models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion"
        elif name.startswith("python:") and adapter:
            expected = "an adapter: models:/NAME@ALIAS, a folder, or base"
        elif name.startswith("python:") and not Ref.parse(name).is_function:
            expected = "python:MODULE:FUNCTION, for example python:pipeline.demo:gold"
        elif not adapter and Ref.parse(f"python:{name}").is_function:
            expected = f"python:{name} for a Python function"
        else:
            continue
        yield key, f"found {show(name)}, expected {expected}"


# ---------------------------------------------------------------- settings that follow from others
def drop_eval_schedule(job: Job) -> Job:
    """Returns the job, without evaluations if it has no held-out rows and the command line does not set them."""
    if job.held_out or not STAGE[job.stage].learns:
        return job
    off = {"eval_strategy": "no", "eval_on_start": False} if STAGE[job.stage].trl else {"eval_steps": 0}
    quiet = {k: v for k, v in off.items() if k in job.trainer and f"trainer.{k}" not in job.overridden}
    return replace(job, trainer={**job.trainer, **quiet})


def split_revision(tree: Tree, job: Job) -> Job:
    """Returns the job with the `@v1` of `model.name_or_path: org/name@v1` as `model.revision: v1`."""
    with about("model.name_or_path"):
        name, revision = hub.split(job.model.name_or_path)
    if revision and job.model.revision not in (None, revision):
        found = f"found {show(job.model.revision)}, but model.name_or_path names {show(revision)}; keep one"
        raise tree.error("model.revision", found)
    return replace(job, model=replace(job.model, name_or_path=name, revision=revision or job.model.revision))


# ---------------------------------------------------------------- warnings
def warnings(job: Job) -> Iterator[str]:
    """Yields lines to print before a run starts, on settings that are valid but often unintended."""
    if STAGE[job.stage].learns and not job.held_out:
        yield (
            "nothing is held out, so nothing measures how well the run learns; set data.eval to held-out rows, or "
            "data.eval_fraction=0.1 to hold out a tenth"
        )
    yield from gates.unmeasured(job)
    if job.gate and STAGE[job.stage].learns and not job.mlflow.registered_model:
        yield "gate: the job registers nothing (mlflow.registered_model is null): the gate moves no alias, and is only reported"
    if job.model.fsdp and job.workers[0] == 1:
        left = "" if job.workers[1] == 1 else ", and so does the last one of scaling.num_workers"
        yield f"model.fsdp: one worker holds the full base{left}; with 2 or more each has its shard"
    if job.in_process and job.run.max_failures:
        yield "run.max_failures: there is no worker to restart with scaling.num_workers=0; set scaling.num_workers=1"
    if job.stage == "ppo":
        yield from _rollout_warnings(job)
    if "data.train" in job.overridden and "data.eval" not in job.overridden and job.data.eval:
        yield (
            f"data.train comes from the command line, but data.eval is still the job file's {show(job.data.eval)}: the run "
            "is evaluated on those rows. To hold out a tenth of your own, set data.eval=null data.eval_fraction=0.1"
        )


def _rollout_warnings(job: Job) -> Iterator[str]:
    """Yields a warning if there are more rollout workers than chunks, or if they have fewer CPUs than threads."""
    args, rollout = job.args, job.rollout_config
    workers, trainers, ahead = rollout.workers[1], job.workers[1], max(1, rollout.staleness)
    prompts = -(-args.batch_size // args.num_generations // trainers)  # prompts of an update on one trainer
    chunks = trainers * -(-prompts // max(1, args.decoded(trainers) // args.num_generations))
    if workers > chunks * ahead:
        rows = max(args.num_generations, args.batch_size * ahead // workers)
        yield (
            f"rollout.num_workers: {workers - chunks * ahead} of {workers} workers will be idle: an update is {chunks} "
            f"chunk{'s' * (chunks > 1)} of {args.decoded(trainers)} completions. trainer.local_rollout_forward_batch_size={rows} "
            "cuts it into smaller ones"
        )
    # For bit-identical results, they compute with as many threads as a trainer.
    threads = (job.scaling.get("resources_per_worker") or {}).get("CPU", 1)
    cpus = (rollout.resources_per_worker or {}).get("CPU", 1)
    on_gpus = job.scaling.get("use_gpu") if rollout.use_gpu is None else rollout.use_gpu
    if workers and not on_gpus and cpus < threads:
        yield (
            f"rollout: each rollout worker computes with {threads:g} threads, as a trainer does, and reserves {cpus:g} CPUs; set "
            f"rollout.resources_per_worker CPU: {threads:g}"
        )

"""What a job may not contain, beyond the types and ranges of the schema. Each rule names a key and what to do instead.

Settings that are valid but often unintended are `warnings`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pipeline import input_uri
from pipeline.errors import InputError, about, show
from pipeline.input_uri import InputURI
from pipeline.job import gates, schema
from pipeline.job.gates import Problems
from pipeline.job.job import HUB, SPLITS, Collect, Inference, Job, completed, sources_of, transforms
from pipeline.job.lora import adapts_lm_head, ignored_by_vllm
from pipeline.job.yaml_tree import Tree
from pipeline.system import hub

# What run.storage_path contains in addition to the folders of runs.
RESERVED = ("artifacts", "data", "feedback", "judges", "mlflow.db", "report")
MODEL_ID = r"[A-Za-z0-9][\w.-]{0,63}"  # how a request to `serve` may name a model
LABELS = ({"good", "bad"}, {"first", "second"}, {"first", "second", "tie"})  # keys of data.label
MAX_WORKERS = 1000


def check_job(tree: Tree, job: Job) -> None:
    """Raises InputError for the first problem of a job."""
    for key, message in Rules(job).problems():
        raise tree.error(key, message)


# ---------------------------------------------------------------- keys that go together or do not
# {key: keys without which it has no effect}
NEEDS = {
    "baseline": ["data.eval"],
    "trainer.teacher_system": ["teacher"],
    "data.subset": ["data.pairs"],
    "trainer.probes": ["data.pairs"],
    "data.pairs": ["reward"],
    "data.benchmarks": ["reward"],
    "trainer.best_of_n": ["data.eval", "reward"],
    "trainer.skip_prompts": ["trainer.num_prompts"],
    "trainer.push_to_hub": ["trainer.hub_model_id"],
    "trainer.hub_private_repo": ["trainer.hub_model_id"],
    "trainer.fp16": ["scaling.use_gpu"],
    "trainer.activation_offloading": ["scaling.use_gpu"],
}
# (key, another one that it excludes, why)
EXCLUDES = [
    ("model.fsdp", "model.load_in_4bit", "FSDP cannot gather 4-bit weights"),
    ("model.fsdp", "lora.use_dora", "DoRA takes norms of unsharded weights"),
    ("data.eval_fraction", "data.eval", "held-out rows are a separate file, or a share of data.train"),
    ("trainer.gradient_accumulation_steps", "data.batch_size", "the one follows from the other"),
    ("trainer.fp16", "trainer.bf16", "matrix products have one dtype"),
    ("trainer.precompute_ref_log_probs", "reference", "TRL would compute them with the policy"),
]


# ---------------------------------------------------------------- rules of the sections
def _model_problems(job: Job) -> Problems:
    """Yields settings of the base and its adapters that the trainer or sampler would ignore."""
    vllm = job.rollout.get("engine") == "vllm"
    if vllm and job.model.fsdp:
        found = "found vllm together with model.fsdp, but with vLLM each process loads the full base"
        yield "rollout.engine", f"{found}; set rollout.engine=transformers"
    if job.facts.trl and adapts_lm_head(job.lora.get("target_modules")):
        yield "lora.target_modules", "found lm_head, to which TRL's trainers apply no adapter; remove it"
    from_base = job.stage == "ppo" and "base" in (job.policies or ["base"])
    if vllm and from_base and (key := ignored_by_vllm(job.lora)):
        advice = f"set rollout.engine=transformers, or remove lora.{key}"
        yield "rollout.engine", f"found vllm, which ignores lora.{key}; {advice}"
    if job.facts.writes and vllm and 0 < job.args.temperature < 0.01:
        found = f"found {show(job.args.temperature)}, which vLLM raises to 0.01"
        yield "trainer.temperature", f"{found}; expected at least 0.01 with rollout.engine=vllm"


def _data_problems(job: Job) -> Problems:
    """Yields rows or a policy that the stage needs and lacks, and a wrong number of workers."""
    data, stage = job.data, job.stage
    if job.facts.reads_train and not data.train:
        yield "data.train", f"missing; `{stage}` needs rows, for example data.train=jobs/demo/data/*.jsonl"
    if stage == "evaluate":
        if not data.eval and (job.policy or not (data.pairs or data.benchmarks)):
            alone = "for a reward model alone, set data.pairs and policy=null"
            yield "data.eval", f"missing; `evaluate` needs prompts ({alone})"
        if data.eval and not job.policy:
            needs = "`evaluate` needs it to answer data.eval: models:/NAME@ALIAS or `base`"
            yield "policy", f"missing; {needs}; for a reward model alone set data.eval=null"
    fewest, most = job.workers
    if not 1 <= fewest <= most <= MAX_WORKERS:
        expected = f"0 (in this process), at least 1, or [min, max] with 1 <= min <= max <= {MAX_WORKERS}"
        yield "scaling.num_workers", f"found {show(job.scaling.get('num_workers'))}, expected {expected}"
    if job.facts.trl and data.batch_size is None and fewest < most:
        why = "with elastic scaling.num_workers it keeps the global batch fixed"
        yield "data.batch_size", f"missing; {why}, for example 64"


def _trl_problems(job: Job) -> Problems:
    """Yields keys of `trainer` that TRL would ignore, or refuse in a worker after the model is loaded."""
    trainer = job.trainer
    for what in ("eval", "save", "logging"):
        if f"{what}_steps" in trainer and trainer.get(f"{what}_strategy") == "epoch":
            counts = f"which counts only with trainer.{what}_strategy=steps; the job sets epoch"
            yield f"trainer.{what}_steps", f"found {show(trainer[f'{what}_steps'])}, {counts}"
    precomputes = job.stage in ("dpo", "kto") and trainer.get("precompute_ref_log_probs")
    if job.stage == "kto" and trainer.get("loss_type", "kto") == "kto":  # the loss with a KL term
        if trainer.get("per_device_train_batch_size") == 1:
            why = "the KL term needs completions of other rows"
            expected = "2 or more, or trainer.loss_type=apo_zero_unpaired"
            yield "trainer.per_device_train_batch_size", f"found 1: {why}; expected {expected}"
        if precomputes:
            why = "each epoch pairs different rows for the KL term"
            cannot = "their log-probs cannot be computed before training"
            yield "trainer.precompute_ref_log_probs", f"{why}, so {cannot}; remove it"
    if precomputes and job.workers[1] > 1:
        advice = "set scaling.num_workers=1, or remove it"
        yield "trainer.precompute_ref_log_probs", f"TRL cannot share them between workers; {advice}"


def _ppo_problems(job: Job) -> Problems:
    """Yields a reward, a teacher or prompts that are missing, or that nothing learns from."""
    args, alone = job.args, job.args.advantage_estimator == "none"
    if not job.reward and not alone:
        needs = "`ppo` needs it: reward: models:/NAME@ALIAS, or a folder, or python:MODULE:FUNCTION"
        advice = "To learn from a teacher alone, set trainer.advantage_estimator=none"
        yield "reward", f"missing; {needs}. {advice}"
    if job.reward and alone:
        advice = "set reward=null, or another estimator"
        yield "trainer.advantage_estimator", f"found none, with which no reward counts; {advice}"
    if not job.teacher and (args.teacher_coef or alone):
        yield "teacher", "missing; the job learns from a teacher: models:/NAME@ALIAS, a folder, or base"
    if job.teacher and not args.teacher_coef:
        found = f"found {show(job.trainer.get('teacher_coef'))}, with which the teacher has no effect"
        advice = "set the weight of its advantage, e.g. trainer.teacher_coef=1.0"
        yield "trainer.teacher_coef", f"{found}; {advice}"
    if args.batch_size // args.num_generations < job.workers[1]:
        least = f"trainer.batch_size={job.workers[1] * args.num_generations}"
        yield "trainer.batch_size", f"fewer prompts for an update than workers; expected at least {least}"


def _inference_problems(job: Job) -> Problems:
    """Yields settings with which no completion can end, or `collect` makes no rows."""
    args = job.args
    if isinstance(args, Inference) and args.min_new_tokens >= args.response_length:
        yield "trainer.min_new_tokens", f"found {args.min_new_tokens}, expected less than response_length"
    if not isinstance(args, Collect):
        return
    if args.select in ("best_worst", "pairs") and args.num_generations < 2:
        expected = "2 or more, for example 4, or trainer.select=best"
        yield "trainer.num_generations", f"found 1: a pair needs two completions; expected {expected}"
    if args.temperature == 0 and args.num_generations > 1:
        found = "found 0, so all completions of a prompt are the same"
        yield "trainer.temperature", f"{found}; expected a temperature above 0, for example 1.0"
    if args.min_margin and args.select in ("best", "labels"):
        yield "trainer.min_margin", f"trainer.select={args.select} makes no pairs; remove it"
    if args.select != "labels" and "good_above" in job.trainer:
        yield "trainer.good_above", "only trainer.select=labels makes labels; remove it"


def _run_problems(job: Job) -> Problems:
    """Yields names that cannot be those of a run, a registered model or an alias."""
    if problem := name_problem(job.run.name):
        yield "run.name", problem
    model, alias = job.mlflow.registered_model, job.mlflow.alias
    if not re.fullmatch(input_uri.NAME, model or "none"):
        expected = "letters, digits, spaces and `. _ - + ( )`, for example rlhf-sft"
        yield "mlflow.registered_model", f"found {show(model)}, expected {expected}"
    if not re.fullmatch(r"(?!(?i:latest|v\d+)$)[\w-]{1,255}", alias):
        expected = "letters, digits, `_` and `-`, for example champion"
        reserved = "`latest` and `v1` are reserved by MLflow"
        yield "mlflow.alias", f"found {show(alias)}, expected {expected}; {reserved}"


def _serve_problems(job: Job) -> Problems:
    """Yields models without a usable id, and settings that a replica cannot have."""
    serve = job.serve
    if not serve.inputs:
        example = "'serve.policies={my-policy: models:/rlhf-ppo@champion}'"
        yield "serve.policies", f"missing; `serve` needs it, or serve.rewards: {example}"
    if wrong := [one for one in (*serve.policies, *serve.rewards) if not re.fullmatch(MODEL_ID, one)]:
        yield "serve.policies", f"found {wrong}, expected ids of letters, digits, `.`, `_` and `-`"
    if both := ", ".join(sorted(serve.policies.keys() & serve.rewards.keys())):
        yield "serve.rewards", f"found {both}, which serve.policies also names; expected another id"
    if "://" in (serve.feedback_path or job.run.storage_path):
        why = "feedback goes into a folder of one node, not into a bucket"
        yield "serve.feedback_path", f"{why}; set serve.feedback_path=FOLDER"
    if serve.cache_tokens is not None and job.rollout.get("engine") == "vllm":
        why = "rollout.gpu_memory_utilization sets the size of its KV cache"
        expected = f"expected null with rollout.engine=vllm: {why}"
        yield "serve.cache_tokens", f"found {serve.cache_tokens}; {expected}"


def _export_problems(job: Job) -> Problems:
    """Yields what is no adapter, and a repository that cannot hold what is exported."""
    if "base" in job.policies or not (job.policy or job.reward):
        needs = "`export` needs an adapter: policy=models:/rlhf-ppo@champion, its folder, or a reward"
        yield "policy", f"found {show(job.policy)}; {needs}"
    if isinstance(job.reward, (dict, list)) or InputURI.parse(job.reward).is_function:
        expected = "one reward adapter: models:/rlhf-rm@champion, or its folder"
        yield "reward", f"found {show(job.reward)}, expected {expected}"
    repository = job.args.hub_model_id
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository or "owner/name"):
        expected = "OWNER/NAME: a user or an organization, and a name"
        yield "trainer.hub_model_id", f"found {show(repository)}, expected {expected}"
    if job.policy and job.reward and repository:
        advice = "set reward=null or policy=null"
        yield "trainer.hub_model_id", f"{repository} is one repository, for one model; {advice}"


def name_problem(name: str | None) -> str | None:
    """Returns why a run cannot have this name, or None."""
    if name is None or (name not in RESERVED and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name)):
        return None
    return (
        f"found {show(name)}, expected at most 200 letters, digits, `.`, `_` and `-`: it names a folder in run.storage_path, which has "
        f"{', '.join(RESERVED)} already"
    )


class Rules:
    """The rules for one job."""

    def __init__(self, job: Job) -> None:
        self.job, self.facts, self.metrics = job, job.facts, gates.Metrics(job)

    def problems(self) -> Problems:
        """Yields the problems of the job. Only the first one counts: later checks assume that earlier ones found nothing."""
        yield from self._unused()
        yield from self._settings()
        yield from self._sections()
        yield from self._together()
        yield from self._evaluations()
        yield from self._rows()
        yield from self._selectors()
        yield from self._batches()
        yield from self._inputs()
        yield from self.metrics.problems()

    def _value(self, key: str) -> Any:
        section, _, name = key.partition(".")
        values = getattr(self.job, section)
        if not name:
            return values
        return values.get(name) if isinstance(values, dict) else getattr(values, name)

    def _changed(self, key: str) -> bool:
        """Returns whether a job sets a key, or a key of a section, to another value than the default."""
        section, _, name = key.partition(".")
        value = self._value(key)
        known = schema.keys(schema.class_of(section, self.job.stage)) if name else {}
        default = known[name].get("default") if name in known else type(value)()
        return value not in (None, {}, [], default)

    def _unused(self) -> Problems:
        """Yields values that would change nothing, unless they are the default."""
        for key, why in self.facts.unused.items():
            if self._changed(key):
                yield key, f"`{self.job.stage}` does not use this key ({why}); remove it"

    def _settings(self) -> Problems:
        """Yields what our own config classes reject when they are made."""
        for section in ("trainer", "rollout") if self.job.stage == "ppo" else ("rollout",):
            try:
                _ = self.job.args if section == "trainer" else self.job.rollout_config
            except InputError as error:
                yield f"{section}.{error.key}", error.message

    def _sections(self) -> Problems:
        """Yields the problems of the sections in the order of a job file."""
        job = self.job
        yield from _model_problems(job)
        yield from _data_problems(job)
        if self.facts.trl:
            yield from _trl_problems(job)
        if job.stage == "ppo":
            yield from _ppo_problems(job)
        yield from _inference_problems(job)
        yield from _run_problems(job)
        if job.stage == "serve":
            yield from _serve_problems(job)
        if job.stage == "export":
            yield from _export_problems(job)

    def _together(self) -> Problems:
        """Yields keys without those that they need, and keys with those that they exclude."""
        for key, needed in NEEDS.items():
            missing = [one for one in needed if not self._value(one)]
            if missing and self._changed(key):
                yield key, f"needs {' and '.join(missing)}; set that too, or remove this key"
        for key, other, why in EXCLUDES:
            if self._value(key) and self._value(other):
                yield key, f"given together with {other}, but {why}; keep one"

    def _evaluations(self) -> Problems:
        """Yields evaluations without held-out rows."""
        for key, value in _without_evaluations(self.job).items():
            if self.job.trainer.get(key, value) != value:
                nothing = "there is nothing to evaluate on: set data.eval or data.eval_fraction"
                yield f"trainer.{key}", f"{nothing}, or {key}={str(value).lower()}"

    def _rows(self) -> Problems:
        """Yields unknown keys of a source, invalid conversions of its rows, and weights that do not fit together.

        data/reshape.py checks the fields of each stage later.
        """
        data, known = self.job.data, schema.keys(schema.class_of("source", ""))
        for name in SPLITS:
            spec = getattr(data, name)
            for index, item in enumerate(spec if isinstance(spec, list) else []):
                for key, problem in schema.wrong(item, known) if isinstance(item, dict) else ():
                    yield f"data.{name}.{index}.{key}", problem
        for name in SPLITS:
            sources = zip(sources_of(getattr(data, name)), completed(data, name), strict=True)
            for index, (source, full) in enumerate(sources):
                own = {key for key, value in vars(source).items() if value is not None}
                keys = {key: f"data.{name}.{index}.{key}" if key in own else f"data.{key}" for key in known}
                if full.label is not None and full.label.keys() not in LABELS:
                    forms = "{first: VALUE, second: VALUE} and perhaps tie: VALUE, or {good: VALUE, bad: VALUE} for ratings"
                    yield keys["label"], f"found {show(full.label)}, expected {forms}"
                if full.group_by and not full.transform:
                    found = f"found {show(full.group_by)}; only a transform can read several rows at once"
                    yield keys["group_by"], f"{found}: also set transform: python:MODULE:FUNCTION"
                if source.revision and (not source.path.startswith(HUB) or "@" in source.path):
                    expected = f"only a dataset on the hub ({HUB}NAME) has a revision; give it once"
                    yield (
                        keys["revision"],
                        f"found {show(source.revision)} for {show(source.path)}; {expected}",
                    )
                if source.weight is not None and (name != "train" or not self.facts.learns):
                    yield keys["weight"], "only rows that are trained on are mixed by weights; remove it"
        weights = [source.weight for source in sources_of(data.train)]
        if not any(weights) and data.stopping_strategy != "first_exhausted":
            yield (
                "data.stopping_strategy",
                "no source of data.train has a weight: there is nothing to draw from",
            )
        if any(weights) and None in weights:
            missing = f"{weights.count(None)} of {len(weights)} sources have no weight"
            yield "data.train", f"{missing}; expected one for each, or for none"

    def _selectors(self) -> Problems:
        """Yields lists whose length is not the number of workers, and names with blanks, which Ray (2.60) keeps in them."""
        for section in ("scaling", "rollout"):
            selectors = getattr(self.job, section).get("label_selector") or {}
            if isinstance(selectors, list) and (
                self.facts.runs_in == "data" or len(selectors) != self.job.workers[1]
            ):
                expected = "one mapping for all workers, or, for a stage that trains, one for each"
                yield f"{section}.label_selector", f"found a list of {len(selectors)}, expected {expected}"
            for selector in selectors if isinstance(selectors, list) else [selectors]:
                for name, value in selector.items():
                    if " " in value:
                        fixed = value.replace(" ", "")
                        yield f"{section}.label_selector.{name}", f"found {show(value)}, expected {fixed}"

    def _batches(self) -> Problems:
        """Yields why data.batch_size is not per_device_train_batch_size * workers * accumulation for every number of workers."""
        size, key = self.job.data.batch_size, "per_device_train_batch_size"
        if size is None or not self.facts.trl:
            return
        device = self.job.trainer.get(key, schema.keys(self.facts.trainer)[key]["default"])
        low, high = self.job.workers
        step = device * math.lcm(*range(low, high + 1))
        if size % step:
            workers = f"any of {low} to {high} workers" if low < high else f"workers ({low})"
            expected = f"a multiple of {step}, for trainer.{key}={device} on {workers}"
            usual = math.ceil(size / step) * step
            yield "data.batch_size", f"found {size}, expected {expected}; set data.batch_size={usual}"

    def _inputs(self) -> Problems:
        """Yields names that cannot be the name of a model or function."""
        several = {
            f"reward.{i}": one
            for i, one in enumerate(self.job.reward if isinstance(self.job.reward, list) else [])
        }
        for key, item in {"reward": self.job.reward, "judge": self.job.judge, **several}.items():
            kinds = ({"reward"}, {"judge"}) if key in several else ({"judge"},)
            if isinstance(item, dict) and (
                item.keys() - {"weight"} not in kinds
                or not all(isinstance(item[name], str) for name in item if name != "weight")
                or type(item.get("weight", 1)) not in (int, float)
                or ("weight" in item and key not in several)
            ):
                expected = "{reward: NAME, weight: NUMBER} or {judge: FILE, weight: NUMBER}"
                yield key, f"found {show(item)}, expected {expected if key in several else '{judge: FILE}'}"
        mappings = {"reward.0": self.job.reward, "judge": self.job.judge, **several}
        mappings = {key: item for key, item in mappings.items() if isinstance(item, dict)}
        functions = transforms(self.job.data)
        policies = {f"policy.{index}": name for index, name in enumerate(self.job.policies)}
        for key, name in {**functions, **self.job.inputs, **policies}.items():
            adapter = key.startswith(("policy", "baseline", "reference", "teacher", "policies."))
            if name.startswith("judge:") and (adapter or key not in mappings):
                expected = "{judge: FILE} as a reward or judge"
            elif name.startswith("models:") and not InputURI.parse(name).is_registered:
                expected = "models:/NAME@ALIAS or models:/NAME/VERSION, for example models:/rlhf-sft@champion"
            elif name.startswith("python:") and adapter:
                expected = "an adapter: models:/NAME@ALIAS, a folder, or base"
            elif not InputURI.parse(name).is_function and (name.startswith("python:") or key in functions):
                expected = "python:MODULE:FUNCTION, for example python:pipeline.demo:gold"
            elif not adapter and name.endswith(".py"):
                module = name.removesuffix(".py").replace("/", ".")
                expected = f"python:{module}:FUNCTION for a function of that file"
            elif not adapter and InputURI.parse(f"python:{name}").is_function:
                expected = f"python:{name} for a Python function"
            else:
                continue
            if key == "reward.0" and not isinstance(self.job.reward, list):
                key = "reward"
            yield (
                f"serve.{key}" if key in self.job.serve.inputs else key,
                f"found {show(name)}, expected {expected}",
            )

    def warnings(self) -> Iterator[str]:
        """Yields lines to print before a run starts, on settings that are valid but often unintended."""
        learns = self.facts.learns
        if learns and not self.job.held_out:
            yield (
                "nothing is held out, so nothing measures how well the run learns; set data.eval to held-out rows, or "
                "data.eval_fraction=0.1 to hold out a tenth"
            )
        for metric in self.job.gate:
            if lacking := self.metrics.lacks.get(metric):
                yield f"gate.{metric}: needs {lacking}, which this job does not have; the version will be kept without its alias"
        if self.job.gate and learns and not self.job.mlflow.registered_model:
            yield "gate: the job registers nothing (mlflow.registered_model is null): the gate moves no alias, and is only reported"
        if self.job.in_process and self.job.run.max_failures:
            yield "run.max_failures: there is no worker to restart with scaling.num_workers=0; set scaling.num_workers=1"
        if self.job.stage == "ppo" and self.job.rollout_config.num_workers:
            yield from self._rollout_warnings()
        known = schema.keys(self.facts.trainer).get("disable_dropout", {"default": self.job.stage == "ppo"})
        if (
            learns
            and self.job.lora.get("lora_dropout")
            and self.job.trainer.get("disable_dropout", known["default"])
        ):
            keep = ", or trainer.disable_dropout=false" if self.facts.trl else ""
            yield f"lora.lora_dropout changes nothing: `{self.job.stage}` trains without dropout; set lora.lora_dropout=0{keep}"
        if (
            "data.train" in self.job.overridden
            and "data.eval" not in self.job.overridden
            and self.job.data.eval
        ):
            yield (
                f"data.train comes from the command line, but data.eval is still the job file's {show(self.job.data.eval)}: the run "
                "is evaluated on those rows. To hold out a tenth of your own, set data.eval=null data.eval_fraction=0.1"
            )

    def _rollout_warnings(self) -> Iterator[str]:
        """Yields a warning if there are more rollout workers than chunks."""
        args, rollout = self.job.args, self.job.rollout_config
        workers, trainers, ahead = rollout.num_workers, self.job.workers[1], max(1, rollout.staleness)
        prompts = -(
            -args.batch_size // args.num_generations // trainers
        )  # prompts of an update on one trainer
        chunks = trainers * -(-prompts // max(1, args.decoded(trainers) // args.num_generations)) * ahead
        if workers > chunks:
            rows = max(args.num_generations, args.batch_size * ahead // workers)
            yield (
                f"rollout.num_workers: {workers - chunks} of {workers} workers will be idle, because completions are sampled in "
                f"chunks of {args.decoded(trainers)}; for smaller ones set trainer.local_rollout_forward_batch_size={rows}"
            )


# ---------------------------------------------------------------- settings that follow from others
def drop_eval_schedule(job: Job) -> Job:
    """Returns the job, without evaluations if it has no held-out rows and the command line does not set them."""
    quiet = {
        key: value
        for key, value in _without_evaluations(job).items()
        if key in job.trainer and f"trainer.{key}" not in job.overridden
    }
    return replace(job, trainer=job.trainer | quiet)


def split_revision(tree: Tree, job: Job) -> Job:
    """Returns the job with the `@v1` of `model.name_or_path: org/name@v1` as `model.revision: v1`."""
    with about("model.name_or_path"):
        name, revision = hub.split(job.model.name_or_path)
    if revision and job.model.revision not in (None, revision):
        found = f"found {show(job.model.revision)}, but model.name_or_path names {show(revision)}; keep one"
        raise tree.error("model.revision", found)
    return replace(job, model=replace(job.model, name_or_path=name, revision=revision or job.model.revision))


def _without_evaluations(job: Job) -> dict[str, Any]:
    """Returns the keys of `trainer`, and their values, of a job that learns without held-out rows."""
    if job.held_out or not job.facts.learns:
        return {}
    return {"eval_strategy": "no", "eval_on_start": False} if job.facts.trl else {"eval_steps": 0}

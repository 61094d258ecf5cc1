"""Pins the inputs of a job (adapters, reward models, Python functions, judges) to versions, and checks them."""

import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from pipeline import registry
from pipeline.errors import InputError, blame_key
from pipeline.input_uri import InputURI
from pipeline.job import Job, Model, judge, lora
from pipeline.job.job import HUB, transforms_of
from pipeline.job.rollout import RolloutConfig
from pipeline.job.stages import INPUTS, StageSpec
from pipeline.models import adapter_files
from pipeline.models.compatibility import Base, find_unmergeable
from pipeline.registry import lineage
from pipeline.settle.identity import tracking_of
from pipeline.settle.work import Input, Work
from pipeline.system import hub, storage, terminal
from pipeline.system.functions import digest_functions, import_function

# Parameters that a Python reward function can have in addition to the columns of the rows.
GIVEN = ("prompts", "completions", "completion_ids", "seeds", "groups")


def pin_inputs(job: Job, pinned: Mapping[str, str] = MappingProxyType({})) -> tuple[Job, dict[str, str]]:
    """Returns the job and {input: version}. Replaces aliases by versions, because an alias may move while the job runs.

    If model.name_or_path is a registered adapter, the returned job has the base of that adapter instead.

    Args:
        pinned: {input: version} from the start of the run, if the run resumes. The pinned versions are used even if aliases have
            moved.
    """
    tracking = tracking_of(job)
    uri = tracking.uri
    references = {name: source for name, source in job.inputs.items() if source != "base"}
    if any(InputURI.parse(name).is_registered for name in (job.model.name_or_path, *references.values())):
        registry.check_store(tracking)
    if InputURI.parse(job.model.name_or_path).is_registered:
        with blame_key("model.name_or_path"):
            reference = registry.pin(job.model.name_or_path, uri, job.source)
            base = lineage.read(registry.fetch(reference, uri), reference).get("base")
            if base is None:
                raise InputError(
                    f"{reference} does not record which base it was trained on; set this key to the base itself"
                )
        revision = base.get("revision")
        job = replace(job, model=replace(job.model, name_or_path=base["name_or_path"], revision=revision))
    inputs, missing = dict[str, str](), list[str]()
    for name, source in references.items():
        with blame_key(job.key_of(name)):
            ref = InputURI.parse(source)
            if ref.is_function:
                import_function(source)
            if ref.is_judge:
                inputs[name] = pinned.get(name) or judge.pin_judge(source)
                continue
            names = job.policies if name == "policy" else [source]
            try:
                version = pinned.get(name) or first_that_exists(names, uri, job.source)
            except registry.Missing as error:
                missing.append(name)
                if len(missing) >= len(job.serve.inputs):
                    raise
                # A server starts without the models that do not exist.
                print(f"warning: serve.{name} is skipped: {error.message}", flush=True)
                continue
        if version != "base":
            inputs[name] = version
    return replace(job, serve=job.serve.without(missing)), inputs


def first_that_exists(names: list[str], uri: str, job_file: str) -> str:
    """Returns the pinned version of the first reference that exists. If none exists, raises the first reference's error."""
    errors: list[registry.Missing] = []
    for name in names:
        try:
            version = registry.pin(os.path.expanduser(name), uri, job_file)
        except registry.Missing as error:
            errors.append(error)
            continue
        if errors:
            terminal.say(
                f"policy: {', '.join(names[: len(errors)])} does not exist, so the policy is {version}"
            )
        return version
    raise errors[0]


def by_version(job: Job, inputs: Mapping[str, str]) -> Job:
    """Returns the job with its model and function inputs replaced by their pinned versions."""
    models = {key: version for key, version in inputs.items() if not InputURI.parse(version).is_judge}
    changes: dict[str, Any] = {key: models[key] for key in INPUTS if key in models}
    if isinstance(job.reward, list):
        weighted = [(models.get(f"reward.{i}"), weight) for i, (_, weight) in enumerate(job.rewards)]
        pinned = [version and {"reward": version, "weight": weight} for version, weight in weighted]
        changes["reward"] = [pin or reward for pin, reward in zip(pinned, job.reward, strict=True)]
    elif "reward.0" in models:
        changes["reward"] = models["reward.0"]
    return replace(job, **changes)


def check_paths(job: Job) -> None:
    """Raises InputError if a data file, transform or model folder does not exist, or if a bucket or the Hub does not answer."""
    from pipeline.data import files, preview

    for key, source in transforms_of(job.data).items():
        with blame_key(key):
            import_function(source)
    if job.spec.rows:
        preview.source_kinds(job.stage, job.data)
    buckets: dict[str, tuple[str, str]] = {}
    for key, path in job.paths:
        if storage.is_remote(path) and not path.startswith(HUB):
            buckets.setdefault("/".join(path.split("/")[:3]), (path, key))
        else:
            files.find_files(path, key)
    for path, key in buckets.values():  # checks each bucket only once
        files.check_reachable(path, key)
    if job.data.cache_dir and storage.is_remote(job.data.cache_dir):
        storage.require_writable(job.data.cache_dir, "data.cache_dir", "./cache")
    if not InputURI.parse(job.model.name_or_path).is_registered:
        hub.require_local(job.model.name_or_path)


# ------------------------------------------------------------------------------------------ Python functions


def digests_of_functions(work: Work) -> dict[str, str]:
    """Returns {key of a Python reward, judge or advantage estimator: digest of its module's source code}."""
    functions: dict[str, list[str]] = {}
    for name, job_input in work.inputs.items():
        # A stage that trains does not learn from its judge, so the judge does not affect the adapter.
        if job_input.kind == "function" and (name != "judge" or not work.spec.learns):
            functions.setdefault(work.keys[name].partition(".")[0], []).append(job_input.version)
    if (estimator := str(work.trainer.get("advantage_estimator"))).startswith("python:"):
        functions["trainer.advantage_estimator"] = [estimator]
    return {key: digest_functions(sources) for key, sources in functions.items()}


def missing_parameter(source: str, columns: set[str]) -> str | None:
    """Returns a column that a Python reward needs but the rows lack, or None if the rows have all columns."""
    optional = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    parameters = inspect.signature(import_function(source)).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    return next((name for name in required if name not in {*columns, *GIVEN}), None)


# ---------------------------------------------------------------------------------------------------- models


def check_sampler(rollout: RolloutConfig, model: Model) -> None:
    """Raises InputError if the job needs vLLM or vLLM's plugin for NF4, but the package is not installed on this machine."""
    if rollout.engine != "vllm":
        return
    if importlib.util.find_spec("vllm") is None:
        missing, package = "vLLM", '-e ".[vllm]" -c constraints-vllm.txt'
    # vLLM 0.28 and later need a plugin to read bitsandbytes weights.
    elif model.load_in_4bit and not list(importlib.metadata.distributions(name="vllm-bnb-plugin")):
        missing, package = "vLLM's plugin for model.load_in_4bit", "vllm-bnb-plugin"
    else:
        return
    raise InputError(
        f"{missing} is not installed here; run .venv/bin/pip install {package} on every node (vLLM needs a GPU), or remove the key",
        key="rollout.engine",
    )


def check_inputs(work: Work, versions: Mapping[str, str], files: Base) -> dict[str, Input]:
    """Fetches and checks pinned inputs. Returns {name: Input}.

    Raises InputError if an adapter was trained on another base, or if the stage cannot use an input.

    Args:
        work: the Work object of the job, with the field `base` set.
        files: the files of the base.
    """
    inputs = {}
    for name, reference in versions.items():
        with blame_key(work.keys[name]):
            ref = InputURI.parse(reference)
            if ref.is_function:
                inputs[name] = Input(reference, "function")
            elif ref.is_judge:
                inputs[name] = _checked_judge(work, name, reference)
            else:
                inputs[name] = _checked_model(work, name, reference, files)
    return inputs


def _checked_judge(work: Work, name: str, reference: str) -> Input:
    definition = judge.load_pinned(reference)
    if definition.form == "rank" and _scores_alone(work, name):
        raise InputError(
            "`form: rank` compares the completions of a prompt, but this job scores each completion by itself; use another form, or "
            "trainer.num_generations=2 or more if the stage has that key"
        )
    return Input(reference, "judge", definition=definition)


def _checked_model(work: Work, name: str, reference: str, files: Base) -> Input:
    """Fetches and checks an adapter on the job's base, or a full reward model."""
    folder, scores = registry.fetch(reference, work.uri), name == "judge" or name.startswith("reward")
    if scores and not lineage.is_adapter(folder):
        if work.spec.runs_in == "here":
            advice = f"set {work.keys[name]}=null"
            raise InputError(f"{reference} is a full model: there is nothing to merge; {advice}")
        check_reward_model(work.model, folder)
        return Input(reference, "model", folder)
    facts = lineage.read(folder, reference)
    lineage.check_same_base(facts, work.base, work.keys[name], reference)
    if "base" not in facts:
        lineage.check_base_name(folder, work.base, reference)
    adapter_files.check_adapter_fits_base(files, folder, scores, reference)
    _check_supported(work, name, folder, files, scores)
    return Input(reference, "adapter", folder, facts)


def check_same_tokens(work: Work, tokenizer: Any, key: str, adapter: Input) -> None:
    """Raises InputError if an adapter was trained with another chat template, unless the job sets model.chat_template.

    All models of a run read the same tokens. Prints a warning if the job's template or the base's tokenizer is another one.
    """
    from pipeline.models.tokenizer import template_digest, tokenizer_digest

    model, lineage, trained = work.model, adapter.lineage, f"{adapter.version} was trained with another"
    if lineage.get("tokenizer") not in (None, tokenizer_digest(tokenizer)):
        effect = f"The tokenizer of {model.name_or_path} has changed, so the model may read other tokens"
        print(f"warning: {key}: {trained} tokenizer. {effect}", flush=True)
    if lineage.get("chat_template") in (None, template_digest(tokenizer)):
        return
    if model.chat_template is None:
        if work.spec.runs_in == "here":
            advice = "a run exports models of one template only; use one run with reward=null and one with policy=null"
        else:
            advice = (
                "all models of a run read the same tokens; leave this model out, use models of one template, or set "
                "model.chat_template to the file of one template for all"
            )
        raise InputError(f"{trained} chat template than this run uses: {advice}", key=key)
    print(f"warning: {key}: {trained} chat template than {model.chat_template}", flush=True)


def _scores_alone(work: Work, name: str) -> bool:
    """Returns True if the job scores some completions by themselves, and not together with other completions of the prompt."""
    args, stage = work.args, work.identity.stage
    is_alone = name == "judge" or (stage == "evaluate" and bool(work.data.eval))
    if work.spec.online:
        return is_alone or args.num_generations < 2 or args.estimator.needs_greedy
    if stage in ("generate", "collect"):
        return is_alone or getattr(args, "num_generations", 1) < 2
    return is_alone


def _check_supported(work: Work, name: str, folder: str, base: Base, scores: bool) -> None:
    """Raises InputError if the stage cannot use an adapter as its input `name`, or could not merge it into the base."""
    spec, adapter = work.spec, adapter_files.read_settings(folder)
    modules = adapter_files.ranks_of_modules(adapter_files.read_shapes(folder))
    dora, problem = adapter.get("use_dora"), None
    on_head = lora.adapts_lm_head(list(modules))
    merged = spec.runs_in == "here" or (spec.learns and name == "policy")
    ignored = None if scores or name == "teacher" else lora.ignored_by_vllm(adapter)
    if on_head and spec.trl:
        problem = "adapts lm_head, to which TRL's trainers apply no adapter; train an adapter without lm_head"
    elif merged and (error := find_unmergeable(base, modules, bool(adapter.get("lora_bias")), scores)):
        problem = error.message
    elif dora and spec.runs_in == "serve":
        problem = (
            "is a DoRA adapter, which peft cannot batch with others; merge it into its base (`export`), set model.name_or_path "
            "to the result, and serve `base`"
        )
    elif dora and work.model.fsdp:
        problem = "is a DoRA adapter, which needs the norms of the full weights; set model.fsdp=false"
    elif ignored and work.rollout.engine == "vllm":
        problem = f"has {ignored}, which vLLM ignores; set rollout.engine=transformers"
    if problem:
        raise InputError(f"it {problem}")


def makes_adapter(spec: StageSpec, args: Any, adapters: Iterable[str]) -> bool:
    """Returns True if the stage creates at least one new adapter, with the settings in `lora`, instead of copying an input.

    Args:
        args: the PPOConfig, if the stage is ppo.
        adapters: names of the inputs that are adapters.
    """
    started_from = {"policy", "reward"} & spec.inputs.keys()
    if spec.online and not args.has_critic_adapter:  # the critic's adapter is not copied from `reward`
        started_from.discard("reward")
    roles = {name.partition(".")[0] for name in adapters}
    return spec.learns is not None and not (started_from and roles >= started_from)


def check_reward_model(model: Model, reference: str) -> None:
    """Raises InputError if a model is not a sequence classifier with one label, because its head would be random."""
    from pipeline.models.base import check_base
    from pipeline.models.tokenizer import load_tokenizer

    name, revision = hub.split_revision(reference)
    expected = (
        "expected an adapter that `rm` trained (models:/rlhf-rm@champion, or its folder), a sequence-classification model with "
        "one label, or python:MODULE:FUNCTION"
    )
    try:
        config = hub.base_config(name, revision)
    except InputError as error:
        raise InputError(f"{error.message}; {expected}") from error
    kind, labels = str((config.get("architectures") or ["unknown"])[0]), len(config.get("id2label") or "01")
    classifies = kind.endswith("ForSequenceClassification") or model.trust_remote_code
    if not classifies or labels != 1:
        raise InputError(f"{reference!r} is a {kind}{f' with {labels} labels' * classifies}; {expected}")
    scorer = replace(model, name_or_path=name, revision=revision, load_in_4bit=False)
    check_base(scorer, scorer=True)
    load_tokenizer(name, revision, trust_remote_code=model.trust_remote_code)


def room_for_prompts(completion: int, longest: int | None, context: int | None) -> int | None:
    """Returns the maximum number of tokens of a row: the context length minus the length of a completion. Returns None if the
    context length is unknown.

    Raises InputError if data.max_length or trainer.response_length exceeds the context.

    Args:
        completion: trainer.response_length, or 0 if the job samples no completions.
        context: the context length of the base, or None if it is unknown.
        longest: data.max_length.
    """
    if context is None:
        return None
    if completion and completion > context - 2:
        raise InputError(
            f"{completion} tokens leave no room for a prompt in the model's context of {context}; "
            f"set trainer.response_length={context // 2}",
            key="trainer.response_length",
        )
    room = context - completion
    if longest is not None and longest > room:
        suffix = f" less trainer.response_length={completion}" if completion else ""
        raise InputError(
            f"{longest} is more than the model's context of {context} tokens{suffix}; use data.max_length={room} or less",
            key="data.max_length",
        )
    return room

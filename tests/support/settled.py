"""Settles a job's work, with the tokenizer, base and inputs that a test sets."""

from pipeline.planning import plan
from pipeline.settle import run
from pipeline.settle.places import places_of


def work_of(job, tokenizer=None, base=None, **more):
    return run.work_of(job, places_of(job), tokenizer=tokenizer, base=base or {}, **more)


def plan_of(job, loras=None, **options):
    return plan.make(run.sections_of(job, places_of(job)), loras, **options)

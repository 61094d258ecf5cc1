"""Computes a job's Work object or plan, as a run does, with the tokenizer, base and inputs that a test sets."""

from pipeline.planning import plan
from pipeline.settle import settle
from pipeline.settle.places import places_of


def work_of(job, tokenizer=None, base=None, **more):
    return settle.work_of(job, places_of(job), tokenizer=tokenizer, base=base or {}, **more)


def plan_of(job, loras=None, **options):
    return plan.make_plan(settle.sections_of(job, places_of(job)), loras, **options)

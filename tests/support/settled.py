"""Settles a job's work, with the tokenizer, base and inputs that a test sets."""

from pipeline.registry import gate_of
from pipeline.settle.identity import tracking_of
from pipeline.settle.places import places_of
from pipeline.settle.work import Work


def work_of(job, tokenizer=None, base=None, **more):
    return Work(job, places_of(job), tracking_of(job), gate_of(job), tokenizer, base or {}, **more)

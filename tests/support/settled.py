"""The work of a job, with what a test says of its tokenizer, its base and its inputs."""

from pipeline.registry import gate_of
from pipeline.settle.identity import tracking_of
from pipeline.settle.places import places_of
from pipeline.settle.work import Work


def work_of(job, tokenizer=None, base=None, **more):
    return Work(job, places_of(job), tracking_of(job), gate_of(job), tokenizer, base or {}, **more)

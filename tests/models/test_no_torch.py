"""Tests that the checks before a job do not import torch, because importing torch takes seconds."""

import subprocess
import sys

import toy_models
from running import ROOT
from toy_models import DEMO, settings

CODE = """
import sys
from types import SimpleNamespace

from pipeline.demo import gold
from pipeline.models import adapter_files
from pipeline.models.base import base_identity, check_base
from pipeline.models.compatibility import check_lora
from pipeline.models.tokenizer import load_tokenizer

demo, folder = sys.argv[1:]
base = check_base(SimpleNamespace(**SETTINGS))
check_lora(base, {"r": 4, "target_modules": "all-linear"})
adapter_files.check_adapter_fits_base(base, folder, True, "it")
assert base_identity(demo)["context_length"] == 256
assert not {"torch", "transformers"} & set(sys.modules)
load_tokenizer(demo)
assert "torch" not in sys.modules
"""


def test_base_adapter_and_tokenizer_are_read_without_torch(tmp_path):
    toy_models.make(str(tmp_path), seed=0, head=True)
    code = CODE.replace("SETTINGS", repr(vars(settings(DEMO))))
    subprocess.run([sys.executable, "-c", code, str(DEMO), str(tmp_path)], check=True, cwd=ROOT)

# /// script
# requires-python = ">=3.11,<3.15"
# dependencies = [
#     "torch==2.13.0",
#     "ray[default,train,data,serve]==2.60.0",
#     "trl==1.16.0",
#     "transformers==5.23.0",
#     "peft==0.21.2",
#     "accelerate==1.15.0",
#     "datasets==5.2.0",
#     "bitsandbytes==0.50.2",
#     "mlflow==3.17.2",
#     "matplotlib==3.11.2",
#     "Jinja2==3.1.6",
#     "PyYAML==6.0.3",
#     "annotated-types==0.8.0",
#     "pydantic==2.14.3",
#     "jsonschema==4.26.0",
# ]
# ///
"""Runs a command of the pipeline as a Hugging Face job. The job mounts this clone at /project.

docs/clusters.md has the command. uv installs the dependencies above, which must be the same as in pyproject.toml.
"""

import os
import sys
from pathlib import Path

PROJECT = Path("/project") if Path("/project").is_dir() else Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    os.chdir(PROJECT)
    os.environ["PYTHONPATH"] = str(PROJECT)  # for Ray's workers
    sys.path.insert(0, str(PROJECT))
    from pipeline.__main__ import command

    command()

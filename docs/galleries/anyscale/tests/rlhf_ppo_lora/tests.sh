#!/usr/bin/env bash
set -euxo pipefail

# Also a cell of the notebook: here, a failed download is reported where it happens.
pip install -q -r requirements.txt
uv pip install -q --system papermill==2.7.0
papermill README.ipynb /tmp/rlhf_ppo_lora.out.ipynb --log-output --kernel python3 --cwd .

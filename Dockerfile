# syntax=docker/dockerfile:1
# One image for a laptop, `ray up`, Hugging Face Jobs and KubeRay, on a CPU or with CUDA. In the repository's folder:
#   docker build -t rlhf .                                 or: --build-arg VARIANT=cuda -t rlhf:cuda
#   docker run --rm rlhf                                   runs the demo; `docker run --rm -it rlhf bash` opens a shell
# The digest belongs to this tag in the list of Docker's official images (docker-library/repo-info, 2026-08-25).
FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b
ARG VARIANT=cpu

# The demo needs make, KubeRay's probes need wget, `ray up` and start-node.sh need curl, rsync and ssh, and Triton needs gcc.
# hadolint ignore=DL3008,SC2046
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl make openssh-client procps rsync wget \
       $([ "$VARIANT" != cuda ] || echo gcc libc6-dev) \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --gid users --shell /bin/bash ray

# Installs the pinned packages into the image's own Python, so that KubeRay's login shells find the commands on PATH.
WORKDIR /home/ray/rlhf
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN if [ "$VARIANT" = cpu ]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi \
    && pip install --no-cache-dir --root-user-action ignore -c constraints.txt -e ".[cloud]"

# Installs the project. With `.venv`, `make` treats all packages as installed.
COPY Makefile ./
COPY pipeline pipeline
COPY jobs jobs
RUN pip install --no-cache-dir --root-user-action ignore --no-deps --no-build-isolation -e . \
    && mkdir -p .venv/bin && ln -s /usr/local/bin/python .venv/bin/python && touch .venv/.core .venv/.cloud \
    && chown -R ray:users .

USER 1000
# `ray up` reads HOME, and NVIDIA's container runtime reads which GPUs a container may use.
ENV HOME=/home/ray NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A server is healthy if it answers. Any other process is healthy while it runs.
# hadolint ignore=DL3025
HEALTHCHECK --interval=30s --start-period=180s \
    CMD ! grep -qaw serve /proc/1/cmdline || wget -q -O /dev/null http://127.0.0.1:8000/health
CMD ["make", "rlhf"]

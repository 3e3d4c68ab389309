# The package, with what its demo and tests need:
#
#   docker build -t megatron_rl .
#   docker run --rm megatron_rl                  # make demo
#   docker run --rm megatron_rl make test
#
# On GPUs, from an image with Python 3.11 or later and a CUDA torch, which is kept; TORCH_SPEC then has no effect:
#
#   docker build -t megatron_rl --build-arg BASE=pytorch/pytorch:2.8.0-cuda12.8-cudnn9-devel .
#   docker run --rm --gpus all --ipc host megatron_rl
ARG BASE=python:3.12-slim
FROM ${BASE}
# What pip installs where the image has no torch: a requirement, then options of pip.
ARG TORCH_SPEC="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# The compiler is for Triton's kernels and for tests.
RUN apt-get update && apt-get install --yes --no-install-recommends make g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /megatron_rl
COPY . .
RUN TORCH_SPEC="${TORCH_SPEC}" make venv
CMD ["make", "demo"]

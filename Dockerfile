# syntax=docker/dockerfile:1
# megarl's GPU image: CUDA 13.0, Python 3.12, torch, Transformer Engine, apex, Megatron-core, SGLang, Ray and megarl.
#
#   docker build -t megarl .
#   docker build -t megarl --build-arg CUDA_ARCHS="9.0" --build-arg MAX_JOBS=32 .
#   docker run --gpus all --ipc=host --network=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" -e HOME -e USER \
#       -v "$HOME:$HOME" -v "$PWD:/workspace" megarl megarl train RECIPE
#                                                            (`megarl recipes` lists those that come with it)
#
# --user: the image's own user, 10001, may not write into a repository of yours. Models, data and the compilers' caches are then in
# your home directory.
# --ipc=host: Ray's object store and NCCL share memory between processes, and docker's default of 64 MB is too small.
# --network=host: NCCL and Ray open ports of their own choice between hosts.
# Layers run from what changes least to what changes most; a change of megarl's own code rebuilds only the last three.

# CUDA toolkit: torch 2.13.0's wheels are built for 13.0, and apex refuses an nvcc of any other minor version.
ARG CUDA_VERSION=13.0.2
# Ubuntu: 24.04 brings Python 3.12, which megatron-core 0.19.2 asks for, and the glibc that SGLang's wheels need.
ARG UBUNTU_VERSION=24.04

# "devel", not "runtime": SGLang's kernels, Triton and DeepGEMM compile with nvcc at run time. No "cudnn" flavour: torch
# brings cuDNN 9.20 as a wheel, headers included, and everything here is built against and loads that one.
FROM nvidia/cuda:${CUDA_VERSION}-devel-ubuntu${UBUNTU_VERSION}

# torch: the one version that SGLang 0.5.21 accepts.
ARG TORCH_VERSION=2.13.0
# Transformer Engine: a release whose requirements resolve together with SGLang's pins; Megatron-core asks for no exact one.
ARG TE_VERSION=2.18.0
# apex: releases are rare, so a commit; others report builds of this one with torch before and after 2.13 (2.11, 2.14).
ARG APEX_COMMIT=575968bc1f9127ccd61003a681472a83af4ff1a1
# SGLang: the version that megarl's engine and weight receiver are tested with; it pins its kernels (sglang-kernel 0.4.7).
ARG SGLANG_VERSION=0.5.21
# Megatron-core: the version that megarl's models, schedules and weight tables are tested with.
ARG MEGATRON_CORE_VERSION=0.19.2
# GPU generations that apex is compiled for: A100, H100/H200, B200. Fewer build faster.
ARG CUDA_ARCHS="8.0 9.0 10.0"
# Compilers at once; lower it where the build runs out of memory.
ARG MAX_JOBS=8

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Compilers, headers for extensions (python3-dev), and what SGLang's wheels load at run time (NUMA, RDMA).
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential ca-certificates cmake git ibverbs-providers libibverbs1 libnuma1 librdmacm1 \
        ninja-build python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# A virtual environment, because Ubuntu's own Python refuses installations (PEP 668).
ENV VIRTUAL_ENV=/opt/venv \
    CUDA_HOME=/usr/local/cuda
ENV PATH=${VIRTUAL_ENV}/bin:${CUDA_HOME}/bin:${PATH}
RUN python3 -m venv "${VIRTUAL_ENV}"

# All versions come from this one resolution; the ARGs above only name the ones that have a layer of their own.
WORKDIR /opt/requirements
COPY requirements/gpu.txt ./
ENV PIP_CONSTRAINT=/opt/requirements/gpu.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# The build tools are pinned too: by the constraint.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "torch==${TORCH_VERSION}" setuptools wheel ninja packaging pybind11

# Transformer Engine: its core is a wheel, its PyTorch part is compiled here against the torch just installed (hence no
# build isolation), with the headers of the cuDNN and NCCL that torch will load. Its attention is cuDNN's: of flash-attn 2 it
# takes 2.8.3 at most, whose files lie in the package of flash-attn-4, which SGLang brings, and the newest (2.8.3.post2) is none. Built from source, never downloaded:
# the prebuilt wheels exist for other torch versions only. NCCL EP is off: experts are exchanged by Megatron-core.
RUN --mount=type=cache,target=/root/.cache/pip \
    packages="$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" \
    && export CUDNN_PATH="${packages}/nvidia/cudnn" \
    && export CPLUS_INCLUDE_PATH="${packages}/nvidia/cudnn/include:${packages}/nvidia/nccl/include" \
    && NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_WITH_NCCL_EP=0 MAX_JOBS="${MAX_JOBS}" \
        pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]==${TE_VERSION}"

# NVIDIA's apex from source; APEX_CPP_EXT and APEX_CUDA_EXT are its --cpp_ext and --cuda_ext. Megatron-core takes from it
# the fused accumulation of weight gradients and the multi-tensor kernels. The build takes the GPUs from
# TORCH_CUDA_ARCH_LIST, as none is visible here; the imports prove that the extensions are really there.
RUN --mount=type=cache,target=/root/.cache/pip \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD="${MAX_JOBS}" TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" \
        pip install --no-deps --no-build-isolation "apex @ git+https://github.com/NVIDIA/apex.git@${APEX_COMMIT}" \
    && python -c "import torch, amp_C, apex_C, fused_layer_norm_cuda, fused_weight_gradient_mlp_cuda"

# SGLang with its CUDA packages. One of them (cuda-tile) is a stub on the package index that fetches its wheel from
# NVIDIA's own index while it is "built", so this layer keeps pip's build isolation.
# hadolint ignore=DL3059
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "sglang==${SGLANG_VERSION}"

# Megatron-core and the rest of what megarl needs (Ray, Arrow, TensorBoard, ...).
# hadolint ignore=DL3059
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install "megatron-core==${MEGATRON_CORE_VERSION}" -r gpu.txt && pip check

# Megatron-core's tensor-parallel overlap relies on one hardware queue; the other two keep logs prompt and Ray quiet.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1 \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0

WORKDIR /opt/megarl
COPY . .
RUN pip install --no-deps --no-build-isolation --no-cache-dir .

# What is compiled can be loaded: one broken import, and models silently have other layers. No GPU is visible here, so
# CUDA's stub stands for the driver's library, which the machine brings.
RUN stubs="$(mktemp -d)" \
    && ln -s "${CUDA_HOME}/lib64/stubs/libcuda.so" "${stubs}/libcuda.so.1" \
    && LD_LIBRARY_PATH="${stubs}:${LD_LIBRARY_PATH:-}" \
        python -c "import transformer_engine.pytorch, sgl_kernel, deep_gemm, flashinfer" \
    && rm -r "${stubs}"

# Without --user the compilers' caches (Triton, flashinfer, DeepGEMM) go to this user's home. 1000 is taken by Ubuntu's own user.
RUN useradd --create-home --uid 10001 --user-group megarl && install -d -o megarl -g megarl /workspace
USER 10001:10001
WORKDIR /workspace

LABEL org.opencontainers.image.title="megarl" \
      org.opencontainers.image.description="Reinforcement learning of very large language models on Megatron-core, SGLang and Ray" \
      org.opencontainers.image.licenses="Apache-2.0" \
      megarl.torch="${TORCH_VERSION}" \
      megarl.transformer-engine="${TE_VERSION}" \
      megarl.megatron-core="${MEGATRON_CORE_VERSION}" \
      megarl.sglang="${SGLANG_VERSION}" \
      megarl.apex="${APEX_COMMIT}"

# Cheap on purpose (no CUDA context, no torch): megarl imports and its three pillars are where it will look for them.
HEALTHCHECK --interval=60s --timeout=20s --retries=3 \
    CMD ["python", "-c", "import importlib.util as u, megarl; assert all(map(u.find_spec, ('megatron', 'sglang', 'ray', 'apex')))"]

# tini reaps the processes that Ray's and SGLang's workers leave behind when they are killed.
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["megarl", "--help"]

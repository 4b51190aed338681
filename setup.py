"""Packaging of megarl: `pip install -e '.[core,rollout,dev]'` (a GPU machine adds `gpu`).

Pins that work together are in requirements/; the extras below name what each part needs at
those versions. `rollout` is for machines with a GPU: SGLang's metadata pins CUDA packages, so on a
CPU it is installed with --no-deps from requirements/no_deps.txt (see the Makefile).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The version in megarl/__init__.py, read as text: the build has no torch to import."""
    source = (ROOT / "megarl" / "__init__.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE).group(1)


CORE = [
    "torch==2.13.0",
    # 0.19.2 declares Python >= 3.12; on 3.11 its cp311 wheel works and is installed with
    # --ignore-requires-python (requirements/no_deps.txt), because pip would take 0.16.1.
    "megatron-core==0.19.2; python_version >= '3.12'",
    "psutil==7.2.2",  # megatron-core needs it and does not declare it
    "ray==2.60.0",
    "transformers==5.12.1",
    "tokenizers==0.22.2",
    "safetensors==0.8.0",
    "numpy>=2.0",
    "pyarrow==26.0.1",
    "omegaconf==2.4.0",
    "Jinja2==3.1.6",
    "plotly==7.1.0",  # its JavaScript draws the charts of `megarl report`; MIT, no network needed
    "rich==15.0.0",
    "tensorboard==2.21.0",
    "isal==1.9.1",
    "latex2sympy2_extended[antlr4_13_2]==1.11.0",  # the reward rules for mathematics read formulas by it ...
    "sympy==1.14.0",  # ... and compare them
    "httpx==0.28.1",  # the reward rule that asks a judge
]
ROLLOUT = ["sglang==0.5.21"]
GPU = [
    # NVIDIA's apex is not on the package index (the `apex` there is another project):
    # the Dockerfile builds it from source.
    "transformer-engine[pytorch]>=2.8",
    "flash-attn>=2.8",
    "torch_memory_saver>=0.0.9.post1",
]
DEV = ["ruff==0.17.5", "pytest==9.2.0", "pytest-timeout==2.4.0", "hypothesis==6.170.15"]

setup(
    name="megarl",
    version=version(),
    description="Reinforcement learning of very large language models on Megatron-core, SGLang and Ray",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    include_package_data=True,
    package_data={"megarl.report": ["templates/*"]},
    extras_require={"core": CORE, "rollout": ROLLOUT, "gpu": GPU, "dev": DEV},
    entry_points={
        "console_scripts": ["megarl = megarl.cli:program"],
        # What SGLang's wheel lacks on a machine without a GPU; both are inert elsewhere.
        "torch.backends": ["megarl_cpu_sglang = megarl.rollout.cpu_sglang:on_torch_import"],
        "sglang.srt.plugins": ["megarl_cpu_sglang = megarl.rollout.cpu_sglang:on_sglang_start"],
    },
)

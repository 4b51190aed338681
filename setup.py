"""Packaging of megarl. The wheel has, beside the package, what a user needs of the clone: examples, launch files, recipes,
requirements.

`pip install .` brings what `import megarl`, planning and `make-task` need. Megatron-core and SGLang come in one of two ways:

- without a GPU: requirements/cpu.txt, with --no-deps, since SGLang's metadata pins CUDA packages (README.md has the command);
- on a GPU: the pins of requirements/gpu.txt, which the Dockerfile installs; the extra `rollout` is SGLang with all that it pins.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SHIPPED = ("examples", "launch", "recipes", "requirements")  # megarl/util/packages.py finds them


class BuildWithShipped(build_py):
    """Copies the folders of SHIPPED into the package; an editable installation finds them in the clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in SHIPPED:
                target = Path(self.build_lib, "megarl", "share", name)
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))

    def get_source_files(self) -> list[str]:
        """Of a source distribution, which has to have them, too."""
        own = [path for name in SHIPPED for path in (ROOT / name).rglob("*") if path.is_file()]
        return [*super().get_source_files(), *(str(path.relative_to(ROOT)) for path in own)]


def version() -> str:
    """The version in megarl/__init__.py, read as text: the build has no torch to import."""
    source = (ROOT / "megarl" / "__init__.py").read_text()
    return re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE).group(1)


CORE = [
    "torch==2.13.0",
    # 0.19.2 declares Python >= 3.12; on 3.11 its cp311 wheel works and is installed with
    # --ignore-requires-python (requirements/cpu.txt), because pip would take 0.16.1.
    "megatron-core==0.19.2; python_version >= '3.12'",
    "emerging-optimizers==0.3.0; python_version >= '3.12'",  # Muon; megatron-core imports it where it is
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
    "latex2sympy2-extended[antlr4-13-2]==1.11.0",  # the reward rules for mathematics read formulas by it ...
    "sympy==1.14.0",  # ... and compare them
    "httpx==0.28.1",  # the reward rule that asks a judge
    # Imported beside the above, which bring them, at versions of their choice.
    "PyYAML",
    "fsspec",
    "grpcio",
    "MarkupSafe",
    "huggingface_hub",
    "protobuf",
    "sentencepiece",
]
ROLLOUT = ["sglang==0.5.21"]
# Shadow runs have no extra: their packages (requirements/shadow.txt) would change what megatron-core imports on a CPU, so they are
# installed into a folder of their own (megarl/shadow/device.py).
DEV = ["ruff==0.17.5", "mypy==2.4.1", "pytest==9.2.0", "pytest-timeout==2.4.0", "hypothesis==6.170.15"]

setup(
    name="megarl",
    version=version(),
    description="Reinforcement learning of very large language models on Megatron-core, SGLang and Ray",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The megarl authors",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    # What it is built on, and the paper that its 3D-HybridEngine goes back to.
    project_urls={
        "Paper": "https://arxiv.org/abs/2409.19256",
        "Megatron-core": "https://github.com/NVIDIA/Megatron-LM",
        "SGLang": "https://github.com/sgl-project/sglang",
        "Ray": "https://github.com/ray-project/ray",
    },
    keywords=[
        "reinforcement learning",
        "RLHF",
        "PPO",
        "GRPO",
        "large language models",
        "Megatron",
        "SGLang",
        "Ray",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={
        "megarl": ["py.typed"],
        "megarl.config": ["aliases.yaml"],
        "megarl.report": ["templates/*"],
        "megarl.shadow": ["device.cpp"],
        "megarl.gpu_test": ["shadow_ranks.json"],
    },
    cmdclass={"build_py": BuildWithShipped},
    install_requires=CORE,
    extras_require={"rollout": ROLLOUT, "dev": DEV, "nixl": ["nixl[cu13]==1.5.1"]},
    entry_points={
        "console_scripts": ["megarl = megarl.cli.main:program"],
        # What SGLang's wheel lacks on a machine without a GPU; both are inert elsewhere.
        "torch.backends": ["megarl_cpu_sglang = megarl.sglang_cpu.hooks:on_torch_import"],
        "sglang.srt.plugins": ["megarl_cpu_sglang = megarl.sglang_cpu.hooks:on_sglang_start"],
        # What megarl's own engines take from there: megarl.rollout.sglang.before_import.cpu_engine_function.
        "megarl.cpu_engine": [
            "on_scheduler_start = megarl.sglang_cpu.hooks:on_scheduler_start",
            "obstacle = megarl.sglang_cpu.batch_invariant:obstacle",
        ],
    },
)

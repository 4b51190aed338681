"""Stand-ins for packages that an SGLang engine calls on a GPU: kernels, and the memory saver.

SGLang's Python code imports them by name while its classes are made, and calls few of them before it serves; the ones called have
shapes here. Written from the callers in SGLang 0.5.21.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

# Packages of compiled kernels; deep_gemm comes with sgl_kernel's own wheel, or by itself.
KERNELS = ("sgl_kernel", "deep_gemm", "flashinfer", "flash_attn", "quack", "cutlass", "cuda")
VERSION = "99.0.0"  # newer than SGLang requires


def install() -> None:
    """Let SGLang import its kernels and torch_memory_saver, as on a machine where they are installed."""
    sys.meta_path.insert(0, _Finder())
    sys.modules["torch_memory_saver"] = _memory_saver()
    found = importlib.metadata.version

    def version(name: str) -> str:
        return VERSION if name.replace("-", "_").startswith(("sglang_kernel", *KERNELS)) else found(name)

    importlib.metadata.version = version


class _Named(type):
    """A class whose attributes are such classes, whatever their names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(cls, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of the kernels' packages; a module has every name, and nothing in it does anything."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.partition(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if root in KERNELS else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__version__ = VERSION  # type: ignore[attr-defined]
        names = _Named(spec.name, (), {})
        if spec.name == "deep_gemm":  # indexers of sparse attention count with it
            module.get_num_sms = lambda: torch.cuda.get_device_properties(0).multi_processor_count  # type: ignore[attr-defined]
        module.__getattr__ = lambda name: getattr(names, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _memory_saver() -> types.ModuleType:
    """torch_memory_saver: tensors are made within its regions, and nothing is released."""

    @contextlib.contextmanager
    def region(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    saver = types.SimpleNamespace(
        region=region, cuda_graph=region, disable=region, enabled=True, pause=lambda tag: None, resume=lambda tag: None
    )  # fmt: skip
    module = types.ModuleType("torch_memory_saver")
    module.torch_memory_saver = saver  # type: ignore[attr-defined]
    module.configure_subprocess = region  # type: ignore[attr-defined]
    return module

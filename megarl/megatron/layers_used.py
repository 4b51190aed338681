"""Which layers models are made of on this machine: Transformer Engine's, or their doubles in torch; and what the former keep.

Megatron-core 0.19.2 takes any ImportError of Transformer Engine for its absence, without a word (extensions/transformer_engine.py). An
installation that is broken, such as by a flash-attn-4 that its attention does not know, would then train several times
slower, with other kernels: it is refused here.
"""

import importlib
import importlib.metadata
import importlib.util

from megarl import platform
from megarl.megatron.transformer_config import has_transformer_engine

PACKAGE = "transformer_engine"
# What megatron-core imports of it.
_MODULES = (PACKAGE, f"{PACKAGE}.pytorch", f"{PACKAGE}.pytorch.fp8")


def layers_text() -> str:
    """The layers that are used here, and why, in words.

    Raises:
        ValueError: there is a CUDA device, and Transformer Engine is installed but cannot be imported.
    """
    if has_transformer_engine():
        return f"Transformer Engine's ({_version()})"
    if not platform.is_cuda():
        return "megarl's own in torch (there is no CUDA device)"
    if importlib.util.find_spec(PACKAGE) is None:
        return "megarl's own in torch (Transformer Engine is not installed): slower, and without context parallelism"
    for module in _MODULES:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"Transformer Engine ({_version()}) is installed, but {module} cannot be imported: {error}. Mend the installation "
                "(requirements/gpu.txt has versions that belong together) or uninstall it; megarl's own layers in torch are used "
                "where it is not installed"
            ) from error
    raise ValueError(
        f"Transformer Engine ({_version()}) can be imported now, but could not when megatron-core was: what megatron-core imports of "
        "it is not all there"
    )


def drop_dummy_gradients() -> None:
    """Free what Transformer Engine (2.18, module/base.py) keeps for each shape of a weight, once its products add to the float32
    gradients: a tensor as large as the weight, which autograd is given in a gradient's place. The next step makes them anew."""
    if has_transformer_engine():
        importlib.import_module(f"{PACKAGE}.pytorch.module.base")._dummy_wgrads.clear()


def _version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "of a version that it does not tell"

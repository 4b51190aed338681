"""Megatron-FSDP on a shadow rank: meshes of devices, of which it makes its groups, and its check of other ranks' shards.

torch's class of meshes (2.13.0) looks for the rank in tables by indices that follow from their values, which fake tensors do not allow:
here the tables are real tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from megarl.shadow.values import value_of


def install(alone: Callable[[], bool]) -> None:
    """Make every mesh of this process without fake tensors.

    Args:
        alone: whether the rank that runs now takes its peers to have its own data. Their shards would then be as large as its own, and
            Megatron-FSDP's check that all shards of a weight end where it does (0.19.2, uneven_dtensor.py) could not hold.
    """
    for name in ("__init__", "__getitem__", "get_coordinate"):
        setattr(DeviceMesh, name, _without_fakes(getattr(DeviceMesh, name)))
    DeviceMesh.from_group = staticmethod(_without_fakes(DeviceMesh.from_group))
    DeviceMesh.mesh = property(_without_fakes(inspect.getattr_static(DeviceMesh, "mesh").fget))
    validate = param_and_grad_buffer.validate_uneven_dtensor

    def validate_uneven_dtensor(tensor: Any) -> None:
        if not alone():
            validate(tensor)

    param_and_grad_buffer.validate_uneven_dtensor = validate_uneven_dtensor
    # The first tensor parallel rank tells the others its random state, which decides nothing here and is no real tensor.
    mcore_fsdp_adapter._get_rng_state_dict = dict
    mcore_fsdp_adapter._load_rng_state_dict = lambda state: None


def _without_fakes(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_known, (args, kwargs))
        with unset_fake_temporarily(), torch._C._DisableTorchDispatch(), torch.device("cpu"):
            return method(*args, **kwargs)

    return call


def _known(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    value = value_of(leaf)
    assert value is not None, "ranks of a mesh follow from nothing that is unknown"
    return value

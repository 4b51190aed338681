"""Kernels that pack and unpack a bucket at once, interpreted on a CPU (`interpreted_buckets`), do the same as torch slice by slice."""

from typing import Any

import pytest

from tests.weight_sync.test_slice_kernels import cases, needs_triton


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases("interpret", tmp_path_factory.mktemp("triton"), module="interpreted_buckets")


@needs_triton
def test_packets_are_those_that_are_packed_slice_by_slice(found: dict[str, Any]) -> None:
    assert found["packing"] == []


@needs_triton
def test_slices_are_written_and_verified_and_faults_are_found(found: dict[str, Any]) -> None:
    assert found["taking"] == []


@needs_triton
def test_whole_syncs_are_those_of_slices_one_by_one_and_damage_is_found(found: dict[str, Any]) -> None:
    assert found["syncs"] == []


@needs_triton
def test_launches_do_not_grow_with_the_bucket_and_nothing_is_waited_for(found: dict[str, Any]) -> None:
    of_two_layers, of_six_layers = found["launches"]
    assert of_two_layers == of_six_layers
    (packing, waits), (taking, other_waits) = of_two_layers
    assert 0 < packing <= 10 and 0 < taking <= 14
    assert waits == other_waits == 0

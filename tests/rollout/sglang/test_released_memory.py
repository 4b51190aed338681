"""The memory that `megarl plan memory` reports for an engine, against the memory that SGLang's ranks hold.

Other families are in `test_families`, adapters in `test_sync_of_adapters`.
"""

from tests.rollout.planned import assert_as_planned


def test_memory_is_as_planned(engine):
    assert_as_planned(engine)

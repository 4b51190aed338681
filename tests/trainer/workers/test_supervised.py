"""Sums of log-probs over whole chats; no process is started."""

import itertools
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.data.trajectories import from_lists, from_ragged
from megarl.megatron.packing import arrange_sequences, unpack
from megarl.trainer.loops import dpo
from megarl.trainer.workers.supervised import chat_sums


def test_the_log_ratio_of_long_chats_is_0_while_the_policy_is_the_reference() -> None:
    """Added up one by one in float32, the sum of the first chat would be a tenth of a nat off."""
    generator = np.random.default_rng(3)
    lengths = [32768, 500, 9000]
    ids, masks = [np.ones(length, np.int32) for length in lengths], [np.ones(n, np.bool_) for n in lengths]
    table = pa.table(
        {
            "input_ids": from_ragged(*from_lists(ids, np.int32)),
            "loss_mask": from_ragged(*from_lists(masks, np.bool_)),
        }
    )
    batch = arrange_sequences(table, [0, 1, 2]).on_device(torch.device("cpu"))
    log_probs = torch.from_numpy(-2.0 * generator.random(batch.num_tokens, dtype=np.float32))

    def call(method: str, *_: object) -> list:
        found = unpack(batch, torch.where(batch.mask, log_probs, 0.0))
        return [([0, 1, 2], {"log_probs": from_lists(found, np.float32)}), None]

    ranks = SimpleNamespace(call=call, role=SimpleNamespace(layout=SimpleNamespace(dp=1, pp=1, vpp=None)))
    reference = torch.from_numpy(dpo.chat_sums(ranks, table)).float()
    assert torch.equal(chat_sums(log_probs, batch, None), reference)
    starts = np.cumsum([0, *lengths])
    exact = [log_probs[a : b - 1].double().sum().item() for a, b in itertools.pairwise(starts)]
    assert np.array_equal(reference.numpy(), np.float32(exact))


def test_a_call_has_a_bounded_number_of_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's log-probs are of all training data: one call would keep them on the devices, and run into trainer.phase_timeout."""
    monkeypatch.setattr(dpo, "ROWS_AT_ONCE", 2)
    sizes = []

    def call(method: str, table: pa.Table, lengths: np.ndarray) -> list:
        chats = table["input_ids"].to_pylist()
        assert lengths.tolist() == list(map(len, chats))
        sizes.append(len(chats))
        found = from_lists([[-float(ids[0])] for ids in chats], np.float32)
        return [(list(range(len(chats))), {"log_probs": found})]

    chats = pa.table({"input_ids": [[row] * 2 for row in range(9)], "loss_mask": [[False, True]] * 9})
    ranks = SimpleNamespace(call=call, role=SimpleNamespace(layout=SimpleNamespace(dp=2, pp=1, vpp=None)))
    assert dpo.chat_sums(ranks, chats).tolist() == [-float(row) for row in range(9)]
    assert sizes == [4, 4, 2], "the last call has one chat for each data parallel rank"

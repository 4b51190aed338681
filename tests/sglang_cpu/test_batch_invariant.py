"""Rows of matrix products have the same bits in any batch."""

import pytest
import torch
import torch.distributed as dist

from megarl.sglang_cpu import batched_attention
from megarl.sglang_cpu.batch_invariant import (
    check_attention,
    check_products,
    override_operators,
    sum_in_order,
)
from tests.rollout.invariance import needs_invariance

SIZES = [
    (16, 48),
    (64, 192),
    (256, 768),
    (1000, 37),
    (344, 128),
    (4096, 8),
    (64, 5000),
    (256, 1),
]  # terms, columns
ROWS = (1, 2, 7, 15, 16, 17, 33, 100)


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, as in an engine's process: several threads divide a product by its rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def overridden():
    """The overridden operators, as in an engine's process; torch's own come back afterwards."""
    library = override_operators()
    yield
    library._destroy()


def assert_rows_are_independent(compute, x, rows=ROWS):
    """`compute` gives some rows of x [n, ...] the same bits as among all rows."""
    whole = compute(x)
    for number in rows:
        for first in (0, 3, len(x) - number):
            found = compute(x[first : first + number])
            assert torch.equal(found, whole[first : first + number]), (number, first)


@needs_invariance
@pytest.mark.parametrize(("terms", "columns"), SIZES)
def test_linear_layers(overridden, terms, columns):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, terms, generator=generator)
    weight = torch.randn(columns, terms, generator=generator)
    bias = torch.randn(columns, generator=generator)
    with torch.inference_mode():
        assert_rows_are_independent(lambda x: torch.nn.functional.linear(x, weight), x)
        assert_rows_are_independent(lambda x: torch.nn.functional.linear(x, weight, bias), x)
        assert_rows_are_independent(lambda x: torch.addmm(x[:, :1] + bias, x, weight.t()), x)
        assert_rows_are_independent(lambda x: (x[:, :1] + bias).addmm_(x, weight.t(), beta=0, alpha=0.3), x)
        assert_rows_are_independent(lambda x: torch.mm(x, weight.t(), out=x.new_empty(len(x), columns)), x)
        few = (x[:3, :1] + bias).addmm_(x[:3], weight.t(), beta=0.5, alpha=0.3)
    torch.testing.assert_close(
        few, 0.5 * (x[:3, :1] + bias) + 0.3 * torch.einsum("tk,nk->tn", x[:3], weight), atol=1e-4, rtol=1e-4
    )


@needs_invariance
def test_products_of_each_head(overridden):
    """As in latent attention: [heads, tokens, dim] with a matrix for each head."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(150, 4, 24, generator=generator)
    weight = torch.randn(4, 24, 512, generator=generator)
    start = torch.randn(4, 150, 512, generator=generator)
    with torch.inference_mode():
        assert_rows_are_independent(lambda x: torch.bmm(x.transpose(0, 1), weight).transpose(0, 1), x)
        assert_rows_are_independent(
            lambda x: torch.baddbmm(x[:, :, :1].transpose(0, 1), x.transpose(0, 1), weight).transpose(0, 1), x
        )
        assert_rows_are_independent(
            lambda x: torch.bmm(
                x.transpose(0, 1), weight, out=x.new_empty(len(x), 4, 512).transpose(0, 1)
            ).transpose(0, 1),
            x,
        )
        found = torch.baddbmm(start[:, :5], x[:5].transpose(0, 1), weight, beta=0.5, alpha=2.0)
    expected = 0.5 * start[:, :5] + 2 * torch.einsum("tha,hab->htb", x[:5], weight)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_sigmoids_of_a_router(overridden):
    x = torch.randn(150, 5, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert_rows_are_independent(torch.sigmoid, x)
        torch.testing.assert_close(torch.sigmoid(x[:3]), 1 / (1 + torch.exp(-x[:3])))


def test_a_machine_where_it_does_not_hold_is_refused():
    """A machine with torch's own products is one: they round a single row differently."""
    with pytest.raises(RuntimeError, match=r"rollout\.deterministic=true cannot be kept .* set it to false"):
        check_products()


def test_a_machine_with_such_attention_is_refused(monkeypatch):
    monkeypatch.setattr(batched_attention, "padded_rows", lambda rows, width: rows)
    with pytest.raises(RuntimeError, match=r"its attention \(heads of 16\) rounds tokens .* set it to false"):
        check_attention()


@needs_invariance
def test_the_machine_at_hand_is_not(overridden):
    check_products()
    check_attention()


def sums(rank, world, values):
    found = values[rank].clone()
    assert sum_in_order(found, dist.group.WORLD) is found
    return found.tolist()


def test_sums_over_ranks_are_in_their_order(ranks):
    values = torch.randn(3, 50, 7, generator=torch.Generator().manual_seed(0))
    values[:2] *= 1e4
    expected = (values[0] + values[1]) + values[2]
    assert not torch.equal(expected, values[0] + (values[1] + values[2]))
    for found in ranks.run(sums, values, world=3):
        assert found == expected.tolist()

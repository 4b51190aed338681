"""Weight syncs between simulated ranks: their results, memory and counts."""

import weakref
from collections.abc import Mapping

import pytest
import torch

from megarl.layout import RankPlace
from megarl.layout.grid import ParallelLayout
from megarl.weight_sync.layouts import EngineLayout, sglang_layout
from megarl.weight_sync.packets import Packet
from megarl.weight_sync.sender import fill
from megarl.weight_sync.sync_plan import APART, AUTO, COLOCATED, MAPPED, P2P, SHARED_MEMORY, SyncPlan
from tests.weight_sync.fusions import Rank, expected_sglang
from tests.weight_sync.shards import empty_shards, load_all
from tests.weight_sync.transfer import Transfer

CASES = [
    ("qwen2", ParallelLayout(world=4, tp=2, pp=2), EngineLayout(tp=2, num_engines=2)),
    ("llama", ParallelLayout(world=4, tp=4), EngineLayout(tp=1, num_engines=3)),
    ("qwen3", ParallelLayout(world=2, pp=2), EngineLayout(tp=4)),
    ("qwen3_moe", ParallelLayout(world=4, ep=4), EngineLayout(tp=4, ep=2)),
    ("deepseek_v3", ParallelLayout(world=4, tp=2, pp=2, ep=2, first_layers=1), EngineLayout(tp=2, ep=2)),
    ("qwen3_5_moe", ParallelLayout(world=4, tp=2, pp=2, ep=2), EngineLayout(tp=4, ep=2)),
    ("glm_moe_dsa", ParallelLayout(world=4, tp=2, pp=2, ep=2, first_layers=1), EngineLayout(tp=2, ep=2)),
    ("minimax_m2", ParallelLayout(world=4, tp=2, ep=4), EngineLayout(tp=4, ep=2)),
    ("gpt_oss", ParallelLayout(world=4, tp=2, ep=4), EngineLayout(tp=4, ep=2)),
]
BUCKET = 20_000


def on_nodes(*nodes: str) -> tuple[RankPlace, ...]:
    """One rank for each entry, on devices of their own in the order of the ranks."""
    return tuple(RankPlace(node, str(rank)) for rank, node in enumerate(nodes))


def make_sync(model, parallel, engines, **more) -> SyncPlan:
    return SyncPlan(model.config, parallel, engines, more.pop("dtype", torch.float32), BUCKET, **more)


@pytest.fixture
def start(tmp_path):
    """start(model, sync) -> Transfer"""
    transfers = []

    def start(model, sync):
        engine = empty_shards(sglang_layout(sync.config, sync.engines))
        transfers.append(Transfer(sync, load_all(model.folder, sync.parallel), engine, tmp_path))
        return transfers[-1]

    yield start
    for transfer in transfers:
        transfer.close()


def assert_holds(transfer, state, hf, engines):
    for rank in range(engines.num_ranks):
        expected = expected_sglang(state, hf, Rank(rank % engines.tp, engines.tp, engines.ep))
        assert transfer.engine[rank].keys() == expected.keys()
        for tensor, values in expected.items():
            assert torch.equal(transfer.engine[rank][tensor], values), (rank, tensor)


def ways(parallel: ParallelLayout, engines: EngineLayout) -> dict[str, dict]:
    """SyncPlan's arguments for each way of a sync; colocated: trainer rank i and engine rank i share device i."""
    places = on_nodes(*"a" * max(parallel.world, engines.num_ranks))
    shared = {"source_places": places[: parallel.world], "target_places": places[: engines.num_ranks]}
    return {
        MAPPED: {"transport": SHARED_MEMORY},
        COLOCATED: {"transport": P2P, **shared},
        APART: {"transport": P2P},
    }


@pytest.mark.parametrize("way", [MAPPED, COLOCATED, APART])
@pytest.mark.parametrize(("family", "parallel", "engines"), CASES)
def test_all_engines_get_their_shards_and_no_byte_more(tiny_model, start, family, parallel, engines, way):
    model = tiny_model(family)
    sync = make_sync(model, parallel, engines, **ways(parallel, engines)[way])
    if sync.way != way:
        assert way == COLOCATED and engines.num_ranks > parallel.world
        pytest.skip("there are more engine ranks than devices of the trainer")
    assert len(sync.buckets) > 2
    transfer = start(model, sync)
    sent, received = transfer.run(1)
    assert_holds(transfer, model.decoder, model.config.hf, engines)
    assert [one.bytes_written for one in received] == sync.plan.bytes_received()
    passed_on = sum(sum(by_link.values()) for by_link in sync.plan.account().passed_on)
    assert (passed_on > 0) == (way == APART and engines.num_engines > 1)
    assert sum(one.bytes_sent for one in sent) + passed_on == sync.account()["bytes_total"]
    assert max(one.bytes_sent for one in sent) == sync.account()["bytes_sent_max_per_rank"]


@pytest.mark.parametrize("way", [MAPPED, COLOCATED, APART])
@pytest.mark.parametrize("skip_unchanged", [False, True])
def test_a_model_of_a_single_bucket(tiny_model, start, way, skip_unchanged):
    model, parallel, engines = (
        tiny_model("qwen2"),
        ParallelLayout(world=2, tp=2),
        EngineLayout(1, num_engines=2),
    )
    more = {"skip_unchanged": skip_unchanged, **ways(parallel, engines)[way]}
    sync = SyncPlan(model.config, parallel, engines, torch.float32, 1 << 30, **more)
    assert len(sync.buckets) == 1 and sync.way == way
    transfer = start(model, sync)
    for version in (1, 2):
        transfer.run(version)
    assert_holds(transfer, model.decoder, model.config.hf, engines)


@pytest.mark.parametrize("way", [MAPPED, COLOCATED, APART])
@pytest.mark.parametrize(("family", "parallel", "engines"), [CASES[0], CASES[-1]])
def test_each_side_takes_two_buckets_of_memory_at_most(tiny_model, start, family, parallel, engines, way):
    """Trainer ranks that receive for engine ranks have the engine ranks' two buckets as well."""
    model = tiny_model(family)
    sync = make_sync(model, parallel, engines, **ways(parallel, engines)[way])
    sent, received = start(model, sync).run(1)
    slices = max(len(bucket) for bucket in sync.buckets)
    packets = engines.num_ranks + parallel.world
    margin = 2 * (slices * (9 + 15) + packets * (16 + 15))  # checksums, and gaps before slices
    assert margin < BUCKET / 2
    both = 2 if way == COLOCATED else 1
    assert all(0 < one.buffer_bytes <= both * (2 * BUCKET + margin) for one in sent)
    if way == APART:
        assert all(0 < one.buffer_bytes <= 2 * BUCKET + margin for one in received)
    else:
        assert all(one.buffer_bytes == 0 for one in received)


@pytest.mark.parametrize("way", [COLOCATED, APART])
def test_a_trainer_rank_of_which_nothing_is_needed(tiny_model, start, way):
    """Only a few of twelve replicas send to the engine; the others are still members of the exchange."""
    model, parallel, engines = tiny_model("qwen2"), ParallelLayout(world=12), EngineLayout(2)
    more = ways(parallel, engines)[way]
    if way == COLOCATED:  # the engine's devices hold all weights already, so no bytes cross the network
        more["target_places"] = tuple(reversed(more["source_places"]))[:2]
    sync = make_sync(model, parallel, engines, **more)
    assert sync.way == way
    transfer = start(model, sync)
    idle = [not any(share.buckets) for share in transfer.sources]
    assert 0 < sum(idle) < 12
    sent, _ = transfer.run(1)
    assert [one.bytes_sent == 0 for one in sent] == idle
    assert_holds(transfer, model.decoder, model.config.hf, engines)


@pytest.mark.parametrize("transport", [AUTO, P2P])
def test_what_leaves_the_trainer_does_not_grow_with_the_engines(tiny_model, start, transport):
    """With engines on nodes of their own, for the planned bytes and for the bytes that trainer ranks really send."""
    model, parallel = tiny_model("qwen3_moe"), ParallelLayout(world=4, tp=2, pp=2, ep=2)
    found, sources = {}, on_nodes(*"aabb")
    for number in (1, 4, 16):
        engines = EngineLayout(tp=2, ep=2, num_engines=number)
        targets = tuple(RankPlace(f"engine{rank // 2}", str(rank % 2)) for rank in range(2 * number))
        sync = make_sync(
            model, parallel, engines, source_places=sources, target_places=targets, transport=transport
        )
        assert sync.way == APART
        shares, others = sync.shares()
        assert {share.exchange.size for share in (*shares, *others)} == {4 + 2 * number}  # one communicator
        account = sync.plan.account()
        sent = [by_link["inter_node"] for by_link in account.sent_by_link]
        packets = [
            sum(message.nbytes for messages in share.exchange.sends for message in messages)
            for share in shares
        ]
        peers = [len(share.exchange.peers) for share in (*shares, *others)]
        assert peers == sync.peers()
        found[number] = sent, packets, max(peers[:4]), max(peers[4:])
        if number == 4:
            transfer = start(model, sync)
            reports, _ = transfer.run(1)
            assert [one.bytes_sent for one in reports] == sent
            assert_holds(transfer, model.decoder, model.config.hf, engines)
    assert found[1][:3] == found[4][:3] == found[16][:3]
    # An engine rank's peers are the trainer ranks and two neighbours in a chain.
    assert found[1][3] <= 4 and found[4][3] == found[16][3] <= 4 + 2


def test_no_copy_is_larger_than_a_quarter_of_a_bucket(tiny_model):
    _, parallel, engines = CASES[0]
    sync = make_sync(tiny_model("qwen2"), parallel, engines)
    assert max(sync.plan.bytes_of(copy) for copy in sync.plan.copies) <= BUCKET // 4


def test_each_engine_is_served_by_the_replica_next_to_it(tiny_model, start):
    """Two replicas of the model and two engines on two machines: no bytes cross between the machines."""
    model, parallel, engines = (
        tiny_model("qwen3"),
        ParallelLayout(world=4, tp=2),
        EngineLayout(2, num_engines=2),
    )
    places = on_nodes("a", "a", "b", "b")
    sync = make_sync(model, parallel, engines, source_places=places, target_places=places)
    assert sync.account()["bytes_inter_node"] == 0 < sync.account()["bytes_local"]
    transfer = start(model, sync)
    for rank, share in enumerate(transfer.targets):
        assert rank in share.near and set(share.near) <= ({0, 1} if rank < 2 else {2, 3})
    transfer.run(1)
    assert_holds(transfer, model.decoder, model.config.hf, engines)


def test_auto_takes_memory_where_both_ends_see_it_and_a_network_elsewhere(tiny_model, start):
    model, parallel, engines = tiny_model("qwen2"), ParallelLayout(world=2, pp=2), EngineLayout(2)
    places = {"source_places": on_nodes("a", "b"), "target_places": on_nodes("a", "b")}
    cpu = start(model, make_sync(model, parallel, engines, **places))
    assert [share.near for share in cpu.targets] == [(0,), (1,)]
    assert [share.exchange.peers for share in cpu.sources] == [{1}, {0}]
    cpu.run(1)
    assert_holds(cpu, model.decoder, model.config.hf, engines)
    places = {"source_places": on_nodes("a", "a"), "target_places": on_nodes("a", "a")}
    assert make_sync(model, parallel, engines, **places).way == MAPPED
    on_gpus = make_sync(model, parallel, engines, device="cuda", **places)
    assert on_gpus.way == COLOCATED
    assert [share.near for share in on_gpus.shares()[1]] == [(0,), (1,)]
    assert all(share.exchange is None for share in on_gpus.shares()[1])


def test_a_transport_that_cannot_connect_is_refused(tiny_model):
    parallel, engines = ParallelLayout(world=2, pp=2), EngineLayout(2)
    for device, nodes, message in (
        ("cpu", "ab", r"sync_transport=shared_memory: trainer rank 1 may send .* rank 0, .* not on .*'b'"),
        (
            "cuda",
            "aa",
            r"sync_transport=shared_memory: trainer rank 0 may send to engine rank 1, .*device=.1",
        ),
    ):
        places = {"source_places": on_nodes(*nodes), "target_places": on_nodes("a", "a")}
        sync = make_sync(
            tiny_model("qwen2"), parallel, engines, transport=SHARED_MEMORY, device=device, **places
        )
        with pytest.raises(ValueError, match=message):
            sync.shares()


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("deepseek_v3", ("_bias",)),
        ("deepseek_v32", ("_bias", "k_norm.weight", "k_norm.bias")),
        ("glm_moe_dsa", ("_bias", "k_norm.weight", "k_norm.bias")),
        ("glm4_moe", ("_bias", "mlp.gate.weight")),
        ("glm4_moe_lite", ("_bias", "mlp.gate.weight")),
        ("minimax_m2", ("_bias", "block_sparse_moe.gate.weight")),
        ("qwen3_next", ("A_log",)),
        ("qwen3_5", ("A_log",)),
        ("gpt_oss", ("_weight_bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias")),
    ],
)
def test_a_slice_travels_in_the_engines_precision(tiny_model, start, family, kept):
    """All tensors are rounded to bfloat16 except `kept`, which SGLang holds in float32."""
    model, parallel, engines = tiny_model(family), ParallelLayout(world=2, tp=2), EngineLayout(1)
    transfer = start(
        model, make_sync(model, parallel, engines, dtype=torch.bfloat16, transport=SHARED_MEMORY)
    )

    def rounded(tensors):
        return {name: t if name.endswith(kept) else t.bfloat16() for name, t in tensors.items()}

    transfer.engine[0].update(rounded(transfer.engine[0]))
    transfer.run(1)
    assert_holds(transfer, rounded(model.decoder), model.config.hf, engines)
    held = {tensor.dtype for name, tensor in transfer.engine[0].items() if name.endswith(kept)}
    assert held == {torch.float32}


@pytest.mark.parametrize("way", [MAPPED, COLOCATED, APART])
def test_what_an_engine_holds_already_is_not_sent(tiny_model, start, way):
    family, parallel, engines = CASES[0]
    model = tiny_model(family)
    sync = make_sync(model, parallel, engines, skip_unchanged=True, **ways(parallel, engines)[way])
    transfer = start(model, sync)
    nobody, everybody = dict.fromkeys(range(4)), dict.fromkeys(range(4), 1)
    transfer.run(1, nobody)
    norm = transfer.trainer[2]["0:decoder.final_layernorm.weight"]
    norm.add_(1.0)
    transfer.trainer[3]["0:decoder.final_layernorm.weight"].add_(1.0)
    sent, received = transfer.run(2, everybody)
    assert [one.bytes_written for one in received] == [norm.nbytes] * 4
    assert sum(one.bytes_sent for one in sent) == norm.nbytes * (2 if way == APART else 4)
    changed = {**model.decoder, "model.norm.weight": norm}
    assert_holds(transfer, changed, model.config.hf, engines)
    # The second engine has lost its weights. The first one's are known, but both receive the same packets.
    for tensor in (tensor for rank in (2, 3) for tensor in transfer.engine[rank].values()):
        tensor.zero_()
    transfer.run(3, {0: 2, 1: 2, 2: None, 3: None})
    assert_holds(transfer, changed, model.config.hf, engines)
    _, received = transfer.run(4, dict.fromkeys(range(4), 3))
    assert [one.bytes_written for one in received] == [0] * 4


class MadeWhenAsked(Mapping):
    """Copies of tensors; no copy may be alive when the next one is made."""

    def __init__(self, tensors):
        self._tensors, self._last, self.made = tensors, None, 0

    def __getitem__(self, name):
        assert self._last is None or self._last() is None
        found = self._tensors[name].clone()
        self._last, self.made = weakref.ref(found), self.made + 1
        return found

    def __iter__(self):
        return iter(self._tensors)

    def __len__(self):
        return len(self._tensors)


@pytest.mark.parametrize("fp8_block", [None, (4, 8)])
def test_one_tensor_at_a_time_is_asked_of_the_trainer(tiny_model, fp8_block):
    """So that weights that are merged on demand never take the memory of a second model."""
    model, parallel = tiny_model("qwen2"), ParallelLayout(world=2, tp=2)
    shares, _ = make_sync(model, parallel, EngineLayout(2), fp8_block=fp8_block).shares()
    for share, tensors in zip(shares, load_all(model.folder, parallel), strict=True):
        asked = MadeWhenAsked(tensors)
        specs = [spec for bucket in share.buckets for spec in bucket]
        for spec in specs:
            fill(Packet(torch.zeros(spec.nbytes, dtype=torch.uint8), spec.slices), asked, fp8_block)
        assert asked.made == sum(len(spec.slices) for spec in specs)


def test_a_small_model_is_cut_into_enough_buckets_for_an_overlap(tiny_model):
    model = tiny_model("qwen2")
    _, parallel, engines = CASES[0]
    large = SyncPlan(model.config, parallel, engines, torch.float32, bucket_bytes=1 << 30)
    assert large.bucket_limit == 4 << 20  # a smaller bucket would not be worth its overhead

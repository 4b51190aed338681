"""The receiver's rules, on a module of two parameters; test_sglang_engine.py has it inside SGLang."""

import json
import zlib

import pytest
import torch

from megarl.rollout.receiver import RefusedError, apply_bucket


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 6), -1.0))
        self.bias = torch.nn.Parameter(torch.full((4,), -1.0, dtype=torch.bfloat16))


WEIGHT = torch.arange(24.0).view(4, 6)
BIAS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
TOP = ("up", "weight", [0, 0], WEIGHT[:2])
LEFT = ("down", "weight", [2, 0], WEIGHT[2:, :2])
RIGHT = ("down", "weight", [2, 2], WEIGHT[2:, 2:])
ALL_BIAS = ("bias", "bias", [0], BIAS)


def manifest(folder, slices, version=1, bucket=0, last=True, **more):
    payload, entries = folder / "payload", []
    with payload.open("wb") as file:
        for tensor, local, start, value in slices:
            data = value.contiguous().view(torch.uint8).numpy().tobytes()
            entries.append(
                {
                    "tensor": tensor,
                    "local": local,
                    "start": start,
                    "size": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "offset": file.tell(),
                    "nbytes": len(data),
                    "crc32": zlib.crc32(data),
                }
            )
            file.write(data)
    content = {
        "version": version,
        "bucket": bucket,
        "last": last,
        "payload": str(payload),
        "entries": entries,
    }
    return json.loads(json.dumps(content | more))


def test_writes_slices_of_all_buckets(tmp_path):
    model = Tiny()
    assert apply_bucket(model, manifest(tmp_path, [TOP, LEFT], last=False)) == 4 * (12 + 4)
    assert apply_bucket(model, manifest(tmp_path, [RIGHT, ALL_BIAS], bucket=1)) == 4 * 8 + 2 * 4
    assert torch.equal(model.weight, WEIGHT)
    assert torch.equal(model.bias, BIAS)


def test_an_empty_bucket_needs_no_payload(tmp_path):
    model = Tiny()
    empty = manifest(tmp_path, [], last=False)
    assert apply_bucket(model, empty) == 0
    apply_bucket(model, manifest(tmp_path, [TOP, LEFT, RIGHT, ALL_BIAS], bucket=1))
    assert torch.equal(model.weight, WEIGHT)


def test_padding_is_declared_and_left_alone(tmp_path):
    model = Tiny()
    slices = [TOP, LEFT, ALL_BIAS]
    with pytest.raises(RefusedError, match=r"weight: 8 of 24 elements missing, padding is 0"):
        apply_bucket(model, manifest(tmp_path, slices))
    with pytest.raises(RefusedError, match=r"weight: 8 of 24 elements missing, padding is 9"):
        apply_bucket(model, manifest(tmp_path, slices, padding={"weight": 9}))
    apply_bucket(model, manifest(tmp_path, slices, padding={"weight": 8}))
    assert torch.all(model.weight[2:, 2:] == -1)


def test_what_comes_twice_does_not_make_up_for_what_is_missing(tmp_path):
    with pytest.raises(RefusedError, match="weight: slices overlap"):
        apply_bucket(Tiny(), manifest(tmp_path, [TOP, TOP, ALL_BIAS]))


def test_a_parameter_that_never_came_is_named(tmp_path):
    with pytest.raises(RefusedError, match="bias: 4 of 4 elements missing"):
        apply_bucket(Tiny(), manifest(tmp_path, [TOP, LEFT, RIGHT]))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([("t", "wait", [0], BIAS)], "t: the engine has no parameter 'wait'"),
        ([("t", "weight", [3, 0], WEIGHT[:2])], r"t: weight has shape \(4, 6\): no place for start \(3, 0\)"),
        ([("t", "weight", [-1, 0], WEIGHT[:2])], "no place for start"),
        ([("t", "weight", [0], WEIGHT.flatten())], "no place for start"),
        ([("t", "bias", [0], BIAS.float())], "t: bias holds torch.bfloat16, not torch.float32"),
    ],
)
def test_a_slice_that_does_not_fit_is_refused(tmp_path, slices, message):
    with pytest.raises(RefusedError, match=message):
        apply_bucket(Tiny(), manifest(tmp_path, slices))


def test_byte_counts_have_to_agree(tmp_path):
    content = manifest(tmp_path, [TOP])
    content["entries"][0]["nbytes"] -= 4
    with pytest.raises(RefusedError, match=r"up: 44 bytes for 12 elements"):
        apply_bucket(Tiny(), content)
    content = manifest(tmp_path, [TOP])
    content["entries"][0]["offset"] = 4
    with pytest.raises(RefusedError, match=r"up: .*payload ends at 48, needed are 48 bytes at 4"):
        apply_bucket(Tiny(), content)


@pytest.mark.parametrize("position", [0, 23, 47])
def test_any_flipped_bit_is_found(tmp_path, position):
    content = manifest(tmp_path, [TOP])
    data = bytearray((tmp_path / "payload").read_bytes())
    data[position] ^= 0x10
    (tmp_path / "payload").write_bytes(data)
    with pytest.raises(RefusedError, match=r"up: checksum 0x[0-9a-f]{8} in weight, sent was 0x"):
        apply_bucket(Tiny(), content)


def test_the_checksum_is_of_what_lies_in_the_parameter(tmp_path):
    """A write that does not reach the parameter is found, though what was sent is intact."""
    model = Tiny()
    original = torch.Tensor.copy_

    def lazy_copy(self, source, *args, **kwargs):
        return original(self, source.clone().zero_(), *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RefusedError, match=r"up: checksum"):
        patch.setattr(torch.Tensor, "copy_", lazy_copy)
        apply_bucket(model, manifest(tmp_path, [TOP]))


@pytest.mark.parametrize(("version", "bucket"), [(1, 2), (2, 1), (1, 1)])
def test_buckets_come_in_order(tmp_path, version, bucket):
    model = Tiny()
    if (version, bucket) != (1, 1):
        apply_bucket(model, manifest(tmp_path, [TOP], last=False))
    with pytest.raises(RefusedError, match=f"bucket {bucket} of version {version} came where"):
        apply_bucket(model, manifest(tmp_path, [LEFT], version=version, bucket=bucket, last=False))


def test_a_new_version_starts_afresh(tmp_path):
    model = Tiny()
    apply_bucket(model, manifest(tmp_path, [TOP, LEFT, RIGHT], last=False))
    with pytest.raises(RefusedError, match="weight: 24 of 24 elements missing"):
        apply_bucket(model, manifest(tmp_path, [ALL_BIAS], version=2))

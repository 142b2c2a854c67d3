"""What operations refuse before a kernel could read or write where it must not."""

from dataclasses import replace

import pytest
import torch

from dynamiq.core.errors import InputError
from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.hadamard.operands import Blocks, Finish, Quantizer, passes
from dynamiq.kernels.hadamard.parts import LOG_PIECE, parts_of
from tests.kernels.hadamard.operations import Call, everything

CPU = torch.device("cpu")
BLOCKS = Blocks(9, 0, 1, torch.ones(2), torch.ones(2))
QUANTIZER = Quantizer(1, 15)
X = torch.ones(1000)
CODES = torch.zeros(1024, dtype=torch.uint8)


def refuses(complaint, function, *arguments):
    with pytest.raises(InputError, match=complaint):
        function(*arguments)


def test_one_build_for_the_entries_and_one_for_what_reads_none(monkeypatch):
    asked = []
    monkeypatch.setattr(ops, "find_build", lambda *what: asked.append(what))
    x = torch.ones(500, dtype=torch.bfloat16)
    for _ in everything(Call.of(x, 9, QUANTIZER, 4, mean=True)):
        pass
    assert set(asked) == {("hadamard", dtype, CPU) for dtype in (torch.bfloat16, None)}


def test_entries_are_checked():
    refuses("must be contiguous float32, bfloat16, float16", ops.energies, X.double())
    refuses("must be contiguous", ops.energies, X[::2])
    refuses("1024 flat entries at most", ops.quantize, torch.ones(1025), BLOCKS, QUANTIZER, CODES)
    refuses("flat entries", ops.energies, X.view(10, 100))
    refuses("kernels run on cpu and cuda", ops.energies, X.to("meta"))


def test_blocks_are_checked():
    finish, out = Finish(15, 1.0, 1.0), torch.ones(1000)
    for wrong in (
        replace(BLOCKS, scale=torch.ones(3)),
        replace(BLOCKS, log_block=7, factor=torch.ones(8), scale=torch.ones(8)),
    ):
        refuses("at least 2\\^8 entries have one", ops.quantize, X, wrong, QUANTIZER, CODES)
        refuses("at least 2\\^8 entries have one", ops.dequantize, CODES, wrong, finish, out)
    double = replace(BLOCKS, factor=torch.ones(2).double())
    refuses("factor must be contiguous float32", ops.quantize, X, double, QUANTIZER, CODES)


def test_integers_are_checked():
    refuses("there are 1024 integers", ops.quantize, X, BLOCKS, QUANTIZER, CODES[:512])
    odd = torch.zeros(1030, dtype=torch.uint8)[3:1027]
    refuses("a multiple of 16", ops.quantize, X, BLOCKS, QUANTIZER, odd)
    refuses("integers must be contiguous uint8", ops.quantize, X, BLOCKS, QUANTIZER, CODES.long())


def test_payloads_are_checked():
    payload = torch.zeros(640, dtype=torch.uint8)
    refuses("1024 integers of 4 bits .* have a payload of 512 bytes", ops.pack, CODES, 4, payload)
    refuses("1024 integers of 6 bits .* 768 bytes", ops.unpack, payload, 6, CODES)
    refuses("of 32 bits \\(1 to 31\\)", ops.pack, CODES, 32, torch.zeros(4096, dtype=torch.uint8))
    refuses("of 0 bits", ops.unpack, payload[:0], 0, CODES)
    refuses("have a payload of 512", ops.repack, payload, CODES, (5, 4), payload)
    refuses("at an even address", ops.pack, CODES, 4, payload[1:513])


def test_passes_do_every_distance_once():
    for log_block in range(8, 31):
        done = 0
        for log_stride, log_points in passes(log_block):
            assert log_stride == done
            assert 1 <= log_points <= 8
            done += log_points
        assert done == log_block


@pytest.mark.parametrize(("log_block", "count"), [(8, 9000), (15, 17), (16, 3), (18, 2), (21, 2)])
def test_parts_and_pieces_make_up_all_blocks(log_block, count):
    numbers = torch.arange(count).float()
    blocks = Blocks(log_block, 5, 1, numbers, numbers)
    at, found = 0, []
    for part in parts_of(blocks, CPU):
        assert part.numel <= max(1 << LOG_PIECE, 1 << log_block)
        found += part.blocks.factor.tolist()
        for piece in part.pieces:
            assert piece.begin == at
            assert piece.blocks.first_unit == 5 + at // 256
            assert piece.numel <= 1 << LOG_PIECE
            assert piece.blocks.factor[0] == at >> log_block
            at += piece.numel
    assert at == blocks.numel
    assert found == numbers.tolist()
    (everything,) = parts_of(blocks, torch.device("cuda"))
    assert (everything.numel, everything.near) == (blocks.numel, len(passes(log_block)))

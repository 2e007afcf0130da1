"""Packing: documents stay whole, labels stay inside, and every token is accounted for."""

import random

import pytest
import torch

from fullspan.data.config import DataConfig
from fullspan.data.load import load_packs
from fullspan.data.packing import IGNORE, Document, Pack, assign, build_pack, pack_documents
from fullspan.data.report import ReadLog
from fullspan.errors import DataError, LayoutError


def document(length, start=0, trained=None):
    flags = torch.ones(length, dtype=torch.bool) if trained is None else torch.tensor(trained)
    tokens = torch.arange(start, start + length, dtype=torch.int32)
    return Document(tokens=tokens, trained=flags, source=f"d line {start}")


def pack(documents, pack_length=8, overlong="error"):
    log = ReadLog(rows=len(documents))
    return pack_documents(
        documents, pack_length=pack_length, overlong=overlong, pad_token=9, log=log
    )


def pairs(packs):
    """Every (token, label) that is trained, over all packs."""
    found = []
    for one in packs:
        rows = (one.labels != IGNORE).nonzero().flatten().tolist()
        found += [(int(one.tokens[row]), int(one.labels[row])) for row in rows]
    return sorted(found)


def test_labels_are_shifted_inside_each_document():
    one = build_pack([document(3, 10), document(2, 20, [False, True])], 8, pad_token=9)
    assert one.tokens.tolist() == [10, 11, 12, 20, 21, 9, 9, 9]
    assert one.labels.tolist() == [11, 12, IGNORE, 21, IGNORE, IGNORE, IGNORE, IGNORE]
    assert one.cu_seqlens.tolist() == [0, 3, 5]
    assert {one.tokens.dtype, one.labels.dtype, one.cu_seqlens.dtype} == {torch.int64}
    assert (one.real_length, one.trained_tokens) == (5, 3)


def test_mask_does_not_come_from_the_pad_id():
    flags = torch.ones(3, dtype=torch.bool)
    eos = Document(tokens=torch.full((3,), 9, dtype=torch.int32), trained=flags, source="d")
    packs, report = pack([eos])
    assert packs[0].labels.tolist()[:3] == [9, 9, IGNORE]
    assert report.trained_tokens == 2


@pytest.mark.parametrize("seed", range(5))
def test_assign_places_every_index_once_and_fits(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 100) for _ in range(300)]
    groups = assign(lengths, 100)
    assert sorted(i for group in groups for i in group) == list(range(300))
    assert max(sum(lengths[i] for i in group) for group in groups) <= 100
    assert groups == sorted(groups) == assign(lengths, 100)
    assert len(groups) <= 11 / 9 * -(-sum(lengths) // 100) + 1


def test_assign_is_best_fit():
    # 4 fits rooms 4 and 5 and goes where nothing is left (worst fit: the other one).
    assert assign([6, 5, 4], 10) == [[0, 2], [1]]
    # 1 fits rooms 13 and 1 (first fit: the pack opened first).
    assert assign([17, 15, 14, 1], 30) == [[0], [1, 2, 3]]


def test_packing_keeps_documents_whole_and_in_file_order():
    packs, report = pack([document(5, 10), document(6, 20), document(2, 30), document(3, 40)])
    assert [one.cu_seqlens.tolist() for one in packs] == [[0, 5, 8], [0, 6, 8]]
    assert [int(one.tokens[0]) for one in packs] == [10, 20]
    assert report.efficiency == 1.0
    assert report.documents_per_pack == (2, 2.0, 2)
    assert (report.packs, report.packed_documents, report.longest) == (2, 4, 6)


def test_overlong_error_names_line_length_and_pack_length():
    with pytest.raises(
        DataError, match=r"d line 70: 9 tokens, data.pack_length is 8; raise it, or"
    ):
        pack([document(8), document(9, 70)])


def test_overlong_drop():
    packs, report = pack([document(9, 10), document(3, 30)], overlong="drop")
    assert [one.tokens[0] for one in packs] == [30]
    assert (report.dropped, report.dropped_tokens, report.source_tokens) == (1, 9, 12)


def test_overlong_truncate():
    packs, report = pack([document(11, 10)], overlong="truncate")
    assert packs[0].tokens.tolist() == list(range(10, 18))
    assert (report.truncated, report.truncated_tokens, report.trained_tokens) == (1, 3, 7)


def test_truncation_that_cuts_off_everything_to_train():
    flags = [False] * 8 + [True] * 3
    packs, report = pack([document(11, 10, flags), document(2, 30)], overlong="truncate")
    assert len(packs) == 1
    assert (report.truncated, report.truncated_tokens) == (1, 3)
    assert (report.untrained, report.untrained_tokens) == (1, 8)


@pytest.mark.parametrize("length", [9, 14, 15, 16, 22, 23, 50])
def test_overlong_split_trains_every_token_once(length):
    whole, _ = pack([document(length, 10)], pack_length=64)
    parts, report = pack([document(length, 10), document(3, 100)], overlong="split")
    assert pairs(parts) == sorted([*pairs(whole), (100, 101), (101, 102)])
    assert report.split == 1
    assert report.pieces == -(-(length - 1) // 7)
    assert report.repeated_tokens == report.pieces - 1
    assert report.tokens == length + 3 + report.repeated_tokens


def test_samples_without_a_trained_token_are_left_out_and_counted():
    first_only = document(3, 20, [True, False, False])  # no row before it can learn it
    packs, report = pack([document(4, 10, [False] * 4), first_only, document(2, 30)])
    assert packs[0].real_length == 2
    assert (report.untrained, report.untrained_tokens, report.packed_documents) == (2, 7, 1)


def test_nothing_left_to_train_is_an_error():
    with pytest.raises(
        DataError, match=r"no token to train on: 2 rows, 0 bad, 1 dropped .* 1 without"
    ):
        pack([document(9), document(3, 0, [False] * 3)], overlong="drop")


def test_report_refuses_sums_that_do_not_add_up():
    with pytest.raises(AssertionError):
        pack_documents(
            [document(3)], pack_length=8, overlong="error", pad_token=0, log=ReadLog(rows=2)
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("overlong", ["truncate", "split", "drop"])
def test_counts_add_up_whatever_comes(seed, overlong):
    draw = random.Random(seed)
    documents = [
        document(n, 100 * i, [draw.random() < 0.2 for _ in range(n)])
        for i, n in enumerate(draw.randint(1, 40) for _ in range(60))
    ]
    packs, report = pack(documents, pack_length=16, overlong=overlong)
    assert report.tokens == sum(one.real_length for one in packs)
    if overlong == "split":
        assert report.trained_tokens == sum(d.trained_tokens for d in documents)


@pytest.mark.parametrize(
    ("labels", "bounds", "reason"),
    [
        ([IGNORE] * 4, [0, 2, 2], "must rise from 0"),
        ([IGNORE] * 4, [1, 2], "must rise from 0"),
        ([IGNORE] * 4, [0], "must rise from 0"),
        ([IGNORE] * 4, [0, 5], "ends at 5, the pack has 4 rows"),
        ([1, 2, IGNORE, IGNORE], [0, 2], "last row of a document or on padding"),
        ([1, IGNORE, IGNORE, 5], [0, 2], "last row of a document or on padding"),
    ],
)
def test_pack_checks_itself(labels, bounds, reason):
    with pytest.raises(LayoutError, match=reason):
        Pack(
            tokens=torch.arange(4),
            labels=torch.tensor(labels),
            cu_seqlens=torch.tensor(bounds),
        )


def test_load_packs_from_a_file(jsonl, tokenizer):
    rows = [{"text": "abc"}, {"text": "a" * 20}, b"{", {"text": "defg"}]
    path = jsonl(rows)
    config = DataConfig(path=path, pack_length=10, overlong="drop", max_bad_rows=1)
    packs, report = load_packs(path, config, tokenizer)
    assert packs[0].tokens.tolist() == [*b"abc", 256, *b"defg", 256, 256]
    assert packs[0].labels.tolist() == [*b"bc", 256, IGNORE, *b"efg", 256, IGNORE, IGNORE]
    assert (report.rows, report.documents, report.dropped, report.format) == (4, 3, 1, "text")
    assert report.efficiency == 0.9

"""Which rank is named, from notes as ranks post them."""

import pytest

from fullspan.parallel.verdict import Note, Post, verdict

NOW = 1000.0


def note(step: int, number: int, *, waiting: bool = True, error: str = "") -> Note:
    return Note(
        phase=step,
        activity=f"step {step}",
        entered=number,
        number=number,
        what=f"all_gather of thing {number}",
        waiting=waiting,
        since=NOW - 30,
        error=error,
    )


def said(*notes: Note, silent: tuple[int, ...] = ()) -> str:
    """By rank 0, which waits in what the first note says."""
    posts = {rank: Post(5, NOW - (20 if rank in silent else 0), n) for rank, n in enumerate(notes)}
    later = {r: p if r in silent else p._replace(beats=9) for r, p in posts.items()}
    assert all(Post.from_json(post.to_json()) == post for post in later.values())
    line = verdict(
        0, notes[0], before=posts, after=later, now=NOW, reason="it broke", timeout_seconds=20.0
    )
    assert "\n" not in line
    return line


WAITS = "rank 0 waits at step 7, in all_gather of thing 12 (exchange 12)"


def test_a_silent_rank_is_named_with_its_place():
    line = said(note(7, 12), note(7, 3), note(7, 11, waiting=False), silent=(2,))
    assert line == (
        "rank 2 has not answered for 20 s: rank 2 was last seen at step 7, after all_gather of "
        f"thing 11 (exchange 11); {WAITS} (train.timeout_seconds is 20)"
    )


def test_several_silent_ranks():
    line = said(note(7, 12), Note(), note(7, 12), silent=(1, 2))
    assert line.startswith(
        "ranks 1, 2 have not answered for 20 s: rank 1 was last seen at the start of the run, "
        "before its first exchange;"
    )


def test_the_rank_furthest_behind_is_named_when_all_answer():
    line = said(note(7, 12), note(7, 11), note(6, 40, waiting=False), note(8, 1))
    assert line == (
        "rank 2 answers but is behind: for 30 s it has been at step 6, after all_gather of thing "
        f"40 (exchange 40); {WAITS} (train.timeout_seconds is 20: raise it if rank 2 is only slow "
        "there)"
    )


def test_a_rank_that_gave_up_counts_before_those_that_follow():
    line = said(note(7, 12), note(7, 11), note(7, 9, error="disk is full"), silent=(2, 1))
    assert line == (
        "rank 2 ended at step 7, in all_gather of thing 9 (exchange 9), with an error: disk is "
        f"full; {WAITS}"
    )


@pytest.mark.parametrize("other", [note(7, 12), note(7, 13)])
def test_where_nobody_is_missing_the_connection_failed(other):
    line = said(note(7, 12), other)
    assert line.startswith(WAITS) and line.endswith(
        "though all of them answer: it broke (train.timeout_seconds is 20)"
    )

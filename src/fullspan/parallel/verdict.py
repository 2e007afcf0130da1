"""From what ranks last said about themselves to the one line on which of them the others lost.

Pure functions over notes; taking and posting them is watch.py's.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple


class Note(NamedTuple):
    """What a rank is doing.

    phase      activities begun so far; the same on every rank that is as far
    activity   such as "step 7"
    entered    exchanges started in this activity
    number     the exchange that the rest is about, from 1; 0: none yet
    what       such as "reduce_scatter of the latent's gradient"
    waiting    inside of it, or past it
    since      when that began, in seconds since 1970
    error      why the rank gave up; "" if it did not
    """

    phase: int = 0
    activity: str = "the start of the run"
    entered: int = 0
    number: int = 0
    what: str = ""
    waiting: bool = False
    since: float = 0.0
    error: str = ""

    def place(self) -> str:
        if not self.number:
            return f"at {self.activity}, before its first exchange"
        return (
            f"at {self.activity}, {'in' if self.waiting else 'after'} {self.what} "
            f"(exchange {self.number})"
        )


class Post(NamedTuple):
    """A note as it was sent: the how-manieth, and when by the sender's clock."""

    beats: int
    at: float
    note: Note

    def to_json(self) -> str:
        return json.dumps([self.beats, self.at, *self.note])

    @classmethod
    def from_json(cls, text: str) -> "Post":
        beats, at, *note = json.loads(text)
        return cls(beats, at, Note(*note))


def verdict(
    rank: int,
    mine: Note,
    *,
    before: Mapping[int, Post],
    after: Mapping[int, Post],
    now: float,
    reason: str,
    timeout_seconds: float,
) -> str:
    """One line on the rank that `rank`, whose exchange failed for `reason`, waited for.

    before, after: the posts of all ranks, read some posts apart; a rank whose post is the same in
    both is silent. In this order: a rank that gave up, silent ranks, the rank furthest behind.
    """
    waits = f"rank {rank} waits {mine.place()}"
    limit = f"train.timeout_seconds is {timeout_seconds:g}"
    others = {other: post for other, post in after.items() if other != rank}
    failed = {other: post for other, post in others.items() if post.note.error}
    if failed:
        other = min(failed, key=lambda one: failed[one].at)
        note = failed[other].note
        return f"rank {other} ended {note.place()}, with an error: {note.error}; {waits}"
    silent = [r for r, post in others.items() if r in before and before[r].beats == post.beats]
    if silent:
        last = others[silent[0]]
        names = ", ".join(str(other) for other in silent)
        subject = f"rank {names} has" if len(silent) == 1 else f"ranks {names} have"
        return (
            f"{subject} not answered for {max(now - last.at, 0):.0f} s: rank {silent[0]} was last "
            f"seen {last.note.place()}; {waits} ({limit})"
        )
    behind = {
        other: (post.note.phase, post.note.entered)
        for other, post in others.items()
        if (post.note.phase, post.note.entered) < (mine.phase, mine.number)
    }
    if behind:
        other = min(behind, key=behind.__getitem__)
        note = others[other].note
        return (
            f"rank {other} answers but is behind: for {max(now - note.since, 0):.0f} s it has been "
            f"{note.place()}; {waits} ({limit}: raise it if rank {other} is only slow there)"
        )
    return (
        f"{waits}, where the connection between the ranks failed, though all of them answer: "
        f"{reason} ({limit})"
    )

"""Which packs a step sees. Leaves out how packs are made, and how they are shared out over ranks.

The order is a pure function of (seed, epoch, index), by sorting on a hash, so no generator state
has to be saved and no library version can change it. Every pack is drawn once an epoch; a step may
reach over the end of one.
"""

import hashlib

from fullspan.data.packing import Pack
from fullspan.errors import DataError


def epoch_order(count: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of range(count), the same on every machine."""

    def key(index: int) -> bytes:
        return hashlib.sha256(f"{seed} {epoch} {index}".encode()).digest()

    return sorted(range(count), key=key)


class PackLoader:
    """Endless steps of `microbatches` packs each.

    Take as many steps as are trained. `state` after a step says where the
    next one starts, and `load_state` on a loader of the same packs continues there exactly, also
    with another number of microbatches.
    """

    def __init__(self, packs: list[Pack], *, microbatches: int, shuffle: bool, seed: int) -> None:
        if not packs:
            raise DataError("no packs to load: data.path gave nothing to train on")
        if microbatches < 1:
            raise DataError(f"microbatches of a step: got {microbatches}, it must be at least 1")
        self.packs = packs
        self.microbatches = microbatches
        self.shuffle = shuffle
        self.seed = seed
        self.index = 0
        """packs drawn so far, over all epochs"""
        self._fingerprint = _fingerprint(packs)
        self._order: tuple[int, list[int]] = (-1, [])

    def pack_id(self, index: int) -> int:
        """Position in `packs` of the `index`-th pack drawn."""
        epoch, within = divmod(index, len(self.packs))
        if not self.shuffle:
            return within
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self.packs), seed=self.seed, epoch=epoch))
        return self._order[1][within]

    def next_step(self) -> list[Pack]:
        """The packs of the next step, `microbatches` of them."""
        start = self.index
        self.index += self.microbatches
        return [self.packs[self.pack_id(i)] for i in range(start, self.index)]

    def state(self) -> dict[str, int | str | bool]:
        """What a checkpoint keeps; plain JSON values."""
        return {
            "index": self.index,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "packs": len(self.packs),
            "fingerprint": self._fingerprint,
        }

    def load_state(self, state: dict[str, int | str | bool]) -> None:
        """Continues where `state` was taken. Raises DataError when data, seed or shuffle differ."""
        now = self.state()
        if set(state) != set(now):
            raise DataError(f"loader state: got keys {sorted(state)}, expected {sorted(now)}")
        for name in ("packs", "fingerprint", "seed", "shuffle"):
            if state[name] != now[name]:
                what = {"packs": "number of packs", "fingerprint": "content of the packs"}
                raise DataError(
                    f"cannot resume the data order: the {what.get(name, 'data.' + name)} was "
                    f"{state[name]} when the checkpoint was written and is {now[name]} now; "
                    "restore it, or start a new run"
                )
        index = state["index"]
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise DataError(f"loader state: index must be a whole number >= 0, got {index!r}")
        self.index = index


def _fingerprint(packs: list[Pack]) -> str:
    digest = hashlib.sha256()
    for pack in packs:
        for part in (pack.tokens, pack.labels, pack.cu_seqlens):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()[:16]

"""Inputs of recomputed layers in host memory between the forward and the backward pass.

On a GPU every input is copied into pinned memory while its layer runs, and copied back while the
layer after it runs backward, on a stream of their own. Host memory comes in pieces that are used
again, in the next step and for packs of any length. Elsewhere the same is done with plain copies.

Tensors that a copy reads or writes are held until the computing stream waits for that copy, so
their memory is handed on in the order of that stream. `record_stream` would hand it on when a copy
happens to be seen done: more memory, and another peak on every run.

Leaves out the layers' selections, which stay on the device (docs/planning.md says why).
"""

from pathlib import Path

import torch

from fullspan.errors import BackendError, TrainingError
from fullspan.shapes import Float, Tensor

PIECE_BYTES = 64 << 20  # a power of two: PyTorch rounds the size of pinned memory up to one
_SPARE_BYTES = 1 << 30  # of the machine's memory, left to others
_GIB = 1 << 30


class HostMemory:
    """Pieces of host memory, and the stream on which they are filled and read. That stream runs
    one copy after the other, so a piece can be given back as soon as its last copy is asked for."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device, self.allocated = device, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._piece_bytes = piece_bytes
        self._free: list[Tensor] = []

    def reserve(self, inputs: int, size: int) -> None:
        """Pin what `inputs` tensors of `size` bytes need, now and not in the first forward pass.

        Raises:
            BackendError: there is not that much.
        """
        missing = inputs * -(-size // self._piece_bytes) - len(self._free)
        if missing <= 0:
            return
        left = _available_bytes()
        if left is not None and left < missing * self._piece_bytes + _SPARE_BYTES:
            reason = f"the machine has {left / _GIB:.1f} GiB left"
            raise self._refusal(missing * self._piece_bytes, reason)
        self._free += [self._allocate() for _ in range(missing)]

    def take(self, size: int) -> list[Tensor]:
        """Pieces of `size` bytes together. Raises BackendError."""
        self.reserve(1, size)
        return [self._free.pop() for _ in range(-(-size // self._piece_bytes))]

    def give(self, pieces: list[Tensor]) -> None:
        """Pieces back for others."""
        self._free += pieces

    def copy(self, tensor: Tensor, pieces: list[Tensor], *, back: bool) -> torch.cuda.Event | None:
        """Start copying a contiguous tensor's bytes into pieces, or `back`; when that is done."""
        parts = tensor.view(-1).view(torch.uint8).split(self._piece_bytes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for part, piece in zip(parts, pieces, strict=True):
                here = piece[: len(part)]
                (part if back else here).copy_(here if back else part, non_blocking=True)
        if self._stream is None:
            return None
        done = torch.cuda.Event()
        done.record(self._stream)
        return done

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the computing stream wait for a copy; the host does not."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _allocate(self) -> Tensor:
        pinned = self._stream is not None
        try:
            piece = torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            raise self._refusal(self._piece_bytes, str(error).splitlines()[0]) from None
        self.allocated += self._piece_bytes
        return piece

    def _refusal(self, size: int, reason: str) -> BackendError:
        return BackendError(
            f"no {size / _GIB:.2f} GiB of host memory for layer inputs beside the "
            f"{self.allocated / _GIB:.2f} GiB that hold some: {reason}; every rank of a machine "
            "needs what `fullspan plan` says: set train.offload_inputs = false, lower "
            "data.pack_length or raise parallel.cp"
        )


class HostInput:
    """The input of one layer: on the device, on its way, or on the host.

    Args:
        before: the input of the layer before, which the backward pass needs next.
        stays: it does not leave the device.
    """

    def __init__(
        self, memory: HostMemory, tensor: Tensor, before: "HostInput | None", *, stays: bool
    ) -> None:
        self._memory, self._before = memory, before
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._tensor: Tensor | None = tensor.detach().contiguous()
        self._pieces: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None
        if not stays:
            self._pieces = memory.take(self._tensor.nbytes)
            self._copied = memory.copy(self._tensor, self._pieces, back=False)

    def leave(self) -> None:
        """Its layer has run: the device's memory is free once the copy is done."""
        if self._pieces:
            self._memory.wait(self._copied)
            self._copied = self._tensor = None

    def fetch(self) -> None:
        """Start the way back."""
        if self._tensor is None and self._pieces:
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._memory.device)
            self._copied = self._memory.copy(self._tensor, self._pieces, back=True)
            self._memory.give(self._pieces)
            self._pieces = []

    def take(self) -> Float[Tensor, "rows hidden"]:
        """The input, on the device; the one before it starts on its way.

        Raises:
            TrainingError: it was taken before.
        """
        self.fetch()
        if self._tensor is None:
            raise TrainingError(
                "a second backward pass through the same layer: its input is gone after the first "
                "one (setting train.offload_inputs)"
            )
        self._memory.wait(self._copied)
        tensor, self._tensor, self._copied = self._tensor, None, None
        if self._before is not None:
            self._before.fetch()
        return tensor

    def __del__(self) -> None:
        # Of a graph that nobody ran backward, or that failed on the way.
        self._memory.wait(self._copied)
        self._memory.give(self._pieces)


class HostInputs:
    """The inputs of one forward pass over `layers` layers, in their order."""

    def __init__(self, memory: HostMemory, layers: int) -> None:
        self._memory, self._left = memory, layers
        self._newest: HostInput | None = None

    def keep(self, tensor: Float[Tensor, "rows hidden"], *, wanted: bool) -> HostInput | None:
        """The next layer's input; not where the backward pass ends above the layer. That of the
        last layer is needed first, and stays."""
        self._left -= 1
        if not wanted:
            return None
        self._newest = HostInput(self._memory, tensor, self._newest, stays=self._left == 0)
        return self._newest


def _available_bytes() -> int | None:
    """What Linux says that can still be taken; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else None

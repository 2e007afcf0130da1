"""Random packs as the data loader makes them."""

from collections.abc import Callable, Sequence

import torch

from fullspan.data.packing import Document, Pack, build_pack


def random_documents(
    lengths: Sequence[int],
    *,
    vocab: int,
    seed: int = 0,
    trained: Callable[[int], bool] = lambda place: place % 3 != 1,
) -> list[Document]:
    """Documents of random tokens; `trained` says which places of a document are learned."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            tokens=torch.randint(0, vocab, (length,), generator=generator),
            trained=torch.tensor([trained(place) for place in range(length)]),
            source=f"document {index}",
        )
        for index, length in enumerate(lengths)
    ]


def packed(documents: Sequence[Document], length: int) -> Pack:
    """One pack of all of them, padded to `length` rows."""
    return build_pack(list(documents), length, 0)

"""Memory for a few windows only, as on a small GPU."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@contextlib.contextmanager
def room_for(n_windows: int) -> Iterator[list[int]]:
    """Forwards of more windows run out of it; gives the sizes of all that began."""
    sizes: list[int] = []
    embed = nn.Embedding.forward

    def checked(module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        sizes.append(len(ids))
        if len(ids) > n_windows:
            raise FULL
        return embed(module, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Embedding, "forward", checked)
        yield sizes

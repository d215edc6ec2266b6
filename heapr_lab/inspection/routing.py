"""Which experts the tokens of a passage are routed to."""

import pandas as pd
import torch
from torch import nn

from heapr_lab.inspection.passages import Passage, as_float64, observe, routed_experts
from heapr_lab.models.experts import find_experts


def routing(model: nn.Module, passage: Passage) -> pd.DataFrame:
    """The experts that each token of a text is routed to, in every layer.

    Args:
        model: the dense model.
        passage: the text, of at least two tokens.

    Returns:
        Columns layer, position, token, expert, p: for each token of each layer the
        routing weights of its experts, largest first.

    Raises:
        SpecError: the text has only one token.
    """
    layers = find_experts(model)
    observers = [_Routes() for _ in layers]
    observe(model, passage, layers, observers)
    frames = []
    for layer, observer in zip(layers, observers, strict=True):
        routes = observer.frame()
        routes.insert(0, "layer", layer.layer)
        frames.append(routes)
    frame = pd.concat(frames, ignore_index=True)
    texts = [passage.tokens[position] for position in frame["position"]]
    frame.insert(2, "token", texts)
    order = ["layer", "position", "p", "expert"]
    return frame.sort_values(
        order, ascending=[True, True, False, True], ignore_index=True
    )


class _Routes:
    """Records the expert of each routed row, and its routing weight."""

    def __init__(self) -> None:
        self.frames: list[pd.DataFrame] = []

    def observe(
        self, h: torch.Tensor, *, p: torch.Tensor, rows: torch.Tensor, tokens: list[int]
    ) -> None:
        """Record the routes of one call."""
        del h
        columns = {
            "position": rows.cpu(),
            "expert": routed_experts(tokens),
            "p": as_float64(p),
        }
        self.frames.append(pd.DataFrame(columns))

    def frame(self) -> pd.DataFrame:
        """Columns position, expert, p."""
        return pd.concat(self.frames)

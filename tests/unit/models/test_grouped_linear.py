"""Maps of routed tokens against loops over rows, forward and backward."""

import torch

from heapr_lab.models.grouped_linear import routed_linear, scattered_linear

T, D, WIDTH, E = 7, 5, 3, 4
GRADIENT = {"rtol": 0.03, "atol": 0.05}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random values with a gradient."""
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def test_a_token_without_rows_is_zero():
    """Routers that drop tokens have such tokens."""
    rows, tokens = torch.tensor([0, 2]), torch.tensor([1, 1])
    h, weight, p = leaf(2, WIDTH), leaf(2, D, WIDTH), leaf(2)
    total = scattered_linear(h, weight, p, rows=rows, tokens=tokens, n_tokens=3)
    assert (total[1] == 0).all()
    x = leaf(3, D)
    out = routed_linear(
        x,
        leaf(2, WIDTH, D),
        None,
        rows=rows,
        experts=torch.tensor([0, 1]),
        tokens=tokens,
    )
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert (grad[1] == 0).all()


def test_bfloat16_is_summed_in_single_precision():
    """Weights in bfloat16 and routing weights in float32, as under most routers.

    Each token goes to two experts; one of these has no rows.
    """
    rows, tokens = torch.arange(2 * T) % T, torch.tensor([5, 4, 0, 5])
    where = {"rows": rows, "tokens": tokens}
    experts = torch.arange(E).repeat_interleave(tokens)
    shapes = (T, D), (E, WIDTH, D), (E, D, WIDTH)
    given = [*(leaf(*shape, dtype=torch.bfloat16) for shape in shapes)]
    given.append(leaf(2 * T, dtype=torch.float32))
    results = []
    for leaves in (given, [t.detach().double().requires_grad_() for t in given]):
        x, up, down, p = leaves
        h = routed_linear(x, up, None, experts=experts, **where)
        total = scattered_linear(h, down, p, n_tokens=T, **where)
        results.append([h, total, *torch.autograd.grad(total.sum(), leaves)])
    got, exact = results
    assert (got[0].dtype, got[1].dtype) == (torch.bfloat16, torch.float32)
    for number, (value, true) in enumerate(zip(got, exact, strict=True)):
        close = {"rtol": 0.02, "atol": 0.02} if number < 2 else GRADIENT
        torch.testing.assert_close(value.double(), true, **close)

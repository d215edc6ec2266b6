"""Statistics of every atomic expert, and the scores computed from them.

One pass is enough. An atom adds e = w_down · h to its expert's output E (equations 5
and 6 of the paper), g = ∂ℓ/∂E is the same for all atoms of E (14), and with means over
the tokens routed to E

    ∂ℓ/∂h = w_downᵀ g                     h enters E as w_down · h and nowhere else
    Ḡ = mean g gᵀ                         of the expert (15)
    s̄ = mean ½ eᵀ Ḡ e                     the score of Algorithm 1 (16)
      = ½ · mean h² · w_downᵀ Ḡ w_down    w_down and Ḡ are the same for all tokens
      = ½ · mean h² · mean (∂ℓ/∂h)²       as w_downᵀ g gᵀ w_down = (∂ℓ/∂h)²

The paper accumulates Ḡ, d_model × d_model for each expert, in a forward and a backward
pass, and s̄ in a second forward pass. The last line needs two sums for each atom, of h²
and of (∂ℓ/∂h)², and one backward pass sees both. It is an identity, no approximation:
`tests/oracle/test_two_stage.py` compares it with Algorithm 1. g is taken before the
routing weight multiplies E, so it carries that weight.
"""

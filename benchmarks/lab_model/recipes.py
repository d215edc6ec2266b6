"""How the lab models are trained: sizes, texts and schedules of every run."""

from dataclasses import dataclass

MIXTURE = {
    "pydocs": 0.50,
    "wikitext2:tokenized": 0.18,
    "wikitext2": 0.07,
    "ptb": 0.10,
    "c4": 0.15,
}
"""Share of the training sequences drawn from each corpus, until the decay begins."""

DECAY_MIXTURE = {
    "pydocs": 0.70,
    "wikitext2:tokenized": 0.10,
    "wikitext2": 0.05,
    "ptb": 0.06,
    "c4": 0.09,
}
"""The shares while the learning rate decays: more of the model's main corpus."""


@dataclass(frozen=True)
class TrainSpec:
    """Everything that determines the lab model, its corpora aside."""

    family: str = "qwen2_moe"
    """qwen2_moe (one shared expert), qwen3_moe (none), deepseek_v2 (d_shared / d_inter
    of them), or gpt_oss (none, and biases)."""
    d_vocab: int = 4096
    d_model: int = 128
    d_inter: int = 96
    d_shared: int = 128
    n_layers: int = 8
    n_experts: int = 16
    top_k: int = 4
    n_heads: int = 4
    seq_len: int = 256
    batch_size: int = 8
    n_steps: int = 8000
    warmup_steps: int = 150
    decay_fraction: float = 0.5
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    balance_weight: float = 0.02
    decay_balance_weight: float = 0.1
    router_z_weight: float = 1e-3
    initializer_range: float = 0.02
    precision: str = "float32"
    """float32, or bfloat16 by autocast with float32 parameters."""
    seed: int = 0
    n_threads: int = 2

    @property
    def n_tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.n_steps * self.batch_size * self.seq_len


BUNDLED_RUNS = (
    TrainSpec(),
    TrainSpec(
        seed=1,
        n_steps=9000,
        learning_rate=2e-3,
        decay_fraction=0.7,
        precision="bfloat16",
    ),
)
"""The bundled model: a run, and a second one from its bfloat16 weights.

Source: Wen et al. 2024 (WSD-S): training resumes from a decayed checkpoint at a high
learning rate.
"""

UNBALANCED_RUNS = (
    TrainSpec(
        family="qwen3_moe",
        d_inter=128,
        n_layers=4,
        n_steps=5800,
        learning_rate=2e-3,
        balance_weight=0.0,
        decay_balance_weight=0.0,
        precision="bfloat16",
        n_threads=1,
    ),
)
"""Routers that no loss balances: a few experts get most tokens, some next to none."""

FINE_RUNS = (
    TrainSpec(
        family="deepseek_v2",
        d_inter=48,
        d_shared=96,
        n_layers=4,
        n_experts=64,
        top_k=6,
        n_steps=6800,
        learning_rate=2e-3,
        precision="bfloat16",
        n_threads=1,
    ),
)
"""Many small experts, two shared ones, a dense first layer, as in DeepSeekMoE."""

BIASED_RUNS = (
    TrainSpec(
        family="gpt_oss",
        n_layers=4,
        n_steps=4700,
        learning_rate=2e-3,
        precision="bfloat16",
        n_threads=1,
    ),
)
"""Experts with biases and a clamped activation, interleaved gate and up rows.

This model and the fine-grained one are for judging alone: nothing is tuned on them.
"""

UPCYCLED_RUNS = (
    TrainSpec(
        family="qwen3_moe",
        d_inter=128,
        n_layers=4,
        n_experts=1,
        top_k=1,
        n_steps=3000,
        learning_rate=2e-3,
        precision="bfloat16",
        n_threads=1,
    ),
    TrainSpec(
        family="qwen3_moe",
        d_inter=128,
        n_layers=4,
        n_steps=2800,
        learning_rate=1e-3,
        precision="bfloat16",
        n_threads=1,
        seed=1,
    ),
)
"""One dense expert a layer, copied into 16 with noise, and trained on.

Experts are alike then, which is what merging them needs.
"""

RECIPES = {
    "bundled": BUNDLED_RUNS,
    "unbalanced": UNBALANCED_RUNS,
    "fine": FINE_RUNS,
    "biased": BIASED_RUNS,
    "upcycled": UPCYCLED_RUNS,
}

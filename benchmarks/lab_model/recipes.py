"""How the lab models are trained: sizes, texts and schedules of every run."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


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


_DATA = tomllib.loads(Path(__file__).with_name("recipes.toml").read_text("utf-8"))
MIXTURE: dict[str, float] = _DATA["mixture"]
"""Share of the training sequences drawn from each corpus, until the decay begins."""
DECAY_MIXTURE: dict[str, float] = _DATA["decay_mixture"]
"""The shares while the learning rate decays."""
RECIPES = {
    name: tuple(TrainSpec(**run) for run in runs)
    for name, runs in _DATA["recipes"].items()
}
"""The runs of each lab model."""

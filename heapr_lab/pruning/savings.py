"""What a mask removes and saves: parameters, bytes, FLOPs, summed scores."""

from typing import Any

from heapr_lab.errors import SpecError
from heapr_lab.importance.table import ImportanceTable
from heapr_lab.pruning.masks import KeepMask

CONTEXT = 2048
"""Tokens of context that attention is counted at, unless others are asked for: the
length of the paper's windows."""


def at_context(seq_len: float) -> str:
    """The context length as text, wherever a count of operations is shown.

    Example:
        >>> at_context(2048)
        'at 2,048 tokens of context'
    """
    return f"at {seq_len:,.0f} tokens of context"


def savings_of(
    keep: KeepMask,
    table: ImportanceTable,
    *,
    seq_len: int = CONTEXT,
    source: Any = None,
) -> dict[str, Any]:
    """Parameters, bytes and operations per token, before and after pruning, by name.

    Bytes are an estimate: parameters times `bytes_per_parameter`, without the overhead
    of a file. `seq_len` and `bytes_per_parameter`, of the dense model, are there too.

    Args:
        keep: the kept atoms.
        table: the table `keep` was selected from; has architecture and routing.
        seq_len: tokens of context that attention is counted at.
        source: the files of the dense model, a `models.sources.Source`, for the size
            of a parameter there and when it is written; by default that in the measured
            model, which may have been loaded in a wider dtype.
    """
    model, tokens = table.architecture, table.expert_tokens()
    size = kept = float(model.bytes_per_parameter)
    if source is not None:
        size = source.bytes_per_parameter(model.n_parameters)
        kept = source.bytes_per_kept(model.n_parameters, keep.one_width)
    parameters = model.n_parameters, model.parameters(keep)
    flops = (
        model.flops_per_token(None, tokens, seq_len=seq_len),
        model.flops_per_token(keep, tokens, seq_len=seq_len),
    )
    return {
        "parameters_before": parameters[0],
        "parameters_after": parameters[1],
        "parameter_reduction": 1 - parameters[1] / parameters[0],
        "bytes_before": round(parameters[0] * size),
        "bytes_after": round(parameters[1] * kept),
        "bytes_per_parameter": size,
        "flops_before": flops[0],
        "flops_after": flops[1],
        "flops_reduction": 1 - flops[1] / flops[0],
        "routed_flops_reduction": model.routed_flops_saved(keep, tokens),
        "seq_len": seq_len,
    }


def summed_scores(
    table: ImportanceTable, keep: KeepMask, estimator: str, **options: Any
) -> float:
    """The summed score of the atoms that `keep` prunes: S.

    Args:
        table: the table that scores the atoms.
        keep: the kept atoms of the same model.
        estimator: a name in `estimators.ESTIMATORS`.
        **options: options of the estimator.

    Raises:
        SpecError: the mask is for another model.
    """
    if keep.shapes() != table.shapes():
        raise SpecError(
            f"the mask has (experts, atoms) by layer {keep.shapes()}, expected those "
            f"of the table, {table.shapes()}; select it from this table"
        )
    return float(table.scores(estimator, **options)[~keep.rows].sum())

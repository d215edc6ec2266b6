"""Canonical JSON, and its hash."""

import dataclasses
import hashlib
import json
import math
from typing import Any

from heapr_lab.errors import SpecError


def canonical_json(value: Any) -> str:
    """The unique JSON text of `value`: sorted keys, no spaces, dataclasses as objects.

    Raises:
        SpecError: a part of `value` is not plain data (or is NaN or infinite).

    Example:
        >>> canonical_json({"b": 1, "a": (1.5, None)})
        '{"a":[1.5,null],"b":1}'
    """
    try:
        return json.dumps(
            value,
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
            default=_plain,
        )
    except (TypeError, ValueError) as error:
        raise SpecError(f"cannot write {value!r} as JSON: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def without_nan(value: Any) -> Any:
    """`value` for JSON, which has no NaN or infinity: what was not measured is null.

    Example:
        >>> without_nan({"stderr": float("nan"), "losses": [1.5]})
        {'stderr': None, 'losses': [1.5]}
    """
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def digest(value: Any) -> str:
    """SHA-256 of `canonical_json(value)`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()

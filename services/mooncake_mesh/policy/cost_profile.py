"""A cost model as data: what was measured of one kind of instance, as JSON that people can read and edit."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields

from mooncake_mesh.policy.cost_fit import PolynomialCost

_FORMAT = "mooncake-mesh/cost/1"
_KINDS_FORMAT = "mooncake-mesh/cost/2"

DEFAULT_KIND = "default"


def dump_profile(cost: PolynomialCost) -> str:
    return json.dumps({"format": _FORMAT, **asdict(cost)}, indent=1) + "\n"


def load_profile(text: str) -> PolynomialCost:
    """Inverse of :func:`dump_profile`. Raises ValueError with the name of what is wrong.

    Profiles from before the disk had a price get its default.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"format: expected {_FORMAT!r}")
    names = [field.name for field in fields(PolynomialCost) if field.name in data or field.default is MISSING]
    for name in names:
        if isinstance(data.get(name), bool) or not isinstance(data.get(name), int | float):
            raise ValueError(f"{name}: expected a number")
    return PolynomialCost(**{name: float(data[name]) for name in names})


def dump_kinds(costs: Mapping[str, PolynomialCost]) -> str:
    """Profiles of several kinds of instances, by name."""
    kinds = {kind: asdict(cost) for kind, cost in sorted(costs.items())}
    return json.dumps({"format": _KINDS_FORMAT, "kinds": kinds}, indent=1) + "\n"


def load_kinds(text: str) -> dict[str, PolynomialCost]:
    """Inverse of :func:`dump_kinds`, at least one; a profile of :func:`dump_profile` is that of the default kind.

    Raises ValueError with the name of what is wrong.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _KINDS_FORMAT:
        return {DEFAULT_KIND: load_profile(text)}
    kinds = data.get("kinds")
    if not isinstance(kinds, dict) or not kinds:
        raise ValueError("kinds: expected an object with at least one kind")
    return {kind: _of_kind(kind, coefficients) for kind, coefficients in kinds.items()}


def _of_kind(kind: str, coefficients: object) -> PolynomialCost:
    if not isinstance(coefficients, dict):
        raise ValueError(f"{kind}: expected an object")
    try:
        return load_profile(json.dumps({**coefficients, "format": _FORMAT}))
    except ValueError as error:
        raise ValueError(f"{kind}.{error}") from error

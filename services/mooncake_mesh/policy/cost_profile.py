"""A cost model as data: what was measured of one kind of instance, as JSON that people can read and edit."""

import json
from dataclasses import MISSING, asdict, fields

from mooncake_mesh.policy.cost_fit import PolynomialCost

_FORMAT = "mooncake-mesh/cost/1"


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

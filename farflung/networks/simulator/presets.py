"""Conditions by name, and from files."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

from farflung.errors import UserError, suggestion
from farflung.networks.simulator.conditions import HEADERS, Conditions, Link, Site
from farflung.tables import from_table, toml_table

CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")

# For each city, its links to those after it: milliseconds, and gigabits a second of one connection, as measured
# between data centres for DT-FM (arXiv 2206.01288).
_MEASURED = (
    ((67, 0.79), (49, 1.10), (96, 0.523), (124, 0.46), (136, 0.42), (143, 0.404), (124, 0.482)),
    ((11, 1.12), (143, 0.524), (172, 0.5), (76, 1.16), (90, 1.02), (67, 1.05)),
    ((130, 0.694), (159, 0.529), (86, 1.05), (99, 0.799), (77, 1.14)),
    ((34, 1.10), (210, 0.366), (223, 0.36), (199, 0.465)),
    ((238, 0.342), (235, 0.358), (228, 0.335)),
    ((14, 1.14), (12, 1.09)),
    ((24, 1.08),),
)


def _measured(cities: tuple[str, ...]) -> tuple[Link, ...]:
    """The links between these cities, and 5 ms and 2 Gbit/s within each."""
    links = [Link((city, city), 5.0, 2000.0) for city in cities]
    for one, other in combinations(cities, 2):
        first, second = sorted((CITIES.index(one), CITIES.index(other)))
        latency, gbps = _MEASURED[first][second - first - 1]
        links.append(Link((one, other), float(latency), 1000.0 * gbps))
    return tuple(links)


def _sites(names: tuple[str, ...]) -> tuple[Site, ...]:
    return tuple(Site(name) for name in names)


_REGIONS = ("Virginia", "Frankfurt", "Tokyo")

PRESETS = {
    "same-rack": Conditions(bandwidth_mbps=25_000, latency_ms=0.05, headers=HEADERS),
    "two-data-centres": Conditions(
        bandwidth_mbps=10_000,
        latency_ms=0.2,
        headers=HEADERS,
        sites=_sites(("east", "west")),
        links=(Link(("east", "west"), 30.0, 1000.0, shared=True),),
    ),
    "three-regions": Conditions(
        bandwidth_mbps=10_000, headers=HEADERS, sites=_sites(_REGIONS), links=_measured(_REGIONS)
    ),
    "home": Conditions(
        bandwidth_mbps=200,
        up_mbps=20,
        latency_ms=40,
        bandwidth_sigma=0.5,
        latency_sigma=0.4,
        speed_sigma=0.3,
        step_sigma=0.1,
        slow_share=0.01,
        slow_factor=5,
        loss=0.005,
        headers=HEADERS,
    ),
    "world": Conditions(bandwidth_mbps=10_000, headers=HEADERS, sites=_sites(CITIES), links=_measured(CITIES)),
}
"""Conditions by name. `world` and `three-regions` are measured links; the others are typical of their kind."""


def conditions_named(name: str) -> Conditions:
    """A preset, or a TOML file's.

    A file has the fields of `Conditions`, and may say which `preset` it changes and which `links_file` it takes links
    from: comma-separated lines of from, to, latency_ms, bandwidth_mbps; sites that it does not list follow from these.
    Raises UserError.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.suffix and not path.is_file():
        raise UserError(f"there are no conditions {name!r}{suggestion(name, list(PRESETS))}; or give a TOML file")
    table = toml_table(path)
    preset, links_file = table.pop("preset", None), table.pop("links_file", None)
    if preset is not None and preset not in PRESETS:
        raise UserError(f"{path}: there is no preset {preset!r}{suggestion(str(preset), list(PRESETS))}")
    if links_file is not None:
        links = _links_of(path.parent / str(links_file))
        table["links"] = [*table.get("links", []), *links]
        names = dict.fromkeys(name for link in links for name in link["between"])
        table.setdefault("sites", [{"name": name} for name in names])
    if preset is not None:
        below = json.loads(json.dumps(dataclasses.asdict(PRESETS[preset])))  # with the lists that TOML has, not tuples
        table = {key: value for key, value in below.items() if value is not None} | table
    return from_table(Conditions, table, str(path))


def _links_of(path: Path) -> list[dict[str, Any]]:
    """The measured links of a file of comma-separated values."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; links_file is a path beside the conditions") from error
    links: list[dict[str, Any]] = []
    for number, row in enumerate(rows, start=2):
        try:
            latency, mbps = _finite(row["latency_ms"]), _finite(row["bandwidth_mbps"])
            links.append({"between": [row["from"], row["to"]], "latency_ms": latency, "bandwidth_mbps": mbps})
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{path}, line {number}: each line needs from, to, latency_ms, bandwidth_mbps under a first line of "
                "these names, and finite numbers"
            ) from error
    return links


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number

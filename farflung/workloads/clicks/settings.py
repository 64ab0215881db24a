"""What a recommender is trained from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from farflung.errors import UserError
from farflung.tables import BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting


@dataclass(frozen=True)
class ClicksSettings(Checked):
    """The recommender, and the clicks that it is trained on."""

    data: str = setting("synthetic", may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """synthetic, debian (does one package depend on another), or a path or glob of click logs: TSV or Parquet."""
    validation: str | None = setting(None, may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """A click log to judge the model by; unset: one in twenty of the data's clicks, which are held out."""
    label: str = setting("label", may_differ=BETWEEN_PEERS)
    """The column, 0 or 1, that says whether the click came, in logs whose columns have names."""
    numbers: str = setting("", may_differ=BETWEEN_PEERS)
    """Columns of numbers, with commas; the rest are categories. Unset: Criteo's 13, or a Parquet file's floats."""
    max_clicks: int | None = setting(None, least=100, may_differ=BETWEEN_PEERS)
    """Read at most this many clicks; unset: all, and 200,000 of the synthetic ones."""
    max_rows: int = setting(100_000, least=2)
    """Rows of a table at most; the most frequent categories have one each, the others share the unknown one."""
    width: int = setting(16, least=1)
    """Numbers in a row of a table."""
    hidden: int = setting(64, least=1)
    """Numbers in each hidden layer."""
    tables: Literal["copied", "dealt"] = "copied"
    """copied: each replica has all tables; dealt: each holds and trains some, and looks rows up in all."""
    crossing: str = "rows"
    """What crosses of dealt tables: rows, rows-int8, rows-int4, or a sample's largest values, as top12.5 (percent)."""
    eval_clicks: int = setting(20_000, least=2)
    """Held-out clicks, at most, that the model is judged by."""

    def __post_init__(self) -> None:
        """Raises UserError."""
        super().__post_init__()
        if not self.crossing:
            raise UserError("crossing is ''; say what crosses of dealt tables, such as rows")

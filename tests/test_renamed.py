"""Old names work for one version, and say what they are called now."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("farflung.networks", "PeerLost", "farflung.networks.PeerLostError"),
        ("farflung.networks", "Died", "farflung.networks.ReplicaDiedError"),
        ("farflung.networks", "OpenNetwork", "farflung.networks.ElasticNetwork"),
        ("farflung.networks", "State", "farflung.networks.SharedState"),
        ("farflung.networks", "among_the_living", "farflung.networks.among_members"),
        ("farflung.codecs", "NotFinite", "farflung.codecs.NotFiniteError"),
        ("farflung.outer", "Attached", "farflung.outer.Session"),
        ("farflung.outer", "SignSGD", "farflung.inner.SignSGD"),
        ("farflung.codecs", "Stage", "farflung.codecs.Transform"),
        ("farflung.codecs", "Apart", "farflung.codecs.SplitCodec"),
        ("farflung.codecs", "Float", "farflung.codecs.BlockFloat"),
        ("farflung.codecs", "Frequency", "farflung.codecs.BlockDCT"),
        ("farflung.outer", "Disagreement", "farflung.outer.DisagreementError"),
        ("farflung.outer", "Diverged", "farflung.outer.DivergedError"),
    ],
)
def test_old_names_still_work(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is called {new} now"):
        found = getattr(importlib.import_module(module), old)
    assert found is getattr(importlib.import_module(home), name)


def test_names_that_never_were_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Colander'"):
        _ = importlib.import_module("farflung.networks").Colander

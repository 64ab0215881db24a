"""Old names work for one version, and say what they are called now."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch

from farflung import methods
from farflung.codecs import codec_named
from farflung.networks import SimulatedNetwork


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("farflung.networks", "PeerLost", "farflung.networks.PeerLostError"),
        ("farflung.networks", "Died", "farflung.networks.ReplicaDiedError"),
        ("farflung.networks", "OpenNetwork", "farflung.networks.ElasticNetwork"),
        ("farflung.networks", "State", "farflung.networks.SharedState"),
        ("farflung.networks", "among_the_living", "farflung.networks.among_members"),
        ("farflung.methods", "settings_of", "farflung.methods.defaults_of"),
        ("farflung.networks.internet", "Seat", "farflung.networks.listening.ListenAddress"),
        ("farflung.networks.internet", "introduction", "farflung.networks.internet.newcomer_info"),
        ("farflung.codecs", "NotFinite", "farflung.codecs.NotFiniteError"),
        ("farflung.codecs", "Stage", "farflung.codecs.Transform"),
        ("farflung.codecs", "Apart", "farflung.codecs.SplitCodec"),
        ("farflung.codecs", "Float", "farflung.codecs.BlockFloat"),
        ("farflung.codecs", "Frequency", "farflung.codecs.BlockDCT"),
        ("farflung.methods", "dct", "farflung.methods.dynamic_threshold"),
        ("farflung.outer", "Attached", "farflung.outer.Session"),
        ("farflung.outer", "GossipApart", "farflung.outer.SplitGossip"),
        ("farflung.outer", "Anchored", "farflung.outer.ParameterAveraging"),
        ("farflung.outer", "SignSGD", "farflung.inner.SignSGD"),
        ("farflung.outer", "Disagreement", "farflung.outer.DisagreementError"),
        ("farflung.outer", "Diverged", "farflung.outer.DivergedError"),
    ],
)
def test_old_names_still_work(module: str, old: str, new: str) -> None:
    home, _, name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is called {new} now"):
        found = getattr(importlib.import_module(module), old)
    assert found is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (lambda name: methods.RECIPES[name](), "dct", "dynamic-threshold"),
        (lambda name: methods.chosen(methods.RoundSettings(method=name)), "dct", "dynamic-threshold"),
        (codec_named, "frequency", "block-dct"),
        (codec_named, "ef-frequency-topk5", "ef-block-dct-topk5"),
    ],
)
def test_old_names_in_settings_still_work(make: Callable[[str], object], old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=r"is called (dynamic-threshold|block-dct) now"):
        found = make(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = make(new)
    assert repr(found) == repr(wanted)


def test_names_that_never_were_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Colander'"):
        _ = importlib.import_module("farflung.networks").Colander


def test_the_old_name_of_a_method_still_works() -> None:
    model = torch.nn.Linear(2, 1)
    outer = methods.diloco().attach(model, torch.optim.SGD(model.parameters(), lr=0.1), SimulatedNetwork.alone())
    with pytest.warns(DeprecationWarning, match="land is called apply_pending now"):
        outer.land()

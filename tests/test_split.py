"""Dividing models: pieces that are the whole, balance, routes and layouts, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from families import COMMON, FAMILIES, ROUTED, cut, gpt2, opt
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BambaConfig, BloomConfig, DogeConfig, GraniteConfig, LlamaConfig, PretrainedConfig

from farflung.errors import UserError
from farflung.pipeline import Mesh
from farflung.pipeline.balance import spans
from farflung.pipeline.check import check, refuse_other_weights
from farflung.pipeline.mesh import whole_replicas
from farflung.pipeline.routes import fixed_routes, random_routes
from farflung.pipeline.settings import IslandShape
from farflung.settings import Settings
from farflung.workloads import models, tokenizers
from farflung.workloads.base import Load
from farflung.workloads.decoder import Piece, keep
from farflung.workloads.settings import LanguageSettings


def pieces(config: PretrainedConfig, count: int) -> list[Piece]:
    made = []
    for span in cut(config, count):
        model = models.outline(config)
        keep(model, span)
        models.materialise(model, seed=3)
        made.append(Piece(model.train(), span))
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_in_a_row_are_the_whole_model(name: str) -> None:
    whole = models.outline(FAMILIES[name])
    models.materialise(whole, seed=3)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
    models.sequence_loss(whole.train(), tokens).backward()

    parts = pieces(FAMILIES[name], 3)
    passing = tokens
    for part in parts:
        passing = part(passing)
    parts[-1].model.loss_function(logits=passing, labels=tokens, vocab_size=256).backward()

    found: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for key, parameter in part.model.named_parameters():
            found.setdefault(key, []).append(parameter)
    expected = dict(whole.named_parameters())
    assert found.keys() == expected.keys()
    for key, copies in found.items():
        # Only what a tied head is a copy of is there twice, and what both copies have got is the whole's gradient.
        assert len(copies) == 1 or (("tied" in name or name in ("opt", "gpt2")) and len(copies) == 2)
        assert all(torch.equal(copy, expected[key]) for copy in copies)
        gradient = sum(copy.grad for copy in copies)
        torch.testing.assert_close(gradient, expected[key].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTED)
def test_pieces_in_a_row_train_their_routers_as_the_whole_model_does(name: str) -> None:
    """The family's own loss pools what routers choose over all layers, so it is no sum over pieces."""
    whole = models.outline(ROUTED[name])
    models.materialise(whole, seed=3)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = whole.train()(input_ids=tokens, labels=tokens).loss
    expected.backward()

    parts = pieces(ROUTED[name], 5)
    passing: tuple[torch.Tensor, ...] = (tokens,)
    for part in parts:
        passing = part(*passing)
    loss = parts[-1].loss(passing, tokens)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for part in parts:
        for key, parameter in part.model.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(key).grad, atol=1e-6, rtol=1e-5)

    passing = (tokens,)
    with torch.no_grad():
        plain = whole.eval()(input_ids=tokens).logits
        for part in parts:
            passing = (part.eval()(*passing),)
    entropy = torch.nn.functional.cross_entropy(plain[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    for loss in (parts[-1].loss(passing[0], tokens), models.sequence_loss(whole, tokens)):
        torch.testing.assert_close(loss, entropy)


def test_a_piece_holds_its_share_only() -> None:
    sizes = [sum(p.numel() for p in piece.model.parameters()) for piece in pieces(FAMILIES["llama"], 3)]
    whole = sum(p.numel() for p in models.outline(FAMILIES["llama"]).parameters())
    assert sum(sizes) == whole and max(sizes) < 0.5 * whole


ROUTED_OTHERWISE = DogeConfig(**COMMON, is_moe=True, num_experts=16, num_experts_per_tok=4, output_router_logits=True)
OTHER_LAYERS = BambaConfig(**COMMON | {"num_hidden_layers": 3}, attn_layer_indices=[0, 1, 2], mamba_n_heads=4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (opt(word_embed_proj_dim=16), "OPTForCausalLM cannot be split into stages: whether its project_out"),
        (GraniteConfig(**COMMON, embedding_multiplier=3.0), "GraniteForCausalLM .* it changes what passes between"),
        (BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=256), "word_embeddings_layernorm belongs before"),
        (LlamaConfig(**COMMON | {"num_hidden_layers": 2}), "3 pieces of a model that has only 2 layers"),
        (ROUTED_OTHERWISE, "DogeForCausalLM has a router loss that is not known to be the same in stages"),
        (OTHER_LAYERS, "BambaForCausalLM cannot be split .* its decoder cannot do without its layers"),
    ],
)
def test_a_model_that_cannot_be_split_says_why(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        cut(config, 3)


LOADS = st.builds(Load, st.floats(0.01, 10), st.floats(0.01, 10))


@given(st.lists(LOADS, min_size=1, max_size=7), LOADS, LOADS, st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_the_largest_share_is_the_least_possible(costs: list[Load], before: Load, after: Load, count: int) -> None:
    if count > len(costs):
        with pytest.raises(UserError, match="only"):
            spans(costs, before, after, count)
        return

    def worst(cuts: tuple[int, ...]) -> float:
        shares = []
        for kind in (0, 1):
            sums = [sum(load[kind] for load in costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))]
            sums[0] += before[kind]
            sums[-1] += after[kind]
            shares.append(max(sums) / sum(sums))
        return max(shares)

    best = min(worst(cuts) for cuts in itertools.combinations(range(1, len(costs)), count - 1))
    found = spans(costs, before, after, count)
    assert [span.begin for span in found[1:]] == [span.end for span in found[:-1]]
    assert (found[0].begin, found[-1].end, found[0].first, found[-1].last) == (0, len(costs), True, True)
    assert all(span.begin < span.end for span in found)
    assert worst(tuple(span.end for span in found[:-1])) == pytest.approx(best)


@given(st.integers(1, 6), st.integers(0, 99), st.integers(0, 50), st.integers(0, 8), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_routes_lead_back_the_way_they_came(replicas: int, seed: int, step: int, microbatch: int, length: int) -> None:
    routes = random_routes(replicas, seed, step)
    origins = []
    for start in range(replicas):
        replica = start
        for boundary in range(length):
            onward = routes.onward(replica, microbatch, boundary)
            assert routes.back(onward, microbatch, boundary) == replica
            replica = onward
        assert routes.origin(replica, microbatch, length) == start
        origins.append(replica)
    assert sorted(origins) == list(range(replicas))  # nobody's piece gets two microbatches at once


def test_routes_differ_by_step_microbatch_boundary_and_seed() -> None:
    seen = {
        random_routes(16, seed, step).permutation(microbatch, boundary)
        for seed in (0, 1)
        for step in (0, 1)
        for microbatch in (0, 1)
        for boundary in (0, 1)
    }
    assert len(seen) == 16
    assert random_routes(16, 0, 5).permutation(3, 1) == random_routes(16, 0, 5).permutation(3, 1)
    assert fixed_routes(3).permutation(7, 1) == (0, 1, 2)


@given(st.lists(st.builds(IslandShape, st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_every_process_has_one_place(shapes: list[IslandShape]) -> None:
    mesh = Mesh(tuple(shapes))
    places = [mesh.coordinates(process) for process in range(mesh.processes)]
    assert len({mesh.file_stem(place) for place in places}) == sum(shape.stages * shape.shards for shape in shapes)
    assert [process for island in mesh.islands for process in island] == list(range(mesh.processes))
    for process, coordinates in enumerate(places):
        assert mesh.process(coordinates.replica, coordinates.stage, coordinates.shard) == process
        assert mesh.islands[coordinates.replica] == mesh.island_group(coordinates)
        assert mesh.island_group(coordinates)[mesh.part(coordinates)] == process
        assert mesh.pipeline_group(coordinates)[coordinates.stage] == process
        assert mesh.shard_group(coordinates)[coordinates.shard] == process


BASE = Settings.of(model="tiny", replicas=2, stages=2, batch_size=8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stages": 5}, "batch_size is 8, which 1 shard × 10 microbatches do not divide"),
        ({"stages": 5, "batch_size": 10}, "5 pieces of a model that has only 4 layers"),
        ({"stages": 4, "pipeline_schedule": "interleaved"}, "8 pieces of a model that has only 4 layers"),
        ({"shard": 3}, "batch_size is 8, which 3 shards × 4 microbatches"),
        ({"microbatches": 1}, "microbatches is 1, too few to fill 2 stages"),
        ({"microbatches": 5, "batch_size": 10, "pipeline_schedule": "zero-bubble"}, "choose a multiple of 2"),
        ({"stages": 1, "routes": "random"}, "routes is 'random', but one stage has no boundary"),
        ({"stages": 1, "boundary": "int8"}, "boundary is 'int8', but one stage has no boundary"),
        ({"boundary": "ef-int8"}, "remembers or measures its messages"),
        ({"boundary": "threshold1"}, "remembers or measures its messages"),
        ({"boundary": "modulo4"}, "remembers or measures its messages"),
        ({"boundary": "int9"}, "choose one of float32, bfloat16"),
        ({"boundary": "subspace0"}, "at least 1 dimension"),
        ({"boundary": "subspace129"}, "more dimensions than the model's 128"),
        ({"pipeline_schedule": "zero-bubble", "shard": 2}, "would train shards wrongly"),
        ({"pipeline_schedule": "zero-bubble", "offload": True}, "would train shards wrongly"),
        ({"islands": "1x1 2x1"}, "islands says the stages and shards of each replica; leave out --stages and --shard"),
        ({"stages": 1, "islands": "1x1 2*1"}, "islands is '1x1 2.1'; give stages x shards of each replica, such as"),
        ({"stages": 1, "islands": ""}, "islands is ''; give stages x shards of each replica"),
        ({"stages": 1, "islands": "1x0 1x1"}, "give stages x shards of each replica"),
        ({"stages": 1, "islands": "1x1 5x1"}, "batch_size is 8, which 1 shard × 10 microbatches do not divide"),
        ({"stages": 1, "islands": "1x1 1x2", "boundary": "int8"}, "boundary is 'int8', but one stage has no boundary"),
        ({"stages": 1, "islands": "1x1 2x1", "routes": "random"}, "'random', which needs islands of one shape"),
        ({"stages": 1, "islands": "1x1 2x1", "boundary": "subspace8"}, "the stages decide which weights exist"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(changes: dict[str, object], reason: str) -> None:
    settings = BASE.changed(**changes)
    with pytest.raises(UserError, match=reason):
        check(settings.island, settings.made_workload(), seed=0)


def test_a_run_may_go_on_with_other_stages_unless_they_decide_which_weights_there_are() -> None:
    subspace = BASE.changed(boundary="subspace8")
    refuse_other_weights(BASE.island, BASE.changed(stages=4, microbatches=4).island)
    refuse_other_weights(subspace.island, subspace.changed(shard=2).island)
    with pytest.raises(UserError, match="boundary subspace8 decides which weights"):
        refuse_other_weights(subspace.island, subspace.changed(stages=4).island)
    with pytest.raises(UserError, match="boundary subspace4 decides which weights"):
        refuse_other_weights(BASE.island, BASE.changed(boundary="subspace4").island)


def test_islands_have_shapes_of_their_own() -> None:
    settings = BASE.changed(stages=1, islands="1x1, 2x1", boundary="int8")
    check(settings.island, settings.made_workload(), seed=0)
    one, two = (settings.island.of(shape) for shape in settings.island.shapes())
    assert (one.stages, one.boundary, two.stages, two.boundary) == (1, "float32", 2, "int8")
    assert whole_replicas(3, settings.island) == 2
    with pytest.raises(UserError, match="islands 1x1, 2x1 are 3 processes together, and 4 are started; start 3"):
        whole_replicas(4, settings.island)
    with pytest.raises(UserError, match="islands names 2 replicas, and replicas is 3"):
        settings.changed(replicas=3).mesh()


def test_processes_that_make_no_whole_replicas_are_refused() -> None:
    island = BASE.changed(shard=2).island
    assert whole_replicas(8, island) == 2
    with pytest.raises(UserError, match="6 processes cannot be replicas of 2 stages × 2 shards; start a multiple of 4"):
        whole_replicas(6, island)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_published_weights_are_read_piece_by_piece(name: str, tmp_path: Path) -> None:
    config = gpt2() if name == "gpt2" else FAMILIES[name]
    published = models.outline(config)
    models.materialise(published, seed=9)
    published.save_pretrained(tmp_path)
    settings = LanguageSettings(model=str(tmp_path), pretrained=True, sequence_length=32)
    for span in cut(config, 2):
        model = models.build(settings, tokenizers.load("bytes"), 0, lambda model, span=span: keep(model, span))
        own = dict(model.named_parameters())
        theirs = dict(published.named_parameters())
        assert own.keys() < theirs.keys()
        assert all(torch.equal(own[key], theirs[key]) for key in own)

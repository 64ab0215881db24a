"""Data, tokenizers and models, on small folders made here."""

import errno
import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from own_files import TEXTS, write_model, write_tokenizer

from farflung.errors import UserError
from farflung.pipeline.division import divisible
from farflung.workloads import Language, data, models, tokenizers
from farflung.workloads.chat_store import Chat
from farflung.workloads.clicks.files import paths_of
from farflung.workloads.dealing import Deal
from farflung.workloads.images.folder import Folder
from farflung.workloads.prepared import make
from farflung.workloads.settings import LanguageSettings
from farflung.workloads.text import documents


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    folder = str(tmp_path_factory.mktemp("model"))
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=64)).save_pretrained(folder)
    return folder


def write_all_kinds(folder: Path) -> dict[str, Path]:
    import pyarrow as pa
    import pyarrow.parquet

    (folder / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (folder / "texts" / f"{i:03}.txt").write_text(text)
    lines = "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS))
    (folder / "rows.jsonl").write_text(lines + "\n")
    pa.parquet.write_table(pa.table({"id": range(60), "text": TEXTS}), folder / "rows.parquet")
    (folder / "rows.csv").write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(TEXTS)))
    return {"folder": folder / "texts"} | {kind: folder / f"rows.{kind}" for kind in ("jsonl", "parquet", "csv")}


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    for name, path in write_all_kinds(tmp_path).items():
        assert list(documents(str(path), "text")) == TEXTS, name
    assert list(documents(str(tmp_path / "texts" / "00*.txt"), "text")) == TEXTS[:10]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.csv", "x.parquet", "x.txt"])
def test_a_file_without_rows_among_others_has_no_documents(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    if name == "x.parquet":
        pa.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith("gz") else b"")
    assert [text for text in documents(str(tmp_path), "text") if text] == ["one", "two"]
    with pytest.raises(UserError, match=r"the file is empty|holds no text"):
        data.load(LanguageSettings(data=str(tmp_path / name)), tokenizers.Bytes())


def test_a_mark_at_the_begin_of_a_text_is_not_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("caf\u00e9\r\n", encoding="utf-8-sig", newline="")
    assert list(documents(str(tmp_path / "a.txt"), "text")) == ["caf\u00e9\r\n"]


def test_the_standard_library_is_real_python_in_a_fixed_order() -> None:
    seen = list(documents("stdlib", "text"))
    assert len(seen) > 300 and seen == list(documents("stdlib", "text"))
    assert sum("\ndef " in text for text in seen) > 200


def drawn(loaded: data.Data, step: int, size: int) -> torch.Tensor:
    return loaded.batch(Deal().ids(0, 0, step, size, loaded.available))


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": chr(200 + i) * 40}) for i in range(100)))
    loaded = data.load(LanguageSettings(data=str(path), sequence_length=8), tokenizers.Bytes())
    held_out = loaded.held_out(1000)
    sequences = {tuple(row) for step in range(200) for row in drawn(loaded, step, 50).tolist()}
    assert len(sequences) > 150 and 10 <= len(held_out) <= 150
    assert not sequences & {tuple(row) for row in held_out.tolist()}


def test_few_documents_hold_out_the_end_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a" * 950 + "b" * 50)
    loaded = data.load(LanguageSettings(data=str(path), sequence_length=10), tokenizers.Bytes())
    assert set(loaded.held_out(99).flatten().tolist()) <= {ord("b"), 0}
    assert set(drawn(loaded, 0, 99).flatten().tolist()) == {ord("a")}


def test_max_tokens_stops_reading(tmp_path: Path) -> None:
    path = write_all_kinds(tmp_path)["jsonl"]
    loaded = data.load(LanguageSettings(data=str(path), sequence_length=8, max_tokens=1000), tokenizers.Bytes())
    assert loaded._training.tokens + loaded._held_out.tokens == 1000


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["no such file", "stdlib"]),
        ("", ["the file is empty; give one with text in it"]),
        ("\n\ufeffwide".encode("utf-16"), ["UTF-16", "iconv -f UTF-16 -t UTF-8"]),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", ["the file is binary", "'*.txt'"]),
        ("short", ["fewer than one sequence of 128", "sequence_length"]),
    ],
)
def test_bad_text_is_refused(tmp_path: Path, content: str | bytes | None, words: list[str]) -> None:
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if not content:
        with pytest.raises(UserError, match=words[0]):
            Language(LanguageSettings(data=str(path))).check()
    with pytest.raises(UserError) as error:
        data.load(LanguageSettings(data=str(path)), tokenizers.Bytes())
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in [str(path), *words])


def test_bad_rows_are_refused(tmp_path: Path) -> None:
    wrong_column, broken = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    wrong_column.write_text('{"body": "text"}\n')
    broken.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="no column 'text'; set text_column to one of body"):
        list(documents(str(wrong_column), "text"))
    with pytest.raises(UserError, match=r"b\.parquet: cannot be read"):
        list(documents(str(broken), "text"))
    with pytest.raises(UserError, match="hf:no/such"):
        list(documents("hf:no/such", "text"))


def test_bytes_go_there_and_back() -> None:
    text = "naïve café\n"
    tokens = tokenizers.Bytes().encode(text)
    assert tokenizers.Bytes().decode(tokens.tolist()) == text


@pytest.fixture(scope="module")
def saved_bytes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = str(tmp_path_factory.mktemp("bytes"))
    tokenizers.Bytes().save(folder)
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=300)
@given(text=st.text(), tokens=st.lists(st.integers(0, 255)))
@example(text="\0Ā Ġ<s></s>  \r\n🎉", tokens=[0xE2, 0x82, 0x41, 0, 0xF0, 0x9F, 0x98, 0xC0, 0x80, 0xED, 0xA0, 0x80])
def test_others_load_bytes_as_a_tokenizer_of_the_same_tokens(saved_bytes: Any, text: str, tokens: list[int]) -> None:
    ours = tokenizers.Bytes()
    assert saved_bytes(text)["input_ids"] == ours.encode(text).tolist()
    assert saved_bytes.decode(tokens) == ours.decode(tokens)
    assert len(saved_bytes) == ours.size and saved_bytes.eos_token_id == saved_bytes.bos_token_id == ours.end
    assert saved_bytes.decode(tokens, skip_special_tokens=True) == ours.decode(
        [one for one in tokens if one != ours.end]
    )


def test_a_trained_tokenizer_is_loaded_and_saved(trained_tokenizer: str, tmp_path: Path) -> None:
    tokenizer = tokenizers.load(trained_tokenizer)
    assert tokenizer.size <= 120 and tokenizer.end == 1
    assert tokenizer.decode(tokenizer.encode("quick fox").tolist()).replace(" ", "") == "quickfox"
    tokenizer.save(str(tmp_path))
    again = tokenizers.load(str(tmp_path))
    assert np.array_equal(again.encode(TEXTS[7]), tokenizer.encode(TEXTS[7]))


def test_a_preset_takes_the_tokenizers_vocabulary(trained_tokenizer: str) -> None:
    config = LanguageSettings(tokenizer=trained_tokenizer, data="unused")
    model = models.build(config, tokenizers.load(trained_tokenizer), 0)
    assert model.config.vocab_size == tokenizers.load(trained_tokenizer).size
    assert type(model).__name__ == "LlamaForCausalLM"


def test_presets_have_the_papers_sizes() -> None:
    def parameters(name: str, vocabulary: int) -> int:
        from transformers import AutoModelForCausalLM

        class Large(tokenizers.Bytes):
            size = vocabulary

        with torch.device("meta"):
            return sum(
                p.numel()
                for p in AutoModelForCausalLM.from_config(
                    models.model_config(LanguageSettings(model=name), Large())
                ).parameters()
            )

    assert parameters("tiny", 256) == 869_504
    assert parameters("llama-125m", 32_000) == pytest.approx(125e6, rel=0.1)
    assert parameters("llama-1.3b", 32_000) == pytest.approx(1.3e9, rel=0.05)
    assert parameters("llama-6.8b", 32_000) == pytest.approx(6.8e9, rel=0.02)


def test_a_saved_model_is_built_with_or_without_its_weights(saved_model: str) -> None:
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(saved_model).state_dict()
    config = LanguageSettings(model=saved_model, sequence_length=64)
    fresh = models.build(config, tokenizers.Bytes(), 0).state_dict()
    warm = models.build(
        LanguageSettings(model=saved_model, sequence_length=64, pretrained=True), tokenizers.Bytes(), 0
    ).state_dict()
    name = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(warm[name], original[name]) and not torch.equal(fresh[name], original[name])
    assert torch.equal(fresh[name], models.build(config, tokenizers.Bytes(), 0).state_dict()[name])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/no/such/folder"}, ["/no/such/folder", "tiny"]),
        ({"model": "tiny", "pretrained": True}, ["preset", "leave out --pretrained"]),
        ({"model": "SAVED", "sequence_length": 65}, ["sequence_length is 65", "at most 64"]),
    ],
)
def test_bad_models_are_refused(saved_model: str, settings: dict[str, Any], words: list[str]) -> None:
    settings = {key: saved_model if value == "SAVED" else value for key, value in settings.items()}
    with pytest.raises(UserError) as error:
        models.model_config(LanguageSettings(**settings), tokenizers.Bytes())
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("config.toml", "is a run; export its model first"),
        ("adapter_config.json", "is an adapter alone; export its run"),
    ],
)
def test_a_run_and_an_adapter_alone_are_no_models(file: str, told: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(UserError, match=told):
        models.model_config(LanguageSettings(model=str(tmp_path)), tokenizers.Bytes())


def test_a_family_without_first_values_for_all_weights_is_refused(tmp_path: Path) -> None:
    """Memory that nobody has written to would be its weights, other ones in each process."""
    from transformers import ApertusConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    ApertusConfig(**sizes, vocab_size=260, pad_token_id=0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no first value for its model.layers.0.mlp.act_fn.alpha_p"):
        models.build(LanguageSettings(model=str(tmp_path), sequence_length=32), tokenizers.load("bytes"), 0)


def test_a_model_that_sees_or_repeats_what_it_is_to_predict_is_refused() -> None:
    """Their losses fall as if they learned much."""
    from transformers import BartConfig, BertConfig, PretrainedConfig

    def checked(config: PretrainedConfig) -> None:
        model = models.outline(config)
        models.materialise(model, seed=0)
        models.check_causal(model.train())
        assert model.training

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    checked(BertConfig(**sizes, vocab_size=260, is_decoder=True))
    with pytest.raises(UserError, match="BertLMHeadModel sees the tokens that it is to predict"):
        checked(BertConfig(**sizes, vocab_size=260))
    with pytest.raises(UserError, match="BartForCausalLM has a loss that is least when it repeats"):
        checked(BartConfig(vocab_size=260, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64))


def test_a_tokenizer_larger_than_the_model_is_refused(saved_model: str) -> None:
    class Large(tokenizers.Bytes):
        size = 257

    with pytest.raises(UserError, match=r"257 tokens but model .* only 256"):
        models.model_config(LanguageSettings(model=saved_model, sequence_length=64), Large())


@pytest.fixture(scope="module")
def model_with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("published")))


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_models_own_tokenizer_is_the_default(
    model_with_tokenizer: str, trained_tokenizer: str, pretrained: bool
) -> None:
    settings = LanguageSettings(model=model_with_tokenizer, pretrained=pretrained)
    own, same = Language(settings).tokenizer, tokenizers.load(trained_tokenizer)
    assert np.array_equal(own.encode(TEXTS[3]), same.encode(TEXTS[3]))
    assert isinstance(Language(replace(settings, tokenizer=trained_tokenizer)).tokenizer, tokenizers.Pretrained)
    other = replace(settings, tokenizer="bytes")
    if pretrained:
        with pytest.raises(UserError, match=r"tokenizer bytes is not the one .* leave out --tokenizer, or add --force"):
            _ = Language(other).tokenizer
    assert isinstance(Language(replace(other, force_tokenizer=pretrained)).tokenizer, tokenizers.Bytes)


def test_published_weights_without_their_tokenizer_are_refused_unless_they_read_bytes(
    saved_model: str, tmp_path: Path
) -> None:
    from transformers import GPT2Config

    assert isinstance(Language(LanguageSettings(model=saved_model, pretrained=True)).tokenizer, tokenizers.Bytes)
    GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64).save_pretrained(tmp_path)
    assert isinstance(Language(LanguageSettings(model=str(tmp_path))).tokenizer, tokenizers.Bytes)
    with pytest.raises(UserError, match="no tokenizer with it, and 300 tokens are not bytes; give the one"):
        _ = Language(LanguageSettings(model=str(tmp_path), pretrained=True)).tokenizer


def test_a_missing_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer '/no/such'"):
        tokenizers.load("/no/such")


def test_whether_a_model_can_be_divided_is_told_without_reading_data() -> None:
    workload = Language(LanguageSettings(data="there/is/none"))
    assert divisible(workload) is workload
    with pytest.raises(UserError, match="none"):
        workload.sample_ids(0, 0, 0, 1)


def test_a_run_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "replica-0.jsonl").write_text('{"text": "no"}\n')
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(UserError, match="this is a run of farflung, and holds no text"):
        next(documents(str(tmp_path), "text"))


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl"])
def test_zstandard_needs_no_further_package(tmp_path: Path, name: str) -> None:
    import pyarrow as pa

    lines = b'{"text": "one"}\n{"text": "two"}\n'
    packed = [pa.compress(part, "zstd", asbytes=True) for part in (lines[:16], lines[16:])]
    (tmp_path / f"{name}.zst").write_bytes(b"".join(packed))  # of several frames, as zstd -T0 and cat write
    texts = list(documents(str(tmp_path / f"{name}.zst"), "text"))
    assert texts == ([lines.decode()] if name == "a.txt" else ["one", "two"])
    (tmp_path / f"{name}.zst").write_bytes(packed[0] + packed[1][:-4])
    with pytest.raises(UserError, match="cannot be read"):
        list(documents(str(tmp_path / f"{name}.zst"), "text"))


def test_bytes_that_are_no_utf8_are_told_once_for_all_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes("für über\n".encode("latin-1"))
    (tmp_path / "3.txt").write_text("für")
    with pytest.warns(UserWarning) as told:
        texts = list(documents(str(tmp_path), "text"))
    assert texts == 3 * ["f\ufffdr \ufffdber\n"] + ["für"]
    assert len(told) == 1
    for words in (str(tmp_path / "0.txt"), "and 2 other files: 6 bytes", "iconv"):
        assert words in str(told[0].message)


def test_rows_without_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text('{"text": "one", "id": 1}\n{"id": 2}\n{"text": null}\n{"text": "two"}\n')
    with pytest.warns(UserWarning, match=r"rows.ndjson: 2 rows without text in the column 'text'"):
        assert list(documents(str(path), "text")) == ["one", "two"]
    few = documents(str(path), "text")
    assert [next(few), next(few)] == ["one", "two"]
    with pytest.warns(UserWarning, match="2 rows without text"):
        few.close()  # as where a limit of tokens is reached


@pytest.mark.parametrize("prepared", [False, True])
def test_what_a_store_has_lost_is_told_on_each_start(prepared: bool, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xfcber " * 100)
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    given = LanguageSettings(data=str(tmp_path / "texts"), sequence_length=8)
    if prepared:
        make(tmp_path / "store", given, tokenizers.Bytes(), lambda *_: None)
        given = replace(given, data=str(tmp_path / "store"))
    for _ in range(2):
        with pytest.warns(UserWarning) as told:
            data.load(given, tokenizers.Bytes())
        about = [str(one.message) for one in told]
        assert len(about) == 2 and "a.txt: 100 bytes that are no UTF-8" in about[0], about
        assert "b.jsonl: 1 row without text" in about[1], about


def test_no_text_has_the_byte_that_ends_one(tmp_path: Path) -> None:
    texts = ["x" * 9000 + "\0" + "y" * 99, "a\0\0b", "c"]
    (tmp_path / "a.txt").write_text(texts[0])  # whose beginning alone shows whether a file is binary
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    given = LanguageSettings(data=str(tmp_path), sequence_length=8)
    with pytest.warns(UserWarning, match=r"a.txt and 1 other file: 3 characters of code 0, which would end a text"):
        loaded = data.load(given, tokenizers.Bytes())
    tokens = torch.cat([loaded.batch(np.arange(loaded.available)), loaded.held_out(10**6)])
    assert (tokens == tokenizers.Bytes.end).sum() <= len(texts)


def test_no_chat_has_the_byte_that_ends_an_answer() -> None:
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b\0user: c"}
    with pytest.raises(UserError, match=r"rows: record 1: .* character of code 0, .*; mend or remove it"):
        Chat("rows: record 1", [asked, answered]).rendered(tokenizers.Bytes())


def test_a_file_is_found_by_its_name_before_what_its_name_means_as_a_glob(tmp_path: Path) -> None:
    for name in ("a*.txt", "ab.txt", "[c].txt"):
        (tmp_path / name).write_text(name)
    for name in ("a*.txt", "[c].txt"):
        assert list(documents(str(tmp_path / name), "text")) == [name]
    assert len(list(documents(str(tmp_path / "a?*.txt"), "text"))) == 2


def test_the_kind_of_a_file_does_not_depend_on_the_case_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "ROWS.JSONL").write_text('{"text": "one"}\n')
    assert list(documents(str(tmp_path), "text")) == ["one"]


@pytest.mark.parametrize("data", ["", " "])
def test_data_without_a_name_is_not_all_that_lies_here(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="data is empty"):
        next(documents(data, "text"))


@pytest.mark.parametrize("what", ["", "*.txt", "**/*.txt"])
def test_a_link_to_nothing_is_told(what: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"b\.txt: this is a link to nothing; mend it, or"):
        list(documents(str(tmp_path / what), "text"))
    (tmp_path / "gone").write_text("b")
    assert list(documents(str(tmp_path / what), "text"))[:2] == ["a", "b"]


def test_links_that_lead_round_are_told(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    (tmp_path / "in" / "link").symlink_to("../elsewhere")
    assert list(documents(str(tmp_path / "in" / "**" / "*.txt"), "text")) == ["a", "b"]
    for name in ("one", "two"):  # with two, there are 2**40 ways
        (tmp_path / "in" / "deep" / name).symlink_to("..")
    with pytest.raises(UserError, match="goes round, by a link"):
        next(documents(str(tmp_path / "in" / "**" / "*.txt"), "text"))
    assert list(documents(str(tmp_path / "in"), "text")) == ["a"]


def test_a_folder_that_may_not_be_read_is_told_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "texts" / "closed"
    closed.mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("a")
    listed = os.scandir

    def refusing(path: Any) -> Any:
        """As the system does for `closed`, but for whoever may read all."""
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    globs = "**", "**/*.txt", "*/*.txt", "c*/**/*.txt", "closed/*.txt"
    texts: list[Callable[[Path], Any]] = [
        lambda folder, glob=one: next(documents(str(folder / glob), "text"))  # type: ignore[misc]
        for one in ("", *globs)
    ]
    for read in (*texts, lambda folder: Folder(folder, None).form, lambda folder: paths_of(str(folder / "**"))):
        with pytest.raises(UserError, match="texts/closed: Permission denied; let this user read it, or give") as told:
            read(tmp_path / "texts")
        assert "\n" not in str(told.value)


def test_a_text_of_four_bytes_a_letter_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("four", encoding="utf-32")
    with pytest.raises(UserError, match="the text is UTF-32; make UTF-8 of it: iconv -f UTF-32"):
        next(documents(str(tmp_path / "a.txt"), "text"))

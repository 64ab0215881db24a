"""Chats and adapters: what is learnt of a chat, by labels built by hand; and adapters trained, resumed and exported."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import until
from processes import farflung, run_here, same, saved
from warm import Python

from farflung.errors import UserError
from farflung.events import EvaluationEvent, RoundEvent
from farflung.pipeline import Mesh
from farflung.pipeline.island import WholeIsland
from farflung.pipeline.settings import IslandSettings, IslandShape
from farflung.report.read import read_run
from farflung.training import checkpoint
from farflung.training.resharding import whole_weights
from farflung.workloads import Language, chats, tokenizers
from farflung.workloads.settings import LanguageSettings

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}(now) {% endif %}{{ m.content }}<end>{% endfor %}"
MARKS = ["<unk>", "<end>", "<user>", "<assistant>", "<system>"]
ANSWERS = [f"the fox jumps over dog {i}" for i in range(40)]
ROWS = [
    {"messages": [{"role": "user", "content": f"what does {i} do"}, {"role": "assistant", "content": answer}]}
    for i, answer in enumerate(ANSWERS)
]
LONG = {"prompt": "what does this do " * 30, "completion": "never"}
SILENT = {"messages": [{"role": "user", "content": "hello"}]}
TWO_TURNS = [
    {"role": "system", "content": "be brief"},
    *({"role": role, "content": f"{role} fox {turn}"} for turn in (1, 2) for role in ("user", "assistant")),
]


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenizer_with(template: str | None, folder: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(models.BPE(unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.train_from_iterator(ANSWERS, trainers.BpeTrainer(vocab_size=300, special_tokens=MARKS))
    fast = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", eos_token="<end>")
    fast.add_special_tokens({"additional_special_tokens": MARKS[2:]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    folder = str(tmp_path_factory.mktemp("base"))
    config = LlamaConfig(**sizes, vocab_size=256, bos_token_id=0, eos_token_id=0, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by difference", "by markers"])
def test_the_loss_is_that_of_labels_built_by_hand(template: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    name = tokenizer_with(template, tmp_path / "tokenizer")
    data = written(tmp_path / "c.jsonl", [{"messages": TWO_TURNS}] * 4)
    workload = Language(LanguageSettings(model="micro", data=data, tokenizer=name, sequence_length=64))
    theirs = AutoTokenizer.from_pretrained(name)
    ids: list[int] = []
    labels: list[int] = []
    for message in TWO_TURNS:
        head = theirs(f"<{message['role']}>", add_special_tokens=False)["input_ids"]
        said = theirs(f"{message['content']}<end>", add_special_tokens=False)["input_ids"]
        ids += head + said
        labels += [-100] * len(head) + (said if message["role"] == "assistant" else [-100] * len(said))
    tokens, found = workload.batch(np.array([0]))
    assert tokens[0].tolist() == ids and found[0].tolist() == labels
    model = workload.build(0)
    expected = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
    assert torch.equal(workload.loss(model, workload.batch(np.array([0, 1]))), expected)
    assert workload.evaluate(model.eval(), 2, torch.device("cpu")).value == pytest.approx(float(expected), rel=1e-5)
    assert workload.units_per_sample == sum(label != -100 for label in labels)


def test_bytes_and_all_forms_of_records_give_the_same_labels(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    asked = [{"prompt": f"what does {i} do", "completion": answer} for i, answer in enumerate(ANSWERS)]
    told = [{"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in asked]
    files = [written(tmp_path / f"{n}.jsonl", rows) for n, rows in enumerate((ROWS, asked, told))]
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "p.parquet")
    found = [Language(LanguageSettings(data=d, sequence_length=96)) for d in (*files, str(tmp_path / "p.parquet"))]
    tokens, labels = found[0].batch(np.arange(3))
    text = bytes(t for t in tokens[0].tolist() if t).decode()
    assert text == f"user: what does 0 do\nassistant: {ANSWERS[0]}"
    assert bytes(t for t in labels[0].tolist() if t >= 0).decode() == f"{ANSWERS[0]}\0"
    for other in found[1:]:
        assert all(map(torch.equal, other.batch(np.arange(3)), (tokens, labels)))


def test_an_exported_byte_tokenizer_renders_chats_as_bytes_do(tmp_path: Path) -> None:
    own = tokenizers.Bytes()
    own.save(str(tmp_path))
    theirs = tokenizers.load(str(tmp_path))
    for chat in (TWO_TURNS, ROWS[0]["messages"]):
        (tokens, answers), (other, marked) = own.chat(chat), theirs.chat(chat)
        assert tokens.tolist() == other.tolist() and answers.tolist() == marked.tolist() and answers.any()


@pytest.mark.parametrize(
    ("template", "rows", "words"),
    [
        (None, ROWS, ["has no chat template", "chat_template.jinja"]),
        (FORGETFUL, [{"messages": TWO_TURNS}] * 3, ["renders the beginning of a chat otherwise", "generation"]),
        ("{{ raise_exception('no users here') }}", ROWS, ["record 1", "no users here"]),
        (PLAIN, [ROWS[0], {"messages": []}], ["record 2", "without messages"]),
        (PLAIN, [ROWS[0], {"text": "x", "messages": None}], ["record 2", "is no chat"]),
        (PLAIN, ROWS[:1], ["1 chat to learn from", "give at least 3"]),
        (PLAIN, ROWS[:2], ["2 chats to learn from", "give at least 3"]),
        (PLAIN, [ROWS[0], LONG, LONG], ["1 chat to learn from", "2 of 3 chats are longer", "larger sequence_length"]),
        (PLAIN, [LONG] * 9, ["all 9 chats are cut at sequence_length 64, before their answers begin; give a larger"]),
        (PLAIN, [SILENT] * 9, ["0 chats to learn from", "9 of 9 chats are left out, which have no answer"]),
    ],
)
def test_chats_that_cannot_be_learnt_are_refused_in_a_line(
    template: str | None, rows: list[dict], words: list[str], tmp_path: Path
) -> None:
    settings = LanguageSettings(data=written(tmp_path / "c.jsonl", rows), sequence_length=64)
    with pytest.raises(UserError) as error:
        chats.load(settings, tokenizers.load(tokenizer_with(template, tmp_path / "t")))
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_long_chats_are_cut_or_left_out_with_their_count(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * n} for n in (2, 3, 200)] + [LONG]
    settings = LanguageSettings(data=written(tmp_path / "c.jsonl", rows), sequence_length=40)
    with pytest.warns(UserWarning, match=r"2 of 4 .* longer than a sequence of 40 tokens \(1 are cut, 1 left out"):
        found = chats.load(settings, tokenizers.Bytes())
    assert found.available == 2 and found.held_out(9)[0].shape == (1, 40)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrained": False}, ["add --pretrained"]),
        ({"lora": 0, "lora_modules": "q_proj"}, ["lora is 0"]),
        ({"lora_modules": "q_proj,nix"}, ["no layer 'nix'", "q_proj"]),
        ({"base": "another"}, ["not those that the run's adapters are for"]),
    ],
)
def test_adapters_that_cannot_be_are_refused_in_a_line(base: str, changes: dict, words: list[str]) -> None:
    settings = LanguageSettings(**{"model": base, "pretrained": True, "lora": 4, "sequence_length": 64, **changes})
    with pytest.raises(UserError) as error:
        Language(settings).check()
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_replicas_begin_as_the_base_and_train_adapters_alone(base: str) -> None:
    settings = LanguageSettings(model=base, pretrained=True, lora=4, lora_modules="q_proj,v_proj", sequence_length=64)
    plain = Language(LanguageSettings(model=base, pretrained=True, sequence_length=64)).build(0)
    one, again = (Language(settings).build(7) for _ in range(2))
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(one(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    assert same(one.state_dict(), again.state_dict())
    trained = {name for name, parameter in one.named_parameters() if parameter.requires_grad}
    assert trained == set(one.state_dict()) and sum(map(torch.numel, one.state_dict().values())) == 2 * 2 * 4 * 64
    with pytest.raises(UserError, match="leave out --stages"):
        _ = Language(settings).divisible


@pytest.mark.slow
def test_a_run_of_adapters_is_killed_resumed_and_exported(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    data = written(tmp_path / "c.jsonl", ROWS)
    common = ["train", "--model", base, "--pretrained", "--lora", "4", "--data", data, "--sequence-length", "64"]
    common += ["--replicas", "2", "--steps", "40", "--every", "5", "--batch-size", "2", "--checkpoint-every", "5"]
    whole = farflung(*common, "--out", str(tmp_path / "whole"), cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    killed = Python("-m", "farflung", *common, "--out", str(tmp_path / "killed"), cwd=tmp_path)
    until(lambda: checkpoint.whole_steps(tmp_path / "killed") or killed.poll() is not None)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    resumed = farflung("train", "--resume", str(tmp_path / "killed"), cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    states = [saved(tmp_path / name, 40, rank) for rank in (0, 1) for name in ("whole", "killed")]
    assert same(states[0]["model"], states[1]["model"]) and same(states[2]["model"], states[3]["model"])
    parameters = sum(map(torch.numel, states[0]["model"].values()))
    run = read_run(tmp_path / "whole")
    sizes = [event.bytes_sent for event in run.of(0, RoundEvent)]
    assert all(4 * parameters <= size < 4 * parameters + 3000 for size in sizes), (parameters, sizes)

    assert run_here(monkeypatch, tmp_path, "export", "whole", "merged") == 0
    alone = farflung("export", "whole", "adapter", "--adapter", cwd=tmp_path)
    assert alone.returncode == 0 and not alone.stderr and alone.stdout.count("\n") == 1, alone
    tokens = torch.arange(30).unsqueeze(0)
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = plain(input_ids=tokens).logits
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(input_ids=tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=tokens).logits
    assert torch.allclose(merged, adapted, atol=1e-5) and (merged - before).abs().max() > 1e-3
    assert len(whole_weights(checkpoint.averages(tmp_path / "whole"))) == 2 * 7 * 2

    config = tmp_path / "whole" / "config.toml"
    config.write_text(config.read_text().replace('\nbase = "', '\nbase = "0'))
    assert run_here(monkeypatch, tmp_path, "export", "whole", "other") == 2


def test_a_step_is_the_mean_over_all_its_answers_in_any_microbatches(base: str, tmp_path: Path) -> None:
    """Answers of 1 to 32 tokens: the mean of microbatches' means would be another one."""
    rows = [{"prompt": "ab", "completion": "x" * (2 ** (n % 6))} for n in range(60)]
    settings = LanguageSettings(
        model=base, pretrained=True, lora=4, data=written(tmp_path / "c.jsonl", rows), sequence_length=64
    )
    workload = Language(settings)
    tokens, labels = workload.batch(workload.sample_ids(5, 0, 0, 8))
    model = workload.build(5)
    told = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    learnt = labels[:, 1:] != -100
    nll = -told.gather(2, tokens[:, 1:, None])[..., 0]
    expected = nll[learnt].mean()
    expected.backward()
    assert learnt.sum(1).min() < learnt.sum(1).max()
    for parts in (1, 2, 4):
        island = WholeIsland(
            IslandSettings(microbatches=parts, clip=0),
            workload,
            workload.build(5),
            Mesh((IslandShape(),)),
            Mesh((IslandShape(),)).coordinates(0),
            5,
            torch.device("cpu"),
        )
        loss, fault = island.gradients(0)
        assert not fault and loss == pytest.approx(float(expected), rel=1e-6)
        for one, other in zip(model.parameters(), island.model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.allclose(one.grad, other.grad, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "codec", "share"), [("diloco", "int4", 1 / 8), ("noloco", "modulo4", 1 / 8)])
def test_adapters_travel_by_any_codec_and_learn(
    base: str, method: str, codec: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "c.jsonl", ROWS)
    words = ["--model", base, "--pretrained", "--lora", "4", "--data", data, "--sequence-length", "64", "--lr", "0.02"]
    words += ["--method", method, "--codec", codec, "--every", "5", "--steps", "20", "--microbatches", "2"]
    words += ["--eval-every", "10", "--batch-size", "4", "--replicas", "2", "--network", "simulated", "--out", "run"]
    assert run_here(monkeypatch, tmp_path, "train", *words) == 0
    run = read_run(tmp_path / "run")
    losses = [event.score for event in run.of(0, EvaluationEvent)]
    assert losses[-1] < losses[0] - 0.05, losses
    values = sum(map(torch.numel, saved(tmp_path / "run", 20, 0)["model"].values()))
    sizes = [event.bytes_sent for event in run.of(0, RoundEvent)]
    assert len(sizes) == 4 and all(size < 4 * values * share * 1.5 + 2000 for size in sizes), (values, sizes)

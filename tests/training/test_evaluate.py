# SPDX-License-Identifier: MIT
"""What an evaluation measures equals plain arithmetic on the model's own forward."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from openmsa import E4M3, NVFP4, Sequences, msa_attention, sparse_attention  # noqa: E402
from openmsa.training.compare import Row, compare, mean_found, variants_of  # noqa: E402
from openmsa.training.evaluate import (  # noqa: E402
    hidden_states,
    loss_by_position,
    needle_scores,
    position_bins,
    token_losses,
)
from openmsa.training.layers import LayerInputs, attention_by  # noqa: E402
from openmsa.training.needle import Needle, make_needles, needle_distances  # noqa: E402
from openmsa.training.recall import block_mass, mean_recall, recall, spaced_rows  # noqa: E402
from openmsa.training.variants import Variant, VariantAttention, blocks_without_index, budgets, group_mean  # noqa: E402
from tests.training.tiny import LENGTH, tiny_llama, windows  # noqa: E402

DENSE = VariantAttention(Variant("dense"))


def layer(lengths=70, batch=2, heads=4, kv_heads=2, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rows(count):
        return torch.randn(batch * lengths, count, dim, generator=generator)

    seqs = Sequences.from_lengths([lengths] * batch, [lengths] * batch)
    nothing = torch.empty(batch * lengths, 0)
    return LayerInputs(1, nothing, nothing, nothing, rows(heads), rows(kv_heads), rows(kv_heads), seqs, 0.3)


def slow_mass(inputs, row, sequence, head, block_size, length):
    """Returns the mass of each block for one query and KV head, from one softmax a query head."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    own = slice(sequence * length, sequence * length + row + 1)
    weights = 0
    for main in range(head * group, (head + 1) * group):
        logits = inputs.k[own, head].double() @ inputs.q[sequence * length + row, main].double() * inputs.softmax_scale
        weights = weights + logits.softmax(0) / group
    return [float(part.sum()) for part in weights.split(block_size)]


def test_mass_and_recall_are_what_their_definitions_say():
    inputs, size, topk, length = layer(), 16, 2, 70
    rows = spaced_rows(length, 9)
    blocks = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:topk] for i in range(280)])
    last = torch.arange(140).remainder(length).div(size, rounding_mode="floor").repeat_interleave(2)
    blocks = torch.where(blocks <= last[:, None], blocks, -1).to(torch.int32).view(140, 2, topk)
    mass = block_mass(inputs, rows, size)
    share, scores, whole, pairs = [], [], [], 0
    for sequence in range(2):
        for place, row in enumerate(rows.tolist()):
            for head in range(2):
                expected = slow_mass(inputs, row, sequence, head, size, length)
                torch.testing.assert_close(
                    mass[sequence, place, head, : len(expected)].tolist(), expected, rtol=1e-4, atol=1e-6
                )
                assert not mass[sequence, place, head, len(expected) :].any()
                if len(expected) > topk:
                    best = sorted(range(len(expected)), key=lambda b: -expected[b])[:topk]
                    own = [b for b in blocks[sequence * length + row, head].tolist() if b >= 0]
                    hit = sum(expected[b] for b in best if b in own)
                    share.append(len(set(best) & set(own)) / topk)
                    scores.append(hit / sum(expected[b] for b in best))
                    whole.append(sum(expected[b] for b in own))
                    pairs += 1
    found = recall(mass, blocks, rows, size)
    assert found.pairs == pairs > 0
    assert found[:3] == pytest.approx([sum(x) / pairs for x in (share, scores, whole)], rel=1e-4)


def test_the_best_blocks_have_recall_1_and_a_full_selection_leaves_no_pairs():
    inputs, rows = layer(batch=1), torch.arange(70)
    mass = block_mass(inputs, rows, 16)
    best = mass[0].topk(2, -1).indices.to(torch.int32)
    assert recall(mass, best, rows, 16)[:2] == (1.0, 1.0)
    everything = torch.arange(5, dtype=torch.int32).expand(70, 2, 5)
    assert recall(mass, everything, rows, 16).pairs == 0
    one = recall(mass, best, rows, 16)
    assert mean_recall([one, recall(mass, everything, rows, 16)]) == one


def test_dense_losses_are_the_models_own():
    model, ids = tiny_llama(), windows()[3]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").double()
    hidden = hidden_states(model, ids[None], DENSE)[0]
    torch.testing.assert_close(token_losses(model, hidden, ids), expected, rtol=1e-4, atol=1e-5)
    both = loss_by_position(model, [ids, windows()[4]], DENSE)
    assert both.shape == (LENGTH - 1,)
    torch.testing.assert_close(2 * both - expected, loss_by_position(model, [windows()[4]], DENSE), rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "sdpa"


def test_a_whole_budget_is_dense_attention_and_layers_may_stay_dense():
    model, ids = tiny_llama(), windows()[0][None]
    dense = hidden_states(model, ids, DENSE)
    for kind in ("training-free", "window", "random"):
        whole = VariantAttention(Variant(kind, 100.0, 16, 5))
        torch.testing.assert_close(hidden_states(model, ids, whole), dense, rtol=1e-4, atol=1e-5)
        small = VariantAttention(Variant(kind, 20.0, 16, 1))
        assert (hidden_states(model, ids, small) - dense).abs().max() > 1e-3
        small.dense_layers = frozenset((0, 1, 2))
        torch.testing.assert_close(hidden_states(model, ids, small), dense, rtol=1e-4, atol=1e-5)


def test_variants_read_what_their_kind_says():
    inputs = layer()
    random = VariantAttention(Variant("random", 40.0, 16, 2), seed=3).blocks(inputs)
    window = VariantAttention(Variant("window", 60.0, 16, 3)).blocks(inputs)
    own = torch.arange(140).remainder(70).div(16, rounding_mode="floor")
    assert (random == own[:, None, None]).any(-1).all()
    assert random.shape == (140, 2, 2)
    assert torch.equal(random, VariantAttention(Variant("random", 40.0, 16, 2), seed=3).blocks(inputs))
    assert not torch.equal(random, VariantAttention(Variant("random", 40.0, 16, 2), seed=4).blocks(inputs))
    expected = [sorted({0, max(0, b - 1), b}) for b in own.tolist()]
    assert [[b for b in row if b >= 0] for row in window[:, 0].tolist()] == expected
    index = VariantAttention(Variant("training-free", 40.0, 16, 2))
    out = msa_attention(*inputs[4:7], *group_mean(inputs), 2, inputs.seqs, block_size=16, softmax_scale=0.3)
    torch.testing.assert_close(index(inputs), out)
    torch.testing.assert_close(
        out, sparse_attention(*inputs[4:7], index.blocks(inputs), inputs.seqs, block_size=16, softmax_scale=0.3)
    )


def test_forced_blocks_are_read_as_far_as_the_budget_goes():
    inputs = layer()
    own = torch.arange(140).remainder(70).div(16, rounding_mode="floor")
    for topk, first in ((1, False), (2, True)):
        blocks = VariantAttention(Variant("index", 20.0 * topk, 16, topk), forced=(1, 1)).blocks(inputs)
        assert (blocks == own[:, None, None]).any(-1).all()
        assert (blocks == 0).any(-1).all() == first


@pytest.mark.parametrize("quantise", [E4M3.quantize, NVFP4.quantize])
def test_an_index_may_have_stored_keys(quantise):
    inputs = layer()

    def stored(inputs):
        index_q, index_k = group_mean(inputs)
        return index_q, quantise(index_k)

    blocks = VariantAttention(Variant("stored", 40.0, 16, 2), stored).blocks(inputs)
    exact = VariantAttention(Variant("exact", 40.0, 16, 2), group_mean).blocks(inputs)
    assert 0.6 < (blocks == exact).float().mean() < 1


def test_budgets_are_shares_of_the_blocks():
    assert budgets(8192, 128, (6.25, 12.5, 25.0, 50.0)) == {6.25: 4, 12.5: 8, 25.0: 16, 50.0: 32}
    assert budgets(1000, 64, (1.0, 6.25)) == {6.25: 1}
    assert budgets(100_000, 64, (25.0, 50.0)) == {4.095: 64}, (
        "no query reads more than 64 blocks, and the row says what that is"
    )
    assert budgets(100, 64, (6.25,)) == {50.0: 1}


@pytest.mark.parametrize("kind", ["random", "window"])
def test_baselines_hold_few_scores_at_a_time_and_chunks_change_no_block(kind, monkeypatch):
    inputs, variant = layer(), Variant(kind, 60.0, 16, 3)
    whole, made = blocks_without_index(inputs, variant, 3), []
    for name in ("rand", "zeros"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: made.append(real(*a, **k)) or made[-1])
    for most in (1, 100, 333):
        made.clear()
        assert torch.equal(blocks_without_index(inputs, variant, 3, most), whole)
        scores = [x for x in made if x.dtype == torch.float32]
        assert sum(x.shape[0] for x in scores) == 140
        assert max(x.numel() for x in scores) <= max(most, 10)


def test_random_blocks_are_drawn_evenly():
    """Besides its own block a query reads each earlier one as often as any other."""
    drawn = blocks_without_index(layer(1600, 2), Variant("random", 12.5, 200, 3), 0)  # [3200, 2, 3]
    last = drawn.view(2, 8, 200, 2, 3)[:, 7].flatten(0, 2)  # of the queries in block 7
    assert (last == 7).any(-1).all()
    counts = torch.bincount(last.flatten().long(), minlength=8)[:7].double()
    expected = counts.sum() / 7
    assert counts.sum() == 2 * len(last) == 1600
    assert ((counts - expected).square() / expected).sum() < 22.5  # six degrees of freedom, one draw in a thousand
    assert len({tuple(row) for row in last.sort(-1).values.tolist()}) == 21  # every pair of the seven


def test_hidden_layers_inputs_are_those_of_each_window():
    """Two windows at a time give what each gives alone, and hidden states and positions reach the function."""
    model, seen = tiny_llama(), []

    def keep(inputs):
        seen.append(inputs)
        return DENSE(inputs)

    both = hidden_states(model, windows().drawn(0, 2), keep)
    alone = torch.cat([hidden_states(model, ids[None], DENSE) for ids in windows().drawn(0, 2)])
    torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)
    assert [inputs.number for inputs in seen] == [0, 1, 2]
    first = model.model.layers[0]
    embedded = first.input_layernorm(model.model.embed_tokens(windows().drawn(0, 2))).flatten(0, 1)
    torch.testing.assert_close(seen[0].hidden, embedded)
    assert seen[0].cos.shape == (2 * LENGTH, 16)
    torch.testing.assert_close(seen[0].cos[:LENGTH], seen[0].cos[LENGTH:])


def test_a_model_without_such_layers_is_refused():
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=8))
    with pytest.raises(NotImplementedError, match=r"position_embeddings"), attention_by(gpt, DENSE):
        gpt(torch.zeros(1, 4, dtype=torch.int64))


class Words:
    """This is a tokenizer with a token a word and punctuation mark."""

    def __init__(self):
        self.known = {}

    def __call__(self, text, add_special_tokens):
        words = text.replace(".", " . ").split()
        return SimpleNamespace(input_ids=[self.known.setdefault(w, len(self.known)) for w in words])


def test_needles_lie_where_they_should():
    words, length = Words(), 200
    filler = torch.full((1000,), 7_777)
    distances = needle_distances(length)
    needles = make_needles(words, filler, length, distances, 3, seed=0)
    assert len(needles) == 15
    names = {number: word for word, number in words.known.items()}
    for needle in needles:
        text = " ".join(names.get(i, "_") for i in needle.ids.tolist())
        assert len(needle.ids) == length
        before, asked = text.rsplit("The secret number of the", 1)
        assert before.count("The secret number of the") == 1
        told = before.rpartition("The secret number of the")[2]
        assert told.split(" .")[0] == asked
        assert told.split().count("_") == needle.distance
        assert names[needle.ids[-1].item()].isdecimal()
    assert sorted({n.distance for n in needles}) == sorted(min(d, 200 - 9 - 7 - 1) for d in distances)
    with pytest.raises(ValueError, match=r"--length must leave room for the needle and the question \(\d+\), got 10"):
        make_needles(words, filler, 10, (1,), 1, seed=0)
    with pytest.raises(ValueError, match="distances must be at least 0, got -5"):
        make_needles(words, filler, 200, (1, -5), 1, seed=0)
    with pytest.raises(ValueError, match=r"filler must have length \(200\) tokens at least, got 50"):
        make_needles(words, filler[:50], 200, (1,), 1, seed=0)


def test_needles_of_a_distance_have_that_distance_in_all_trials():
    """Numbers and questions take more or fewer tokens, and leave more or less room for the text."""

    def letters(text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(c) for c in text])

    needles = make_needles(letters, torch.zeros(1000, dtype=torch.int64), 200, (10, 90, 500), 6, seed=0)
    rooms = [200 - int((needle.ids != 0).sum()) for needle in needles]
    assert len(set(rooms)) > 1
    assert [needle.distance for needle in needles] == [d for d in (10, min(90, *rooms), min(rooms)) for _ in range(6)]
    for needle, room in zip(needles, rooms, strict=True):
        end = needle.ids.tolist().index(ord("."))
        assert needle.ids[end + 2 : end + 2 + needle.distance].eq(0).all()
        assert needle.ids[: room - needle.distance].eq(0).all()
        assert len(needle.ids) == 200


def test_needles_are_found_by_the_likeliest_tokens():
    model = tiny_llama()
    ids = windows()[0].clone()
    for place in range(LENGTH - 3, LENGTH):  # an answer that the model gives
        with torch.no_grad():
            ids[place] = model(ids[None]).logits[0, place - 1].argmax()
    right, wrong = Needle(ids, 3, 10), Needle(torch.cat((ids[:-1], (ids[-1:] + 1) % 64)), 3, 10)
    scores = needle_scores(model, [right, wrong, right], DENSE)
    assert [(s.distance, s.found, s.trials) for s in scores] == [(10, pytest.approx(2 / 3), 3)]
    assert mean_found(Row("x", 1.0, 16, 1, needles=scores)) == pytest.approx(2 / 3)


def test_a_comparison_measures_every_variant():
    model, read = tiny_llama(), [windows()[0], windows()[1]]
    variants = variants_of(LENGTH, 16, (40.0, 100.0), "training-free", dense_layers=frozenset((0,)))
    rows = compare(model, variants, read, [Needle(windows()[2], 2, 8)])
    assert [(row.kind, row.topk) for row in rows] == [
        ("dense", 0), *((kind, topk) for kind in ("training-free", "window", "random") for topk in (2, 5))
    ]  # fmt: skip
    for row in rows:
        bins = position_bins(LENGTH)
        sizes = [last - max(1, first) for first, last in bins]
        weighted = sum(loss * size for loss, size in zip(row.by_position, sizes, strict=True)) / sum(sizes)
        assert row.loss == pytest.approx(weighted)
        assert row.change == row.loss - rows[0].loss
        assert (row.block_recall is None) == (row.topk in (0, 5))
        if row.topk == 5:
            assert row.change == pytest.approx(0, abs=1e-5)
        assert len(row.needles) == 1


SIZES = {"vocab_size": 64, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
FEW = {"intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0}
LOGITS = {
    "Granite": {"logits_scaling": 8.0},
    "Gemma2": {"final_logit_softcapping": 0.5, "attn_logit_softcapping": None, "head_dim": 16},
    "Cohere": {"logit_scale": 0.25},
    "Mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("family", LOGITS)
def test_logits_are_scaled_and_capped_as_the_model_does(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FEW, **LOGITS[family])
    model, ids = getattr(transformers, f"{family}ForCausalLM")(config).eval(), torch.arange(48) + 3
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
        hidden = model.model(ids[None]).last_hidden_state[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").double()
    torch.testing.assert_close(token_losses(model, hidden, ids), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(ids[None]).logits[0], logits), "the model is as it was"


def test_granite_is_evaluated():
    torch.manual_seed(0)
    model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, **FEW, **LOGITS["Granite"])).eval()
    ids = torch.arange(48) + 3
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none").double()
    torch.testing.assert_close(loss_by_position(model, [ids], DENSE), expected, rtol=1e-4, atol=1e-5)


def test_models_whose_losses_it_would_not_tell_are_refused():
    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, input_ids, use_cache):
            found = super().forward(input_ids, use_cache=use_cache)
            found.logits = found.logits + input_ids[..., None]
            return found

    models = {
        "of its last hidden states alone": Shifted(transformers.LlamaConfig(**SIZES, **FEW)),
        "GPT2Attention must be given position_embeddings": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)
        ),
        "AttentionInterface": transformers.FalconForCausalLM(transformers.FalconConfig(**SIZES, alibi=False)),
    }
    ids = torch.arange(48) + 3
    for reason, model in models.items():
        with pytest.raises(NotImplementedError, match=reason):
            loss_by_position(model.eval(), [ids], VariantAttention(Variant("dense")))


def test_a_model_that_cannot_be_run_is_refused():
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(3, 4)
    with pytest.raises(ValueError, match="LlamaForCausalLM could not be run: RuntimeError: "):
        loss_by_position(model, [windows()[0]], DENSE)

"""Acceptance against plain sampling: the same tokens (coupled), the same distribution (both), and planted mistakes."""

from __future__ import annotations

import pytest
import torch
from helpers.speculation import Chains, chi_square, joint_counts
from torch import Tensor

from miles_k3.errors import EngineError
from miles_k3.k3.ops.packed import Packed
from miles_k3.rollout.embedded.request import Request
from miles_k3.rollout.embedded.sampler import SamplingBatch, sample
from miles_k3.rollout.speculative import acceptance
from miles_k3.rollout.speculative.acceptance import AcceptMode, draft_uniforms, judge
from miles_k3.types import SamplingParams

CPU = torch.device("cpu")
VOCAB = 30
modes = pytest.mark.parametrize("mode", list(AcceptMode))


def mixed_params(count: int) -> list[SamplingParams]:
    kinds = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7, "temperature": 1.4}, {"temperature": 0.5, "top_k": 9},
    ]  # fmt: skip
    return [SamplingParams(seed=17 + i, **kinds[i % len(kinds)]) for i in range(count)]


def row_by_row(
    logits: Tensor, params: list[SamplingParams], packed: Packed, firsts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain sampling of each row alone."""
    found = []
    for t in range(len(logits)):
        b, j = int(packed.rows_T[t]), int(packed.cols_T[t])
        found.append(sample(logits[t : t + 1], SamplingBatch.of([params[b]], VOCAB, CPU), firsts[b : b + 1] + j))
    tokens, logprobs, finite = (torch.cat(x) for x in zip(*found, strict=True))
    return tokens, logprobs, finite


def case(seed: int = 0) -> tuple[Tensor, Tensor, Packed, list[SamplingParams], Tensor]:
    """Ragged requests whose drafts are right by a chance of about two in three."""
    rng = torch.Generator().manual_seed(seed)
    lengths = [1, 8, 4, 2, 8, 8, 3, 8, 1, 8]
    packed, params = Packed.from_lengths(lengths), mixed_params(len(lengths))
    logits = torch.randn(sum(lengths), VOCAB, generator=rng) * 2
    firsts = torch.randint(0, 1000, (len(lengths),), generator=rng)
    plain = row_by_row(logits, params, packed, firsts)[0]
    noise = torch.randint(0, VOCAB, plain.shape, generator=rng)
    drafted = torch.where(torch.rand(len(plain), generator=rng) < 0.65, plain, noise)
    return logits, drafted, packed, params, firsts


@pytest.mark.parametrize("seed", range(5))
def test_coupled_commits_what_plain_sampling_says(seed: int) -> None:
    """Tokens and log-probabilities, to the last bit, and the longest prefix of drafted tokens that are the same."""
    logits, drafted, packed, params, firsts = case(seed)
    tokens, logprobs, _ = row_by_row(logits, params, packed, firsts)
    got = judge(logits, drafted, packed, SamplingBatch.of(params, VOCAB, CPU), firsts)
    cu = packed.cu_seqlens.tolist()
    for b, accepted in enumerate(got.accepted_B.tolist()):
        expected = 0
        while cu[b] + expected + 1 < cu[b + 1] and drafted[cu[b] + expected] == tokens[cu[b] + expected]:
            expected += 1
        assert accepted == expected
        assert got.committed_T[cu[b] : cu[b + 1]].tolist() == [j <= accepted for j in range(cu[b + 1] - cu[b])]
    kept = got.committed_T
    assert torch.equal(got.tokens_T[kept], tokens[kept])
    assert torch.equal(got.logprobs_T[kept], logprobs[kept])
    assert got.finite_T.all()


@pytest.mark.parametrize("seed", range(3))
def test_what_stays_is_what_a_request_takes(seed: int) -> None:
    """Up to a stop token, whatever is committed behind it; nothing where a request isn't finite; an empty request and
    padding rows behind all of them change nothing."""
    logits, drafted, packed, params, firsts = case(seed)
    logits[packed.cu_seqlens[4]] = torch.nan
    got = judge(logits, drafted, packed, SamplingBatch.of(params, VOCAB, CPU), firsts)
    cu, stops = packed.cu_seqlens.tolist(), torch.tensor([[b % 7, -1, 3 * b] for b in range(packed.num_seqs)])
    expected = []
    for b, (first, count) in enumerate(zip(cu, got.accepted_B.tolist(), strict=False)):
        request = Request(
            id="", prompt=(0,), version=-1,
            params=SamplingParams(max_new_tokens=99, stop_token_ids=tuple(s for s in stops[b].tolist() if s >= 0)),
        )  # fmt: skip
        rows = slice(first, first + count + 1)
        taken = request.accept_block(got.tokens_T[rows].tolist(), got.logprobs_T[rows].tolist())[0]
        expected.append(taken if b != 4 else 0)
    assert acceptance.kept_positions(got, packed, stops).tolist() == expected
    cu_seqlens, end = packed.cu_seqlens, packed.num_tokens
    padded = Packed(
        torch.cat([cu_seqlens, torch.tensor([end, end + 3])]), torch.cat([packed.rows_T, torch.full((3,), len(cu))]),
        torch.cat([packed.cols_T, torch.arange(3)]), packed.num_seqs + 2, packed.max_len,
    )  # fmt: skip
    more = judge(
        torch.cat([logits, logits[:3]]), torch.cat([drafted, drafted[:3]]), padded,
        SamplingBatch.of([*params, SamplingParams(), SamplingParams()], VOCAB, CPU), torch.cat([firsts, firsts[:2]]),
    )  # fmt: skip
    stops = torch.cat([stops, stops.new_full((2, 3), -1)])
    assert acceptance.kept_positions(more, padded, stops)[: packed.num_seqs].tolist() == expected
    assert torch.equal(more.accepted_B[: packed.num_seqs], got.accepted_B)


@modes
def test_greedy_requests_keep_the_likeliest(mode: AcceptMode) -> None:
    logits, drafted, packed, _, firsts = case()
    params = [SamplingParams(temperature=0.0)] * packed.num_seqs
    best = logits.argmax(-1)
    drafted = torch.where(drafted % 3 > 0, best, drafted)
    got = judge(logits, drafted, packed, SamplingBatch.of(params, VOCAB, CPU), firsts, mode=mode)
    same = packed.pad((best == drafted).long())
    most = (packed.lengths_B - 1)[:, None]
    expected = (same.cumprod(1) * (torch.arange(packed.max_len) < most)).sum(1)
    assert torch.equal(got.accepted_B, expected)
    assert torch.equal(got.tokens_T[got.committed_T], best[got.committed_T])


def test_rejection_reports_plain_log_probabilities() -> None:
    logits, drafted, packed, params, firsts = case()
    got = judge(logits, drafted, packed, SamplingBatch.of(params, VOCAB, CPU), firsts, mode=AcceptMode.REJECTION)
    for t in got.committed_T.nonzero().flatten().tolist():
        row = SamplingBatch.of([params[int(packed.rows_T[t])]], VOCAB, CPU)
        plain = acceptance.processed_logprobs(logits[t : t + 1], row)[0]
        assert got.logprobs_T[t] == plain[got.tokens_T[t]]
        assert got.logprobs_T[t] > -torch.inf


@modes
def test_a_row_that_is_not_finite_ends_its_request_alone(mode: AcceptMode) -> None:
    logits, drafted, packed, params, firsts = case()
    sampling = SamplingBatch.of(params, VOCAB, CPU)
    clean = judge(logits, drafted, packed, sampling, firsts, mode=mode)
    hurt = int(packed.cu_seqlens[1])  # the first row of request 1
    logits[hurt, 3], drafted[hurt] = torch.nan, 0
    got = judge(logits, drafted, packed, sampling, firsts, mode=mode)
    assert got.accepted_B[1] == 0
    assert (got.tokens_T[hurt].item(), got.finite_T[hurt].item()) == (0, False)
    assert got.logprobs_T[hurt] == -torch.inf
    others = packed.rows_T != 1
    for name in ("committed_T", "tokens_T", "logprobs_T", "finite_T"):
        assert torch.equal(
            getattr(got, name)[others & clean.committed_T], getattr(clean, name)[others & clean.committed_T]
        )


# --- distributions --------------------------------------------------------------------------------------------------
COUNT = 30_000
PARAMS = [SamplingParams(), SamplingParams(temperature=0.7, top_k=4, top_p=0.9)]


@modes
@pytest.mark.parametrize("params", PARAMS, ids=["plain", "filtered"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "greedy draft"])
def test_answers_follow_the_policy(mode: AcceptMode, params: SamplingParams, drawn: bool) -> None:
    """Three tokens of 30,000 answers, made in blocks of drafted ones, against the exact joint distribution."""
    chains = Chains.draw(5, params)
    counts = joint_counts(chains, mode, COUNT, drawn=drawn)
    assert chi_square(counts, chains.joint()) < 4.5


@pytest.mark.parametrize("verified", [1, 2])
def test_the_policys_own_token_behind_a_whole_block(verified: int) -> None:
    """Is nobody's redraw: of blocks that are cut it comes within the three tokens."""
    chains = Chains.draw(5, PARAMS[0])
    counts = joint_counts(
        chains, AcceptMode.REJECTION, COUNT, drawn=True, lengths_of=lambda fed: torch.full((len(fed),), verified)
    )
    assert chi_square(counts, chains.joint()) < 4.5


def test_a_shift_of_two_percent_is_seen() -> None:
    """The test's own power: answers of a policy of which 2 % of each row's mass stands elsewhere."""
    chains = Chains.draw(5, PARAMS[0])
    counts = joint_counts(chains, AcceptMode.REJECTION, COUNT, drawn=True)
    assert chi_square(counts, chains.shifted(0.02).joint()) > 6


def test_a_draft_that_peeks_is_seen() -> None:
    """Rejection sampling of a draft that draws with the uniforms that the policy's tokens are drawn with."""
    chains = Chains.draw(5, PARAMS[0])
    peeking = joint_counts(chains, AcceptMode.REJECTION, COUNT, drawn=True, draft_mode=AcceptMode.COUPLED)
    assert chi_square(peeking, chains.joint()) > 6


@pytest.mark.parametrize("bug", ["redraws from p", "keeps with p", "raw p"])
def test_planted_mistakes_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = PARAMS[1] if bug == "raw p" else PARAMS[0]
    if bug == "redraws from p":
        honest = acceptance._redraw
        monkeypatch.setattr(acceptance, "_redraw", lambda p, q, u: honest(p, torch.zeros_like(q), u))
    elif bug == "keeps with p":
        judged = acceptance._survives
        monkeypatch.setattr(acceptance, "_survives", lambda p, q, *rest: judged(p, torch.ones_like(q), *rest))
    else:
        monkeypatch.setattr(acceptance, "_probs", lambda _, logits, rows, finite: logits.softmax(-1))
    chains = Chains.draw(5, params)
    counts = joint_counts(chains, AcceptMode.REJECTION, COUNT, drawn=True)
    assert chi_square(counts, chains.joint()) > 6


def test_rejection_keeps_what_theory_says_and_coupling_less() -> None:
    """First drafted tokens kept, against sum min(p, q); coupled by the same uniforms it's less, by others far less."""
    chains = Chains.draw(5, PARAMS[0])
    p, q = chains.policy()[0], chains.draft[0]
    count = 40_000
    seeds, zeros = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    sampling = SamplingBatch.of([SamplingParams(seed=i) for i in range(count)], 5, CPU)
    packed = Packed.from_lengths([2] * count)
    kept = {}
    for mode, drawn_as in [("rejection", "rejection"), ("coupled", "coupled"), ("coupled", "rejection")]:
        u = draft_uniforms(AcceptMode(drawn_as), seeds, zeros)
        ids = (q.cumsum(0) <= u[:, None]).sum(1).clamp(max=4)
        drafted = ids.repeat_interleave(2)
        probs = q.expand(2 * count, -1) if mode == "rejection" else None
        got = judge(
            chains.target[0].expand(2 * count, -1), drafted, packed, sampling, zeros, mode=AcceptMode(mode),
            draft_probs_TV=probs,
        )  # fmt: skip
        kept[mode, drawn_as] = got.accepted_B.double().mean().item()
    assert kept["rejection", "rejection"] == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.01)
    overlap = torch.minimum(p.cumsum(0), q.cumsum(0)) - torch.maximum(p.cumsum(0) - p, q.cumsum(0) - q)
    assert kept["coupled", "coupled"] == pytest.approx(overlap.clamp(min=0).sum().item(), abs=0.01)
    assert kept["coupled", "rejection"] == pytest.approx((p * q).sum().item(), abs=0.01)


@modes
@pytest.mark.parametrize("rows", [0, 5])
def test_padding_changes_nothing(mode: AcceptMode, rows: int) -> None:
    """A recorded verify's: empty requests behind the others, and one more that owns the rows that are left, if any."""
    logits, drafted, packed, params, firsts = case(3)
    count, total, rng = len(params), len(logits), torch.Generator().manual_seed(9)
    probs = torch.rand(total, VOCAB, generator=rng).softmax(-1) if mode is AcceptMode.REJECTION else None
    real = judge(logits, drafted, packed, SamplingBatch.of(params, VOCAB, CPU), firsts, mode=mode, draft_probs_TV=probs)
    padded = Packed(
        torch.tensor([*packed.cu_seqlens.tolist()[:-1], total, total, total, total + rows]),
        torch.cat([packed.rows_T, torch.full((rows,), count + 2)]), torch.cat([packed.cols_T, torch.arange(rows)]),
        count + 3, total + rows,
    )  # fmt: skip
    nothing = torch.full((rows, VOCAB), torch.nan)
    got = judge(
        torch.cat([logits, nothing]), torch.cat([drafted, torch.zeros(rows, dtype=torch.int64)]), padded,
        SamplingBatch.of(params + mixed_params(3), VOCAB, CPU), torch.cat([firsts, torch.zeros(3, dtype=torch.int64)]),
        mode=mode, draft_probs_TV=None if probs is None else torch.cat([probs, nothing]),
    )  # fmt: skip
    assert torch.equal(got.accepted_B[:count], real.accepted_B)
    for name in ("committed_T", "tokens_T", "logprobs_T", "finite_T"):
        assert torch.equal(getattr(got, name)[:total], getattr(real, name)), name


def test_misfits_are_refused() -> None:
    logits, drafted, packed, params, firsts = case()
    sampling = SamplingBatch.of(params, VOCAB, CPU)
    with pytest.raises(EngineError, match="got 50 rows of logits"):
        judge(logits[:-1], drafted, packed, sampling, firsts)
    with pytest.raises(EngineError, match="mode is coupled"):
        judge(logits, drafted, packed, sampling, firsts, draft_probs_TV=logits)


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_supposed_acceptance_keeps_that_share(chance: float) -> None:
    """Whatever was drafted: of each position that comes before no refused one, `chance`; rows that aren't finite end a
    request all the same, and its own last token stays the policy's."""
    logits, drafted, packed, params, firsts = case()
    logits[packed.cu_seqlens[4]] = torch.nan
    sampling = SamplingBatch.of(params, VOCAB, CPU)
    real = judge(logits, drafted, packed, sampling, firsts)
    tried = kept = 0
    for seed in range(300):
        got = acceptance.supposed(real, drafted, packed, sampling.seeds_B + seed, firsts, chance)
        most = packed.lengths_B - 1
        assert got.accepted_B[4] == 0
        tried += int(torch.minimum(got.accepted_B + 1, most)[torch.arange(packed.num_seqs) != 4].sum())
        kept += int(got.accepted_B.sum())
        inside = packed.cols_T < got.accepted_B[packed.rows_T]
        assert torch.equal(got.tokens_T, torch.where(inside, drafted, real.tokens_T))
        assert torch.equal(got.committed_T, packed.cols_T <= got.accepted_B[packed.rows_T])
    assert abs(kept / tried - chance) <= 4 * (chance * (1 - chance) / tried) ** 0.5

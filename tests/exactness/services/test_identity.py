"""Token identity in float32 with the real target and real services: greedy equals `transformers`'
generate, alone, beside others, after preemption and after a shared prefix; coupled gives the same
tokens for every draft and K."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from library_text import LibraryText, library_text
from models import depth_cut, tiny_config, tiny_eagle3, tiny_exit, tiny_heads, tiny_module, twin
from paged_engines import shorten_pages
from pages import check_pages
from stack import Stack, running_stack

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from outrider.drafters.drafter import DraftRequest
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.interface import ModelInfo, SequenceStep
from outrider.engine.paged_engine import PagedEngine
from outrider.limits import PAGE_SIZE
from outrider.models.loading import load_model
from outrider.models.module_replacement import speed_up
from outrider.models.sources import resolve_model
from outrider.models.student import load_drafter
from outrider.request import GenerateRequest
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling_params import SamplingParams
from outrider.tokenizer import TokenizerText
from target_service.actor import self_drafter_of
from target_service.self_drafting import SelfDrafter

pytestmark = pytest.mark.xdist_group("identity")

DRAFT_LAYERS = 4
NUM_DRAFT_TOKENS = (0, 3, 8)
CROWD = 12
CACHE_BYTES = 2**27
"""Of an engine, of which a test has up to six."""
SMALL_PAGE = 4
"""Tokens of a page where pages are short, so that a few new tokens need more of them."""

SUBJECTS = (
    "a lighthouse keeper", "prime numbers", "the smell of rain", "a broken bicycle",
    "an honest thief", "how bread rises", "a map of the moon", "the last train home",
    "a stubborn mule", "why leaves fall",
)  # fmt: skip
FORMS = (
    "Write two sentences about {}.",
    "Once upon a time there was {}. There was {}, and",
    "List five words about {}:\n1.",
    "Q: What should one know about {}?\nA:",
    "def describe():\n    '''Tell of {}.'''\n    return",
)
PROMPTS = [form.replace("{}", subject) for subject in SUBJECTS for form in FORMS]
PREFACE = (
    "The following is taken from a collection of short notes that travellers wrote down in the "
    "evening, after a long day on foot, when the lamps were lit and nobody spoke any more.\n"
)


@dataclass
class Real:
    """The demo target in float32, and its first layers as a draft, loaded once."""

    directory: Path
    module: Any
    cut: tuple[Any, Any]
    info: Any
    text: TokenizerText

    def encode(self, *texts: str) -> tuple[int, ...]:
        return tuple(token_id for text in texts for token_id in self.text.encode(text))


def draft_engine(module: Any, info: Any) -> PagedEngine:
    return PagedEngine(module, info, max_num_seqs=CROWD, kv_cache_memory_bytes=CACHE_BYTES)


class Target(PagedEngine):
    """Records the largest number of sequences in a step."""

    most_at_once = 0

    def forward(self, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
        self.most_at_once = max(self.most_at_once, len(steps))
        return super().forward(steps)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    torch.set_num_threads(1)
    directory = resolve_model("demo")
    module, info = load_model(directory, name="demo", dtype="float32")
    cut = depth_cut(directory, tmp_path_factory.mktemp("cut"), DRAFT_LAYERS)
    drafting = load_model(cut, name="cut", dtype="float32")
    return Real(directory, module, drafting, info, TokenizerText.load(directory))


def target_engine(real: Real, **options: int) -> Target:
    options.setdefault("kv_cache_memory_bytes", CACHE_BYTES)
    return Target(twin(real.module), real.info, max_num_seqs=CROWD, **options)


@asynccontextmanager
async def drafted_by_cut(real: Real, target: Target, directory: Path) -> AsyncIterator[Stack]:
    module, info = real.cut
    async with running_stack(target, draft_engine(twin(module), info), directory) as stack:
        yield stack


@pytest.fixture
async def with_cut(real: Real, tmp_path: Path) -> AsyncIterator[Stack]:
    async with drafted_by_cut(real, target_engine(real), tmp_path) as stack:
        yield stack


@dataclass
class Asked:
    """A request and its expected answer."""

    prompt: tuple[int, ...]
    num_draft_tokens: int
    expected: LibraryText


@pytest.fixture(scope="module")
def crowd(real: Real) -> list[Asked]:
    prompts = [real.encode(prompt) for prompt in PROMPTS[::3][:CROWD]]
    return [
        Asked(prompt, NUM_DRAFT_TOKENS[i % 3], library_text(real.module, prompt, 8))
        for i, prompt in enumerate(prompts)
    ]


async def complete(
    stack: Stack, prompt: tuple[int, ...], num_tokens: int, k: int, seed: int | None = None
) -> tuple[int, ...]:
    request = GenerateRequest(
        prompt,
        sampling=SamplingParams(temperature=0.0 if seed is None else 1.0),
        max_tokens=num_tokens,
        seed=seed,
        num_draft_tokens=k,
    )
    return (await stack.client.complete(request)).token_ids


async def check_greedy(stack: Stack, real: Real, prompts: list[str], num_tokens: int) -> None:
    for prompt in prompts:
        ids = real.encode(prompt)
        expected = library_text(real.module, ids, num_tokens)
        for k in NUM_DRAFT_TOKENS:
            expected.check(await complete(stack, ids, num_tokens, k))


@pytest.mark.real_model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [(PROMPTS[:1], 24), pytest.param(PROMPTS, 64, marks=pytest.mark.full)],
    ids=["one prompt", "all prompts"],
)
async def test_greedy_equals_the_library(
    with_cut: Stack, real: Real, prompts: list[str], num_tokens: int
) -> None:
    """K in {0, 3, 8}, with a 4-layer cut of the target as draft."""
    await check_greedy(with_cut, real, prompts, num_tokens)


async def check_at_once(stack: Stack, asked: Sequence[Asked]) -> None:
    texts = await asyncio.gather(
        *(complete(stack, a.prompt, len(a.expected.tokens), a.num_draft_tokens) for a in asked)
    )
    for each, text in zip(asked, texts, strict=True):
        each.expected.check(text)


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_greedy_equals_the_library_in_a_batch(
    real: Real, crowd: list[Asked], tmp_path: Path
) -> None:
    """K in {0, 3, 8} mixed; most sessions share steps."""
    target = target_engine(real)
    async with drafted_by_cut(real, target, tmp_path) as stack:
        await check_at_once(stack, crowd)
    assert target.most_at_once > CROWD // 2


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_greedy_equals_the_library_after_preemption(
    real: Real, crowd: list[Asked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On pages for half of their prompts: younger sessions repeatedly lose theirs to older ones,
    and resync."""
    shorten_pages(monkeypatch, SMALL_PAGE)
    config = real.module.config
    slot_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    num_pages = sum(-(-len(each.prompt) // SMALL_PAGE) for each in crowd) // 2
    target = target_engine(real, kv_cache_memory_bytes=num_pages * SMALL_PAGE * slot_bytes)
    assert target.page_counts().num_pages == num_pages
    async with drafted_by_cut(real, target, tmp_path) as stack:
        await check_at_once(stack, crowd)
        assert stack.target._worker.figures.num_preemptions >= CROWD // 4


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_greedy_equals_the_library_behind_a_shared_prefix(
    with_cut: Stack, real: Real
) -> None:
    """Three requests with one preface, K 0, 3 and 8: the later two run none of its whole pages."""
    num_whole = len(real.encode(PREFACE)) // PAGE_SIZE * PAGE_SIZE
    for index, (k, prompt) in enumerate(zip(NUM_DRAFT_TOKENS, PROMPTS[1::7], strict=False)):
        ids = real.encode(PREFACE, prompt)
        library_text(real.module, ids, 12).check(await complete(with_cut, ids, 12, k))
        pages = with_cut.target._worker.figures.pages
        assert pages is not None
        assert pages.prefix_hits == index * num_whole


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_coupled_tokens_do_not_depend_on_the_draft(
    with_cut: Stack, real: Real, tmp_path: Path
) -> None:
    """Temperature 1: the same tokens for K = 0, 3, 8 and for three drafters: a 4-layer cut of the
    target; the shipped one; and a hybrid of the target's weights in 8 bits with suffix decoding,
    which has seen the same answer before."""
    prompt = real.encode(PROMPTS[3])
    expected = await complete(with_cut, prompt, 12, 0, seed=0)

    async def check(stack: Stack, *draft_tokens: int) -> None:
        for k in draft_tokens:
            assert await complete(stack, prompt, 12, k, seed=0) == expected

    await check(with_cut, 3, 8)
    shipped = load_drafter(
        resolve_model("demo-drafter"), real.directory, name="demo-drafter", target="demo",
        dtype="float32",
    )  # fmt: skip
    draft = draft_engine(*shipped)
    async with running_stack(target_engine(real), draft, tmp_path / "shipped") as stack:
        await check(stack, 3, 8)
        await check_greedy(stack, real, PROMPTS[5:6], 12)
    rounded = twin(real.module)
    speed_up(rounded, bits=8)
    draft = draft_engine(rounded, real.info)
    async with running_stack(
        target_engine(real), draft, tmp_path / "hybrid", lookup=SuffixDrafter()
    ) as stack:
        await check(stack, 8, 3, 0)


class Counted:
    """A `SelfDrafter` that counts its draft tokens."""

    def __init__(self, drafter: SelfDrafter | None) -> None:
        assert drafter is not None
        self._drafter = drafter
        self.reads_features = drafter.reads_features
        self.num_tokens = 0

    def propose(
        self, requests: Sequence[DraftRequest], hidden_states: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        found = self._drafter.propose(requests, hidden_states)
        self.num_tokens += sum(map(len, found))
        return found


class CountedHead(FeatureDrafter):
    """Counts its draft tokens."""

    num_tokens = 0

    def propose(self, requests: Sequence[Any]) -> list[Any]:
        found = super().propose(requests)
        self.num_tokens += sum(len(one) for one in found if isinstance(one, Proposal))
        return found


TINY_VOCAB = 24
TINY_PAGES = 28
"""For half of what these tiny sessions hold."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny module in float64, for engines of short pages."""
    torch.set_num_threads(1)
    shorten_pages(monkeypatch, SMALL_PAGE)
    config = tiny_config("llama", TINY_VOCAB)
    config.num_hidden_layers = 3
    return tiny_module(config, dtype=torch.float64)


def tiny_engine(module: Any, **own: Any) -> Target:
    """With so few pages that concurrent sessions preempt each other."""
    info = ModelInfo("tiny", TINY_VOCAB, 128, "float64", (), "w", "tiny")
    slot_bytes = 3 * 2 * 2 * 8 * 8
    if (layer := own.get("draft_layer")) is not None:
        pair_width = 0 if own.get("drafts_apart") else 2 * 2 * 8
        slot_bytes += (pair_width + layer.module.width) * 8
    num_bytes = TINY_PAGES * SMALL_PAGE * slot_bytes
    return Target(module, info, max_num_seqs=CROWD, kv_cache_memory_bytes=num_bytes, **own)


async def check_tiny(stack: Stack, module: Any) -> None:
    """Greedy equals the library, and coupled tokens are the same for K = 0 and 4, with many
    sessions at once."""
    random = torch.Generator().manual_seed(5)
    prompts = [
        tuple(torch.randint(TINY_VOCAB, (8 + n,), generator=random).tolist()) for n in range(CROWD)
    ]
    asked = [Asked(prompt, 4, library_text(module, prompt, 12)) for prompt in prompts]
    await check_at_once(stack, asked)
    texts = [
        await asyncio.gather(
            *(complete(stack, prompt, 12, k, seed) for seed, prompt in enumerate(prompts))
        )
        for k in (0, 4)
    ]
    assert texts[0] == texts[1]
    assert stack.target._worker.figures.num_preemptions > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["draft_heads", "exit_head", "draft_layer"])
@pytest.mark.parametrize("siblings", [0, 2])
async def test_a_target_that_drafts_itself_writes_what_it_would_without(
    tiny: Any, tmp_path: Path, kind: str, siblings: int
) -> None:
    original, ids = twin(tiny), range(0, TINY_VOCAB, 2)
    makers: dict[str, Any] = {
        "draft_heads": tiny_heads, "exit_head": tiny_exit, "draft_layer": tiny_eagle3
    }  # fmt: skip
    target = tiny_engine(tiny, **{kind: makers[kind](tiny, ids)})
    drafter = Counted(self_drafter_of(target))
    async with running_stack(
        target, None, tmp_path, draft_siblings=siblings, self_drafter=drafter
    ) as stack:
        await check_tiny(stack, original)
    assert drafter.num_tokens > CROWD * 12
    check_pages(target)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("siblings", [0, 2])
async def test_a_head_apart_from_its_target_leaves_the_text_as_it_is(
    tiny: Any, tmp_path: Path, siblings: int
) -> None:
    """Both are short of pages; what either loses is computed or sent again."""
    original, ids = twin(tiny), tuple(range(0, TINY_VOCAB, 2))
    head = tiny_eagle3(tiny, ids)
    target = tiny_engine(tiny, draft_layer=head, drafts_apart=True)
    info = ModelInfo("head", TINY_VOCAB, 128, "float64", (), "w", "tiny", ids)
    num_bytes = TINY_PAGES * SMALL_PAGE * 2 * 2 * 8 * 8
    draft = HeadEngine(head, info, max_num_seqs=CROWD, kv_cache_memory_bytes=num_bytes)
    drafter = CountedHead(head, draft)
    async with running_stack(
        target, None, tmp_path, draft_siblings=siblings, head=drafter
    ) as stack:
        await check_tiny(stack, original)
        assert stack.draft._worker.figures.num_preemptions > 0
    assert drafter.num_tokens > CROWD * 12
    for engine in (target, draft):
        check_pages(engine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("siblings", [0, 2])
async def test_a_draft_in_one_pass_leaves_the_text_as_it_is(
    tiny: Any, tmp_path: Path, siblings: int
) -> None:
    """Chains with look-ahead, or trees. It knows the target's weights."""
    original, draft = twin(tiny), tiny_engine(twin(tiny))
    target = tiny_engine(tiny)
    async with running_stack(
        target, draft, tmp_path, draft_siblings=siblings, parallel_token=TINY_VOCAB - 1
    ) as stack:
        await check_tiny(stack, original)
    check_pages(draft)

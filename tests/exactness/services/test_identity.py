"""Token identity through real services: greedy equals `transformers`' generate, and coupled gives
the same tokens for every draft and K. With the real target in float32, and with tiny ones in
float64 whose sessions share steps and prefixes and preempt each other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.feature_drafter import FeatureDrafter, HeadEngine
from outrider.engine.paged_engine import PagedEngine
from outrider.interfaces.engine import ModelInfo
from outrider.models.loading import load_model
from outrider.models.sources import resolve_model
from outrider.models.student import load_student
from outrider.models.tokenizer import TokenizerText
from outrider.speculation.sampling_params import Rule
from target_service.actor import self_drafter_of
from tests.support.library_text import library_text
from tests.support.models import depth_cut, tiny_config, tiny_eagle3, tiny_module, twin
from tests.support.mtp_models import mtp_target, tiny_mtp
from tests.support.paged_engines import shorten_pages
from tests.support.pages import check_pages
from tests.support.rounds import RULES
from tests.support.same_tokens import request
from tests.support.stack import Stack, running_stack

pytestmark = pytest.mark.xdist_group("identity")

DRAFT_LAYERS = 4
NUM_DRAFT_TOKENS = (0, 3, 8)
CROWD = 12
CACHE_BYTES = 2**27
"""For one engine, of which a test has up to six."""
SMALL_PAGE = 4
"""Tokens of a short page. A few new tokens then need another page."""

SUBJECTS = (
    "a lighthouse keeper",
    "prime numbers",
    "the smell of rain",
    "a broken bicycle",
    "an honest thief",
    "how bread rises",
    "a map of the moon",
    "the last train home",
    "a stubborn mule",
    "why leaves fall",
)
FORMS = (
    "Write two sentences about {}.",
    "Once upon a time there was {}. There was {}, and",
    "List five words about {}:\n1.",
    "Q: What should one know about {}?\nA:",
    "def describe():\n    '''Tell of {}.'''\n    return",
)
PROMPTS = [form.replace("{}", subject) for subject in SUBJECTS for form in FORMS]


@dataclass
class Real:
    """The demo target in float32, and its first layers as a draft, loaded once."""

    directory: Path
    module: Any
    cut: tuple[Any, Any]
    info: Any
    text: TokenizerText

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.text.encode(text))


def engine_of(module: Any, info: Any) -> PagedEngine:
    return PagedEngine(module, info, max_num_seqs=CROWD, kv_cache_memory_bytes=CACHE_BYTES)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    torch.set_num_threads(1)
    directory = resolve_model("demo")
    module, info = load_model(directory, name="demo", dtype="float32")
    cut = depth_cut(directory, tmp_path_factory.mktemp("cut"), DRAFT_LAYERS)
    drafting = load_model(cut, name="cut", dtype="float32")
    return Real(directory, module, drafting, info, TokenizerText.load(directory))


def target_engine(real: Real) -> PagedEngine:
    return engine_of(twin(real.module), real.info)


@pytest.fixture
async def with_cut(real: Real, tmp_path: Path) -> AsyncIterator[Stack]:
    """Runs the services with the target's first 4 layers as the draft."""
    module, info = real.cut
    async with running_stack(target_engine(real), engine_of(twin(module), info), tmp_path) as stack:
        yield stack


async def complete(
    stack: Stack, prompt: tuple[int, ...], num_tokens: int, k: int, seed: int | None = None
) -> Any:
    wanted = request(prompt, seed, k, num_tokens, temperature=0.0 if seed is None else 1.0)
    return await stack.client.complete(wanted)


async def check_greedy(stack: Stack, real: Real, prompts: list[str], num_tokens: int) -> None:
    for prompt in prompts:
        ids = real.encode(prompt)
        expected = library_text(real.module, ids, num_tokens)
        for k in NUM_DRAFT_TOKENS:
            expected.check((await complete(stack, ids, num_tokens, k)).token_ids)


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
    await check_greedy(with_cut, real, prompts, num_tokens)


@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_coupled_tokens_ignore_the_draft(with_cut: Stack, real: Real, tmp_path: Path) -> None:
    prompt = real.encode(PROMPTS[3])
    expected = (await complete(with_cut, prompt, 12, 0, seed=0)).token_ids

    async def check(stack: Stack) -> None:
        for k in NUM_DRAFT_TOKENS[1:]:
            assert (await complete(stack, prompt, 12, k, seed=0)).token_ids == expected

    await check(with_cut)
    shipped = load_student(
        resolve_model("demo-drafter"),
        real.directory,
        name="demo-drafter",
        target="demo",
        dtype="float32",
    )
    draft = engine_of(*shipped)
    async with running_stack(target_engine(real), draft, tmp_path / "shipped") as stack:
        await check(stack)
        await check_greedy(stack, real, PROMPTS[5:6], 12)


TINY_VOCAB = 24
TINY_PAGES = 28
"""Pages for half of what these tiny sessions hold."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny module in float64, for engines with short pages."""
    torch.set_num_threads(1)
    shorten_pages(monkeypatch, SMALL_PAGE)
    return tiny_module(tiny_config("llama", TINY_VOCAB, num_hidden_layers=3), dtype=torch.float64)


def tiny_engine(module: Any, **own: Any) -> PagedEngine:
    """An engine with so few pages that concurrent sessions preempt each other."""
    info = ModelInfo("tiny", TINY_VOCAB, 128, "float64", (), "w", "tiny")
    slot_bytes = 3 * 2 * 2 * 8 * 8
    if (layer := own.get("draft_layer")) is not None:
        slot_bytes += ((0 if own.get("drafts_apart") else 2 * 2 * 8) + layer.module.width) * 8
    num_bytes = TINY_PAGES * SMALL_PAGE * slot_bytes
    return PagedEngine(module, info, max_num_seqs=CROWD, kv_cache_memory_bytes=num_bytes, **own)


async def check_tiny(stack: Stack, module: Any) -> None:
    """Greedy equals the library, and coupled tokens are the same for K = 0 and 4, with many
    sessions at once, of which every second one begins alike."""
    random = torch.Generator().manual_seed(5)
    own = [torch.randint(TINY_VOCAB, (8 + n,), generator=random).tolist() for n in range(CROWD)]
    prompts = [tuple(own[-1][:6] + ids[6:] if n % 2 else ids) for n, ids in enumerate(own)]
    num_drafted = 0

    async def texts(k: int, *, is_greedy: bool = False) -> list[tuple[int, ...]]:
        nonlocal num_drafted
        asked = zip(prompts, [None if is_greedy else seed for seed in range(CROWD)], strict=True)
        answers = await asyncio.gather(*(complete(stack, ids, 12, k, seed) for ids, seed in asked))
        num_drafted += sum(answer.metrics.num_draft_tokens for answer in answers)
        return [answer.token_ids for answer in answers]

    for prompt, text in zip(prompts, await texts(4, is_greedy=True), strict=True):
        library_text(module, prompt, 12).check(text)
    assert await texts(0) == await texts(4)
    assert num_drafted > CROWD * 12
    figures = stack.target._worker.figures
    assert figures.num_preemptions > 0
    assert figures.pages is not None
    assert figures.pages.prefix_hits > 0


@pytest.mark.timeout(300)
async def test_a_target_that_drafts_itself_writes_the_same(tiny: Any, tmp_path: Path) -> None:
    original, ids = twin(tiny), range(0, TINY_VOCAB, 2)
    target = tiny_engine(tiny, draft_layer=tiny_eagle3(tiny, ids))
    async with running_stack(target, None, tmp_path, self_drafter=self_drafter_of(target)) as stack:
        await check_tiny(stack, original)
    check_pages(target)


HEADS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "eagle3": (
        lambda: tiny_module(tiny_config("llama", TINY_VOCAB, num_hidden_layers=3)).double(),
        lambda module: tiny_eagle3(module, range(0, TINY_VOCAB, 2)),
    ),
    "mtp": (lambda: mtp_target("deepseek_v3", TINY_VOCAB), tiny_mtp),
}
"""Targets, and their heads. Experts run in float32 only."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", HEADS)
async def test_rounds_that_a_head_runs_ahead_are_those_of_the_coordinator(
    kind: str, tmp_path: Path
) -> None:
    """Under every rule, also with penalties: the same tokens in the same rounds. Under greedy and
    coupled, these are the tokens without drafts."""
    torch.set_num_threads(1)
    asked = [
        replace(request((n, 3, 1, 4, 1, 5), n, 4, 24), rule=rule, sampling=sampling)
        for n, (rule, sampling) in enumerate(RULES * 2)
    ]
    info = ModelInfo("tiny", TINY_VOCAB, 128, "float", (), "w", "tiny")
    found: dict[int, list[tuple[Any, ...]]] = {}
    num_items: dict[int, int] = {}
    make_target, make_head = HEADS[kind]
    for run_ahead in (0, 8):
        module = make_target()
        layer = make_head(module)
        target = PagedEngine(twin(module), info, max_num_seqs=CROWD, draft_layer=layer)
        directory = tmp_path / str(run_ahead)
        directory.mkdir()
        options: dict[str, Any] = {"self_drafter": self_drafter_of(target)}
        async with running_stack(
            target, None, directory, run_ahead_rounds=run_ahead, **options
        ) as stack:
            answers = await asyncio.gather(*map(stack.client.complete, asked))
            found[run_ahead] = [
                (one.token_ids, one.metrics.num_rounds, one.metrics.num_accepted_draft_tokens)
                for one in answers
            ]
            num_items[run_ahead] = stack.target.num_items
            for one, (token_ids, *_) in zip(asked, found[run_ahead], strict=True):
                if one.rule in (Rule.GREEDY, Rule.COUPLED):
                    plain = await stack.client.complete(replace(one, num_draft_tokens=0))
                    assert plain.token_ids == token_ids
    assert found[0] == found[8]
    num_rounds = sum(rounds for _, rounds, _ in found[0])
    assert sum(accepted for *_, accepted in found[0]) > num_rounds / 10
    assert num_items[0] == num_rounds
    assert num_items[8] < num_rounds / 2


@pytest.mark.timeout(300)
async def test_a_head_apart_from_its_target_leaves_the_text(tiny: Any, tmp_path: Path) -> None:
    """Both are short of pages; what either loses is computed or sent again."""
    original, ids = twin(tiny), tuple(range(0, TINY_VOCAB, 2))
    head = tiny_eagle3(tiny, ids)
    target = tiny_engine(tiny, draft_layer=head, drafts_apart=True)
    info = ModelInfo("head", TINY_VOCAB, 128, "float64", (), "w", "tiny", ids)
    num_bytes = TINY_PAGES * SMALL_PAGE * 2 * 2 * 8 * 8
    draft = HeadEngine(head, info, max_num_seqs=CROWD, kv_cache_memory_bytes=num_bytes)
    async with running_stack(target, None, tmp_path, head=FeatureDrafter(head, draft)) as stack:
        await check_tiny(stack, original)
        assert stack.draft._worker.figures.num_preemptions > 0
    for engine in (target, draft):
        check_pages(engine)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("look_ahead", [0, 8])
async def test_a_draft_in_one_pass_leaves_the_text_as_it_is(
    tiny: Any, tmp_path: Path, look_ahead: int
) -> None:
    """The draft knows the target's weights."""
    original, draft = twin(tiny), tiny_engine(twin(tiny))
    async with running_stack(
        tiny_engine(tiny), draft, tmp_path, look_ahead=look_ahead, parallel_token=TINY_VOCAB - 1
    ) as stack:
        await check_tiny(stack, original)
    check_pages(draft)

"""Options of benchmarks. A field of an options class is an option of the command."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from outrider import limits
from outrider.config.deployment import Device, Dtype
from outrider.errors import SettingError
from outrider.foundation.settings import between, checked
from outrider.speculation.sampling_params import Rule

if TYPE_CHECKING:
    from outrider.interfaces.request import GenerateRequest

from .prompts import MAX_TOKENS_MAX, PROMPTS_MAX, BenchPrompt, read_prompts, select_prompts

RANDOM_MODELS = ("random-1b", "random-7b")
"""Names of models that `bench device` makes on the device, with random weights."""

Concurrency = Annotated[int, between(1, limits.SESSIONS_PER_COORDINATOR_MAX)]
DraftTokens = Annotated[int, between(1, limits.NUM_DRAFT_TOKENS_MAX)]
MaxTokens = Annotated[int, between(1, MAX_TOKENS_MAX)]
NumPrompts = Annotated[int | None, between(1, PROMPTS_MAX)]
Temperature = Annotated[float, between(0, limits.TEMPERATURE_MAX)]


@checked()
class Options:
    """Base class of all options."""

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """The values that a command has parsed into `arguments`."""
        given = vars(arguments)
        return cls(**{name: given[name] for name in cls.__dataclass_fields__ if name in given})


@checked()
class PromptOptions(Options):
    """Prompts, and the length of their completions."""

    prompts: Path | None = None
    """JSONL file with a `prompt` in each line, and optionally `category` and `max_tokens`; unset =
    the built-in prompts."""
    num_prompts: NumPrompts = None
    """Number of prompts, taken evenly from the categories."""
    max_tokens: MaxTokens = 256
    """Maximum number of tokens of a completion."""
    raw: bool = False
    """Do not apply the model's chat template."""

    def load_prompts(self) -> tuple[BenchPrompt, ...]:
        """The prompts to measure. Raises `SettingError`."""
        prompts = read_prompts(self.prompts)
        return prompts if self.num_prompts is None else select_prompts(prompts, self.num_prompts)


@checked()
class DecodingOptions(PromptOptions):
    rule: Literal["token", "block", "coupled"] = "block"
    """Acceptance rule at temperatures above 0."""
    num_draft_tokens: DraftTokens | None = None
    """Maximum number of draft tokens of a round; unset = the deployment's default."""

    def drafted(self, num_draft_tokens: int, temperature: float) -> "GenerateRequest":
        """A request with drafts. `Contestant.ask` adds each prompt to it. K is the option
        `num_draft_tokens`, or the argument if this is unset. Raises `SettingError` if K is 0.

        Under the rules token and block, the request has no seed: a session that repeats the seed of
        another session, such as that of another side, would have a constant K."""
        from .measurement import bench_request

        bound = self.num_draft_tokens or num_draft_tokens
        if bound == 0:
            raise SettingError(
                "num_draft_tokens", "0 decodes without drafts, so there is nothing to compare"
            )
        rule = Rule(self.rule) if temperature else Rule.GREEDY
        seed = 0 if rule.absolute_noise else None
        return bench_request(
            "", self.max_tokens, temperature, rule=rule, seed=seed, num_draft_tokens=bound
        )


@checked()
class AcceptanceOptions(PromptOptions):
    max_tokens: MaxTokens = 128
    hits: bool = False
    """Also report how often the draft model predicts the outcome of a round correctly."""
    num_draft_tokens: DraftTokens = 4
    """Draft tokens of a round, for `--hits`."""


@checked()
class EngineOptions(Options):
    repetitions: Annotated[int, between(1, 100)] = 3
    """Number of repetitions of the parts `sessions` and `waits`; the report has medians."""
    parts: tuple[Literal["sessions", "waits", "steps"], ...] = ("sessions", "waits", "steps")
    """What to measure."""


@checked()
class DeviceOptions(Options):
    model: str = RANDOM_MODELS[-1]
    """Model to load. `random-1b` and `random-7b` have random weights."""
    device: Device = "auto"
    """`auto`, `cpu` or `cuda[:N]`."""
    dtype: Dtype = "bfloat16"
    """Data type of weights, keys and values."""
    context_tokens: Annotated[int, between(1, 1_000_000)] = 256
    """Tokens in the cache before each step."""
    num_draft_tokens: DraftTokens = 8
    """Draft tokens of a round."""


@checked()
class OverheadOptions(Options):
    parts: tuple[Literal["rounds", "capacity", "transports", "steps"], ...] = ("rounds",)
    """What to measure. `steps`: tokens/s with emulated steps beside the ideal, which is sessions *
    tokens a round / time of a round, and the CPU time of a token by process. A round takes a step,
    and with a remote draft also the steps of the draft."""
    rounds: Annotated[int, between(1, 100_000)] = 2_000
    """Number of rounds, for the part `rounds`."""
    sessions: tuple[Concurrency, ...] = ()
    """Sessions at a time, for the parts `steps` (unset = 1,8,32,128) and `capacity` (the largest;
    unset = 500)."""
    seconds: Annotated[float, between(1, 600)] = 10.0
    """Length of the measurement, for the part `capacity` and for each configuration of `steps`, s.
    With the other defaults, `steps` takes about 4 minutes."""
    steps_ms: tuple[Annotated[float, between(0.1, 60_000)], ...] = (3.0, 5.0, 12.0, 36.0)
    """Times of a target's step, for the part `steps`, ms."""
    drafting: tuple[Literal["plain", "lookup", "resident", "remote"], ...] = ("plain",)
    """For the part `steps`: no drafts, a look-up in the coordinator, a look-up in the target
    (`resident`), or a draft service."""
    temperatures: tuple[Temperature, ...] = (0.0,)
    """Temperatures, for the part `steps`."""

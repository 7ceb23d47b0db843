"""Set-up of a process that hosts a service."""

import asyncio
import errno
import gc
import json
import logging
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from outrider.config.deployment import DraftConfig, TargetConfig
from outrider.engine.paged_engine import PagedEngine
from outrider.engine.tensor_parallel import group, parallel_engine
from outrider.engine.tensor_parallel.rank_rpc import LOOPBACK, Rendezvous
from outrider.errors import BadRequest, ConfigError, SettingError
from outrider.grammar.constraint import Constraint
from outrider.interfaces.engine import ModelInfo, PageCounts, SequenceStep
from outrider.kernels import cpu, openvino, processor
from outrider.kernels.cpu import KernelsUnavailable
from outrider.models.few_bits import round_weights
from outrider.replica import engines, logs, rank_process, vllm_release
from outrider.replica.engines import build_engine
from outrider.replica.grammars import build_grammars
from outrider.replica.host import ReplicaHost
from outrider.replica.logs import log_at, log_to
from outrider.replica.service import describe_model
from outrider.transport import addresses
from tests.support import halves
from tests.support.cuda_threads import cuda_of
from tests.support.models import byte_level_tokenizer, save_tiny_model, tiny_config, tiny_module
from tests.support.paged_engines import dense, openvino_kernels
from tests.support.reference_kernels import ReferenceKernels
from tests.support.thread_ranks import ThreadRank, on_each, thread_ranks


@pytest.mark.parametrize("has_route", [True, False])
def test_an_address_for_all_is_advertised_as_one_that_others_reach(
    has_route: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a route to others, the name of the machine decides, even if it means loopback."""

    def connect(_probe: socket.socket, _address: object) -> None:
        if not has_route:
            raise OSError(errno.ENETUNREACH, "no route")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "getsockname", lambda _probe: ("10.1.2.3", 40_000))
    monkeypatch.setattr(socket, "gethostbyname", lambda _name: "127.0.1.1")
    everywhere = "0.0.0.0"  # noqa: S104
    found = addresses.advertised(everywhere, f"{everywhere}:5")
    assert found == ("10.1.2.3:5" if has_route else "127.0.1.1:5")
    assert addresses.advertised("127.0.0.1", "127.0.0.1:5") == "127.0.0.1:5"


def test_logs_go_where_they_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_to(str(tmp_path), "target")
    for chosen in ("info", "debug", "warning"):
        log_at(chosen)
        logging.getLogger("coordinator.decoding.sessions").debug("own at %s", chosen)
        logging.getLogger("asyncio").debug("library's at %s", chosen)
        logging.getLogger("outrider.models.tokenizer").info("news at %s", chosen)
    log_to("", "draft")
    logging.getLogger("x").info("lost")
    log_to(logs.STANDARD_ERROR, "draft")
    logging.getLogger("x").info("elsewhere")
    assert json.loads(capsys.readouterr().err)["message"] == "elsewhere"
    [path] = tmp_path.iterdir()
    assert path.name == "target.log"
    lines = map(json.loads, path.read_text("utf-8").splitlines())
    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "news at info"),
        ("DEBUG", "own at debug"),
        ("INFO", "news at debug"),
    ]


def test_too_little_memory_names_the_setting_of_its_role(tmp_path: Path) -> None:
    directory = str(save_tiny_model(tmp_path))
    target = TargetConfig(directory=directory, kv_cache_memory_bytes=5)
    draft = DraftConfig(model="tiny", directory=directory, kv_cache_memory_bytes=5)
    for config, prefix in ((target, ""), (draft, "draft_")):
        with pytest.raises(SettingError, match="5 bytes hold no page") as bad:
            build_engine(config, 1)
        assert bad.value.key == f"{prefix}kv_cache_memory_bytes"
        long = replace(config, kv_cache_memory_bytes=20_000, max_model_len=128)
        with pytest.raises(SettingError, match=r"128 tokens do not fit .* holds") as bad:
            build_engine(long, 1)
        assert bad.value.key == f"{prefix}max_model_len"


def test_pages_are_counted_in_the_dtype_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without bfloat16 needs twice the memory. With float32, the fused kernels of
    `amd-pace` do not run, and pages may have other sizes."""
    directory = str(save_tiny_model(tmp_path, dtype=torch.bfloat16, max_model_len=4096))
    config = TargetConfig(directory=directory, kv_cache_memory_bytes=2**18)
    native: Any = build_engine(replace(config, dtype="bfloat16"), 1)
    monkeypatch.setattr(processor, "has_bfloat16", lambda: False)
    engine: Any = build_engine(config, 1)
    assert engine.info.dtype == "float32"
    wide, narrow = engine.page_counts(), native.page_counts()
    assert wide.num_pages * wide.page_size == narrow.num_pages * narrow.page_size // 2
    assert cpu.PACKAGE not in engine.kernels_name


@pytest.mark.parametrize(
    ("config", "fewer", "own_cores"),
    [
        (TargetConfig(cpu_kernels="torch"), 1, True),
        (TargetConfig(cpu_kernels="torch", num_threads=2), None, True),
        (TargetConfig(cpu_kernels="torch", deterministic=True), None, True),
        (DraftConfig(model="tiny", cpu_kernels="torch"), None, False),
        (TargetConfig(cpu_kernels="openvino"), 1, True),
    ],
)
def test_threads_of_a_target_have_own_cores_also_if_all_steps_run_on_all_threads(
    config: TargetConfig | DraftConfig,
    fewer: int | None,
    own_cores: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While OpenVINO runs the steps, the engine ignores both."""
    if config.cpu_kernels == "openvino":
        openvino_kernels()
    make = Mock(wraps=PagedEngine)
    monkeypatch.setattr("outrider.engine.paged_engine.PagedEngine", make)
    before = torch.get_num_threads()
    try:
        build_engine(replace(config, directory=str(save_tiny_model(tmp_path))), 2)
    finally:
        torch.set_num_threads(before)
    options = make.call_args.kwargs
    assert (options["contended_threads"], options["own_cores"]) == (fewer, own_cores)


def scale_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Llama round the inputs of its MLPs to 8 bits, with one scale for all rows of a step."""
    plain = LlamaMLP.forward

    def quantised(block: LlamaMLP, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().max() / 127
        return plain(block, (rows / scale).round() * scale)

    monkeypatch.setattr(LlamaMLP, "forward", quantised)


def test_a_target_says_at_its_start_whether_its_rows_depend_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft draws from the q that it sends, whatever its rows depend on."""
    directory = str(save_tiny_model(tmp_path, dtype=torch.bfloat16))
    target = TargetConfig(model="tiny", directory=directory, device="cpu", dtype="bfloat16")
    draft = DraftConfig(model="tiny", directory=directory, device="cpu", dtype="bfloat16")
    warned = "model tiny: the logits of a token depend on the draft tokens after it"
    assert build_engine(target, 1).info.row_coupling == 0
    assert warned not in caplog.text
    scale_all_rows(monkeypatch)
    assert build_engine(draft, 1).info.row_coupling == 0
    assert warned not in caplog.text
    info = build_engine(target, 1).info
    assert 1e-3 < info.row_coupling < 1
    assert warned in caplog.text
    assert describe_model(info, 1, None).row_coupling == info.row_coupling


@pytest.mark.parametrize("is_coupled", [False, True])
def test_all_ranks_run_the_test_of_rows_and_the_leader_has_its_result(
    is_coupled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compare their models, and may differ in this result."""
    directory = str(save_tiny_model(tmp_path, dtype=torch.bfloat16))
    config = TargetConfig(model="tiny", directory=directory, device="cpu", dtype="bfloat16")
    ranks = thread_ranks(2)
    # Loaded one after the other, because loading makes settings of the whole process.
    shares = [engines._load(config, 1, rank) for rank in ranks]
    monkeypatch.setattr(engines, "_load", lambda *given: shares[given[-1].rank])
    if is_coupled:
        scale_all_rows(monkeypatch)
    leader, follower = on_each(2, lambda rank: build_engine(config, 1, ranks[rank]).info)
    assert (leader.row_coupling > 1e-3) is is_coupled
    assert follower.row_coupling == 0
    assert repr(leader) == repr(follower)
    for name in (cpu.PACKAGE, openvino.PACKAGE):
        assert f"{name}: they do not support several ranks" in leader.kernels


BOTH_ROLES = pytest.mark.parametrize(
    "config", [TargetConfig(device="cpu"), DraftConfig(model="tiny", device="cpu")]
)
LOADERS = {"amd-pace": (cpu, "load_pace"), "openvino": (openvino, "load_openvino")}


def use_kernels(monkeypatch: pytest.MonkeyPatch, **found: torch.dtype | None) -> list[str]:
    """Exchanges the packages that can be used. Without a dtype, a package cannot be loaded. Returns
    a list of the packages that are asked for."""
    asked = []

    def load(name: str, dtype: torch.dtype | None) -> ReferenceKernels:
        asked.append(name)
        if dtype is None:
            raise KernelsUnavailable("not on this machine")
        return ReferenceKernels(dtype)

    for key, dtype in found.items():
        name = key.replace("_", "-")
        monkeypatch.setattr(*LOADERS[name], partial(load, name, dtype))
    return asked


@BOTH_ROLES
def test_the_first_kernels_that_can_be_used_run_the_steps(
    config: TargetConfig | DraftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch's operators run them, the description says why."""
    config = replace(config, directory=str(save_tiny_model(tmp_path)))
    asked = use_kernels(monkeypatch, amd_pace=torch.float32, openvino=torch.float32)
    info = build_engine(config, 1).info
    assert info.kernels == describe_model(info, 1, None).kernels == "reference kernels"
    assert asked == ["amd-pace"]
    use_kernels(monkeypatch, amd_pace=torch.bfloat16, openvino=torch.float32)
    assert build_engine(config, 1).info.kernels == "reference kernels"
    use_kernels(monkeypatch, amd_pace=None, openvino=torch.bfloat16)
    assert build_engine(config, 1).info.kernels == (
        "torch (amd-pace: not on this machine; "
        "openvino: they are for torch.bfloat16, and the model is in torch.float32)"
    )
    asked = use_kernels(monkeypatch, amd_pace=torch.float32, openvino=torch.float32)
    assert build_engine(replace(config, cpu_kernels="torch"), 1).info.kernels == "torch"
    assert asked == []


def test_a_model_that_kernels_cannot_run_runs_on_torch_which_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the configuration names the kernels."""
    use_kernels(monkeypatch, amd_pace=torch.float32)
    directory = str(save_tiny_model(tmp_path, family="gpt_neox"))
    config = TargetConfig(directory=directory, device="cpu", cpu_kernels="amd-pace")
    said = "torch (reference kernels: its layers are not those of a Llama)"
    assert build_engine(config, 1).info.kernels == said


@pytest.mark.parametrize("name", LOADERS)
@BOTH_ROLES
def test_named_kernels_that_cannot_be_used_are_refused(
    config: TargetConfig | DraftConfig, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting is one of both roles."""
    config = replace(config, directory=str(save_tiny_model(tmp_path)), cpu_kernels=name)
    reasons = {None: "not on this machine", torch.bfloat16: "for torch.bfloat16, and the model"}
    for dtype, reason in reasons.items():
        others = dict.fromkeys(LOADERS, torch.float32) | {name: dtype}
        asked = use_kernels(
            monkeypatch, **{key.replace("-", "_"): one for key, one in others.items()}
        )
        with pytest.raises(SettingError, match=f"{name} cannot be used: .*{reason}") as bad:
            build_engine(config, 1)
        assert bad.value.key == "cpu_kernels"
        assert asked == [name]


@pytest.mark.parametrize("bits", [8, 4])
@BOTH_ROLES
def test_rounded_weights_are_those_of_the_model_that_runs(
    config: TargetConfig | DraftConfig, bits: int, tmp_path: Path
) -> None:
    """Files in bfloat16 are rounded in float32."""
    openvino_kernels()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    module = tiny_module(tiny_config("llama", **sizes), dtype=torch.bfloat16)
    module.save_pretrained(tmp_path)
    config = replace(config, directory=str(tmp_path), quantization=f"int{bits}")
    engine = build_engine(config, 1)
    assert engine.info.dtype == f"int{bits}"
    assert engine.info.kernels.startswith("openvino ")
    tokens = tuple(range(20))
    [rows] = engine.forward([SequenceStep("s", tokens, len(tokens))])
    before = dense(module.float(), tokens)
    round_weights(module, bits)
    expected = dense(module, tokens)
    assert (rows - expected).norm() < 5e-5 * expected.norm()
    assert (before - expected).norm() > 1e-3 * expected.norm()


@BOTH_ROLES
def test_rounded_weights_need_openvino(
    config: TargetConfig | DraftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kernels(monkeypatch, amd_pace=torch.bfloat16, openvino=None)
    config = replace(config, directory=str(save_tiny_model(tmp_path)), quantization="int8")
    reason = "int8 needs OpenVINO; .*openvino: not on this machine"
    with pytest.raises(SettingError, match=reason) as bad:
        build_engine(config, 1)
    assert bad.value.key == f"{'draft_' if config.role == 'draft' else ''}quantization"


def test_grammars_are_those_of_the_targets_tokenizer(tmp_path: Path) -> None:
    spoken = save_tiny_model(
        tmp_path / "spoken", vocab_size=320, eos_token_id=5, tokenizer=byte_level_tokenizer()
    )
    constraint = Constraint.of_regex("a")
    for given, ends in (((), {0, 5}), ((7,), {7})):
        made = build_grammars(DraftConfig(tokenizer_directory=str(spoken)), given)
        assert made.get(constraint).tokenizer.eos_token_ids == ends
    assert build_grammars(DraftConfig()) is None
    made = build_grammars(TargetConfig(tokenizer_directory=str(tmp_path)))
    with pytest.raises(BadRequest, match="regex: the model has no tokenizer"):
        made.get(constraint)


def test_steps_of_a_replica_run_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread uses the first device unless it chooses one."""
    chosen = cuda_of(monkeypatch)

    class Host(ReplicaHost):
        def build(self, config: Any, driver: Any, engine: Any, costs: Any) -> Any:
            assert driver.call(threading.get_ident) == chosen[0][0] != threading.get_ident()
            return "service"

    assert Host()._build(None, TargetConfig(device="cuda:1")) == "service"
    assert [device for _, device in chosen] == [torch.device("cuda", 1)]


def test_a_replicas_garbage_collections_skip_what_exists_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection of all imported modules would hold answers back for 0.2 s."""

    class Host(ReplicaHost):
        def _build(self, *_: Any) -> Any:
            return "service"

        async def serve(self, *_: Any) -> str:
            return "address"

    monkeypatch.setattr("outrider.replica.host.engine_of_a_replica", lambda *_: None)
    monkeypatch.setattr("outrider.replica.threads.use_threads", lambda *_: None)
    monkeypatch.setattr("outrider.replica.logs.log_to", lambda *_: None)
    try:
        assert asyncio.run(Host().start(TargetConfig(), "")) == "address"
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_each_rank_has_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index, which NCCL needs. Ranks say which model and how many pages they have
    loaded."""
    chosen = cuda_of(monkeypatch)
    found: list[str] = []
    said: list[str] = []
    links = SimpleNamespace(send_frame=None, receive_frame=lambda: None)
    joined = SimpleNamespace(wait_for_all=said.append, links=links, close=lambda: None)
    info = ModelInfo("tiny", 100, 64, "float32", (), "weights", "")
    loaded = iter(
        [(info, 5), (info, 5), (replace(info, weights_fingerprint="others"), 5), (info, 6)]
    )

    def build(config: TargetConfig, *_: object) -> Any:
        found.append(config.device)
        info, num_pages = next(loaded)
        return SimpleNamespace(info=info, page_counts=lambda: PageCounts(num_pages, 0, 0, 0, 0))

    def meet(_: Rendezvous, rank: int, device: torch.device, *__: Any, **___: Any) -> Any:
        found.append(str(device))
        return joined

    monkeypatch.setattr(group, "RankGroup", meet)
    for name in ("use_threads", "log_to"):
        monkeypatch.setattr(rank_process, name, lambda *_: None)
    monkeypatch.setattr(rank_process, "build_engine", build)

    async def follow() -> None:
        host = rank_process.RankHost()
        rendezvous = Rendezvous(LOOPBACK, 1, 2, b"")
        await host.start(TargetConfig(device="cuda"), rendezvous, 1, 2, 1.0, "")
        await host.wait()

    asyncio.run(follow())
    assert found == ["cuda:1", "cuda:1"]
    assert [str(device) for _, device in chosen] == ["cuda:1", "cuda:1"]
    leader = rank_process.RankLeader(2, True, 1.0)
    monkeypatch.setattr(parallel_engine, "ParallelEngine", lambda *_: None)
    for _ in range(3):
        rank_process.engine_of_a_replica(TargetConfig(device="cuda"), 1, leader)
    leader.close()
    assert found[2:] == ["cuda:0", "cuda:0"] * 3
    assert [loaded == said[0] for loaded in said] == [True, True, False, False]


async def test_a_leader_that_never_leads_stops_listening() -> None:
    host = ReplicaHost()
    rendezvous = await host.open_rendezvous(2, 2, 1.0)
    await host.stop(0.0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rendezvous.host, rendezvous.store_port), 1.0)


def test_ranks_on_vllm_meet_once_the_leader_has_loaded_its_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meeting takes at most a step's time."""
    loaded, met = threading.Event(), []

    def load(_config: TargetConfig, _module: None, ranks: ThreadRank) -> None:
        if ranks.rank == 0:
            threading.Event().wait(0.2)
            loaded.set()

    def meet(*_: object, **options: Any) -> Any:
        met.append(loaded.is_set())
        return SimpleNamespace(info=ModelInfo("tiny", 100, 1, "float32", (), "", ""))

    monkeypatch.setitem(
        sys.modules, "outrider.engine.vllm_engine", SimpleNamespace(VllmEngine=meet)
    )
    monkeypatch.setattr(vllm_release, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(engines, "_draft_check", lambda _: None)
    monkeypatch.setattr(engines, "_draft_layer", load)
    config = TargetConfig(engine="vllm", device="cpu", head="eagle3:x", head_kind="eagle3")
    ranks = thread_ranks(2)
    on_each(2, lambda rank: build_engine(config, 1, ranks[rank]))
    assert met == [True, True]


def test_a_quantised_checkpoint_that_the_library_loads_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own layers, if its answers on pages are correct. Otherwise it is refused by the
    method's name, with an alternative."""
    directory = save_tiny_model(tmp_path)
    config = TargetConfig(directory=str(directory), model="tiny", device="cpu")
    step = SequenceStep("s", (1, 2, 3), 3)
    [plain] = build_engine(config, 1).forward([step])
    halves.halve(directory)
    [found] = build_engine(config, 1).forward([step])
    assert 0 < (found - plain).norm() < 1e-2 * plain.norm()
    openvino_kernels()
    with pytest.raises(SettingError, match=r"quantised already \(halves\)"):
        build_engine(replace(config, quantization="int8"), 1)
    advice = r"--engine vllm.*quantised weights \({}\)"
    monkeypatch.setattr(halves, "lacks_kernel", True)
    with pytest.raises(ConfigError, match="model tiny.*no kernel.*" + advice.format("halves")):
        build_engine(config, 1)
    with pytest.raises(ConfigError, match=r"quantised \(halves\).*--engine vllm"):
        build_engine(config, 1, thread_ranks(2)[0])
    halves.halve(directory, "quarters")
    with pytest.raises(ConfigError, match="does not know.*" + advice.format("quarters")):
        build_engine(config, 1)


@pytest.mark.parametrize(
    ("version", "config", "said"),
    [
        (None, TargetConfig(engine="vllm"), r"engine: .*vLLM 0\.32; it is not installed"),
        ("0.33.1", DraftConfig(model="m", own_engine="vllm"), "draft_engine: .*0.33.1 is inst"),
        ("0.32.0", TargetConfig(engine="vllm", dtype="float64"), "dtype: float64"),
        ("0.32.0", TargetConfig(engine="vllm", quantization="int8"), "quantization: int8 is not"),
        (
            "0.32.0",
            DraftConfig(model="m", own_engine="vllm", quantization="int4"),
            "draft_quantization: int4 is not",
        ),
        (
            "0.32.0",
            DraftConfig(own_engine="vllm", model="student", target_directory="target"),
            "draft_engine: .*student",
        ),
    ],
)
def test_what_vllm_cannot_run_is_refused_by_name(
    version: str | None,
    config: TargetConfig | DraftConfig,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_release, "vllm_version", lambda: version)
    with pytest.raises(SettingError, match=f"^{said}"):
        build_engine(config, 1)


@pytest.mark.parametrize(
    ("expected", "version", "has_cuda", "settings"),
    [
        (True, "0.32.1", True, {}),
        (True, "0.32.1", False, {"engine": "vllm"}),
        (False, None, True, {}),
        (False, "0.33.0", True, {}),
        (False, "0.32.1", False, {}),
        (False, "0.32.1", True, {"device": "cpu"}),
        (False, "0.32.1", True, {"engine": "transformers"}),
        (False, "0.32.1", True, {"dtype": "float64"}),
        (False, "0.32.1", True, {"quantization": "int8"}),
    ],
)
def test_vllm_is_chosen_on_cuda_where_it_is_installed(
    expected: bool,
    version: str | None,
    has_cuda: bool,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_release, "vllm_version", lambda: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert engines.runs_on_vllm(TargetConfig(**settings)) is expected


@pytest.mark.parametrize(
    ("expected", "settings"),
    [
        (512, {}),
        (2048, {"engine": "vllm"}),
        (512, {"engine": "emulated:verify_ms=1"}),
        (64, {"engine": "vllm", "max_num_batched_tokens": 64}),
    ],
)
def test_steps_have_more_tokens_on_vllm_unless_a_number_is_set(
    expected: int, settings: dict[str, Any]
) -> None:
    assert engines.batched_tokens(TargetConfig(**settings)) == expected


@pytest.mark.parametrize("engine", ["auto", "vllm"])
def test_a_model_that_vllm_refuses_runs_on_transformers_unless_it_was_asked_for(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("vLLM does not load it")

    monkeypatch.setattr(engines, "runs_on_vllm", lambda _: True)
    monkeypatch.setattr(engines, "_build_vllm", refuse)
    directory = str(save_tiny_model(tmp_path))
    config = TargetConfig(engine=engine, model="tiny", directory=directory, device="cpu")
    if engine == "vllm":
        with pytest.raises(ConfigError, match="does not load"):
            build_engine(config, 1)
    else:
        assert build_engine(config, 1).info.name == "tiny"

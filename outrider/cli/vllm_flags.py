"""Flags of `vllm serve` and `vllm bench serve` 0.32 that the commands of the same name here lack,
and what to do instead. docs/serve.md has a table of the flags of `vllm serve`."""

from collections.abc import Mapping

SAME = (
    "--api-key",
    "--chat-template",
    "--config",
    "--dtype",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--host",
    "--kv-cache-memory-bytes",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--model",
    "--port",
    "--reasoning-parser",
    "--served-model-name",
    "--speculative-config",
    "--ssl-ca-certs",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--tensor-parallel-size",
    "--tool-call-parser",
    "--trust-remote-code",
)
"""Flags that mean the same in `vllm serve` and `outrider serve`. Their values may differ."""

_TEXT_ONLY = "models take only text; leave it out"
_CPU_MEMORY = "no weights, keys or values are moved to the CPU's memory; leave it out"
_NO_LORA = "adapters are not supported; merge the adapter into the weights, and serve the result"
_REPLICAS = "give `--num-targets N`, the number of replicas"
_ONE_WAY = "only `--tensor-parallel-size` divides a model"
_RAY = "Ray always places the replicas; for several machines see `--address`"
_NO_SUCH_LOG = "requests are not logged; leave it out, or see `--log-level` and `--telemetry`"
_PROXY = "not supported; put a reverse proxy in front of the server"
_LLGUIDANCE = "constraints are always compiled by llguidance; leave it out"
_SAMPLING = "requests set their sampling parameters; leave it out"
_NAMED_FILES = "files of the model's directory decide; leave it out"

SERVE: Mapping[str, str] = {
    "--enable-prefix-caching": "a tenant's equal prefixes always share pages; leave it out",
    "--enable-chunked-prefill": "long prompts always run in chunks (`--max-num-batched-tokens`); "
    "leave it out",
    "--async-scheduling": "there is no such mode; leave it out",
    "--scheduling-policy": "the policy cannot be chosen; leave it out",
    "-tp": "give `--tensor-parallel-size`",
    "--data-parallel-size": _REPLICAS,
    "-dp": _REPLICAS,
    "--api-server-count": "give `--num-coordinators N`",
    "--pipeline-parallel-size": _ONE_WAY,
    "-pp": _ONE_WAY,
    "--enable-expert-parallel": _ONE_WAY,
    "--distributed-executor-backend": _RAY,
    "--kv-cache-dtype": "keys and values have the data type of the weights (`--dtype`)",
    "--block-size": "the size of a page cannot be chosen; leave it out",
    "--num-gpu-blocks-override": "give `--kv-cache-memory-bytes`",
    "--swap-space": _CPU_MEMORY,
    "--cpu-offload-gb": _CPU_MEMORY,
    "--compilation-config": "only `--enforce-eager` changes the compilation, and only with vLLM's "
    "engine",
    "--attention-backend": "the engine chooses its kernels (`--engine`, `--cpu-kernels`)",
    "--tokenizer": "a model and its tokenizer are in one directory; give this directory as TARGET",
    "--tokenizer-mode": _NAMED_FILES,
    "--hf-overrides": "change `config.json` in a directory of the model, and give this directory "
    "as TARGET",
    "--revision": "download this revision, and give its directory as TARGET",
    "--download-dir": "set the environment variable `HF_HOME`",
    "--hf-token": "set the environment variable `HF_TOKEN`",
    "--load-format": "weights are safetensors or a .gguf file, as TARGET says; leave it out",
    "--generation-config": _SAMPLING,
    "--override-generation-config": _SAMPLING,
    "--runner": "models only generate; leave it out",
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--max-logprobs": "requests may ask for up to 20 logprobs; leave it out",
    "--enable-auto-tool-choice": "tool calls are always on; leave it out, and give "
    "`--tool-call-parser` if the format is not found",
    "--chat-template-content-format": "the chat template decides; leave it out",
    "--response-role": "the role is always `assistant`; leave it out",
    "--structured-outputs-config": _LLGUIDANCE,
    "--guided-decoding-backend": _LLGUIDANCE,
    "--enable-log-requests": _NO_SUCH_LOG,
    "--disable-log-requests": _NO_SUCH_LOG,
    "--disable-log-stats": "figures are not logged (see `outrider status`); leave it out",
    "--disable-uvicorn-access-log": _NO_SUCH_LOG,
    "--uvicorn-log-level": "give `--log-level`",
    "--otlp-traces-endpoint": "give `--telemetry otlp=URL`",
    "--stream-interval": "give `--stream-interval-ms`",
    "--root-path": _PROXY,
    "--allowed-origins": _PROXY,
    "--middleware": _PROXY,
    "--kv-transfer-config": "a target runs both prefill and decoding; leave it out",
    "--speculative-model": "give `--draft-model`",
    "--num-speculative-tokens": "give `--num-draft-tokens`",
}

_PROMPTS = (
    "give `--prompts FILE`, with a JSON object in each line that has a `prompt`; by default, the "
    "prompts are built in"
)
_ANSWERS = "give `--max-tokens N --ignore-eos`"
_SAVED = "give `--json`, and write standard output to a file"
_STATISTICS = "`--json` has mean, median, std and p99 of every latency; leave it out"

BENCH_SERVE: Mapping[str, str] = {
    "--backend": "give `--base-url` for a server with OpenAI's API, or nothing for Outrider's gRPC",
    "--endpoint": "`--base-url` uses chat completions, and with `--raw` completions; leave it out",
    "--dataset-name": _PROMPTS,
    "--dataset-path": _PROMPTS,
    "--random-input-len": _PROMPTS,
    "--random-output-len": _ANSWERS,
    "--sharegpt-output-len": _ANSWERS,
    "--percentile-metrics": _STATISTICS,
    "--metric-percentiles": _STATISTICS,
    "--save-result": _SAVED,
    "--result-dir": _SAVED,
    "--result-filename": _SAVED,
    "--num-warmups": "send some requests by `outrider generate` first, or leave it out",
    "--disable-tqdm": "give `--quiet`",
}

_TABLES = {"outrider serve": SERVE, "outrider bench serve": BENCH_SERVE}


def hint(command: str, flag: str) -> str:
    """What to do instead of a flag of vLLM, such as `--block-size`; empty if the flag is unknown.
    `command` is a command here, such as `outrider serve`."""
    known = _TABLES.get(command, {})
    name = flag.replace("_", "-")
    return known.get(name) or known.get(name.replace("--no-", "--", 1), "")

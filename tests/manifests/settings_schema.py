"""Makes the chart's schema of the values under `settings` from `outrider.config.deployment`. Run as
a module, it writes this part of the schema."""

import json
from pathlib import Path
from typing import Any, Final

from outrider.config.deployment import deployment_settings

CHART: Final = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "outrider"
SCHEMA: Final = CHART / "values.schema.json"
CHART_KEYS: Final = {
    "address",
    "api_key",
    "api_key_file",
    "coordinator_resources",
    "deployment_name",
    "draft_model",
    "draft_num_gpus",
    "draft_resources",
    "draft_tensor_parallel_size",
    "grpc_port",
    "health_port",
    "host",
    "insecure",
    "internal_tls_dir",
    "model",
    "num_coordinators",
    "num_drafts",
    "num_targets",
    "port",
    "redis_ca_file",
    "redis_key_prefix",
    "redis_password",
    "redis_password_file",
    "redis_sentinel_password",
    "redis_url",
    "redis_username",
    "speculative_config",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "stop_timeout_s",
    "target_num_gpus",
    "target_resources",
    "telemetry",
    "tensor_parallel_size",
}
"""Settings that have chart values of their own or come from a Secret, and settings that determine
some of these."""


def settings_schema() -> dict[str, Any]:
    """A schema of `settings`: all settings of a deployment except those that the chart
    determines."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            key: setting.adapter.json_schema()
            for key, setting in deployment_settings().items()
            if key not in CHART_KEYS
        },
    }


def with_settings(text: str) -> str:
    """The text of a schema of values, with an up-to-date `settings`."""
    schema = json.loads(text)
    schema["properties"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(with_settings(SCHEMA.read_text("utf-8")), "utf-8")

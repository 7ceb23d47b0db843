"""What can be set, once: a frozen configuration per service, and one of a whole deployment.

Flags, `OUTRIDER_*` variables, YAML keys and the README's table are all made from these fields.
Fields that no `setting` makes are filled in by whoever starts the service.
"""

from __future__ import annotations

from outrider.config.coordinators import CoordinatorConfig
from outrider.config.deployments import (
    LEAST,
    WAIT_S_MAX,
    AutoscaleConfig,
    AutoscalePolicy,
    Bounds,
    DeploymentConfig,
    configuration,
    deployment_settings,
    load_config,
    merge,
    parse_bounds,
)
from outrider.config.models import (
    DTYPES,
    EMULATED,
    TRANSFORMERS,
    DraftConfig,
    ModelServerConfig,
    TargetConfig,
)
from outrider.config.servers import (
    LOOPBACK,
    PATHS,
    PORT_MAX,
    FrontConfig,
    ServerConfig,
    is_loopback,
    unlocked,
)

__all__ = [
    "DTYPES",
    "EMULATED",
    "LEAST",
    "LOOPBACK",
    "PATHS",
    "PORT_MAX",
    "TRANSFORMERS",
    "WAIT_S_MAX",
    "AutoscaleConfig",
    "AutoscalePolicy",
    "Bounds",
    "CoordinatorConfig",
    "DeploymentConfig",
    "DraftConfig",
    "FrontConfig",
    "ModelServerConfig",
    "ServerConfig",
    "TargetConfig",
    "configuration",
    "deployment_settings",
    "is_loopback",
    "load_config",
    "merge",
    "parse_bounds",
    "unlocked",
]

"""A coordinator whose tokenizer needs no torch starts without it: two seconds and 190 MB less."""

import subprocess
import sys


def test_nothing_of_the_coordinator_itself_imports_torch() -> None:
    """Nor does what it draws: numbers of single tokens are made without tensors."""
    lines = (
        "import sys",
        "import coordinator.actor, coordinator.routing.discovery, coordinator.service",
        "import coordinator.grpc_api",
        "import coordinator.http_api.server",
        "from outrider.speculation.random_streams import RoundNoise",
        "from outrider.speculation.sampling_params import Rule",
        "assert 0 < next(RoundNoise(7, Rule.TOKEN, 5).accept_uniforms(1)) < 1",
        "sys.exit('torch' in sys.modules)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)

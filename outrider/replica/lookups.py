"""Makes the look-up of a replica from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.config.deployment import DraftConfig
from outrider.drafters.names import LookupKind
from outrider.limits import SUFFIX_TENANTS

if TYPE_CHECKING:
    from outrider.drafters.lookup import LookupDrafter


def build_lookup(config: DraftConfig) -> LookupDrafter | None:
    """Returns the configured `suffix` or `ngram` drafter, or None if neither is configured."""
    from outrider.drafters.lookup import NgramDrafter
    from outrider.drafters.suffix import SuffixConfig, SuffixDrafter

    if config.drafter.lookup is LookupKind.NGRAM:
        return NgramDrafter(config.ngram_min, config.ngram_max)
    if config.drafter.lookup is None:
        return None
    depth, num_tokens = config.suffix_depth, config.suffix_tokens_per_tenant
    limits = SuffixConfig(depth, config.suffix_min_score, num_tokens, SUFFIX_TENANTS * num_tokens)
    return SuffixDrafter(limits)

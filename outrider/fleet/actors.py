"""The actors of the services, as Ray's processes import them: by a module of `outrider.fleet`, so
that the services' packages are found first (`outrider/services.py`)."""

from coordinator.actor import CoordinatorActor as _CoordinatorActor
from draft_service.actor import DraftActor as _DraftActor
from target_service.actor import TargetActor as _TargetActor


class CoordinatorActor(_CoordinatorActor):
    __doc__ = _CoordinatorActor.__doc__


class DraftActor(_DraftActor):
    __doc__ = _DraftActor.__doc__


class TargetActor(_TargetActor):
    __doc__ = _TargetActor.__doc__

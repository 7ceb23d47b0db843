"""What a replica runs: a message of `Describe` <-> `outrider.messages.ReplicaDescription`."""

from __future__ import annotations

from dataclasses import asdict

from outrider.engine.step_costs import StepCosts
from outrider.errors import BadRequest, InvariantError
from outrider.messages import ReplicaDescription
from outrider.transport.field_codec import token_ids_from_wire
from outrider.v1 import types_pb2


def description_to_proto(description: ReplicaDescription) -> types_pb2.ReplicaDescription:
    """Field for field."""
    costs = description.step_costs
    return types_pb2.ReplicaDescription(
        model=description.model,
        weights_fingerprint=description.weights_fingerprint,
        tokenizer_fingerprint=description.tokenizer_fingerprint,
        vocab_size=description.vocab_size,
        dtype=description.dtype,
        max_model_len=description.max_model_len,
        eos_token_ids=description.eos_token_ids,
        max_num_seqs=description.max_num_seqs,
        step_costs=costs if costs is None else types_pb2.StepCosts(**asdict(costs)),
        drafts_itself=description.drafts_itself,
        shows_features=description.shows_features,
        reads_features=description.reads_features,
        numerics=description.numerics,
    )


def description_from_proto(message: types_pb2.ReplicaDescription) -> ReplicaDescription:
    """Field for field."""
    return ReplicaDescription(
        model=message.model,
        weights_fingerprint=message.weights_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        vocab_size=message.vocab_size,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        eos_token_ids=token_ids_from_wire(message.eos_token_ids, "eos_token_ids"),
        max_num_seqs=message.max_num_seqs,
        step_costs=_costs(message.step_costs) if message.HasField("step_costs") else None,
        drafts_itself=message.drafts_itself,
        shows_features=message.shows_features,
        reads_features=message.reads_features,
        numerics=message.numerics,
    )


def _costs(message: types_pb2.StepCosts) -> StepCosts:
    rows, seconds = tuple(message.rows), tuple(message.seconds)
    try:
        return StepCosts(rows, seconds, message.session_s, message.slot_s, message.row_slot_s)
    except InvariantError as error:
        raise BadRequest("step_costs", error.message) from error

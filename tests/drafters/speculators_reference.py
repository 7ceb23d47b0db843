"""What `speculators` makes of EAGLE-3 heads and MTP layers. Runs in an environment that has that
library, and not Outrider, whose transformers it does not take.

train DIRECTORY VERIFIER INPUTS        saves a head for the model in VERIFIER, after some steps with
                                       the library's loss on one text: `taps` [1, T, 3 D],
                                       `token_ids` [1, T], and what the model's last norm read
                                       there, `last` [1, T, D]
run CHECKPOINT INPUTS OUTPUTS          runs one over texts: `taps` [N, T, 3 D], `token_ids` [N, T],
                                       and drafts `drafts` [N, len(prefixes), depths] by greedy
                                       choice
mtp TARGET INPUTS OUTPUTS              runs the MTP layer of TARGET over pairs of `features` [T, D]
                                       and `token_ids` [T], and drafts behind the `prefixes`
"""

import sys
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig, Qwen3Config

DRAFT_VOCAB = 12
NUM_STEPS = 12


def train(directory: str, verifier: str, inputs: str) -> None:
    target = AutoConfig.from_pretrained(verifier)
    layer = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        attn_implementation="sdpa",
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            verifier=VerifierConfig.from_pretrained(verifier),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config)
    token_ids = torch.randperm(target.vocab_size)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    model.load_vocab_mappings(t2d, token_ids - torch.arange(DRAFT_VOCAB))
    model.load_verifier_weights()
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in learned:
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.3)
    optimizer = torch.optim.AdamW(learned, lr=1e-2)
    given = load_file(inputs)
    losses = []
    for _ in range(NUM_STEPS):
        _, loss, _ = model(
            given["taps"],
            given["token_ids"],
            torch.zeros_like(given["token_ids"]),
            verifier_last_hidden_states=given["last"],
            ttt_steps=3,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if not losses[-1] < 0.9 * losses[0]:
        raise SystemExit(f"it does not learn: {losses}")
    model.save_pretrained(directory)


class Recorded:
    """A model that records what its last norm read and what its head returned in the last call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []
        model.norm.register_forward_pre_hook(lambda _, inputs: self.hidden.append(inputs[0][0]))
        model.lm_head.register_forward_hook(lambda *found: self.logits.append(found[2][0]))

    def run(self, taps: Tensor, token_ids: Tensor, num_depths: int) -> None:
        self.hidden.clear()
        self.logits.clear()
        places = torch.arange(len(token_ids))[None]
        self.model(
            taps[None],
            token_ids[None],
            torch.zeros_like(places),
            position_ids=places,
            ttt_steps=num_depths,
        )

    def draft(self, taps: Tensor, token_ids: Tensor, num_depths: int) -> Tensor:
        """The chain behind the last of these pairs."""
        last, shift = len(token_ids) - 1, self.model.d2t
        for depth in range(num_depths):
            self.run(taps, token_ids, depth + 1)
            chosen = self.logits[depth][last].argmax()
            chosen = chosen if shift is None else chosen + shift[chosen]
            token_ids = torch.cat([token_ids, chosen[None]])
            taps = torch.nn.functional.pad(taps, (0, 0, 0, 1))
        return token_ids[last + 1 :]


@torch.no_grad()
def run(checkpoint: str, inputs: str, outputs: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Recorded(SpeculatorModel.from_pretrained(checkpoint, config=config).float().eval())
    given = load_file(inputs)
    taps, token_ids, num_depths = given["taps"], given["token_ids"], int(given["num_depths"])
    texts = [*zip(taps, token_ids, strict=True)]
    drafts = [
        model.draft(some[:length], ids[:length], num_depths)
        for some, ids in texts
        for length in given["prefixes"].tolist()
    ]
    hidden, logits = [], []
    for some, ids in texts:
        model.run(some, ids, num_depths)
        hidden.append(torch.stack(model.hidden))
        logits.append(torch.stack(model.logits))
    found = {"hidden": torch.stack(hidden, 1), "logits": torch.stack(logits, 1)}
    save_file(found | {"drafts": torch.stack(drafts)}, outputs)


@torch.no_grad()
def mtp(target: str, inputs: str, outputs: str) -> None:
    config = AutoConfig.from_pretrained(target)
    model: Any = MTPDraftModel.from_training_args(
        config, num_speculative_steps=1, verifier_name_or_path=target
    )
    model.float().eval()
    read: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _, given: read.append(given[0][0, -1]))
    given, drafts = load_file(inputs), []
    for length in given["prefixes"].tolist():
        features, token_ids = given["features"][:length], given["token_ids"][:length]
        for _ in range(int(given["num_depths"])):
            # The library's texts have a token before the first pair, and a token after the last.
            text = torch.nn.functional.pad(token_ids, (1, 1))
            rows = torch.nn.functional.pad(features, (0, 0, 0, 2))
            [logits], *_ = model(text[None], rows[None])
            token_ids = torch.cat([token_ids, logits[0, -1:].argmax(-1)])
            features = torch.cat([features, read[-1][None]])
        drafts.append(token_ids[length:])
    hidden = torch.stack(read).unflatten(0, (len(drafts), -1))
    save_file({"hidden": hidden, "drafts": torch.stack(drafts)}, outputs)


if __name__ == "__main__":
    {"train": train, "run": run, "mtp": mtp}[sys.argv[1]](*sys.argv[2:])

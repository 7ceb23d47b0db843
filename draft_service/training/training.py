"""Trains a drafter. At first the loss is cross-entropy. Later the loss is mostly -log(acceptance).
The acceptance is sum min(p, q), for the target's distribution p and the drafter's distribution q.

The budget is a number of steps or of seconds. Learning rate and loss depend on the used share of
the budget. With a budget of steps, a run that is killed and resumed makes the same drafter as a run
without a kill."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .learners import Learner
from .options import DistillOptions
from .storage import Stopwatch, replacing
from .teacher import ROWS_OF_A_BLOCK, Batch, Dataset

BATCH_TOKENS = {"cpu": 4096, "cuda": 32_768}  # at the end of training, padding included
_BATCH_PARTS = ((0.5, 0.25), (0.8, 0.5))
"""Pairs (limit, share). A new epoch takes the first pair whose limit is above the used part of the
budget. The epoch's batches have `share * BATCH_TOKENS` tokens. At first, small batches reduce the
loss fastest, because they allow more steps. Later, gradients with less noise matter more."""
_PEAK_RATE_BY_WIDTH = 0.864  # the peak learning rate times the model's width
_PEAK_RATE_MAX = 2e-3
_TRAINED_RATE = 0.5  # factor of the learning rate if a drafter is trained further
_WARM_UP = 0.04
_LIKELIHOOD_FROM = 0.25
_LIKELIHOOD_UP_TO = 0.5
_LIKELIHOOD_SHARE = 0.9
"""While the used share of the budget grows from `_LIKELIHOOD_FROM` to `_LIKELIHOOD_UP_TO`, the
weight of -log(acceptance) in the loss grows linearly from 0 to `_LIKELIHOOD_SHARE`."""
_DEPTH_SHARE = 0.8
"""In the loss, draft token i = 0, 1, ... of a chain has the weight `_DEPTH_SHARE**i`, because later
draft tokens are less often accepted."""
_WEIGHT_DECAY = 0.05
_BETAS = (0.9, 0.98)
_LARGEST_GRADIENT = 1.0
_CHECKPOINT_S = 60.0

Report = Callable[[str, float, str], None]
"""The arguments are the stage, the finished share of the stage, and a detail, such as the loss."""


def learning_rate(part: float, width: int, is_trained: bool) -> float:
    """`part` is the used share of the budget. The rate rises linearly until `_WARM_UP`, and then
    falls linearly to 0."""
    peak = min(_PEAK_RATE_BY_WIDTH / width, _PEAK_RATE_MAX) * (_TRAINED_RATE if is_trained else 1)
    return peak * max(0.0, min(part / _WARM_UP, (1 - part) / (1 - _WARM_UP)))


def batch_tokens(part: float, most: int) -> int:
    shares = (share for until, share in _BATCH_PARTS if part < until)
    return int(most * next(shares, 1.0))


def likelihood_share(part: float, is_trained: bool) -> float:
    if is_trained:
        return _LIKELIHOOD_SHARE
    over = (part - _LIKELIHOOD_FROM) / (_LIKELIHOOD_UP_TO - _LIKELIHOOD_FROM)
    return _LIKELIHOOD_SHARE * min(1.0, max(0.0, over))


class Progress(BaseModel):
    """A checkpoint's content besides the weights and the optimizer's moments."""

    num_steps: int = 0
    num_tokens: int = 0  # tokens count again in each epoch
    epoch: int = 0
    done_of_epoch: int = 0  # number of finished batches of the current epoch
    batch_tokens: int = 0


class Trainer:
    """Trains one learner. The optimizer works on float32 copies of the weights, called masters."""

    def __init__(
        self,
        learner: Learner,
        dataset: Dataset,
        directory: Path,
        options: DistillOptions,
        seconds: float,
    ) -> None:
        """The budget is `options.steps`, or `seconds` if `options.steps` is None."""
        self.learner = learner
        self._dataset = dataset
        self._options, self._seconds = options, seconds
        self._path = directory / "checkpoint.safetensors"
        self._device = learner.head.device
        self._batch_tokens_max = BATCH_TOKENS[self._device.type]
        self._masters = {
            name: torch.nn.Parameter(weight.detach().float().clone())
            for name, weight in learner.weights.items()
        }
        groups = [
            {
                "params": [
                    weight for weight in self._masters.values() if (weight.dim() > 1) == is_matrix
                ],
                "weight_decay": _WEIGHT_DECAY * is_matrix,
            }
            for is_matrix in (True, False)
        ]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, fused=True)
        self.progress = Progress(batch_tokens=batch_tokens(0.0, self._batch_tokens_max))
        self.spent = Stopwatch(directory)
        if self._path.exists():
            self._resume()

    @property
    def part(self) -> float:
        if self._options.steps is not None:
            return min(1.0, self.progress.num_steps / self._options.steps)
        return min(1.0, self.spent.seconds / max(self._seconds, 1e-9))

    def run(self, report: Callable[[float, float], None]) -> None:
        """Trains until the budget is used. Reports the used share and the loss after each step."""
        with self.spent.working():
            saved = time.monotonic()
            batches = self._batches()
            while self.part < 1.0:
                report(self.part, self._step(next(batches)))
                if time.monotonic() - saved > _CHECKPOINT_S:
                    self._save()
                    saved = time.monotonic()
            self._save()

    def _batches(self) -> Iterator[list[int]]:
        now = self.progress
        while True:
            batches = self._dataset.epoch(self._options.seed, now.epoch, now.batch_tokens)
            yield from batches[now.done_of_epoch :]
            now.epoch += 1
            now.done_of_epoch = 0
            now.batch_tokens = batch_tokens(self.part, self._batch_tokens_max)

    def _step(self, indices: list[int]) -> float:
        batch = self._dataset.batch(indices)
        part, weights = self.part, self.learner.weights
        is_trained = self._options.start_from is not None
        loss = self._loss(batch, likelihood_share(part, is_trained))
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(part, self.learner.head.shape[1], is_trained)
        for name, weight in weights.items():
            self._masters[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(list(self._masters.values()), _LARGEST_GRADIENT)
        self._optimizer.step()
        self._put_weights()
        self.progress.num_steps += 1
        self.progress.num_tokens += len(batch.rows)
        self.progress.done_of_epoch += 1
        return float(loss.detach())

    def _put_weights(self) -> None:
        with torch.no_grad():
            for name, weight in self.learner.weights.items():
                weight.copy_(self._masters[name])

    def _loss(self, batch: Batch, share: float) -> Tensor:
        weights, losses = [], []
        for depth, (hidden, rows) in enumerate(self.learner.draft(batch)):
            weights.append(_DEPTH_SHARE**depth)
            answers = batch.columns[rows], batch.mass[rows]
            loss = overlap_loss(hidden, self.learner.head, *answers, share)
            losses.append(weights[-1] * loss)
        return torch.stack(losses).sum() / sum(weights)

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            moments = self._optimizer.state[master].items()
            tensors |= {name: master.detach()} | {f"{name}:{key}": value for key, value in moments}
        with replacing(self._path) as partial:
            save_file(tensors, partial, metadata={"progress": self.progress.model_dump_json()})
        self.spent.save()

    def _resume(self) -> None:
        with safe_open(self._path, framework="pt", device=str(self._device)) as file:
            self.progress = Progress.model_validate_json(file.metadata()["progress"])
            for name in file.keys():  # noqa: SIM118 (`file` is no mapping)
                parameter, _, key = name.partition(":")
                master, values = self._masters[parameter], file.get_tensor(name)
                if key:
                    self._optimizer.state[master][key] = values
                else:
                    master.data.copy_(values)
        self._put_weights()


_LEAST_OVERLAP = 1e-3  # lower limit of the acceptance in the gradient of -log(acceptance)


def overlap_loss(
    hidden: Tensor, head: Tensor, columns: Tensor, mass: Tensor, likelihood_share: float
) -> Tensor:
    """Returns the mean loss over R rows, with a gradient for `hidden` [R, D]. `head` [N, D] has the
    same dtype. `columns` and `mass` [R, M] are fields of a `Batch`. -log(acceptance) has the weight
    `likelihood_share`, and cross-entropy has the remaining weight. To save memory, the backward
    pass computes the logits of each block of rows again."""
    size = ROWS_OF_A_BLOCK[hidden.device.type]
    blocks = (torch.split(part, size) for part in (hidden, columns, mass))
    losses = [
        checkpoint(
            _summed_loss,
            head,
            likelihood_share,
            *block,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for block in zip(*blocks, strict=True)
    ]
    return torch.stack(losses).sum() / len(hidden)


def _summed_loss(head: Tensor, share: float, hidden: Tensor, columns: Tensor, p: Tensor) -> Tensor:
    listed = (hidden @ head.t()).float().log_softmax(dim=1).gather(1, columns)
    overlaps = torch.minimum(p, listed.exp()).sum(dim=1)
    least = overlaps.detach().clamp(min=_LEAST_OVERLAP)
    likelihoods = least.log() + overlaps / least - (overlaps / least).detach()
    return -(1 - share) * (p * listed).sum() - share * likelihoods.sum()

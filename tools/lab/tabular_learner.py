"""The learner of the enumerable policy: a table of logits, trained by Adam."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lab.tabular import EXPORT_FILE, Table, TabularReference
from tba_hpc.config import TrainSection
from tba_hpc.core.batch import with_top_logprobs
from tba_hpc.core.skipped_steps import SkippedSteps
from tba_hpc.core.types import TrajectoryBatch, WeightLayout
from tba_hpc.learner.trainer_group import Command, TrainerGroup
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import Groups, RecordedGroups, figures, make_objective
from tba_hpc.run.files import publish

STATE_FILE = "tabular.pt"
"""Name of the file in a checkpoint, with logits, Adam's state and number of skipped steps."""

DEFAULTS = TrainSection()
CPU = torch.device("cpu")

DEADLINE = 60.0
"""Longest wait for another rank, s."""


class Adam:
    """Adam (Kingma & Ba, 2015, algorithm 1) on one tensor.

    It is written here because torch.optim imports torch._dynamo, which takes longer than everything else that
    such a rank does.
    """

    def __init__(self, parameter: Tensor, betas: tuple[float, float]) -> None:
        self._parameter, self._betas = parameter, betas
        self.steps = 0
        self._mean, self._square = torch.zeros_like(parameter), torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, gradient: Tensor, learning_rate: float) -> None:
        """Take one step with this gradient."""
        first, second = self._betas
        self.steps += 1
        self._mean.lerp_(gradient, 1 - first)
        self._square.lerp_(gradient.square(), 1 - second)
        mean, square = self._mean / (1 - first**self.steps), self._square / (1 - second**self.steps)
        self._parameter -= learning_rate * mean / (square.sqrt() + 1e-8)

    def state(self) -> dict[str, int | Tensor]:
        """Return the state for ``load``."""
        return {"steps": self.steps, "mean": self._mean, "square": self._square}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.steps, self._mean, self._square = state["steps"], state["mean"], state["square"]


class TabularLearner:
    """Learner on one rank: a table of logits, which begins as the reference's, trained by Adam.

    train: section with the objective and the optimizer's settings. folder_of: function from a step to the
    folder of the policy exported then, for a trainer that scores a reference that is reset.
    """

    def __init__(
        self,
        table: Table,
        train: TrainSection = DEFAULTS,
        folder_of: Callable[[int], Path] | None = None,
    ) -> None:
        self.layout = WeightLayout.of([("logits", table.shape)], "F32")
        self._table = table
        self._objective = make_objective(train, max_tokens=table.length)
        self._centring = train.score_centering
        self._logits = torch.nn.Parameter(torch.from_numpy(table.ref_logits_PSV.copy()))
        self._optimizer = Adam(self._logits, train.adam_betas)
        self._skipped = SkippedSteps()
        self._reference = TabularReference(table, folder_of)

    @property
    def policy_logits(self) -> np.ndarray:
        """Copy of the present logits, float32 [P, S, V]."""
        return self._logits.detach().numpy().copy()

    @property
    def policy_PC(self) -> np.ndarray:
        """Present probability of every completion, float64."""
        return self._table.probabilities(self._logits.detach().numpy())

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """Take one optimizer step; return metrics, see ports.Learner.

        If loss or norm is not finite, nothing changes. Raises ConfigError if that happens too often in a row.
        """
        batch = with_top_logprobs(batch, self._centring)
        recorded = upload(RecordedGroups.of(batch), CPU)
        output = self._objective(Groups.of(self._logprobs(batch), recorded), beta)
        self._logits.grad = None
        output.loss.backward()
        assert self._logits.grad is not None
        norm, loss_B = self._logits.grad.norm(), output.loss_BK.detach().mean(1)
        found = figures({name: float(value) for name, value in output.metrics.items()})
        if output.loss.isfinite() and norm.isfinite():
            self._optimizer.step(self._logits.grad, learning_rate)
            self._skipped.taken()
        else:
            self._skipped.skipped(batch.prompt_id_B[~loss_B.isfinite().numpy()].tolist())
        return {
            **found,
            "loss": float(output.loss.detach()),
            "grad_norm": float(norm),
            "learning_rate": learning_rate,
            "tokens": float(batch.action_T.sum()),
            "skipped_steps": float(self._skipped.total),
        }

    def reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """Return log π_ref of all completion tokens, float32 [T]. step: step of the reference policy."""
        if step != self._reference.step:
            self._reference.load(step)
        prompt_N = np.repeat(batch.prompt_id_B, batch.group_size).tolist()
        return np.concatenate(
            [
                self._reference.of_tokens(prompt, batch.completions.row(row))
                for row, prompt in enumerate(prompt_N)
            ]
        )

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the logits into ``out``, uint8 [layout.nbytes]."""
        out[:] = self._logits.detach().numpy().reshape(-1).view(np.uint8)

    def save(self, folder: Path) -> Callable[[], str]:
        """Copy logits and optimizer; return a function that writes them into an existing folder."""
        file = io.BytesIO()
        optimizer, skipped = self._optimizer.state(), self._skipped.total
        state = {"logits": self._logits.detach(), "optimizer": optimizer, "skipped": skipped}
        torch.save(state, file)

        def write() -> str:
            publish(folder / STATE_FILE, file.getvalue())
            return ""

        return write

    def load(self, folder: Path) -> None:
        """Restore exactly what ``save`` wrote."""
        saved = torch.load(folder / STATE_FILE, weights_only=True)
        with torch.no_grad():
            self._logits.copy_(saved["logits"])
        self._optimizer.load(saved["optimizer"])
        self._skipped.total = saved["skipped"]

    def export(self, folder: Path) -> None:
        """Write the logits as model.safetensors, which only ``TabularReference`` can load."""
        folder.mkdir(parents=True, exist_ok=True)
        publish(folder / EXPORT_FILE, safetensors.torch.save({"logits": self._logits.detach()}))

    def close(self) -> None:
        """Do nothing, because no other rank follows."""

    def _logprobs(self, batch: TrajectoryBatch) -> Tensor:
        """Return log-probabilities with gradient, float32 [T, 1 + C]; 0 at tokens that were not sampled.

        They are those of each sampled token, and of the C tokens that were likeliest at its position under
        the sampling policy.
        """
        token_T, length_N, cell_T = batch.completions.values, batch.completion_length_N, batch.cell_T
        token_NL = np.zeros((len(batch), int(length_N.max())), np.int64)
        token_NL.reshape(-1)[cell_T] = token_T
        prompt_N = batch.prompts.values[batch.record["prompt_row"]] - self._table.prompt_token(0)
        token_TJ = np.column_stack([token_T, batch.top_logprobs["token"]])
        place_T = prompt_N.repeat(length_N), self._table.prefixes(token_NL).reshape(-1)[cell_T]
        cells = *(place_T1[:, None] for place_T1 in place_T), token_TJ
        logprob_PSV = (self._logits / self._table.temperature).log_softmax(-1)
        logprob_TJ = logprob_PSV[tuple(torch.from_numpy(cell.astype(np.int64)) for cell in cells)]
        return logprob_TJ.where(torch.from_numpy(batch.action_T)[:, None], 0.0)


class TabularGroup(TabularLearner):
    """Learner of several trainer ranks, of which the leader does all the work."""

    def __init__(
        self,
        table: Table,
        train: TrainSection,
        folder_of: Callable[[int], Path],
        *,
        rank: int,
        ranks: int,
        store: Path,
        step_seconds: float,
    ) -> None:
        super().__init__(table, train, folder_of)
        self._group = TrainerGroup(store, rank=rank, ranks=ranks, deadline=DEADLINE)
        self._step_seconds = step_seconds

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """Pause, then take one optimizer step."""
        time.sleep(self._step_seconds)
        return super().step(batch, learning_rate=learning_rate, beta=beta)

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the logits into ``out``, uint8 [layout.nbytes], and into the buffer of every other rank."""
        super().write_weights(out)
        self._group.send(Command("write", arrays={"weights": out}))
        self._written()

    def close(self) -> None:
        """Release the other ranks."""
        self._group.send(Command("close"))
        self._group.leave()

    def follow(self, next_weights: Callable[[], np.ndarray] | None) -> None:
        """Receive weights until the leader closes the group; see ports.SharedLearner."""
        while (command := self._group.receive()).name != "close":
            if next_weights:
                next_weights()[:] = command.arrays["weights"]
            self._written()
        self._group.leave()

    def _written(self) -> None:
        with self._group.together():
            self._group.barrier()

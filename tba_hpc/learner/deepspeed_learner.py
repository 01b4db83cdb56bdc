"""A Learner (``core.ports``) on DeepSpeed: one policy, sharded over the trainer ranks by ZeRO 1, 2 or 3.

Every trainer rank makes a DeepSpeedLearner. Rank 0 is the leader, whose loop calls the learner's methods. The
other ranks, its followers, only call ``follow``, which executes the same methods whenever the leader calls
them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.utils import logger as deepspeed_logger
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba_hpc.config import Config, ConfigError
from tba_hpc.core import batch as batches
from tba_hpc.core.batch import Part
from tba_hpc.core.model_shapes import BYTES, default_micro_batch, kept_bytes, shape_of
from tba_hpc.core.packing import Layout, Packed, pack
from tba_hpc.core.skipped_steps import SkippedSteps
from tba_hpc.core.types import LoraWeights, TrajectoryBatch, WeightLayout, WeightSlot, spans
from tba_hpc.learner.adapter import tensor_in, tensors_in
from tba_hpc.learner.deepspeed_settings import BUCKET_ELEMENTS, deepspeed_settings, is_fused
from tba_hpc.learner.hf_model import (
    PolicyLogprobs,
    checkpoint_layers,
    compiles,
    load_policy,
    load_tokenizer,
    require_one_vocabulary,
    stored_buffers,
    use_tensor_cores,
)
from tba_hpc.learner.hf_reference import HfReference, load_reference
from tba_hpc.learner.plain_data import only_data, require_readable
from tba_hpc.learner.registered_memory import RegisteredMemory
from tba_hpc.learner.side_stream import SideStream
from tba_hpc.learner.snapshot import Snapshot
from tba_hpc.learner.trainer_group import Command, TrainerGroup, is_lost_peer
from tba_hpc.learner.upload import upload
from tba_hpc.objectives import Groups, ObjectiveOutput, RecordedGroups, figures, make_objective
from tba_hpc.run.background import at_once, in_background
from tba_hpc.run.checkpoints import StateError
from tba_hpc.run.files import DiskFullError, is_disk_full, replacing, write_atomic
from tba_hpc.run.inventory import SummedFile
from tba_hpc.run.stacks import stacks_if_late

if TYPE_CHECKING:
    from tba_hpc.learner.lora import Lora

SAFETENSORS_NAME = {"float32": "F32", "bfloat16": "BF16"}
"""Names of dtypes in safetensors files, by their names in model.dtype."""

TAG = "zero"
"""Folder inside a checkpoint that holds DeepSpeed's files."""

RANKS_FILE = "ranks.json"
"""File of a checkpoint with the number of trainer ranks that wrote it."""

PLAIN_DATA = [LossScaler, ZeroStageEnum, fragment_address]
"""Classes whose instances DeepSpeed's checkpoints may hold, besides tensors and plain values."""

BUCKET_BYTES = 256 << 20
"""Largest number of bytes of weights that ZeRO-3 gathers at once to copy them; a single tensor may be larger.

A smaller number takes less memory, but more messages.
"""

NOWHERE = np.empty(0, np.uint8)
"""Empty array for followers that write no weights, because the leader writes all of them."""

CONVERTERS = 4
"""Largest number of processes that convert a checkpoint to another number of ranks.

Each holds one rank's part in memory.
"""


class DeepSpeedLearner:
    """A policy and its AdamW state, sharded over the trainer ranks.

    Weights are float32; or bfloat16, with float32 master weights and float32 accumulation of gradients. With
    LoRA only the adapter is trained, published and checkpointed. A method called on the leader (rank 0) makes
    all other ranks, which are inside ``follow``, do the same.

    rank, ranks, store: see TrainerGroup. references: function from a step to the folder of the policy that
    was exported then; needed if the trainer computes the reference's log-probabilities. Raises ConfigError
    for a model that cannot be trained, and an ExchangeError that names missing ranks.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        ranks: int,
        store: Path,
        references: Callable[[int], Path] | None = None,
    ) -> None:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no fragmentation
        if not compiles(config.model):  # else ZeRO loads torch's compiler, for an unused optimizer
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self._config = config
        self._group = group = TrainerGroup(
            store,
            rank=rank,
            ranks=ranks,
            deadline=config.launch.timeout_seconds,
            start_deadline=config.launch.start_seconds,
        )
        self._objective = make_objective(config.train, max_tokens=config.generator.max_tokens)
        self._load_policy()
        self._engine = _make_engine(config, self._logprobs, group.device)
        # DeepSpeed adds its script zero_to_fp32.py to a checkpoint; it is copied when the files are written.
        self._copy_scripts = self._engine._copy_recovery_script
        self._engine._copy_recovery_script = lambda path: None
        self._snapshot = Snapshot(local_ranks=group.local_ranks, gpu=group.device.type == "cuda")
        self._engine.checkpoint_engine.save = self._snapshot.add  # instead of writing each file at once
        self._registered = RegisteredMemory()
        self._side = SideStream(own=config.train.zero_stage < 3)  # ZeRO-3 frees gathered weights at once
        self._copied: Future[None] = at_once(lambda: None)  # done once all ranks have written
        self._written: Future[str] = at_once(str)  # on a follower: done once it has written its last part
        self._skipped = SkippedSteps()
        self._reference = self._make_reference(references)
        group.refuse_strangers()

    def _load_policy(self) -> None:
        """Load tokenizer, policy and adapter.

        ``layout`` is the layout of the weights that are published, ``_whole`` of those that are exported.
        """
        config = self._config
        self._tokenizer = load_tokenizer(config.model.path)
        use_tensor_cores(self._group.device)
        self._policy = _load_policy(config)
        require_one_vocabulary(self._tokenizer, self._policy, config.model.path)
        self._parameters = dict(self._policy.named_parameters())  # tied ones once, as in save_pretrained
        self.layout = self._whole = _layout(self._parameters, config)
        self._lora: Lora | None = None
        if config.model.lora:
            from tba_hpc.learner.lora import Lora

            self._lora = Lora(self._policy, config.model.lora, path=config.model.path, seed=config.run.seed)
            self._parameters = self._lora.adapter | self._lora.base
            self.layout = _layout(self._lora.adapter, config, self._lora.weights)
            self._whole = _layout(self._parameters, config)
        self._policy.eval()  # in training mode, some models route at random, unlike the engine that samples
        if config.train.gradient_checkpointing:
            checkpoint_layers(self._policy)
        self._default_tokens = _default_micro_batch(self._policy, config, self._group.device)
        self._logprobs = PolicyLogprobs.of(self._policy, config.model)
        if self._lora:
            self._logprobs.register_state_dict_post_hook(_leave_out_the_base)

    def _make_reference(self, references: Callable[[int], Path] | None) -> HfReference | None:
        """Load and return the reference model. references: see the class.

        Returns None if the trainer does not compute log π_ref, or if the reference is the policy without its
        adapter.
        """
        train = self._config.train
        if not train.trainer_has_reference or (self._lora and train.reference.name == "frozen"):
            return None
        assert references, "the trainer computes the reference's log-probabilities"
        return load_reference(self._config.model, references)

    # --- Methods of ports.Learner, called on the leader ---

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """Take one optimizer step on the mean loss over all rows of ``batch``; see ``ports.Learner``.

        The number of groups must be a multiple of the number of ranks. Raises ConfigError if
        train.score_centering needs more of the sampler's likeliest tokens than the batch holds.
        """
        batch = batches.with_top_logprobs(batch, self._config.train.score_centering)
        with self._all("step", learning_rate, beta, batch=batch):
            return self._step(batch, learning_rate, beta)

    def reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """Return log π_ref of all completion tokens, float32 [T], under the reference of ``step``.

        The value is 0 at tokens that were not sampled. ``batch`` may have any number of groups.
        """
        again = -batch.groups % self._group.ranks  # groups to repeat, so that all ranks get equally many
        even = batches.take_groups(batch, np.resize(np.arange(batch.groups), batch.groups + again))
        even = batches.with_top_logprobs(even, 0)
        with self._all("reference", step, batch=even):
            return self._reference_logprobs(even, step)[: len(batch.ref_logprobs)]

    def write_weights(self, out: np.ndarray) -> Callable[[], None]:
        with self._all("write"):
            self._write(out)
        return self._copied.result

    def save(self, folder: Path) -> Callable[[], str]:
        (folder / TAG).mkdir()  # if the disk is full, this fails before the followers take part
        with self._all("save", folder):
            return self._save(folder)

    def load(self, folder: Path) -> None:
        if self._lora:
            self._lora.require_base(folder)
        with self._all("load", folder):
            self._load(folder)

    def export(self, folder: Path) -> None:
        with self._all("export", folder):
            self._export(folder)

    def close(self) -> None:
        self._group.send(Command("close"))
        self._close()

    @contextmanager
    def _all(
        self, name: str, *arguments: float | Path, batch: TrajectoryBatch | None = None
    ) -> Iterator[None]:
        """Make the followers execute the command that the leader executes within the block.

        name, arguments, batch: the command, one of those that ``_execute`` matches.
        """
        plain = tuple(str(one.absolute()) if isinstance(one, Path) else one for one in arguments)
        self._group.send(Command(name, plain, batches.to_arrays(batch) if batch else {}))
        with self._group.together():
            yield

    # --- The other ranks ---

    def follow(self, next_weights: Callable[[], np.ndarray] | None) -> None:
        """Execute the leader's commands until the leader closes its learner.

        next_weights: function that returns the buffer, uint8 [layout.nbytes], for this rank's part of the
        next weights. None: this rank writes no weights. A rank whose command takes longer than
        launch.stack_seconds logs the stacks of its threads. Raises ExchangeError if the leader is gone.
        """
        while (command := self._group.receive()).name != "close":
            with self._group.together(), stacks_if_late(self._config.launch.stack_seconds):
                self._execute(command, next_weights)
        self._close()

    def _execute(self, command: Command, next_weights: Callable[[], np.ndarray] | None) -> None:
        match command.name, *command.arguments:
            case "step", learning_rate, beta:
                self._step(batches.from_arrays(command.arrays), float(learning_rate), float(beta))
            case "reference", step:
                self._reference_logprobs(batches.from_arrays(command.arrays), int(step))
            case ("write",):
                self._write(next_weights() if next_weights else NOWHERE)
            case "save", folder:
                self._save_in_background(Path(str(folder)))
            case "load", folder:
                self._load(Path(str(folder)))
            case "export", folder:
                self._export(Path(str(folder)))
            case _:
                raise AssertionError(f"no rank knows the command {command.name}")

    # --- All ranks together ---

    def _step(self, batch: TrajectoryBatch, learning_rate: float, beta: float) -> dict[str, float]:
        """Take one optimizer step, together with all ranks; return its metrics."""
        parts = self._plan(batch)
        work = upload([_Work.of(part, batch, self._logprobs.layout) for part in parts], self._group.device)
        batch_tokens = float(batch.action_length_N.mean())
        outputs = [self._backward(part, beta, batch_tokens, batch.groups) for part in work]
        means = _means(outputs, batch.groups)
        for parameters in self._engine.optimizer.param_groups:
            parameters["lr"] = learning_rate
        self._side.delay_changes()
        self._engine.step()
        totals = self._group.total(torch.stack(list(means.values())).cpu().numpy())  # the only wait for a GPU
        if self._engine.was_step_applied():
            self._skipped.taken()
        else:
            self._skipped.skipped(self._not_finite(batch, parts, outputs))
        return {
            **figures(dict(zip(means, totals.tolist(), strict=True))),
            "learning_rate": learning_rate,
            "grad_norm": float(self._engine.get_global_grad_norm()),
            "tokens": batch_tokens * len(batch),
            "skipped_steps": float(self._skipped.total),
        }

    def _plan(self, batch: TrajectoryBatch) -> list[Part]:
        """Return this rank's groups of the batch in parts, and the micro-batches of each part."""
        return batches.plan(
            batch,
            rank=self._group.rank,
            ranks=self._group.ranks,
            budget=self._config.train.tokens_per_micro_batch,
            share_prompts=self._logprobs.shares_prompts,
            enough=self._default_tokens,
        )

    def _backward(self, part: _Work, beta: float, batch_tokens: float, of_groups: int) -> ObjectiveOutput:
        """Accumulate the gradient of a part's groups; return the objective's output for them.

        batch_tokens: mean number of sampled tokens per completion in the batch. of_groups: number of groups
        in the batch.

        An objective needs whole groups, but a part may have several micro-batches. The loss depends on the
        weights θ only through log-probabilities: dL/dθ = Σ_t dL/dlog π_t · dlog π_t/dθ. So a first pass
        computes the log-probabilities of all micro-batches without gradient, and the loss gives the slopes
        dL/dlog π_t. A second pass computes each micro-batch again, and weights its gradient by the slopes. A
        part of one micro-batch needs only one pass.
        """
        once = len(part.passes) == 1
        of_token = part.passes[0].sampled_A.shape[1:]
        policy_T = torch.zeros((len(part.recorded.cell_T), *of_token), device=self._group.device)
        with torch.set_grad_enabled(once):
            for packed in part.passes:
                policy_T = policy_T.index_copy(0, packed.place_A, self._engine(packed))
        if not once:
            policy_T.requires_grad_()
        output = self._objective(Groups.of(policy_T, part.recorded, batch_tokens=batch_tokens), beta)
        loss = self._scaled_loss(output, of_groups)
        if once:
            self._engine.backward(loss, scale_wrt_gas=False)
            return output
        (slope_T,) = torch.autograd.grad(loss, policy_T)
        for packed in part.passes:
            weighted_A = self._engine(packed) * slope_T.index_select(0, packed.place_A)
            self._engine.backward(weighted_A.sum(), scale_wrt_gas=False)
        return output

    def _scaled_loss(self, output: ObjectiveOutput, of_groups: int) -> Tensor:
        """Return what some groups contribute to the mean loss over ``of_groups``, a scalar with gradient.

        The result is multiplied by the number of ranks, because DeepSpeed averages gradients over ranks. If
        the loss of a group is not finite, the gradient becomes NaN, so that DeepSpeed skips the step on all
        ranks.
        """
        loss_B = output.loss_BK.mean(1)
        scale = self._group.ranks / of_groups
        return (loss_B * torch.where(loss_B.detach().isfinite(), scale, math.nan)).sum()

    def _not_finite(
        self, batch: TrajectoryBatch, parts: Sequence[Part], outputs: Sequence[ObjectiveOutput]
    ) -> list[int]:
        """Return the prompt ids of the groups, on any rank, whose loss is not finite. All ranks call this.

        parts, outputs: this rank's parts of the batch, and the objective's output for each.
        """
        flags = np.zeros(batch.groups)
        for part, output in zip(parts, outputs, strict=True):
            flags[part.groups] = (~output.loss_BK.detach().mean(1).isfinite()).cpu().numpy()
        return batch.prompt_id_B[self._group.total(flags) > 0].tolist()

    # --- The reference ---

    @torch.no_grad()
    def _reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """Compute log π_ref of all completion tokens, float32 [T].

        Each rank computes some of the groups; the sum over ranks puts them together.
        """
        rows = [rows for part in self._plan(batch) for rows in part.micro_batches]
        passes = upload([_packed(batch, some, self._logprobs.layout) for some in rows], self._group.device)
        logprob_T = torch.zeros(batch.logprobs.shape, device=self._group.device)
        with self._reference_of(step) as reference:
            for packed in passes:
                logprob_T.index_copy_(0, packed.place_A, reference(packed))
        return self._group.total(logprob_T.cpu().numpy()).astype(np.float32)

    def _reference_of(self, step: int) -> AbstractContextManager[nn.Module]:
        """Return a context of the reference of ``step``: another model, or the policy without its adapter."""
        if self._reference:
            return self._reference.on_device(self._group.device, step)
        assert self._lora and step == 0
        return self._lora.disabled(self._engine)

    def _write(self, out: np.ndarray) -> None:
        """Begin to write weights into ``out``, uint8 [layout.nbytes].

        If trainers and searchers form one MPI world, each trainer rank writes its part, otherwise the leader
        writes all. On a GPU the copies run during the next step, which waits for them before it changes the
        weights.
        """
        parts = self.layout.parts(self._group.ranks if self._config.one_world else 1)
        mine = parts[self._group.rank] if self._group.rank < len(parts) else ()
        if mine:
            self._registered.register(out, mine[0].start, mine[-1].end)
        self._copy(self.layout, mine, out)
        self._copied = (in_background if self._side.is_asynchronous else at_once)(self._wait_for_copies)

    def _copy(self, layout: WeightLayout, slots: Sequence[WeightSlot], out: np.ndarray) -> None:
        """Begin to copy the tensors of ``slots`` to their places in ``out``. All ranks call this together."""
        with self._side.copying():
            for slot, weight in self._gathered(layout, slots):
                tensor_in(out, slot).copy_(weight, non_blocking=True)

    def _wait_for_copies(self) -> None:
        """Wait until all ranks have written their weights. One thread of each rank calls this."""
        self._side.wait()
        with self._group.together():
            self._group.background_barrier()

    def _gathered(
        self, layout: WeightLayout, slots: Sequence[WeightSlot]
    ) -> Iterator[tuple[WeightSlot, Tensor]]:
        """Yield the unsharded tensors of ``slots``; each is valid until the next is taken.

        slots: the tensors of ``layout`` that this rank copies. Under ZeRO-3 all ranks must call this, because
        they gather each bucket of parameters together. A bucket holds about equally many bytes of every
        rank's part, so that no rank waits for another's copies.
        """
        wanted = {slot.name for slot in slots}
        for bucket in _buckets(layout.parts(self._group.ranks)):
            parameters = [self._parameters[slot.name] for slot in bucket]
            sharded = self._config.train.zero_stage == 3
            with GatheredParameters(parameters, enabled=sharded):
                for slot, parameter in zip(bucket, parameters, strict=True):
                    if slot.name in wanted:
                        yield slot, parameter.detach()

    def _save_in_background(self, folder: Path) -> None:
        """Write a follower's part of a checkpoint in the background, and report the result to the leader."""
        wait([self._written])  # the next copy reuses the memory of the last one
        write = self._save(folder)
        self._written = in_background(write)

    def _save(self, folder: Path) -> Callable[[], str]:
        """Copy this rank's part of a checkpoint; return the function that writes it."""
        with _unwritable(folder):
            frozen = {"exclude_frozen_parameters": self._lora is not None}
            self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, **frozen)
        return partial(self._write_files, folder, self._snapshot.take())

    def _write_files(self, folder: Path, files: Sequence[Callable[[], SummedFile]]) -> str:
        """Write and flush this rank's files; return the lines that list the files of all ranks.

        The lines are for the checkpoint's list of files. Raises StateError or DiskFullError if any rank
        failed.
        """
        lines, fault, full = "", "", False
        try:
            with _unwritable(folder):
                with ThreadPoolExecutor(len(files)) as pool:  # one file is flushed while another is hashed
                    written = list(pool.map(lambda write: write(), files))
                require_readable((file.path for file in written), PLAIN_DATA)
                lines = "".join(file.line(folder) for file in written)
                if self._group.leads:
                    self._copy_scripts(str(folder))
                    write_atomic(folder / RANKS_FILE, json.dumps(self._group.ranks))
                    if self._lora:
                        self._lora.note_base(folder)
        except (StateError, DiskFullError) as error:
            fault, full = str(error), isinstance(error, DiskFullError)
        reports = [json.loads(report) for report in self._group.gather(json.dumps([lines, fault, full]))]
        faults = [(bool(full), fault) for _, fault, full in reports if fault]
        if faults:
            full, fault = min(faults)  # other faults precede a full disk, which a retry may solve
            raise (DiskFullError if full else StateError)(fault)
        return "".join(lines for lines, *_ in reports)

    def _load(self, folder: Path) -> None:
        self._side.delay_changes()
        if json.loads((folder / RANKS_FILE).read_text()) == self._group.ranks:
            self._restore(folder)
        else:
            self._load_universal(folder)

    def _load_universal(self, folder: Path) -> None:
        """Load a checkpoint that another number of ranks wrote, after converting it in a temporary folder."""
        scratch = folder.with_name(f".{folder.name}.universal.tmp")
        if self._group.leads:
            shutil.rmtree(scratch, ignore_errors=True)
            _convert(folder / TAG, scratch / TAG)
        self._group.await_leader()  # a large conversion may exceed the deadline of a barrier
        self._engine._config.load_universal_checkpoint = True  # DeepSpeed reads it when it loads
        self._restore(scratch)
        self._engine._config.load_universal_checkpoint = False
        _own_steps(self._engine.optimizer.optimizer)
        self._group.barrier()
        if self._group.leads:
            shutil.rmtree(scratch, ignore_errors=True)  # NFS needs the barrier: no file may be open

    def _restore(self, folder: Path) -> None:
        with only_data(folder, PLAIN_DATA):
            # With LoRA the checkpoint lacks the base model, whose identity ``load`` has checked.
            loaded, _ = self._engine.load_checkpoint(
                str(folder), tag=TAG, load_module_strict=self._lora is None
            )
        if loaded is None:
            raise StateError(f"{folder} holds no checkpoint of DeepSpeed: resume from another one")
        self._skipped.total = self._engine.skipped_steps

    def _export(self, folder: Path) -> None:
        slots = self._whole.slots if self._group.leads else ()
        whole = np.empty(self._whole.nbytes if self._group.leads else 0, np.uint8)
        self._copy(self._whole, slots, whole)
        self._side.wait()
        if self._group.leads:
            with replacing(folder) as temporary:
                tensors = stored_buffers(self._policy) | dict(tensors_in(whole, self._whole))
                if self._lora:
                    self._lora.save(tensors, temporary)
                else:
                    self._policy.save_pretrained(temporary, state_dict=tensors)
                self._tokenizer.save(temporary)
        self._group.barrier()

    def _close(self) -> None:
        wait([self._written])
        wait([self._copied])
        self._engine.destroy()
        self._group.leave()


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Some groups of a batch, ready for the model: numpy arrays, which ``upload`` turns into tensors.

    recorded: what the loss needs besides log π_θ, such as rewards. passes: the groups' packed micro-batches.
    """

    recorded: RecordedGroups
    passes: tuple[Packed, ...]

    @staticmethod
    def of(part: Part, batch: TrajectoryBatch, layout: Layout) -> _Work:
        """Take a part of a batch and pack each of its micro-batches for one pass of the model.

        ``place_A`` of a pass holds indices among the tokens of all completions of the part.
        """
        groups = batches.take_groups(batch, part.groups)
        row_N = np.zeros(len(batch), np.int64)
        row_N[batches.rows_of(part.groups, batch.group_size)] = np.arange(len(groups))
        passes = tuple(_packed(groups, row_N[rows], layout) for rows in part.micro_batches)
        return _Work(RecordedGroups.of(groups), passes)


def _packed(batch: TrajectoryBatch, rows: np.ndarray, layout: Layout) -> Packed:
    """Pack the trajectories ``rows`` of a batch for one pass of the model.

    Each of their tokens that the policy sampled has an entry in ``place_A`` of the result: its index among
    the tokens of all the batch's completions, not only of those in ``rows``.
    """
    some = batch.take(rows)
    packed = pack(
        some.sequences,
        some.prompt_length_N,
        some.record["prompt_row"],
        some.action_T,
        layout,
        begin_T=some.begin_T,
        others_TC=some.top_logprobs["token"],
    )
    place_T, _ = spans(batch.completions.offsets, rows)
    return replace(packed, place_A=place_T[packed.place_A])


def _means(outputs: Sequence[ObjectiveOutput], of_groups: int) -> dict[str, Tensor]:
    """Return what this rank contributes to the batch's mean loss and metrics, by name, as float64 scalars.

    outputs: the objective's output for each part that this rank computed. of_groups: number of groups of the
    whole batch.
    """
    means = dict[str, Tensor]()
    for output in outputs:
        share = len(output.loss_BK) / of_groups
        for name, value in {"loss": output.loss.detach(), **output.metrics}.items():
            means[name] = means.get(name, 0.0) + share * value.double()
    return means


@contextmanager
def _unwritable(folder: Path) -> Iterator[None]:
    """Turn an error within the block into StateError or DiskFullError, unless it means that a rank is lost.

    folder: the checkpoint that is being written, for the message.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's writer raises either
        if is_lost_peer(error) or isinstance(error, DiskFullError):
            raise
        full = is_disk_full(error)  # torch's own message does not say this
        why = "the disk or quota is full" if full else error
        raise (DiskFullError if full else StateError)(
            f"cannot write the checkpoint {folder} ({why}); free space or raise the quota, then start "
            "the same run again: it resumes from the previous checkpoint"
        ) from error


def _layout(
    parameters: Mapping[str, torch.nn.Parameter], config: Config, lora: LoraWeights | None = None
) -> WeightLayout:
    """Return the layout of named parameters, unsharded, in model.dtype.

    lora: description of the adapter if these are an adapter's parameters, otherwise None.
    """
    shapes = [(name, tuple(_unsharded(parameter).shape)) for name, parameter in parameters.items()]
    return WeightLayout.of(shapes, SAFETENSORS_NAME[config.model.dtype], lora)


def _leave_out_the_base(model: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Remove frozen weights from a state dict. torch calls this hook when it makes the state dict.

    DeepSpeed, when told to leave out frozen weights, keeps those that are tied.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            state.pop(prefix + name, None)


def _load_policy(config: Config) -> PreTrainedModel:
    """Load the policy. Under ZeRO-3 it is sharded while loading, so that no rank ever holds all of it.

    Raises ConfigError if there is no model, or if DeepSpeed refuses a setting of train.deepspeed.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # from DeepSpeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else DeepSpeed compiles it, for minutes
    settings = deepspeed_settings(config, BUCKET_ELEMENTS)
    _require_accepted(settings)
    # With LoRA every rank needs the whole base model to compute its identity.
    in_parts = settings if config.train.zero_stage == 3 and config.model.lora is None else None
    return load_policy(config.model.path, config.model.dtype, in_parts=in_parts)


def _default_micro_batch(policy: PreTrainedModel, config: Config, device: torch.device) -> int:
    """Return the default token limit of a micro-batch on ``device``; 0 if the model's shape is unknown."""
    try:
        shape = shape_of(policy.config.to_dict())
    except KeyError:
        return 0
    checkpointing = config.train.gradient_checkpointing
    kept = kept_bytes(shape, BYTES[config.model.dtype], checkpointing=checkpointing)
    return default_micro_batch(kept, device.type)


def _require_accepted(settings: dict[str, Any]) -> None:
    """Raise ConfigError if DeepSpeed refuses the settings, which include those of train.deepspeed."""
    try:
        deepspeed.DeepSpeedConfig(settings)
    except (ValueError, DeepSpeedConfigError) as error:  # pydantic's errors have several lines
        said = " ".join(str(error).partition(" [type=")[0].split())
        raise ConfigError(
            f"DeepSpeed refuses train.deepspeed: {said}; correct the setting, or leave it out"
        ) from None


def _unsharded(parameter: torch.nn.Parameter) -> Tensor:
    """Return a tensor without data in the full shape of a parameter, even if ZeRO-3 has sharded it."""
    return torch.empty(getattr(parameter, "ds_shape", parameter.shape), device="meta")


def _make_engine(config: Config, model: PolicyLogprobs, device: torch.device) -> deepspeed.DeepSpeedEngine:
    """Make DeepSpeed's engine for ``model`` with torch's AdamW, because DeepSpeed's would need a compiler."""
    train = config.train
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        train.learning_rate.peak,
        train.adam_betas,
        weight_decay=train.weight_decay,
        fused=is_fused(device),
    )
    settings = deepspeed_settings(config, sum(_unsharded(parameter).numel() for parameter in trained))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def _own_steps(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter its own step counter on its device.

    DeepSpeed's conversion leaves one shared counter on the CPU. Each parameter would increment it, and a
    fused AdamW needs counters on its device.
    """
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(parameter.device, torch.float32, copy=True)


def _buckets(parts: Sequence[Sequence[WeightSlot]]) -> Iterator[list[WeightSlot]]:
    """Divide the tensors of all ranks' parts into buckets of at most BUCKET_BYTES, or of one larger tensor.

    Tensors are ordered by their distance from the beginning of their part, so that parts take turns.
    """
    by_place = [(slot.start - part[0].start, slot) for part in parts for slot in part]
    bucket: list[WeightSlot] = []
    size = 0
    for _, slot in sorted(by_place, key=itemgetter(0)):
        nbytes = slot.end - slot.start
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(slot)
        size += nbytes
    yield bucket


def _convert(folder: Path, universal: Path) -> None:
    """Convert a checkpoint in ``folder`` to one for any number of ranks, in ``universal``.

    DeepSpeed's program does this in a separate process, because it starts workers, which must not be forked
    from an MPI rank. Raises StateError if it fails.
    """
    program = [sys.executable, "-c", f"from {__name__} import convert; convert()", "--inject_missing_state"]
    arguments = ["--input_folder", str(folder), "--output_folder", str(universal)]
    count = str(min(CONVERTERS, len(os.sched_getaffinity(0))))
    workers = ["--num_extract_workers", count, "--num_merge_workers", count]
    done = subprocess.run([*program, *arguments, *workers], capture_output=True, text=True)
    if done.returncode:
        raise StateError(
            f"{folder} cannot be converted to another number of trainer ranks: resume with the old "
            f"launch.trainers ({done.stderr.strip().splitlines()[-1]})"
        )


def convert() -> None:
    """Run DeepSpeed's conversion, in the process that ``_convert`` starts, with the arguments in sys.argv."""
    from deepspeed.checkpoint import ds_to_universal

    with only_data(Path(sys.argv[sys.argv.index("--input_folder") + 1]), PLAIN_DATA):
        ds_to_universal.main(ds_to_universal.parse_arguments())

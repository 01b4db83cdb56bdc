"""The backend of ``model.path``: a Hugging Face model on DeepSpeed and vLLM, or the user's own class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tba_hpc.config import Config
from tba_hpc.core.own_code import find_function, is_own
from tba_hpc.core.ports import Backend, Generator, Reference, SharedLearner, Tokenizer
from tba_hpc.run import modules
from tba_hpc.run.directory import RunDir
from tba_hpc.run.inputs import first_day


@dataclass(frozen=True, slots=True)
class HfBackend:
    """A Hugging Face model, trained by DeepSpeed and sampled by vLLM; see ports.Backend.

    Each method imports the heavy libraries that it needs, and raises ConfigError if the config does not fit
    the model. day: date for chat templates that write today's date into prompts.
    """

    config: Config
    day: date

    def tokenizer(self) -> Tokenizer:
        """Load the model's tokenizer."""
        from tba_hpc.learner.hf_model import load_tokenizer

        return load_tokenizer(self.config.model.path, day=self.day)

    def generator(self, *, seed: int) -> Generator:
        """Start an engine; return its generator while the engine is still being built."""
        from tba_hpc.engine.vllm_generator import VllmGenerator

        launch = self.config.launch
        return VllmGenerator(
            self.config.model,
            self.config.generator,
            seed=seed,
            start_seconds=launch.start_seconds,
            silence_seconds=launch.silence_seconds,
            top_logprobs=self.config.train.score_centering,
        )

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """Load the model as the reference; see ports.Backend for ``folder_of``."""
        from tba_hpc.learner.hf_reference import load_reference

        return load_reference(self.config.model, folder_of)

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """Make a trainer rank's learner; see ports.Backend for the arguments.

        All trainer ranks find each other through files in ``store``. Raises an ExchangeError that names
        missing ranks.
        """
        from tba_hpc.learner.deepspeed_learner import DeepSpeedLearner

        return DeepSpeedLearner(self.config, rank=rank, ranks=ranks, store=store, references=folder_of)


def make_backend(run: RunDir, config: Config) -> Backend:
    """Return a run's Backend: an HfBackend, or an object of the user's own class.

    Raises ConfigError if ``model.path`` names a class that is not found.
    """
    modules.use(run.modules)
    modules.use_here()
    return own_backend(config) or HfBackend(config, first_day(run))


def own_backend(config: Config) -> Backend | None:
    """Return the user's own Backend if ``model.path`` names one. Raises ConfigError if it is not found."""
    path = config.model.path
    if not is_own(path):
        return None
    backend: Backend = find_function(f"model.path={path}", path)(config)
    return backend

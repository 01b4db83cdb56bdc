"""The configuration of a run: frozen pydantic models, read from YAML and ``--set`` overrides.

Imports no heavy library.
"""

# ruff: noqa: F401  (other packages import these names from here)

from tba_hpc.config.loading import (
    ConfigError,
    differences,
    dump_config,
    explain,
    is_local,
    load_config,
    may_change,
    parse_config,
    read_tree,
)
from tba_hpc.config.rules import (
    DEEPSPEED_SETTINGS,
    OWN_DEEPSPEED_SETTINGS,
    OWN_ENGINE_ARGUMENTS,
    flat,
    reward_key,
    value_text,
)
from tba_hpc.config.sections import (
    FIRST_ELASTIC,
    BufferSection,
    CheckpointSection,
    Config,
    Dtype,
    EvaluateSection,
    ExchangeSection,
    GeneratorSection,
    LaunchSection,
    LearningRate,
    LoraSection,
    MayChange,
    ModelSection,
    RewardSection,
    RunSection,
    Schedule,
    TaskSection,
    TrackSection,
    TrainSection,
    is_elastic,
)
from tba_hpc.config.variants import Section

"""A rank and the process of its engine, by a stub that speaks the real protocol: death, silence, refusal."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from tba_hpc.config import ConfigError, GeneratorSection, ModelSection
from tba_hpc.core.ports import EngineError
from tba_hpc.core.types import Group, Prompt, Publication, Request, Sampling, WeightLayout, WeightUpdate
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.engine import vllm_generator
from tba_hpc.engine.vllm_generator import KEYS, VllmGenerator, is_permanent, remedy
from tba_hpc.tasks.redteam import VICTIM_KEYS

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=5)


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_generator, "ENGINE", "stub_engine")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def made() -> Iterator[list[VllmGenerator]]:
    """Those to be closed in the end."""
    generators: list[VllmGenerator] = []
    yield generators
    for generator in generators:
        generator.close()


def make(
    made: list[VllmGenerator], *, start_seconds: float = 60, silence_seconds: float = 60, **behaviour: object
) -> VllmGenerator:
    section = GeneratorSection(engine=behaviour)
    limits = {"start_seconds": start_seconds, "silence_seconds": silence_seconds}
    made.append(VllmGenerator(ModelSection(path="tiny"), section, seed=0, **limits))
    return made[-1]


def request(number: int, n: int = 4) -> Request:
    return Request(Prompt(number, np.arange(3, dtype=np.int32), ""), number, n, SAMPLING)


def weights(version: int, first: float) -> WeightUpdate:
    layout = WeightLayout.of([("a", (3,))], "F32")
    return WeightUpdate(Publication(version=version), layout, np.array([first, 0, 0], np.float32).view("u1"))


def until_ended(generator: VllmGenerator) -> None:
    """Step until it raises."""
    while True:
        assert generator.step() == []


def drain(generator: VllmGenerator) -> list[Group]:
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return groups


def test_what_is_asked_while_it_is_built_waits_for_it(made: list[VllmGenerator]) -> None:
    generator = make(made, build_seconds=0.3)
    generator.submit(request(7))
    generator.load(weights(3, -0.5))
    assert not generator._engine.ready and generator.in_flight == 4 and not generator.loading
    assert generator.stage == "importing"
    while generator.stage == "importing":
        assert generator.step() == []
    assert generator.stage == "compiling"
    (group,) = drain(generator)
    assert group.request.id == 7 and generator.in_flight == 0 and generator.stage == ""
    assert (generator.version, generator.loading) == (3, False)
    assert [completion.logprobs.tolist() for completion in group.completions] == [[-0.5] * 5] * 4
    assert {completion.finish_reason for completion in group.completions} == {"length"}
    assert group.versions.tolist() == [[3, 3]] * 4


def test_an_engine_maps_the_file_that_the_exchange_gives(made: list[VllmGenerator]) -> None:
    """It is not copied, and kept until the next one is loaded: a rebuilt engine reads it again."""
    generator, update = make(made), weights(3, -0.5)
    files = [WeightFile.copy_of(update.data) for _ in range(2)]
    generator.load(replace(update, data=update.data[:0], file=files[0].reader()))
    os.kill(generator._engine.pid, signal.SIGKILL)
    generator.submit(request(7))
    (group,) = drain(generator)
    assert group.versions.tolist() == [[3, 3]] * 4 and group.completions[0].logprobs[0] == -0.5
    assert files[0].has_readers and generator.rebuilds == 1
    generator.load(replace(update, file=files[1].reader()))
    assert not files[0].has_readers and files[1].has_readers


def test_a_rank_that_was_suspended_with_its_engine_does_not_blame_it(
    made: list[VllmGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = make(made, silence_seconds=3)
    while not generator._engine.ready:
        generator.step()
    engine, before = psutil.Process(generator._engine.pid), time.monotonic()
    engine.suspend()
    generator.submit(request(7))
    monkeypatch.setattr(time, "monotonic", lambda: before + 1000)
    assert generator.step() == [] and generator.rebuilds == 0
    monkeypatch.undo()
    engine.resume()


def test_an_engine_inherits_nothing_that_makes_it_a_rank_or_starts_cuda_and_shows_no_setting(
    made: list[VllmGenerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    generator = make(made)
    while not generator._engine.ready:
        generator.step()
    process = psutil.Process(generator._engine.pid)
    assert "tiny" not in " ".join(process.cmdline())  # every user of the node can read arguments
    environment = process.environ()
    assert environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert not any(name.startswith("OMPI_") for name in environment)


@pytest.mark.parametrize("failures", [("KILL", "STOP"), ("STOP", "KILL")], ids="-".join)
def test_an_engine_that_fails_is_rebuilt_and_loses_nothing(
    made: list[VllmGenerator], failures: tuple[str, str]
) -> None:
    """At work, and the next one while it is built: killed, or it hangs. The weights due come back with it."""
    generator = make(made, request_seconds=0.01)
    generator.load(weights(14, -2.0))
    for number in range(100):
        generator.submit(request(number))
    groups: list[Group] = []
    while len(groups) < 10:
        groups += generator.step()
    for name in failures:
        failed = generator._engine
        failed._start_seconds = failed._silence_seconds = 0.5
        os.kill(failed.pid, getattr(signal, f"SIG{name}"))
        while generator._engine is failed:
            groups += generator.step()
        assert not psutil.pid_exists(failed.pid)
    groups += drain(generator)
    assert generator.rebuilds == 2
    assert sorted(group.request.id for group in groups) == list(range(100))
    assert all((group.versions == 14).all() for group in groups)
    assert {float(row) for group in groups for one in group.completions for row in one.logprobs} == {-2.0}


def test_it_gives_up_where_no_engine_survives(made: list[VllmGenerator]) -> None:
    generator = make(made)
    generator.submit(request(0))
    with pytest.raises(EngineError, match=r"died 4 times without .* \(the last one was ended by SIGKILL\)"):
        while True:
            os.kill(generator._engine.pid, signal.SIGKILL)
            assert generator.step() == []
    assert generator.rebuilds == 3


def test_its_last_word_is_told_and_what_helps_against_it(made: list[VllmGenerator]) -> None:
    generator = make(made, die="OutOfMemoryError: CUDA out of memory")
    said = (
        r"\(the last one failed: OutOfMemoryError: CUDA out of memory\): lower "
        r"generator.gpu_memory_utilization and generator.kv_cache_mb, or let fewer ranks share a GPU; "
    )
    with pytest.raises(EngineError, match=said):
        until_ended(generator)


def test_an_engine_that_never_starts_in_one_and_the_same_way_is_given_up(made: list[VllmGenerator]) -> None:
    """After the second one; where that is sure to be said again, or it is known what it lacks, the first."""
    generator = make(made, die="RuntimeError: no such thing")
    with pytest.raises(EngineError, match=r"died 2 times .*\(the last one failed: RuntimeError: no such"):
        until_ended(generator)
    assert generator.rebuilds == 1
    reason = "AttributeError: '_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'"
    generator = make(made, die=reason)
    with pytest.raises(ConfigError, match=rf"cannot start on .*: it failed: {reason}, as another .*; see"):
        until_ended(generator)
    assert generator.rebuilds == 0
    no_compiler = make(made, die="RuntimeError: Failed to find C compiler")
    with pytest.raises(ConfigError, match=r"^vLLM cannot start on .*: it failed: .*; apt-get install gcc"):
        until_ended(no_compiler)
    assert no_compiler.rebuilds == 0


@pytest.mark.parametrize(
    ("failure", "final"),
    [
        ("failed: ImportError: libcudart.so.13: cannot open shared object file", True),
        ("ended with exit status 1", True),
        ("failed: OutOfMemoryError: CUDA out of memory", False),
        ("failed: AcceleratorError: CUDA error: device-side assert triggered", False),
        ("failed: RuntimeError: Engine core initialization failed", False),
        ("failed: DistStoreError: Timed out after 61 seconds", False),
        ("was ended by SIGKILL", False),
        ("was not built within 60 s, a limit from launch.timeout_seconds", False),
        ("closed its connection", False),
    ],
)
def test_what_another_engine_may_not_meet_is_tried_again(failure: str, final: bool) -> None:
    assert is_permanent(failure) == final


@pytest.mark.parametrize("lacking", ["torch", "vllm"])
def test_a_module_that_cannot_be_imported_is_final_and_named(
    made: list[VllmGenerator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """By the real process of an engine, before and while it is built."""
    monkeypatch.setattr(vllm_generator, "ENGINE", "tba_hpc.engine.engine_process")
    (tmp_path / f"{lacking}.py").write_text("import no_such_part\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made.append(VllmGenerator(ModelSection(path="tiny"), GeneratorSection(), seed=0))
    said = r"^vLLM cannot start on .*: No module named 'no_such_part'; install the pinned versions"
    with pytest.raises(ConfigError, match=said):
        until_ended(made[-1])
    assert made[-1].rebuilds == 0


def test_building_has_a_limit_of_its_own(made: list[VllmGenerator]) -> None:
    """It may take longer than one at work may be silent; that has an end, too, whatever it says meanwhile."""
    generator = make(made, build_seconds=0.8, silence_seconds=0.3)
    while not generator._engine.ready:
        assert generator.step() == []
    assert generator.rebuilds == 0
    late = r"died 4 times .*\(the last one was not built within 0.2 s, a limit from launch.timeout_seconds\)"
    with pytest.raises(EngineError, match=late):
        until_ended(make(made, build_seconds=60, start_seconds=0.2))
    talkative, start = make(made, build_seconds=60, start_seconds=3), time.monotonic()
    while talkative.stage != "compiling" or not talkative.rebuilds:
        assert talkative.step() == [] and time.monotonic() - start < 30


def test_what_it_refuses_is_the_users_to_mend(made: list[VllmGenerator]) -> None:
    refused = make(made, refuse="max_model_len (256) is greater than the model's")
    message = (
        r"^vLLM cannot serve model.path=tiny with this configuration: max_model_len \(256\) is greater than "
        r"the model's; check model.context_length, .* and generator.engine$"
    )
    with pytest.raises(ConfigError, match=message):
        until_ended(refused)
    assert refused.rebuilds == 0
    broken = make(made, broken="libnuma.so.1: cannot open shared object file")
    with pytest.raises(
        ConfigError, match=r"^vLLM cannot start on .*: libnuma.so.1: cannot .*; apt-get install"
    ):
        until_ended(broken)
    assert broken.rebuilds == 0  # another one would end the same way
    misfit = make(made, misfit="took no new value for a.weight")
    misfit.load(weights(1, 0.0))
    with pytest.raises(ConfigError, match=r"vLLM cannot follow .*=tiny: its model took no new value"):
        until_ended(misfit)
    assert misfit.version == 0


def test_log_probabilities_that_are_not_numbers_cost_graphs_and_no_group(
    made: list[VllmGenerator], caplog: pytest.LogCaptureFixture
) -> None:
    """While the weights are sound, CUDA graphs are suspected: first those of attention, then all."""
    graphs = {"graphs": "FULL_AND_PIECEWISE", "nan": {"FULL_AND_PIECEWISE": 99, "PIECEWISE": 1}}
    generator = make(made, request_seconds=0.05, **graphs)
    generator.load(weights(3, -0.5))
    for number in range(3):
        generator.submit(request(number))
    groups = drain(generator)
    assert sorted(group.request.id for group in groups) == [0, 1, 2] and generator.in_flight == 0
    assert {float(row) for group in groups for one in group.completions for row in one.logprobs} == {-0.5}
    assert (generator.rebuilds, generator._graphs) == (2, "NONE") and generator.nan_groups >= 2
    assert "generator.engine={compilation_config: {cudagraph_mode: NONE}} turns them off" in caplog.text


def test_without_graphs_a_request_is_sampled_again_a_few_times(made: list[VllmGenerator]) -> None:
    generator = make(made, nan={"NONE": 3})
    generator.submit(request(7))
    (group,) = drain(generator)
    assert group.request.id == 7 and (generator.nan_groups, generator.rebuilds) == (3, 0)
    hopeless = make(made, nan={"NONE": 4})
    hopeless.submit(request(7))
    with pytest.raises(EngineError, match=r"prompt 7 were NaN 4 times, the last time without CUDA .*: leave"):
        until_ended(hopeless)


def test_damaged_weights_end_the_searcher(made: list[VllmGenerator]) -> None:
    generator = make(made, graphs="FULL_AND_PIECEWISE")
    generator.load(weights(3, np.nan))
    generator.submit(request(7))
    with pytest.raises(
        EngineError, match=r"^the weights of version 3 are damaged \(a has values that are not"
    ):
        until_ended(generator)
    assert generator.rebuilds == 0


def test_a_prompt_that_leaves_no_room_is_refused(made: list[VllmGenerator]) -> None:
    generator = make(made)
    long = Request(Prompt(3, np.zeros(1020, np.int32), ""), 0, 4, SAMPLING)
    with pytest.raises(ValueError, match=r"prompt 3 has 1020 tokens .*context_length=1024: raise"):
        generator.submit(long)
    assert generator.in_flight == 0


@pytest.mark.parametrize("keys", [KEYS, VICTIM_KEYS], ids=["policy", "victim"])
def test_a_remedy_names_the_key_that_helps(keys: Sequence[str]) -> None:
    """By what vLLM 0.32 says: of memory that is not free, of a KV cache that is too small, of all else."""
    share, cache = next(k for k in keys if "gpu_memory" in k), next(k for k in keys if "kv_cache" in k)
    taken = "Free memory on device cuda:0 (20/80 GiB) on startup is less than desired GPU memory utilization"
    assert remedy(taken, keys) == f"lower {share}, or let fewer ranks share a GPU"
    for small in (
        "No available memory for the cache blocks",
        "To serve at least one request with the model's max seq len (640), (0.08 GiB KV cache is needed",
    ):
        assert remedy(small, keys).startswith(f"raise {cache} or, where it is not set, {share}, or lower ")
    assert share in remedy("Total number of attention heads must be divisible", keys)

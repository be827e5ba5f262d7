"""``core-rl doctor`` names the engine that is off, and where it begins; models are cut to their first layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from aiohttp.web import Request
from markupsafe import escape
from mutants.outputs import SecondLayerEpsilon
from mutants.rollouts import ReportsOneTokenLate, ScoresWithoutTemperature
from mutants.tensor_parallel import HeadNormsNotReduced
from mutants.zoo import RECORD, spec_of
from reference_server import GENERATE, ReferenceServer
from server_stub import drop, running
from toy_tp import SPEC
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from core_rl.backend.meta import WeightUpdateMeta
from core_rl.errors import ConfigError
from core_rl.launch.process import start_fork_server
from core_rl.reference.rollout import ReferenceRolloutBackend
from core_rl.reference.train import ReferenceBackend
from core_rl.registry.engines import register_engine
from core_rl_conformance import doctor
from core_rl_conformance.catalogue import load_checks
from core_rl_conformance.commands import doctor as command
from core_rl_conformance.outcomes import CaseRecord, MeasurementRecord, Outcome
from core_rl_conformance.servers import target
from core_rl_conformance.smaller_model import Cuts, write_smaller_model

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
QWEN3 = Qwen3Config(num_hidden_layers=3, **SIZES)
EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
MUTANT = "head-norms-not-reduced:tp2"
SPECS = (
    SPEC,
    *(
        vars(mutant)[RECORD].spec
        for mutant in (HeadNormsNotReduced, SecondLayerEpsilon, ScoresWithoutTemperature)
    ),
)
SLIDING = "sliding_attention"
STAGES = doctor.STAGES
FEW = {
    "layers": ("I7.layers",),
    "outputs": ("I7.logprobs", "I6.neighbours", "I7.score", "I7.rollout-logprobs"),
    "loss": (),
    "gradients": ("I1.gradients",),
    "norm": ("I4.grad-norm",),
    "sync": ("I12.receive-disk",),
}


def saved(config: PretrainedConfig, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A right engine with tensor parallelism and a wrong one, and few checks."""
    monkeypatch.setattr(doctor, "STAGES", FEW)
    start_fork_server()
    registrations = [register_engine(spec) for spec in SPECS]
    yield
    for registration in registrations:
        registration.close()


@pytest.mark.parametrize(
    ("names", "code", "lines"),
    [
        (
            ["toy-tp:tp2", "toy-tp:tp2sp", "reference"],
            0,
            [
                "no difference beyond rounding: toy-tp:tp2, toy-tp:tp2sp, reference:dp1",
                "toy-tp:tp2sp: within rounding of the oracle in 4 checks",
            ],
        ),
        (
            ["reference", MUTANT],
            1,
            [
                "they part first at gradients: model.layers.1.self_attn.k_norm.weight",
                "reference:dp1: within rounding of the oracle in 5 checks",
                f"{MUTANT}: off the oracle in 2 of 4 checks, first I1.gradients; gradients of ",
                "model: layers 2 to 2 of 3 are cut",
            ],
        ),
        (
            ["reference", "second-layer-epsilon"],
            1,
            [
                "they part first at layers: layer 2, sequence 0, token 0 of 9",
                "second-layer-epsilon:dp1: off the oracle in 5 of 5 checks, first I7.layers; hidden states after ",
            ],
        ),
        (
            ["reference", "reference-rollout", "scores-without-temperature"],
            1,
            [
                "they part first at outputs: sequence 0, token 1 of 64",
                "reference-rollout:dp1: within rounding of the oracle in 3 checks",
                "scores-without-temperature:dp1: off the oracle in 1 of 3 checks, first I7.score; scores at temp",
            ],
        ),
        (
            ["reference", "toy-tp:tp3", "reference:tp2", "nobody"],
            2,
            [
                "no difference beyond rounding: reference:dp1",
                "toy-tp:tp3: could not be judged: refused: tp=3 must divide the attention and key/value heads",
                "reference:tp2: could not be judged: 'reference': layout tp2 needs tensor_parallel",
                "nobody: could not be judged: no installed engine is called 'nobody'",
            ],
        ),
    ],
)
def test_doctor_names_the_engine_and_place(
    engines: None, tmp_path: Path, names: list[str], code: int, lines: list[str]
) -> None:
    app, path = typer.Typer(), saved(QWEN3, tmp_path / "model")
    app.command()(command)
    options = ["--truncate-layers=2", f"--repro={tmp_path}/scripts"] if code == 1 else []
    result = CliRunner().invoke(
        app,
        [*names, "--model", str(path), *options, f"--json={tmp_path}/v.json", f"--html={tmp_path}/v.html"],
    )
    assert result.exit_code == code, result.output
    printed = result.stdout.splitlines()
    assert [line for line in lines if not any(one.startswith(line) for one in printed)] == []
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert printed[0] == lines[0] == verdict["verdict"]
    page = (tmp_path / "v.html").read_text()
    assert escape(lines[0]) in page
    assert ('class="heat"' in page) == ("at layers:" in lines[0])
    scripts = [Path(file) for file in verdict["scripts"].values()]
    assert len(scripts) == (1 if code == 1 else 0)
    assert all("from_pretrained('model'," in script.read_text() for script in scripts)


def test_doctor_judges_a_running_server(engines: None, tmp_path: Path) -> None:
    app, path = typer.Typer(), saved(QWEN3, tmp_path / "model")
    app.command()(command)
    with running([ReferenceServer(str(path), ReportsOneTokenLate)]) as (server,):
        (tmp_path / "rows.jsonl").write_text("[4, 2]\n[7]\n[3, 3, 5]")
        options = [
            "reference",
            "--model",
            str(path),
            f"--data={tmp_path}/rows.jsonl",
            f"--server=http://{server.address}",
            "--wire=vllm",
        ]
        result = CliRunner().invoke(app, options)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("they part first at outputs: sequence 0, token 0 of 8")
    assert "reference:dp1: within rounding of the oracle in 5 checks" in result.stdout
    dead = CliRunner().invoke(app, options)
    assert dead.exit_code == 2
    assert f"http://{server.address}: could not be judged: " in dead.stdout


def test_server_that_dies_ends_its_checks(
    engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, path = typer.Typer(), saved(QWEN3, tmp_path / "model")
    app.command()(command)
    monkeypatch.setattr(target, "BACK_AFTER_S", 1.0)
    with running([ReferenceServer(str(path))]) as (server,):

        def die(request: Request, body: dict[str, Any]) -> None:
            if server.calls[request.path] > 3:
                server.faults = dict.fromkeys(server.routes, drop)
                drop(request, body)

        server.faults = {GENERATE: die}
        address = f"--server=http://{server.address}"
        options = ["reference", f"--model={path}", address, "--wire=vllm", "--take-over"]
        result = CliRunner().invoke(app, options)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("vllm-server:dp1 fails first at outputs: ServerTimeout: vLLM server")
    assert "reference:dp1: within rounding of the oracle in 5 checks" in result.stdout
    assert "vllm-server:dp1: fails in 2 of 2 checks, first I7.score; ServerTimeout: " in result.stdout
    assert "not run  the server did not respond" in result.stdout


class StepsAtLeastALittle(ReferenceBackend):
    """A learning rate of 0 is a small one."""

    def step(self, scale: float, lr: float, count: int) -> None:
        super().step(scale, max(lr, 1e-6), count)


class DriftingReceiver(ReferenceRolloutBackend):
    """Each update makes the weights that it brings a little larger."""

    def _install_from_disk(self, meta: WeightUpdateMeta) -> None:
        super()._install_from_disk(meta)
        for parameter in self._model.parameters():
            parameter.data.mul_(1 + 1e-3 * meta.version)


def test_nothing_moves_at_learning_rate_zero(
    engines: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "STAGES", {"outputs": ("I7.score",), "standstill": STAGES["standstill"]})
    names = ["reference", "reference-rollout", "steps-at-least-a-little", "drifting-receiver"]
    with register_engine(spec_of(StepsAtLeastALittle)), register_engine(spec_of(DriftingReceiver)):
        diagnosis = doctor.diagnose(
            names, saved(QWEN3, tmp_path / "model"), None, None, Cuts(), still_steps=2
        )
    first, second = {finding.engine: finding for finding in diagnosis.findings}.values()
    assert (first.engine, first.place) == ("steps-at-least-a-little:dp1", "model.embed_tokens.weight")
    assert (second.engine, second.place) == (
        "drifting-receiver:dp1",
        "sequence 0, token 0 of 8 after a prompt of 17",
    )
    assert "after sync 1 at learning rate 0" in second.message


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--wire=vllm"], "--wire and --take-over are of a server; give --server=URL"),
        (["--data=rows.jsonl", "--vocab=64"], "--data=rows.jsonl has tokens that --vocab=64 may cut"),
        (["--server=http://127.0.0.1:1", "--vocab=64"], "--server=http://127.0.0.1:1 serves the whole model"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: list[str], match: str) -> None:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["reference", "--model", str(tmp_path), *options])
    assert isinstance(result.exception, ConfigError)
    assert match in str(result.exception)


def record(engine: str, check: str, what: str, message: str) -> CaseRecord:
    return CaseRecord(
        check=check,
        engine=engine,
        layout="dp1",
        model="llama",
        dtype="float32",
        seed=0,
        outcome=Outcome.FAILED if message else Outcome.PASSED,
        seconds=1.0,
        capabilities=(),
        measurements=(MeasurementRecord(what=what, error=1.0 if message else 0.0, limit=0.1),),
        message=f"{check}: engine\n  {message}" if message else "",
    )


@pytest.mark.parametrize(
    ("check", "what", "message", "verdict"),
    [
        (
            "I7.logprobs",
            "logprobs",
            "logprobs differs by 1\n  first at sequence 2, token 3 of 9: expected 1, got 2",
            "outputs: sequence 2, token 3 of 9",
        ),
        (
            "I1.gradients",
            "the loss of TokenMeanLoss",
            "the loss is 2; expected 1",
            "loss: the loss of TokenMeanLoss",
        ),
        ("I1.gradients", "the norm of step 0", "the norm is 2; expected 1", "norm: the norm of step 0"),
        (
            "I1.gradients",
            "weights after one step",
            "weights after one step is off\n  first: model.norm.weight by 1 (allowed 0.1)",
            "optimizer step: model.norm.weight",
        ),
        ("I11.resume", "", "RankDied: rank 1", "checkpoint: RankDied: rank 1"),
    ],
)
def test_verdict_names_stage_and_place(check: str, what: str, message: str, verdict: str) -> None:
    later = record("a", "I12.disk", "", "other")
    wrong, right = record("a", check, what, message), record("b", check, what, "")
    parted = doctor.diagnosis_of(["a:dp1", "b:dp1"], {}, [later, wrong, right], "")
    assert parted.verdict == f"they part first at {verdict}"
    alike = doctor.diagnosis_of(["a:dp1", "b:dp1"], {}, [wrong, record("b", check, what, message)], "")
    assert alike.verdict == f"a:dp1, b:dp1: off the oracle first at {verdict}"


def test_stages_hold_checks_of_any_model() -> None:
    checks, staged = load_checks(), {name for names in doctor.STAGES.values() for name in names}
    expected = {
        name
        for name, check in checks.items()
        if check.any_model and check.kind == "train" and "adapter" not in name
    }
    staged -= set(doctor.STAGES["standstill"])
    assert {name for name in staged if checks[name].kind == "train"} == expected


@pytest.mark.parametrize(
    ("config", "count", "size"),
    [
        (Qwen3Config(num_hidden_layers=4, **SIZES), 2, 2),
        (
            Gemma3TextConfig(
                layer_types=[SLIDING, SLIDING, "full_attention", SLIDING], num_hidden_layers=4, **SIZES
            ),
            1,
            3,
        ),
        (Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[0], **EXPERTS, **SIZES), 1, 2),
    ],
)
def test_truncated_model_has_first_layers(
    tmp_path: Path, config: PretrainedConfig, count: int, size: int
) -> None:
    source = saved(config, tmp_path / "whole")
    (source / "tokenizer.json").write_text("{}")
    cut = write_smaller_model(source, Cuts(layers=count), tmp_path)
    assert cut.startswith(f"layers {size} to 3 of 4 are cut")
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
    whole = AutoModelForCausalLM.from_pretrained(source).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    states = []
    whole.model.layers[size - 1].register_forward_hook(lambda *call: states.append(call[2]))
    whole(ids)
    expected = whole.lm_head(whole.model.norm(states[0]))
    torch.testing.assert_close(model.eval()(ids).logits, expected)


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        (QWEN3, Cuts(vocabulary=45)),
        (
            Qwen3Config(**(SIZES | {"tie_word_embeddings": True, "eos_token_id": [3, 50]})),
            Cuts(vocabulary=45),
        ),
        (Qwen3MoeConfig(num_hidden_layers=3, **EXPERTS, **SIZES), Cuts(layers=2, experts=2, vocabulary=44)),
        (GptOssConfig(num_hidden_layers=2, layer_types=[SLIDING] * 2, **SIZES), Cuts(experts=5)),
        (DeepseekV3Config(**(SIZES | DEEPSEEK)), Cuts(experts=4)),
    ],
)
def test_smaller_model_has_first_rows(tmp_path: Path, config: PretrainedConfig, cuts: Cuts) -> None:
    source = saved(config, tmp_path / "whole")
    write_smaller_model(source, cuts, tmp_path)
    complete = AutoModelForCausalLM.from_pretrained(source).state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name for name in complete if name not in model.state_dict()} == {
        name for name in complete if cuts.layers and f".{cuts.layers}." in name
    }
    model(torch.arange(20)[None])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, complete[name][: len(value)])
    ids = model.config.eos_token_id
    assert ids == ([3] if config.eos_token_id == [3, 50] else config.eos_token_id)


@pytest.mark.parametrize(
    ("cuts", "match"),
    [
        (Cuts(layers=3), "--truncate-layers=3: nothing can be cut: it has 3 layers; leave"),
        (Cuts(experts=3), "--keep-experts=3: nothing can be cut: it has 3 experts in a layer; leave"),
        (Cuts(experts=1), "--keep-experts=1: a token takes 2; keep at least as many"),
        (Cuts(vocabulary=61), "--vocab=61: nothing can be cut: it has 61 words; leave"),
    ],
)
def test_nothing_to_cut_is_refused(tmp_path: Path, cuts: Cuts, match: str) -> None:
    source = saved(Qwen3MoeConfig(num_hidden_layers=3, **EXPERTS, **SIZES), tmp_path / "whole")
    with pytest.raises(ConfigError, match=match):
        write_smaller_model(source, cuts, tmp_path)
    (source / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="the model in .* cannot be read: "):
        write_smaller_model(source, cuts, tmp_path)

"""One typed tree of settings: a TOML file, the environment (PIPELINERL_TRAINING__LR=1e-5), then flags, the later winning.

The docstring under a field is its help text. Unknown keys, and combinations that contradict or do nothing, are refused.
Imports in a blink: no torch, no Flink, no Kafka.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class BadSettings(ValueError):
    """Settings that cannot be used; the text names the key, what is wrong with it and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class RunSettings(Section):
    id: str = "run"
    """The run: prefix of its topics, name of its folder and of its MLflow run."""
    dir: Path = Path("out")
    """Folder for what a run leaves behind; the run writes to DIR/ID."""
    max_steps: Positive | None = None
    """Optimizer steps after which the run ends; without it the run ends with the prompts."""
    seed: int = 0
    """Seed of the trainer."""
    mode: Literal["pipeline", "conventional"] = "pipeline"
    """pipeline: generation never stops, weights change in the middle of sequences. conventional: the baseline, by turns: B * G samples
    under one version, then generation rests for the G = max_lag + 1 optimizer steps on them."""


class KafkaSettings(Section):
    bootstrap: str = "127.0.0.1:9092"
    """Brokers, host:port[,host:port]."""
    partitions: Positive = 1
    """Partitions of the topics whose rows are independent (rollouts, scored)."""
    replication: Positive = 1
    """Replicas of each topic."""
    max_message_bytes: Positive = 64 << 20
    """Largest message; the broker must allow as much."""
    timeout_s: Seconds = 30
    """How long a client waits for the broker before it gives up with a clear error."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How clients talk to the broker."""
    sasl_mechanism: Literal["SCRAM-SHA-256", "SCRAM-SHA-512", "PLAIN"] | None = None
    """SASL mechanism, with a SASL protocol."""
    sasl_username: str | None = None
    """SASL user."""
    sasl_password_file: Path | None = None
    """File that holds the SASL password: it is never a setting, so that no log or tracker shows it."""
    ssl_cafile: Path | None = None
    """PEM file of the authority that signed the broker's certificate."""

    @model_validator(mode="after")
    def _sasl(self):
        given = [v is not None for v in (self.sasl_mechanism, self.sasl_username, self.sasl_password_file)]
        if given != [self.security_protocol.startswith("SASL")] * 3:
            raise ValueError("sasl_mechanism, sasl_username and sasl_password_file go with a SASL security_protocol, and only with one")
        return self


class ModelSettings(Section):
    path: str = ""
    """Folder of the start model in Hugging Face form (config.json, safetensors, tokenizer)."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless asked for."""
    head_dtype: Literal["model", "float32"] = "model"
    """Where the logits are multiplied out, in engine, trainer and reference: model, in the dtype of the weights, or float32."""


class GenerationSettings(Section):
    engines: Positive = 1
    """Engines = parallelism of the generate job. `actor_gpus` of the article; without GPUs it counts engines on the CPU."""
    batch: Positive = 64
    """H: sequences in flight in one engine. `generation_batch` of the article."""
    max_tokens: Positive = 256
    """Longest response, in tokens."""
    max_model_len: Positive = 512
    """Context: prompt and response, in tokens. A longer prompt is a dead letter."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; every log-probability of the run is taken at it."""
    kv_cache_mode: Literal["reuse", "reuse_partial", "recompute"] = "reuse_partial"
    """What a weight update does to the KV cache: reuse keeps it; reuse_partial keeps it for sequences in flight and never
    shares finished prefixes across versions; recompute rebuilds it with the new weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """dtype of the engine's weights and of the published ones."""
    kv_cache_dtype: Literal["model", "fp8"] = "model"
    """fp8 halves the KV cache, at the price of a mismatch with the trainer (`mismatch/kl`); a CPU needs AVX-512 or AMX for it."""
    kv_cache_mb: Positive = 256
    """Memory of the KV cache on a CPU, in MiB a engine; on a GPU `gpu_memory_utilization` decides."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's memory the engine takes."""
    tensor_parallel: Positive = 1
    """GPUs an engine, through vLLM's executor."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run; auto takes a GPU if there is one."""
    spare_weights: bool = True
    """On CPUs, pack a version beside the one in use, so that applying it takes milliseconds: costs the memory of the weights once more."""
    enforce_eager: bool = True
    """No CUDA graphs and no compilation."""
    threads: Positive = 1
    """CPU threads an engine."""
    chat_template: bool = False
    """Render the prompt as a user's turn with the tokenizer's chat template; otherwise it is tokenised as it is."""
    slots: Positive = 8
    """Keys that carry the groups in flight; at least as many as engines, also after a rescale."""
    start_timeout_s: Seconds = 600
    """How long an engine may take to load and to hold its first version."""
    max_restarts: int = 3
    """How often a subtask replaces an engine that died within `restart_window_s` before the job fails with its cause."""
    restart_window_s: Seconds = 600
    """See max_restarts."""

    @model_validator(mode="after")
    def _fit(self):
        if self.max_tokens >= self.max_model_len:
            raise ValueError(f"max_tokens ({self.max_tokens}) leaves no room for a prompt in max_model_len ({self.max_model_len})")
        if self.slots < self.engines:
            raise ValueError(f"slots ({self.slots}) must be at least engines ({self.engines})")
        return self


class RewardSettings(Section):
    parallelism: Positive = 1
    """Parallelism of the reward operator."""
    workers: Positive = 1
    """Grading processes a subtask."""
    timeout_s: Seconds = 10
    """A grader that takes longer is killed and replaced; the reward is null with status timeout."""
    memory_mb: Positive = 4096
    """Address space of a grading process; one that wants more dies with status error."""
    penalize_length: bool = False
    """Subtract a penalty that grows linearly from 0 to `length_penalty` over the last `length_penalty_tokens` before max_tokens."""
    length_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Penalty at max_tokens."""
    length_penalty_tokens: Positive = 64
    """Width of the ramp, in tokens."""


class ReferenceSettings(Section):
    enabled: bool = True
    """Compute log-probabilities under a reference model: needed for a KL term, useful as a measure."""
    path: str | None = None
    """The reference model; by default the start model."""
    parallelism: Positive = 1
    """Parallelism of the reference operator."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of the forward pass."""
    token_budget: Positive = 8192
    """Tokens of one packed forward pass."""
    threads: Positive = 1
    """CPU threads a reference process."""


class GroupingSettings(Section):
    group_size: Annotated[int, Field(ge=1)] = 8
    """n: samples a prompt."""
    timeout_s: Seconds = 120
    """How long a group waits for its other samples after its first arrived."""
    sample_timeout_s: Seconds = 1800
    """How long an admitted group may take altogether: whatever has not arrived then is late."""
    partial: Literal["train", "drop"] = "train"
    """What becomes of a group that misses samples at its deadline."""
    zero_variance: Literal["filter", "train"] = "filter"
    """Groups whose rewards are all equal teach nothing: filter gives their credit back and they do not count towards a step."""
    truncated: Literal["train", "filter"] = "train"
    """Answers that reached max_tokens before their end: filter leaves them out of the group and its mean, with outcome filtered."""
    normalize_by_std: bool = False
    """Divide leave-one-out advantages by the group's sample standard deviation + 1e-4."""


class PackingSettings(Section):
    token_budget: Positive = 8192
    """Tokens of a packed micro-batch; a longer sequence gets one of its own."""
    dynamic_batching: bool = True
    """Pack by token budget; otherwise `micro_batch_size` sequences a micro-batch."""
    micro_batch_size: Positive | None = None
    """Sequences a micro-batch without dynamic batching."""
    pipeline_depth: Positive = 1
    """Steps that lie ready behind the one in training."""
    last_step: Literal["drop", "train"] = "drop"
    """What becomes of the groups that are left at the end of the prompts and fill no step: outcome end_of_run, or a smaller last step."""

    @model_validator(mode="after")
    def _batching(self):
        if self.dynamic_batching != (self.micro_batch_size is None):
            raise ValueError("micro_batch_size goes with dynamic_batching = false, and only with it")
        return self


class ReinforceLoss(Section):
    """REINFORCE with truncated importance weights."""

    kind: Literal["reinforce"] = "reinforce"
    """Which loss."""
    importance_weight_clip: Annotated[float, Field(gt=0)] = 5.0
    """c: importance weights are truncated at it (the paper's 5)."""


class PPOLoss(Section):
    """PPO with asymmetric clipping."""

    kind: Literal["ppo"]
    """Which loss."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """epsilon below 1."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """epsilon above 1."""


class GSPOLoss(Section):
    """Group sequence policy optimisation: one ratio a sequence, which carries the gradient."""

    kind: Literal["gspo"]
    """Which loss."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """epsilon below 1, of the sequence ratio."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """epsilon above 1, of the sequence ratio."""


class CISPOLoss(Section):
    """REINFORCE with an importance weight that is clipped to [1 - low, 1 + high], without gradient through it."""

    kind: Literal["cispo"]
    """Which loss."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """epsilon below 1; 1 means no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 4.0
    """epsilon above 1."""


Loss = Annotated[ReinforceLoss | PPOLoss | GSPOLoss | CISPOLoss, Field(discriminator="kind")]


class TrainingSettings(Section):
    ranks: Positive = 1
    """DeepSpeed ranks = parallelism of the train job. `trainer_gpus` of the article; without GPUs it counts ranks on the CPU."""
    batch: Positive = 128
    """B: sequences an optimizer step. `training_batch` of the article."""
    max_lag: Annotated[int, Field(ge=0)] = 2
    """Oldest admissible token, in optimizer steps behind the policy that trains on it."""
    loss: Loss = ReinforceLoss()
    """The loss with its own parameters."""
    denominator: Literal["sequences", "tokens", "groups"] = "sequences"
    """What the loss of a step is divided by."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the reference model (k3 estimator)."""
    kl_importance_weighted: bool = True
    """Weigh the KL term by the truncated importance weight, since its samples come from the behaviour policy."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus."""
    ess_floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Guard: an effective sample size (before the clip, share of the tokens) below it for `ess_floor_steps` steps in a row is warned of."""
    ess_floor_steps: Positive = 3
    """See ess_floor."""
    ess_floor_action: Literal["warn", "drop"] = "warn"
    """drop: what is buffered then becomes stale as well, so that training goes on with samples of the newest versions."""
    lr: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up."""
    decay_steps: Positive | None = None
    """Linear decay to `lr_min_ratio` over this many steps; without it the rate stays."""
    lr_min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the peak rate at the end of the decay."""
    gradient_clipping: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which the gradient of a step is clipped."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """float32, or bfloat16 with float32 master weights."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage."""
    gradient_checkpointing: bool = False
    """Trade compute for memory in the backward pass."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    """Attention implementation of trainer and reference; both tell packed sequences apart by position ids."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks run."""
    threads: Positive = 1
    """CPU threads a rank."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints: the only cursor of training."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept."""
    rendezvous_timeout_s: Seconds = 120
    """How long ranks wait for each other; the error names who is absent."""
    stall_timeout_s: Seconds = 1800
    """A step that takes longer ends the rank: its peers fail at once and the job restarts."""
    offload_optimizer: bool = False
    """DeepSpeed's optimizer offload to the CPU."""

    @field_validator("loss", mode="before")
    @classmethod
    def _default_kind(cls, value):
        return {"kind": "reinforce", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _guard(self):
        if self.ess_floor is None and (self.ess_floor_steps, self.ess_floor_action) != (3, "warn"):
            raise ValueError("ess_floor_steps and ess_floor_action do nothing without ess_floor")
        return self

    @model_validator(mode="after")
    def _precision(self):
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError("zero_stage 0 keeps no float32 master weights for bfloat16: take stage 1 or more")
        return self


class WeightsSettings(Section):
    dir: str | None = None
    """Where versions are published: a folder all generators can read, or a URL that fsspec knows; by default DIR/ID/weights."""
    transport: Literal["file", "shared_memory"] = "file"
    """How versions travel: through `dir`, or through rank 0's memory, for a machine that all of trainer and generators are on."""
    keep: Annotated[int, Field(ge=2)] = 4
    """Newest versions whose bytes are kept beside those that checkpoints and deltas need."""
    keep_s: Annotated[float, Field(ge=0)] = 10
    """How long the bytes of a version are kept at least after a newer one is on offer: whoever is fetching it comes to the end."""
    encoding: Literal["full", "delta"] = "full"
    """What is sent of a version: all its bytes, or lossless what changed since the one before (small for bfloat16 at a small lr)."""
    full_every: Positive | None = None
    """With encoding = delta: each version divisible by it is sent full, so that no chain of deltas is longer; 20 by default."""
    update_every: Annotated[str, Field(pattern=r"^[1-9]\d* (version|token)s?$")] = "1 version"
    """When an engine applies a version: `N versions` after the held one, or once a sequence has `N tokens` since the last update."""
    chunked_generation: Positive | None = None
    """No sequence passes a multiple of this many tokens under an older version than the engine could hold, whatever update_every says."""
    pause_timeout_s: Seconds = 60
    """An engine that takes longer to write a version, while its sequences wait, is killed and replaced."""

    @property
    def rule(self) -> tuple[int, str]:
        """update_every as (count, "version" or "token")."""
        count, unit = self.update_every.split()
        return int(count), unit.rstrip("s")

    @model_validator(mode="after")
    def _in_force(self):
        if self.transport == "shared_memory" and self.dir is not None:
            raise ValueError("weights.dir is for weights.transport = file: versions in shared memory lie in no folder")
        if self.encoding == "full" and self.full_every is not None:
            raise ValueError("weights.full_every goes with weights.encoding = delta, and only with it")
        if self.rule == (1, "version") and self.chunked_generation is not None:
            raise ValueError("weights.chunked_generation bounds how long update_every may wait; with `1 version` nothing waits")
        return self


class EvaluationSettings(Section):
    every: Positive | None = None
    """A round of the held-out prompts (`prompts load SOURCE --held-out`) every so many policy versions; none by default."""
    samples: Positive = 1
    """Samples a held-out prompt."""
    greedy: bool = False
    """The most probable token each time, instead of sampling at generation.temperature."""
    credit: Positive = 8
    """Held-out samples that may be under way at once, beside training's credit."""
    right: float = 1.0
    """Reward from which on an answer counts as right, for pass@k."""

    @model_validator(mode="after")
    def _in_force(self):
        if self.every is None and any(getattr(self, n) != f.default for n, f in type(self).model_fields.items()):
            raise ValueError("evaluation settings do nothing without evaluation.every")
        if self.greedy and self.samples > 1:
            raise ValueError(f"evaluation.greedy with evaluation.samples = {self.samples}: greedy answers are all the same, one is enough")
        if self.samples > self.credit:
            raise ValueError(f"evaluation.credit ({self.credit}) must hold a prompt's samples ({self.samples})")
        return self


class MLflowSettings(Section):
    enabled: bool = True
    """Track the run. MLflow being away never stops training."""
    uri: str = "http://127.0.0.1:5000"
    """Tracking server."""
    experiment: str = "pipelinerl"
    """Experiment."""
    register_model: bool = True
    """Register the final model as a version of the model named after the experiment."""


class StackSettings(Section):
    dir: Path = Path("out/stack")
    """Folder of the local stack: logs, data, pids."""
    kafka_port: Positive = 9092
    """Broker."""
    kafka_controller_port: Positive = 9093
    """Controller."""
    flink_rest_port: Positive = 8081
    """Flink's REST interface."""
    flink_rpc_port: Positive = 6123
    """Flink's job manager."""
    mlflow_port: Positive = 5000
    """MLflow server."""
    task_slots: Positive = 8
    """Slots of the task manager."""
    task_manager_mb: Positive = 2048
    """Memory of the task manager's JVM."""
    flink_rest: str | None = None
    """host:port of a Flink cluster that exists already; by default the local one."""


class FlinkSettings(Section):
    checkpoint_interval_s: Seconds = 5
    """Flink checkpoints of the generate and preprocess jobs."""
    checkpoint_dir: str | None = None
    """Where they go; by default the cluster's own setting."""
    restart_attempts: Positive = 20
    """Restarts of a job before it fails for good."""
    restart_delay_s: Seconds = 1
    """Pause before a restart."""
    silence_timeout_s: Seconds = 300
    """A Python worker, engine or reference process that gives no sign of life for so long (stopped, or hanging) is killed and replaced."""
    tick_ms: Positive = 20
    """How often an operator looks for answers of its child process."""
    bundle_size: Positive = 100
    """PyFlink bundle: records."""
    bundle_ms: Positive = 10
    """PyFlink bundle: milliseconds."""


#: In the place of a folder: versions are offered as open files of rank 0's memory.
SHARED_MEMORY = "shared-memory:"

#: The article's flags and where they live in the tree.
ARTICLE_FLAGS = {
    "actor_gpus": "generation.engines",
    "trainer_gpus": "training.ranks",
    "generation_batch": "generation.batch",
    "training_batch": "training.batch",
    "pipeline_depth": "packing.pipeline_depth",
    "kv_cache_mode": "generation.kv_cache_mode",
    "weight_transport": "weights.transport",
    "importance_weight_clip": "training.loss.importance_weight_clip",
    "max_lag": "training.max_lag",
    "penalize_length": "reward.penalize_length",
    "dynamic_batching": "packing.dynamic_batching",
}


class Settings(BaseSettings):
    """All settings of a run."""

    model_config = SettingsConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True,
        env_prefix="PIPELINERL_", env_nested_delimiter="__",
    )

    run: RunSettings = RunSettings()
    """The run itself."""
    kafka: KafkaSettings = KafkaSettings()
    """The broker."""
    model: ModelSettings = ModelSettings()
    """The model that is trained."""
    generation: GenerationSettings = GenerationSettings()
    """The generate job."""
    reward: RewardSettings = RewardSettings()
    """Grading."""
    reference: ReferenceSettings = ReferenceSettings()
    """The reference model."""
    grouping: GroupingSettings = GroupingSettings()
    """Groups and advantages."""
    packing: PackingSettings = PackingSettings()
    """Steps and micro-batches."""
    training: TrainingSettings = TrainingSettings()
    """The train job."""
    weights: WeightsSettings = WeightsSettings()
    """Publication of policy versions."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Held-out prompts while training goes on."""
    mlflow: MLflowSettings = MLflowSettings()
    """Tracking."""
    flink: FlinkSettings = FlinkSettings()
    """How jobs run in Flink."""
    stack: StackSettings = StackSettings()
    """The local stack."""

    @classmethod
    def settings_customise_sources(cls, settings_cls, init_settings: PydanticBaseSettingsSource, **_):
        return (init_settings,)  # `load` reads the environment; a job that was handed resolved settings must not

    @model_validator(mode="after")
    def _consistent(self):
        t, g = self.training, self.grouping
        if t.batch % g.group_size:
            raise ValueError(f"training.batch ({t.batch}) must be divisible by grouping.group_size ({g.group_size}): "
                             "whole groups are admitted and trained")
        if self.run.mode == "conventional" and (self.weights.rule != (1, "version") or self.weights.chunked_generation is not None):
            raise ValueError("weights.update_every and weights.chunked_generation say when weights change inside sequences; "
                             "with run.mode = conventional they never do")
        if t.kl_coef and not self.reference.enabled:
            raise ValueError("training.kl_coef needs reference.enabled = true")
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.run.id):
            raise ValueError(f"run.id {self.run.id!r} names topics: letters, digits, '_' and '-' only")
        return self

    @property
    def credit(self) -> int:
        """Samples that may be unresolved at once: (max_lag + 1) * B."""
        return (self.training.max_lag + 1) * self.training.batch

    @property
    def run_dir(self) -> Path:
        return (self.run.dir / self.run.id).absolute()

    @property
    def weights_dir(self) -> str:
        if self.weights.transport == "shared_memory":
            return SHARED_MEMORY
        return self.weights.dir or str(self.run_dir / "weights")

    @property
    def reference_path(self) -> str:
        return self.reference.path or self.model.path


def load(toml: Path | None = None, flags: dict[str, Any] | None = None) -> Settings:
    """The settings from a TOML file, the environment and flags ({"training.lr": "1e-5"}). Raises BadSettings."""
    tree: dict[str, Any] = {}
    if toml is not None:
        try:
            tree = tomllib.loads(Path(toml).read_text())
        except OSError as e:
            raise BadSettings(f"settings file {toml}: {e.strerror}") from e
        except tomllib.TOMLDecodeError as e:
            raise BadSettings(f"settings file {toml} is not TOML: {e}") from e
    try:
        tree = _merged(tree, EnvSettingsSource(Settings)())
        for dotted, value in (flags or {}).items():
            _put(tree, dotted, value)
        # Whoever moves a service of the local stack means its clients too.
        stack = tree.get("stack", {})
        for port, section, key, form in (("kafka_port", "kafka", "bootstrap", "127.0.0.1:{}"), ("mlflow_port", "mlflow", "uri", "http://127.0.0.1:{}")):
            if port in stack:
                tree.setdefault(section, {}).setdefault(key, form.format(stack[port]))
        return Settings(**tree)
    except ValidationError as e:
        raise BadSettings("\n".join(_explain(err, toml) for err in e.errors())) from e


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        out[key] = _merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, leaf = ARTICLE_FLAGS.get(dotted, dotted).split(".")
    for name in sections:
        tree = tree.setdefault(name, {})
    tree[leaf] = value


def fields(model: type[BaseModel] = Settings, prefix: str = "") -> dict[str, tuple[Any, Any, str]]:
    """Every dotted key with (annotation, default, help text)."""
    out: dict[str, tuple[Any, Any, str]] = {}
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            out |= fields(info.annotation, f"{prefix}{name}.")
        elif isinstance(default, BaseModel):  # a discriminated union: the default's parameters are the common ones
            out |= fields(type(default), f"{prefix}{name}.")
        else:
            out[prefix + name] = (info.annotation, default, " ".join((info.description or "").split()))
    return out


def _explain(error: dict[str, Any], toml: Path | None) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        import difflib

        close = difflib.get_close_matches(key, fields(), n=1, cutoff=0.5)
        message = "unknown key" + (f"; did you mean {close[0]!r}?" if close else "; `pipelinerl run --help` lists all keys")
    where = f"settings ({toml})" if toml else "settings"
    return f"{where}: {key + ': ' if key else ''}{message}"


def documentation() -> str:
    """docs/settings.md; a test fails when the file and this differ."""
    lines = ["# Settings", "", "Generated from `schemas/settings.py` (`make docs`). A TOML file, then the environment",
             "(`PIPELINERL_TRAINING__LR=1e-5`), then flags (`--training.lr 1e-5`); the later wins.", "",
             "| key | default | meaning |", "| --- | --- | --- |"]
    article = {path: name for name, path in ARTICLE_FLAGS.items()}
    for key, (_, default, text) in fields().items():
        also = f" (also `{article[key]}`)" if key in article else ""
        lines.append(f"| `{key}`{also} | `{default}` | {text} |")
    return "\n".join(lines) + "\n"

"""Every record that crosses a boundary. One class is the typed record, its Arrow schema and its documentation.

Per-token lists have exactly the length of `token_ids` and are not shifted: entry i speaks of token i.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from schemas.record import col, markdown, record

STR, I32, I64, F32, F64, BOOL = pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
WORD = pa.dictionary(pa.int32(), pa.string())  # few distinct values
METRICS = pa.map_(pa.string(), pa.float64())
SPANS = pa.list_(pa.struct([pa.field("start", I32, nullable=False), pa.field("policy_version", I64, nullable=False)]))
SAMPLE = pa.struct([pa.field(n, t, nullable=False) for n, t in
                    (("group_id", STR), ("sample_index", I32), ("rollout_id", STR))])

FINISH_REASONS = ("stop", "length", "abort", "context_overflow", "timeout", "error")
REWARD_STATUSES = ("ok", "timeout", "parse_error", "error", "pending")
#: Final outcomes of a sample; "duplicate" is said of a further rollout of a sample that already has its outcome.
OUTCOMES = ("trained", "evaluated", "stale", "filtered", "late", "aborted", "dead", "end_of_run")


def now() -> datetime:
    return datetime.now(UTC)


@record("prompt", "1.0")
class Prompt:
    """A prompt with what its grader needs. Any producer may write it; (dataset, dataset_pass, prompt_ordinal) is its identity."""

    dataset: str = col(STR, "fingerprint of the data set")
    dataset_pass: int = col(I32, "0 for the first pass over the data set, 1 for the second, ...")
    prompt_ordinal: int = col(I64, "position in the data set")
    prompt_id: str = col(STR, "the data set's own name of the prompt")
    prompt: str = col(STR, "the text; with `generation.chat_template` it becomes the user's turn")
    task: str = col(STR, "the grader, a name in the registry of tasks")
    answer: str | None = col(STR, "what the grader compares with", nullable=True)
    task_metadata: str | None = col(STR, "JSON that the grader understands", nullable=True)
    group_size: int | None = col(I32, "samples a group; null takes the run's setting", nullable=True)

    @property
    def group_id(self) -> str:
        """Deterministic, so that loading twice adds nothing and a second pass is new."""
        return f"{self.dataset}/{self.dataset_pass}/{self.prompt_ordinal}"


@record("admission", "1.1")
class Admission:
    """A group let into the run: the ledger's debit side. `closed` says that nothing follows."""

    run_id: str = col(STR, "the run")
    kind: str = col(WORD, "group, evaluation (a group of held-out prompts) or closed")
    admission: int = col(I64, "dense index of the group in the run, from 0; of `closed`: the number of groups admitted")
    group_id: str = col(STR, "dataset/pass/ordinal; empty for `closed`")
    samples: int = col(I32, "samples admitted with it")
    prompt_offset: int = col(I64, "offset of the prompt in the prompts topic, of an evaluation in prompts.held_out; the next unread one for `closed`")
    policy_version: int = col(I64, "newest version known to be trained when it was admitted")
    min_version: int = col(I64, "no sample of it starts on an older version: it would be stale in any batch it can enter")
    credit: int = col(I32, "samples that could still be admitted afterwards")
    admitted_at: datetime = col(TIME, "when")
    round_prompts: int | None = col(I32, "of an evaluation: the prompts in its round", nullable=True)


@record("dispatch", "1.1")
class Dispatch:
    """A sample on its way to an engine: travels inside the generate job and lies in its state while it is in flight."""

    admission: int = col(I64, "index of the group in the ledger")
    group_id: str = col(STR, "dataset/pass/ordinal")
    sample_index: int = col(I32, "which of the group's samples")
    group_size: int = col(I32, "samples of the whole group")
    attempt: int = col(I32, "0 at first, +1 for each resubmission")
    min_version: int = col(I64, "as in the admission")
    policy_version: int = col(I64, "as in the admission")
    prompt: bytes = col(pa.binary(), "the prompt message as it lies in the topic")
    dispatched_at: datetime = col(TIME, "when")
    greedy: bool | None = col(BOOL, "the most probable token instead of a sampled one: of evaluations only", nullable=True)


@record("rollout", "1.0")
class Rollout:
    """One trainable sequence with the policy version of every token: the record of `rollouts` and, with reward and reference, of `scored`."""

    run_id: str = col(STR, "the run")
    group_id: str = col(STR, "dataset/pass/ordinal of the prompt")
    sample_index: int = col(I32, "which of the group's samples; the first complete rollout of (group_id, sample_index) wins")
    rollout_id: str = col(STR, "unique to this attempt")
    attempt: int = col(I32, "0 at first, +1 for each resubmission")
    admission: int = col(I64, "index of the group in the ledger of admissions")
    group_size: int = col(I32, "samples of the whole group")
    prompt_id: str = col(STR, "the data set's own name of the prompt")
    prompt_ordinal: int = col(I64, "position in the data set")
    dataset: str = col(STR, "fingerprint of the data set")
    dataset_pass: int = col(I32, "pass over the data set")
    task: str = col(STR, "the grader")
    answer: str | None = col(STR, "what the grader compares with", nullable=True)
    task_metadata: str | None = col(STR, "JSON for the grader", nullable=True)
    token_ids: list[int] = col(pa.list_(I32), "the engine's own ids, prompt and response, never re-tokenised")
    prompt_length: int = col(I32, "how many of them are the prompt's")
    loss_mask: list[bool] = col(pa.list_(BOOL), "true only for tokens the policy sampled and may be trained on: none of an evaluation")
    rollout_logprobs: list[float | None] = col(pa.list_(F32), "log-probability under the policy that sampled it, after temperature; null if not sampled, or an evaluation")
    version_spans: list[dict] = col(SPANS, "from token `start` on, `policy_version` computed it; strictly increasing starts, the first is the first sampled token")
    policy_version_min: int | None = col(I64, "oldest version in the spans", nullable=True)
    policy_version_max: int | None = col(I64, "newest version in the spans", nullable=True)
    policy_version_admitted: int = col(I64, "newest trained version when it was admitted")
    finish_reason: str = col(WORD, "stop, length, abort, context_overflow, timeout or error; decided before any cutting")
    finish_cause: str | None = col(STR, "the cause, where the reason is an abort or an error", nullable=True)
    truncated: bool = col(BOOL, "finish_reason is length")
    eos_sampled: bool = col(BOOL, "the last token ends the sequence and was sampled")
    sampling: dict = col(pa.struct([("temperature", F32), ("top_p", F32), ("top_k", I32), ("seed", I64), ("max_tokens", I32)]), "sampling settings")
    kv_policy: str = col(WORD, "reuse, reuse_partial or recompute: what happened to the KV cache at a weight update")
    engine: str = col(WORD, "engine and its version")
    generator_id: str = col(WORD, "which generator")
    weights_digest: str = col(WORD, "digest of the newest weights it was sampled from")
    tokenizer_digest: str = col(WORD, "digest of the tokenizer's files")
    completion: str = col(STR, "the response as text")
    reward: float | None = col(F32, "reward; null if it could not be graded", nullable=True)
    reward_components: list[tuple[str, float]] | None = col(pa.map_(STR, F32), "what the reward is the sum of", nullable=True)
    reward_status: str | None = col(WORD, "ok, timeout, parse_error, error or pending; a failed grader is not a reward of 0", nullable=True)
    ref_logprobs: list[float | None] | None = col(pa.list_(F32), "log-probability under the reference model at the row's temperature; null where not sampled", nullable=True)
    ref_model: str | None = col(WORD, "the reference model", nullable=True)
    turns: list[dict] = col(pa.list_(pa.struct([("role", STR), ("start", I32), ("end", I32)])), "the turns of the conversation, as token ranges")
    dispatched_at: datetime = col(TIME, "when it left admission")
    first_token_at: datetime | None = col(TIME, "when its first token was sampled", nullable=True)
    finished_at: datetime = col(TIME, "when it ended: the event time")
    scored_at: datetime | None = col(TIME, "when it was graded", nullable=True)


@record("sequence", "1.0")
class Sequence:
    """A row of a micro-batch in `batches`: what a rank needs of one rollout to train on it."""

    step: int = col(I64, "the batch, from 1: trained by version step - 1, it makes version step")
    micro_batch: int = col(I32, "index of the micro-batch in the step; rank r of R takes those with index = r mod R")
    group_id: str = col(STR, "dataset/pass/ordinal")
    sample_index: int = col(I32, "which of the group's samples")
    rollout_id: str = col(STR, "the rollout")
    token_ids: list[int] = col(pa.list_(I32), "prompt and response")
    prompt_length: int = col(I32, "how many of them are the prompt's")
    loss_mask: list[bool] = col(pa.list_(BOOL), "which tokens are trained on")
    rollout_logprobs: list[float | None] = col(pa.list_(F32), "behaviour log-probabilities")
    ref_logprobs: list[float | None] | None = col(pa.list_(F32), "reference log-probabilities", nullable=True)
    version_spans: list[dict] = col(SPANS, "as in the rollout")
    advantage: float = col(F32, "advantage of the sequence within the group that is trained")
    reward: float = col(F32, "its reward")
    temperature: float = col(F32, "sampling temperature")
    truncated: bool = col(BOOL, "finish_reason is length")


@record("manifest", "1.0")
class Manifest:
    """The commit of a step: written after its micro-batches, and only then do they count. `end` closes the run."""

    run_id: str = col(STR, "the run")
    kind: str = col(WORD, "step or end")
    step: int = col(I64, "the step; of `end`: the last step there is")
    micro_batch_offsets: list[int] = col(pa.list_(I64), "offsets of its micro-batches in this topic")
    sequences: int = col(I32, "sequences in the step")
    groups: int = col(I32, "groups in the step")
    trainable_tokens: int = col(I64, "tokens with loss_mask true that have a predecessor")
    tokens: int = col(I64, "all tokens")
    samples: list[dict] = col(pa.list_(SAMPLE), "the samples it spends")
    lag_max: int = col(I32, "largest lag of a row in the step, in steps")
    metrics: list[tuple[str, float]] = col(METRICS, "what the earlier stages measured since the last manifest")
    formed_at: datetime = col(TIME, "when")


@record("outcome", "1.0")
class Outcome:
    """What became of a sample: the ledger's credit side, and the credit for a new one."""

    run_id: str = col(STR, "the run")
    group_id: str = col(STR, "dataset/pass/ordinal")
    sample_index: int = col(I32, "which of the group's samples")
    rollout_id: str | None = col(STR, "the rollout it is said of; null if there was none", nullable=True)
    outcome: str = col(WORD, "trained, evaluated, stale, filtered, late, aborted, dead or end_of_run; duplicate is no final outcome but says that a further rollout came")
    step: int | None = col(I64, "the step that trained it", nullable=True)
    cause: str | None = col(STR, "why, for a person", nullable=True)
    decided_at: datetime = col(TIME, "when")


@record("evaluation", "1.0")
class Evaluation:
    """What the model made of a held-out prompt in a round of evaluation: written with its samples' outcomes."""

    run_id: str = col(STR, "the run")
    policy_version: int = col(I64, "the round: its samples start under this version or a newer one")
    policy_version_max: int | None = col(I64, "the newest version that computed a token of them", nullable=True)
    group_id: str = col(STR, "evaluation:dataset/version/ordinal")
    prompts: int = col(I32, "prompts in the round")
    rewards: list[float | None] = col(pa.list_(F32), "of each sample; null if it has none, which counts as wrong")
    response_tokens: int = col(I64, "tokens of its samples together")
    truncated: int = col(I32, "samples that reached max_tokens")
    decided_at: datetime = col(TIME, "when")


@record("weights", "1.0")
class Weights:
    """A policy version on offer: written after its bytes are complete at `uri`."""

    run_id: str = col(STR, "the run")
    epoch: int = col(I64, "grows when a version is made again with other bytes; (epoch, version) orders events")
    version: int = col(I64, "optimizer steps taken")
    digest: str = col(STR, "sha256 of the bytes")
    uri: str = col(STR, "where they lie")
    encoding: str = col(WORD, "full")
    base_version: int | None = col(I64, "the version a delta applies to", nullable=True)
    bytes: int = col(I64, "their size")
    dtype: str = col(WORD, "dtype of the tensors")
    offered_at: datetime = col(TIME, "when")


@record("ack", "1.0")
class Ack:
    """What a generator made of an offered version."""

    run_id: str = col(STR, "the run")
    generator_id: str = col(STR, "who")
    status: str = col(WORD, "applied or failed")
    epoch: int = col(I64, "as in the event")
    version: int = col(I64, "as in the event")
    digest: str = col(STR, "as in the event")
    cause: str | None = col(STR, "why it failed", nullable=True)
    phases_ms: list[tuple[str, float]] = col(METRICS, "heard, fetch, decode, pack, wait, apply: milliseconds; heard counts from offered_at")
    in_flight: int = col(I32, "sequences that kept their KV cache through it")
    waiting: int = col(I32, "sequences waiting for a slot")
    generated_tokens: int = col(I64, "tokens this engine has sampled so far")
    busy_steps: int = col(I64, "engine steps so far")
    in_flight_sum: int = col(I64, "sum over those steps of the sequences in flight")
    capacity_sum: int = col(I64, "sum over those steps of min(H, sequences it held)")
    at: datetime = col(TIME, "when")


@record("step", "1.0")
class Step:
    """A step that was trained."""

    run_id: str = col(STR, "the run")
    epoch: int = col(I64, "as in the weights event")
    step: int = col(I64, "the step; 0 is the start, before any")
    version_in: int | None = col(I64, "the version that trained it", nullable=True)
    version_out: int = col(I64, "the version it made")
    weights_digest: str = col(STR, "digest of that version")
    metrics: list[tuple[str, float]] = col(METRICS, "its measures, by MLflow name")
    checkpoint_uri: str | None = col(STR, "the checkpoint taken after it", nullable=True)
    finished_at: datetime = col(TIME, "when")


@record("control", "1.0")
class Control:
    """Reaches all jobs: start and wake wake them, end_of_prompts says that no prompt follows, stop ends the run early."""

    run_id: str = col(STR, "the run")
    kind: str = col(WORD, "start (a job was submitted), wake (nothing moves), end_of_prompts or stop")
    reason: str | None = col(STR, "why", nullable=True)
    at: datetime = col(TIME, "when")


@record("dead", "1.0")
class Dead:
    """A record that a stage could not use, with its bytes: the stream goes on without it."""

    run_id: str = col(STR, "the run")
    stage: str = col(WORD, "the stage that refused it")
    topic: str = col(STR, "where it came from")
    cause: str = col(STR, "why, and what to do")
    group_id: str | None = col(STR, "the group, where it could be read", nullable=True)
    sample_index: int | None = col(I32, "the sample, where it could be read", nullable=True)
    original: bytes = col(pa.binary(), "the bytes as they came")
    at: datetime = col(TIME, "when")


RECORDS = (Prompt, Admission, Dispatch, Rollout, Sequence, Manifest, Outcome, Evaluation, Weights, Ack, Step, Control, Dead)


def documentation() -> str:
    """docs/records.md; a test fails when the file and this differ."""
    head = ("# Records\n\nGenerated from `schemas/records.py` (`make docs`). Every message is a self-describing Arrow IPC "
            "stream; per-token lists have the length of `token_ids` and are not shifted.\n\n")
    return head + "\n".join(markdown(r) for r in RECORDS)

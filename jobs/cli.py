"""The command line: `pipelinerl COMMAND`. Settings are flags of every command that needs a run: `--training.lr 1e-5`, the article's
`--actor_gpus 4`, or `training.lr=1e-5`; `--settings FILE` is a TOML file.

Imports what a command needs when it runs: `--help`, and a mistake in a flag, answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import sys
from pathlib import Path

from schemas.settings import ARTICLE_FLAGS, BadSettings, Settings, fields, load

COMMANDS = {
    "run": "start the jobs, load prompts, follow the run to its end",
    "demo": "a tiny model learns unary addition through the whole pipeline, on an embedded local stack",
    "up": "start the local stack: Kafka, Flink, MLflow",
    "down": "stop it",
    "status": "show it, and for whom the run waits: owner, age, limit",
    "submit": "submit one job (generate, preprocess, train) to the Flink cluster",
    "stop": "end a run early: what is formed is still trained, everything else gets its outcome",
    "prompts": "`prompts load SOURCE`: JSONL, Parquet, or reasoning_gym:NAME into the prompts topic",
    "topics": "the run's topics: records, bytes, first and last step",
    "replay": "`replay TOPIC --to FILE.parquet`: a topic up to now, for offline analysis",
    "audit": "prove from the topics that every admitted sample is accounted for",
    "dead": "`dead list | show N [--to FILE] | retry N...`: what stages could not use, and why",
    "eval": "`eval MODEL --prompts SOURCE`: what a model folder answers to held-out prompts, graded: reward, pass@k",
    "package": "build dist/pipelinerl.zip for `flink run -pyfs`",
    "jar": "print the path of the connector jar for `flink run --jarfile`",
}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        sys.exit(2)
    try:
        settings = load(args.settings, flags_of(rest))
        code = globals()[f"_{args.command}"](settings, args)
    except BadSettings as e:
        sys.exit(f"pipelinerl: {e}")
    except _errors() as e:
        sys.exit(f"pipelinerl: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code or 0)


def _errors() -> tuple[type[Exception], ...]:
    """What is said for a person: it names what, where, and what to do. Only modules that are loaded can have raised theirs."""
    named = {"operators.log": ("BrokerAway", "BrokerRefuses", "NoTopic"), "jobs.run": ("RunFailed",), "jobs.prompts": ("BadPrompts",),
             "jobs.dead": ("BadLetter",), "operators.weights": ("BadWeights",), "operators.tasks": ("UnknownTask",),
             "deploy.stack": ("StackError",), "deploy.flink": ("SubmitFailed",),
             "deploy.rest": ("Unreachable",), "deploy.jars": ("JarsAway",), "deploy.models": ("ModelMissing",)}
    return tuple(getattr(sys.modules[m], n) for m, names in named.items() if m in sys.modules for n in names)


def flags_of(tokens: list[str]) -> dict[str, object]:
    """Settings given on the command line: --key value, --key=value, key=value, or --key alone for a switch. Raises BadSettings."""
    known = fields()
    flags: dict[str, object] = {}
    i = 0
    while i < len(tokens):
        token = tokens[i]
        i += 1
        name, equals, value = token.lstrip("-").partition("=")
        if not equals and not token.startswith("--"):
            raise BadSettings(f"unexpected argument {token!r}: settings are --key value or key=value")
        key = next((k for k in (name, name.replace("-", "_")) if k in ARTICLE_FLAGS or k in known or k.startswith("training.loss.")), None)
        if key is None:
            close = difflib.get_close_matches(name, [*ARTICLE_FLAGS, *known], n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else "`pipelinerl run --help` lists them"
            raise BadSettings(f"unknown setting {name!r}; {hint}")
        if not equals:
            annotation = known.get(ARTICLE_FLAGS.get(key, key), (None,))[0]
            takes_value = i < len(tokens) and not tokens[i].startswith("--") and not (annotation is bool and "=" in tokens[i])
            if not takes_value and annotation is not bool:
                raise BadSettings(f"{name} needs a value")
            value = tokens[i] if takes_value else "true"
            i += takes_value
        flags[key] = json.loads(value) if value[:1] in "[{" and value else value
    return flags


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--settings", type=Path, metavar="FILE", help="settings as a TOML file")
    parser = argparse.ArgumentParser(prog="pipelinerl", description="Reinforcement learning for language models as a stream.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made, epilog = {}, _settings_help()
    for name, text in COMMANDS.items():
        made[name] = commands.add_parser(name, help=text, description=text, parents=[shared], allow_abbrev=False,
                                         formatter_class=argparse.RawDescriptionHelpFormatter, epilog=epilog)
    for name in ("run", "prompts", "eval"):
        _prompt_options(made[name])
    for name in ("run", "prompts"):
        made[name].add_argument("--passes", type=int, default=1, help="passes over the data set")
    made["eval"].add_argument("model", type=Path, metavar="MODEL", help="folder in Hugging Face form")
    made["eval"].add_argument("--prompts", metavar="SOURCE", required=True, help="a JSONL or Parquet file, or reasoning_gym:NAME")
    made["eval"].add_argument("--samples", type=int, default=1, help="samples a prompt, at generation.temperature")
    made["eval"].add_argument("--greedy", action="store_true", help="the most probable answer instead of a sample")
    made["eval"].add_argument("--right", type=float, default=1.0, help="reward from which on an answer counts as right")
    made["eval"].add_argument("--to", type=Path, metavar="FILE", help="keep the graded rollouts, .parquet")
    made["run"].add_argument("--prompts", metavar="SOURCE", help="load these first; a JSONL or Parquet file, or reasoning_gym:NAME")
    made["run"].add_argument("--held-out", metavar="SOURCE", help="prompts of evaluation (evaluation.every), read like those of "
                             "--prompts; a procedural task gives others than there")
    made["run"].add_argument("--held-out-limit", type=int, metavar="N", help="no more of them than this; of a procedural task 64")
    made["run"].add_argument("--dry-run", action="store_true", help="print the resolved topology and end")
    made["run"].add_argument("--stream", action="store_true", help="prompts go on arriving: do not end with those that are there")
    made["run"].add_argument("--resume", action="store_true", help="go on with a run whose topics exist")
    made["demo"].add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    made["demo"].add_argument("--seed", type=int, default=0)
    made["submit"].add_argument("job", choices=("generate", "preprocess", "train"))
    made["submit"].add_argument("--from-checkpoint", metavar="PATH", help="Flink checkpoint or savepoint to start from")
    made["prompts"].add_argument("action", choices=("load",))
    made["prompts"].add_argument("source", metavar="SOURCE")
    made["prompts"].add_argument("--held-out", action="store_true", help="never to be trained on: for rounds of evaluation")
    made["replay"].add_argument("topic", metavar="TOPIC", help="name without the run's prefix, or whole")
    made["replay"].add_argument("--to", type=Path, required=True, metavar="FILE", help=".parquet or .arrow")
    made["dead"].add_argument("action", choices=("list", "show", "retry"))
    made["dead"].add_argument("numbers", metavar="N", nargs="*", type=int, help="from `dead list`; `retry` without any takes all")
    made["dead"].add_argument("--to", type=Path, metavar="FILE", help="`show`: write the bytes as they came")
    made["stop"].add_argument("--reason", default="asked for on the command line")
    made["package"].add_argument("--to", type=Path, default=Path("dist/pipelinerl.zip"))
    return parser


def _settings_help() -> str:
    lines = ["settings (flags, TOML, environment PIPELINERL_SECTION__KEY):"]
    article = {v: k for k, v in ARTICLE_FLAGS.items()}
    for key, (_, default, text) in fields().items():
        also = f" (--{article[key]})" if key in article else ""
        lines.append(f"  --{key}{also} [{default}]\n        {text}")
    return "\n".join(lines).replace("%", "%%")


def _prompt_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-column", default="prompt")
    parser.add_argument("--answer-column", default="answer")
    parser.add_argument("--task", help="grader of every prompt")
    parser.add_argument("--task-column", help="column that names the grader")
    parser.add_argument("--id-column", help="column that names the prompt")
    parser.add_argument("--size", type=int, help="how many problems of a procedural task")
    parser.add_argument("--limit", type=int, help="no more than this many prompts")
    parser.add_argument("--prompt-seed", type=int, default=0, help="seed of a procedural task")


def _source_options(args: argparse.Namespace) -> dict:
    return {"prompt_column": args.prompt_column, "answer_column": args.answer_column, "task": args.task, "task_column": args.task_column,
            "id_column": args.id_column, "size": args.size, "seed": args.prompt_seed, "limit": args.limit}


def topology(settings: Settings) -> str:
    """What `run --dry-run` prints."""
    s, g, t = settings, settings.generation, settings.training
    n = s.grouping.group_size
    what = "GPUs" if _gpus() else "no GPU here: actor_gpus and trainer_gpus count engines and ranks on the CPU"
    flink = s.stack.flink_rest or f"127.0.0.1:{s.stack.flink_rest_port}"
    return "\n".join([
        f"run {s.run.id}: {s.run_dir}",
        f"  services    broker {s.kafka.bootstrap}; Flink {flink}; MLflow {s.mlflow.uri if s.mlflow.enabled else 'off'}",
        f"  topics      {s.run.id}.*",
        f"  devices     {what}",
        f"  generate    {g.engines} engine(s) x H = {g.batch} sequences in flight, {g.kv_cache_mode} KV cache, "
        f"tensor parallel {g.tensor_parallel}",
        f"  admission   at most {s.credit} samples unresolved = (max_lag {t.max_lag} + 1) * B: {s.credit // n} groups of {n}"
        + (f"; by turns: all of them under one version, then {t.max_lag + 1} steps" if s.run.mode == "conventional" else ""),
        f"  preprocess  reward x {s.reward.parallelism}, reference x {s.reference.parallelism if s.reference.enabled else 0}, "
        f"one sequencer, {s.packing.pipeline_depth} step(s) ahead",
        f"  train       {t.ranks} rank(s), ZeRO {t.zero_stage}, {t.dtype}, B = {t.batch}, loss {t.loss.kind}, "
        f"checkpoint every {t.checkpoint_every} steps",
        *([f"  evaluation  every {s.evaluation.every} versions, {s.evaluation.samples} sample(s) a held-out prompt"
           + (", greedy" if s.evaluation.greedy else "")] if s.evaluation.every else []),
        f"  ends        {'after step ' + str(s.run.max_steps) if s.run.max_steps else 'with the prompts'}",
    ])


def _require_model(folder: Path, what: str) -> None:
    if not (folder / "config.json").is_file():
        raise BadSettings(f"{what} is no model folder: it needs a config.json (Hugging Face form)")


def _eval(settings: Settings, args: argparse.Namespace) -> None:
    _require_model(args.model, f"MODEL {args.model}")
    from jobs.evaluate import evaluate, report
    from jobs.prompts import prompts_of

    prompts = list(prompts_of(args.prompts, **_source_options(args)))
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(args.model.absolute())})})
    print(report(evaluate(settings, prompts, samples=args.samples, greedy=args.greedy, right=args.right, to=args.to)))


def _gpus() -> int:
    return len([d for d in Path("/dev").glob("nvidia[0-9]*")])


def _run(settings: Settings, args: argparse.Namespace) -> int:
    if args.dry_run:
        print(topology(settings))
        return 0
    _require_model(Path(settings.model.path), f"model.path {settings.model.path!r}")
    if args.held_out is not None and settings.evaluation.every is None:
        raise BadSettings("--held-out SOURCE does nothing without --evaluation.every N, the versions from one round to the next")
    if args.held_out is not None and args.prompts is None:
        raise BadSettings("--held-out SOURCE is loaded with --prompts; by itself: `pipelinerl prompts load SOURCE --held-out`")
    from jobs.run import Run, RunFailed, begun

    print(topology(settings))
    with _stack(settings):
        if not args.resume and begun(settings):
            raise RunFailed(f"the topics of run {settings.run.id!r} hold records already: give another --run.id, or --resume to go on")
        made = Run(settings).go((lambda s: _load(s, args)) if args.prompts else None, end_of_prompts=not args.stream)
    return _show(settings, made)


def _load(settings: Settings, args: argparse.Namespace):
    """The prompts of a run, the held-out ones first."""
    from jobs.prompts import held_out_options, load_prompts

    options = _source_options(args)
    if args.held_out:
        of_them = held_out_options(args.held_out, args.held_out_limit, args.prompt_seed)
        load_prompts(settings, args.held_out, held_out=True, **options | of_them)
    return load_prompts(settings, args.prompts, passes=args.passes, **options)


def _show(settings: Settings, made: dict) -> int:
    print(json.dumps(made, indent=1))
    print(f"summary, picture and model: {os.path.relpath(settings.run_dir)}")
    if not made["accounting_adds_up"]:
        print("the accounting does not add up: the run has failed (`pipelinerl audit` names each sample)", file=sys.stderr)
        return 1
    return 0


def _stack(settings: Settings):
    """The local stack, started if it is not up; nothing where the settings name a broker or a Flink cluster elsewhere."""
    from deploy.stack import Stack

    stack = Stack(settings.stack)
    elsewhere = settings.stack.flink_rest is not None or settings.kafka.bootstrap != stack.kafka_bootstrap
    return contextlib.nullcontext() if elsewhere else stack.borrowed_or_owned()


def _demo(settings: Settings, args: argparse.Namespace) -> int:
    from jobs.demo import demo

    return _show(*demo(args.model, args.seed, args.settings))


def _up(settings: Settings, args: argparse.Namespace) -> int:
    from deploy.stack import Stack

    stack = Stack(settings.stack)
    stack.up(owned=False)
    return _status(settings, args)


def _down(settings: Settings, args: argparse.Namespace) -> int:
    from deploy.stack import Stack

    Stack(settings.stack).down()
    return 0


def _status(settings: Settings, args: argparse.Namespace) -> int:
    from deploy.stack import Stack, table

    services = Stack(settings.stack).status()
    print(table(services))
    from operators import waits
    from operators.log import BrokerAway

    with contextlib.suppress(BrokerAway):  # of which the table above tells
        found = waits.waits_of(settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"timeout_s": 3.0})}))
        print(f"\nrun {settings.run.id}: " + ("no topics" if found is None else "\n" + waits.table(found)))
    return 0 if services and all(s.state == "up" for s in services) else 1


def _submit(settings: Settings, args: argparse.Namespace) -> int:
    from deploy import flink

    print(flink.submit(args.job, settings, from_checkpoint=args.from_checkpoint))
    return 0


def _stop(settings: Settings, args: argparse.Namespace) -> int:
    from operators.control import say

    say(settings, "stop", args.reason)
    return 0


def _prompts(settings: Settings, args: argparse.Namespace) -> int:
    from jobs.prompts import load_prompts
    from operators.log import ensure_topics

    ensure_topics(settings.kafka, settings.run.id)
    report = load_prompts(settings, args.source, passes=args.passes, held_out=args.held_out, **_source_options(args))
    print(f"{report.added} prompts added to {report.topic}, {report.already} were there already; data set {report.dataset}")
    return 0


def _topics(settings: Settings, args: argparse.Namespace) -> int:
    from jobs.replay import table, topics

    print(table(topics(settings.kafka, settings.run.id)))
    return 0


def _replay(settings: Settings, args: argparse.Namespace) -> int:
    from jobs.replay import replay
    from schemas.topics import ALL, topic

    name = topic(settings.run.id, args.topic) if args.topic in ALL else args.topic
    rows = replay(settings.kafka, name, args.to)
    print(f"{rows} rows of {name} -> {args.to}")
    return 0


def _audit(settings: Settings, args: argparse.Namespace) -> int:
    from operators.accounting import account_topics

    accounts = account_topics(settings.kafka, settings.run.id)
    print(json.dumps(accounts.summary(), indent=1))
    for wrong in accounts.wrong:
        print(wrong, file=sys.stderr)
    return 0 if accounts.adds_up else 1


def _dead(settings: Settings, args: argparse.Namespace) -> int:
    from jobs import dead

    found = dead.letters(settings.kafka, settings.run.id)
    chosen = {n: dead.pick(found, n) for n in args.numbers or (() if args.action == "show" else found)}
    if args.action == "list":
        print(dead.table(chosen))
    elif args.action == "retry":
        print(f"{dead.retry(settings.kafka, settings.run.id, list(chosen.values()))} sent again")
    elif len(chosen) != 1:
        raise dead.BadLetter("`dead show` takes one number from `dead list`")
    else:
        (letter,) = chosen.values()
        print(dead.show(letter))
        if args.to is not None:
            args.to.write_bytes(letter.original)
    return 0


def _package(settings: Settings, args: argparse.Namespace) -> int:
    from deploy.flink import package

    print(package(args.to))
    return 0


def _jar(settings: Settings, args: argparse.Namespace) -> int:
    from deploy.jars import connector_jar

    print(connector_jar())
    return 0


if __name__ == "__main__":
    main()

"""Four engines under one stream of versions: a straggler holds nobody up, and a newcomer joins in the middle."""

import itertools
import signal

from deploy.models import make_demo_model
from jobs.prompts import prompts_of
from schemas.record import decode
from schemas.records import Rollout
from tests.benchmarks.generate_job import GenerateJob
from tests.chaos.driver import FIND
from tests.integration.conftest import SMALL
from tests.integration.test_pipeline import until

ENGINES = 4
EVERYBODY = {f"generator-{i}" for i in range(ENGINES)}


def test_every_engine_gets_every_version_at_its_own_pace(stack, tmp_path):
    settings = stack.settings("four", **SMALL | {
        "model.path": str(make_demo_model(tmp_path / "model", seed=0)), "generation.engines": ENGINES, "generation.batch": 4,
        "training.max_lag": 100})
    with GenerateJob(stack, settings) as job:

        def hold(version: int) -> set[str]:
            job.check()
            return {a.generator_id for a in job.acknowledged() if a.version == version}

        def engines():
            return FIND["engine"](stack)

        # Never more than some seconds' work: four busy engines would leave two cores nothing for broker and Flink.
        prompts = iter(prompts_of("demo", size=96, seed=0))
        job.feed(list(itertools.islice(prompts, 24)))
        until("four engines that hold version 0", lambda: hold(0) == EVERYBODY, 240)
        for version in (1, 2):
            job.publish()
            until(f"four engines that hold version {version}", lambda v=version: hold(v) == EVERYBODY)

        straggler = engines()[0]
        straggler.send_signal(signal.SIGSTOP)
        try:
            for version in (3, 4):
                job.feed(list(itertools.islice(prompts, 12)))
                job.publish()
                until(f"three engines that hold version {version}", lambda v=version: len(hold(v)) == ENGINES - 1)
        finally:
            straggler.send_signal(signal.SIGCONT)
        until("the straggler at version 4", lambda: hold(4) == EVERYBODY)

        job.rollouts.wait(48 * settings.grouping.group_size, 120, job.check)
        dying = engines()[-1]
        dying.send_signal(signal.SIGSTOP)  # it shall hold samples when it dies
        job.feed(list(prompts))
        job.rollouts.wait(60 * settings.grouping.group_size, 120, job.check)
        dying.send_signal(signal.SIGKILL)
        job.publish()
        until("four engines that hold version 5, one of them new", lambda: hold(5) == EVERYBODY)
        job.rollouts.wait(96 * settings.grouping.group_size, 120, job.check)
        rollouts = [r for a in job.rollouts.arrivals for r in decode(Rollout, a.value)]
        assert len({(r.group_id, r.sample_index) for r in rollouts}) == 96 * settings.grouping.group_size
        assert {r.generator_id for r in rollouts} == EVERYBODY
        again = {r.policy_version_min for r in rollouts if r.attempt}
        assert again and again <= {4, 5}, "the newcomer served nothing before it held what was the newest when it came"

/** Worker: processing, progress, logs, failures and retries, leases and shutdown through the official client. */
import { DelayedError, UnrecoverableError } from 'bunqueue/client';
import {
  addNamed, check, eventually, fail, finish, handWorker, holds, never, openEvents, openQueue, openWorker, queueName,
  refused, same, take,
} from './check';

await check('every job is processed once and its result is kept', async () => {
  const name = queueName('process');
  const queue = openQueue(name);
  const seen: string[] = [];
  openWorker(name, async (job) => {
    seen.push(job.name);
    return { echo: (job.data as { name: string }).name };
  }, { concurrency: 4 });
  const added = await addNamed(queue, Array.from({ length: 50 }, (_, index) => `j${index}`));
  await eventually(async () => (await queue.getCompletedCount()) === 50, 'fifty completed');
  same(new Set(seen).size, 50, 'distinct jobs seen');
  same(seen.length, 50, 'jobs seen');
  same((await queue.getJob(added[49]!))!.returnvalue, { echo: 'data-j49' }, 'result of the last');
});

await check('the processor sees name, data, options and first attempt', async () => {
  const name = queueName('fields');
  const queue = openQueue(name);
  let seen: unknown;
  const worker = openWorker(name, async (job) => {
    seen = [job.name, job.data, job.attemptsMade, job.priority, job.opts.attempts, typeof job.token, job.queueName];
  });
  const { id } = await queue.add('greet', { who: 'you' }, { priority: 3, attempts: 5 });
  await eventually(async () => (await queue.getJobState(id)) === 'completed', 'completed');
  same(seen, ['greet', { who: 'you' }, 0, 3, 5, 'string', name], 'job in the processor');
  holds(worker.isRunning(), 'worker runs on');
});

await check('progress with a message and log lines can be read while the job runs', async () => {
  const name = queueName('progress');
  const queue = openQueue(name);
  const gate = Promise.withResolvers<void>();
  const reported: number[] = [];
  const worker = openWorker(name, async (job) => {
    await job.updateProgress(40, 'almost half');
    await job.log('reading');
    await job.log('writing');
    await gate.promise;
  });
  worker.on('progress', (_, progress) => reported.push(progress));
  const { id } = await queue.add('slow', {});
  await eventually(async () => (await queue.getJobLogs(id)).count === 2, 'two log lines');
  same((await queue.getJob(id))!.progress, 40, 'progress while active');
  same((await queue.getJobLogs(id)).logs, ['[info] reading', '[info] writing'], 'logs');
  gate.resolve();
  await eventually(async () => (await queue.getJobState(id)) === 'completed', 'completed');
  same((await queue.getJobLogs(id)).count, 2, 'logs after completion');
  same(reported, [40], 'progress events of the worker');
});

await check('a failure whose text was cut in the middle of a character is recorded', async () => {
  const name = queueName('half');
  const queue = openQueue(name);
  const half = 'cut \u{1f600}'.slice(0, 5);
  openWorker(name, async (job) => {
    await job.log(half);
    throw new UnrecoverableError(half);
  });
  const { id } = await queue.add('half', {});
  await eventually(async () => (await queue.getJobState(id)) === 'failed', 'failed');
  holds((await queue.getJob(id))!.failedReason!.startsWith('cut \ufffd'), 'its reason');
  holds((await queue.getJobLogs(id)).logs[0]!.startsWith('[info] cut \ufffd'), 'its log');
});

await check('a failing job is retried with backoff until it succeeds', async () => {
  const name = queueName('retry');
  const queue = openQueue(name);
  const starts: number[] = [];
  const attempts: number[] = [];
  const worker = openWorker(name, async (job) => {
    starts.push(Date.now());
    attempts.push(job.attemptsMade);
    if (starts.length < 3) throw new Error(`try ${starts.length}`);
    return 'third time';
  });
  const failures: string[] = [];
  worker.on('failed', (_, error) => failures.push(error.message));
  const { id } = await queue.add('flaky', {}, { attempts: 3, backoff: { type: 'fixed', delay: 100 } });
  await eventually(async () => (await queue.getJobState(id)) === 'completed', 'completed');
  same(attempts, [0, 1, 2], 'attemptsMade seen by the processor');
  same(failures, ['try 1', 'try 2'], 'failed events');
  for (const gap of [starts[1]! - starts[0]!, starts[2]! - starts[1]!]) {
    holds(gap >= 75 && gap < 1_500, `fixed backoff of 100 ms took ${gap} ms`);
  }
  same((await queue.getJob(id))!.returnvalue, 'third time', 'result');
});

await check('a job that keeps failing ends as failed with its attempts', async () => {
  const name = queueName('exhaust');
  const queue = openQueue(name);
  openWorker(name, async () => fail('always'));
  const { id } = await queue.add('hopeless', {}, { attempts: 2, backoff: 10 });
  await eventually(async () => (await queue.getJobState(id)) === 'failed', 'failed');
  const job = (await queue.getJob(id))!;
  same([job.attemptsMade, job.failedReason], [2, 'always'], 'attempts and reason');
  const [entry] = await queue.getDlqAsync();
  same([entry!.job.id, entry!.reason, entry!.attempts.length], [id, 'max_attempts_exceeded', 2], 'dead letter');
});

await check('UnrecoverableError is not retried', async () => {
  const name = queueName('unrecoverable');
  const queue = openQueue(name);
  let runs = 0;
  openWorker(name, async () => {
    runs++;
    throw new UnrecoverableError('do not try again');
  });
  const { id } = await queue.add('once', {}, { attempts: 5, backoff: 1 });
  await eventually(async () => (await queue.getJobState(id)) === 'failed', 'failed');
  await never(() => runs > 1, 'the job was tried again', 200);
  same((await queue.getJob(id))!.failedReason, 'do not try again', 'reason');
});

await check('DelayedError postpones without costing an attempt', async () => {
  const name = queueName('delayed-error');
  const queue = openQueue(name);
  const attempts: number[] = [];
  openWorker(name, async (job) => {
    attempts.push(job.attemptsMade);
    if (attempts.length === 1) throw new DelayedError('not yet');
  });
  const { id } = await queue.add('later', {}, { backoff: 50 });
  await eventually(async () => (await queue.getJobState(id)) === 'completed', 'completed');
  same(attempts, [0, 0], 'attemptsMade');
});

await check('concurrency is used in full and never exceeded', async () => {
  const name = queueName('concurrency');
  const queue = openQueue(name);
  const gate = Promise.withResolvers<void>();
  let running = 0;
  let peak = 0;
  openWorker(name, async () => {
    peak = Math.max(peak, ++running);
    await gate.promise;
    running--;
  }, { concurrency: 5 });
  await addNamed(queue, Array.from({ length: 12 }, (_, index) => `c${index}`));
  await eventually(() => running === 5, 'five at once');
  same(await queue.getActiveCount(), 5, 'active on the server');
  gate.resolve();
  await eventually(async () => (await queue.getCompletedCount()) === 12, 'all completed');
  same(peak, 5, 'peak');
});

await check('two workers share a queue without overlap', async () => {
  const name = queueName('share');
  const queue = openQueue(name);
  const seen: string[] = [];
  for (let index = 0; index < 2; index++) {
    openWorker(name, async (job) => void seen.push(job.id), { concurrency: 8, pollTimeout: 2_000 });
  }
  await addNamed(queue, Array.from({ length: 200 }, (_, index) => `s${index}`));
  await eventually(async () => (await queue.getCompletedCount()) === 200, 'all completed');
  same([seen.length, new Set(seen).size], [200, 200], 'jobs seen');
});

await check('a long poll is woken by an add', async () => {
  const name = queueName('poll');
  const queue = openQueue(name);
  const done = Promise.withResolvers<number>();
  const worker = openWorker(name, async () => done.resolve(Date.now()), { pollTimeout: 10_000 });
  await worker.waitUntilReady();
  await eventually(async () => (await queue.getWorkersCount()) === 1, 'worker registered');
  const start = Date.now();
  await queue.add('wake', {});
  const delay = (await done.promise) - start;
  holds(delay < 5_000, `woken after ${delay} ms, and not when its poll ended`);
});

await check('waitUntilFinished gives the result, also of a job that is done', async () => {
  const name = queueName('wait');
  const queue = openQueue(name);
  const events = await openEvents(name);
  const gate = Promise.withResolvers<void>();
  openWorker(name, async () => {
    await gate.promise;
    return { answer: 42 };
  });
  const job = await queue.add('ask', {});
  const waits = [job.waitUntilFinished(events, 8_000), queue.waitJobUntilFinished(job.id, events, 8_000)];
  gate.resolve();
  same(await Promise.all(waits), [{ answer: 42 }, { answer: 42 }], 'while it runs');
  same(await job.waitUntilFinished(events, 8_000), { answer: 42 }, 'afterwards');
  same(await queue.waitJobUntilFinished(job.id, events, 8_000), { answer: 42 }, 'afterwards, by events');
});

await check('waitUntilFinished ends early when the job fails', async () => {
  const name = queueName('wait-fail');
  const queue = openQueue(name);
  const events = await openEvents(name);
  const job = await queue.add('doomed', {}, { attempts: 1 });
  const start = Date.now();
  const waits = Promise.allSettled([job.waitUntilFinished(events, 10_000), queue.waitJobUntilFinished(job.id, events, 10_000)]);
  openWorker(name, async () => fail('doomed'));
  same((await waits).map((outcome) => outcome.status), ['rejected', 'rejected'], 'both waits');
  holds(Date.now() - start < 5_000, `they ended after ${Date.now() - start} ms`);
});

await check('a job longer than its lock is renewed and runs once', async () => {
  const name = queueName('renew');
  const queue = openQueue(name);
  let runs = 0;
  const options = { lockDuration: 1_000, heartbeatInterval: 200, concurrency: 2 };
  openWorker(name, async () => {
    runs++;
    await Bun.sleep(2_500);
    return 'done';
  }, options);
  const [one, two] = await addNamed(queue, ['long', 'longer']);
  await eventually(async () => (await queue.getCompletedCount()) === 2, 'both completed');
  same(runs, 2, 'runs');
  for (const id of [one!, two!]) {
    const job = (await queue.getJob(id))!;
    same([job.attemptsMade, job.stalledCounter, job.returnvalue], [0, 0, 'done'], 'job');
  }
});

await check('an expired lease is handed out again with a new token', async () => {
  const name = queueName('expire');
  const queue = openQueue(name);
  const worker = handWorker(name, { lockDuration: 300 });
  const { id } = await queue.add('lost', {}, { attempts: 5 });
  const first = await take(worker);
  let second: { id: string; token: string; attempts: number } | undefined;
  await eventually(async () => (second = (await worker.getNextJob()) as typeof second), 'handed out again', 12_000);
  same([String(second!.id), second!.attempts], [id, 1], 'job');
  holds(second!.token !== first.token, 'the token is new');
  await refused(queue.moveJobToCompleted(id, 'late', first.token), /Invalid or expired lock token for job/, 'late ack');
  await queue.moveJobToCompleted(id, 'good', second!.token);
  same((await queue.getJob(id))!.returnvalue, 'good', 'result');
});

await check('extendJobLocks counts the locks it extended', async () => {
  const name = queueName('extend');
  const queue = openQueue(name);
  const worker = handWorker(name);
  await addNamed(queue, ['a', 'b']);
  const held = [await take(worker), await take(worker)];
  const jobIds = held.map((job) => String(job.id));
  same(await worker.extendJobLocks(jobIds, [held[0]!.token, 'wrong'], 60_000), 1, 'extended');
});

await check('a job past its timeout fails on the server', async () => {
  const name = queueName('timeout');
  const queue = openQueue(name);
  openWorker(name, async () => Bun.sleep(3_000));
  const { id } = await queue.add('slow', {}, { timeout: 200, attempts: 1 });
  await eventually(async () => (await queue.getJobState(id)) === 'failed', 'failed');
  const [entry] = await queue.getDlqAsync();
  same([entry!.reason, entry!.error], ['timeout', 'Job timeout exceeded'], 'dead letter');
});

await check('getWorkers lists the workers of the queue', async () => {
  const name = queueName('workers');
  const queue = openQueue(name);
  const worker = openWorker(name, async () => undefined, { concurrency: 3 });
  openWorker(queueName('elsewhere'), async () => undefined);
  await eventually(async () => (await queue.getWorkersCount()) === 1, 'registered');
  const [info] = await queue.getWorkers();
  same([info!.queues, info!.concurrency, info!.pid, info!.status], [[name], 3, process.pid, 'active'], 'worker');
  holds(typeof info!.uptime === 'number' && info!.hostname.length > 0, 'uptime and host name');
  await worker.close();
  same(await queue.getWorkersCount(), 0, 'after close');
});

await check('worker heartbeats report what it has done', async () => {
  const name = queueName('heartbeat');
  const queue = openQueue(name);
  openWorker(name, async (job) => (job.name === 'bad' ? fail('bad') : undefined), { heartbeatInterval: 50 });
  await addNamed(queue, ['good', 'fine']);
  await queue.add('bad', {}, { attempts: 1 });
  const figures = async () => {
    const [info] = await queue.getWorkers();
    return info?.processedJobs === 2 && info.failedJobs === 1;
  };
  await eventually(figures, 'two processed and one failed');
});

await check('close waits for the running job and acknowledges it', async () => {
  const name = queueName('close');
  const queue = openQueue(name);
  const started = Promise.withResolvers<void>();
  const worker = openWorker(name, async () => {
    started.resolve();
    await Bun.sleep(400);
    return 'finished';
  });
  const first = await queue.add('last', {});
  await started.promise;
  const second = await queue.add('next', {});
  await worker.close();
  same([await first.getState(), (await queue.getJob(first.id))!.returnvalue], ['completed', 'finished'], 'running job');
  same(await second.getState(), 'waiting', 'job that came too late');
});

await check('a closed worker swallows no job with its open poll', async () => {
  const name = queueName('swallow');
  const queue = openQueue(name);
  const worker = openWorker(name, async () => undefined, { pollTimeout: 10_000 });
  await worker.waitUntilReady();
  await eventually(async () => (await queue.getWorkersCount()) === 1, 'worker registered');
  await worker.close();
  const { id } = await queue.add('for-another', {});
  await never(async () => (await queue.getJobState(id)) !== 'waiting', 'the dead poll took the job', 150);
  same(String((await take(handWorker(name))).id), id, 'the next worker gets it');
});

await check('a forced close returns the running job without an attempt', async () => {
  const name = queueName('force');
  const queue = openQueue(name);
  const started = Promise.withResolvers<void>();
  const worker = openWorker(name, async () => {
    started.resolve();
    await Bun.sleep(15_000);
  });
  const { id } = await queue.add('cut', {});
  await started.promise;
  await worker.close(true);
  await eventually(async () => (await queue.getJobState(id)) === 'waiting', 'back in the queue', 5_000);
  same((await take(handWorker(name))).attempts, 0, 'attempts');
});

await check('a processor may move its own job', async () => {
  const name = queueName('self');
  const queue = openQueue(name);
  let visits = 0;
  openWorker(name, async (job) => {
    if (job.name === 'complete') await job.moveToCompleted('by hand', job.token);
    if (job.name === 'fail') await job.moveToFailed(new UnrecoverableError('by hand'), job.token);
    if (job.name === 'discard') job.discard();
    if (job.name === 'delay' && ++visits === 1) await job.moveToDelayed(Date.now() + 60, job.token);
  });
  const [complete, failed, discard, delay] = await addNamed(queue, ['complete', 'fail', 'discard', 'delay']);
  const state = (id?: string) => queue.getJobState(id!);
  await eventually(async () => (await state(delay)) === 'completed', 'the delayed one comes back');
  await eventually(async () => (await state(discard)) === 'failed', 'discarded');
  same([await state(complete), await state(failed), visits], ['completed', 'failed', 2], 'the others');
  same((await queue.getJob(complete!))!.returnvalue, 'by hand', 'result');
});

await check('worker options removeOnComplete and removeOnFail are applied', async () => {
  const name = queueName('forget');
  const queue = openQueue(name);
  openWorker(name, async (job) => (job.name === 'bad' ? fail('bad') : 1), { removeOnComplete: true, removeOnFail: true });
  const good = await queue.add('good', {});
  const bad = await queue.add('bad', {}, { attempts: 1 });
  await eventually(async () => (await good.getState()) === 'unknown' && (await bad.getState()) === 'unknown', 'both gone');
  same(await queue.getFailedCount(), 0, 'failed');
});

await check('a worker with a lock of several days gets its jobs', async () => {
  const name = queueName('days');
  const queue = openQueue(name);
  openWorker(name, async () => 'done', { lockDuration: 5 * 86_400_000 });
  const { id } = await queue.add('long', {});
  await eventually(async () => (await queue.getJobState(id)) === 'completed', 'completed');
});

await check('jobs without locks are processed too', async () => {
  const name = queueName('lockless');
  const queue = openQueue(name);
  openWorker(name, async () => 'free', { useLocks: false, concurrency: 2 });
  const added = await addNamed(queue, ['a', 'b', 'c']);
  await eventually(async () => (await queue.getCompletedCount()) === 3, 'all completed');
  same((await queue.getJob(added[2]!))!.returnvalue, 'free', 'result');
});

await check('a batch worker gets its jobs together', async () => {
  const name = queueName('batch');
  const queue = openQueue(name);
  await addNamed(queue, ['a', 'b', 'c', 'd']);
  const sizes: number[] = [];
  openWorker(name, async (job) => void sizes.push(job.getBatch!().length), { batch: { size: 4, minSize: 4, timeout: 2_000 } });
  await eventually(async () => (await queue.getCompletedCount()) === 4, 'all completed');
  same(sizes, [4], 'batch sizes');
});

await check('an absent result stays absent, null stays null', async () => {
  const name = queueName('empty');
  const queue = openQueue(name);
  openWorker(name, async (job) => (job.name === 'null' ? null : undefined));
  const [nothing, nil] = await addNamed(queue, ['nothing', 'null']);
  await eventually(async () => (await queue.getCompletedCount()) === 2, 'both completed');
  same((await queue.getJob(nothing!))!.returnvalue, undefined, 'undefined');
  same((await queue.getJob(nil!))!.returnvalue, null, 'null');
});

await check('repeat runs the job again until its limit', async () => {
  const name = queueName('repeat');
  const queue = openQueue(name);
  const seen: string[] = [];
  openWorker(name, async (job) => void seen.push(job.id));
  await queue.add('tick', {}, { repeat: { every: 60, limit: 2 } });
  await eventually(() => seen.length === 3, 'first run and two repetitions');
  await never(() => seen.length > 3, 'it ran once too often', 300);
  same(new Set(seen).size, 3, 'each run is a job of its own');
});

finish();
